"""Cuts a forward graph into the graphs of pipeline stages, by liveness.

A stage is the nodes between two cuts in the graph's order.  What it reads of earlier stages becomes a placeholder, what
later stages read of it an output.  Nothing else crosses: what follows from the inputs and buffers alone (masks, rotary
tables, positions), or from parameters alone, is computed again by every stage that reads it, and a parameter is an
input of every stage that uses it.

Before (a cut at linear_1; mask follows from the tokens alone):
    embedding = aten.embedding(w, tokens);  mask = aten.ne(tokens, 0)
    linear = aten.linear(embedding, w1);  linear_1 = aten.linear(linear, w2)
    mul = aten.mul(linear_1, mask);  return (mul,)
After:
    stage 0:  embedding = aten.embedding(w, tokens);  linear = aten.linear(embedding, w1);  return (linear,)
    stage 1:  mask = aten.ne(tokens, 0);  linear_1 = aten.linear(linear, w2);  mul = aten.mul(linear_1, mask)
              return (mul,)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autoparallel import operators
from autoparallel.graph.captured import Captured
from autoparallel.graph.lines import line_of
from autoparallel.graph.losses import NO_LOSS
from autoparallel.operators.flex import is_flex, reads_of_rows
from autoparallel.rules import operator_name
from autoparallel.rules.calls import arguments, is_tensor, shape_of, tensor_operands, with_argument
from autoparallel.rules.shapes import expression


class CutError(ValueError):
    """Stages that cannot be cut so."""


@dataclass(frozen=True)
class Crossing:
    """A value that one stage makes and others read.

    Attributes:
        number: its place among all crossings.
        name: the node's name, in the graph and in the stages' graphs.
        source: the stage that makes it.
        targets: the stages that read it.
        flows: those of them from which a gradient comes back.
        givers: for each target, the stage that it gets the value from: the source, or an earlier target that hands it
            on. The gradients that come back to a giver are added up there.
    """

    number: int
    name: str
    source: int
    targets: tuple[int, ...]
    flows: tuple[int, ...]
    givers: tuple[int, ...]

    def takers(self, stage: int) -> tuple[int, ...]:
        """The stages that get the value from this one."""
        return tuple(t for t, giver in zip(self.targets, self.givers, strict=True) if giver == stage)

    def returns(self, target: int) -> bool:
        """Whether a gradient comes back from a target, its own or one of those that it hands the value on to."""
        return target in self.flows or any(self.returns(t) for t in self.takers(target))


@dataclass(frozen=True)
class StageGraph:
    """One stage's forward graph.

    Attributes:
        captured: the graph, described as that of a whole model: its ``inputs`` are the model's, then ``incoming``; its
            results are new values of buffers, the model's outputs that it makes, and ``outgoing``.
        results: for each of the model's outputs that it makes, its number among the results of the whole graph.
        incoming, outgoing: the values that cross into it, and out of it.
    """

    captured: Captured
    results: tuple[int, ...]
    incoming: tuple[Crossing, ...]
    outgoing: tuple[Crossing, ...]


def staged_nodes(captured: Captured) -> list[fx.Node]:
    """The nodes that belong to one stage, in order; all others are computed by every stage that reads them.

    Those that depend on both a parameter and an input, or on a buffer that the graph changes.
    """
    changed = {name for name, path in captured.buffers.items() if path in captured.mutated}
    inputs = {name for name in captured.inputs if name is not None}
    depends: dict[fx.Node, tuple[bool, bool, bool]] = {}
    staged: list[fx.Node] = []
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            depends[node] = node.name in captured.parameters, node.name in inputs, node.name in changed
        elif node.op == "call_function":
            rows = [depends[x] for x in node.all_input_nodes if _carries(x)]
            flags = tuple(any(row[i] for row in rows) for i in range(3))
            depends[node] = flags if _carries(node) else (False, False, False)  # type: ignore[assignment]
            if _carries(node) and (flags[0] and flags[1] or flags[2]):
                staged.append(node)
    return staged


def _carries(node: fx.Node) -> bool:
    """Whether a node's value is a tensor, or several."""
    return is_tensor(node) or isinstance(node.meta.get("val"), tuple | list)


