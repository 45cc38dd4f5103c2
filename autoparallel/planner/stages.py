"""Where a model is cut into pipeline stages, by which schedule they run, and in how many microbatches.

The layouts inside of the stages are searched for first, for one microbatch on the other mesh axes.  Then the operators
are gone through in the model's order with what each costs under these layouts, and dynamic programming finds the cuts
that make the slowest stage as fast as possible, within the memory of a device: a stage keeps its parameters with
gradients and optimizer states, and the activations of as many microbatches as the schedule has in flight there.  Each
schedule is then played through with the times of its stages, and the fastest is taken.

Where no cut fits, layers run again in the backward, all but their products first, then all of them: cuts are searched
with every layer recomputed, then as few of the first layers of each rank are as its memory needs.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import fx

from autoparallel.comm.world import PIPELINE_AXIS
from autoparallel.decisions.decisions import RECOMPUTED
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import Pipeline, PipelinePlan, StageCost
from autoparallel.graph.captured import Captured
from autoparallel.graph.layers import layer_of
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.cut_stages import CutError, staged_nodes, stages_of
from autoparallel.passes.recompute_layers import kept_in_layers
from autoparallel.pipeline.schedules import SPLIT, in_flight, rank_of_stage, require_schedule
from autoparallel.placements import Invariant, Layout, dual_layout
from autoparallel.placements.modes import Mode
from autoparallel.placements.redistribution import local_numel
from autoparallel.plan import Plan
from autoparallel.planner.cuts import most_even
from autoparallel.planner.kept import kept_parts
from autoparallel.planner.request import Request
from autoparallel.planner.signatures import Signatures
from autoparallel.planner.stage_rows import Row, largest_layer, moment_of
from autoparallel.planner.thresholds import THRESHOLDS
from autoparallel.predict.cost import bytes_kept, operator_seconds
from autoparallel.rules import Rule, rule_for
from autoparallel.rules.calls import is_tensor, tensor_operands
from autoparallel.rules.ways import typed_call

Array = npt.NDArray[np.float64]

CHOICES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zero_bubble_v", 2))
"""The schedules tried, with their stages per rank, where none is asked for."""


class StagePlanner:
    """Cuts one captured graph, under a plan of the layouts inside of its stages.

    Args:
        captured: the whole graph.
        plan: the layouts on the mesh axes other than the pipeline's.
        may_recompute: the layers that may run again in the backward where nothing fits otherwise.

    Attributes:
        recompute: the layers that run again in the backward of the pipeline that was chosen last, and how much of them.
    """

    def __init__(self, captured: Captured, plan: Plan, request: Request, may_recompute: Sequence[str] = ()) -> None:
        self.captured, self.plan = captured, plan
        self.profile, self.redistributor = request.profile, request.redistributor
        self.ranks, self.memory_limit = request.stages, request.memory_limit
        self.sizes = plan.axis_sizes
        self.nodes = [n for n in staged_nodes(captured) if n.target is not operator.getitem]
        self.forbidden = self._forbidden()
        self.saved = kept_parts(captured.graph, Signatures(captured.actual), plan.loss_chunks)
        self._calls: dict[fx.Node, tuple[Rule | None, Sequence[Mode], list[Layout], Layout]] = {}
        self.may_recompute = may_recompute
        self.products = kept_in_layers(captured.graph, may_recompute)
        self.recompute: Mapping[str, str] = {}
        self._chosen: Mapping[str, str] = {}

    # -- choosing ---------------------------------------------------------------------------------------------------

    def choose(self, counts: Sequence[int], request: Pipeline, *, checked: bool = True) -> PipelinePlan:
        """The fastest pipeline among those that are asked for.

        Args:
            counts: the numbers of microbatches to try; the graph's ``actual`` sizes are those of the first.
            checked: not for a call that is not differentiated, which may have any number of microbatches: the plan
                says how many those have that are.

        Raises:
            PlanError: when none can be run, or none fits.
        """
        best: PipelinePlan | None = None
        reasons: list[str] = []
        layers = self.may_recompute if self.memory_limit is not None else ()
        means = [{}, *(dict.fromkeys(layers, much) for much in RECOMPUTED)] if layers else [{}]
        if not checked:
            assert request.schedule is not None and request.microbatches is not None
            rows = self._rows(Sizes(self.captured.actual))
            per_rank = request.stages_per_rank or 1
            return self._plan(rows, request.schedule, per_rank, request.microbatches, request.cuts, means[-1])
        for again in means:
            for count in counts:
                fewer = {s: self.captured.actual[s] * counts[0] // count for s in self.captured.batches}
                rows = self._rows(Sizes({**self.captured.actual, **fewer}))
                for schedule, per_rank in self._choices(request):
                    if again and schedule in SPLIT and request.schedule is None:
                        continue  # what runs again does so with the gradients of inputs, for which others wait
                    try:
                        require_schedule(schedule, self.ranks, per_rank, count)
                        pipeline = self._plan(rows, schedule, per_rank, count, request.cuts, again)
                    except (ValueError, CutError) as error:
                        much = f"with every layer recomputed in the backward ({again[layers[0]]}), " if again else ""
                        reasons.append(f"{much}{error}")
                        continue
                    if best is None or pipeline.seconds < best.seconds * (1 - 1e-6):
                        best, self.recompute = pipeline, self._chosen
            if best is not None:
                return best
        why = dict.fromkeys([reasons[0], reasons[-1]])
        raise PlanError(f"no pipeline over {PIPELINE_AXIS}={self.ranks} can be planned: {'; '.join(why)}")

    def _choices(self, request: Pipeline) -> Iterator[tuple[str, int]]:
        if request.schedule is None:
            for schedule, per_rank in CHOICES:
                fits = request.cuts is None or len(request.cuts) + 1 == per_rank * self.ranks
                if fits and request.stages_per_rank in (None, per_rank):
                    yield schedule, per_rank
            return
        usual = 1 if request.schedule in ("gpipe", "1f1b") else 2
        if request.cuts is not None and request.stages_per_rank is None:
            usual = max(1, (len(request.cuts) + 1) // self.ranks)
        yield request.schedule, request.stages_per_rank or usual

    def _plan(
        self,
        rows: Sequence[Row],
        schedule: str,
        per_rank: int,
        count: int,
        cuts: tuple[str, ...] | None,
        layers: Mapping[str, str],
    ) -> PipelinePlan:
        """A pipeline of this kind; where there are ``layers``, some of them run again in the backward."""
        stages = per_rank * self.ranks
        if cuts is None:
            starts = self._cut([row.recomputed(layers) for row in rows], schedule, stages, count)
        else:
            if len(cuts) + 1 != stages:
                raise PlanError(f"{len(cuts)} cuts make {len(cuts) + 1} stages, the schedule needs {stages}")
            where = stages_of(self.captured, cuts)
            starts = [sum(where[row.node] < s for row in rows) for s in range(1, stages)]
        bounds = [0, *starts, len(rows)]
        again = self._fewest_layers(rows, bounds, schedule, count, layers)
        self._chosen = again
        costs = self._costs([row.recomputed(again) for row in rows], bounds, schedule, count)
        keys = tuple(rows[i].node.meta["key"] for i in starts)
        plan = PipelinePlan(PIPELINE_AXIS, self.ranks, schedule, count, keys, tuple(costs))
        self._require_fits(plan)
        timeline = plan.played()
        return replace(plan, seconds=timeline.seconds, bubble=timeline.bubble)

    def _fewest_layers(
        self, rows: Sequence[Row], bounds: Sequence[int], schedule: str, count: int, layers: Mapping[str, str]
    ) -> dict[str, str]:
        """As few of the first of some layers of each rank's stages as must run again for its memory to suffice."""
        again: dict[str, str] = {}
        if not layers or self.memory_limit is None:
            return again
        parts = [rows[a:b] for a, b in itertools.pairwise(bounds)]
        kept = self._kept_bytes(parts, schedule)
        held = in_flight(schedule, self.ranks, len(parts), count)
        for rank in range(self.ranks):
            mine = [s for s in range(len(parts)) if rank_of_stage(schedule, self.ranks, s) == rank]
            names = [row.layer for s in mine for row in parts[s] if row.layer in layers]
            first = [(layer, layers[layer]) for layer in dict.fromkeys(names) if layer is not None]

            def needs(number: int, mine: Sequence[int] = mine, first: Sequence[tuple[str, str]] = first) -> float:
                some = {**again, **dict(first[:number])}
                chosen = {s: [row.recomputed(some) for row in parts[s]] for s in mine}
                memory = sum(self._memory(chosen[s], bounds[s], kept[s], held[s]) for s in mine)
                return memory + max(moment_of(chosen[s]) for s in mine)

            limit = self.memory_limit
            again.update(first[: bisect.bisect_left(range(len(first)), True, key=lambda n: needs(n) <= limit)])
        return {layer: again[layer] for layer in layers if layer in again}

    def _costs(self, rows: Sequence[Row], bounds: Sequence[int], schedule: str, count: int) -> list[StageCost]:
        """What every stage costs.

        Args:
            bounds: where each stage begins, and the last one ends.
        """
        parts = [rows[a:b] for a, b in itertools.pairwise(bounds)]
        held = in_flight(schedule, self.ranks, len(parts), count)
        kept = self._kept_bytes(parts, schedule)
        costs = []
        for stage, part in enumerate(parts):
            modules = [row.node.meta.get("module", "") for row in part]
            named = [m for m in modules if m] or [part[0].node.name]
            memory = self._memory(part, bounds[stage], kept[stage], held[stage])
            forward, backward = sum(row.forward for row in part), sum(row.backward for row in part)
            inputs = sum(row.inputs for row in part) / backward if backward else 0.5
            end = bounds[stage] + len(part)
            passing = float(self._crossing[end]) if stage + 1 < len(parts) else 0.0
            ends = named[0], named[-1]
            costs.append(StageCost(*ends, forward, backward, memory, held[stage], inputs, moment_of(part), passing))
        return costs

    def _kept_bytes(self, parts: Sequence[Sequence[Row]], schedule: str) -> list[float]:
        """What each stage keeps of parameters, gradients and optimizer states."""
        homes: dict[fx.Node, int] = {}  # parameter to the rank that holds it
        kept = []
        for stage, part in enumerate(parts):
            rank, total = rank_of_stage(schedule, self.ranks, stage), 0.0
            for x, (held, borrowed) in {x: sizes for row in part for x, sizes in row.reads.items()}.items():
                total += held if x not in homes else borrowed if homes[x] != rank else 0.0
                homes.setdefault(x, rank)
            kept.append(total)
        return kept

    def _memory(self, part: Sequence[Row], begin: int, kept: float, held: int) -> float:
        """What a stage keeps that begins at a row and holds the activations of so many microbatches."""
        entering = float(self._entering[begin]) if begin and part[0].again else 0.0
        return kept + held * (sum(row.activations for row in part) + entering)

    def _require_fits(self, plan: PipelinePlan) -> None:
        if self.memory_limit is None:
            return
        needs = plan.memory_by_rank()
        worst = max(range(self.ranks), key=needs.__getitem__)
        if needs[worst] > self.memory_limit:
            costs, mine = plan.stages, plan.stages_of(worst)
            names = ", ".join(f"stage {s} ({costs[s].first} to {costs[s].last})" for s in mine)
            raise PlanError(
                f"{names} needs {needs[worst] / 1e6:.1f} MB per device with {costs[mine[0]].in_flight} microbatches in "
                f"flight under {plan.schedule!r}, more than the limit of {self.memory_limit / 1e6:.1f} MB: raise "
                "memory_limit, use more stages, or smaller microbatches"
            )

    # -- cutting ----------------------------------------------------------------------------------------------------

    def _cut(self, rows: Sequence[Row], schedule: str, stages: int, count: int) -> list[int]:
        """The numbers of the rows with which the stages but the first begin."""
        layers = sum(bool(row.reads) for row in rows)
        if layers < stages:
            raise PlanError(
                f"{stages} stages are more than the {layers} operators with parameters that the model has: use fewer "
                "ranks on the pipeline's axis, or fewer stages per rank"
            )
        n = len(rows)
        places = [0, *self._places(rows), n]
        seconds = np.concatenate([[0.0], np.cumsum([row.forward + row.backward for row in rows])])[places]
        kept = np.concatenate([[0.0], np.cumsum([row.kept for row in rows])])[places]
        activations = np.concatenate([[0.0], np.cumsum([row.activations for row in rows])])[places]
        used = np.concatenate([[0], np.cumsum([bool(row.reads) for row in rows])])[places]
        moved = np.array([self._crossing[p] if 0 < p < n else 0.0 for p in places])
        again = [0 < p < n and rows[p].again for p in places]
        entering = np.array([self._entering[p] if runs else 0.0 for p, runs in zip(places, again, strict=True)])
        moments = np.maximum.reduceat([row.moment for row in rows], places[:-1])
        moment = np.zeros((len(places), len(places)))  # [begin, end], as below
        for begin in range(len(places) - 1):
            moment[begin, begin + 1 :] = np.maximum.accumulate(moments[begin:])
        moment += largest_layer(rows)
        span = seconds[None, :] - seconds[:, None]  # [begin, end]
        span = np.where(used[None, :] > used[:, None], span, np.inf)
        ranks = [rank_of_stage(schedule, self.ranks, stage) for stage in range(stages)]
        per_rank = stages // self.ranks
        flight = in_flight(schedule, self.ranks, stages, count)
        costs: list[Array] = []
        memory: list[Array] = []
        for stage in range(stages):
            cost = span
            if stage and ranks[stage - 1] != ranks[stage]:
                cost = cost + 2 * moved[:, None]
            if stage < stages - 1 and ranks[stage + 1] != ranks[stage]:
                cost = cost + 2 * moved[None, :]
            costs.append(cost)
            held = flight[stage] * (activations[None, :] - activations[:, None] + entering[:, None])
            memory.append(kept[None, :] - kept[:, None] + held)
        free = most_even(costs)
        if free is None:
            raise PlanError(f"the model cannot be cut into {stages} stages that all have parameters")

        def needs(cuts: Sequence[int]) -> float:
            spans = list(enumerate(itertools.pairwise([0, *cuts, len(places) - 1])))
            parts = [[(s, span) for s, span in spans if ranks[s] == rank] for rank in range(self.ranks)]
            return max(float(sum(memory[s][i] for s, i in part) + max(moment[i] for _, i in part)) for part in parts)

        cuts, limit = free, self.memory_limit
        if limit is not None and needs(free) > limit:
            # Each stage within its part, one moment for all of a rank's or for each; where none is, the largest stage
            # of the free cuts is named.
            for counted in (1, per_rank):
                limited = [
                    np.where(per_rank * m + counted * moment <= limit, cost, np.inf)
                    for m, cost in zip(memory, costs, strict=True)
                ]
                cuts = most_even(limited) or free
                if needs(cuts) <= limit:
                    break
        return [places[i] for i in cuts]

    def _places(self, rows: Sequence[Row]) -> list[int]:
        """Where a stage may begin; not within a layer that runs again."""
        inside = {i for i in range(1, len(rows)) if rows[i].again and rows[i].layer == rows[i - 1].layer}
        allowed = [i for i in range(1, len(rows)) if i not in self.forbidden and i not in inside]
        if len(allowed) <= THRESHOLDS.cut_places:
            return allowed
        groups = np.array_split(np.array(allowed), THRESHOLDS.cut_places)
        return [int(min(group, key=lambda i: self._crossing[int(i)])) for group in groups]

    def _forbidden(self) -> set[int]:
        """Where a cut would part those that use a buffer that changes."""
        number = {node: i for i, node in enumerate(self.nodes)}
        numbers: set[int] = set()
        for node in self.captured.graph.nodes:
            if node.op == "placeholder" and self.captured.buffers.get(node.name) in self.captured.mutated_buffers:
                places = [number[user] for user in node.users if user in number]
                if places:
                    numbers |= set(range(min(places) + 1, max(places) + 1))
        return numbers

    # -- prices -----------------------------------------------------------------------------------------------------

    def _rows(self, size: Sizes) -> list[Row]:
        whole = (Invariant,) * len(self.sizes)
        made: dict[fx.Node, Layout] = {}
        seen: set[fx.Node] = set()
        rows = []
        for node in self.nodes:
            rows.append(self._row(node, size, made, seen, whole))
            made[node] = rows[-1].result
        self._crossing = self._crossing_seconds(rows, size)
        return rows

    def _row(self, node: fx.Node, size: Sizes, made: dict[fx.Node, Layout], seen: set[fx.Node], whole: Layout) -> Row:
        if not is_tensor(node) or node.meta["key"] not in self.plan.operators:
            return Row(node, layer_of(node), 0.0, 0.0, 0.0, 0.0, 0.0, {}, whole)
        rule, modes, needs, result = self._call(node)
        operands, val = tensor_operands(node), node.meta["val"]
        result_bytes = local_numel(size.shape(node), result, self.sizes) * val.element_size()
        moved = result_bytes + sum(
            local_numel(size.shape(x), layout, self.sizes) * x.meta["val"].element_size()
            for x, layout in zip(operands, needs, strict=True)
        )
        forward, backward = operator_seconds(self.profile, rule, modes, self.sizes, size, moved, val.dtype)
        flows = bool(node.meta["backward"])
        backward = backward if flows else 0.0
        for x, need in zip(operands, needs, strict=True):
            if x in made and made[x] != need:
                table = self.redistributor.table(
                    size.shape(x), x.meta["val"].element_size(), bool(x.meta["differentiable"]), False
                )
                moving = float(table.seconds[table.index[made[x]], table.index[need]])
                forward, backward = forward + moving, backward + (moving if flows else 0.0)
        layouts = dict(zip(operands, needs, strict=True))
        reads = {x: self._kept(x, by, layouts.get(by), size) for x, by in self._parameters(node).items()}
        kept = sum(held for x, (held, _) in reads.items() if x not in seen)
        seen.update(reads)
        activations = self.saved.get(node, 0.0) * result_bytes
        layer = layer_of(node)
        outside = float(result_bytes) if flows and any(layer_of(user) != layer for user in node.users) else 0.0
        moment = float(moved) if flows else 0.0
        product = None
        if node in self.products:
            product = float(result_bytes) if flows and self.products[node] else 0.0
        return Row(node, layer, forward, backward, activations, outside, kept, reads, result, product, moment)

    def _call(self, node: fx.Node) -> tuple[Rule | None, Sequence[Mode], list[Layout], Layout]:
        """An operator's rule, how it runs, and the layouts that it needs and makes; the same for all sizes."""
        if node not in self._calls:
            modes = self.plan.modes(node.meta["key"])
            self._calls[node] = (rule_for(node), modes, *typed_call(node, modes))
        return self._calls[node]

    def _parameters(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """The parameters that a node reads, also through what follows from parameters alone; by which operand."""
        operands: dict[fx.Node, fx.Node] = {}
        pending, places = [(x, x) for x in node.all_input_nodes], set(self.nodes)
        while pending:
            x, by = pending.pop()
            if x.op == "placeholder" and x.name in self.captured.parameters:
                operands[x] = by
            elif x.op == "call_function" and x not in places and x.target is not operator.getitem:
                pending += [(y, by) for y in x.all_input_nodes]
        return operands

    def _kept(self, x: fx.Node, by: fx.Node, used: Layout | None, size: Sizes) -> tuple[float, float]:
        """The bytes of a parameter, where it lies and where it is borrowed, which is read as ``by`` in a layout.

        While a schedule runs, gradients are added up in the layout in which they are made, beside what lies at rest.
        """
        name = self.captured.parameters[x.name]
        dtype = self.captured.rest_dtypes.get(name, x.meta["val"].dtype)
        at_rest = dtype.itemsize * local_numel(size.shape(x), self.plan.at_rest(name), self.sizes)
        if not x.meta["differentiable"]:
            return float(at_rest), float(at_rest)
        sums = max(dtype.itemsize, 4) * local_numel(size.shape(x), self.plan.at_rest(name), self.sizes)
        gathered = 0
        if used is not None and math.prod(size.shape(by)) == math.prod(size.shape(x)):
            sums = max(dtype.itemsize, 4) * local_numel(size.shape(by), dual_layout(used), self.sizes)
            held = x.meta["val"].element_size() * local_numel(size.shape(by), used, self.sizes)
            gathered = held if held > at_rest and self.plan.parameters[name].gather != "per_use" else 0
        return float(bytes_kept(at_rest, True) + max(0, sums - at_rest) + gathered), float(at_rest + sums + gathered)

    def _crossing_seconds(self, rows: Sequence[Row], size: Sizes) -> Array:
        """How long the values travel that cross, forward, where a stage begins at each row; each is sent by itself.

        Beside it notes their bytes.
        """
        number = {row.node: i for i, row in enumerate(rows)}
        change, entering = np.zeros(len(rows) + 2), np.zeros(len(rows) + 2)
        for i, row in enumerate(rows):
            if not is_tensor(row.node):
                continue
            uses = [number[user] for user in row.node.users if user in number]
            if uses and max(uses) > i:
                layout = tuple(p if p.kind == "S" else Invariant for p in row.result)
                held = local_numel(size.shape(row.node), layout, self.sizes) * row.node.meta["val"].element_size()
                seconds = self.profile.latency + held / self.profile.bandwidth
                change[i + 1] += seconds
                change[max(uses) + 1] -= seconds
                entering[i + 1] += held
                entering[max(uses) + 1] -= held
        self._entering = np.cumsum(entering)
        return np.cumsum(change)
