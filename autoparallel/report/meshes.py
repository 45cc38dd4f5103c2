"""How the mesh was chosen, as blocks of a report."""

from __future__ import annotations

from autoparallel.comm.world import mesh_text
from autoparallel.decisions.meshes import Alternative, MeshChoice
from autoparallel.text import Block, Table, duration, memory_of, units

SHOWN = 8
"""How many meshes that were not tried a report names."""


def choice_blocks(choice: MeshChoice | None) -> list[Block]:
    """The meshes that were tried, the best first, and why others were not taken; nothing for a mesh that was given."""
    if choice is None:
        return []
    heads = ("mesh", "step", "memory", "pipeline", "bubble", "")
    rows = [_row(alternative, choice) for alternative in choice.tried]
    words = (
        f"The mesh was chosen by {len(choice.tried)} searches; step and memory as short models tell (of a mesh that "
        "is slower anyway, those of a plan that need not fit):"
    )
    return [words, Table(heads, rows, right=("step", "memory", "bubble"), chosen=0), *_notes(choice)]


def _row(a: Alternative, choice: MeshChoice) -> list[str]:
    name = mesh_text(a.mesh)
    if a.seconds is None or a.memory is None:
        return [name, "no plan", "", "", "", a.problem]
    schedule = f"{a.schedule}, {a.microbatches} microbatches" if a.staged else ""
    mark = "chosen" if a is choice.tried[0] else "not taken" if a.problem else ""
    memory = memory_of(a.memory, choice.capacity)
    return [name, duration(a.seconds), memory, schedule, f"{a.bubble:.0%}" if a.staged else "", mark]


def _notes(choice: MeshChoice) -> list[str]:
    """Why some are not taken, the best with and without a pipeline beside each other, and what was not tried."""
    reasons = dict.fromkeys(a.problem for a in choice.tried if a.seconds is not None and a.problem)
    notes = [f"Not taken: {reason}." for reason in reasons]
    plain, staged = choice.best(staged=False), choice.best(staged=True)
    if plain is not None and staged is not None:
        assert plain.seconds is not None and plain.memory is not None
        assert staged.seconds is not None and staged.memory is not None
        notes.append(
            f"Best without a pipeline: {mesh_text(plain.mesh)}, {duration(plain.seconds)}, {units(plain.memory)}. "
            f"Best pipeline: {mesh_text(staged.mesh)}, {duration(staged.seconds)}, {units(staged.memory)}, "
            f"{staged.bubble:.0%} of its schedule waiting."
        )
    if choice.untried:
        names = ", ".join(mesh_text(mesh) for mesh in choice.untried[:SHOWN])
        more = f", and {len(choice.untried) - SHOWN} more" if len(choice.untried) > SHOWN else ""
        notes.append(f"Not tried: {names}{more}.")
    return notes
