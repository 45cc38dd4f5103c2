"""Losses of classes without a reduction, in terms of look-ups.

Decomposing a trace gives these no dims where the number of rows is open, and so all that is made of them wrong shapes.

Before:
    nll_loss_nd = aten.nll_loss_nd(x, target, None, 0, -100)                  [rows], and [] once decomposed
After:
    eq = aten.eq(target, -100);  masked_fill = aten.masked_fill(target, eq, 0)
    gather = aten.gather(x, 1, aten.unsqueeze(masked_fill, 1))
    masked_fill_1 = aten.masked_fill(aten.neg(aten.squeeze(gather, 1)), eq, 0)
"""

from __future__ import annotations

import torch
from torch import fx

from autoparallel.passes.emitter import Emitter, rewrite_calls
from autoparallel.rules.calls import arguments, shape_of

aten = torch.ops.aten

_LOSSES = (aten.nll_loss_nd.default, aten.cross_entropy_loss.default)


def expand_row_losses(module: fx.GraphModule) -> None:
    """Rewrites the graph of ``module`` in place."""
    rewrite_calls(module.graph, dict.fromkeys(_LOSSES, _loss_of_rows))


def _loss_of_rows(emit: Emitter, node: fx.Node) -> fx.Node | None:
    values = arguments(node)
    x, target, weight = values["self"], values["target"], values["weight"]
    if values["reduction"] or target.meta["val"].is_floating_point() or not shape_of(target):
        return None
    smoothing = values.get("label_smoothing", 0.0)
    if "label_smoothing" in values:
        x = emit(aten.log_softmax.int, x, 1)
    ignored = emit(aten.eq.Scalar, target, values["ignore_index"])
    at = emit(aten.masked_fill.Scalar, target, ignored, 0)
    picked = emit(aten.gather.default, x, 1, emit(aten.unsqueeze.default, at, 1))
    loss = emit(aten.neg.default, emit(aten.squeeze.dim, picked, 1))
    if weight is not None:
        loss = emit(aten.mul.Tensor, loss, emit(aten.index.Tensor, weight, [at]))
    if smoothing:
        every = x
        if weight is not None:
            shape = [-1 if d == 1 else 1 for d in range(len(shape_of(x)))]
            every = emit(aten.mul.Tensor, x, emit(aten.view.default, weight, shape))
        spread = emit(aten.neg.default, emit(aten.mean.dim, every, [1]))
        loss = emit(aten.mul.Tensor, loss, 1 - smoothing)
        loss = emit(aten.add.Tensor, loss, emit(aten.mul.Tensor, spread, smoothing))
    return emit(aten.masked_fill.Scalar, loss, ignored, 0)
