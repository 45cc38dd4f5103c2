"""A pipeline in the HTML report: its stages, what crosses between them, and its schedule over time as inline SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence

from autoparallel.decisions.pipeline import PipelinePlan
from autoparallel.pipeline.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from autoparallel.report.pipeline import by_ends, played
from autoparallel.text import duration, units

COLOURS = {FORWARD: "#4269d0", BACKWARD: "#efb118", INPUT: "#efb118", WEIGHT: "#3ca951"}
_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "backward, gradients of inputs",
    WEIGHT: "backward, gradients of parameters",
}
_LEFT, _WIDTH, _ROW = 60.0, 900.0, 26
_NUMBERED = 14.0
"""The width from which on a box has room for the number of its microbatch."""


def stage_rows(plan: PipelinePlan) -> tuple[list[str], list[list[str]]]:
    """What each stage holds and costs: the heads of a table, and its rows."""
    traffic = plan.traffic
    sent = dict.fromkeys(range(plan.count), 0.0)
    for (source, target), borders in (by_ends(traffic.borders) if traffic is not None else {}).items():
        if borders[0].moves:
            sent[source] += plan.microbatches * sum(b.forward for b in borders)
            sent[target] += plan.microbatches * sum(b.backward for b in borders)
    rows = []
    for i, stage in enumerate(plan.stages):
        cells = [str(i), str(plan.rank_of(i)), stage.first, stage.last, duration(stage.forward)]
        cells += [duration(stage.backward), str(stage.in_flight), units(stage.memory)]
        rows.append([*cells, *([units(sent[i])] if traffic is not None else [])])
    heads = ["stage", "rank", "from", "to", "forward", "backward", "in flight", "memory"]
    return [*heads, *(["sends to others in a step"] if traffic is not None else [])], rows


def chart(plan: PipelinePlan) -> str:
    """The schedule over time: a row for each rank, a box for each forward and backward of a microbatch."""
    timeline = played(plan)
    if not timeline.seconds:
        return ""
    scale = _WIDTH / timeline.seconds
    height = _ROW * plan.ranks
    lines = [f'<svg width="1000" height="{height + 48}" role="img">']
    kinds: dict[str, None] = {}
    for rank, spans in enumerate(timeline.spans):
        y = _ROW * rank
        lines.append(f'<text x="0" y="{y + 15}" font-size="13">rank {rank}</text>')
        lines.append(f'<rect x="{_LEFT:.0f}" y="{y}" width="{_WIDTH:.0f}" height="20" fill="#f0f1f3"/>')
        for action, begin, end in spans:
            kinds[action.kind] = None
            lines += _box(action, _LEFT + begin * scale, y, (end - begin) * scale, end - begin)
    x = _LEFT
    for kind in kinds:
        lines.append(f'<rect x="{x:.0f}" y="{height + 28}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{x + 16:.0f}" y="{height + 39}" font-size="12">{_NAMES[kind]}</text>')
        x += 30 + 6.6 * len(_NAMES[kind])
    lines.append(f'<text x="{_LEFT:.0f}" y="{height + 14}" font-size="12">0</text>')
    whole = html.escape(duration(timeline.seconds))
    lines.append(f'<text x="{_LEFT + _WIDTH:.0f}" y="{height + 14}" font-size="12" text-anchor="end">{whole}</text>')
    return "\n".join([*lines, "</svg>"])


def _box(action: Action, x: float, y: int, width: float, seconds: float) -> Sequence[str]:
    title = f"{_NAMES[action.kind]} of microbatch {action.microbatch} in stage {action.stage}: {duration(seconds)}"
    lines = [
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="20" fill="{COLOURS[action.kind]}" '
        f'stroke="#fff" stroke-width="0.5"><title>{html.escape(title)}</title></rect>'
    ]
    if width >= _NUMBERED:
        lines.append(
            f'<text x="{x + width / 2:.1f}" y="{y + 14}" font-size="11" fill="#fff" text-anchor="middle">'
            f"{action.microbatch}</text>"
        )
    return lines


__all__ = ["chart", "stage_rows"]
