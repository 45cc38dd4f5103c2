"""Hardware profiles: the numbers that the cost model predicts with.

A profile is one of the well-known kinds of node (``PROFILES``), or one that ``python -m autoparallel calibrate`` has
measured and saved as JSON.

[Note: links] A collective costs a latency, and its bytes (``placements.sent_bytes``) over a bandwidth.  Both depend on
its kind and on how its ranks lie over nodes: ranks fill the nodes in order, so the last axes of a mesh lie inside nodes
first.  A group inside a node uses the node's links.  A group across nodes uses the network, one adapter for each of its
ranks in a node (an all-to-all cannot share adapters: what a rank sends leaves by its own).  A ring's latency grows with
the number of its ranks, a tree's (an all-reduce) with the logarithm.  What has been measured is used as measured, but
that the bytes of a gather or a reduce-scatter never take longer than those of an all-reduce in its place, which sends
twice as many: where a measurement says so, a whole would be reduced for the sake of noise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autoparallel.data import from_json, to_json
from autoparallel.placements import COLLECTIVES, sent_bytes
from autoparallel.text import LOGGER

FORMAT = 1


@dataclass(frozen=True)
class Link:
    """What one kind of collective was measured to cost over groups of one size.

    Attributes:
        kind: one of ``COLLECTIVES``.
        ranks, nodes: of the group.
        latency: seconds that it costs beside its bytes.
        bandwidth: bytes per second that a rank sends.
    """

    kind: str
    ranks: int
    nodes: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class OptimizerCost:
    """What an optimizer keeps, and how it updates.

    Attributes:
        name: its class.
        states: the bytes that it keeps beside each byte of a parameter.
        iterations: by how many of Newton and Schulz a matrix is orthogonalised, which one rank does for all; 0 where
            each element is updated by itself.
    """

    name: str
    states: float
    iterations: int = 0


ADAMW = OptimizerCost("AdamW", 2.0)


@dataclass(frozen=True)
class Profile:
    """What one device and its links can do, and what it trains with.

    Attributes:
        name: as reports write it.
        flops: dtype to floating-point operations per second that a large matrix product reaches.
        memory_bandwidth: bytes per second that an operator bound by memory reaches.
        launch: seconds that any operator costs, however small.
        latency, bandwidth: of a collective inside a node: seconds beside its bytes, and bytes per second that a rank
            sends.
        memory: bytes of memory of a device, if known.
        reserve: the part of it that no plan takes: what is left to the device's context, the buffers of collectives,
            and fragmentation.
        default_flops: for dtypes that ``flops`` does not name.
        peak: dtype to the floating-point operations per second that the maker names, for MFU; else ``flops``.
        attention: the part of ``flops`` that fused attention reaches.
        node: how many devices a node has; 0 where all devices are one node.
        network_latency, network_bandwidth: of a collective across nodes; bytes per second of one device's adapter.
        hop: seconds that each further rank of a ring adds; ``network_hop`` for each further node.
        overlap: the part of a collective that is hidden while the device computes; 1 where the network needs nothing
            of what computes.
        copies: the kinds of collectives whose whole the backend has in memory of its own while they run, as gloo has
            what it reduces and scatters, and what it gathers.
        unfolds: whether convolutions in float64 have their input unfolded while they run, as those of a CPU have.
        composes: whether a root mean square norm runs as the operators that it is made of, as on a CPU; elsewhere it
            is one kernel.
        links: what was measured, in place of the numbers above.
        fuses: whether layers run through Inductor, which fuses pointwise operators and reductions; the prediction of
            a program knows of it, while the search prices operators one by one.
        optimizer: what parameters are updated by.
        host_bandwidth: bytes per second of copies between a device's memory and its host's, either way, all devices of
            a node at once; None where both are one memory.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    memory_bandwidth: float
    launch: float
    latency: float
    bandwidth: float
    memory: float | None = None
    reserve: float = 0.0
    default_flops: float = field(default=1e12)
    peak: Mapping[torch.dtype, float] = field(default_factory=dict)
    attention: float = 1.0
    node: int = 0
    network_latency: float = 0.0
    network_bandwidth: float = 0.0
    hop: float = 0.0
    network_hop: float = 0.0
    overlap: float = 0.0
    copies: tuple[str, ...] = ()
    unfolds: bool = False
    composes: bool = False
    links: tuple[Link, ...] = ()
    fuses: bool = False
    optimizer: OptimizerCost = ADAMW
    host_bandwidth: float | None = None
    _links: dict[Any, tuple[float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def compute_seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype) -> float:
        """Roofline: the slower of computing and of moving memory, and never less than a launch."""
        if dtype.is_complex:  # a complex product is four real ones
            flops, dtype = 4 * flops, dtype.to_real()
        rate = self.flops.get(dtype, self.default_flops)
        return max(flops / rate, moved_bytes / self.memory_bandwidth) + self.launch

    def host_seconds(self, size: float) -> float:
        """Seconds in which so many bytes come from host memory to the device, and go back."""
        return 2 * size / (self.host_bandwidth or self.memory_bandwidth)

    @property
    def usable(self) -> float | None:
        """Bytes of a device's memory that a plan may take; None where they are not known."""
        return None if self.memory is None else (1 - self.reserve) * self.memory

    def peak_flops(self, dtype: torch.dtype) -> float:
        """What MFU is a fraction of."""
        if dtype.is_complex:
            return self.peak_flops(dtype.to_real()) / 4
        return self.peak.get(dtype) or self.flops.get(dtype, self.default_flops)

    def step_seconds(self, axis_sizes: Sequence[int], kind: str, axes: Sequence[int], full_bytes: int) -> float:
        """The time of one step of a redistribution; local actions cost a copy, "nothing" next to nothing."""
        if kind in COLLECTIVES:
            key = (tuple(axis_sizes), kind, tuple(axes))
            if key not in self._links:
                self._links[key] = self._link(*key)
                if kind in ("all_gather", "reduce_scatter"):
                    latency, bandwidth = self._links[key]
                    self._links[key] = latency, max(bandwidth, self._link(key[0], "all_reduce", key[2])[1] / 2)
            latency, bandwidth = self._links[key]
            return latency + sent_bytes(kind, full_bytes, math.prod(axis_sizes[a] for a in axes)) / bandwidth
        if kind == "nothing":
            return 1e-9
        return 0.1 * self.launch + (full_bytes / self.memory_bandwidth if kind != "slice" else 0.0)

    def nodes_of(self, axis_sizes: Sequence[int], axes: Sequence[int]) -> int:
        """Over how many nodes a group over some mesh axes is spread; ranks fill the nodes in order."""
        if not self.node:
            return 1
        ids = [0]
        stride = 1
        for axis in reversed(range(len(axis_sizes))):
            if axis in axes:
                ids = [rank + i * stride for i in range(axis_sizes[axis]) for rank in ids]
            stride *= axis_sizes[axis]
        return len({rank // self.node for rank in ids})

    def _link(self, axis_sizes: tuple[int, ...], kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        """Latency and bandwidth of a collective (see [Note: links])."""
        ranks = math.prod(axis_sizes[axis] for axis in axes)
        nodes = self.nodes_of(axis_sizes, axes)
        measured = [link for link in self.links if link.kind == kind and (link.nodes > 1) == (nodes > 1)]
        if measured:
            near = min(measured, key=lambda link: abs(math.log(link.ranks / ranks)))
            return near.latency, near.bandwidth
        ring = kind != "all_reduce"
        inside = -(-ranks // nodes)
        latency = self.latency + self.hop * (inside - 1 if ring else math.log2(inside))
        if nodes == 1:
            return latency, self.bandwidth
        latency += self.network_latency + self.network_hop * (nodes - 1 if ring else math.log2(nodes))
        if kind == "all_to_all":
            return latency, min(self.bandwidth, self.network_bandwidth * nodes / (nodes - 1))
        return latency, min(self.bandwidth, inside * self.network_bandwidth)

    # -- files ------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The numbers as JSON text."""
        return to_json(self, FORMAT)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Reads a profile.

        Raises:
            ValueError: when the text is no profile of this format, or a number cannot be.
        """
        try:
            profile: Profile = from_json(Profile, text, FORMAT)
            profile.require_valid()
        except ValueError as error:
            raise ValueError(f"not a hardware profile: {error}") from error
        return profile

    def require_valid(self) -> None:
        """Raises ValueError for a number that no device can have."""
        above = {"memory_bandwidth": self.memory_bandwidth, "bandwidth": self.bandwidth, "attention": self.attention}
        above |= {"default_flops": self.default_flops, "memory": 1.0 if self.memory is None else self.memory}
        above["host_bandwidth"] = 1.0 if self.host_bandwidth is None else self.host_bandwidth
        above |= {f"flops[{dtype}]": rate for dtype, rate in self.flops.items()}
        above |= {f"peak[{dtype}]": rate for dtype, rate in self.peak.items()}
        least = {"launch": self.launch, "latency": self.latency, "hop": self.hop, "node": self.node}
        least |= {"network_latency": self.network_latency, "network_bandwidth": self.network_bandwidth}
        least |= {"network_hop": self.network_hop, "overlap": self.overlap, "the rest of overlap": 1 - self.overlap}
        least |= {"reserve": self.reserve, "optimizer.states": self.optimizer.states}
        least["optimizer.iterations"] = self.optimizer.iterations
        above["the rest of reserve"] = 1 - self.reserve
        for i, link in enumerate(self.links):
            if link.kind not in COLLECTIVES:
                raise ValueError(f"links[{i}].kind must be one of {', '.join(COLLECTIVES)}, not {link.kind!r}")
            above |= {f"links[{i}].{n}": getattr(link, n) for n in ("ranks", "nodes", "bandwidth")}
            least[f"links[{i}].latency"] = link.latency
        for name, number in (*above.items(), *least.items()):
            if number < 0 or (number == 0 and name in above):
                raise ValueError(f"{name} must {'be positive' if name in above else 'not be negative'}, got {number}")

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Reads a profile that :meth:`save` wrote."""
        return Profile.from_json(Path(path).read_text(errors="replace"))


RESERVE = 0.1
"""The ``reserve`` of GPUs: about 1.5 GB of context and NCCL's channels of 80 GB, and what the allocator cannot use."""

CPU = Profile(
    name="cpu",
    flops={torch.float32: 6e10, torch.float64: 3e10, torch.bfloat16: 2e10},
    memory_bandwidth=8e9,
    launch=1e-5,
    latency=2.5e-4,
    bandwidth=1e9,
    default_flops=3e10,
    # gloo's halves of an all-reduce take nearly as long as a whole one.
    links=(Link("all_gather", 2, 1, 2.5e-4, 6e8), Link("reduce_scatter", 2, 1, 2.5e-4, 6e8)),
    copies=("all_gather", "reduce_scatter"),
    overlap=0.65,  # gloo's threads wait and copy beside a rank that has a core of its own: 0.65 to 0.73 measured
    unfolds=True,
    composes=True,
)


def _node(
    name: str,
    peak: tuple[float, float, float],
    gibibytes: float,
    memory_bandwidth: float,
    nvlink: float,
    network: float,
    attention: float,
    host: float,
) -> Profile:
    """A node of eight GPUs, from what its makers say: teraflops dense in bf16, float32 and float64, bytes/s.

    Its memory is what torch names as a device's total capacity, in GiB: 80 GB stand for some 79 of them, 85e9 bytes.
    Large matrix products reach about 70% of the peak in bf16 and 75% in float32 (TF32 is off unless it is asked for),
    copies 85% of the memory's bandwidth, collectives 75% of the links' and 90% of the network's; copies between pinned
    host memory and the device 85% of the slot's (PCIe 4.0 or 5.0 x16, 32 and 64 GB/s either way).
    """
    half, single, double = (1e12 * rate for rate in peak)
    named = {torch.bfloat16: half, torch.float16: half, torch.float32: single, torch.float64: double}
    return Profile(
        name=name,
        flops={dtype: rate * (0.7 if dtype.itemsize == 2 else 0.75) for dtype, rate in named.items()},
        memory_bandwidth=0.85 * memory_bandwidth,
        launch=5e-6,
        latency=1.5e-5,
        bandwidth=0.75 * nvlink,
        memory=gibibytes * 2**30,
        reserve=RESERVE,
        default_flops=0.7 * half,
        peak=named,
        attention=attention,
        node=8,
        network_latency=1e-5,
        network_bandwidth=0.9 * network,
        hop=1e-6,
        network_hop=5e-6,
        overlap=1.0,
        host_bandwidth=0.85 * host,
    )


A100 = _node("a100", (312, 19.5, 19.5), 79.15, 2.0e12, 3.0e11, 2.5e10, 0.8, 3.2e10)
H100 = _node("h100", (989, 67, 67), 79.1, 3.35e12, 4.5e11, 5.0e10, 0.55, 6.4e10)
H200 = _node("h200", (989, 67, 67), 139.8, 4.8e12, 4.5e11, 5.0e10, 0.55, 6.4e10)
B200 = _node("b200", (2250, 75, 37), 178.35, 8.0e12, 9.0e11, 5.0e10, 0.55, 6.4e10)
PROFILES = {profile.name: profile for profile in (A100, H100, H200, B200, CPU)}
"""By the name that ``hardware=`` and ``--hardware`` take."""


def profile_for(device_type: str, hardware: str | Path | Profile | None = None) -> Profile:
    """The profile that is asked for: itself, by name, or from a file; else that of the mesh's devices.

    Raises:
        ValueError: for a name that is no profile and no file.
    """
    if isinstance(hardware, Profile):
        return hardware
    if hardware is None:
        return CPU if device_type == "cpu" else profile_of_device(device_type, _device_name(device_type))
    if isinstance(hardware, str) and hardware in PROFILES:
        return PROFILES[hardware]
    if Path(hardware).is_file():
        return Profile.load(hardware)
    raise ValueError(
        f"unknown hardware {str(hardware)!r}: expected one of {', '.join(PROFILES)}, or a file that "
        "'python -m autoparallel calibrate' wrote"
    )


def profile_of_device(device_type: str, name: str) -> Profile:
    """The profile of a device that torch calls by this name: "NVIDIA A100-SXM4-80GB" is an "a100".

    A device that is not known is planned for as an H100, which a warning and the profile's name say.
    """
    words = re.findall("[a-z0-9]+", name.lower())
    for profile in PROFILES.values():
        if profile.name in words:
            return profile
    return _assume_h100(name or device_type)


@cache
def _assume_h100(device: str) -> Profile:
    LOGGER.warning(
        "no hardware profile is known for %s: it is planned for as an h100. Pass hardware=..., with the file of a "
        "profile that 'python -m autoparallel calibrate' measured",
        device,
    )
    return replace(H100, name=f"{H100.name}, assumed for {device}")


def _device_name(device_type: str) -> str:
    """What torch calls the devices of this kind; empty where it does not tell."""
    module = getattr(torch, device_type, None)
    names = getattr(module, "get_device_name", None)
    return str(names()) if names is not None and module is not None and module.is_available() else ""
