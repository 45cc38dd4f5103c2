"""Eliminating each kind of layers once changes nothing but the time; and what wide graphs fall back on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import H100, Profile
from autoparallel.plan import Plan
from autoparallel.planner import layouts as search_module
from autoparallel.planner.axis_pairs import minimise_by_pairs
from autoparallel.planner.layouts import cheapest
from autoparallel.planner.request.request import Request
from autoparallel.planner.solve import highs, hubs, integer_program, kinds
from autoparallel.planner.solve.budget import Budget
from autoparallel.planner.solve.elimination import Infeasible, Solution, TooWide
from autoparallel.planner.solve.factors import Allowance, Factor, Factors, evaluate
from autoparallel.planner.solve.hubs import prove
from autoparallel.planner.solve.kinds import Layers
from autoparallel.planner.solve.layered import LayeredNetwork, minimise
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.space.space import SearchSpace
from autoparallel.planner.space.subject import Subject
from tests.captures import captured

Mesh = tuple[int, ...]


class Block(nn.Module):
    """A layer with a residual stream that two readers share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ReadsAll(nn.Module):
    """Layers of which each reads the weighed sum of all before it, as in DenseFormer (Pagliardini et al., 2024)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(i + 1)) for i in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer, weights in zip(self.layers, self.weights, strict=True):
            made.append(layer(torch.stack([w * y for w, y in zip(weights, made, strict=True)]).sum(0)))
        return self.head(made[-1])


def _problem(width: int, layers: int, rows: int, mesh: Mesh, profile: Profile = H100) -> Problem:
    with torch.device("meta"):
        model = nn.Sequential(*[Block(width) for _ in range(layers)], nn.Linear(width, 16))
    return _problem_of(model, width, rows, mesh, profile)


def _problem_of(model: nn.Module, width: int, rows: int, mesh: Mesh, profile: Profile = H100) -> Problem:
    x, y = torch.empty(rows, width, device="meta"), torch.empty(rows, 16, device="meta")
    graph = captured(model, x, y, loss_fn=F.mse_loss, least_batch=2 * int(np.prod(mesh)))
    names = ("a", "b", "c")[: len(mesh)]
    return Problem(SearchSpace(Subject(graph, Request(tuple(zip(names, mesh, strict=True)), profile))))


def _chain(
    seed: int, copies: int, period: int, states: int, outer: bool
) -> tuple[list[int], list[Factor], list[Factor], Layers]:
    """Layers of a few variables with random tables, something before and after, and perhaps one variable all meet."""
    generator = np.random.default_rng(seed)
    own = [generator.random(states) for _ in range(period)]
    inside = {pair: generator.random((states, states)) for pair in itertools.combinations(range(period), 2)}
    between, bytes_own = generator.random((states, states)), [generator.random(states) for _ in range(period)]
    first = 2
    sizes = [states] * (first + copies * period + 2)
    factors = [Factor((0, 1), generator.random((states, states)))]
    usage = []
    shared = generator.random((states, states))
    for copy in range(copies):
        start = first + copy * period
        factors += [Factor((start + k,), own[k]) for k in range(period)]
        factors += [Factor((start + a, start + b), table) for (a, b), table in inside.items()]
        factors.append(Factor((start - 1, start), between))
        usage += [Factor((start + k,), bytes_own[k]) for k in range(period)]
        if outer:
            factors.append(Factor((start + 1, 0), shared))
    end = first + copies * period
    factors += [Factor((end - 1, end), generator.random((states, states)))]
    factors += [Factor((end, end + 1), generator.random((states, states)))]
    layers = [(), (), *[(copy,) for copy in range(copies) for _ in range(period)], (), ()]
    return sizes, factors, usage, layers


def _ring(generator: np.random.Generator) -> tuple[list[int], list[Factor]]:
    """A ring of eight variables with three chords."""
    scopes = [(v, (v + 1) % 8) for v in range(8)] + [(0, 4), (1, 5), (2, 6)]
    return [3] * 8, [Factor(scope, generator.random((3, 3))) for scope in scopes]


class TestLayers:
    @pytest.mark.parametrize("outer", [False, True], ids=["a chain", "all meet one"])
    @pytest.mark.parametrize("seed", range(4))
    def test_the_minimum_is_that_of_the_whole_graph(self, seed: int, outer: bool) -> None:
        sizes, factors, _, layers = _chain(seed, copies=7, period=3, states=3, outer=outer)
        (kind,) = LayeredNetwork(sizes, factors, layers=layers).kinds
        # The last variable of a layer meets the next, so only the others are eliminated in the layer.
        assert kind.members[:, :3].tolist() == [[2 + 3 * i, 3 + 3 * i, 4 + 3 * i] for i in range(7)]
        assert kind.inner == (0, 1)
        found, whole = minimise(sizes, factors, layers), minimise(sizes, factors)
        assert found.cost == pytest.approx(whole.cost, rel=1e-12)
        assert found.choices == whole.choices

    @pytest.mark.parametrize("seed", range(3))
    def test_it_is_that_of_brute_force(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kinds, "_LEAST_SAVED", 1)
        sizes, factors, _, layers = _chain(seed, copies=3, period=3, states=2, outer=True)
        least = min(evaluate(factors, x) for x in itertools.product(*map(range, sizes)))
        assert LayeredNetwork(sizes, factors, layers=layers).kinds
        assert minimise(sizes, factors, layers).cost == pytest.approx(least, rel=1e-12)

    @pytest.mark.parametrize("seed", [0, 2, 3])
    def test_within_a_limit_layers_choose_differently(self, seed: int) -> None:
        sizes, factors, usage, layers = _chain(seed, copies=8, period=3, states=3, outer=False)
        limit = (evaluate(usage, minimise(sizes, factors).choices) + minimise(sizes, usage).cost) / 2
        found = Budget(sizes, factors, usage, layers).within(limit)
        assert evaluate(usage, found.choices) <= limit
        assert found.bound <= found.cost
        copies = {found.choices[2 + 3 * i : 5 + 3 * i] for i in range(8)}
        assert len(copies) > 1

    def test_a_layer_that_differs_is_of_no_kind(self) -> None:
        sizes, factors, _, layers = _chain(0, copies=9, period=3, states=3, outer=False)
        factors.append(Factor((2 + 4 * 3,), np.array([5.0, 0.0, 5.0])))
        (kind,) = LayeredNetwork(sizes, factors, layers=layers).kinds
        assert kind.members[:, 0].tolist() == [2 + 3 * i for i in range(9) if i != 4]  # on both sides of it
        assert minimise(sizes, factors, layers).cost == pytest.approx(minimise(sizes, factors).cost, rel=1e-12)

    def test_layers_inside_one_that_differs_are_of_a_kind(self) -> None:
        """A stage of blocks, as in a Swin transformer: stages differ, blocks do not."""
        sizes, factors, _, blocks = _chain(0, copies=9, period=3, states=3, outer=False)
        layers = [("stage 0", *own) if v < 17 else ("stage 1", *own) for v, own in enumerate(blocks)]
        (kind,) = LayeredNetwork(sizes, factors, layers=layers).kinds
        assert len(kind.members) == 9
        assert minimise(sizes, factors, layers).choices == minimise(sizes, factors).choices

    @pytest.mark.parametrize(("layers", "mesh"), [(2, (8, 8)), (4, (8, 8)), (4, (2, 4, 4))], ids=str)
    def test_real_layers(self, layers: int, mesh: Mesh) -> None:
        problem = _problem(512, layers, 256, mesh)
        found = minimise(problem.sizes, problem.factors, problem.layers)
        assert found.cost == pytest.approx(minimise(problem.sizes, problem.factors).cost, rel=1e-12)
        repeated = LayeredNetwork(problem.sizes, problem.factors, layers=problem.layers).kinds
        assert [len(kind.members) for kind in repeated] == ([] if layers == 2 else [layers - 2])  # all but the ends

    def test_more_layers_need_no_more_tables(self) -> None:
        rest = []
        for layers in (8, 16):
            problem = _problem(512, layers, 256, (8, 8))
            rest.append((len({*map(id, problem.space.options.values())}), len(problem._ends_alike)))
            assert len(problem.sizes) > 10 * layers
        assert rest[0] == rest[1]


class TestWideGraphs:
    @pytest.mark.wide
    def test_pairs_of_axes_come_close_and_the_bound_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        exact = cheapest(_problem(256, 2, 256, (2, 2, 2)))
        assert exact.gap == 0.0
        problem = _problem(256, 2, 256, (2, 2, 2))
        calls = []

        def once_too_wide(sizes: list[int], factors: list[Factor], layers: Layers) -> object:
            calls.append(1)
            if len(calls) == 1:
                raise TooWide(10, 1, ())
            return minimise(sizes, factors, layers)

        def always_too_wide(sizes: list[int], factors: list[Factor], layers: Layers) -> object:
            raise TooWide(10, 1, ())

        monkeypatch.setattr(integer_program, "MOST_COLUMNS", 0)
        monkeypatch.setattr(search_module, "minimise", once_too_wide)
        monkeypatch.setattr(hubs, "minimise", always_too_wide)
        monkeypatch.setattr(hubs, "BOUND_TABLE", 500)
        monkeypatch.setattr(hubs, "NARROWED_TABLE", 500)
        pairs = cheapest(problem)
        assert len(calls) > 3
        assert pairs.cost is not None and exact.cost is not None and pairs.lower_bound is not None
        assert exact.cost <= pairs.cost * (1 + 1e-12) <= 1.05 * exact.cost
        assert 0 < pairs.lower_bound < exact.cost

    def test_where_pairs_are_too_wide_one_axis_is_minimised_at_a_time(self) -> None:
        problem = _problem(256, 2, 256, (2, 2, 2))
        tried = []

        def solve(sizes: Sequence[int], factors: Factors, budget: Allowance | None) -> Solution:
            tried.append(max(sizes))
            if max(sizes) > 20:
                raise TooWide(max(sizes), 20, ())
            assert budget is None
            return minimise(sizes, factors)

        choices = minimise_by_pairs(problem, problem.factors, solve)
        assert tried[0] > 20 >= max(tried[1:]) and len(tried) > 3
        exact = minimise(problem.sizes, problem.factors).cost
        assert exact * (1 - 1e-12) <= evaluate(problem.factors, choices) <= 1.5 * exact

    def test_a_relaxed_sum_is_a_lower_bound(self) -> None:
        sizes, factors, _, layers = _chain(3, copies=3, period=5, states=4, outer=True)
        exact = minimise(sizes, factors).cost
        assert LayeredNetwork(sizes, factors, layers=layers, relax=True).bound() == pytest.approx(exact, rel=1e-12)
        assert LayeredNetwork(sizes, factors, layers=layers, max_table=16, relax=True).bound() < exact

    @pytest.mark.parametrize("most", [10**6, 64])
    def test_bounds_of_states_are_exact_or_too_low(self, most: int) -> None:
        sizes, factors, _, layers = _chain(3, copies=3, period=5, states=4, outer=True)
        kept = 8  # inside a layer
        bounds = LayeredNetwork(sizes, factors, layers=layers, max_table=most, relax=True, hub=kept).bounds()
        least = []
        for state in range(sizes[kept]):
            pin = np.full(sizes[kept], np.inf)
            pin[state] = 0.0
            least.append(minimise(sizes, [*factors, Factor((kept,), pin)]).cost)
        if most == 10**6:
            assert bounds == pytest.approx(least, rel=1e-12)
        else:
            assert (bounds <= np.array(least) * (1 + 1e-12)).all() and bounds.min() < min(least)

    @pytest.mark.wide
    @pytest.mark.parametrize("limited", [False, True])
    def test_what_is_left_is_handed_to_highs(self, limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ring again, where no elimination is possible: against all assignments, with a limit and without."""

        def too_wide(*args: object) -> object:
            raise TooWide(10, 1, ())

        generator = np.random.default_rng(1)
        sizes, factors = _ring(generator)
        usage = Factors([Factor((v,), 1e9 * generator.random(3)) for v in range(8)])
        cheapest = minimise(sizes, factors).choices
        limit = 0.9 * evaluate(usage, cheapest)
        every = list(itertools.product(range(3), repeat=8))
        best = min(evaluate(factors, c) for c in every if not limited or evaluate(usage, c) <= limit)
        start = min(every, key=lambda c: evaluate(usage, c))
        monkeypatch.setattr(hubs, "BOUND_TABLE", 27)
        monkeypatch.setattr(hubs, "NARROWED_TABLE", 27)
        monkeypatch.setattr(hubs, "minimise", too_wide)
        proved = prove(sizes, factors, start, (usage, limit) if limited else None)
        assert evaluate(factors, proved.choices) == pytest.approx(best, rel=1e-12) == proved.cost
        assert best * (1 - 2e-6) <= proved.bound <= best
        if limited:
            least = evaluate(usage, start)
            assert least <= evaluate(usage, proved.choices) <= limit < evaluate(usage, cheapest)
            with pytest.raises(Infeasible, match="within the limit") as error:
                integer_program.solve_if_small(sizes, Factors.of(factors), (usage, 0.9 * least))
            assert error.value.smallest_usage == pytest.approx(least)

    def test_highs_is_ended_when_it_does_not_look_at_the_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes, factors, *_ = _chain(3, copies=3, period=5, states=4, outer=True)
        found = integer_program.solve_if_small(sizes, Factors.of(factors))
        assert found is not None and found.cost == pytest.approx(minimise(sizes, factors).cost)
        monkeypatch.setattr(integer_program, "SECONDS", 0.0)
        monkeypatch.setattr(highs, "_GRACE", 0.0)  # not even Python starts so fast
        assert integer_program.solve_if_small(sizes, Factors.of(factors)) is None

    @pytest.mark.wide
    def test_layers_that_read_all_before_them_are_planned(self) -> None:
        """Added up with weights, as in DenseFormer: no elimination within the tables allowed, so HiGHS is asked."""
        with torch.device("meta"):
            model = ReadsAll(64, 12)
        problem = _problem_of(model, 64, 256, (8,))
        with pytest.raises(TooWide):
            minimise(problem.sizes, problem.factors)
        plan = cheapest(problem)
        assert plan.gap is not None and 0 <= plan.gap < 2e-6
        assert evaluate(problem.factors, [0] * len(problem.sizes)) > plan.cost  # type: ignore[operator]

    @pytest.mark.parametrize("seed", range(6))
    def test_what_is_proved_is_true_and_nothing_better_is_dropped(
        self, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A ring with chords, from a bad start: the optimum survives what the bounds drop."""
        sizes, factors = _ring(np.random.default_rng(seed))
        exact = minimise(sizes, factors).cost
        monkeypatch.setattr(hubs, "BOUND_TABLE", 27)
        monkeypatch.setattr(hubs, "NARROWED_TABLE", 27)
        start = [0] * 8
        proved = prove(sizes, factors, start)
        assert evaluate(factors, proved.choices) == pytest.approx(exact, rel=1e-12) == proved.bound
        proved = prove(sizes, factors, minimise(sizes, factors).choices)
        assert evaluate(factors, proved.choices) == pytest.approx(exact, rel=1e-12)
        assert proved.bound <= exact * (1 + 1e-12)


class TestPlans:
    def test_the_gap_is_kept_in_files_and_said(self) -> None:
        plan = cheapest(_problem(256, 2, 256, (8,)))
        assert plan.gap == 0.0
        again = Plan.from_json(plan.to_json())
        assert (again.cost, again.lower_bound) == (plan.cost, plan.lower_bound)
        assert "no plan can be below" in again.explain()

    def test_a_limit_that_nothing_fits_names_what_takes_most(self) -> None:
        with pytest.raises(PlanError, match=r"the smallest that a plan needs is [\d.]+ .B, most of it for .*B\)"):
            cheapest(_problem(256, 2, 256, (8,)), memory_limit=1e3)
