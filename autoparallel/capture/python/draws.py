"""Draws that functions make of Python's and numpy's own generators while a model runs."""

from __future__ import annotations

import random
import threading
import time
from types import FrameType

import numpy as np

from autoparallel.graph.python_state import freeze


class Draws:
    """A run's draws, to be made when it begins.

    Attributes:
        checks: how often beartype has drawn.
    """

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._expected, self._are_others, self.checks = self._python, False, 0

    def generators(self) -> list[str]:
        """The generators that have been drawn from."""
        drawn = ["Python's random"] * (self._are_others or random.getstate() != self._expected)
        return drawn + ["numpy.random"] * (freeze(np.random.get_state()) != freeze(self._numpy))

    def put_back(self) -> None:
        """Puts back the states that the generators had."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def pass_over(self, frame: FrameType, is_begun: bool) -> None:
        """Takes a draw as none that beartype makes, which checks the type of one item of a container."""
        if not frame.f_code.co_filename.startswith("<@beartype("):
            return
        if is_begun:
            self._are_others |= random.getstate() != self._expected
        else:
            self._expected = random.getstate()
            self.checks += 1


def drawing_threads() -> list[str]:
    """The names of other threads, where one of them draws from Python's generator at the moment."""
    before = random.getstate()
    time.sleep(0.02)
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    return others if random.getstate() != before else []
