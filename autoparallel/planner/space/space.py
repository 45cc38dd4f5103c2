"""The space of choices that the search explores, and their prices.

The variables are

- for each operator: its mode on every mesh axis (``rules.typing``), which gives the layouts it needs and makes;
- for each tensor with several consumers: the layout they all read it in, so that a redistribution shared by several
  consumers is one choice with one price;
- for each parameter: its layout at rest, and whether it is gathered per use or per microbatch;
- for each layer for which that is open: whether all but its products, or all of it, runs again in the backward.

The costs are compute and memory traffic on local sizes, forward and backward, and redistributions, forward and
backward, between what one side makes and the other needs.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from torch import fx

from autoparallel import operators
from autoparallel.decisions.decisions import FULL, RECOMPUTED
from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.graph.layers import layers_of
from autoparallel.placements import Layout, parse_layout
from autoparallel.placements.modes import INVARIANT_MODE
from autoparallel.planner.calls.options import Option, operator_options
from autoparallel.planner.request.presets import Constraints
from autoparallel.planner.solve.factors import Factors
from autoparallel.planner.space.overlaps import Overlaps
from autoparallel.planner.space.permits import Permits
from autoparallel.planner.space.prices import Pricer, Prices, most_hidden
from autoparallel.planner.space.problem import Problem, Reader, Variable
from autoparallel.planner.space.subject import Subject
from autoparallel.predict.optimizer import parameter_cost
from autoparallel.program.program import wanted_outputs
from autoparallel.rules import operator_name, rule_for
from autoparallel.rules.calls import is_tensor, tensor_operands


class NoOption(PlanError):
    """A preset or pins leave no way to run an operator."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"the plan leaves no way to run {node.meta['key']}")
        self.node = node


@dataclass
class _Ends:
    """What tensors share that are alike and whose consumers are.

    Attributes:
        shared: the layouts in which several consumers may read one.
        leaving: the layouts in which one leaves the graph.
        prices: the tables to its consumers, once they are worked out.
        again: the table of what that costs once more, where its layer may run again.
        hidden: for each number of chunks, the table of what they hide of it.
    """

    shared: list[Layout] | None
    leaving: Sequence[Layout]
    prices: Prices | None = None
    again: np.ndarray | None = None
    hidden: Sequence[np.ndarray] = ()


