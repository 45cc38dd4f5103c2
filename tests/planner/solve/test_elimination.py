"""Variable elimination and its budgeted form against brute force and against HiGHS."""

import itertools
import math
import time
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoparallel.planner.solve import elimination, integer_program
from autoparallel.planner.solve.budget import Budget
from autoparallel.planner.solve.elimination import Infeasible, TooWide
from autoparallel.planner.solve.factors import Factor, evaluate
from autoparallel.planner.solve.layered import minimise

Problem = tuple[list[int], list[Factor]]

EASY, HARD = math.inf, -1
"""Work below which dominance is left out: any, or none."""


def random_factors(
    rng: np.random.Generator,
    sizes: Sequence[int],
    count: int,
    *,
    arity: int = 3,
    forbidden: float = 0.0,
    ties: bool = True,
) -> list[Factor]:
    """Tables over random variables in random order; with ties, costs are small integers, which add up exactly."""
    factors = []
    for _ in range(count):
        scope = tuple(int(v) for v in rng.permutation(len(sizes))[: rng.integers(1, arity + 1)])
        shape = [sizes[v] for v in scope]
        cost: np.ndarray = rng.integers(0, 5, shape).astype(np.float64) if ties else rng.random(shape)
        cost[rng.random(shape) < forbidden] = np.inf
        factors.append(Factor(scope, cost))
    return factors


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, forbidden = draw(st.integers(0, 10)), draw(st.sampled_from([0.0, 0.2, 0.5]))
    return sizes, random_factors(rng, sizes, count, forbidden=forbidden, ties=draw(st.booleans()))


def chain(variables: int, states: int, seed: int = 0) -> Problem:
    """A chain with skip edges: width 2."""
    rng = np.random.default_rng(seed)
    factors = [Factor((v,), rng.random(states)) for v in range(variables)]
    for step, every in ((1, 1), (2, 2)):
        for v in range(0, variables - step, every):
            factors.append(Factor((v, v + step), rng.random((states, states))))
    return [states] * variables, factors


def clique(variables: int, states: int) -> Problem:
    rng = np.random.default_rng(0)
    pairs = itertools.combinations(range(variables), 2)
    return [states] * variables, [Factor(pair, rng.random((states, states))) for pair in pairs]


def brute_force(sizes: Sequence[int], factors: Sequence[Factor]) -> np.ndarray:
    """The sum of all tables, for every assignment."""
    total = np.zeros(sizes)
    for factor in factors:
        order = sorted(factor.variables)
        cost = factor.cost.transpose([factor.variables.index(v) for v in order])
        total = total + cost.reshape([size if v in order else 1 for v, size in enumerate(sizes)])
    return total


