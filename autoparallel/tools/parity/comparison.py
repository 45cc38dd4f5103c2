"""What two training runs show, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel.runtime.ranks.agreement import tensor_digest
from autoparallel.tools.parity.report import Difference

Record = tuple[int, str, str, Tensor | None]
"""What is compared: the step, what it is, its name, its value."""

Spread = Mapping[tuple[int, str, str], float]
"""By step, kind and name: how far the quantity may be off."""


@dataclass(frozen=True)
class RankSeen:
    """What a rank shows of the compiled model after training.

    Attributes:
        records: what is compared with the plain model.
        layouts: how each parameter lies of which the rank has a part.
        shards: which part that is, and its bits.
        digests: the bits of losses and norms, by step and name.
    """

    records: list[Record]
    layouts: Mapping[str, tuple[str, ...]]
    shards: Mapping[str, tuple[tuple[int, ...], bytes]]
    digests: Mapping[tuple[int, str], bytes]


def difference(actual: Tensor, expected: Tensor, floor: float = 1.0) -> float:
    """``max |actual - expected| / max(floor, max |expected|)``; inf for other shapes, dtypes or non-finite values."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    off = torch.where(same, 0.0, (actual - expected).abs())
    value = off.max().item() / max(floor, _largest(expected))
    return math.inf if math.isnan(value) else value


def distance(actual: Tensor | None, expected: Tensor | None) -> float:
    """How far two gradients are apart; None is zero."""
    like = actual if expected is None else expected
    if like is None:
        return 0.0
    zero = torch.zeros_like(like)
    return difference(zero if actual is None else actual, zero if expected is None else expected)


def _largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    finite = x.abs()[x.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


def compare(
    actual: Sequence[Record],
    expected: Sequence[Record],
    layouts: Mapping[str, tuple[str, ...]],
    tolerances: Spread | None = None,
    floor: float = 1.0,
) -> Iterator[Difference]:
    """How far every quantity of one run is from that of the other, in the order in which they appear."""
    rest = {(step, kind, name): value for step, kind, name, value in actual}
    for step, kind, name, value in expected:
        compared = rest.pop((step, kind, name), None)
        layout = layouts.get(name, ()) if kind not in ("buffer", "attribute") else ()
        limit = tolerances[step, kind, name] if tolerances is not None else None
        if value is None and compared is None:
            continue
        if value is None or compared is None:
            detail = (
                f"{'a value' if compared is not None else 'None'}, expected {'None' if value is None else 'a value'}"
            )
            yield Difference(kind, name, math.inf, step, layout, detail)
        else:
            compared = compared.to(value.dtype) if kind == "norm" else compared  # ours is summed in float32 at least
            off = difference(compared, value, floor)
            yield Difference(kind, name, off, step, layout, _describe(compared, value), _size(value), limit)
    for (step, kind, name), value in rest.items():
        if value is not None:
            yield Difference(kind, name, math.inf, step, (), "the reference has nothing of this name")


def _size(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() and x.dtype != torch.bool else math.inf


def _describe(actual: Tensor, expected: Tensor) -> str:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    if expected.numel() == 1:
        return f"{actual.item():.10g}, expected {expected.item():.10g}"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    return f"norm {actual.to(wide).norm().item():.6g}, expected {expected.to(wide).norm().item():.6g}"


def seen_of(model: nn.Module, records: list[Record]) -> RankSeen:
    """What a rank shows of the compiled model after training."""
    layouts, shards = {}, {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        coordinate = parameter.device_mesh.get_coordinate()
        if coordinate is None:  # a parameter of another rank's stage
            continue
        kinds = zip(coordinate, parameter.placements, strict=True)
        shard = tuple(c for c, placement in kinds if not placement.is_replicate())
        layouts[name] = tuple(map(str, parameter.placements))
        shards[name] = (shard, tensor_digest(parameter.to_local()))
    digests = {
        (step, f"{kind} {name}".strip()): tensor_digest(x)
        for step, kind, name, x in records
        if kind in ("loss", "norm") and x is not None
    }
    return RankSeen(records, layouts, shards, digests)


def compare_ranks(ranks: Sequence[RankSeen]) -> Iterator[Difference]:
    """What must be the same, bit for bit, on several ranks: replicas of parameters, losses and norms."""
    if len(ranks) == 1:
        return
    for name in {name: None for rank in ranks for name in rank.layouts}:
        holders = [(number, rank) for number, rank in enumerate(ranks) if name in rank.layouts]
        layout = holders[0][1].layouts[name]
        bits: dict[tuple[int, ...], bytes] = {}
        wrong = next(
            (
                number
                for number, rank in holders
                if rank.layouts[name] != layout or bits.setdefault(*rank.shards[name]) != rank.shards[name][1]
            ),
            None,
        )
        text = "equal on all ranks" if wrong is None else f"rank {wrong} has other values than another rank"
        yield Difference("replicas", name, 0.0 if wrong is None else math.inf, 0, layout, text)
    for (step, name), value in ranks[0].digests.items():
        wrong = next((number for number, rank in enumerate(ranks) if rank.digests.get((step, name)) != value), None)
        text = "equal on all ranks" if wrong is None else f"rank {wrong} has another value than rank 0"
        yield Difference("replicas", name, 0.0 if wrong is None else math.inf, step, (), text)
