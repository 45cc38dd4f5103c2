"""Torch's generator, which no model that is traced may set, also not by ``torch.random.fork_rng``.

A trace shows what is drawn, and not that the generator was put back or seeded before: numbers that are to be the same
in every call, or in two places, would be others each time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from autoparallel.capture.tracing.trace import listening, refuse


def _refused_in_a_trace(name: str) -> Callable[..., Any]:
    """The function of torch of that name, which raises ``CaptureError`` where the model that is traced calls it."""
    original = getattr(torch.random, name)

    def setter(*args: Any, **options: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if listening() is None or caller.startswith("torch._dynamo"):  # puts back what its tracing has moved
            return original(*args, **options)
        raise refuse(
            f"the model sets torch's generator (torch.{name})",
            "draw numbers that are to stay the same once, outside of forward, and keep them in a buffer; seed before "
            "the model is called",
        )

    return setter


NAMES: tuple[tuple[Any, str, Any], ...] = tuple(
    (module, name, _refused_in_a_trace(name))
    for name in ("manual_seed", "seed", "set_rng_state")
    for module in (torch, torch.random)
)
