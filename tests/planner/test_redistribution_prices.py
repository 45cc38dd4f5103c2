"""No measured bandwidth makes a path take an all-reduce where a gather or a reduce-scatter moves half the bytes."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest

from autoparallel.hardware import CPU, PROFILES, Link, Profile
from autoparallel.placements import (
    COLLECTIVES,
    Invariant,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    sent_bytes,
)
from autoparallel.placements.redistribution import Redistributor, local_numel

SIZES = (2, 4)
SHAPE = (512, 512)

SLOW_HALVES = dataclasses.replace(
    CPU,
    links=tuple(
        Link(kind, ranks, 1, 2e-4, 1e8 if kind in ("all_gather", "reduce_scatter") else 1e9)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        for ranks in (2, 4, 8)
    ),
)
"""Gathers and scatters at a tenth of an all-reduce's bandwidth: priced as measured, they cost five times as much."""


def _redistributor(profile: Profile) -> Redistributor:
    return Redistributor(SIZES, functools.partial(profile.step_seconds, SIZES))


def _swaps(redistributor: Redistributor, src: Layout, dst: Layout, backward: bool) -> list[str]:
    """Where a path does by an all-reduce, forward or backward, what half of one would have done on as many bytes."""
    found = []
    before: dict[int, tuple[str, int]] = {}  # by axis: the last step there, and how many elements it was about
    layout = src
    for step in redistributor.path(src, dst, SHAPE, 4, True, backward):
        way = step.src.kind + step.dst.kind
        held = local_numel(SHAPE, layout, SIZES)
        for axis in step.axes if len(step.axes) == 1 else ():  # one all-reduce over several axes is another matter
            last, size = before.get(axis, ("", 0))
            if (last, way) in (("SP", "PI"), ("SP", "PR"), ("IR", "RS"), ("PI", "IS"), ("PR", "RS")) and size == held:
                found.append(f"axis {axis}: {last} then {way}")
            before[axis] = way, held * (SIZES[axis] if way == "SP" else 1)
        layout = step.apply(layout)
    return found


def _layouts() -> list[Layout]:
    ways: list[Placement] = [Invariant, Replicate, Partial, Shard(0), Shard(1)]
    return [(a, b) for a in ways for b in ways]


@pytest.mark.parametrize("backward", [False, True])
def test_no_path_moves_twice_the_bytes(backward: bool) -> None:
    redistributor = _redistributor(SLOW_HALVES)
    layouts = _layouts()
    for src in layouts:
        for dst in layouts:
            if src != dst:
                assert not _swaps(redistributor, src, dst, backward), (src, dst)


def _as_measured(profile: Profile, kind: str, axes: tuple[int, ...], size: int) -> float:
    """What an action would cost without a bound on what gathers cost."""
    if kind not in COLLECTIVES:
        return profile.step_seconds(SIZES, kind, axes, size)
    latency, bandwidth = profile._link(SIZES, kind, axes)
    return latency + sent_bytes(kind, size, math.prod(SIZES[axis] for axis in axes)) / bandwidth


def test_it_is_the_price_that_keeps_them() -> None:
    redistributor = Redistributor(SIZES, functools.partial(_as_measured, SLOW_HALVES))
    whole: Layout = (Invariant, Invariant)
    assert _swaps(redistributor, (Shard(0), Invariant), whole, False) == ["axis 0: SP then PI"]
    assert _swaps(redistributor, (Partial, Invariant), (Shard(0), Invariant), False) == ["axis 0: PI then IS"]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: str(profile.name))
def test_prices_of_the_known_profiles_are_as_they_are_said(profile: Profile) -> None:
    for kind in (*COLLECTIVES, "pad"):
        for axes in ((0,), (1,), (0, 1)):
            asked = profile.step_seconds(SIZES, kind, axes, 1 << 20)
            assert asked == _as_measured(profile, kind, axes, 1 << 20)
