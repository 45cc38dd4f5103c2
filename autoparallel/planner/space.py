"""The space of choices that the search explores, and their prices.

The variables are

- for each operator: its mode on every mesh axis (``rules.typing``), which gives the layouts it needs and makes;
- for each tensor with several consumers: the layout they all read it in, so that a redistribution shared by several
  consumers is one choice with one price;
- for each parameter: its layout at rest, and whether it is gathered per use or per microbatch.

The costs are compute and memory traffic on local sizes, forward and backward, and redistributions, forward and
backward, between what one side makes and the other needs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from autoparallel import ops
from autoparallel.capture import Captured
from autoparallel.passes.insert_collectives import Sizes, call_modes, operand_fits
from autoparallel.placements import Invariant, Layout, Shard, divides, parse_layout, reaches_all
from autoparallel.plan import ParameterPlan, PlanError
from autoparallel.planner.cost import bytes_kept, exchange_seconds, operator_seconds, update_seconds
from autoparallel.planner.elimination import Factor
from autoparallel.planner.experts import Experts, find_experts
from autoparallel.planner.hardware import Profile
from autoparallel.planner.pins import Pins, ResolvedPins
from autoparallel.planner.presets import Constraints
from autoparallel.redistribution import Redistributor, local_numel
from autoparallel.rules import operator_name, rule_for
from autoparallel.rules.calls import is_tensor, tensor_operands
from autoparallel.rules.typing import INVARIANT_MODE, Mode, Typed


@dataclass(frozen=True)
class Option:
    """One way to run an operator on the whole mesh, or to keep a parameter."""

    modes: tuple[Mode, ...]
    needs: tuple[Layout, ...]
    result: Layout
    seconds: float
    saved_bytes: float = 0.0
    gather: str = ""


@dataclass
class Variable:
    """The choice of one node, and its number in the factor graph."""

    node: fx.Node
    options: list[Option]
    number: int


@dataclass
class Problem:
    """A factor graph and what its variables mean.

    Attributes:
        sizes: the number of options of each variable.
        factors: cost in seconds.
        usage: memory in bytes.
        variables: operator and parameter variables, by node.
        readers: the layouts of the shared-layout variables, by node, with the variable's number.
    """

    sizes: list[int] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    usage: list[Factor] = field(default_factory=list)
    variables: dict[fx.Node, Variable] = field(default_factory=dict)
    readers: dict[fx.Node, tuple[list[Layout], int]] = field(default_factory=dict)

    def add(self, count: int) -> int:
        """A new variable with so many options."""
        self.sizes.append(count)
        return len(self.sizes) - 1


class SearchSpace:
    """The choices for one captured graph on one mesh, and their costs."""

    def __init__(
        self,
        captured: Captured,
        mesh: Sequence[tuple[str, int]],
        profile: Profile,
        constraints: Constraints,
        redistributor: Redistributor,
        outputs: Sequence[Layout | None],
        pinned: Mapping[str, ParameterPlan] | None = None,
        input_layouts: Mapping[str, Layout] | None = None,
        pins: ResolvedPins | None = None,
    ) -> None:
        self.captured, self.mesh, self.profile = captured, tuple(mesh), profile
        self.constraints, self.redistributor = constraints, redistributor
        self.outputs, self.pinned = outputs, pinned or {}
        self.input_layouts = input_layouts or {}
        self.pins = pins or Pins().resolve(captured, self.mesh)
        self.axis_sizes = tuple(n for _, n in mesh)
        self.axes = range(len(self.axis_sizes))
        self.invariant: Layout = (Invariant,) * len(self.axis_sizes)
        self.size = Sizes(captured.actual)
        self.searched = self._descendants()
        self.experts = self._find_experts()
        self.unruled: dict[str, int] = {}
        self._known: dict[fx.Node, list[Option] | None] = {}

    # -- options ----------------------------------------------------------------------------------------------------

    def _descendants(self) -> set[fx.Node]:
        """Nodes that depend on a parameter or an input; the others (masks, positions) are set aside: every rank
        computes them whole."""
        roots = {*self.captured.parameters, *(n for n in self.captured.inputs if n is not None)}
        found: set[fx.Node] = set()
        for node in self.captured.graph.nodes:
            if node.name in roots or any(n in found for n in tensor_operands(node)):
                found.add(node)
        return found

    def _find_experts(self) -> Experts:
        if not self.constraints.expert:
            return Experts()
        found = find_experts(self.captured.graph, self.captured.parameters)
        if self.constraints.needs_experts and not found.parameters:
            raise PlanError(
                "the plan 'expert_parallel' found no experts in the model: stack their weights in one parameter "
                "[experts, in, out] that a batched or grouped matrix product uses, or use plan='data_parallel'"
            )
        count = 1
        for axis in self.constraints.expert:
            count *= self.axis_sizes[axis]
        for node, dim in found.parameters.items():
            if self.size.shape(node)[dim] % count:
                raise PlanError(
                    f"{self.captured.parameters[node.name]} stacks {self.size.shape(node)[dim]} experts, which do not "
                    f"divide by the {count} ranks of the mesh axis 'ep': change the number of experts or the mesh"
                )
        return found

    def build(self, keep: Callable[[fx.Node, Option], bool] | None = None) -> Problem:
        """Lists every option and price; with ``keep``, only of the options for which it is true."""
        problem = Problem()
        for node in self.captured.graph.nodes:
            options = self.options(node)
            if options is not None:
                options = [o for o in options if keep is None or keep(node, o)]
                variable = Variable(node, options, problem.add(len(options)))
                problem.variables[node] = variable
                problem.factors.append(Factor((variable.number,), np.array([o.seconds for o in options])))
                saved = np.array([o.saved_bytes for o in options])
                if saved.any():
                    problem.usage.append(Factor((variable.number,), saved))
        self._connect(problem)
        return problem

    def options(self, node: fx.Node) -> list[Option] | None:
        """The ways to run an operator or to keep a parameter; None for a node that has no choice and no tensors."""
        if node not in self._known:
            options = self._options(node)
            self._known[node] = None if options is None else self.pins.options(node, options)
        return self._known[node]

    def _options(self, node: fx.Node) -> list[Option] | None:
        if node.op == "placeholder":
            if node.name in self.captured.parameters:
                return self._parameter_options(node)
            return [Option((), (), self.input_layouts.get(node.name, self.invariant), 0.0)]
        if node.op != "call_function" or not tensor_operands(node) and not is_tensor(node):
            return None
        if not is_tensor(node):
            return self._whole_option(node)
        if node.target is operator.getitem:
            self._count_unruled(node.args[0])  # type: ignore[arg-type]
            return self._whole_option(node)
        if node not in self.searched:
            return self._whole_option(node)
        if rule_for(node) is None:
            self._count_unruled(node)
        return self._operator_options(node)

    def _count_unruled(self, node: fx.Node) -> None:
        name = operator_name(node.target)
        self.unruled[name] = self.unruled.get(name, 0) + 1

    def _whole_option(self, node: fx.Node) -> list[Option]:
        needs = tuple(self.invariant for _ in tensor_operands(node))
        return [Option((INVARIANT_MODE,) * len(self.axis_sizes), needs, self.invariant, 0.0)]

    def _operator_options(self, node: fx.Node) -> list[Option]:
        ways = call_modes(node)
        operands = tensor_operands(node)
        shapes = [self.size.shape(o) for o in operands]
        result_shape = self.size.shape(node)
        best: dict[tuple[tuple[Layout, ...], Layout], Option] = {}
        for combination in itertools.product(ways, repeat=len(self.axis_sizes)):
            if not self._allowed(node, combination):
                continue
            needs = tuple(tuple(t.operands[i] for t in combination) for i in range(len(operands)))
            result = tuple(t.result for t in combination)
            if not self._divides(result_shape, result):
                continue
            if not all(self._can_read(node, shape, need) for shape, need in zip(shapes, needs, strict=True)):
                continue
            seconds, saved = self._operator_seconds(node, combination, shapes, needs, result_shape, result)
            option = Option(tuple(t.mode for t in combination), needs, result, seconds, saved)
            known = best.get((needs, result))
            if known is None or option.seconds < known.seconds:
                best[needs, result] = option
        if not best:
            raise PlanError(self.explain_unsatisfiable(node.meta["key"]))
        return list(best.values())

    def _can_read(self, node: fx.Node, shape: tuple[int, ...], layout: Layout) -> bool:
        """Whether an operator can read an operand of this shape that lies so."""
        return operand_fits(node, shape, self.size.shape(node), layout, self.axis_sizes)

    def _divides(self, shape: tuple[int, ...], layout: Layout) -> bool:
        sizes = self.axis_sizes
        return divides(shape, layout, sizes) and reaches_all(shape, layout, sizes)

    def _allowed(self, node: fx.Node, combination: Sequence[Typed]) -> bool:
        """Whether a preset permits these modes: data axes cut the batch wherever there is one, tensor axes never do."""
        for axis in self.constraints.tensor:
            mode = combination[axis].mode
            if mode.kind == "shard" and self._is_batch(node, mode.factor):
                return False
        if self.constraints.data and node.meta["differentiable"]:
            batched = any(t.mode.kind == "shard" and self._is_batch(node, t.mode.factor) for t in call_modes(node))
            for axis in self.constraints.data if batched else ():
                mode = combination[axis].mode
                if axis in self.constraints.expert and node in self.experts.factors:
                    continue
                if mode.kind != "shard" or not self._is_batch(node, mode.factor):
                    return False
        if node in self.experts.factors:
            rule = rule_for(node)
            wanted = rule.exchanged() if rule is not None and rule.exchange else self.experts.factors[node]
            modes = [combination[axis].mode for axis in self.constraints.expert]
            return all(m.kind == "shard" and m.factor == wanted for m in modes)
        return True

    def _is_batch(self, node: fx.Node, factor: str) -> bool:
        rule = rule_for(node)
        open_size = rule is not None and not isinstance(rule.sizes.get(factor, 1), int)
        return open_size or factor in node.meta.get("batch_factors", ())

    def _operator_seconds(
        self,
        node: fx.Node,
        combination: Sequence[Typed],
        shapes: Sequence[tuple[int, ...]],
        needs: Sequence[Layout],
        result_shape: tuple[int, ...],
        result: Layout,
    ) -> tuple[float, float]:
        val = node.meta["val"]
        result_bytes = local_numel(result_shape, result, self.axis_sizes) * val.element_size()
        moved = result_bytes + sum(
            local_numel(s, layout, self.axis_sizes) * o.meta["val"].element_size()
            for s, layout, o in zip(shapes, needs, tensor_operands(node), strict=True)
        )
        modes = [t.mode for t in combination]
        seconds, backward = operator_seconds(
            self.profile, rule_for(node), modes, self.axis_sizes, self.size, moved, val.dtype
        )
        rule = rule_for(node)
        if rule is not None and rule.exchange:
            moving = exchange_seconds(self.profile, rule, modes, self.axis_sizes, self.size, val.element_size())
            seconds, backward = seconds + moving, backward + 2 * moving
        if node.meta["backward"]:
            seconds += backward
        return seconds, float(result_bytes) if node.meta["backward"] else 0.0

    def explain_unsatisfiable(self, where: str) -> str:
        """Why a preset does not fit the model, and what to change."""
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh)
        rows = ", ".join(str(n) for n in sorted(set(self.captured.actual.values())))
        need = 1
        for axis in self.constraints.data:
            need *= self.axis_sizes[axis]
        at = f" at {where}" if where else ""
        return (
            f"the plan does not fit the model on the mesh ({mesh}){at}: a batch of {rows or 'fixed'} rows must divide "
            f"by {need}, the ranks that shard it; change the batch or the mesh, or use plan='auto'"
        )

    # -- parameters -------------------------------------------------------------------------------------------------

    def _parameter_options(self, node: fx.Node) -> list[Option]:
        name = self.captured.parameters[node.name]
        shape = self.size.shape(node)
        itemsize = self.captured.rest_dtypes.get(name, node.meta["val"].dtype).itemsize
        if name in self.pinned:
            plan = self.pinned[name]
            layouts = [parse_layout(plan.at_rest)]
            gathers = [plan.gather]
        else:
            fills = [user for user in node.users if user.target is ops.pad_rows]
            if node in self.pins:
                layouts = self._pinned_layouts(node, shape)
            else:
                layouts = self._layouts_at_rest(shape, self.experts.parameters.get(node), fills)
            gathers = ["per_step", "per_use"]
            if self.constraints.gather_per_use and node not in self.pins:
                gathers = ["per_use"]
        options = []
        for layout in layouts:
            sharded = any(p.kind == "S" for p in layout)
            at_rest = itemsize * local_numel(shape, layout, self.axis_sizes)
            kept = bytes_kept(at_rest, bool(node.meta["differentiable"]))
            update = update_seconds(self.profile, kept)
            for gather in gathers if sharded else ["per_step"]:
                options.append(Option((), (), layout, update, float(kept), gather))
        return options

    def _pinned_layouts(self, node: fx.Node, shape: tuple[int, ...]) -> list[Layout]:
        """The layouts that a user's pins leave, whatever the preset permits."""
        choices = [Invariant, *(Shard(d) for d in range(len(shape)))]
        offered = [
            x for x in itertools.product(choices, repeat=len(self.axis_sizes)) if reaches_all(shape, x, self.axis_sizes)
        ]
        return self.pins.layouts(node, offered)

    def _layouts_at_rest(
        self, shape: tuple[int, ...], experts: int | None = None, fills: Sequence[fx.Node] = ()
    ) -> list[Layout]:
        """The layouts that the preset permits.

        Args:
            experts: the dim of the experts, where a parameter stacks them.
            fills: the operators that fill the parameter up.
        """
        choices = [Invariant, *(Shard(d) for d in range(len(shape)))]
        layouts = [
            c for c in itertools.product(choices, repeat=len(self.axis_sizes)) if reaches_all(shape, c, self.axis_sizes)
        ]
        needed = self._without_needless_padding(shape, layouts)
        layouts = [x for x in layouts if x in needed or any(self._can_read(fill, shape, x) for fill in fills)]
        data = self.constraints.data
        if experts is not None:
            layouts = [x for x in layouts if all(x[a] == Shard(experts) for a in self.constraints.expert)]
            data = data - self.constraints.expert
        if data:
            rest = self.constraints.sharded_at_rest & data
            layouts = [x for x in layouts if all(x[a].kind == "I" for a in data - rest)]
            if rest:
                most = max(sum(x[a].kind == "S" for a in rest) for x in layouts)
                layouts = [x for x in layouts if sum(x[a].kind == "S" for a in rest) == most]
        return layouts

    def _without_needless_padding(self, shape: tuple[int, ...], layouts: Sequence[Layout]) -> list[Layout]:
        """Of the uneven layouts over the same axes only the smallest, and none where an even one is over these axes.

        Only ``pad_rows`` reads an uneven layout; else all that one is good for is what it does not keep.
        """
        best: dict[tuple[bool, ...], Layout] = {}
        for layout in sorted(layouts, key=lambda x: local_numel(shape, x, self.axis_sizes)):
            best.setdefault(tuple(p.kind == "S" for p in layout), layout)
        return [x for x in layouts if self._divides(shape, x) or x in best.values()]

    # -- prices between variables -----------------------------------------------------------------------------------

    def _connect(self, problem: Problem) -> None:
        consumers: dict[fx.Node, list[tuple[Variable, int]]] = {}
        for variable in problem.variables.values():
            if variable.node.op == "placeholder":
                continue
            for i, operand in enumerate(tensor_operands(variable.node)):
                consumers.setdefault(operand, []).append((variable, i))
        final: dict[fx.Node, list[Layout | None]] = {}
        for value, layout in zip(self.captured.graph.output_node().args[0], self.outputs, strict=True):  # type: ignore[arg-type]
            if isinstance(value, fx.Node) and value in problem.variables:
                final.setdefault(value, []).append(layout)
        for node, producer in problem.variables.items():
            readers = consumers.get(node, [])
            leaving = [layout for layout in final.get(node, []) if layout is not None]
            if not readers and not leaving:
                continue
            if len(readers) + len(leaving) == 1:
                self._price_edge(problem, producer, readers, leaving)
            else:
                self._price_shared(problem, producer, readers, leaving)

    def _table(self, node: fx.Node, backward: bool | None = None) -> tuple[dict[Layout, int], np.ndarray]:
        flows = bool(node.meta["backward"]) if backward is None else backward
        table = self.redistributor.table(
            self.size.shape(node),
            node.meta["val"].element_size(),
            bool(node.meta["differentiable"]),
            flows,
            uneven=node.name in self.captured.parameters,
        )
        return table.index, table.seconds

    def _matrix(self, node: fx.Node, rows: Sequence[Layout], columns: Sequence[Layout]) -> np.ndarray:
        index, seconds = self._table(node)
        return seconds[np.ix_([index[r] for r in rows], [index[c] for c in columns])]

    def _source_prices(self, producer: Variable, columns: Sequence[Layout]) -> np.ndarray:
        """What it costs to bring each option's result into each layout; gathers per use are paid again in backward."""
        node = producer.node
        if not is_tensor(node):
            return np.zeros((len(producer.options), len(columns)))
        prices = self._matrix(node, [o.result for o in producer.options], columns)
        if node.name in self.captured.parameters:
            index, forward = self._table(node, backward=False)
            for i, option in enumerate(producer.options):
                if option.gather == "per_use" and node.meta["backward"]:
                    prices[i] += forward[index[option.result], [index[c] for c in columns]]
            prices = prices + self._forbidden(node, producer.options, columns)
        return prices

    def _gathered_bytes(self, producer: Variable, columns: Sequence[Layout]) -> np.ndarray | None:
        node = producer.node
        if node.name not in self.captured.parameters:
            return None
        shape, itemsize = self.size.shape(node), node.meta["val"].element_size()
        usage = np.zeros((len(producer.options), len(columns)))
        for i, option in enumerate(producer.options):
            for j, column in enumerate(columns):
                held = local_numel(shape, column, self.axis_sizes)
                cast = self.captured.parameters[node.name] in self.captured.rest_dtypes
                if cast or held > local_numel(shape, option.result, self.axis_sizes):
                    copies = int(option.gather != "per_use") + int(node.meta["backward"])
                    usage[i, j] = copies * held * itemsize
        return usage

    def _forbidden(self, node: fx.Node, options: Sequence[Option], columns: Sequence[Layout]) -> np.ndarray:
        """What a preset forbids between a parameter at rest and its use, as infinite prices."""
        out = np.zeros((len(options), len(columns)))
        large = len(node.meta["val"].shape) >= 2
        whole = "R" if node.meta["differentiable"] else "I"
        stacked = self.experts.parameters.get(node)
        pinned = self.captured.parameters[node.name] in self.pinned
        free = node in self.pins  # its user knows better than the preset
        for j, column in enumerate(columns):
            for axis in self.constraints.data:
                if stacked is not None and axis in self.constraints.expert:
                    wrong = column[axis] != Shard(stacked)
                else:
                    wrong = column[axis].kind != whole
                if wrong:
                    out[:, j] = np.inf
            for i, option in enumerate(options):
                for axis in self.constraints.tensor:
                    at_rest, used = option.result[axis], column[axis]
                    if at_rest.kind == "S" and used != at_rest and not free:
                        out[i, j] = np.inf
                    kept = used if pinned else at_rest
                    if large and not free and kept.kind != "S" and self._can_shard(node, axis):
                        out[i, j] = np.inf
        return out

    def _can_shard(self, node: fx.Node, axis: int) -> bool:
        """Whether some consumer can use a parameter sharded over a tensor axis."""
        shape = self.size.shape(node)
        for user in node.users:
            if user.op != "call_function" or not is_tensor(user):
                continue
            operands = tensor_operands(user)
            for typed in call_modes(user):
                for x, p in zip(operands, typed.operands, strict=True):
                    alone = tuple(p if a == axis else Invariant for a in self.axes)
                    if x is node and p.kind == "S" and self._can_read(user, shape, alone) and not self._is_batch(
                        user, typed.mode.factor
                    ):
                        return len(node.users) == 1 or self._all_can_shard(node, p.dim)
        return False

    def _all_can_shard(self, node: fx.Node, dim: int) -> bool:
        return all(
            any(
                x is node and p == Shard(dim)
                for typed in call_modes(user)
                for x, p in zip(tensor_operands(user), typed.operands, strict=True)
            )
            for user in node.users
            if user.op == "call_function" and is_tensor(user)
        )

    def _price_edge(
        self,
        problem: Problem,
        producer: Variable,
        readers: Sequence[tuple[Variable, int]],
        leaving: Sequence[Layout],
    ) -> None:
        if leaving:
            columns = [leaving[0]]
            problem.factors.append(Factor((producer.number,), self._source_prices(producer, columns)[:, 0]))
            return
        reader, position = readers[0]
        columns = [o.needs[position] for o in reader.options]
        variables = (producer.number, reader.number)
        problem.factors.append(Factor(variables, self._source_prices(producer, columns)))
        usage = self._gathered_bytes(producer, columns)
        if usage is not None and usage.any():
            problem.usage.append(Factor(variables, usage))

    def _price_shared(
        self,
        problem: Problem,
        producer: Variable,
        readers: Sequence[tuple[Variable, int]],
        leaving: Sequence[Layout],
    ) -> None:
        wanted = {o.needs[i]: None for reader, i in readers for o in reader.options}
        if producer.node.name not in self.captured.parameters:
            wanted |= {o.result: None for o in producer.options}
        layouts = list(wanted)
        number = problem.add(len(layouts))
        problem.readers[producer.node] = (layouts, number)
        variables = (producer.number, number)
        problem.factors.append(Factor(variables, self._source_prices(producer, layouts)))
        usage = self._gathered_bytes(producer, layouts)
        if usage is not None and usage.any():
            problem.usage.append(Factor(variables, usage))
        if not is_tensor(producer.node):
            return
        for reader, position in readers:
            columns = [o.needs[position] for o in reader.options]
            problem.factors.append(Factor((number, reader.number), self._matrix(producer.node, layouts, columns)))
        for layout in leaving:
            problem.factors.append(Factor((number,), self._matrix(producer.node, layouts, [layout])[:, 0]))
