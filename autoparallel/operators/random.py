"""Random numbers that depend on the seed, the operator, the call and the global position of an element only."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from autoparallel.groups import axis_index, axis_size


@dataclass(frozen=True)
class RandomState:
    """What a call's dropout masks depend on beside the operator and the global position of an element.

    The rows of microbatch ``microbatch`` of ``microbatches`` stand in the batch behind those of the ones before it.
    """

    seed: int
    call: int
    microbatch: int = 0
    microbatches: int = 1


class _Current(threading.local):
    state = RandomState(0, 0)


_CURRENT = _Current()

MICROBATCH = "microbatch"
"""Stands for an axis in what shards a dropout's dim: the microbatches of a pipeline cut the batch."""

_MASK64 = (1 << 64) - 1


def set_random_state(state: RandomState) -> None:
    """Sets the seed and the call number of the dropout masks that this thread makes from now on."""
    _CURRENT.state = state


def random_state() -> RandomState:
    """What this thread's dropout masks depend on now."""
    return _CURRENT.state


def _mix(z: int) -> int:
    """One round of splitmix64 (Steele, Lea, Flood 2014) on a Python integer."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >= 1 << 63 else z


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@torch.library.custom_op("autoparallel::dropout_mask", mutates_args=())
def _dropout_mask(x: Tensor, p: float, operator: int, shards: str) -> Tensor:
    state = _CURRENT.state
    key = _mix(_mix(_mix(state.seed & _MASK64) ^ operator) ^ state.call)
    index = torch.zeros((), dtype=torch.int64, device=x.device)
    groups = shards.split(";") if shards else [""] * x.ndim
    stride = 1
    for dim in range(x.ndim - 1, -1, -1):
        local = x.shape[dim]
        coordinate, count = _coordinate(groups[dim])
        positions = torch.arange(local, dtype=torch.int64, device=x.device) + coordinate * local
        index = index + (positions * stride).view([-1 if d == dim else 1 for d in range(x.ndim)])
        stride *= local * count
    z = index + _signed(key)
    z = (z ^ _logical_shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _logical_shift(z, 27)) * _signed(0x94D049BB133111EB)
    keep = _logical_shift(z ^ _logical_shift(z, 31), 40) >= round(p * (1 << 24))
    return keep.to(x.dtype) * (1.0 / (1.0 - p) if p < 1 else 0.0)


@_dropout_mask.register_fake
def _(x: Tensor, p: float, operator: int, shards: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _coordinate(groups: str) -> tuple[int, int]:
    """This rank's position and the number of positions along a dim sharded by ``groups`` (outermost first)."""
    index, count = 0, 1
    for group in groups.split(",") if groups else ():
        if group == MICROBATCH:
            here, n = _CURRENT.state.microbatch, _CURRENT.state.microbatches
        else:
            here, n = axis_index(group), axis_size(group)
        index, count = index * n + here, count * n
    return index, count


def dropout(x: Tensor, p: float, operator: int, shards: str = "") -> Tensor:
    """Dropout whose mask depends on the seed, the operator, the call and the *global* position of each element.

    Args:
        x: any shape.
        p: the probability of a zero.
        operator: a number that tells this dropout from the others of the program.
        shards: for each dim (joined by ";") the axes that shard it (joined by ",", outermost first); empty when whole.
            ``MICROBATCH`` counts as one.
    """
    return x * torch.ops.autoparallel.dropout_mask(x.detach(), p, operator, shards)
