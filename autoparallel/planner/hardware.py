"""Hardware profiles: the numbers that the cost model predicts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autoparallel.placements import COLLECTIVES, sent_bytes


@dataclass(frozen=True)
class Profile:
    """What one device and its links can do.

    Attributes:
        name: as reports write it.
        flops: dtype to floating-point operations per second of a large matrix product.
        memory_bandwidth: bytes per second.
        launch: seconds that any operator costs, however small.
        latency: seconds that a collective costs beside its bytes.
        bandwidth: bytes per second that a rank sends in a collective.
        memory: bytes of memory of a device, if known.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    memory_bandwidth: float
    launch: float
    latency: float
    bandwidth: float
    memory: float | None = None
    default_flops: float = field(default=1e12)

    def compute_seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype) -> float:
        """Roofline: the slower of computing and of moving memory, and never less than a launch."""
        rate = self.flops.get(dtype, self.default_flops)
        return max(flops / rate, moved_bytes / self.memory_bandwidth) + self.launch

    def step_seconds(self, axis_sizes: Sequence[int], kind: str, axes: Sequence[int], full_bytes: int) -> float:
        """The time of one step of a redistribution; local actions cost a copy, "nothing" next to nothing."""
        if kind in COLLECTIVES:
            size = 1
            for axis in axes:
                size *= axis_sizes[axis]
            return self.latency + sent_bytes(kind, full_bytes, size) / self.bandwidth
        if kind == "nothing":
            return 1e-9
        return 0.1 * self.launch + (full_bytes / self.memory_bandwidth if kind != "slice" else 0.0)


CPU = Profile(
    name="cpu",
    flops={torch.float32: 6e10, torch.float64: 3e10, torch.bfloat16: 2e10},
    memory_bandwidth=8e9,
    launch=1e-5,
    latency=2.5e-4,
    bandwidth=1e9,
    default_flops=3e10,
)
H100 = Profile(
    name="h100",
    flops={torch.float32: 4e14, torch.float64: 5e13, torch.bfloat16: 7e14, torch.float16: 7e14},
    memory_bandwidth=2.8e12,
    launch=5e-6,
    latency=2e-5,
    bandwidth=3e11,
    memory=80e9,
    default_flops=4e14,
)

_BY_DEVICE = {"cpu": CPU, "cuda": H100}


def profile_for(device_type: str) -> Profile:
    """The profile used for a mesh's kind of device."""
    return _BY_DEVICE.get(device_type, H100)
