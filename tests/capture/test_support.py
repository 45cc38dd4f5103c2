"""``verify()`` objects to every program of the table whose support in the capture is taken away.

What is taken away is in ``support.py``, and which programs do not need it, with the reason. A dropout in front of the
model may not hide it.
"""

from __future__ import annotations

import pytest

from tests.capture.runner import Program
from tests.capture.support import SUPPORT, UNTOUCHED, candidates, end_of_verify

PROGRAMS = candidates()
SAMPLE = ("no_grad_branch", "straight_through", "tensor_hook_scales", "temperature", "reads_aglobal")


def test_every_subject_has_programs() -> None:
    assert {p.subject for p in PROGRAMS} == set(SUPPORT) and len(PROGRAMS) >= 90
    assert sum(map(len, UNTOUCHED.values())) < 75


@pytest.mark.slow_where(lambda program: program.name not in SAMPLE)
@pytest.mark.wide_where(lambda program: True)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_without_its_support_a_program_fails(program: Program) -> None:
    ends = [end_of_verify(program, dropout, taken=True) for dropout in (0.0, 0.3)]
    assert "passes" not in ends and "PlainModelError" not in ends


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_with_its_support_a_program_passes(program: Program) -> None:
    assert [end_of_verify(program, dropout, taken=False) for dropout in (0.0, 0.3)] == ["passes", "passes"]
