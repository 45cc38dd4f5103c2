"""Where the tensors of a model lie in those of its files, beside what torch makes of the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoparallel.checkpoint.conversion import Stored, _Mark
from autoparallel.checkpoint.folder import CheckpointError
from autoparallel.placements.regions import Region, whole_region

TENSORS = {"a": torch.arange(24).view(4, 3, 2), "b": torch.arange(100, 124).view(4, 3, 2)}
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "transpose": lambda a, b: a.transpose(0, 2),
    "cat": lambda a, b: torch.cat([a, b], 1),
    "cat of the last dim": lambda a, b: torch.cat([a, b, a], -1),
    "split": lambda a, b: a.split([1, 3])[1].contiguous(),
    "split by size": lambda a, b: b.split(2, 1)[1],
    "squeeze": lambda a, b: b.split(1)[2].squeeze(0),
    "squeeze of all that are one": lambda a, b: b.split(1)[2].split(1, 1)[1].squeeze(),
    "squeeze of what is not one": lambda a, b: b.squeeze(0),
    "all of them": lambda a, b: torch.cat([a, b], 1).transpose(0, 1).chunk(4)[2].split(1)[1].squeeze(0),
}


def _block(x: Tensor, region: Region) -> Tensor:
    return x[region.within(whole_region(x.shape))]


@pytest.mark.parametrize("way", WAYS)
def test_pieces_lie_where_torch_puts_them(way: str) -> None:
    expected = WAYS[way](*TENSORS.values())
    mark = WAYS[way](*(_Mark.of(name, x) for name, x in TENSORS.items()))
    stored = Stored(mark.dtype, tuple(mark.shape), mark.pieces)
    assert (stored.dtype, stored.shape, stored.nbytes) == (expected.dtype, expected.shape, expected.nbytes)
    whole = torch.full(stored.shape, -1)
    for piece in stored.pieces:
        own = TENSORS[piece.name]
        for part in (Region((0, 0, 0), (2, 3, 2)), Region((2, 0, 0), (2, 3, 2))):  # those of two ranks
            blocks = piece.within(part)
            if blocks is not None:
                mine, place = blocks
                block = piece.as_stored(_block(own, mine))
                _block(whole, place).copy_(block)
                assert torch.equal(piece.as_own(block, mine.shape), _block(own, mine))
    assert torch.equal(whole, expected)


def test_what_is_computed_has_no_place() -> None:
    with pytest.raises(CheckpointError, match="the files of this model hold a after a "):
        _Mark.of("a", TENSORS["a"]) * 2
