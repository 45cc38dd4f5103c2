"""Cutting a line of operators into stages whose slowest is as fast as can be, by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def most_even(costs: Sequence[Array]) -> list[int] | None:
    """Where all stages but the first begin so that the slowest is as fast as can be, and among those the most even:
    others wait less for each other.  None where there is no way.

    Args:
        costs: for each stage, what it costs from each place to each.
    """
    slowest, _ = _fewest(costs, np.maximum)
    if not np.isfinite(slowest):
        return None
    tables = {id(cost): cost for cost in costs}  # stages that cost the same share theirs
    squares = {key: np.where(cost <= slowest * (1 + 1e-9), cost**2, np.inf) for key, cost in tables.items()}
    return _fewest([squares[id(cost)] for cost in costs], np.add)[1]


def _fewest(costs: Sequence[Array], combine: np.ufunc) -> tuple[float, list[int]]:
    """The least combined cost of stages one behind the other, and where all but the first of them begin.

    Args:
        costs: for each stage, what it costs from each place to each.
    """
    best: Array = np.where(np.arange(len(costs[0])) == 0, 0.0, np.inf)
    history: list[npt.NDArray[np.intp]] = []
    for cost in costs:
        table = combine(best[:, None], cost)
        history.append(table.argmin(0))
        best = table.min(0)
    ends: list[int] = []
    end = len(best) - 1
    for choices in reversed(history[1:]):
        end = int(choices[end])
        ends.append(end)
    return float(best[-1]), ends[::-1]
