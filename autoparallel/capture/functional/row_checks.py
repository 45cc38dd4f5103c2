"""Checks that two masks select as many rows, where a trace takes it that they do.

The trace takes two sizes for one where a call puts rows beside those of another mask.  Eager takes a single row for all
others there, and so do calls of each element when they run.  Not so losses, whose operands the trace makes of one size,
as it takes them to be; and what is computed of the number of rows is computed of either number.

Before (masks select rows of h and of y):
    index = aten.index(h, [mask]);  index_1 = aten.index(y, [other]);  loss = aten.mse_loss(index, index_1)
After:
    index = aten.index(h, [mask]);  index_1 = aten.index(y, [other])
    sym_size = aten.sym_size(index, 0);  require_sizes = require_sizes(index_1, [sym_size, 16], line)
    loss = aten.mse_loss(index, require_sizes)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoparallel._torch.export import free_unbacked_symbols
from autoparallel.capture.functional.row_counts import selected_by, unknown_sizes
from autoparallel.graph.lines import line_of
from autoparallel.operators.control_flow import require_sizes
from autoparallel.passes.emitter import Emitter
from autoparallel.passes.weigh_loss import is_same
from autoparallel.rules.calls import is_tensor, shape_of
from autoparallel.rules.table import LOSSES

Sources = dict[fx.Node, dict[Any, None]]
"""What the rows of a value were selected by: masks, and sizes that have none."""


def require_as_many(graph: fx.Graph) -> None:
    """Rewrites a functional trace in place."""
    sources = _sources(graph)
    asking = [node for node in graph.nodes if node.op == "output" or is_tensor(node)]
    numbers = {size for node in asking for x in node.all_input_nodes if not is_tensor(x) for size in unknown_sizes(x)}
    for node in list(graph.nodes):
        is_loss = node.target in LOSSES
        if not is_loss and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            continue
        rows = [x for x in node.all_input_nodes if is_tensor(x) and x in sources]
        for x in rows[1:]:
            is_asked = bool(numbers & (unknown_sizes(rows[0]) | unknown_sizes(x)))
            if (is_loss or is_asked) and not _are_alike(sources[rows[0]], sources[x]):
                _require(node, rows[0], x)


def _sources(graph: fx.Graph) -> Sources:
    sources: Sources = {}
    for node in graph.nodes:
        sizes = unknown_sizes(node)
        if sizes:
            mask = selected_by(node)[1]
            new = [mask] if mask is not None else sizes.difference(*map(unknown_sizes, node.all_input_nodes))
            read = (source for x in node.all_input_nodes for source in sources.get(x, ()))
            sources[node] = dict.fromkeys(new or read)
    return sources


def _are_alike(these: dict[Any, None], those: dict[Any, None]) -> bool:
    return all(is_same(a, b, {}) for a in these for b in those)


def _require(node: fx.Node, first: fx.Node, x: fx.Node) -> None:
    """Has an operand of a call have as many rows as the first one, in the dims that lie on each other."""
    emit = Emitter(node)
    of_first = shape_of(first)
    before = len(of_first) - len(shape_of(x))
    sizes = []
    for dim, size in enumerate(shape_of(x)):
        at = before + dim
        meets = at >= 0 and free_unbacked_symbols(size) and free_unbacked_symbols(of_first[at])
        sizes.append(emit.size(first, at) if meets else emit.size(x, dim))
    with node.graph.inserting_before(node):
        rows = node.graph.call_function(require_sizes, (x, sizes, line_of(node)))
    rows.meta = dict(x.meta)
    node.replace_input_with(x, rows)
