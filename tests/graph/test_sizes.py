"""Which traced sizes are the batch's."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from autoparallel.graph.captured import _is_multiple

ROWS, LENGTH = sympy.symbols("rows length", integer=True, positive=True)


@pytest.mark.parametrize(
    "size", [ROWS, 3 * ROWS, ROWS * LENGTH, FloorDiv(ROWS, 3), FloorDiv(ROWS**2, ROWS), ROWS**2], ids=str
)
def test_multiples_of_the_batch(size: sympy.Expr) -> None:
    assert _is_multiple(size, ROWS)


@pytest.mark.parametrize("size", [LENGTH, ROWS + 1, ROWS + LENGTH, Mod(ROWS, 2), sympy.Integer(4)], ids=str)
def test_other_sizes(size: sympy.Expr) -> None:
    assert not _is_multiple(size, ROWS)
