"""What the search compared, seconds against memory, as blocks of a report."""

from __future__ import annotations

import string

from autoparallel.decisions.frontier import Frontier, Tried
from autoparallel.text import Block, Points, Table, duration, memory_of, units

LETTERS = "*" + string.ascii_letters
"""What the points are called; the chosen one first."""


def frontier_blocks(frontier: Frontier | None) -> list[Block]:
    """The plans that were compared, as a picture and row by row; nothing where there was one."""
    if frontier is None or len(frontier.tried) < 2:
        return []
    lettered = list(zip(LETTERS, frontier.tried, strict=False))
    limit = f", within {units(frontier.limit)} (the line)" if frontier.limit is not None else ""
    words = f"What was compared, seconds of a step to the right and memory of a device upwards{limit}; * is chosen:"
    rows = [
        (letter, tried.origin, duration(tried.seconds), memory_of(tried.memory, frontier.limit), means(tried))
        for letter, tried in lettered
    ]
    points = [(letter, _title(tried), tried.seconds, tried.memory) for letter, tried in lettered]
    heads = ("", "plan", "step", "memory", "saves memory by")
    return [words, Points(points, frontier.limit), Table(heads, rows, right=("step", "memory"), chosen=0)]


def _title(tried: Tried) -> str:
    return ", ".join(filter(None, [tried.origin, duration(tried.seconds), units(tried.memory), means(tried)]))


def means(tried: Tried) -> str:
    """What saves memory, or time, in words."""
    return ", ".join(
        words
        for count, least, words in (
            (tried.again, 1, f"{tried.again} layer{'s' if tried.again > 1 else ''} run again"),
            (tried.loss_chunks, 2, f"the loss in {tried.loss_chunks} chunks"),
            (tried.linear_chunks, 2, f"linear layers in {tried.linear_chunks} chunks"),
            (tried.microbatches, 2, f"{tried.microbatches} microbatches"),
            (tried.offload_optimizer, 1, "optimizer states in host memory"),
        )
        if count >= least
    )
