"""A plan as one HTML file that needs no network: tables, and charts as inline SVG; every text is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from autoparallel.decisions.meshes import MeshChoice
from autoparallel.decisions.pipeline import PipelinePlan
from autoparallel.decisions.prediction import ACCUMULATORS, Prediction
from autoparallel.hardware import Profile
from autoparallel.report.comparison import Entry, Workload, mfu, sent_by_kind, throughput
from autoparallel.report.explain import describe_layout, describe_modes, fold, recomputed
from autoparallel.report.meshes import HEADS, choice_notes, choice_rows
from autoparallel.report.pipeline_chart import chart, stage_rows
from autoparallel.text import duration, operations, units

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #1b1e23; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; margin: .5em 0; } td, th { padding: .2em .8em .2em 0; text-align: left;
vertical-align: top; border-bottom: 1px solid #e3e5e8; } th { color: #59616c; font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } tr.chosen { background: #f1f5ff; }
.note { color: #59616c; } svg { display: block; margin: .5em 0; } code { font-size: .92em; }
"""


def report(title: str, entries: Sequence[Entry], work: Workload, profile: Profile) -> str:
    """The report.

    Args:
        title: what was planned, in a line.
        entries: the plan, first, and what it is compared with.
        work: what a step has to do.
        profile: the hardware that was planned for.

    Raises:
        ValueError: where the first entry has no plan.
    """
    first = entries[0].draft
    if first is None:
        raise ValueError("there is no plan to report on")
    prediction = first.prediction
    parts = [
        f"<h1>{_e(title)}</h1>",
        f"<p>{_e(f'{work.count:,} {work.unit} a step, {operations(work.flops)}; a step is predicted to take ')}"
        f"<b>{_e(duration(prediction.seconds()))}</b> and <b>{_e(units(prediction.total_memory))}</b> per device.</p>",
        "<h2>The plan beside the alternatives</h2>",
        _comparison(entries, work, profile),
        _choice(first.plan.choice),
        "<h2>Where the time goes</h2>",
        _bars([(e.name, _times(e.draft.prediction)) for e in entries if e.draft is not None], duration),
        "<h2>What a rank sends in a step, by mesh axis</h2>",
        _axes(prediction),
        "<h2>Memory of a device</h2>",
        _bars([(e.name, _memory(e.draft.prediction)) for e in entries if e.draft is not None], units),
        _timeline(prediction, profile),
        _pipeline(first.plan.pipeline),
        "<h2>Parameters and results, module by module</h2>",
        _modules(entries),
        "<h2>How operators run</h2>",
        _operators(entries),
        "<h2>What was not sharded</h2>",
        _unsharded(entries),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _e(text: object) -> str:
    return html.escape(str(text))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0, chosen: int = -1) -> str:
    """A table whose last ``numbers`` columns are numbers."""
    first = len(heads) - numbers

    def row(cells: Sequence[str], tag: str, mark: str = "") -> str:
        inner = "".join(f"<{tag}{' class=n' if i >= first else ''}>{_e(cell)}</{tag}>" for i, cell in enumerate(cells))
        return f"<tr{mark}>{inner}</tr>"

    lines = [row(heads, "th")]
    lines += [row(cells, "td", " class=chosen" if i == chosen else "") for i, cells in enumerate(rows)]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _comparison(entries: Sequence[Entry], work: Workload, profile: Profile) -> str:
    rows = []
    for entry in entries:
        if entry.draft is None:
            rows.append([entry.name, entry.problem, "", "", "", ""])
            continue
        plan = entry.draft.plan
        devices = math.prod(plan.axis_sizes) * (plan.pipeline.ranks if plan.pipeline is not None else 1)
        rows.append(
            [
                entry.name,
                duration(entry.step_seconds),
                f"{throughput(entry, work):,.0f}",
                f"{100 * mfu(entry, work, profile, devices):.1f}%",
                units(entry.draft.prediction.total_memory),
                units(sum(sent_by_kind(entry.draft).values())),
            ]
        )
    return _table(["plan", "step", f"{work.unit}/s", "MFU", "memory", "sends"], rows, numbers=5, chosen=0)


