"""Replaces torch's random operators by ours, whose numbers depend on the global position only.

It works on the trace as ``torch.export`` leaves it, before anything is decomposed or left out, so that the draws are
numbered as the plain model makes them: in the order of the calls, those included whose result nobody reads.

Before:
    dropout = aten.dropout(x, 0.1, True);  dropout_1 = aten.dropout(dropout, 0.1, False)
    normal_ = aten.normal_(empty_like, 0.0, 1.0)
After:
    dropout = autoparallel.dropout(x, 0.1, 0)
    draw = autoparallel.draw([sym_size, 4], "normal", [0.0, 1.0], 1, torch.float32, cpu)
    normal_ = aten.copy_(empty_like, draw)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from autoparallel._torch import transforms
from autoparallel._torch.export import graphs_run
from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of
from autoparallel.operators.composite_random import COMPOSITES
from autoparallel.operators.torch_random import BASIC, Draw, silent
from autoparallel.passes.emitter import Emitter, replace_node
from autoparallel.rules import operator_name
from autoparallel.rules.calls import arguments

aten = torch.ops.aten

_TRANSPARENT = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Higher-order operators that run their graph once, where they stand."""


_DROPOUTS = (
    aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default, aten.feature_alpha_dropout.default,
)  # fmt: skip
"""What returns its operand itself where it drops nothing."""


@dataclass(frozen=True)
class Draws:
    """How many times a call of a model draws random numbers."""

    count: int


def replace_random_operators(module: fx.GraphModule) -> Draws:
    """Rewrites a trace in place, and returns how many draws it makes.

    Raises:
        CaptureError: naming the line, where numbers are drawn in a way that has no counterpart.
    """
    numbering = _Numbering()
    numbering.rewrite(module)
    return Draws(numbering.count)


class _Numbering:
    def __init__(self) -> None:
        self.count = 0
        self._modes: list[str] = []  # of the vmaps around a call: whether each part has numbers of its own

    def take(self) -> int:
        self.count += 1
        return self.count - 1

    def rewrite(self, module: fx.GraphModule) -> None:
        """Rewrites the calls of one graph, and of those that it runs, in their order."""
        for node in list(module.graph.nodes):
            if node.op != "call_function" or node._erased:
                continue
            if node.target is transforms.ENTER_VMAP:
                self._modes.append(str(node.args[1]))
            elif node.target is transforms.LEAVE_VMAP:
                self._modes.pop()
            elif isinstance(node.target, torch._ops.HigherOrderOperator):
                self._enter(module, node)
            elif is_random(node):
                self._require_same(node)
                self._replace(node)
            elif node.target in _DROPOUTS:  # decomposing would copy what it returns, which is its operand
                replace_node(node, cast(fx.Node, node.args[0]))

    def _enter(self, module: fx.GraphModule, node: fx.Node) -> None:
        for graph in graphs_run(module, node):
            if node.target.name() in _TRANSPARENT:  # type: ignore[union-attr]
                self.rewrite(graph)
                continue
            for call in _random_calls(graph):
                raise refusal(
                    f"{operator_name(call.target)} draws random numbers inside of torch.{node.target.name()}, which "  # type: ignore[union-attr]
                    "may run it any number of times,",
                    line_of(call),
                    "draw the numbers before, and pass them in",
                )

    def _require_same(self, node: fx.Node) -> None:
        """Refuses draws of which the parts that ``vmap`` maps would have their own, or be filled in place."""
        values = [x.meta.get("val") for x in (node, *node.all_input_nodes)]
        are_parts = any(isinstance(x, torch.Tensor) and transforms.is_transformed(x) for x in values)
        if "different" in self._modes or self._modes and are_parts:
            raise refusal(
                f"{operator_name(node.target)} draws random numbers inside of torch.vmap",
                line_of(node),
                "draw them for all parts before (torch.rand(len(x), ...)), and pass them in with in_dims=0",
            )

    def _replace(self, node: fx.Node) -> None:
        target, values = node.target, arguments(node)
        make = COMPOSITES.get(target) or BASIC.get(target)
        if values.get("generator") is not None:
            raise refusal(
                f"{operator_name(target)} draws from a torch.Generator of its own, whose numbers would be those of the "
                "trace in every call,",
                line_of(node),
                "leave out generator=, so that the model's own numbers are used (they follow torch.manual_seed), or "
                "draw outside of the model and pass the numbers in",
            )
        if make is None:
            raise refusal(
                f"{operator_name(target)} draws random numbers, which would differ from rank to rank and from plan to "
                "plan,",
                line_of(node),
                "draw with one of the operators that docs/randomness.md lists, or draw the numbers outside of the "
                "model and pass them in",
            )
        emit = Emitter(node)
        value = node.meta.get("val")
        draw = Draw(emit, target, values, self.take, value if isinstance(value, torch.Tensor) else None)
        result = make(draw)
        if isinstance(result, tuple):
            for user in list(node.users):
                _become(user, result[cast(int, user.args[1])])
            node.graph.erase_node(node)
            return
        if target._schema.name.endswith("_"):  # type: ignore[union-attr]
            filled = node.args[0]
            assert isinstance(filled, fx.Node)
            result = draw.constant(result, filled) if _may_flow(filled) else result
            result = emit(aten.copy_.default, filled, result)
        _become(node, result)


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers, as torch itself says."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return not silent(target, arguments(node))


def _random_calls(module: fx.GraphModule) -> list[fx.Node]:
    graphs = [m for m in module.modules() if isinstance(m, fx.GraphModule)]
    return [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function" and is_random(node)]


_FRESH = ("empty", "zeros", "ones", "full")


def _may_flow(filled: fx.Node) -> bool:
    """Whether a tensor that is filled may have been computed, so that torch gives what it came from zero gradients."""
    return filled.op != "call_function" or not any(word in operator_name(filled.target) for word in _FRESH)


def _become(node: fx.Node, value: fx.Node) -> None:
    """Makes ``node``, whose name the trace's signature may speak of, the call that gives ``value``."""
    if not value.users:  # it was made for this one
        node.target, node.args, node.kwargs = value.target, value.args, value.kwargs
        value.graph.erase_node(value)
    else:
        node.target, node.args, node.kwargs = aten.clone.default, (value,), {}
