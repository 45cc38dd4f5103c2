"""What the graphs of two ways are read for (see ``ways``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec
from torch.utils import _pytree as pytree

from autoparallel.operators.control_flow import take_apart, what_of
from autoparallel.rules.calls import READS


def last_result(program: ExportedProgram) -> fx.Node:
    results: Any = program.graph.output_node().args[0]
    last: fx.Node = results[-1]
    return last


def calls_to(last: fx.Node) -> Iterator[fx.Node]:
    """The calls before a node, and that."""
    for node in last.graph.nodes:
        if node.op != "placeholder":
            yield node
        if node is last:
            return


def is_number_given(node: fx.Node) -> bool:
    """Whether a call reads a number that is an input, as a program does before all else."""
    return node.target in READS and isinstance(x := node.args[0], fx.Node) and x.op == "placeholder"


def calls_behind(first: fx.Node) -> list[fx.Node]:
    """The calls after a node."""
    nodes = list(first.graph.nodes)
    return [node for node in nodes[nodes.index(first) + 1 :] if node.op not in ("placeholder", "output")]


def reads_of(node: fx.Node) -> list[fx.Node]:
    """What a call reads, one after another, some perhaps twice."""
    reads: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), reads.append)
    return reads


def what_is_done(node: fx.Node) -> tuple[Any, ...]:
    """A call without what it reads."""
    module: Any = node.graph.owning_module
    if node.target is torch.ops.aten._assert_scalar.default:  # in words that name what one trace has
        return node.op, node.target
    return node.op, what_of(node, module), take_apart(node.args, node.kwargs)[0]


def do_the_same(a: fx.Node, b: fx.Node) -> bool:
    """Whether two calls are alike but for what they read."""
    return what_is_done(a) == what_is_done(b) and are_alike(a, b)


def are_alike(x: fx.Node, y: fx.Node) -> bool:
    """Whether two values have the same sizes and dtypes."""
    return _kinds(x) == _kinds(y)


def _kinds(node: fx.Node) -> list[Any]:
    return [
        (tuple(map(str, v.shape)), v.dtype) if isinstance(v, torch.Tensor) else str(v)
        for v in pytree.tree_leaves(node.meta.get("val"))
    ]


def explain_difference(x: fx.Node, y: fx.Node) -> str:
    """Why no value can stand for two."""
    shown = [", ".join(f"{list(k[0])} {k[1]}" if isinstance(k, tuple) else k for k in _kinds(n)) for n in (x, y)]
    return f"one makes {shown[0]} of what is {shown[1]} on the other".replace("torch.", "")


def calls_for(way: Sequence[fx.Node], results: Collection[fx.Node]) -> list[fx.Node]:
    """The calls of a way that results are made of."""
    sources = {*results}
    for node in reversed(way):
        if node in sources:
            sources.update(reads_of(node))
    return [node for node in way if node in sources]


@dataclass
class Asked:
    """Where a way asks.

    Attributes:
        question: the copy of what Python asks for.
        tensors: those on which it depends what the way does from there, and what it asks for.
    """

    question: fx.Node
    tensors: list[fx.Node]


def take_places(program: ExportedProgram, counts: Sequence[int]) -> list[Asked]:
    """Where a program asks; of what it returns of questions, it returns from now on what is asked for alone.

    Args:
        counts: how many of its last results are of each question.
    """
    output, signature = program.graph.output_node(), program.graph_signature
    values: Any = output.args[0]
    places, left, begin = [], [*range(len(values) - sum(counts))], len(values) - sum(counts)
    for count in counts:
        end = begin + count
        places.append(Asked(values[end - 1], [_source_of(x) for x in values[begin:end]]))
        left.append(end - 1)
        begin = end
    output.args = (tuple(values[i] for i in left),)
    signature.output_specs[:] = [signature.output_specs[i] for i in left]
    for node in [x for copy in values if isinstance(copy, fx.Node) for x in _copy_calls(copy)]:
        if not node.users:
            program.graph.erase_node(node)
    return places


def _source_of(copy: fx.Node) -> fx.Node:
    """What ``x.detach().clone()`` is a copy of."""
    calls = _copy_calls(copy)
    return calls[-1].all_input_nodes[0] if calls else copy


def _copy_calls(copy: fx.Node) -> list[fx.Node]:
    """The calls of ``x.detach().clone()``, from the last one on, as far as a node is the result of these."""
    nodes, node = [], copy
    for target in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
        if node.target is target:
            nodes.append(node)
            node = node.all_input_nodes[0]
    return nodes


def calls_between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The calls after a node, and before another."""
    calls = calls_behind(first)
    return calls[: calls.index(last)]


Changes = dict[tuple[OutputKind, str | None], tuple[OutputSpec, fx.Node]]


def read_outputs(program: ExportedProgram) -> tuple[Changes, list[tuple[OutputSpec, Any]]]:
    """What a program changes in place, by what that is, and what it returns."""
    values: Any = program.graph.output_node().args[0]
    rows = list(zip(program.graph_signature.output_specs, values, strict=True))
    changes = {(s.kind, s.target): (s, value) for s, value in rows if s.kind != OutputKind.USER_OUTPUT}
    return changes, [row for row in rows if row[0].kind == OutputKind.USER_OUTPUT]


def place_of(place: tuple[OutputKind, str | None], program: ExportedProgram) -> fx.Node:
    """What a program does not change."""
    names = {spec.target or spec.arg.name: spec.arg.name for spec in program.graph_signature.input_specs}
    name = names.get(str(place[1]), str(place[1]))
    return next(node for node in program.graph.find_nodes(op="placeholder") if node.name == name)
