"""What the search looked at: seconds of a step against memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.decisions.means import Means


@dataclass(frozen=True)
class Tried(Means):
    """A plan that was predicted to be compared with others, with its means; the microbatches also of a pipeline.

    Attributes:
        origin: the preset, or "auto" for the free search.
        seconds, memory: of a step, and bytes per device.
        again: how many layers run again in the backward.
    """

    origin: str
    seconds: float
    memory: float
    again: int = 0

    def require_valid(self) -> None:
        """Raises ValueError for what no plan takes."""
        super().require_valid()
        if min(self.seconds, self.memory, self.again) < 0:
            raise ValueError(f"a plan that was tried takes no negative time or memory, got {self}")


@dataclass(frozen=True)
class Frontier:
    """The plans that were compared, the chosen one first, then the fastest, and the bytes per device that it may take;
    None for any number."""

    tried: tuple[Tried, ...]
    limit: float | None = None


def frontier_of(tried: Sequence[Tried], limit: float | None) -> Frontier:
    """The plans that no other beats in both time and memory, and the best of each origin.

    Args:
        tried: the plans that were compared, the first of which was chosen.
    """
    most = math.inf if limit is None else limit
    best: dict[str, Tried] = {}
    for one in sorted(tried, key=lambda t: (t.memory > most, t.seconds)):
        best.setdefault(one.origin, one)
    shown = set(best.values())
    least = math.inf
    for one in sorted(tried, key=lambda t: (t.seconds, t.memory)):
        if one.memory < least:
            least = one.memory
            shown.add(one)
    others = sorted(shown - {tried[0]}, key=lambda t: (t.seconds, t.memory, t.origin))
    return Frontier((tried[0], *others), limit)
