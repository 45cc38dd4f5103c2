"""Torch's generator, which no model that is traced may set, also not by ``torch.random.fork_rng``.

A trace shows what is drawn, and not that the generator was put back or seeded before: numbers that are to be the same
in every call, or in two places, would be others each time.
"""

from __future__ import annotations

from typing import Any

import torch

from autoparallel.capture.tracing.trace import refused_function

_CURE = (
    "draw numbers that are to stay the same once, outside of forward, and keep them in a buffer; seed before the model "
    "is called"
)

NAMES: tuple[tuple[Any, str, Any], ...] = tuple(
    (module, name, refused_function(getattr(module, name), f"the model sets torch's generator (torch.{name})", _CURE))
    for name in ("manual_seed", "seed", "set_rng_state")
    for module in (torch, torch.random)
)
