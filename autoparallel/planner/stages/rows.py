"""What operators cost the stages of a pipeline, under layouts that are known.

Operators that are alike are priced once.  A layer may run again in the backward, in part or whole; of each operator it
is known what that takes and what is kept then, so that a stage's costs are sums over its rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import fx

from autoparallel.decisions.decisions import RECOMPUTED
from autoparallel.graph.captured import Captured
from autoparallel.graph.layers import layer_of
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.cut_stages import staged_nodes
from autoparallel.passes.recompute_layers import kept_in_layers
from autoparallel.placements import Invariant, Layout, dual_layout
from autoparallel.placements.redistribution import local_numel
from autoparallel.plan import Plan
from autoparallel.planner.calls.saved_tensors import kept_parts
from autoparallel.planner.calls.signatures import Signatures
from autoparallel.planner.request.request import Request
from autoparallel.predict.cost import operator_seconds
from autoparallel.predict.optimizer import cost_at_rest
from autoparallel.rules import rule_for
from autoparallel.rules.calls import is_tensor, tensor_operands
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


@dataclass(frozen=True)
class _Price:
    """What operators that are alike cost; as the columns of ``Rows`` say."""

    result: Layout
    forward: float = 0.0
    backward: tuple[float, ...] = (0.0,) * ANSWERS
    inputs: tuple[float, ...] = (0.0,) * ANSWERS
    activations: tuple[float, ...] = (0.0,) * ANSWERS
    moment: float = 0.0


class RowPricer:
    """Prices the operators of a captured graph that belong to one stage each.

    Args:
        plan: the layouts on the mesh axes other than the pipeline's.
        may_recompute: the layers that may run again in the backward.
    """

    def __init__(self, captured: Captured, plan: Plan, request: Request, may_recompute: Collection[str] = ()) -> None:
        self.captured, self.plan = captured, plan
        self.profile, self.redistributor = request.profile, request.redistributor
        self.sizes = plan.axis_sizes
        self.nodes = [n for n in staged_nodes(captured) if n.target is not operator.getitem]
        self.layers = [layer if (layer := layer_of(node)) in may_recompute else None for node in self.nodes]
        self.products = kept_in_layers(captured.graph, may_recompute)
        self.alike = Signatures(captured.actual)
        self.saved = kept_parts(captured.graph, self.alike, plan.loss_chunks).parts

    def rows(self, actual: Mapping[Any, int]) -> Rows:
        """The prices where open sizes are these."""
        size = Sizes(actual)
        results: dict[fx.Node, Layout] = {}
        by_kind: dict[Hashable, _Price] = {}
        prices: list[_Price] = []
        for node, layer in zip(self.nodes, self.layers, strict=True):
            if not is_tensor(node) or node.meta["key"] not in self.plan.operators:
                price = _Price((Invariant,) * len(self.sizes))
            else:
                outside = any(layer_of(user) != layer for user in node.users)
                at = tuple([results.get(x) for x in self.alike.operands(node)])
                way = self.alike.call(node), self.plan.operators[node.meta["key"]], at
                key = *way, layer is not None, outside, self.saved.get(node), self.products.get(node)
                if key not in by_kind:
                    by_kind[key] = self._price(node, size, results, layer is not None, outside)
                price = by_kind[key]
            prices.append(price)
            results[node] = price.result
        visited: set[fx.Node] = set()
        resting = []
        for read in self._reads:
            resting.append(sum(held for x, (held, _) in read.items() if x not in visited))
            visited.update(read)
        return Rows(
            self.nodes,
            self.layers,
            np.array([p.forward for p in prices]),
            np.array([p.backward for p in prices]).T,
            np.array([p.inputs for p in prices]).T,
            np.array([p.activations for p in prices]).T,
            np.array([p.moment for p in prices]),
            np.array(resting, dtype=float),
            self._reads,
            *self._crossing_seconds(prices, size),
        )

    def _price(
        self, node: fx.Node, size: Sizes, results: Mapping[fx.Node, Layout], may_recompute: bool, outside: bool
    ) -> _Price:
        """What one operator costs.

        Args:
            results: the layouts in which operators before it make their results.
            may_recompute: whether its layer may run again.
            outside: whether others than its layer read its result.
        """
        rule, modes = rule_for(node), self.plan.modes(node.meta["key"])
        needs, result = typed_call(node, modes)
        operands, val = tensor_operands(node), node.meta["val"]
        result_bytes = local_numel(size.shape(node), result, self.sizes) * val.element_size()
        moved = result_bytes + sum(
            local_numel(size.shape(x), layout, self.sizes) * x.meta["val"].element_size()
            for x, layout in zip(operands, needs, strict=True)
        )
        forward, backward = operator_seconds(self.profile, rule, modes, self.sizes, size, moved, val.dtype)
        travel = gathered = 0.0
        for x, need in zip(operands, needs, strict=True):
            if x in results and results[x] != need:
                itemsize, flows = x.meta["val"].element_size(), bool(x.meta["differentiable"])
                table = self.redistributor.table(size.shape(x), itemsize, flows, False)
                between = table.index[results[x]], table.index[need]
                travel += float(table.seconds[between])
                gathered += float(table.seconds[between] * table.gathered[between])
        flows = bool(node.meta["backward"])
        once = backward + travel if flows else 0.0
        saved = self.saved.get(node, 0.0) * result_bytes
        if not may_recompute:
            again, inputs, activations = ((number,) * ANSWERS for number in (once, once / 2, saved))
            return _Price(result, forward + travel, again, inputs, activations, moved * flows)
        left = float(result_bytes) if flows and outside else 0.0
        product = float(result_bytes) if flows and self.products.get(node) else 0.0
        # Where all but the products runs again, of the collectives only gathers do.
        repeated = 0.0, gathered + (0.0 if node in self.products else forward), forward + travel
        again = tuple([once + more for more in repeated])
        inputs = once / 2, *again[1:]
        return _Price(result, forward + travel, again, inputs, (saved, max(left, product), left), moved * flows)

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
        name = self.captured.parameters[x.name]
        dtype = self.captured.rest_dtypes.get(name, x.meta["val"].dtype)
        shape, layout, trainable = size.shape(x), self.plan.at_rest(name), bool(x.meta["differentiable"])
        offloaded = self.plan.offload_optimizer
        rest = cost_at_rest(self.profile, self.sizes, shape, layout, dtype.itemsize, trainable, offloaded)
        at_rest = rest.parameter
        if not trainable:
            return float(at_rest), float(at_rest)
        sums = max(dtype.itemsize, 4) * local_numel(shape, layout, self.sizes)
        gathered = 0
        if used is not None and math.prod(size.shape(by)) == math.prod(size.shape(x)):
            sums = max(dtype.itemsize, 4) * local_numel(size.shape(by), dual_layout(used), self.sizes)
            held = x.meta["val"].element_size() * local_numel(size.shape(by), used, self.sizes)
            gathered = held if held > at_rest and self.plan.parameters[name].gather != "per_use" else 0
        return float(rest.bytes + max(0, sums - at_rest) + gathered), float(at_rest + sums + gathered)

    def _crossing_seconds(self, prices: Sequence[_Price], size: Sizes) -> tuple[Array, Array]:
        """How long the values travel that cross, forward, where a stage begins at each row, each sent by itself; and
        their bytes."""
        number = {node: i for i, node in enumerate(self.nodes)}
        change = np.zeros((2, len(prices) + 2))
        for i, (node, price) in enumerate(zip(self.nodes, prices, strict=True)):
            last = max([number[user] for user in node.users if user in number], default=i)
            if is_tensor(node) and last > i:
                layout = tuple(p if p.kind == "S" else Invariant for p in price.result)
                crossing = local_numel(size.shape(node), layout, self.sizes) * node.meta["val"].element_size()
                each = self.profile.latency + crossing / self.profile.bandwidth, crossing
                change[:, i + 1] += each
                change[:, last + 1] -= each
        seconds, held = np.cumsum(change, axis=1)
        return seconds, held
