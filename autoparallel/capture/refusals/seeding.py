"""Refusing models that set torch's generator while they run.

A trace shows what is drawn, and not that the generator was put back or seeded before: numbers that are to be the same
in every call, or in two places, would be others each time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autoparallel.graph.captured import CaptureError
from autoparallel.graph.lines import line_of_frame

_SETTERS = ("manual_seed", "seed", "set_rng_state")


@contextmanager
def refuse_seeding() -> Iterator[None]:
    """A context in which a call of ``torch.manual_seed`` and the like, also by ``torch.random.fork_rng``, raises.

    Raises:
        CaptureError: naming the line.
    """
    patches = [patch.object(module, name, _refusal(name)) for module in (torch, torch.random) for name in _SETTERS]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def _refusal(name: str) -> Callable[..., Any]:
    original = getattr(torch.random, name)

    def refuse(*args: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        if str(caller.f_globals.get("__name__")).startswith("torch._dynamo"):  # puts back what its tracing has moved
            return original(*args, **options)
        raise CaptureError(
            f"the model sets torch's generator (torch.{name}) at {line_of_frame(caller)}\n"
            "What to change: draw numbers that are to stay the same once, outside of forward, and keep them in a "
            "buffer; seed before the model is called."
        )

    return refuse
