"""Keeps rows in their dims that are flattened for a linear layer alone.

Flattened rows can be cut along the first of their dims only, and microbatches have other rows one after another.
``nn.MultiheadAttention`` flattens times before the batch.

Before (x is [3, 8, 2, 2], w [4, 4]):
    reshape = aten.reshape(x, [24, 4]);  linear = aten.linear(reshape, w);  reshape_1 = aten.reshape(linear, [3, 8, 4])
After:
    reshape = aten.reshape(x, [3, 8, 4]);  linear = aten.linear(reshape, w)
"""

from __future__ import annotations

import torch
from torch import fx

from autoparallel.graph.lines import marks_of
from autoparallel.passes.emitter import Emitter
from autoparallel.rules.calls import shape_of

aten = torch.ops.aten


def unflatten_products(module: fx.GraphModule) -> None:
    """Rewrites the graph of ``module`` in place."""
    for product in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        flat, user = product.args[0], next(iter(product.users), None)
        if user is None or len(product.users) > 1 or user.target is not aten.reshape.default:
            continue
        if flat.target is not aten.reshape.default or len(shape_of(flat)) > 2 or len(shape_of(user)) < 3:
            continue
        if shape_of(user)[-1] == shape_of(product)[-1]:
            emit = Emitter(user)  # where the sizes are there
            rows = emit(aten.reshape.default, flat.args[0], [*user.args[1][:-1], shape_of(flat)[-1]])
            result = emit(aten.linear.default, rows, *product.args[1:])
            rows.meta.update(marks_of(flat))
            result.meta.update(marks_of(product))
            user.replace_all_uses_with(result)
    module.graph.eliminate_dead_code()