def _choice(choice: MeshChoice | None) -> str:
    """How the mesh was chosen."""
    if choice is None:
        return ""
    notes = "".join(f"<p>{_e(note)}</p>" for note in choice_notes(choice))
    words = f"The mesh was chosen by {len(choice.tried)} searches; step and memory as they add them up."
    table = _table(HEADS, choice_rows(choice), chosen=0)
    return f"<h2>The mesh beside the alternatives</h2>\n<p>{words}</p>\n{table}\n{notes}"


def _times(p: Prediction) -> dict[str, float]:
    return {
        "gathers once a step": p.unshard_seconds,
        "forward": p.forward_seconds,
        "backward": p.backward_seconds,
        "gradients": p.gradient_seconds,
        "optimizer": p.update_seconds,
    }


def _memory(p: Prediction) -> dict[str, float]:
    return {what: size for what, size in p.memory.items() if what != ACCUMULATORS}


def _bars(rows: Sequence[tuple[str, dict[str, float]]], show: object) -> str:
    """Stacked bars, one a row, with a legend."""
    most = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    names = list(dict.fromkeys(name for _, parts in rows for name, size in parts.items() if size))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    height = 26 * len(rows)
    lines = [f'<svg width="1000" height="{height + 24}" role="img">']
    for i, (title, parts) in enumerate(rows):
        y, x = 26 * i, 170.0
        lines.append(f'<text x="0" y="{y + 15}" font-size="13">{_e(title)}</text>')
        for name, size in parts.items():
            width = 700 * size / most
            if width > 0:
                label = _e(f"{name}: {show(size)}")  # type: ignore[operator]
                lines.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" fill="{colours[name]}">'
                    f"<title>{label}</title></rect>"
                )
            x += width
        total = _e(show(sum(parts.values())))  # type: ignore[operator]
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 15}" font-size="13">{total}</text>')
    x = 170.0
    for name in names:
        lines.append(f'<rect x="{x:.0f}" y="{height + 4}" width="12" height="12" fill="{colours[name]}"/>')
        lines.append(f'<text x="{x + 16:.0f}" y="{height + 15}" font-size="12">{_e(name)}</text>')
        x += 30 + 6.6 * len(name)
    return "\n".join([*lines, "</svg>"])


def _axes(p: Prediction) -> str:
    step = p.step()
    if not step.total_collectives:
        return "<p>Nothing: no collective is needed.</p>"
    sent = step.bytes
    by_axis: dict[str, dict[str, float]] = {}
    for (kind, axis), size in sent.items():
        by_axis.setdefault(axis, {})[kind] = size
    rows = [[axis, kind, f"{count:,}", units(sent[kind, axis])] for (kind, axis), count in step.collectives.items()]
    chart = _bars(list(by_axis.items()), units)
    return chart + _table(["mesh axis", "collective", "count", "bytes sent"], sorted(rows), numbers=2)


def _timeline(p: Prediction, profile: Profile) -> str:
    """Memory over the step, as a line."""
    points = p.timeline
    if len(points) < 2:
        return ""
    top = max([*(size for _, size in points), profile.memory or 0.0]) or 1.0
    end = points[-1][0] or 1.0

    def at(when: float, size: float) -> str:
        return f"{60 + 880 * when / end:.1f},{190 - 170 * size / top:.1f}"

    line = " ".join(at(*point) for point in points)
    lines = [
        "<p>Over one step with one microbatch: parameters, gradients and optimizer states, and what is alive beside "
        "them.</p>",
        '<svg width="1000" height="230" role="img">',
        f'<polyline points="{at(0, 0)} {line} {at(end, 0)}" fill="#dde6fb" stroke="#4269d0"/>',
        f'<text x="0" y="24" font-size="12">{_e(units(top))}</text><text x="0" y="194" font-size="12">0</text>',
        f'<text x="900" y="210" font-size="12">{_e(duration(end))}</text>',
    ]
    if profile.memory:
        y = 190 - 170 * profile.memory / top
        lines.append(f'<line x1="60" x2="940" y1="{y:.1f}" y2="{y:.1f}" stroke="#ff725c" stroke-dasharray="4 3"/>')
        lines.append(f'<text x="700" y="{y + 14:.1f}" font-size="12">{_e(f"a {profile.name} has this")}</text>')
    return "\n".join([*lines, "</svg>"])


