"""Where the ranks part from the captured graph: both run node by node, all ranks as threads of one process.

The graph of a rank is that of ``program.lay_out``: parameters are gathered where they are used, so what the epilogue of
the gradients does (buckets, accumulators, clipping) has no part in it.

[Note: the same tensor under several layouts] The ranks hold one node more for every layout that a tensor is read in,
and each has a gradient of its own.  So the captured graph is run with the same nodes: an identity for every
redistribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

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
from autoparallel.planner.programs import prepare
from autoparallel.planner.request.request import Request
from autoparallel.program.build import lay_out
from autoparallel.rules import rule_for
from autoparallel.rules.calls import is_tensor, tensor_operands
from autoparallel.tools.parity.comparison import difference
from autoparallel.tools.parity.recording import Recorder, Recording, arguments_of, run_recorded
from autoparallel.tools.parity.task import Batch, Task
from autoparallel.tools.parity.verification import Deviation

PREFIX = "mesh0"


def planner_of(task: Task, plan: str | Plan) -> Planner:
    """The planner of a task, for a plan that is known or a preset; its programs return whole outputs."""
    request = Request(
        axes=task.axes, profile=profile_for("cpu", None), plan=plan, loss_fn=task.loss_fn, outputs="gather"
    )
    return Planner(task.model, request)


def call_of_task(task: Task, batch: Batch) -> Call:
    """A task's call."""
    return call_of(batch.args, batch.kwargs, with_target=task.loss_fn is not None)


class _Whole:
    """The captured graph, with an identity for every redistribution of a rank's graph."""

    def __init__(self, whole: Captured, local: fx.Graph) -> None:
        self.local: dict[str, fx.Node] = {}  # by key; of a mean and its division the latter
        for node in local.nodes:
            if "key" in node.meta and node.op != "output":
                self.local[node.meta["key"]] = node
        self.results = [x for x in local.output_node().args[0] if isinstance(x, fx.Node) and is_tensor(x)]  # type: ignore[union-attr]
        self.whole = {n.meta["key"]: n for n in whole.graph.nodes if "key" in n.meta}
        self.versions: dict[fx.Node, Tensor] = {}
        self.recorder = Recorder(whole.module, self.operand)
        self.recording = self.recorder.recording

    def operand(self, call: fx.Node, position: int, x: fx.Node, env: Mapping[fx.Node, Any]) -> Tensor:
        """The tensor that a call, or the output, reads: in the layout in which the ranks read it."""
        if call.op == "output":
            return self._identity(self.results[position], env)
        reader = self.local.get(call.meta["key"])
        reader = reader.meta.get("scales", reader) if reader is not None else None
        needs = reader.meta.get("needs") if reader is not None else None
        if needs is None or position >= len(needs):
            return env[x]
        return self.version(x, needs[position], env)

    def version(self, x: fx.Node, layout: Layout, env: Mapping[fx.Node, Any]) -> Tensor:
        """A tensor as it is read in a layout."""
        node = self.local.get(f"{x.meta['key']}->{','.join(map(str, layout))}")
        return env[x] if node is None else self._identity(node, env)

    def _identity(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Tensor:
        if node.target is not redistribute:
            value: Tensor = env[self.whole[node.meta["key"]]]
            return value
        if node not in self.versions:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            value = self._identity(source, env)
            self.versions[node] = value = value.view_as(value)
            self.recording.note(value, node)
        return self.versions[node]


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
    settle_interleaving(captured.module, {key: plan.modes(key) for key in plan.operators}, sizes)
    whole = captured.copy()
    arguments = arguments_of(captured, task, batch)
    layouts = {
        node: plan.at_rest(name)
        for node, name in captured.parameters.items()
        if name in plan.parameters and divides(arguments[node].shape, plan.at_rest(name), sizes)
    }
    lay_out(captured, plan, request.target(PREFIX), layouts, hoisted=False)

    expected = _Whole(whole, captured.graph)
    run_recorded(expected.recorder, whole, arguments, task, random)

    def rank(index: int) -> Recording:
        recorder, parts = Recorder(captured.module), arguments_of(captured, task, batch)
        for name, layout in layouts.items():
            value = parts[name].detach()
            part = region_at(value.shape, layout, sizes, coordinates(sizes)[index]).within(whole_region(value.shape))
            parts[name] = value[part].clone().requires_grad_(parts[name].requires_grad)
        run_recorded(recorder, captured, parts, task, random)
        return recorder.recording

    ranks = simulate(rank, sizes, [name for name, _ in task.axes])
    return _Comparison(expected, ranks, captured.graph, sizes, tolerance).deviation()


class _Comparison:
    def __init__(
        self, whole: _Whole, ranks: list[Recording], graph: fx.Graph, sizes: tuple[int, ...], tolerance: float
    ) -> None:
        self.whole, self.ranks, self.graph, self.sizes, self.tolerance = whole, ranks, graph, sizes, tolerance
        scaled = {n.meta["scales"] for n in graph.nodes if "scales" in n.meta}
        self.nodes = [
            n
            for n in graph.nodes
            if n.op in ("placeholder", "call_function") and is_tensor(n) and "placements" in n.meta and n not in scaled
            if (n.users if n.target is redistribute else n.meta.get("key") in whole.whole)  # else nothing reads it
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
        tables: list[dict[fx.Node, Tensor]] = [getattr(r, what) for r in (self.whole.recording, *self.ranks)]
        whole = node if node.target is redistribute else self.whole.whole[node.meta["key"]]
        layout: Layout = node.meta["placements"]
        layout = dual_layout(layout) if what == "gradients" else layout
        return self._distance(tables[0].get(whole), [table.get(node) for table in tables[1:]], layout)

    def _distance(self, expected: Tensor | None, parts: list[Tensor | None], layout: Layout) -> float:
        """How far what the ranks hold is from a whole value; what is missing everywhere on one side is zero there."""
        like = next((part for part in parts if part is not None), None)
        if like is None:
            return 0.0 if expected is None else difference(torch.zeros_like(expected), expected)
        try:
            actual = combine([torch.zeros_like(like) if p is None else p for p in parts], layout, self.sizes)
        except ReplicasDiffer:
            return float("inf")
        return difference(actual, torch.zeros_like(actual) if expected is None else expected)

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
        plain = self.whole.whole[reader.meta["key"]]
        if len(tensor_operands(call)) != len(tensor_operands(plain)):
            return False
        layout = dual_layout(node.meta["placements"])
        for position, x in enumerate(tensor_operands(call)):
            if x is not node:
                continue
            parts = [r.uses.get((call, position)) for r in self.ranks]
            if self._distance(self.whole.recording.uses.get((plain, position)), parts, layout) > self.tolerance:
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
        return self.whole.whole.get(str(node.meta.get("key")), node)
