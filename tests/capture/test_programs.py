"""The trace is the model, or it is refused: small programs, each against eager.

A program's verdict is "equal" (outputs, loss, gradients, parameters, buffers, attributes and logs of three steps agree
to 1e-9), or, where the table says so, "refused" with the line and the cure; see ``runner.py``. By default half of the
programs that can run does, and all that are refused; the others, of the same subjects, with ``-m slow``.
"""

from __future__ import annotations

import pytest

from tests.capture.ranks import PLANS, chosen, verdict_of, verdicts
from tests.capture.registry import programs
from tests.capture.runner import Program
from tests.distributed import run_distributed

PER_CALL = 13
PROGRAMS = programs()
USUAL = {p.name for i, p in enumerate(PROGRAMS) if p.refused or i % 2 == 0}
ON_TWO_RANKS = [p.name for p in chosen()]
COUNT = -(-len(ON_TWO_RANKS) // PER_CALL)
PARTS = [ON_TWO_RANKS[i::COUNT] for i in range(COUNT)]  # each of all subjects
USUAL_PARTS = 4


def test_the_table_is_large_enough() -> None:
    assert len(USUAL) >= 130
    assert sum(map(len, PARTS[:USUAL_PARTS])) * 3 >= 130


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.name not in USUAL)) for p in PROGRAMS],
    ids=str,
)
def test_one_rank(program: Program) -> None:
    (words,) = run_distributed(verdict_of, program.name, world_size=1)
    assert words == ("refused" if program.refused else "equal")


@pytest.mark.parametrize(
    "names",
    [pytest.param(p, marks=[pytest.mark.slow] * (i >= USUAL_PARTS)) for i, p in enumerate(PARTS)],
    ids=lambda names: names[0],
)
@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks(plan: str, names: list[str]) -> None:
    expected = {p.name: "refused" if p.refused else "equal" for p in chosen()}
    assert verdicts(names, plan) == {name: [expected[name]] * 2 for name in names}