def _pipeline(plan: PipelinePlan | None) -> str:
    """The stages of a pipeline, and its schedule."""
    if plan is None or not plan.stages:
        return ""
    text = (
        f"{plan.schedule} over {plan.axis}={plan.ranks} with {plan.microbatches} microbatches; predicted "
        f"{duration(plan.seconds)} for a step's forwards and backwards, {plan.bubble:.0%} of it waiting"
    )
    heads, rows = stage_rows(plan)
    table = _table(heads, rows, numbers=len(heads) - 4)
    return f"<h2>The pipeline</h2>\n<p>{_e(text)}.</p>\n{chart(plan)}\n{table}"


def _modules(entries: Sequence[Entry]) -> str:
    assert entries[0].draft is not None
    plan, prediction = entries[0].draft.plan, entries[0].draft.prediction
    axes = plan.axis_names
    rows = []
    for module in prediction.modules:
        made = "" if module.layout is None else f"{list(module.shape or ())} {describe_layout(module.layout, axes)}"
        cells = [
            (
                f"{p.name} {list(p.shape or ())}{'' if p.trainable else ' (frozen)'}",
                describe_layout(p.at_rest, axes),
                "; ".join(dict.fromkeys(describe_layout(use, axes) for use in p.uses)),
                p.gather.replace("_", " "),
            )
            for p in module.parameters
        ] or [("", "", "", "")]
        rows.append((module.path, tuple((*cell, made if i == 0 else "") for i, cell in enumerate(cells))))
    lines = [
        [path or "(the model)" if i == 0 else "", *cells]
        for path, content in fold(rows)
        for i, cells in enumerate(content)
    ]
    return _table(["module", "parameter", "at rest", "in use", "gathered", "result"], lines)


def _operators(entries: Sequence[Entry]) -> str:
    assert entries[0].draft is not None
    plan = entries[0].draft.plan
    found: dict[str, dict[str, None]] = {}
    for key, modes in plan.operators.items():
        path, _, operator = key.partition("#")[0].rpartition("/")
        found.setdefault(path, {})[f"{operator}: {describe_modes(modes, plan.axis_names)}"] = None
    folded = fold((path, tuple(operators)) for path, operators in found.items())
    return _table(["module", "operators"], [[path or "(the model)", "; ".join(ops)] for path, ops in folded])


def _unsharded(entries: Sequence[Entry]) -> str:
    assert entries[0].draft is not None
    plan = entries[0].draft.plan
    many = [size > 1 for size in plan.axis_sizes]
    parts = []
    if plan.unruled:
        rows = [[name, str(count)] for name, count in sorted(plan.unruled.items())]
        parts.append("<p>Operators without a sharding rule, which every rank computes whole:</p>")
        parts.append(_table(["operator", "calls"], rows, numbers=1))
    else:
        parts.append("<p>Every operator has a sharding rule.</p>")
    whole = [
        (name, ())
        for name in plan.parameters
        if not any(m and p.kind == "S" for m, p in zip(many, plan.at_rest(name), strict=True))
    ]
    if whole:
        names = ", ".join(name for name, _ in fold(whole))
        parts.append(f"<p>Parameters that every rank keeps whole: <code>{_e(names)}</code></p>")
    if plan.recompute:
        parts.append(f"<p>Recomputed in the backward, to save memory: <code>{_e(recomputed(plan))}</code></p>")
    return "\n".join(parts)


__all__ = ["report"]
