"""Gives a vocabulary that does not divide a size that does, so that it can be sharded in use.

The table of an embedding, and the weight and bias of a linear layer whose results a cross-entropy reads, get rows of
zeros at the end.  The look-up never reads them, the cross-entropy leaves their columns out, and every other reader of
the results gets them without these columns: no padding enters a loss, and none a gradient, a norm or a checkpoint,
because the parameter itself keeps its size and lies in shards that differ (see [Note: uneven shards]).

Before (a vocabulary of 13, for 4 shards; the parameter w is tied):
    embedding = aten.embedding(w, ids)
    linear = aten.linear(x, w)
    cross_entropy_sum = operators.cross_entropy_sum(linear, target)
After:
    pad_rows = operators.pad_rows(w, 16)
    embedding = operators.padded_embedding(pad_rows, ids, -1, 13)
    linear = aten.linear(x, pad_rows)
    cross_entropy_sum = operators.cross_entropy_sum(linear, target, None, -100, 0.0, 13)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoparallel import operators
from autoparallel.passes.emitter import Emitter, replace_node
from autoparallel.passes.mark_gradients import mark_new
from autoparallel.passes.name_nodes import name_nodes
from autoparallel.rules.calls import COPIES, arguments, shape_of

aten = torch.ops.aten

MOST_PADDING = 1 / 4
"""Of the vocabulary: more rows of zeros than that are not worth it."""


def find_vocabularies(graph: fx.Graph, parameters: Mapping[str, str], shards: int) -> dict[str, int]:
    """The parameters that must be padded to be cut into ``shards`` along their vocabulary, with their padded rows.

    Args:
        parameters: placeholder name to parameter name.
    """
    padded: dict[str, int] = {}
    for node in graph.nodes:
        if node.op != "placeholder" or node.name not in parameters or len(shape_of(node)) != 2:
            continue
        rows = shape_of(node)[0]
        more = -rows % shards
        if more and rows >= shards and more <= MOST_PADDING * rows:
            tables, heads = _readers(node)
            if tables or any(_is_head(head, rows) for head in heads):
                padded[parameters[node.name]] = rows + more
    return padded


def pad_vocabulary(module: fx.GraphModule, parameters: Mapping[str, str], padded: Mapping[str, int]) -> None:
    """Rewrites the graph of ``module`` in place; one that is padded already is left as it is.

    Args:
        parameters: placeholder name to parameter name.
        padded: parameter name to its rows with padding, as :func:`find_vocabularies` found them in this trace of the
            model or in another.
    """
    graph = module.graph
    changed = False
    for node in list(graph.nodes):
        if node.op == "placeholder" and parameters.get(node.name) in padded:
            tables, heads = _readers(node)
            unpadded, rows = shape_of(node)[0], padded[parameters[node.name]]
            if (tables or heads) and rows > unpadded:
                _Padding(unpadded, rows).rewrite(node, tables, heads)
                changed = True
    if changed:
        graph.eliminate_dead_code()
        name_nodes(graph)
        mark_new(graph)


def _readers(weight: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The look-ups and the linear layers that read a parameter and can read it padded."""
    tables = [u for u in weight.users if u.target is aten.embedding.default and u.args[0] is weight]
    tables = [u for u in tables if not arguments(u)["scale_grad_by_freq"]]
    heads = [u for u in weight.users if u.target is aten.linear.default and u.args[1] is weight]
    return tables, heads


def _is_head(node: fx.Node, rows: int) -> bool:
    """Whether a cross-entropy reads the results of this linear layer, its classes kept whole on the way."""
    return any(_is_loss(user) or (_keeps_classes(user, rows) and _is_head(user, rows)) for user in node.users)


def _is_loss(node: fx.Node) -> bool:
    if node.target is not operators.cross_entropy_sum:
        return False
    values = arguments(node)
    x = shape_of(node.args[0])  # type: ignore[arg-type]
    return values["weight"] is None and values["label_smoothing"] == 0 and values["classes"] is None and len(x) > 1


def _keeps_classes(node: fx.Node, rows: int) -> bool:
    """Whether a call on logits [..., classes] makes logits [..., classes] and can do so with more classes."""
    if node.target in COPIES:
        return True
    if node.target is aten.slice.Tensor:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        return bool(arguments(node)["dim"] % len(shape_of(x)) != len(shape_of(x)) - 1)
    if node.target is aten.reshape.default:
        before, after = shape_of(node.args[0]), shape_of(node)  # type: ignore[arg-type]
        return bool(before and after) and before[-1] == after[-1] == rows
    return False


class _Padding:
    """Rewrites the readers of one parameter."""

    def __init__(self, rows: int, padded: int) -> None:
        self.rows, self.padded = rows, padded

    def rewrite(self, weight: fx.Node, tables: list[fx.Node], heads: list[fx.Node]) -> None:
        """Lets the look-ups and the layers read a padded parameter."""
        whole = Emitter(min([*tables, *heads]))(operators.pad_rows, weight, self.padded)
        for node in tables:
            values = arguments(node)
            emit = Emitter(node)
            replace_node(
                node, emit(operators.padded_embedding, whole, values["indices"], values["padding_idx"], self.rows)
            )
        for node in heads:
            emit = Emitter(node)
            bias = [emit(operators.pad_rows, bias, self.padded) for bias in node.args[2:] if bias is not None]
            self._carry(node, emit(aten.linear.default, node.args[0], whole, *bias))

    def _carry(self, old: fx.Node, new: fx.Node) -> None:
        """Lets the readers of logits read padded ones, or, where they would see the padding, the ones without it."""
        for user in list(old.users):
            emit = Emitter(user)
            if _is_loss(user):
                target, ignored = (arguments(user)[name] for name in ("target", "ignore_index"))
                replace_node(user, emit(operators.cross_entropy_sum, new, target, None, ignored, 0.0, self.rows))
            elif _keeps_classes(user, self.rows):
                self._carry(user, emit(user.target, new, *self._sizes(user), **user.kwargs))
            else:
                cut = emit(aten.slice.Tensor, new, len(shape_of(new)) - 1, 0, self.rows)
                user.replace_input_with(old, cut)

    def _sizes(self, node: fx.Node) -> list[Any]:
        """A call's arguments behind the tensor, with the last size of a reshape padded."""
        rest = list(node.args[1:])
        if node.target is aten.reshape.default:
            sizes = list(rest[0])  # type: ignore[arg-type]
            rest[0] = [*sizes[:-1], self.padded]
        return rest
