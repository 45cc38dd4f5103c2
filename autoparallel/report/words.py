"""How reports name what a plan decides."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from autoparallel.comm.traffic import Traffic
from autoparallel.decisions.decisions import FULL, SELECTIVE, Decisions
from autoparallel.decisions.prediction import Prediction
from autoparallel.placements import Layout
from autoparallel.placements.modes import parse_mode
from autoparallel.text import duration, units

T = TypeVar("T", bound=Hashable)

TOTALS: Mapping[str, tuple[Callable[[Prediction], float], Callable[[float], str]]] = {
    "time of a step": (lambda prediction: prediction.seconds(), duration),
    "memory per device": (lambda prediction: prediction.total_memory, units),
    "bytes that each rank sends": (lambda prediction: prediction.step().total_bytes, units),
}
"""What plans are compared by: each number of a prediction, and how it is written."""


# ---------------------------------------------------------------------------------------------------------- decisions


def describe_layout(layout: Layout, axes: Sequence[str]) -> str:
    """A layout in words: ``whole``, ``dim 0 over dp``, ``dim 0 over dp, dim 1 over tp``, ``summands over tp``."""
    cuts = (f"dim {p.dim}" if p.kind == "S" else "summands" if p.kind == "P" else "" for p in layout)
    return _over(zip(cuts, axes, strict=True))


def describe_modes(modes: Sequence[str], axes: Sequence[str]) -> str:
    """How an operator runs, in words: ``whole``, ``n over tp``, ``b over dp, k over tp``."""
    parsed = map(parse_mode, modes)
    cuts = ((mode.factor or "summands") if mode.kind in ("shard", "partial") else "" for mode in parsed)
    return _over(zip(cuts, axes, strict=True))


def _over(cuts: Iterable[tuple[str, str]]) -> str:
    """What each mesh axis cuts, axes that cut the same together."""
    over: dict[str, list[str]] = {}
    for what, axis in cuts:
        if what:
            over.setdefault(what, []).append(axis)
    return ", ".join(f"{what} over {'+'.join(names)}" for what, names in over.items()) or "whole"


def describe_parameter(plan: Decisions, name: str) -> str:
    """How a parameter lies at rest, and when it is gathered and reduced, in words."""
    parameter = plan.parameters[name]
    words = describe_layout(plan.at_rest(name), plan.axis_names)
    if any(p.kind == "S" for p in plan.at_rest(name)):
        words += f", gathered {parameter.gather.replace('_', ' ')}"
    if parameter.reduce != "per_step":
        words += f", reduced {parameter.reduce.replace('_', ' ')}"
    if parameter.rows is not None:
        words += f", padded to {parameter.rows} rows in use"
    return words


def recomputed(plan: Decisions) -> str:
    """The layers that a plan recomputes, in words."""
    rows = fold(plan.recompute.items())
    whole = ", ".join(path for path, much in rows if much == FULL)
    parts = ", ".join(path for path, much in rows if much == SELECTIVE)
    words = [whole] if whole else []
    return "; ".join(
        [*words, f"{parts} but for products, attention and collectives other than gathers"] if parts else words
    )


def traffic_rows(*parts: Traffic) -> list[list[str]]:
    """A row for each kind of collective and mesh axis: how often, and how much each rank sends, in each part."""
    rows = []
    for key in sum(parts, Traffic()).collectives:
        rows.append(
            [" ".join(key), *(count_and_bytes(t.collectives.get(key, 0), t.bytes.get(key, 0.0)) for t in parts)]
        )
    return rows


def count_and_bytes(count: int, size: float) -> str:
    """The number of some collectives, and the bytes that each rank sends in them."""
    return f"{count}x {units(size)}" if count else ""


# ------------------------------------------------------------------------------------------------------------ folding


def fold(rows: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Folds rows that differ only in a number in their path: ``layers.0.up`` to ``layers.11.up`` become
    ``layers.0-11.up``, where they say the same."""
    paths = [(tuple(path.split(".")), content) for path, content in rows]
    for position in range(max((len(path) for path, _ in paths), default=0)):
        groups: dict[tuple[Hashable, T], list[tuple[str, ...]]] = {}
        for path, content in paths:
            number = position < len(path) and path[position].isdigit()
            key = (*path[:position], None, *path[position + 1 :]) if number else path
            groups.setdefault((key, content), []).append(path)
        folded: list[tuple[tuple[str, ...], T]] = []
        for (_, content), members in groups.items():
            path = members[0]
            if len(members) > 1:
                numbers = sorted(int(m[position]) for m in members)
                path = (*path[:position], _ranges(numbers), *path[position + 1 :])
            folded.append((path, content))
        paths = folded
    return [(".".join(path), content) for path, content in paths]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
