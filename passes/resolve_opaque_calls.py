"""Puts the user's own Python in the place of what stood for it in the trace.

Before (h has two hooks; scale is a tensor that the second one reads):
    call = autoparallel.call([x], [], "app.Reverse(tensor0, 0.5) -> (0,)");  h = call[0]
    hook = autoparallel.hook(h, [], [], "app.log");  hook_1 = autoparallel.hook(h, [scale], [], "app.scaled")
    mul = aten.mul(h, 2)
After:
    Reverse = app.Reverse(x, 0.5)
    hooked = autoparallel.operators.opaque.hooked(Reverse, ("app.log",), ("app.scaled", scale))
    mul = aten.mul(hooked, 2)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import fx

from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of, marks_of
from autoparallel.operators.opaque import (
    CALL,
    HOOK,
    enter_operator,
    exit_module,
    fill_template,
    function_operator,
    hooked_operator,
)
from autoparallel.passes.emitter import replace_node
from autoparallel.rules.calls import ancestors, followers


def resolve_opaque_calls(module: fx.GraphModule, calls: Mapping[str, Any], hooks: Mapping[str, Any]) -> None:
    """Rewrites ``module`` in place.

    Args:
        calls, hooks: what stands behind the names (see ``capture.tracing.trace.Trace``).
    """
    graph = module.graph
    registered: dict[fx.Node, list[fx.Node]] = {}
    for node in list(graph.nodes):
        if node.target is CALL:
            call = calls[node.args[2]]
            if hasattr(call, "cls"):
                _insert_function(graph, node, call)
            else:
                _insert_boundary(graph, node, call)
        elif node.target is HOOK:
            registered.setdefault(node.args[0], []).append(node)
    for node, marks in registered.items():
        _insert_hooks(graph, node, marks, hooks)


def _readers(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """What reads the results, each with the number of the one that it reads."""
    assert all(user.target is operator.getitem for user in node.users)
    return [(cast(int, user.args[1]), user) for user in node.users]


def _insert_function(graph: fx.Graph, node: fx.Node, call: Any) -> None:
    tensors, numbers, _ = node.args
    values = {"tensor": tensors, "number": numbers}

    def size_of(sizes: list[Any]) -> fx.Node:
        return graph.call_function(torch.Size, (sizes,))

    with graph.inserting_before(node):
        args, kwargs = fill_template(call.template, lambda slot: values[slot.kind][slot.index], size_of)  # type: ignore[index]
        new = graph.call_function(function_operator(call.cls, call.writes), args, kwargs)
    vals = node.meta["val"]
    new.meta = marks_of(node)
    if call.single:
        new.meta["val"] = vals[0]
    else:
        new.meta["val"] = tuple(vals[call.tensors.index(i)] if i in call.tensors else None for i in range(call.count))
    for index, user in _readers(node):
        if call.single:
            replace_node(user, new)
        else:
            user.args = (new, call.tensors[index])
    graph.erase_node(node)


def _insert_boundary(graph: fx.Graph, node: fx.Node, call: Any) -> None:
    """The entry or the exit of a module with backward hooks."""
    tensors = list(node.args[0])  # type: ignore[arg-type]
    ticket = tensors.pop()
    row: list[Any] = [None] * call.count
    for place, x in zip(call.tensors, tensors, strict=True):
        row[place] = x
    entering = call.module is not None
    with graph.inserting_before(node):
        if entering:
            new = graph.call_function(enter_operator(call.module), (call.path, *row))
        else:
            while ticket.target is torch.ops.aten.detach.default:
                ticket = ticket.args[0]
            new = graph.call_function(exit_module, (ticket, *row))
    vals: list[Any] = [None] * (call.count + entering)
    for place, value in zip(call.tensors, node.meta["val"], strict=False):
        vals[place] = value
    new.meta = {**marks_of(node), "val": tuple(vals)}
    for index, user in _readers(node):
        user.args = (new, call.tensors[index] if index < len(call.tensors) else call.count)
        if index >= len(call.tensors):
            user.meta = {**user.meta, "val": None}
    graph.erase_node(node)


def _insert_hooks(graph: fx.Graph, node: fx.Node, marks: list[fx.Node], hooks: Mapping[str, Any]) -> None:
    """All users of a tensor read it through its hooks, wherever these were registered."""
    reads = [(mark.args[3], *mark.args[1], *mark.args[2]) for mark in marks]  # type: ignore[misc]
    for mark in marks:
        graph.erase_node(mark)
    users = list(node.users)
    copies, point = _values_before(graph, node, [x for read in reads for x in read if isinstance(x, fx.Node)])
    reads = [tuple(copies.get(x, x) for x in read) for read in reads]
    with graph.inserting_after(point):
        new = graph.call_function(hooked_operator([hooks[str(read[0])] for read in reads]), (node, *reads))
    new.meta = {**marks_of(marks[0]), "val": node.meta["val"]}
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user in users)


def _values_before(graph: fx.Graph, node: fx.Node, values: list[fx.Node]) -> tuple[dict[fx.Node, fx.Node], fx.Node]:
    """What hooks read, moved before all users of ``node``; what follows from it there is computed twice.

    Returns:
        the copies, and the last node that stands before the users.
    """
    copies: dict[fx.Node, fx.Node] = {}
    follows, point = followers(graph, {node}), node
    for x in ancestors(graph, values):
        if x <= node:
            continue
        if x not in follows:
            point.append(x)
            point = x
            continue
        target = x.target
        if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
            raise refusal(
                "a tensor's hook reads what a random operator or an autograd.Function makes of that tensor",
                line_of(x),
                "register the hook on a tensor computed of it (y = x * 1)",
            )
        with graph.inserting_after(point):
            point = copies[x] = graph.node_copy(x, lambda n: copies.get(n, n))
    return copies, point
