"""Traces of models that several programs of one test are made of, and plans of a model without ranks.

Tracing takes most of the time in which a small model is compiled, and does not depend on plan, mesh axes or strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.utils import _pytree as pytree

from autoparallel.capture.capture import capture
from autoparallel.capture.settings import CaptureSettings
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured, describe_inputs
from autoparallel.planner import planner
from autoparallel.planner.draft import Draft, draft_captured
from autoparallel.planner.request.request import Request

Captures = dict[tuple[Any, ...], Captured]
_PLAIN = (bool, int, float, str, tuple)  # attributes that tell modules apart


def captured(
    model: nn.Module,
    *args: Any,
    loss_fn: Any = None,
    least_batch: int = 8,
    options: Any = None,
    values: bool = False,
    **kwargs: Any,
) -> Captured:
    """The graph of one call of a model.

    Args:
        options: further settings of a capture.
        values: whether the values of the inputs are at hand.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    specs, rows = describe_inputs(leaves)
    settings = CaptureSettings(least_batch, rows, loss_fn=loss_fn, **(options or {}))
    return capture(model, specs, spec, settings, leaves if values else ())


def draft(model: nn.Module, call: Call, request: Request) -> Draft:
    """The plan of one call of a model in training; meta tensors will do."""
    made = planner.Planner(model, request)
    return draft_captured(made, made.capture(call), call)


@contextlib.contextmanager
def shared_captures(captured: Captures | None = None, name: str = "") -> Iterator[None]:
    """Inside, what was captured serves again for a model of the same modules whose call has equal arguments.

    Args:
        captured: where captures are kept, for several such contexts that share them.
        name: of the model, where more than modules, their plain attributes and tensors tells models apart.
    """
    known = {} if captured is None else captured

    def shared(model: nn.Module, specs: Any, in_spec: Any, settings: CaptureSettings, leaves: Any) -> Captured:
        attributes = [
            [(key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN) or is_dataclass(value)]
            for module in model.modules()
        ]
        named = (*model.named_parameters(), *model.named_buffers())
        tensors = [(path, t.shape, t.dtype, t.requires_grad) for path, t in named]
        others = repr((model, attributes, tensors, specs, in_spec, replace(settings, loss_fn=None)))
        key = name, type(model), settings.loss_fn, others
        if key not in known:
            known[key] = capture(model, specs, in_spec, settings, leaves)
        return known[key].copy()

    with patch.object(planner, "capture", shared):
        yield
