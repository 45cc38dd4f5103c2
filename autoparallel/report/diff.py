"""What two plans decide differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoparallel.comm.world import mesh_text
from autoparallel.decisions.decisions import Decisions
from autoparallel.placements import parse_layout
from autoparallel.report.words import TOTALS, describe_layout, describe_modes, describe_parameter, fold, recomputed
from autoparallel.text import Block, Table, plain_text

ABSENT = "(absent)"

_PARTS = {
    "loss_chunks": "Chunks of the loss",
    "linear_chunks": "Chunks of linear layers",
    "microbatches": "Microbatches of a call",
}


def diff_plans(first: Decisions, second: Decisions) -> str:
    """The differences as text: mesh, preset, parameters, operators, and the predictions where both have one."""
    blocks: list[Block] = []
    heads = [f"{mesh_text(p.mesh)}, {p.origin}" for p in (first, second)]
    if heads[0] != heads[1]:
        blocks.append(f"{heads[0]}  ->  {heads[1]}")
    if first.fingerprint != second.fingerprint:
        blocks.append("The plans are for different models: what only one of them has is absent from the other.")
    for what, words_of in _DECISIONS.items():
        blocks += _differences(what, words_of(first), words_of(second))
    if first.recompute != second.recompute:
        was, now = (recomputed(plan) or "nothing" for plan in (first, second))
        blocks.append(f"Recomputed in the backward: {was}; now {now}.")
    for name, what in _PARTS.items():
        was, now = getattr(first, name), getattr(second, name)
        if was != now:
            blocks.append(f"{what}: {was}; now {now}.")
    if first.offload_optimizer != second.offload_optimizer:
        places = ["host memory" if plan.offload_optimizer else "the device's memory" for plan in (first, second)]
        blocks.append(f"Optimizer states: in {places[0]}; now in {places[1]}.")
    if not blocks:
        return "The plans decide the same."
    return plain_text(*blocks, *_predictions(first, second))


_DECISIONS: Mapping[str, Callable[[Decisions], dict[str, str]]] = {
    "parameter": lambda plan: {name: describe_parameter(plan, name) for name in plan.parameters},
    "operator": lambda plan: {
        _path(key): describe_modes(modes, plan.axis_names) for key, modes in plan.operators.items()
    },
    "read as": lambda plan: {
        _path(key): describe_layout(parse_layout(text), plan.axis_names) for key, text in plan.shared.items()
    },
}
"""What a plan decides, each decision in words."""


def _path(key: str) -> str:
    """An operator's key as one path, whose numbers can be folded."""
    return key.replace("/", ".", 1)


def _differences(what: str, a: Mapping[str, str], b: Mapping[str, str]) -> list[Block]:
    pairs = {key: (a.get(key, ABSENT), b.get(key, ABSENT)) for key in [*a, *b]}
    rows = fold((key, pair) for key, pair in pairs.items() if pair[0] != pair[1])
    return [Table((what, "first", "second"), [(key, *pair) for key, pair in rows])] if rows else []


def _predictions(first: Decisions, second: Decisions) -> list[Block]:
    a, b = first.prediction, second.prediction
    if a is None or b is None:
        return []
    rows = []
    for what, (number, show) in TOTALS.items():
        one, other = number(a), number(b)
        rows.append((what, show(one), show(other), f"{(other / one - 1) * 100:+.1f}%" if one else ""))
    return [Table(("predicted", "first", "second", "change"), rows, right=("first", "second", "change"))]
