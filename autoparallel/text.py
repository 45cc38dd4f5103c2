"""Reports as plain text: tables without colour codes, as wide as they need to be, the same everywhere."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

WIDTH = 118
"""Characters in a line of a report, whatever the terminal."""


def plain_text(*parts: RenderableType) -> str:
    """What rich would print, as text without trailing blanks."""
    console = Console(
        file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False, highlight=False,
        markup=False, emoji=False, force_jupyter=False,
    )  # fmt: skip
    for part in parts:
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(lines).strip("\n")


def units(count: float, unit: str = "B") -> str:
    """Bytes as people write them: ``512 B``, ``1.2 kB``, ``3.4 MB``."""
    if abs(count) < 1000:
        return f"{count:.0f} {unit}"
    size, scales = float(count), ["k", "M", "G", "T"]
    while abs(size) >= 999_950 and len(scales) > 1:
        size /= 1000
        scales.pop(0)
    return f"{size / 1000:.1f} {scales[0]}{unit}"


def operations(count: float) -> str:
    """Floating-point operations as people write them: ``1.2 Gflop``."""
    return units(count, "flop")


def duration(seconds: float) -> str:
    """A time as people write it: ``1.2 s``, ``3.4 ms``, ``56 us``."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
