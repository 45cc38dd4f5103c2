"""What two plans decide differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.table import Table

from autoparallel.comm.world import mesh_text
from autoparallel.decisions.decisions import Decisions
from autoparallel.placements import parse_layout
from autoparallel.report.explain import describe_layout, describe_modes, fold, plain_table, recomputed
from autoparallel.text import duration, plain_text, units

ABSENT = "(absent)"


def diff_plans(first: Decisions, second: Decisions) -> str:
    """The differences as text: mesh, preset, parameters, operators, and the predictions where both have one."""
    parts: list[Table | str] = []
    heads = [f"{mesh_text(p.mesh)}, {p.origin}" for p in (first, second)]
    if heads[0] != heads[1]:
        parts.append(f"{heads[0]}  ->  {heads[1]}")
    if first.fingerprint != second.fingerprint:
        parts.append("The plans are for different models: what only one of them has is absent from the other.")
    tables = [
        _differences("parameter", _parameters(first), _parameters(second)),
        _differences("operator", _operators(first), _operators(second)),
        _differences("read as", _shared(first), _shared(second)),
    ]
    parts += [table for table in tables if table is not None]
    if first.recompute != second.recompute:
        was, now = (recomputed(plan) or "nothing" for plan in (first, second))
        parts.append(f"Recomputed in the backward: {was}; now {now}.")
    same = not parts
    if first.prediction is not None and second.prediction is not None and not same:
        parts.append(_predictions(first, second))
    return plain_text(*parts) if not same else "The plans decide the same."


def _parameters(plan: Decisions) -> dict[str, str]:
    found = {}
    for name, parameter in plan.parameters.items():
        words = describe_layout(plan.at_rest(name), plan.axis_names)
        if any(p.kind == "S" for p in plan.at_rest(name)):
            words += f", gathered {parameter.gather.replace('_', ' ')}"
        if parameter.reduce != "per_step":
            words += f", reduced {parameter.reduce.replace('_', ' ')}"
        if parameter.rows is not None:
            words += f", padded to {parameter.rows} rows in use"
        found[name] = words
    return found


def _operators(plan: Decisions) -> dict[str, str]:
    return {key.replace("/", ".", 1): describe_modes(modes, plan.axis_names) for key, modes in plan.operators.items()}


def _shared(plan: Decisions) -> dict[str, str]:
    return {
        key.replace("/", ".", 1): describe_layout(parse_layout(text), plan.axis_names)
        for key, text in plan.shared.items()
    }


def _differences(what: str, a: Mapping[str, str], b: Mapping[str, str]) -> Table | None:
    rows = [
        (key, (a.get(key, ABSENT), b.get(key, ABSENT)))
        for key in dict.fromkeys([*a, *b])
        if a.get(key, ABSENT) != b.get(key, ABSENT)
    ]
    if not rows:
        return None
    table = plain_table(what, "first", "second")
    for key, (one, other) in fold(rows):
        table.add_row(key, one, other)
    return table


def _predictions(first: Decisions, second: Decisions) -> Table:
    assert first.prediction is not None and second.prediction is not None
    a, b = first.prediction, second.prediction
    rows: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("time of a step", a.seconds(), b.seconds(), duration),
        ("memory per device", a.total_memory, b.total_memory, units),
        ("bytes that each rank sends", a.step().total_bytes, b.step().total_bytes, units),
    ]
    table = plain_table("predicted", "first", "second", "change", right=("first", "second", "change"))
    for what, one, other, show in rows:
        change = f"{(other / one - 1) * 100:+.1f}%" if one else ""
        table.add_row(what, show(one), show(other), change)
    return table
