"""Python's profile hook while a model runs: who is called by it, when it is suspended, and whose it was before."""

from __future__ import annotations

import cProfile
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autoparallel import _torch


class Watcher:
    """Has a method that Python calls for each function that runs."""


@contextmanager
def without_model() -> Iterator[None]:
    """Inside, no code of the model runs: which functions run is not looked at, which takes as long as they do."""
    before = sys.getprofile()
    if not isinstance(getattr(before, "__self__", None), Watcher):  # nobody looks, or a profiler of the user's
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(before)


class Suspended(_torch.export.UnnoticedMode):
    """Has no calls traced inside of operators, where no code of the model runs, but in those of control flow."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        with without_model():
            return func(*args, **(kwargs or {}))


def resume(profiler: Any) -> None:
    """Has Python call a profiler again that it called before."""
    if isinstance(profiler, cProfile.Profile):  # up to Python 3.11; no function, which setprofile() would take it for
        profiler.enable()
    elif profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        warnings.warn(
            f"the profiler {type(profiler).__name__} cannot be resumed after the model was traced; start it after the "
            "first call",
            stacklevel=2,
        )