class SearchSpace:
    """The choices that a preset and pins leave for a captured graph on one mesh, and their costs.

    Costs are those of one microbatch, in seconds, with its share of what is paid once a step: the gathers of parameters
    that are kept, the reduction of gradients and the update.

    Args:
        preset: which axes may do what; the request's, unless told another.
        pinned: how parameters lie that an earlier plan has settled.
        input_layouts: those in which inputs come; the others are whole.
    """

    def __init__(
        self,
        subject: Subject,
        preset: str | None = None,
        pinned: Mapping[str, ParameterPlan] | None = None,
        input_layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        self.subject, request = subject, subject.request
        self.captured, self.size, self.profile = subject.captured, subject.size, subject.profile
        self.searched, self.open = subject.searched, subject.open
        self.mesh, self.axis_sizes = request.axes, request.sizes
        self.preset = preset or request.origin
        self.outputs = wanted_outputs(subject.captured, request.outputs, len(request.axes))
        self.pinned, self.input_layouts = pinned or {}, input_layouts or {}
        self.permits = Permits(subject, preset, self.pinned.keys())
        self.constraints, self.pins = self.permits.constraints, self.permits.pins
        self.unruled: dict[str, int] = {}
        self._options: dict[fx.Node, list[Option] | None] = {}
        self._ends: dict[fx.Node, tuple[_Ends, Sequence[tuple[fx.Node, int]]]] = {}
        # What is alike is worked out once: options by the kind of node, prices by the options on both sides.
        self._of_kind: dict[Hashable, tuple[list[Option] | None, bool]] = {}  # with whether they have a rule
        self._left: dict[Hashable, list[Option]] = {}
        self._ends_alike: dict[Hashable, _Ends] = {}
        self._own_prices: dict[Hashable, tuple[np.ndarray, np.ndarray | None]] = {}
        self.overlaps = Overlaps(subject)
        self._pricer = Pricer(subject, partial(self.permits.forbidden, self.options), self.overlaps)

    # -- options ----------------------------------------------------------------------------------------------------

    @cached_property
    def problem(self) -> Problem:
        """Every option and price.

        Variables are numbered as the graph runs, a parameter's just before its first reader's and in its layer, and a
        shared layout's just after its producer's, so that layers that are alike have variables in the same order.
        """
        problem = Problem(hidden={count: Factors() for count in self.overlaps.counts})
        readers, leaving = self._consumers()
        operators = [n for n in self.captured.graph.nodes if n.op == "call_function" and self.options(n) is not None]
        for node in operators:
            if (layer := self.open.get(node)) is not None and layer not in problem.again:
                problem.again[layer] = variable = problem.add(1 + len(RECOMPUTED), (layer,))
                if layer in self.subject.checkpointed:
                    answers = np.array([0.0 if much == FULL else np.inf for much in (None, *RECOMPUTED)])
                    problem.factors.add((variable,), answers)
            for operand in self.size.operands(node):
                if operand.op == "placeholder" and operand not in problem.variables:
                    self._add(problem, operand, readers, leaving, layers_of(node))
            self._add(problem, node, readers, leaving, layers_of(node))
        for node in self.captured.graph.nodes:
            if node.op == "placeholder" and node not in problem.variables:
                self._add(problem, node, readers, leaving, ())
        for producer in problem.variables.values():
            self._connect(problem, producer)
        return problem

    def _recomputation_variable(self, problem: Problem, node: fx.Node) -> tuple[int, ...]:
        """The variable that says how much of a node's layer runs again, where there is one."""
        return (problem.again[self.open[node]],) if node in self.open else ()

    def _consumers(self) -> tuple[dict[fx.Node, list[tuple[fx.Node, int]]], dict[fx.Node, list[Layout]]]:
        """Who reads each tensor, and the layouts in which it leaves the graph."""
        readers: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
        leaving: dict[fx.Node, list[Layout]] = {}
        for node in self.captured.graph.nodes:
            if node.op == "call_function":
                for i, operand in enumerate(self.size.operands(node)):
                    readers.setdefault(operand, []).append((node, i))
        for value, layout in zip(self.captured.graph.output_node().args[0], self.outputs, strict=True):  # type: ignore[arg-type]
            if isinstance(value, fx.Node) and layout is not None:
                leaving.setdefault(value, []).append(layout)
        return readers, leaving

    def _add(
        self,
        problem: Problem,
        node: fx.Node,
        readers: Mapping[fx.Node, Sequence[tuple[fx.Node, int]]],
        leaving: Mapping[fx.Node, Sequence[Layout]],
        layers: tuple[str, ...],
    ) -> None:
        options = self.options(node)
        assert options is not None
        variable = Variable(node, options, problem.add(len(options), layers))
        problem.variables[node] = variable
        alike = id(options), node in self.open, node in self.subject.repeated
        if alike not in self._own_prices:
            seconds = np.array([o.seconds for o in options])
            saved = np.array([o.saved_bytes for o in options])
            if node in self.open:
                again = np.array([o.again for o in options])
                seconds = np.stack(
                    [seconds, seconds + again * (node in self.subject.repeated), seconds + again], axis=-1
                )
                saved = np.stack([saved, [o.kept_bytes for o in options], [o.left_bytes for o in options]], axis=-1)
            self._own_prices[alike] = seconds, saved if saved.any() else None
        option_seconds, option_bytes = self._own_prices[alike]
        scope = variable.number, *self._recomputation_variable(problem, node)
        problem.factors.add(scope, option_seconds)
        if option_bytes is not None:
            problem.usage.add(scope, option_bytes)
        consumers, leaves = readers.get(node, ()), leaving.get(node, ())
        if not consumers and not leaves:
            return
        # Worked out once for tensors that are alike and whose consumers are.
        options_of = self._options
        layer = self.open.get(node)
        at = tuple([(id(options_of[r]), position, self.open.get(r) == layer) for r, position in consumers])
        key = (
            alike,
            self.size.tensor(node),
            node in self.searched,
            node.name in self.captured.parameters,
            at,
            tuple(leaves),
        )
        ends = self._ends_alike.get(key)
        if ends is None:
            ends = self._ends_alike[key] = _Ends(self._shared_layouts(node, options, consumers, leaves), leaves)
        self._ends[node] = ends, consumers
        if ends.shared is not None:
            problem.readers[node] = ends.shared, problem.add(len(ends.shared), layers)

    def _shared_layouts(
        self,
        node: fx.Node,
        options: Sequence[Option],
        readers: Sequence[tuple[fx.Node, int]],
        leaving: Sequence[Layout],
    ) -> list[Layout] | None:
        """The layouts in which several consumers may read a tensor; None for one consumer."""
        # What depends on no parameter and no input is whole on every rank; each reader cuts what it needs.
        if node not in self.searched or len(readers) + len(leaving) < 2:
            return None
        wanted: dict[Layout, None] = {}
        for reader, position in readers:
            wanted |= dict.fromkeys([o.needs[position] for o in self.options(reader) or ()])
        if node.name not in self.captured.parameters:
            wanted |= dict.fromkeys([o.result for o in options])
        return list(wanted)

    def options(self, node: fx.Node) -> list[Option] | None:
        """The ways to run an operator or to keep a parameter; None for a node that has no choice and no tensors.

        Nodes that are alike have the very same list.
        """
        if node not in self._options:
            kind = self._kind(node)
            if kind not in self._of_kind:
                if node.op == "placeholder" and node.name in self.captured.parameters:
                    options: list[Option] | None = self._parameter_options(node)
                elif node.op == "placeholder":
                    options = [Option((), (), self.input_layouts.get(node.name, self.subject.invariant), 0.0)]
                elif node.op != "call_function" or not tensor_operands(node) and not is_tensor(node):
                    options = None
                elif not is_tensor(node) or node.target is operator.getitem or node not in self.searched:
                    needs = tuple(self.subject.invariant for _ in tensor_operands(node))
                    options = [Option((INVARIANT_MODE,) * len(self.axis_sizes), needs, self.subject.invariant, 0.0)]
                else:
                    options = operator_options(
                        node,
                        self.axis_sizes,
                        self.profile,
                        self.size,
                        self.permits.allows,
                        parts=self.subject.parts(node),
                    )
                    if not options:
                        raise NoOption(node)
                self._of_kind[kind] = options, self._rule_is_known(node)
            options, has_rule = self._of_kind[kind]
            self._options[node] = self._left_by_pins(node, options)
            if not has_rule:
                producer = node.args[0] if node.target is operator.getitem else node
                name = operator_name(producer.target)  # type: ignore[union-attr]
                self.unruled[name] = self.unruled.get(name, 0) + 1
        return self._options[node]

    def _left_by_pins(self, node: fx.Node, options: list[Option] | None) -> list[Option] | None:
        """The options that the user's pins leave; the same list where they leave the same."""
        if options is None or not self.pins:
            return options
        left = self.pins.options(node, options)
        key = id(options), tuple([id(o) for o in left]) if len(left) < len(options) else ()
        return self._left.setdefault(key, left)

    def _kind(self, node: fx.Node) -> Hashable:
        """What a node's options depend on."""
        if node.op == "placeholder":
            if node.name not in self.captured.parameters:
                return "input", self.input_layouts.get(node.name, self.subject.invariant)
            name = self.captured.parameters[node.name]
            users: Hashable = None
            padded = any(u.target is operators.pad_rows for u in node.users)
            if self.constraints != Constraints() or padded:
                users = tuple([self.size.call(u) for u in node.users if u.op == "call_function"])
            rest = self.captured.rest_dtypes.get(name)
            pinned = self.pinned.get(name)
            label = name if self.pins and node in self.pins else ""
            experts = self.permits.experts.parameters.get(node)
            return "parameter", self.size.tensor(node), rest, experts, pinned, users, label
        if node.op != "call_function" or self.size.tensor(node) < 0 or node not in self.searched:
            return "whole", node.op, self.size.call(node) if node.op == "call_function" else -1
        followed = self.permits.experts.factors.get(node), self.permits.sequence.get(node), node in self.permits.chunked
        return "call", self.size.call(node), followed, node in self.open, self.subject.parts(node)

    def _rule_is_known(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not is_tensor(node):
            return True
        return node.target is not operator.getitem and (node not in self.searched or rule_for(node) is not None)

    # -- parameters -------------------------------------------------------------------------------------------------

    def _parameter_options(self, node: fx.Node) -> list[Option]:
        pinned, subject = self.pinned.get(self.captured.parameters[node.name]), self.subject
        if pinned is None:
            layouts, gathers = self.permits.at_rest(node)
        else:
            layouts, gathers = [parse_layout(pinned.at_rest)], [pinned.gather]
        options = []
        for layout in layouts:
            sharded = any(p.kind == "S" for p in layout)
            rest = parameter_cost(
                self.captured, node, layout, self.axis_sizes, self.profile, offloaded=subject.offloads
            )
            seconds, held = rest.seconds / subject.microbatches, rest.bytes / subject.stages
            options += [Option((), (), layout, seconds, held, gather=g) for g in (gathers if sharded else ["per_step"])]
        return options

    # -- prices between variables -----------------------------------------------------------------------------------

    def _connect(self, problem: Problem, producer: Variable) -> None:
        """Adds what it costs to bring a tensor to all its consumers."""
        node = producer.node
        if node not in self._ends:
            return
        ends, consumers = self._ends[node]
        readers = [(problem.variables[reader], position) for reader, position in consumers]
        prices, factors = ends.prices, problem.factors
        if prices is None:
            prices = ends.prices = self._pricer.price(producer, readers, ends.leaving, ends.shared)
            if prices.saved is not None and node not in self.open:
                prices.saved = np.ascontiguousarray(prices.saved[..., 0])
            ends.again, ends.hidden = self._again_prices(producer, readers, ends, prices)
        first, scope = producer.number, (producer.number, *[reader.number for reader, _ in readers])
        if ends.shared is not None:
            first = problem.readers[node][1]
            scope = producer.number, first
        if ends.shared is not None or node not in self.searched:
            for (reader, _), table in zip(readers, prices.readers, strict=False):
                factors.add((first, reader.number), table)
            for table in prices.leaving:
                factors.add((first,), table)
        if node in self.searched:
            factors.add(scope, prices.source)
            if prices.usage is not None:
                problem.usage.add(scope, prices.usage)
            with_answer = *scope, *self._recomputation_variable(problem, node)
            if prices.saved is not None:
                problem.usage.add(with_answer, prices.saved)
            if ends.again is not None:
                factors.add(with_answer, ends.again)
            for hidden, table in zip(problem.hidden.values(), ends.hidden, strict=False):
                hidden.add(with_answer, table)

    def _again_prices(
        self, producer: Variable, readers: Sequence[Reader], ends: _Ends, prices: Prices
    ) -> tuple[np.ndarray | None, Sequence[np.ndarray]]:
        """What it takes more to bring a tensor to its consumers where its layer runs again, and what each number of
        chunks hides of the way, both by how much of the layer runs again where that is open."""
        node, layer, hidden = producer.node, self.open.get(producer.node), prices.hidden
        if layer is None:
            return None, () if hidden is None else list(hidden.sum(axis=1))
        inside = [(reader, position) for reader, position in readers if self.open.get(reader.node) == layer]
        part = every = np.zeros(prices.source.shape)
        repeats = bool(inside) and node in self.searched and bool(node.meta["backward"])
        if repeats:
            columns = ends.shared if ends.shared is not None else [o.needs[inside[0][1]] for o in inside[0][0].options]
            every, part = self._pricer.again(producer, columns)
        tables: list[np.ndarray] = []
        if hidden is not None:
            # Where all but the products runs again, linear layers are left whole.
            forward, backward = most_hidden(hidden)
            every, part = every - repeats * forward, part + forward + backward
            for first, then in hidden:
                tables.append(np.stack([first + then, 0 * first, (1 + repeats) * first + then], axis=-1))
        more = np.stack([0 * every, part, every], axis=-1)
        return more if more.any() else None, tables
