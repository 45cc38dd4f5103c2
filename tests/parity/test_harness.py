"""The comparison itself: it must notice every kind of difference, and name the first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autoparallel.tools.parity.comparison import RankSeen, Record
from tests.parity.harness import Recipe, check_ranks_agree, compare, reference

RECIPE = Recipe("resnet", accumulation=2, steps=2)


def _nudged(value: Tensor) -> Tensor:
    return value + 1e-7 * value.abs().max()


def _spoiled(records: list[Record], key: tuple[int, str, str], spoil: Callable[[Tensor], Any]) -> list[Record]:
    assert any(record[:3] == key for record in records), key
    return [(*record[:3], spoil(record[3].clone())) if record[:3] == key else record for record in records]  # type: ignore[misc, union-attr]


@pytest.mark.parametrize(
    ("key", "spoil"),
    [
        ((2, "loss", "of microbatch 2"), lambda x: x * (1 + 1e-8)),
        ((1, "gradient", "fc.bias"), _nudged),
        ((1, "gradient", "fc.bias"), lambda x: None),
        ((2, "norm", ""), lambda x: x * (1 + 1e-8)),
        ((2, "norm", ""), lambda x: x * math.nan),
        ((2, "clipped gradient", "fc.bias"), _nudged),
        ((2, "parameter", "fc.bias"), _nudged),
        ((2, "parameter", "fc.bias"), lambda x: x.float()),
        ((2, "buffer", "bn.running_var"), lambda x: x * (1 + 1e-7)),
        ((2, "buffer", "bn.num_batches_tracked"), lambda x: x + 1),
        ((2, "output", "in evaluation"), lambda x: x.roll(1, 0)),
    ],
)
def test_every_difference_is_named(key: tuple[int, str, str], spoil: Callable[[Tensor], Any]) -> None:
    expected = reference(RECIPE)
    compare(list(expected), expected, 0.0)
    with pytest.raises(AssertionError, match=f"step {key[0]}: {key[1]}: 1 differ(.|\n)* {key[2]}: "):
        compare(_spoiled(expected, key, spoil), expected, 1e-9)


def test_what_has_another_name_is_missing_and_too_much() -> None:
    expected = reference(RECIPE)
    renamed = [(step, kind, name.replace("fc.bias", "_orig_mod.fc.bias"), x) for step, kind, name, x in expected]
    with pytest.raises(AssertionError, match=r"step 1: gradient: 2 differ(.|\n)*fc.bias: None(.|\n)*_orig_mod.fc.bias"):
        compare(renamed, expected, 1e-9)


def test_clipping_bites_and_scales_every_gradient() -> None:
    records = {record[:3]: record[3] for record in reference(RECIPE)}
    clipped = {key: value for key, value in records.items() if key[1] == "clipped gradient"}
    assert clipped
    for (step, _, name), value in clipped.items():
        norm, gradient = records[step, "norm", ""], records[step, "gradient", name]
        assert norm is not None and gradient is not None and value is not None
        assert norm > 10 * RECIPE.max_norm
        torch.testing.assert_close(value, gradient * (RECIPE.max_norm / (norm + 1e-6)))


def test_different_replicas_are_found() -> None:
    def rank(shard: int, digest: bytes, norm: bytes = b"n") -> RankSeen:
        layouts, shards = {"w": ("Shard(dim=0)",)}, {"w": ((shard,), digest)}
        return RankSeen([], layouts, shards, {(1, "norm"): norm})

    check_ranks_agree([rank(0, b"a"), rank(1, b"b"), rank(0, b"a"), rank(1, b"b")])
    with pytest.raises(AssertionError, match=r"replicas of w.*rank 3 has other values"):
        check_ranks_agree([rank(0, b"a"), rank(1, b"b"), rank(0, b"a"), rank(1, b"c")])
    with pytest.raises(AssertionError, match="replicas of norm, step 1: rank 1 has another value"):
        check_ranks_agree([rank(0, b"a"), rank(1, b"b", b"m")])