def stages_of(captured: Captured, cuts: Sequence[str]) -> dict[fx.Node, int]:
    """The stage of every node that belongs to one; a stage may have none.

    Args:
        cuts: the keys of the nodes with which the stages but the first begin.

    Raises:
        CutError: when a cut is not a node that belongs to a stage, or they are out of order.
    """
    nodes = staged_nodes(captured)
    places = {node.meta["key"]: i for i, node in enumerate(nodes)}
    begins = []
    for cut in cuts:
        if cut not in places:
            raise CutError(f"there is nothing to cut at {cut!r}: a stage begins at an operator that uses activations")
        begins.append(places[cut])
    if any(a > b for a, b in zip([0, *begins], begins, strict=False)):
        raise CutError(f"the cuts {', '.join(cuts)} are not in the order of the model")
    stages: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        stage = sum(i >= begin for begin in begins)
        producer = node.args[0] if node.target is operator.getitem else node
        stages[node] = stages.get(producer, stage) if node.target is operator.getitem else stage  # type: ignore[arg-type]
    return stages


def cut_stages(
    captured: Captured,
    cuts: Sequence[str],
    outputs: Collection[int],
    price: Callable[[int, int], float] = lambda giver, taker: 0.0,
) -> list[StageGraph]:
    """The graphs of the stages; ``captured`` is left as it is.

    Args:
        cuts: the keys of the nodes with which the stages but the first begin.
        outputs: the numbers of the model's outputs to keep, among the results of the graph.
        price: what it costs to send a value from one stage to another. A value that skips stages comes from the
            cheapest stage that has it; among equals, from the one that makes it.

    Raises:
        CutError: when the model cannot be cut so.
    """
    cutter = _Cutter(captured, stages_of(captured, cuts), len(cuts) + 1, outputs, price)
    return [cutter.build(stage) for stage in range(len(cuts) + 1)]


class _Cutter:
    def __init__(
        self,
        captured: Captured,
        stages: dict[fx.Node, int],
        count: int,
        outputs: Collection[int],
        price: Callable[[int, int], float],
    ) -> None:
        self.captured, self.stages, self.count, self.price = captured, stages, count, price
        self.results = captured.results
        self._require_buffers_together()
        buffers = len(captured.mutated)
        last = count - 1
        loss = captured.objective
        home = last if loss is None else stages.get(self.results[loss], last)
        self.produced: dict[int, list[int]] = {}  # stage to the numbers of the results that it makes
        for i, node in enumerate(self.results):
            if i < buffers or i in outputs:
                stage = stages.get(node, home if i in captured.weight.outputs else last)
                self.produced.setdefault(stage, []).append(i)
        self.needs = [self._needs(stage) for stage in range(count)]
        self.crossings = self._crossings()

    def _require_buffers_together(self) -> None:
        for name, node in self.captured.placeholders.items():
            if self.captured.buffers.get(name) in self.captured.mutated:
                users = {self.stages[user]: user for user in node.users if user in self.stages}
                if len(users) > 1:
                    where = ", ".join(user.meta["key"] for user in users.values())
                    raise CutError(
                        f"the buffer {self.captured.buffers[name]} changes in every call, but the stages would "
                        f"part those who use it ({where}): cut elsewhere"
                    )

    def _needs(self, stage: int) -> dict[fx.Node, fx.Node | None]:
        """What a stage computes or reads; sizes of a value that it does not have come with what to ask instead."""
        needed: dict[fx.Node, fx.Node | None] = {}
        roots = [node for node, s in self.stages.items() if s == stage]
        pending = [*roots, *(self.results[i] for i in self.produced.get(stage, ()))]
        while pending:
            node = pending.pop()
            if node in needed:
                continue
            needed[node] = None
            if self.stages.get(node, stage) != stage or node.op == "placeholder":
                continue
            operands = tensor_operands(node)
            if node.target is torch.ops.aten.sym_size.int and operands and self.stages.get(operands[0], stage) != stage:
                needed[node] = self._holder(node)
                if needed[node] is not None:
                    pending.append(needed[node])  # type: ignore[arg-type]
                    continue
            pending += node.all_input_nodes
        return needed

    def _holder(self, size: fx.Node) -> fx.Node | None:
        """An input that has a size in some dim."""
        value = expression(size.meta["val"])
        inputs = (node for name, node in self.captured.placeholders.items() if name in self.captured.inputs)
        return next((node for node in inputs if any(expression(s) == value for s in shape_of(node))), None)

    def _crossings(self) -> list[Crossing]:
        targets: dict[fx.Node, list[int]] = {}
        for stage, needed in enumerate(self.needs):
            for node in needed:
                if self.stages.get(node, stage) != stage:
                    targets.setdefault(node, []).append(stage)
        crossings: list[Crossing] = []
        for node in sorted(targets):
            if not is_tensor(node):
                raise CutError(f"{node.meta['key']} gives several values, which cannot be parted: cut elsewhere")
            flows = tuple(t for t in targets[node] if self._flows(node, t))
            source = self.stages[node]
            holders = [source]
            givers = []
            for target in targets[node]:
                givers.append(min(holders, key=lambda holder: (self.price(holder, target), holder != source)))
                holders.append(target)
            crossings.append(Crossing(len(crossings), node.name, source, tuple(targets[node]), flows, tuple(givers)))
        return crossings

    def _flows(self, node: fx.Node, stage: int) -> bool:
        """Whether a gradient of a value comes back from a stage."""
        users = [user for user in node.users if user in self.needs[stage] and self.stages.get(user, stage) == stage]
        return bool(node.meta["differentiable"]) and any(user.meta.get("backward") for user in users)

    def build(self, stage: int) -> StageGraph:
        incoming = tuple(c for c in self.crossings if stage in c.targets)
        outgoing = tuple(c for c in self.crossings if c.source == stage)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        needed = sorted(self.needs[stage])
        for node in needed:
            if node.op == "placeholder" or self.stages.get(node, stage) != stage:
                copies[node] = graph.placeholder(node.name)
                copies[node].meta = dict(node.meta)
        for node in needed:
            if node not in copies:
                holder = self.needs[stage][node]
                if holder is None:
                    copies[node] = graph.node_copy(node, copies.__getitem__)
                else:
                    dim = [expression(s) for s in shape_of(holder)].index(expression(node.meta["val"]))
                    copies[node] = graph.call_function(torch.ops.aten.sym_size.int, (copies[holder], dim))
                copies[node].meta = dict(node.meta)
                if node.target in operators.DRAWS:
                    _note_microbatches(copies[node], self.captured)
                elif is_flex(node.target):
                    _note_rows(copies[node], self.captured)
        by_name = {node.name: copy for node, copy in copies.items()}
        numbers = self.produced.get(stage, [])
        values = [copies[self.results[i]] for i in numbers] + [by_name[c.name] for c in outgoing]
        graph.output(tuple(values)).meta = dict(self.captured.graph.output_node().meta)
        buffers = [i for i in numbers if i < len(self.captured.mutated)]
        present = {node.name for node in copies if node.op == "placeholder"}
        whole = self.captured
        captured = replace(
            whole.part(graph),
            inputs=[n if n in present else None for n in whole.inputs] + [c.name for c in incoming],
            mutated=[whole.mutated[i] for i in buffers],
            outputs=[],
            loss=None,
            flowing=[],
            detached=[],
            weight=NO_LOSS,
        )
        return StageGraph(captured, tuple(numbers[len(buffers) :]), incoming, outgoing)


