"""What a report is made of, as data, and as plain text: without colour codes, and as wide on every terminal.

Reports are lists of blocks: what they say is written once, and printed here or, as a page, by ``report.html``.  What is
said while we work goes to ``LOGGER``.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

LOGGER = logging.getLogger("autoparallel")
"""A warning is one on rank 0 alone, and INFO on the others, which would only repeat it."""

WIDTH = 80
"""Characters in a line of a report, whatever the terminal."""

DRAWN = 70
"""Characters in which plain text draws a timeline, or points."""

HIGH = 12
"""Lines in which it draws points."""

NAME, GAP = 30, 2
"""Characters up to which the name of a row is not folded, and between columns."""


# ------------------------------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes:
        heads: of the columns.
        rows: with a cell for each column.
        right: the heads of the columns that hold numbers.
        chosen: the row that the others are compared with, where there is one.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    chosen: int | None = None


@dataclass(frozen=True)
class Span:
    """Something that takes a while.

    Attributes:
        begin, end: in seconds.
        kind: of what happens.
        title: what happens, in words.
        letter: draws it in plain text.
        label: is written on it where there is room.
    """

    begin: float
    end: float
    kind: str
    title: str
    letter: str = ""
    label: str = ""


@dataclass(frozen=True)
class Timeline:
    """What happens when, side by side.

    Attributes:
        rows: the name of each, and what it does in order; between them it waits.
        key: how to read the letters.
    """

    rows: Mapping[str, Sequence[Span]]
    key: str

    @property
    def seconds(self) -> float:
        """When the last span ends."""
        return max((span.end for spans in self.rows.values() for span in spans), default=0.0)


@dataclass(frozen=True)
class Points:
    """Seconds to the right and bytes upwards.

    Attributes:
        points: the letter of each, what it is in words, its seconds and its bytes; the first lies on top.
        limit: bytes that are marked by a line, where there is a limit.
    """

    points: Sequence[tuple[str, str, float, float]]
    limit: float | None = None

    @property
    def spread(self) -> tuple[float, float, float]:
        """The least and the most seconds, and the most bytes."""
        seconds = [point[2] for point in self.points]
        return min(seconds), max(seconds), max([*(point[3] for point in self.points), self.limit or 0.0]) or 1.0


Block = str | Table | Timeline | Points


# --------------------------------------------------------------------------------------------------------- plain text


def plain_text(*blocks: Block, width: int = WIDTH) -> str:
    """The blocks as text without trailing blanks, in lines of so many characters."""
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False, highlight=False,
        markup=False, emoji=False, force_jupyter=False,
    )  # fmt: skip
    for block in blocks:
        if isinstance(block, Table):
            console.print(_rich_table(block, width))
        else:
            drawn = _draw(block) if isinstance(block, Timeline) else block
            console.print(_scatter(drawn) if isinstance(drawn, Points) else drawn)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(lines).strip("\n")


def _rich_table(table: Table, width: int) -> RichTable:
    """The table, no wider than a line: then heads of numbers are folded between words, and what is no number; short
    names of rows, and numbers, stay in one piece where they fit."""
    columns = ([line for row in table.rows for line in row[i].split("\n")] for i in range(len(table.heads)))
    widths = [max(map(len, lines), default=0) for lines in columns]
    right = [head in table.right for head in table.heads]
    unfolded = [number or i == 0 and widths[i] <= NAME for i, number in enumerate(right)]
    heads = list(table.heads)
    if sum(map(max, widths, map(len, heads))) + GAP * len(heads) > width:
        heads = [head.replace(" ", "\n") if number else head for head, number in zip(heads, right, strict=True)]
    wide = [max(least, *map(len, head.split("\n"))) + GAP for least, head in zip(widths, heads, strict=True)]
    fits = sum(size if keep else min(size, 10) for size, keep in zip(wide, unfolded, strict=True)) < width
    printed = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head, number, keep in zip(heads, right, unfolded, strict=True):
        printed.add_column(head, justify="right" if number else "left", overflow="fold", no_wrap=keep and fits)
    for row in table.rows:
        printed.add_row(*row)
    return printed


def _draw(timeline: Timeline) -> str:
    """A line for each row; dots are waiting."""
    scale = DRAWN / (timeline.seconds or 1.0)
    lines = []
    for name, spans in timeline.rows.items():
        cells = ["."] * DRAWN
        for span in spans:
            first = round(span.begin * scale)
            for i in range(first, min(max(round(span.end * scale), first + 1), DRAWN)):
                cells[i] = span.letter
        lines.append(f"{name}  {''.join(cells)}")
    return "\n".join([*lines, f"{timeline.key}, . waiting"])


def _scatter(points: Points) -> str:
    """A letter for each point, and a line of dashes for the limit."""
    least, most, top = points.spread
    cells = [[" "] * DRAWN for _ in range(HIGH)]

    def line(size: float) -> list[str]:
        return cells[HIGH - 1 - min(int(size / top * HIGH), HIGH - 1)]

    if points.limit is not None:
        line(points.limit)[:] = "-" * DRAWN
    for letter, _, seconds, size in reversed(points.points):
        line(size)[round((seconds - least) / (most - least or 1.0) * (DRAWN - 1))] = letter
    drawn = [f"|{''.join(row)}" for row in cells]
    ends = f"{duration(least)}{duration(most):>{DRAWN + 1 - len(duration(least))}}"
    return "\n".join([units(top), *drawn, ends])


# ------------------------------------------------------------------------------------------------------------ numbers


def units(count: float, unit: str = "B") -> str:
    """Bytes as people write them: ``512 B``, ``1.2 kB``, ``3.4 MB``."""
    if abs(count) < 1000:
        return f"{count:.0f} {unit}"
    size, scales = float(count), ["k", "M", "G", "T"]
    while abs(size) >= 999_950 and len(scales) > 1:
        size /= 1000
        scales.pop(0)
    return f"{size / 1000:.1f} {scales[0]}{unit}"


def memory_of(size: float, limit: float | None) -> str:
    """Bytes of a device that a plan takes, and whether they are more than it may."""
    return units(size) + (" (too much)" if limit is not None and size > limit else "")


def operations(count: float) -> str:
    """Floating-point operations as people write them: ``1.2 Gflop``."""
    return units(count, "flop")


def duration(seconds: float) -> str:
    """A time as people write it: ``1.2 s``, ``3.4 ms``, ``56 us``."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


# ---------------------------------------------------------------------------------------------------------------- log


def _warn_once(record: logging.LogRecord) -> bool:
    if record.levelno == logging.WARNING and dist.is_available() and dist.is_initialized() and dist.get_rank():
        record.levelno, record.levelname = logging.INFO, "INFO"
    return record.levelno >= LOGGER.getEffectiveLevel()


LOGGER.addFilter(_warn_once)
