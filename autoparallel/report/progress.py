"""What is being done, while it takes long: a line that comes and goes in a terminal, and records of ``logging``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console

from autoparallel.text import LOGGER, duration


class Progress:
    """The phases of one piece of work.

    Every phase is logged as it ends, at level INFO, with its seconds.

    Args:
        title: what is being worked on.
        is_shown: whether a terminal shows the phase that runs; one rank of many is enough.
        is_printed: whether the error stream gets a line for every phase that has ended, terminal or not.
    """

    def __init__(self, title: str, is_shown: bool = True, is_printed: bool = False) -> None:
        self.title, self.is_shown, self.is_printed = title, is_shown, is_printed
        self._begin = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows a phase while it runs."""
        text, begin = f"{self.title}: {name}", time.perf_counter()
        with self._terminal().status(f"{text} ...") if self._is_seen() else nullcontext():
            yield
        seconds = time.perf_counter() - begin
        LOGGER.info("%s took %s", text, duration(seconds))
        if self.is_printed:
            self._terminal().print(f"{text} {seconds:.1f} s", markup=False)

    def conclude(self, say: Callable[[], str]) -> None:
        """Says in one line what has come of the work, and how long all of it took, where somebody reads it."""
        is_logged = LOGGER.isEnabledFor(logging.INFO)
        if not is_logged and not self._is_seen():
            return
        text = f"{self.title}: {say()}; ready in {duration(time.perf_counter() - self._begin)}"
        if is_logged:
            LOGGER.info(text)
        else:
            self._terminal().print(f"autoparallel: {text}", markup=False, soft_wrap=True)

    def _is_seen(self) -> bool:
        return self.is_shown and self._terminal().is_terminal

    @staticmethod
    def _terminal() -> Console:
        return Console(stderr=True, highlight=False)


UNSHOWN = Progress("a model", is_shown=False)
"""Logs only."""
