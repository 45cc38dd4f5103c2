"""What operators cost the stages of a pipeline, under layouts that are known.

Operators that are alike are priced once.  A layer may run again in the backward, in part or whole; of each operator it
is known what that takes and what is kept then, so that a stage's costs are sums over its rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import fx

from autoparallel.decisions.decisions import RECOMPUTED
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.cut_stages import staged_nodes
from autoparallel.placements import Invariant, Layout, dual_layout
from autoparallel.placements.redistribution import local_numel
from autoparallel.plan import Plan
from autoparallel.planner.calls.options import operator_options
from autoparallel.planner.space.subject import Subject
from autoparallel.predict.optimizer import parameter_cost
from autoparallel.rules import Rule
from autoparallel.rules.calls import is_tensor, tensor_operands
from autoparallel.rules.typing import Typed
from autoparallel.rules.ways import typed_call

Array = npt.NDArray[np.float64]

ANSWERS = 1 + len(RECOMPUTED)
"""How much of a layer may run again: nothing, or one of ``RECOMPUTED``."""


@dataclass(frozen=True)
class Rows:
    """What each operator costs one rank for one microbatch, in the model's order.

    What depends on how much of a layer runs again has a row for each answer: nothing, or one of ``RECOMPUTED``.

    Attributes:
        nodes: the operators.
        layers: of each the layer that it is part of and that may run again, if any.
        forward: seconds.
        backward: seconds, by answer; what runs again included.
        inputs: seconds of the backward that the gradients of inputs take, by answer: what runs again computes all of
            its gradients with them.
        activations: bytes that the backward needs, by answer.
        moment: bytes that its gradients take while its backward runs.
        resting: bytes of the parameters that are read here first, with gradients and optimizer states.
        reads: the parameters that it reads: the bytes where they lie, and where they are borrowed.
        crossing: seconds for which the values travel, forward, that cross where a stage begins here.
        entering: bytes of these.
    """

    nodes: Sequence[fx.Node]
    layers: Sequence[str | None]
    forward: Array
    backward: Array
    inputs: Array
    activations: Array
    moment: Array
    resting: Array
    reads: Sequence[Mapping[fx.Node, tuple[float, float]]]
    crossing: Array
    entering: Array

    def spans(self) -> dict[str, tuple[int, int]]:
        """Where each layer that may run again begins and ends."""
        spans: dict[str, tuple[int, int]] = {}
        for i, layer in enumerate(self.layers):
            if layer is not None:
                spans[layer] = spans.get(layer, (i, i))[0], i + 1
        return spans


class RowPricer:
    """Prices the operators of a captured graph that belong to one stage each.

    Args:
        subject: the graph, and which of its layers may run again in the backward.
        plan: the layouts on the mesh axes other than the pipeline's.
    """

    def __init__(self, subject: Subject, plan: Plan) -> None:
        self.subject, self.plan = subject, plan
        self.captured, self.alike, self.sizes = subject.captured, subject.size, subject.axis_sizes
        self.nodes = [n for n in staged_nodes(subject.captured) if n.target is not operator.getitem]

    def rows(self, actual: Mapping[Any, int]) -> Rows:
        """The prices where open sizes are these."""
        size, open_layers = Sizes(actual), self.subject.open
        results: dict[fx.Node, Layout] = {}
        by_kind: dict[Hashable, tuple[Layout, Array]] = {}
        prices: list[Array] = []
        whole = (Invariant,) * len(self.sizes), np.zeros(2 + 3 * ANSWERS)
        for node in self.nodes:
            price = whole
            if is_tensor(node) and node.meta["key"] in self.plan.operators:
                at = tuple([results.get(x) for x in self.alike.operands(node)])
                way = self.alike.call(node), self.plan.operators[node.meta["key"]], at
                key = *way, node in open_layers, self.subject.parts(node), self.subject.products.get(node)
                if key not in by_kind:
                    by_kind[key] = self._price(node, size, results)
                price = by_kind[key]
            results[node] = price[0]
            prices.append(price[1])
        visited: set[fx.Node] = set()
        resting = []
        for read in self._reads:
            resting.append(sum(held for x, (held, _) in read.items() if x not in visited))
            visited.update(read)
        forward, moment, *by_answer = np.array(prices).T
        backward, inputs, activations = np.reshape(by_answer, (3, ANSWERS, -1))
        return Rows(
            self.nodes,
            [open_layers.get(node) for node in self.nodes],
            forward,
            backward,
            inputs,
            activations,
            moment,
            np.array(resting, dtype=float),
            self._reads,
            *self._crossing_seconds(results, size),
        )

    def _price(self, node: fx.Node, size: Sizes, results: Mapping[fx.Node, Layout]) -> tuple[Layout, Array]:
        """The layout that one operator makes, and what it costs as ``Rows`` says: forward, moment, and by answer
        backward, inputs and activations.

        Args:
            results: the layouts in which operators before it make their results.
        """
        subject, parts = self.subject, self.subject.parts(node)
        (option,) = operator_options(node, self.sizes, subject.profile, size, self._is_planned, parts)
        operands, flows = tensor_operands(node), bool(node.meta["backward"])
        travel = gathered = 0.0
        moved = self._local_bytes(node, option.result, size)
        for x, need in zip(operands, option.needs, strict=True):
            moved += self._local_bytes(x, need, size)
            if x in results and results[x] != need:
                itemsize, differentiable = x.meta["val"].element_size(), bool(x.meta["differentiable"])
                table = subject.redistributor.table(size.shape(x), itemsize, differentiable, False)
                between = table.index[results[x]], table.index[need]
                travel += float(table.seconds[between])
                gathered += float(table.seconds[between] * table.gathered[between])
        forward, backward = option.passes
        once = backward + travel * flows
        backwards, inputs, held = (
            np.full(ANSWERS, once),
            np.full(ANSWERS, once / 2),
            np.full(ANSWERS, option.saved_bytes),
        )
        if node in subject.open:
            # Where all but the products runs again, of the collectives only gathers do.
            backwards += 0.0, gathered + forward * (node not in subject.products), forward + travel
            inputs[1:] = backwards[1:]
            held[1:] = option.kept_bytes, option.left_bytes
        return option.result, np.array([forward + travel, moved * flows, *backwards, *inputs, *held])

    def _is_planned(self, node: fx.Node, _rule: Rule | None, _ways: Sequence[Typed], way: Typed, axis: int) -> bool:
        return way.mode == self.plan.modes(node.meta["key"])[axis]

    def _local_bytes(self, x: fx.Node, layout: Layout, size: Sizes) -> float:
        return local_numel(size.shape(x), layout, self.sizes) * float(x.meta["val"].element_size())

    @cached_property
    def _reads(self) -> list[dict[fx.Node, tuple[float, float]]]:
        """The bytes of the parameters that each node reads, also through what follows from parameters alone, where they
        lie and where they are borrowed."""
        size, places = Sizes(self.captured.actual), set(self.nodes)
        needs: dict[Hashable, Sequence[Layout]] = {}
        reads: list[dict[fx.Node, tuple[float, float]]] = []
        for node in self.nodes:
            read: dict[fx.Node, fx.Node] = {}  # parameter to the operand that follows from it
            pending = [(x, x) for x in node.all_input_nodes]
            while pending:
                x, by = pending.pop()
                if x.op == "placeholder" and x.name in self.captured.parameters:
                    read[x] = by
                elif x.op == "call_function" and x not in places and x.target is not operator.getitem:
                    pending += [(y, by) for y in x.all_input_nodes]
            layouts: dict[fx.Node, Layout] = {}
            if read and is_tensor(node) and node.meta["key"] in self.plan.operators:
                key = self.alike.call(node), self.plan.operators[node.meta["key"]]
                if key not in needs:
                    needs[key], _ = typed_call(node, self.plan.modes(node.meta["key"]))
                layouts = dict(zip(self.alike.operands(node), needs[key], strict=True))
            reads.append({x: self._parameter_bytes(x, by, layouts.get(by), size) for x, by in read.items()})
        return reads

    def _parameter_bytes(self, x: fx.Node, by: fx.Node, used: Layout | None, size: Sizes) -> tuple[float, float]:
        """The bytes of a parameter, where it lies and where it is borrowed, which is read as ``by`` in a layout.

        While a schedule runs, gradients are added up in the layout in which they are made, beside what lies at rest.
        """
        name, subject = self.captured.parameters[x.name], self.subject
        layout, dtype = self.plan.at_rest(name), self.captured.rest_dtype(x)
        rest = parameter_cost(self.captured, x, layout, self.sizes, subject.profile, offloaded=subject.offloads)
        at_rest = rest.parameter
        if not x.meta["differentiable"]:
            return float(at_rest), float(at_rest)
        sums = max(dtype.itemsize, 4) * local_numel(size.shape(x), layout, self.sizes)
        gathered = 0
        if used is not None and math.prod(size.shape(by)) == math.prod(size.shape(x)):
            sums = max(dtype.itemsize, 4) * local_numel(size.shape(by), dual_layout(used), self.sizes)
            held = x.meta["val"].element_size() * local_numel(size.shape(by), used, self.sizes)
            gathered = held if held > at_rest and self.plan.parameters[name].gather != "per_use" else 0
        return float(rest.bytes + max(0, sums - at_rest) + gathered), float(at_rest + sums + gathered)

    def _crossing_seconds(self, results: Mapping[fx.Node, Layout], size: Sizes) -> tuple[Array, Array]:
        """How long the values travel that cross, forward, where a stage begins at each row, each sent by itself; and
        their bytes."""
        number = {node: i for i, node in enumerate(self.nodes)}
        change = np.zeros((2, len(self.nodes) + 2))
        by_kind: dict[Hashable, tuple[float, float]] = {}  # seconds and bytes
        for node, i in number.items():
            last = max([number[user] for user in node.users if user in number], default=i)
            if is_tensor(node) and last > i:
                kind = self.alike.tensor(node), results[node]
                if kind not in by_kind:
                    layout = tuple(p if p.kind == "S" else Invariant for p in results[node])
                    crossing = self._local_bytes(node, layout, size)
                    by_kind[kind] = self.subject.profile.latency + crossing / self.subject.profile.bandwidth, crossing
                each = by_kind[kind]
                change[:, i + 1] += each
                change[:, last + 1] -= each
        seconds, held = np.cumsum(change, axis=1)
        return seconds, held
