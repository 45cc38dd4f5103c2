"""The rule of reshapes, proved by execution on shapes regrouped at random."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoparallel.rules import rule_for
from autoparallel.rules.shapes import hint, runs_of_equal_product
from tests.rules.examples import real
from tests.rules.proof import Call, Example, Proof, prove

RESHAPE = torch.ops.aten.reshape.default
_PRIMES = st.lists(st.sampled_from([1, 2, 2, 3, 3, 6]), min_size=1, max_size=5)


def _grouped(primes: list[int], cuts: set[int]) -> list[int]:
    """The product of each run of numbers between the cuts."""
    edges = [0, *sorted(c for c in cuts if 0 < c < len(primes)), len(primes)]
    return [math.prod(primes[a:b]) for a, b in itertools.pairwise(edges)]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_PRIMES, st.sets(st.integers(1, 5)), st.sets(st.integers(1, 5)), st.randoms(use_true_random=False))
def test_regrouped_shapes(primes: list[int], before: set[int], after: set[int], random: object) -> None:
    if math.prod(primes) > 216:
        primes = primes[:3]
    other = list(primes)
    random.shuffle(other)  # type: ignore[attr-defined]
    source, target = _grouped(primes, before), _grouped(other, after)
    prove(Example(RESHAPE, (real(*source), target)), Proof())


def _rule(source: tuple[int, ...], target: tuple[int, ...]) -> str:
    return str(rule_for(Call(Example(RESHAPE, (real(*source), list(target))), [True], True).graph()[1]))


def test_the_rule_is_the_finest_that_strides_allow() -> None:
    assert _rule((6, 2, 8), (12, 8)) == "f0 xi1 f2 -> (f0 xo0) f2"
    assert _rule((12, 8), (3, 4, 8)) == "(f0 xi0) f1 -> f0 xo1 f1"
    assert _rule((1, 6, 1), (6,)) == "1 f1 1 -> f1"
    assert _rule((4, 6), (6, 4)) == "(f0 xi0) xi1 -> (f0 xo0) xo1"
    assert _rule((4, 0), (0, 2)) == "None"


def test_sizes_that_agree_by_chance_are_not_one_factor() -> None:
    """A batch that is 4 in the traced example is not the 4 of another dim: other batches use the same plan."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    shapes = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(Model(), (torch.ones(4, 2),), dynamic_shapes=shapes, strict=False)
    batch = next(n for n in program.graph.nodes if n.op == "placeholder").meta["val"].shape[0]
    assert isinstance(batch, torch.SymInt) and hint(batch) == 4
    assert runs_of_equal_product((batch, 4, 6), (4, batch, 6)) == [([0, 1], [0, 1]), ([2], [2])]
    assert runs_of_equal_product((batch, 4, 6), (batch, 24)) == [([0], [0]), ([1, 2], [1])]
    assert runs_of_equal_product((batch, 4, 6), (batch * 4, 6)) == [([0, 1], [0]), ([2], [1])]
    assert runs_of_equal_product((batch * 4, 6), (batch, 2, 12)) == [([0, 1], [0, 1, 2])]
