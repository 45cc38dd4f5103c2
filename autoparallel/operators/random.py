"""Random numbers that depend on the seed, the operator, the call and the global position of an element only.

Every number is a function of a key (the seed, the call, and the number of the draw among those of a call) and of where
its element stands in the whole tensor: the splitmix64 generator (Steele, Lea, Flood 2014), entered at that position.
What a rank makes of its part is therefore the same as that part of what one process makes.  What is drawn with these
numbers stands in ``draws``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoparallel.comm.current import Current
from autoparallel.comm.groups import axis_index, axis_size


@dataclass(frozen=True)
class RandomState:
    """What a call's random numbers depend on beside the draw and the global position of an element.

    The rows of microbatch ``microbatch`` of ``microbatches`` stand in the batch behind those of the ones before it.
    Draws are numbered from ``first`` on.
    """

    seed: int
    call: int
    microbatch: int = 0
    microbatches: int = 1
    first: int = 0


_STATE = Current(RandomState(0, 0))

MICROBATCH = "microbatch"
"""Stands for an axis in what shards a draw's dim: the microbatches of a pipeline cut the batch."""

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def draw_from(state: RandomState) -> AbstractContextManager[Any]:
    """A context in which the random numbers that this thread draws depend on ``state``."""
    return _STATE.using(state)


def random_state() -> RandomState:
    """What this thread's random numbers depend on now."""
    return _STATE.value


def _mix(z: int) -> int:
    """One step of splitmix64 on a Python integer."""
    return _scramble((z + _GAMMA) & _MASK64)


def _scramble(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK64
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK64
    return z ^ (z >> 31)


def digits_of(dtype: torch.dtype) -> int:
    """How many binary digits a number of a dtype has."""
    return _DIGITS.get(dtype, 53)


def number_alone(state: RandomState, place: int) -> float:
    """A number in [0, 1): what ``torch.rand([])`` draws in float64.

    Such draws are numbered by themselves, downwards: what a call draws beside them may depend on them.

    Args:
        place: among those of the call.
    """
    return (_scramble(_mix(_key(state, alone(place)))) >> 11) * 2.0**-53


def alone(place: int) -> int:
    """The number of a draw of ``torch.rand([])``, by its place among those of the call."""
    return -1 - place


def _key(state: RandomState, number: int) -> int:
    return _mix(_mix(_mix(state.seed & _MASK64) ^ (state.first + number)) ^ state.call)


def _as_signed(z: int) -> int:
    return z - (1 << 64) if z >= 1 << 63 else z


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


class Numbers:
    """The random numbers of one draw, for this rank's part of a tensor.

    Args:
        number: of the draw, among those of a call.
        shape: of this rank's part.
        shards: for each dim (joined by ";") the axes that shard it (joined by ",", outermost first); empty when whole.
            ``MICROBATCH`` counts as one.

    ``stream`` tells several numbers of one element apart.
    """

    def __init__(self, number: int, shape: Sequence[int], shards: str, device: torch.device) -> None:
        state = _STATE.value
        self._key = _key(state, number)
        self._scaled = _positions(shape, shards, device) * _as_signed(_GAMMA)

    def bits(self, stream: int = 0) -> Tensor:
        """64 random bits for each element, as int64."""
        z = self._scaled + _as_signed(_mix(self._key ^ stream))
        z = (z ^ _logical_shift(z, 30)) * _as_signed(_FIRST)
        z = (z ^ _logical_shift(z, 27)) * _as_signed(_SECOND)
        return z ^ _logical_shift(z, 31)

    def below(self, p: float) -> Tensor:
        """Whether ``uniform(float64)`` is below p, without making it."""
        return _logical_shift(self.bits(), 11) < math.ceil(p * (1 << 53))

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """In [0, 1), in float64, but with no more digits than ``dtype`` has, so that a cast does not give 1."""
        digits = digits_of(dtype)
        return _logical_shift(self.bits(), 64 - digits).double() * 2.0**-digits

    def inside(self, stream: int = 0) -> Tensor:
        """In (0, 1), neither end included, in float64."""
        return (_logical_shift(self.bits(stream), 12).double() + 0.5) * 2.0**-52

    def normal(self, stream: int = 0) -> Tensor:
        """Numbers of mean 0 and deviation 1 (Box and Muller 1958), in float64; takes two streams."""
        radius = self.inside(stream).log().mul(-2).sqrt()
        return radius * self.inside(stream + 1).mul(2 * math.pi).cos()

    def exponential(self, dtype: torch.dtype) -> Tensor:
        """Numbers of rate 1, positive in ``dtype`` too."""
        return self.inside().log().neg().clamp(min=torch.finfo(dtype).tiny)


def _positions(shape: Sequence[int], shards: str, device: torch.device) -> Tensor:
    """Where each element of this rank's part stands in the whole tensor, counted row by row."""
    groups = shards.split(";") if shards else [""] * len(shape)
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in range(len(shape) - 1, -1, -1):
        local = shape[dim]
        place, count = coordinate(groups[dim])
        positions = torch.arange(local, dtype=torch.int64, device=device) + place * local
        index = index + (positions * stride).view([-1 if d == dim else 1 for d in range(len(shape))])
        stride *= local * count
    return index


def coordinate(groups: str) -> tuple[int, int]:
    """This rank's position and the number of positions along a dim sharded by ``groups`` (outermost first)."""
    index, count = 0, 1
    for group in groups.split(",") if groups else ():
        if group == MICROBATCH:
            here, n = _STATE.value.microbatch, _STATE.value.microbatches
        else:
            here, n = axis_index(group), axis_size(group)
        index, count = index * n + here, count * n
    return index, count
