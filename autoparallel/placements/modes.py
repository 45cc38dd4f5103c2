"""How an operator runs on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Mode:
    """How an operator runs on one mesh axis: ``I``, ``R``, ``shard:<factor>`` or ``partial:<linear set>``."""

    kind: str
    factor: str = ""
    linear: int = -1

    def __str__(self) -> str:
        if self.kind == "shard":
            return f"shard:{self.factor}"
        return f"partial:{self.linear}" if self.kind == "partial" else self.kind


INVARIANT_MODE = Mode("I")


REPLICATE_MODE = Mode("R")


@cache
def parse_mode(text: str) -> Mode:
    """The inverse of ``str(mode)``."""
    kind, _, rest = text.partition(":")
    if kind == "shard" and rest:
        return Mode("shard", factor=rest)
    if kind == "partial" and rest.isdigit():
        return Mode("partial", linear=int(rest))
    if text in ("I", "R"):
        return Mode(text)
    raise ValueError(f"not a way to run an operator: {text!r}")


@cache
def parse_modes(texts: tuple[str, ...]) -> tuple[Mode, ...]:
    """The modes of an operator, one for each mesh axis, of which each is written as ``parse_mode`` reads it."""
    return tuple([parse_mode(text) for text in texts])
