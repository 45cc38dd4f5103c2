"""Where the ranks part from the captured graph: both run node by node, all ranks as threads of one process.

The graph of a rank is that of ``program.lay_out``: parameters are gathered where they are used, so what the epilogue of
the gradients does (buckets, accumulators, clipping) has no part in it.

[Note: the same tensor under several layouts] The ranks hold one node more for every layout that a tensor is read in,
and each has a gradient of its own.  So the captured graph is run with the same nodes: an identity for every
redistribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autoparallel import operators
from autoparallel.comm.collectives import redistribute
from autoparallel.comm.simulate import ReplicasDiffer, combine, coordinates, simulate
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured
from autoparallel.graph.lines import line_of
from autoparallel.hardware import profile_for
from autoparallel.operators import RandomState
from autoparallel.passes.settle_interleaving import settle_interleaving
from autoparallel.placements import Layout, divides, dual_layout, format_layout
from autoparallel.placements.regions import region_at, whole_region
from autoparallel.plan import Plan
from autoparallel.planner.draft import call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import UNBOUND, prepare
from autoparallel.planner.request.request import Request
from autoparallel.program.build import lay_out
from autoparallel.rules import rule_for
from autoparallel.rules.calls import is_tensor, map_tensor_operands, tensor_operands
from autoparallel.tools.parity.comparison import distance
from autoparallel.tools.parity.recording import Recording, arguments_of, run_recorded
from autoparallel.tools.parity.report import Deviation
from autoparallel.tools.parity.task import Batch, Task


def planner_of(task: Task, plan: str | Plan) -> Planner:
    """The planner of a task, for a plan that is known or a preset; its programs return whole outputs."""
    request = Request(
        axes=task.axes, profile=profile_for("cpu", None), plan=plan, loss_fn=task.loss_fn, outputs="gather"
    )
    return Planner(task.model, request)


def call_of_task(task: Task, batch: Batch) -> Call:
    """A task's call."""
    return call_of(batch.args, batch.kwargs, with_target=task.loss_fn is not None)


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)


def _read_alike(whole: fx.Graph, local: fx.Graph) -> dict[str, fx.Node]:
    """Gives the captured graph an identity for every redistribution of a rank's graph, read by whoever reads that
    there; returns its nodes by the keys that they have there."""
    nodes = {n.meta["key"]: n for n in whole.nodes if "key" in n.meta}
    calls = [n for n in whole.nodes if n.op == "call_function" and n.meta.get("key")]
    needs: dict[str, Sequence[Layout]] = {}
    for node in local.nodes:
        if node.target is redistribute:
            source = nodes[node.args[0].meta["key"]]
            with whole.inserting_after(source):
                nodes[node.meta["key"]] = copy = whole.call_function(_identity, (source,))
            copy.meta = {**source.meta, "key": node.meta["key"]}
        elif "needs" in node.meta:
            needs[node.meta["key"]] = node.meta["needs"]
    for call in calls:
        layouts = needs.get(call.meta["key"], ())
        read = [
            nodes.get(f"{x.meta['key']}->{','.join(map(str, layout))}", x)
            for x, layout in zip(tensor_operands(call), layouts, strict=False)
        ]
        if read:
            call.args, call.kwargs = map_tensor_operands(call, lambda i, x, read=read: read[i])  # type: ignore[misc]
    outputs: Any = zip(whole.output_node().args[0], local.output_node().args[0], strict=True)  # type: ignore[arg-type]
    read = [nodes[o.meta["key"]] if isinstance(o, fx.Node) and is_tensor(o) else w for w, o in outputs]
    whole.output_node().args = (tuple(read),)
    return nodes


def program_deviation(
    task: Task, captured: Captured, plan: Plan, batch: Batch, random: RandomState, tolerance: float
) -> Deviation | None:
    """The first node of a rank's program that computes something else than the captured graph; None where none does.

    Args:
        captured: is used up.
    """
    call, request = call_of_task(task, batch), planner_of(task, plan).request
    prepare(request, captured, plan, call)
    sizes = request.sizes
    # Shards that differ, which paddings of a vocabulary make equal, are not made in a body, as parameters are here.
    paddings = [n.meta["key"] for n in captured.graph.nodes if n.target is operators.pad_rows]
    plan = replace(plan, operators={**plan.operators, **dict.fromkeys(paddings, ("R",) * len(sizes))})
    settle_interleaving(captured.module, {key: plan.modes(key) for key in plan.operators}, sizes)
    whole = captured.copy()
    arguments = arguments_of(captured, task, batch)
    layouts = {
        node: plan.at_rest(name)
        for node, name in captured.parameters.items()
        if name in plan.parameters and divides(arguments[node].shape, plan.at_rest(name), sizes)
    }
    lay_out(captured, plan, request.target(UNBOUND), layouts, hoisted=False)

    nodes = _read_alike(whole.graph, captured.graph)
    expected, _ = run_recorded(whole, arguments, task, random)

    def rank(index: int) -> Recording:
        parts = arguments_of(captured, task, batch)
        for name, layout in layouts.items():
            value = parts[name].detach()
            part = region_at(value.shape, layout, sizes, coordinates(sizes)[index]).within(whole_region(value.shape))
            parts[name] = value[part].clone().requires_grad_(parts[name].requires_grad)
        return run_recorded(captured, parts, task, random)[0]

    ranks = simulate(rank, sizes, [name for name, _ in task.axes])
    return _Comparison(nodes, expected, ranks, captured.graph, sizes, tolerance).deviation()


