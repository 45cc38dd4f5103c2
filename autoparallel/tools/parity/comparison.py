"""What two training runs show, and how far they are apart."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoparallel.tools.parity.verification import Difference

Record = tuple[int, str, str, Tensor | None]
"""What is compared: the step, what it is, its name, its value."""

Spread = Mapping[tuple[int, str, str], float]
"""By step, kind and name: how far the quantity may be off."""


def difference(actual: Tensor, expected: Tensor) -> float:
    """``max |actual - expected| / max(1, max |expected|)``; inf where shapes, dtypes or non-finite values differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    off = torch.where(same, 0.0, (actual - expected).abs())
    value = off.max().item() / max(1.0, _largest(expected))
    return math.inf if math.isnan(value) else value


def _largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    finite = x.abs()[x.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


def compare(
    actual: Sequence[Record],
    expected: Sequence[Record],
    layouts: Mapping[str, tuple[str, ...]],
    tolerances: Spread | None = None,
) -> Iterator[Difference]:
    """How far every quantity of one run is from that of the other."""
    rest = {(step, kind, name): value for step, kind, name, value in actual}
    for step, kind, name, value in expected:
        mine = rest.pop((step, kind, name), None)
        layout = layouts.get(name, ()) if kind not in ("buffer", "attribute") else ()
        limit = tolerances[step, kind, name] if tolerances is not None else None
        if value is None and mine is None:
            continue
        if value is None or mine is None:
            detail = f"{'a value' if mine is not None else 'None'}, expected {'None' if value is None else 'a value'}"
            yield Difference(kind, name, math.inf, step, layout, detail)
        else:
            mine = mine.to(value.dtype) if kind == "norm" else mine  # ours is summed in float32 at least
            off = difference(mine, value)
            yield Difference(kind, name, off, step, layout, _describe(mine, value), _size(value), limit)
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


def digest(x: Tensor) -> str:
    """A tensor's bits."""
    data = x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return hashlib.sha256(data).hexdigest()


def compare_ranks(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Difference]:
    """What must be the same, bit for bit, on several ranks: replicas of parameters, losses and norms."""
    if len(ranks) == 1:
        return
    for name, layout in ranks[0]["layouts"].items():
        known: dict[Any, str] = {}
        wrong = next(
            (r for r, x in enumerate(ranks) if known.setdefault(*x["shards"][name]) != x["shards"][name][1]), None
        )
        text = "equal on all ranks" if wrong is None else f"rank {wrong} has other values than another rank"
        yield Difference("replicas", name, 0.0 if wrong is None else math.inf, 0, layout, text)
    for name, bits in ranks[0]["seen"].items():
        wrong = next((r for r, x in enumerate(ranks) if x["seen"].get(name) != bits), None)
        text = "equal on all ranks" if wrong is None else f"rank {wrong} has another value than rank 0"
        yield Difference("replicas", name, 0.0 if wrong is None else math.inf, 0, (), text)


__all__ = ["Record", "Spread", "compare", "compare_ranks", "difference", "digest"]
