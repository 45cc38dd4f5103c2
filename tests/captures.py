"""Traces of models that several programs of one test are made of.

Tracing takes most of the time in which a small model is compiled, and does not depend on plan, mesh axes or strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any
from unittest.mock import patch

from torch import nn

from autoparallel.capture.capture import capture
from autoparallel.graph.captured import Captured
from autoparallel.planner import planner

Captures = dict[tuple[Any, ...], Captured]
_PLAIN = (bool, int, float, str, tuple)  # attributes that tell modules apart


@contextlib.contextmanager
def shared_captures(captured: Captures | None = None, name: str = "") -> Iterator[None]:
    """Inside, what was captured serves again for a model of the same modules whose call has equal arguments.

    Args:
        captured: where captures are kept, for several such contexts that share them.
        name: of the model, where more than modules, their plain attributes and tensors tells models apart.
    """
    known = {} if captured is None else captured

    def shared(model: nn.Module, specs: Any, in_spec: Any, *, loss_fn: Any, training: Any, **sizes: Any) -> Captured:
        attributes = [
            [(key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN) or is_dataclass(value)]
            for module in model.modules()
        ]
        named = (*model.named_parameters(), *model.named_buffers())
        tensors = [(path, t.shape, t.dtype, t.requires_grad) for path, t in named]
        key = name, type(model), loss_fn, repr((model, attributes, tensors, training, specs, in_spec, sizes))
        if key not in known:
            known[key] = capture(model, specs, in_spec, loss_fn=loss_fn, training=training, **sizes)
        return known[key].copy()

    with patch.object(planner, "capture", shared):
        yield