class _Comparison:
    """
    Args:
        nodes: of the captured graph, by their keys in a rank's.
        expected, ranks: what they compute, and what every rank does.
        graph: a rank's.
    """

    def __init__(
        self,
        nodes: Mapping[str, fx.Node],
        expected: Recording,
        ranks: list[Recording],
        graph: fx.Graph,
        sizes: tuple[int, ...],
        tolerance: float,
    ) -> None:
        self.whole, self.expected, self.ranks, self.sizes, self.tolerance = nodes, expected, ranks, sizes, tolerance
        scaled = {n.meta["scales"] for n in graph.nodes if "scales" in n.meta}
        self.nodes = [
            n
            for n in graph.nodes
            if n.op in ("placeholder", "call_function") and is_tensor(n) and "placements" in n.meta and n not in scaled
            if n.meta.get("key") in nodes and (n.users or n.target is not redistribute)
        ]

    def deviation(self) -> Deviation | None:
        """The first node that is off."""
        for node in self.nodes:
            off = self._off(node, "values")
            if off > self.tolerance:
                return self._describe(node, "forward", off, "its operands are right, its result is not")
        for node in reversed(self.nodes):
            off = self._off(node, "gradients")
            if off > self.tolerance:
                return self._blame(node, off)
        return None

    def _off(self, node: fx.Node, what: str) -> float:
        """How far a result, or the gradient that reaches it, is off."""
        expected, *tables = (getattr(r, what) for r in (self.expected, *self.ranks))
        layout: Layout = node.meta["placements"]
        layout = dual_layout(layout) if what == "gradients" else layout
        return self._distance(expected.get(self.whole[node.meta["key"]]), [t.get(node) for t in tables], layout)

    def _distance(self, expected: Tensor | None, parts: list[Tensor | None], layout: Layout) -> float:
        """How far what the ranks hold is from a whole value; where some of them hold nothing, it is zero."""
        like = next((part for part in parts if part is not None), None)
        if like is None:
            return distance(None, expected)
        try:
            actual = combine([torch.zeros_like(like) if p is None else p for p in parts], layout, self.sizes)
        except ReplicasDiffer:
            return float("inf")
        return distance(actual, expected)

    def _blame(self, node: fx.Node, off: float) -> Deviation:
        """What reads a tensor whose gradient is off, and gives back a wrong one."""
        readers = list(dict.fromkeys(self._readers(node)))
        wrong = [r for r in readers if self._gives_wrong(r, node)]
        culprits = wrong or readers
        text = f"the gradient that reaches its result is right, the one it gives to {node.meta['key']} is not"
        if len(culprits) > 1:
            text += f"; one of {', '.join(r.meta['key'] for r in culprits)}"
        return self._describe(culprits[0] if culprits else node, "backward", off, text)

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        """The next nodes that can be compared, on the ways from a node to the output."""
        readers: list[fx.Node] = []
        for user in node.users:
            if user.op == "output":
                continue
            at = [n for n in user.users if n.meta.get("scales") is user]
            readers += at or ([user] if user in self.nodes else self._readers(user))
        return readers

    def _gives_wrong(self, reader: fx.Node, node: fx.Node) -> bool:
        """Whether a call gives back a wrong gradient to one operand; False where that cannot be told."""
        call = reader.meta.get("scales", reader)
        if call.target is redistribute:
            return len(node.users) == 1
        plain = self.whole[reader.meta["key"]]
        if len(tensor_operands(call)) != len(tensor_operands(plain)):
            return False
        layout = dual_layout(node.meta["placements"])
        for position, x in enumerate(tensor_operands(call)):
            if x is not node:
                continue
            parts = [r.uses.get((call, position)) for r in self.ranks]
            if self._distance(self.expected.uses.get((plain, position)), parts, layout) > self.tolerance:
                return True
        return False

    def _describe(self, node: fx.Node, direction: str, off: float, detail: str) -> Deviation:
        call = node.meta.get("scales", node)
        source = self._source(call)
        if call.target is redistribute:
            operator = f"the redistribution {node.meta['key']}, {call.args[1]} to {call.args[2]} over {call.args[3]}"
            rule, operands = "", [call.args[0]]
        else:
            operator = str(node.meta["key"])
            operands = tensor_operands(call)
            modes = ", ".join(map(str, call.meta.get("modes", ())))
            rule = f"{rule_for(source) or 'none'}, runs as {modes}" if "modes" in call.meta else ""
        layouts = ", ".join(format_layout(x.meta["placements"]) for x in operands if "placements" in x.meta)
        return Deviation(
            "program",
            direction,
            str(node.meta.get("module", "")),
            line_of(source),
            operator,
            rule,
            f"{layouts} -> {format_layout(node.meta['placements'])}",
            off,
            detail,
        )

    def _source(self, node: fx.Node) -> fx.Node:
        """The node with the line: what a redistribution redistributes."""
        while node.target is redistribute and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return self.whole.get(str(node.meta.get("key")), node)
