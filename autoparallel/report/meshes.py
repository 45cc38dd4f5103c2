"""How the mesh was chosen, in words and tables."""

from __future__ import annotations

from rich import box
from rich.table import Table

from autoparallel.comm.world import mesh_text
from autoparallel.decisions.meshes import Alternative, MeshChoice
from autoparallel.text import duration, units

HEADS = ("mesh", "step", "memory", "pipeline", "bubble", "")
_SHOWN = 8  # meshes that were not tried, by name


def choice_rows(choice: MeshChoice) -> list[list[str]]:
    """A row for each mesh that was tried, the best first, under ``HEADS``."""
    return [_row(a, choice) for a in choice.tried]


def _row(a: Alternative, choice: MeshChoice) -> list[str]:
    name = mesh_text(a.mesh)
    if a.seconds is None or a.memory is None:
        return [name, "no plan", "", "", "", a.problem]
    over = choice.capacity is not None and a.memory > choice.capacity
    schedule = f"{a.schedule}, {a.microbatches} microbatches" if a.staged else ""
    mark = "chosen" if a is choice.tried[0] else "not taken" if a.problem else ""
    memory = units(a.memory) + (" (too much)" if over else "")
    return [name, duration(a.seconds), memory, schedule, f"{a.bubble:.0%}" if a.staged else "", mark]


def choice_notes(choice: MeshChoice) -> list[str]:
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
        names = ", ".join(mesh_text(mesh) for mesh in choice.untried[:_SHOWN])
        more = f", and {len(choice.untried) - _SHOWN} more" if len(choice.untried) > _SHOWN else ""
        notes.append(f"Not tried: {names}{more}.")
    return notes


def explain_choice(choice: MeshChoice) -> list[Table | str]:
    """The choice as text."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in HEADS:
        table.add_column(head, justify="right" if head in ("step", "memory", "bubble") else "left", overflow="fold")
    for row in choice_rows(choice):
        table.add_row(*row)
    words = f"The mesh was chosen by {len(choice.tried)} searches; step and memory as they add them up:"
    return [words, table, *choice_notes(choice)]


__all__ = ["HEADS", "choice_notes", "choice_rows", "explain_choice"]
