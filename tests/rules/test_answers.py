"""Questions whether any row is selected: which of them a part of the batch may be asked about its own rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoparallel.rules.answers import answers_about_rows
from tests.captures import captured

WIDTH = 6


class Asks(nn.Module):
    """Puts what an expert makes of the rows that are selected in their places, or not."""

    def __init__(self, put: Callable[[Tensor, Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.router, self.expert, self.put = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH), put

    def forward(self, x: Tensor) -> Tensor:
        return self.put(x, self.router(x).argmax(-1), self.expert).square()


def any_row(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    mask = choice == 0
    if mask.any():
        return x.index_put((mask,), expert(x[mask]))
    return x


def their_number(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    (rows,) = torch.where(choice == 0)
    if rows.shape[0] == 0:
        return x
    return x.index_add(0, rows, expert(x[rows]))


def elements(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    rows = torch.nonzero(nn.functional.one_hot(choice, 3)[:, 0]).flatten()
    if x[rows].numel() > 0:
        return x.index_copy(0, rows, expert(x[rows])).index_fill(0, rows, 1.0)
    return x


def not_any(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    mask = choice == 0
    if not mask.sum() >= 1:
        return x
    return x.index_put((mask,), expert(x[mask]))


def another_mask(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    mask = choice == 0
    if (choice == 1).any():
        return x.index_put((mask,), expert(x[mask]))
    return x


def more_than_one(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    mask = choice == 0
    if mask.sum() > 1:
        return x.index_put((mask,), expert(x[mask]))
    return x


def an_odd_number(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    mask = choice == 0
    if mask.sum() != 5:
        return x.index_put((mask,), expert(x[mask]))
    return x


def something_else(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    mask = choice == 0
    if mask.any():
        return x.index_put((mask,), expert(x[mask]))
    return x + 1


def into_zeros(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    mask = choice == 0
    if mask.any():
        return torch.zeros_like(x).index_put((mask,), expert(x[mask]))
    return x


def every_row(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    return expert(x) if (choice == 0).any() else x


def at_a_cast_mask(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    mask = choice == 0
    if mask.any():
        return x.index_put((torch.arange(8), mask.long()), expert(x)[:, 0])
    return x


def reads_the_answer(x: Tensor, choice: Tensor, expert: nn.Module) -> Tensor:
    (rows,) = torch.where(choice == 0)
    hit = (choice == 0).any()
    if hit:
        x = x.index_copy(0, rows, expert(x[rows]) + hit)
    return x


ALIKE = [any_row, their_number, elements, not_any]
DIFFERENT = [
    another_mask,
    more_than_one,
    an_odd_number,
    something_else,
    into_zeros,
    every_row,
    at_a_cast_mask,
    reads_the_answer,
]


@pytest.mark.parametrize("put", [*ALIKE, *DIFFERENT], ids=lambda put: put.__name__)
def test_it_makes_no_difference_what_is_done_with_no_rows(put: Callable[[Tensor, Tensor, nn.Module], Tensor]) -> None:
    graph = captured(Asks(put), torch.randn(8, WIDTH)).graph
    assert bool(answers_about_rows(graph)) == (put in ALIKE)
