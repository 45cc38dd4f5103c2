"""The trace is the model, or it is refused: small programs, each against eager.

A program's verdict is "equal" (outputs, loss, gradients, parameters, buffers, attributes and logs of three steps agree
to 1e-9), or, where the table says so, "refused" with the line and the cure; see ``runner.py``. By default one of 30
programs runs on one rank; in the wider tier one of sixteen does, and some on two; the slow ones are all others.
"""

from __future__ import annotations

import pytest

from autoparallel.tools.processes import ProcessError
from tests.capture.ranks import PLANS, chosen, verdict_of, verdicts, verdicts_on_one_rank
from tests.capture.registry import programs
from tests.capture.runner import Program
from tests.distributed import run_distributed

PER_CALL = 8
PROGRAMS = programs()
QUICK = {p.name for p in PROGRAMS[::44]}
LONG = {p.name for p in PROGRAMS} - {p.name for p in PROGRAMS[2::24]} - QUICK
ON_TWO_RANKS = [p.name for p in chosen()]
COUNT = -(-len(ON_TWO_RANKS) // PER_CALL)
PARTS = [ON_TWO_RANKS[i::COUNT] for i in range(COUNT)]  # each of all subjects
WIDE_PARTS = 1


def test_the_table_is_large_enough() -> None:
    assert len(PROGRAMS) >= 1300 and len(QUICK) >= 30
    assert sum(map(len, PARTS[:WIDE_PARTS])) >= 7


@pytest.fixture(scope="module")
def one_rank(request: pytest.FixtureRequest) -> dict[str, str]:
    """The verdicts of all programs that this session runs, or none if one of them ends its process."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == test_one_rank.__name__]
    try:
        return verdicts_on_one_rank([item.callspec.params["program"].name for item in tests])  # type: ignore[attr-defined]
    except ProcessError:
        return {}


@pytest.mark.timeout(6000)  # the first of them waits for all
@pytest.mark.slow_where(lambda program: program.name in LONG)
@pytest.mark.wide_where(lambda program: program.name not in QUICK)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_one_rank(program: Program, one_rank: dict[str, str]) -> None:
    words = one_rank.get(program.name) or run_distributed(verdict_of, program.name, world_size=1)[0]
    assert words == ("refused" if program.refused else "equal")


@pytest.mark.slow_where(lambda names: names not in PARTS[:WIDE_PARTS])
@pytest.mark.wide
@pytest.mark.parametrize("names", PARTS, ids=lambda names: names[0])
@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks(plan: str, names: list[str]) -> None:
    expected = {p.name: "refused" if p.refused else "equal" for p in chosen()}
    assert verdicts(names, plan) == {name: [expected[name]] * 2 for name in names}
