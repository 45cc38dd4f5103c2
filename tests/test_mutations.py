"""``benchmarks.mutations``: a few mutants of one model; who objects to them, and that survivors are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.passes.verify_placements import verify_placements
from benchmarks import mutations
from benchmarks.mutants import Mutant
from benchmarks.mutations import Program, Score


@pytest.fixture(scope="module")
def program() -> Program:
    made = Program("functions", "tensor_parallel", (2,))
    made.require_right()
    return made


def first(program: Program, kind: str, detail: str = "") -> Mutant:
    return next(m for m in program.mutants() if m.kind == kind and detail in m.detail)


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("layout", "verifier"),
        ("collective dropped", "verifier"),
        ("collective swapped", "verifier"),
        ("collective swapped, and its layout", "verifier"),
        ("parameter's way", "verifier"),
        ("parameter's use", "verifier"),
        ("gradient reduction moved", "verifier"),
        ("gradient reduction dropped", "verifier"),
        ("sum for mean", "verifier"),
        ("mean for sum", "verifier"),
        ("weight of the loss dropped", "verifier"),
    ],
)
def test_a_fault_is_noticed(program: Program, kind: str, outcome: str) -> None:
    assert program.outcome(first(program, kind)) == outcome


def test_the_ranks_alone_notice_a_dropped_collective(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "verify_placements", lambda module, asked, chains=None: None)
    dropped = [m for m in program.mutants() if m.kind == "collective dropped" and "P->I" in m.detail]
    assert dropped and all(program.outcome(m) in ("parity", "raises") for m in dropped)


@pytest.mark.wide
def test_what_nobody_objects_to_survives_unless_it_is_equivalent(program: Program) -> None:
    untouched = Mutant("nothing", "up", "nothing is changed", on_graph=lambda graph: None)
    assert program.outcome(untouched) == "survives"
    assert program.outcome(replace(untouched, equivalent="nothing is changed")) == "equivalent"
    score = Score()
    score.add(program, untouched, "survives")
    score.add(program, untouched, "equivalent")
    score.add(program, untouched, "verifier")
    assert score.noticed == 0.5
    assert score.survivors == ["nothing: functions, tensor_parallel on 2, up: nothing is changed"]
    assert score.table().row_count == 2


def test_a_difference_is_told_from_rounding(program: Program) -> None:
    result = program.expected
    near = replace(result, outputs=[o + 1e-13 for o in result.outputs])
    far = replace(result, gradients={n: g + 1e-6 for n, g in result.gradients.items()})
    assert not result.differs(near) and result.differs(far)
    assert result.differs(replace(result, gradients={}))
    assert result.differs(replace(result, differentiable=[not d for d in result.differentiable]))


def test_a_right_program_is_not_refused(program: Program) -> None:
    module = program.captured.module
    verify_placements(module, program.asked)
