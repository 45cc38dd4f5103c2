"""The trace is the model, or it is refused: small programs, each against eager.

A program's verdict is "equal" (outputs, loss, gradients, parameters, buffers, attributes and logs of three steps agree
to 1e-9), or, where the table says so, "refused" with the line and the cure; see ``runner.py``.
"""

from __future__ import annotations

import pytest

from tests.capture.ranks import PLANS, chosen, verdict_of, verdicts
from tests.capture.registry import programs
from tests.capture.runner import Program
from tests.distributed import run_distributed

PROGRAMS = programs()
PER_CALL = 16
NAMES = [p.name for p in chosen()]
PARTS = [NAMES[i : i + PER_CALL] for i in range(0, len(NAMES), PER_CALL)]


def test_the_table_is_large_enough() -> None:
    assert len(PROGRAMS) >= 130
    assert len(chosen()) * 3 >= 130


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_one_rank(program: Program) -> None:
    (words,) = run_distributed(verdict_of, program.name, world_size=1)
    assert words == ("refused" if program.refused else "equal")


@pytest.mark.parametrize("names", PARTS, ids=lambda names: names[0])
@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks(plan: str, names: list[str]) -> None:
    expected = {p.name: "refused" if p.refused else "equal" for p in chosen()}
    assert verdicts(names, plan) == {name: [expected[name]] * 2 for name in names}
