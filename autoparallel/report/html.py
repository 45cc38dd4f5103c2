"""Blocks as one HTML file that needs no network: tables, and charts as inline SVG; every text is escaped.

Views are switched by style alone. The one script, which looks for words in tables, is ours and holds nothing of a plan;
where none may run, as in a notebook's frame, the box for the words is not shown.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoparallel.text import Block, Points, Span, Table, Timeline, duration, units

COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#6cc5b0", "#ff8ab7", "#a463f2", "#97bbf5")
WAITING = "#f0f1f3"
LABELLED = 14.0
"""The width from which on a box has room for its label."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #1b1e23; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; margin: .5em 0; } td, th { padding: .2em .8em .2em 0; text-align: left;
vertical-align: top; border-bottom: 1px solid #e3e5e8; white-space: pre-line; } th { color: #59616c; font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } tr.chosen { background: #f1f5ff; }
svg { display: block; margin: .5em 0; }
input[type=radio] { position: absolute; opacity: 0; } .view { display: none; }
label { display: inline-block; padding: .2em .9em; margin: 0 .3em .3em 0; border: 1px solid #c9ced6; border-radius: 4px;
cursor: pointer; } input:focus-visible + label { outline: 2px solid #4269d0; }
#words { font: inherit; padding: .2em .6em; width: 22em; } table.searched tr.out { display: none; }
"""
SEARCH = """
const words = document.getElementById("words");
words.hidden = false;
words.addEventListener("input", () => {
  const wanted = words.value.toLowerCase();
  for (const table of document.querySelectorAll("table")) {
    table.classList.toggle("searched", wanted !== "");
    for (const row of table.rows)
      row.classList.toggle("out", row.cells[0].tagName === "TD" && !row.textContent.toLowerCase().includes(wanted));
  }
});
"""
"""Shows only the rows of tables that hold what is typed."""


@dataclass(frozen=True)
class Bars:
    """Sums, and the parts that they are made of.

    Attributes:
        bars: the name of each sum, and the sizes of its parts.
        show: writes a size.
    """

    bars: Mapping[str, Mapping[str, float]]
    show: Callable[[float], str]


@dataclass(frozen=True)
class Curve:
    """The memory of a device over time.

    Attributes:
        points: seconds, and the bytes that are held then.
        capacity: the bytes that a device has, if known, and the words beside their line.
    """

    points: Sequence[tuple[float, float]]
    capacity: float | None
    words: str


Chart = Bars | Curve
"""What a page draws beside the blocks of plain text."""


Sections = Mapping[str, Sequence[Block | Chart]]
"""Blocks by their headings; a section that holds nothing is left out."""


def page(title: str, views: Mapping[str, Sections]) -> str:
    """A page of titled sections.

    Args:
        views: by name, what is shown of each when it is chosen; of several, the first is chosen at first.
    """
    style, switch, bodies = STYLE, [], []
    for i, (name, sections) in enumerate(views.items()):
        if len(views) > 1:
            style += f"#view{i}:checked ~ #body{i} {{ display: block; }} "
            style += f"#view{i}:checked + label {{ background: #f1f5ff; border-color: #4269d0; }}\n"
            checked = " checked" * (not i)
            switch.append(
                f'<input type="radio" name="view" id="view{i}"{checked}><label for="view{i}">{_e(name)}</label>'
            )
        bodies.append(f"<div{f' id=body{i} class=view' * (len(views) > 1)}>")
        for heading, blocks in sections.items():
            if blocks:
                bodies += [f"<h2>{_e(heading)}</h2>", *map(_block, blocks)]
        bodies.append("</div>")
    look = '<p><input type="search" id="words" placeholder="module, operator, collective" hidden></p>'
    body = "\n".join([f"<h1>{_e(title)}</h1>", look, *switch, *bodies])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
        f"<style>{style}</style></head>\n<body>\n{body}\n<script>{SEARCH}</script></body></html>\n"
    )


def _e(text: object) -> str:
    return html.escape(str(text))


def _block(block: Block | Chart) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Bars):
        return _bars(block)
    if isinstance(block, Timeline):
        return _timeline(block)
    if isinstance(block, Curve):
        return _curve(block)
    if isinstance(block, Points):
        return _points(block)
    return f"<p>{_e(block)}</p>"


def _table(table: Table) -> str:
    right = [head in table.right for head in table.heads]

    def row(cells: Sequence[str], tag: str, mark: str = "") -> str:
        each = zip(cells, right, strict=True)
        inner = "".join(f"<{tag}{' class=n' if number else ''}>{_e(cell)}</{tag}>" for cell, number in each)
        return f"<tr{mark}>{inner}</tr>"

    lines = [row(table.heads, "th")]
    lines += [row(cells, "td", " class=chosen" if i == table.chosen else "") for i, cells in enumerate(table.rows)]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


# ------------------------------------------------------------------------------------------------------------- charts


def _bars(bars: Bars) -> str:
    """A row of boxes for each sum, one after the other, over a scale; and all sizes as a table, the small ones too."""
    rows, kinds = [], dict.fromkeys(part for parts in bars.bars.values() for part, size in parts.items() if size)
    for name, parts in bars.bars.items():
        end, boxes = 0.0, []
        for part, size in parts.items():
            boxes.append(Span(end, end + size, part, f"{part}: {bars.show(size)}"))
            end += size
        rows.append((name, boxes, bars.show(end)))
    cells = [[kind, *(bars.show(parts.get(kind, 0.0)) for parts in bars.bars.values())] for kind in kinds]
    return _boxes(rows, 170, 700, bars.show) + "\n" + _table(Table(("", *bars.bars), cells, right=(*bars.bars,)))


def _timeline(timeline: Timeline) -> str:
    """A row of boxes for each of those that wait for each other, with all of the time behind them."""
    waiting = Span(0.0, timeline.seconds, "waiting", "waiting")
    rows = [(name, [waiting, *spans], duration(spans[-1].end)) for name, spans in timeline.rows.items()]
    return _boxes(rows, 60, 860, duration)


def _boxes(rows: Sequence[tuple[str, Sequence[Span], str]], left: int, width: int, show: Callable[[float], str]) -> str:
    """Rows of boxes that say what they are when they are pointed at, a scale, and what their colours mean.

    Args:
        rows: the name of each, its boxes, and what is written behind them.
        left, width: where boxes begin, and how far they reach.
        show: writes a number of the scale.
    """
    every = [span for _, spans, _ in rows for span in spans if span.end > span.begin]
    most = max((span.end for span in every), default=0.0) or 1.0
    scale = width / most
    kinds = [kind for kind in dict.fromkeys(span.kind for span in every) if kind != "waiting"]
    colours = {"waiting": WAITING, **{kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}}
    low = 26 * len(rows)
    lines = [f'<svg width="1000" height="{low + 46}" role="img">']
    for mark in _marks(most):
        x = left + scale * mark
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{low}" stroke="#c9ced6"/>')
        lines.append(_words(x, low + 14, show(mark), 'fill="#59616c" text-anchor="middle"'))
    for i, (name, spans, behind) in enumerate(rows):
        y, end = 26 * i, 0.0
        lines.append(_words(0, y + 15, name))
        for span in spans:
            x, wide, end = left + scale * span.begin, scale * (span.end - span.begin), span.end
            if wide > 0:
                lines.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.5):.1f}" height="20" fill="{colours[span.kind]}" '
                    f'stroke="#fff" stroke-width="0.5"><title>{_e(span.title)}</title></rect>'
                )
            if span.label and wide >= LABELLED:
                lines.append(_words(x + wide / 2, y + 14, span.label, 'fill="#fff" text-anchor="middle"'))
        lines.append(_words(left + scale * end + 6, y + 15, behind))
    x, y = float(left), low + 26
    for kind in kinds:
        lines.append(f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{colours[kind]}"/>')
        lines.append(_words(x + 16, y + 11, kind))
        x += 30 + 6.6 * len(kind)
    return "\n".join([*lines, "</svg>"])


def _marks(most: float) -> list[float]:
    """Round numbers from 0 to at most ``most``, five to eleven of them."""
    step = 10.0 ** math.floor(math.log10(most))
    step = next(step * part for part in (1.0, 0.5, 0.2, 0.1) if most / (step * part) >= 4)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def _curve(curve: Curve) -> str:
    top = max([*(size for _, size in curve.points), curve.capacity or 0.0]) or 1.0
    end = curve.points[-1][0] or 1.0

    def at(when: float, size: float) -> str:
        return f"{60 + 880 * when / end:.1f},{190 - 170 * size / top:.1f}"

    line = " ".join(at(*point) for point in curve.points)
    lines = [
        '<svg width="1000" height="230" role="img">',
        f'<polyline points="{at(0, 0)} {line} {at(end, 0)}" fill="#dde6fb" stroke="#4269d0"/>',
        _words(0, 24, units(top)),
        _words(0, 194, "0"),
        _words(900, 210, duration(end)),
    ]
    if curve.capacity:
        y = 190 - 170 * curve.capacity / top
        lines.append(f'<line x1="60" x2="940" y1="{y:.1f}" y2="{y:.1f}" stroke="#ff725c" stroke-dasharray="4 3"/>')
        lines.append(_words(700, y + 14, curve.words))
    return "\n".join([*lines, "</svg>"])


def _points(points: Points) -> str:
    """A dot for each point, with its letter beside it, and a line for the limit."""
    least, most, top = points.spread
    lines = [
        '<svg width="1000" height="230" role="img">',
        _words(0, 24, units(top)),
        _words(0, 194, "0"),
        _words(60, 212, duration(least)),
        _words(900, 212, duration(most)),
    ]
    if points.limit is not None:
        y = 190 - 170 * points.limit / top
        lines.append(f'<line x1="60" x2="940" y1="{y:.1f}" y2="{y:.1f}" stroke="#ff725c" stroke-dasharray="4 3"/>')
    for i, (letter, title, seconds, size) in reversed(list(enumerate(points.points))):
        x, y = 60 + 860 * (seconds - least) / (most - least or 1.0), 190 - 170 * size / top
        colour = COLOURS[3 if i == 0 else 0]
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{_e(title)}</title></circle>')
        lines.append(_words(x + 8, y + 4, letter))
    return "\n".join([*lines, "</svg>"])


def _words(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" {more}>{_e(text)}</text>'
