"""Writes out the gradients that a model takes inside of its forward.

What autograd would run is traced, of the calls that lead from the inputs to the outputs alone: it reads what these
have computed, and becomes calls like any others, which are sharded, and differentiated once more where one wants it.

Before (x is a tensor of the model's own; e = sum(tanh(x) * w)):
    leaf = autoparallel.leaf(x)
    tanh = aten.tanh(leaf);  mul = aten.mul(tanh, w);  sum = aten.sum(mul);  ones = aten.ones_like(sum)
    derivative = autoparallel.derivative([sum], [leaf], [ones], True);  grad = derivative[0]
After:
    tanh = aten.tanh(x);  mul = aten.mul(tanh, w);  ones = aten.ones_like(sum)
    expand = aten.expand(ones, [4, 8]);  mul_1 = aten.mul(expand, w)
    mul_2 = aten.mul(tanh, tanh);  sub = aten.rsub(mul_2, 1);  grad = aten.mul(mul_1, sub)

[Note: saved results] Where autograd saves the result of a call, its trace has a ``detach`` of it, through which
autograd itself differentiates.  So these are left out; a ``detach`` of the model's own is none of the calls that lead
to the outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import fx
from torch.export import default_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoparallel._torch.export import gives_view
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.lines import line_of
from autoparallel.operators.derivatives import COMPOSED, DERIVATIVE, LEAF
from autoparallel.operators.opaque import HOOK
from autoparallel.passes.emitter import Emitter, copier, replace_node, replace_results
from autoparallel.passes.mark_gradients import is_continuous, stops_gradient
from autoparallel.rules.calls import ancestors

_DETACH = torch.ops.aten.detach.default


def write_derivatives(module: fx.GraphModule) -> None:
    """Rewrites ``module`` in place.

    Raises:
        CaptureError: where what lies between inputs and outputs has no derivative that can be written out.
    """
    calls = module.graph.find_nodes(op="call_function", target=DERIVATIVE)
    for call in calls:
        _write(module.graph, call)
    for leaf in module.graph.find_nodes(op="call_function", target=LEAF):
        replace_node(leaf, leaf.args[0])
    if calls:
        module.graph.eliminate_dead_code()


def _write(graph: fx.Graph, call: fx.Node) -> None:
    *rows, follows = cast(tuple[Any, ...], call.args)
    _, inputs, seeds = rows
    path = _find_path(graph, call)
    operands = [x for node in path for x in node.all_input_nodes]
    sources = [x for x in dict.fromkeys([*operands, *inputs, *seeds]) if x not in path]
    values = [_value_of(x, is_leaf=x in inputs) for x in sources]
    mode = inputs[0].meta["val"].fake_mode  # also of what is made of no tensor

    def run(*parts: Any) -> tuple[list[Any], Sequence[Any]]:
        results: dict[Any, Any] = dict(zip(sources, parts, strict=True))
        for node in path:
            args, kwargs = fx.map_arg((node.args, node.kwargs), results.__getitem__)
            results[node] = COMPOSED.get(node.target, node.target)(*args, **kwargs)  # type: ignore[operator]
        ends, starts, gradients = ([results[x] for x in row] for row in rows)
        return [results[x] for x in path], torch.autograd.grad(ends, starts, gradients, create_graph=True)

    try:
        with mode, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # others cannot be differentiated twice
            traced = _as_values(make_fx(run, decomposition_table=_of_backwards())(*values), values)
    except Exception as error:
        raise _refusal_of(call, f"which torch cannot take ({str(error).partition(chr(10))[0]})") from error
    results, gradients = cast(tuple[Sequence[Any], Sequence[fx.Node]], traced.output_node().args[0])
    becomes = dict(zip(traced.find_nodes(op="placeholder"), sources, strict=True))
    for node, result in zip(path, results, strict=True):
        if isinstance(result, fx.Node):
            becomes[result] = node
        elif result[0].target is operator.getitem and result[0].args[0].target is node.target:  # of several results
            becomes[result[0].args[0]] = node
    with graph.inserting_before(call):
        new = list(map(copier(graph, becomes, call), gradients))
        if not follows:
            new = [Emitter(call)(_DETACH, x) for x in new]
    replace_results(call, new.__getitem__)


def _find_path(graph: fx.Graph, call: fx.Node) -> dict[fx.Node, None]:
    """The calls through which a gradient flows from outputs to inputs, in their order."""
    outputs, inputs, *_ = cast(tuple[Sequence[fx.Node], ...], call.args)
    reached, following = set(inputs), set[fx.Node]()
    for node in graph.nodes:
        if node is call:
            break
        flows = node.op == "call_function" and is_continuous(node) and not stops_gradient(node)
        if node.target is operator.getitem and node.args[0].target in COMPOSED and node.args[1] != 0:
            flows = False  # statistics, which have no gradient
        if flows and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            following.add(node)
    path = [x for x in ancestors(graph, outputs, following.__contains__) if x in following]
    _require_one_view(graph, call)
    for node in path:
        if node.target is not operator.getitem and not isinstance(node.target, torch._ops.OpOverload):
            raise _refusal_of(call, f"which goes through what is no operator of torch ({line_of(node)})")
    for hook in graph.find_nodes(op="call_function", target=HOOK):
        if hook.args[0] in path or hook.args[0] in inputs:
            raise _refusal_of(call, f"which goes through a hook ({line_of(hook)})")
    return dict.fromkeys(path)


def _require_one_view(graph: fx.Graph, call: fx.Node) -> None:
    """Refuses an input that is a view of which another may be meant: what is written into the memory makes views of it
    anew, one for each that reads them, and which of them belong together, nothing tells."""
    outputs, inputs, *_ = cast(tuple[Sequence[fx.Node], ...], call.args)
    views = [x for x in inputs if x.op == "call_function" and gives_view(x.target)]
    if not views:
        return
    names: dict[fx.Node, Any] = {}

    def name(node: fx.Node) -> Any:
        """What a view, or a size, is of; the node itself of all else."""
        if node not in names:
            is_alike = gives_view(node.target) or node.target is torch.ops.aten.sym_size.int
            names[node] = (node.target, repr(fx.map_arg((node.args, node.kwargs), name))) if is_alike else node
        return names[node]

    before = set(ancestors(graph, outputs))
    for view in views:
        if any(x is not view and x.target is view.target and name(x) == name(view) for x in before):
            raise _refusal_of(call, "with respect to a view of a tensor, of which there are several", _OF_A_COPY)


def _value_of(node: fx.Node, *, is_leaf: bool) -> Any:
    """A tensor that no other node has; a number as it is."""
    value = node.meta["val"]
    return value.detach().requires_grad_(is_leaf) if isinstance(value, torch.Tensor) else value


@cache
def _of_backwards() -> dict[Any, Callable[..., Any]]:
    """What the operators that autograd runs are composed of, but for those that read statistics, or what else forward
    keeps for them, through which their compositions have no gradient."""
    table = default_decompositions()
    backwards = {op: run for op, run in table.items() if "backward" in str(op) and "norm_backward" not in str(op)}
    return backwards | {torch.ops.aten.log_sigmoid_backward.default: lambda grad, x, _: grad * torch.sigmoid(-x)}


def _as_values(traced: fx.GraphModule, values: Sequence[Any]) -> fx.Graph:
    """The trace of a backward, in which nothing is written in place (see [Note: saved results])."""
    for node in traced.graph.find_nodes(op="call_function", target=_DETACH):
        node.replace_all_uses_with(node.args[0])
    operators = [node.target for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    if not any(operator._schema.is_mutable for operator in operators):
        return traced.graph
    traced.recompile()
    with torch.no_grad():
        return make_fx(torch.func.functionalize(traced, remove="mutations"))(*values).graph


INSTEAD_OF_GRADIENTS = (
    "write the derivative out, put it into an autograd.Function (whose forward may call torch.autograd.grad under "
    "torch.enable_grad), or differentiate what the model returns"
)
_OF_A_COPY = "differentiate with respect to a copy (h = h.clone()), of which everything behind it is computed"


def _refusal_of(call: fx.Node, what: str, cure: str = INSTEAD_OF_GRADIENTS) -> CaptureError:
    return refusal(f"the model takes a gradient, {what},", line_of(call), cure)