def _note_microbatches(draw: fx.Node, captured: Captured) -> None:
    """Lets random numbers depend on where the microbatch's rows stand in the batch.

    Raises:
        CutError: where what is drawn is no number for each row.
    """
    values = arguments(draw)
    bounds = [values[name] for name in ("n", "low", "last") if isinstance(values.get(name), fx.Node)]
    if bounds:
        raise CutError(
            f"{operator_name(draw.target)} draws among the rows of the batch, which a pipeline cuts into microbatches, "
            f"at {line_of(draw)}: draw outside of the model and pass the numbers in, or use a plan without a pipeline"
        )
    if "shards" in values:
        shards = [operators.MICROBATCH if captured.is_batch(size) else "" for size in shape_of(draw)]
        draw.args, draw.kwargs = with_argument(draw.args, draw.kwargs, draw, "shards", ";".join(shards))


def _note_rows(call: fx.Node, captured: Captured) -> None:
    """Lets the functions of FlexAttention be told where the microbatch's rows stand in the batch.

    Raises:
        CutError: where they read other rows.
    """
    values = arguments(call)
    reads = enumerate([*values["score_reads"], *values["mask_reads"]])
    tensors = {i: x for i, x in reads if isinstance(x, fx.Node) and is_tensor(x)}
    cut = [i for i, x in tensors.items() if any(map(captured.is_batch, shape_of(x)))]
    if not reads_of_rows(call).issuperset(cut):
        raise CutError(
            f"the functions of {operator_name(call.target)} read other rows of the batch than that of the score, which "
            f"a microbatch does not have, at {line_of(call)}"
        )
    if captured.is_batch(shape_of(call)[0]):
        call.kwargs = {**call.kwargs, "rows": operators.MICROBATCH, "cut": tuple(cut)}