class TestMinimise:
    @settings(max_examples=250, deadline=None)
    @given(small_problems(), st.sampled_from([EASY, HARD]), st.sampled_from([1, 7, 1 << 16]))
    def test_agrees_with_brute_force(self, problem: Problem, easy: float, block: int) -> None:
        sizes, factors = problem
        best = brute_force(sizes, factors).min()
        with mock.patch.multiple(elimination, _BLOCK=block, _EASY_WORK=easy):
            if np.isinf(best):
                with pytest.raises(Infeasible):
                    minimise(sizes, factors)
                return
            solution = minimise(sizes, factors)
        assert solution.cost == pytest.approx(best, abs=1e-12)
        assert solution.cost == evaluate(factors, solution.choices)
        assert all(0 <= choice < size for choice, size in zip(solution.choices, sizes, strict=True))

    @settings(max_examples=12, deadline=None, derandomize=True)  # HiGHS never ends on a rare few
    @given(st.integers(0, 2**32), st.integers(8, 16), st.booleans())
    def test_agrees_with_highs(self, seed: int, variables: int, ties: bool) -> None:
        rng = np.random.default_rng(seed)
        sizes = [int(size) for size in rng.integers(2, 6, variables)]
        factors = random_factors(rng, sizes, variables + 6, forbidden=0.1, ties=ties)
        try:
            referee = integer_program.solve(sizes, factors)
        except Infeasible:
            with pytest.raises(Infeasible):
                minimise(sizes, factors)
            return
        assert referee.cost == pytest.approx(evaluate(factors, referee.choices))
        assert referee.bound == pytest.approx(referee.cost, rel=1e-5)
        assert minimise(sizes, factors).cost == pytest.approx(referee.cost, abs=1e-5)

    @settings(max_examples=60, deadline=None)
    @given(small_problems(), st.sampled_from([1, 7, 1 << 16]))
    def test_same_input_gives_same_choices(self, problem: Problem, block: int) -> None:
        sizes, factors = problem
        assume(np.isfinite(brute_force(sizes, factors).min()))
        first = minimise(sizes, factors)
        again = minimise(sizes, [Factor(f.variables, np.asfortranarray(f.cost)) for f in factors])
        with mock.patch.object(elimination, "_BLOCK", block):
            in_blocks = minimise(sizes, factors)
        assert first == again == in_blocks

    def test_a_tie_goes_to_the_lowest_state(self) -> None:
        factors = [Factor((0,), np.array([2.0, 1.0, 1.0])), Factor((0, 1), np.zeros((3, 4)))]
        for easy in (EASY, HARD):
            with mock.patch.object(elimination, "_EASY_WORK", easy):
                assert minimise([3, 4, 2], factors).choices == (1, 0, 0)

    @mock.patch.object(elimination, "_EASY_WORK", HARD)
    def test_dominance_drops_what_a_rival_always_replaces(self) -> None:
        """State 2 of variable 0 costs 3 more than state 0, and no neighbour makes up for more than 2 of it."""
        pair = np.array([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        network = elimination.Network([3, 2], [Factor((0,), np.array([0.0, 0.0, 3.0])), Factor((0, 1), pair)])
        network.reduce(100)
        assert network.states[0].tolist() == [0, 1]

    @mock.patch.object(elimination, "_EASY_WORK", HARD)
    def test_dominance_keeps_what_saves_usage(self) -> None:
        cost, usage = np.array([1.0, 2.0, 3.0]), np.array([5.0, 1.0, 6.0])
        network = elimination.Network([3], [Factor((0,), cost)], [Factor((0,), usage)])
        network.reduce(100)
        assert network.states[0].tolist() == [0, 1]

    @mock.patch.object(elimination, "_EASY_WORK", HARD)
    def test_the_tables_given_are_left_alone(self) -> None:
        sizes, factors = chain(20, 4)
        factors += factors
        before = [factor.cost.copy() for factor in factors]
        minimise(sizes, factors)
        assert all(np.array_equal(factor.cost, copy) for factor, copy in zip(factors, before, strict=True))

    def test_tables_are_no_wider_than_the_graph(self) -> None:
        minimise(*chain(30, 3), max_table=3**2)
        minimise(*clique(5, 2), max_table=2**4)
        assert minimise([3, 3], [], max_table=1).cost == 0.0

    def test_states_without_a_choice_do_not_widen(self) -> None:
        sizes, factors = clique(5, 3)
        only_one = Factor((0,), np.array([np.inf, 0.0, np.inf]))
        minimise(sizes, [*factors, only_one], max_table=3**3)

    def test_too_wide_is_raised_before_the_work(self) -> None:
        sizes, factors = clique(12, 30)
        with pytest.raises(TooWide, match=str(30**11)) as error:
            minimise(sizes, factors)
        assert error.value.entries == 30**11
        minimise(*clique(4, 5), max_table=125)
        with pytest.raises(TooWide):
            minimise(*clique(4, 5), max_table=124)

    def test_infeasible_names_a_variable(self) -> None:
        differ = np.where(np.eye(2, dtype=bool), np.inf, 0.0)
        with pytest.raises(Infeasible, match="variable 1") as error:
            minimise([2, 2], [Factor((1,), np.full(2, np.inf)), Factor((0, 1), np.zeros((2, 2)))])
        assert error.value.variable == 1
        triangle = [Factor(pair, differ) for pair in ((1, 2), (2, 3), (1, 3))]  # two colours are not enough
        with pytest.raises(Infeasible) as error:
            minimise([2, 2, 2, 2], triangle)
        assert error.value.variable in (1, 2, 3)

    @pytest.mark.parametrize(
        "factor",
        [
            Factor((0,), np.zeros(2)),
            Factor((2,), np.zeros(3)),
            Factor((0, 0), np.zeros((3, 3))),
            Factor((0,), np.array([0.0, np.nan, 1.0])),
            Factor((0,), np.array([0.0, -np.inf, 1.0])),
        ],
        ids=["shape", "no such variable", "twice the same", "nan", "minus infinity"],
    )
    def test_malformed_tables_are_refused(self, factor: Factor) -> None:
        with pytest.raises(ValueError, match="variable"):
            minimise([3, 2], [factor])

    def test_three_thousand_variables_take_about_a_second(self) -> None:
        sizes, factors = chain(3000, 20)
        start = time.process_time()
        minimise(sizes, factors, max_table=20**2)
        assert time.process_time() - start < 4.0  # 0.3 s on an idle core


class TestBudget:
    @settings(max_examples=200, deadline=None)
    @given(small_problems(), st.integers(0, 2**32), st.floats(0.0, 1.0), st.sampled_from([EASY, HARD]))
    def test_the_optimum_lies_between_bound_and_result(
        self, problem: Problem, seed: int, tightness: float, easy: float
    ) -> None:
        sizes, factors = problem
        usage = random_factors(np.random.default_rng(seed), sizes, len(sizes), arity=2, forbidden=0.05)
        costs, usages = brute_force(sizes, factors), brute_force(sizes, usage)
        possible = np.isfinite(costs) & np.isfinite(usages)
        assume(possible.any())
        smallest, largest = usages[possible].min(), usages[possible].max()
        limit = float(np.floor(smallest + tightness * (largest - smallest)))
        best = costs[possible & (usages <= limit)].min()
        with mock.patch.object(elimination, "_EASY_WORK", easy):
            result = Budget(sizes, factors, usage).within(limit)
        assert evaluate(usage, result.choices) <= limit
        assert result.cost == evaluate(factors, result.choices)
        assert result.bound - 1e-9 <= best <= result.cost + 1e-9
        assert result.bound <= result.cost
        with pytest.raises(Infeasible, match="smallest usage") as error:
            Budget(sizes, factors, usage).within(smallest - 0.5)
        assert error.value.smallest_usage == pytest.approx(smallest)

    @pytest.mark.parametrize("seed", range(4))
    def test_highs_under_a_budget_lies_between(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sizes, factors = chain(12, 4, seed)
        usage = [Factor((v,), 1e9 * rng.random(4)) for v in range(12)]
        usage += [Factor((v, v + 1), 5e8 * rng.random((4, 4))) for v in range(11)]
        limit = 0.5 * (evaluate(usage, minimise(sizes, factors).choices) + minimise(sizes, usage).cost)
        referee = integer_program.solve(sizes, factors, (usage, limit))
        result = Budget(sizes, factors, usage).within(limit)
        assert evaluate(usage, referee.choices) <= limit * (1 + 1e-6)
        assert result.bound - 1e-5 <= referee.cost <= result.cost + 1e-5
        with pytest.raises(Infeasible):
            integer_program.solve(sizes, factors, (usage, minimise(sizes, usage).cost * 0.99))

    def test_a_large_problem_ends_near_its_bound(self) -> None:
        sizes, factors = chain(300, 8)
        rng = np.random.default_rng(1)
        usage = [Factor((v,), rng.integers(0, 10**9, 8).astype(np.float64)) for v in range(300)]
        free = evaluate(usage, minimise(sizes, factors).choices)
        result = Budget(sizes, factors, usage).within(0.7 * free)
        assert evaluate(usage, result.choices) <= 0.7 * free
        assert result.cost <= result.bound * 1.001

    def test_a_limit_that_does_not_bind_costs_nothing(self) -> None:
        sizes, factors = chain(20, 4)
        usage = [Factor((3,), np.arange(4.0))]
        for limit in (3.0, math.inf):
            result = Budget(sizes, factors, usage).within(limit)
            assert result.bound == result.cost == minimise(sizes, factors).cost

    def test_two_changes_are_exchanged_where_one_does_not_help(self) -> None:
        """The multiplier only finds (small, small): the rest of the limit is used by one variable, the dearer one."""
        factors = [Factor((0,), np.array([10.0, 0.0])), Factor((1,), np.array([11.0, 0.0]))]
        usage = [Factor((0,), np.array([0.0, 6.0])), Factor((1,), np.array([0.0, 6.0]))]
        result = Budget([2, 2], factors, usage).within(7.0)
        assert result.choices == (0, 1)
        assert result.bound <= 10.0 == result.cost
