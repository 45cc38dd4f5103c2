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

COLOURS = (
    "#4269d0", "#efb118", "#3ca951", "#ff725c", "#6cc5b0", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0"
)  # fmt: skip
WAITING = "#f0f1f3"
LABELLED = 14.0
"""The width from which on a box has room for its label."""
FAR = 2.5
"""So many times above all that is drawn, a limit is no longer drawn to scale."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #1b1e23; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
.wide { overflow-x: auto; margin: .5em 0 1.2em; } table { border-collapse: collapse; }
td, th { padding: .2em .8em .2em 0; text-align: left; vertical-align: top;
border-bottom: 1px solid #e3e5e8; white-space: pre-line; } th { color: #59616c; font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } td.n { white-space: pre; }
tr.chosen { background: #f1f5ff; }
svg.chart { display: block; width: 100%; min-width: 640px; max-width: 1000px; }
.key { font-size: 12px; margin: .5em 0; } .key span { display: inline-block; margin-right: 1.2em; }
input[type=radio] { position: absolute; opacity: 0; } .view { display: none; }
label { display: inline-block; padding: .2em .9em; margin: 0 .3em .3em 0; border: 1px solid #c9ced6; border-radius: 4px;
cursor: pointer; } input:focus-visible + label { outline: 2px solid #4269d0; }
#words { font: inherit; padding: .2em .6em; width: 22em; } table.searched tr.out { display: none; }
"""
SEARCH = """
const words = document.getElementById("words"), found = document.getElementById("found");
words.hidden = false;
function search() {
  const wanted = words.value.toLowerCase();
  let count = 0;
  for (const table of document.querySelectorAll("table")) {
    table.classList.toggle("searched", wanted !== "");
    for (const row of table.rows) {
      const body = row.cells[0].tagName === "TD", out = body && !row.textContent.toLowerCase().includes(wanted);
      row.classList.toggle("out", out);
      count += body && !out && table.offsetParent !== null;
    }
  }
  found.textContent = wanted === "" ? "" : count === 1 ? "1 row" : count + " rows";
}
words.addEventListener("input", search);
document.addEventListener("change", search);
"""
"""Shows only the rows of tables that hold what is typed, and how many they are in the view that is chosen."""


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
        capacity: the bytes that a device has, if known.
    """

    points: Sequence[tuple[float, float]]
    capacity: float | None


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
    look = '<p><input type="search" id="words" placeholder="module, operator, collective" hidden> '
    look += '<output id="found"></output></p>'
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
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


# ------------------------------------------------------------------------------------------------------------- charts


def _bars(bars: Bars) -> str:
    """A row of boxes for each sum, one after the other, over a scale; and all sizes as a table, the small ones too."""
    rows, kinds = [], dict.fromkeys(part for parts in bars.bars.values() for part in parts)
    for name, parts in bars.bars.items():
        end, boxes = 0.0, []
        for part, size in parts.items():
            boxes.append(Span(end, end + size, part, f"{part}: {bars.show(size)}"))
            end += size
        rows.append((name, boxes, bars.show(end)))
    sizes = {kind: [parts.get(kind, 0.0) for parts in bars.bars.values()] for kind in kinds}
    cells = [[kind, *map(bars.show, of_kind)] for kind, of_kind in sizes.items() if any(of_kind)]
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
    spans = [span for _, row, _ in rows for span in row]
    most = max((span.end for span in spans), default=0.0) or 1.0
    scale = width / most
    kinds = [kind for kind in dict.fromkeys(span.kind for span in spans) if kind != "waiting"]
    colours = {"waiting": WAITING, **{kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}}
    drawn = {span.kind for span in spans if span.end > span.begin}
    low = 26 * len(rows)
    lines = _key({kind: colours[kind] for kind in kinds if kind in drawn})
    lines += [f'<div class="wide">{_svg(low + 20)}']
    for mark in _marks(most):
        x = left + scale * mark
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{low}" stroke="#c9ced6"/>')
        lines.append(_words(x, low + 14, show(mark), 'fill="#59616c" text-anchor="middle"'))
    for i, (name, row, behind) in enumerate(rows):
        y, end = 26 * i, 0.0
        lines.append(_words(0, y + 15, name))
        for span in row:
            x, wide, end = left + scale * span.begin, scale * (span.end - span.begin), span.end
            if wide > 0:
                lines.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.5):.1f}" height="20" fill="{colours[span.kind]}" '
                    f'stroke="#fff" stroke-width="0.5"><title>{_e(span.title)}</title></rect>'
                )
            if span.label and wide >= LABELLED:
                lines.append(_words(x + wide / 2, y + 14, span.label, 'fill="#fff" text-anchor="middle"'))
        lines.append(_words(left + scale * end + 6, y + 15, behind))
    return "\n".join([*lines, "</svg></div>"])


def _svg(height: int) -> str:
    """Opens a picture that is as wide as its page, up to its own width."""
    return f'<svg class="chart" viewBox="0 0 1000 {height}" role="img">'


def _key(colours: Mapping[str, str]) -> list[str]:
    """What colours mean, on as many lines as it takes."""
    box = '<svg width="12" height="12"><rect width="12" height="12" fill="{}"/></svg>'
    return ['<p class="key">', *(f"<span>{box.format(colours[kind])} {_e(kind)}</span>" for kind in colours), "</p>"]


def _marks(most: float) -> list[float]:
    """Round numbers from 0 to at most ``most``, five to eleven of them."""
    step = 10.0 ** math.floor(math.log10(most))
    step = next(step * part for part in (1.0, 0.5, 0.2, 0.1) if most / (step * part) >= 4)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


class _Plane:
    """Seconds to the right and bytes upwards, with a scale and a limit.

    Args:
        begin, end: the seconds at the left and the right.
        size: the most bytes that are drawn.
        limit: bytes that are marked by a line, if any; one that is far above is said not to be to scale.
        words: what the limit is.
    """

    def __init__(self, begin: float, end: float, size: float, limit: float | None, words: str) -> None:
        far = limit is not None and limit > FAR * size > 0
        self._begin, self._seconds = begin, end - begin or 1.0
        self._top = (size if far or limit is None else max(size, limit)) or 1.0
        self.lines = [f'<div class="wide">{_svg(230)}']
        for mark in _marks(self._top):
            y = self.at(begin, mark)[1]
            self.lines.append(f'<line x1="66" x2="946" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e5e8"/>')
            self.lines.append(_words(60, y + 4, units(mark), 'fill="#59616c" text-anchor="end"'))
        self.lines.append(_words(66, 212, duration(begin)))
        self.lines.append(_words(946, 212, duration(end), 'text-anchor="end"'))
        if limit is not None:
            y = 8.0 if far else self.at(begin, limit)[1]
            line = f'<line x1="66" x2="946" y1="{y:.1f}" y2="{y:.1f}" stroke="#ff725c" stroke-dasharray="4 3"/>'
            text = f"{units(limit)}, {words}{', not to scale' * far}"
            self.lines += [line, _words(946, y + 14, text, 'text-anchor="end"')]

    def at(self, seconds: float, size: float) -> tuple[float, float]:
        """The place in the picture of so many bytes at a moment."""
        return 76 + 860 * (seconds - self._begin) / self._seconds, 190 - 160 * size / self._top

    def drawn(self, *lines: str) -> str:
        """The whole picture, with ``lines`` in it."""
        return "\n".join([*self.lines, *lines, "</svg></div>"])


def _curve(curve: Curve) -> str:
    end = curve.points[-1][0]
    plane = _Plane(0.0, end, max(size for _, size in curve.points), curve.capacity, "what a device has")
    around = [(0.0, 0.0), *curve.points, (end, 0.0)]
    line = " ".join("{:.1f},{:.1f}".format(*plane.at(*point)) for point in around)
    return plane.drawn(f'<polyline points="{line}" fill="#4269d0" fill-opacity="0.18" stroke="#4269d0"/>')


def _points(points: Points) -> str:
    """A dot for each point, with its letter beside it, and a line for the limit."""
    least, most, _ = points.spread
    size = max(point[3] for point in points.points)
    plane = _Plane(least, most, size, points.limit, "the limit")
    lines = []
    for i, (letter, title, seconds, held) in reversed(list(enumerate(points.points))):
        x, y = plane.at(seconds, held)
        colour = COLOURS[3 if i == 0 else 0]
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{_e(title)}</title></circle>')
        lines.append(_words(x + 8, y + 4, letter))
    return plane.drawn(*lines)


def _words(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" {more}>{_e(text)}</text>'
