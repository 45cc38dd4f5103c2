"""Batch norms whose running statistics are written by calls of their own.

    y = aten.batch_norm(x, w, b, mean, var, ...)       norm = aten._native_batch_norm_legit_functional(x, w, b, ...)
                                                       mean.copy_(norm[3]), var.copy_(norm[4])

``aten.batch_norm`` writes to them, and its schema does not say so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autoparallel.graph.lines import marks_of

aten = torch.ops.aten


def write_statistics(graph: fx.Graph) -> None:
    """Puts in the place of each batch norm the operator that torch composes it of, and what writes its statistics."""
    for node in list(graph.find_nodes(op="call_function", target=aten.batch_norm.default)):
        x, weight, bias, mean, variance, training, momentum, eps, _ = node.args
        val, marks = node.meta["val"], marks_of(node)

        def call(target: Any, args: Any, val: Any, marks: Any = marks) -> fx.Node:
            new = graph.call_function(target, args)
            new.meta = {"val": val, **marks}
            return new

        with graph.inserting_before(node):
            if mean is None:
                norm = aten._native_batch_norm_legit.no_stats
                results = call(norm, (x, weight, bias, training, momentum, eps), (val, val, val))
            elif not training:
                norm = aten._native_batch_norm_legit_no_training.default
                results = call(norm, (x, weight, bias, mean, variance, momentum, eps), (val, val, val))
            else:
                norm = aten._native_batch_norm_legit_functional.default
                statistics = [mean.meta["val"], variance.meta["val"]]  # of the batch, and running
                arguments = (x, weight, bias, mean, variance, training, momentum, eps)
                results = call(norm, arguments, (val, *statistics, *statistics))
            node.replace_all_uses_with(call(operator.getitem, (results, 0), val))
            for i, running in ((3, mean), (4, variance)) if mean is not None and training else ():
                value = call(operator.getitem, (results, i), running.meta["val"])
                call(aten.copy_.default, (running, value), running.meta["val"])
        graph.erase_node(node)
