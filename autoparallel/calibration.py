"""Measuring a hardware profile on the ranks of a real mesh.

All ranks compute and communicate at the same time, as they will in training: ranks that share cores or memory get their
share of them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.groups import bind, communicator_of, whole_group
from autoparallel.placements import sent_bytes
from autoparallel.planner.hardware import Link, Profile, profile_for

REPEATS = 7
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def calibrate(mesh: DeviceMesh, name: str = "measured", told: Callable[[str], None] = lambda what: None) -> Profile:
    """Measures what this mesh's devices and links reach; every rank must call it, and gets the same profile.

    Args:
        name: of the profile.
        told: is told what is measured.
    """
    prefix = bind(mesh)
    group = whole_group(prefix)
    device = torch.device(mesh.device_type)
    large = device.type != "cpu"
    told("matrix products")
    flops = {dtype: _matmul_rate(dtype, device, 8192 if large else 512) for dtype in _dtypes(device)}
    told("memory and launches")
    bandwidth = _memory_bandwidth(device, 1 << 27 if large else 1 << 20)
    launch = _launch(device)
    links: list[Link] = []
    for axes in _groups(mesh):
        told(f"collectives over {axes}")
        links += _links(f"{prefix}/{axes}", device, 1 << 26 if large else 1 << 21)
    told("overlap")
    overlap = _overlap(f"{prefix}/{'+'.join(mesh.mesh_dim_names or ())}", device, 4096 if large else 384)
    known = profile_for(device.type)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    reduced = [link for link in links if link.kind == "all_reduce"]
    profile = Profile(
        name=name,
        flops=flops,
        memory_bandwidth=bandwidth,
        launch=launch,
        latency=reduced[0].latency if reduced else known.latency,
        bandwidth=reduced[0].bandwidth if reduced else known.bandwidth,
        memory=float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None,
        default_flops=flops[torch.float32],
        attention=known.attention,
        node=local if 0 < local < mesh.size() else 0,
        network_latency=known.network_latency,
        network_bandwidth=known.network_bandwidth or known.bandwidth,
        overlap=overlap,
        copies=known.copies,
        links=tuple(links),
    )
    texts: list[str] = [profile.to_json()]
    dist.broadcast_object_list(texts, src=int(mesh.mesh.flatten()[0]), group=group)
    return Profile.from_json(texts[0])


def _dtypes(device: torch.device) -> list[torch.dtype]:
    found = [torch.float32, torch.float64, torch.bfloat16]
    return [*found, torch.float16] if device.type == "cuda" else found


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """The median time of a call, after two that are not counted."""
    times = []
    for i in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i > 1:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _matmul_rate(dtype: torch.dtype, device: torch.device, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def _memory_bandwidth(device: torch.device, elements: int) -> float:
    """Bytes per second of the operators that a model is bound by memory in, as they come."""
    x, y = (torch.randn(elements // 256, 256, device=device) for _ in range(2))
    moved = x.numel() * x.element_size()
    rates = [
        3 * moved / _seconds(lambda: x + y, device),
        2 * moved / _seconds(lambda: F.gelu(x), device),
        2 * moved / _seconds(lambda: F.layer_norm(x, (256,)), device),
        2 * moved / _seconds(lambda: x.t().contiguous(), device),
    ]
    return statistics.geometric_mean(rates)


def _launch(device: torch.device, count: int = 100) -> float:
    """Seconds of an operator that does next to nothing, in a chain that is differentiated."""

    def chain() -> None:
        x = start = torch.zeros(8, device=device, requires_grad=True)
        for _ in range(count):
            x = x * 1.5
        torch.autograd.grad(x.sum(), start)

    return _seconds(chain, device) / (2 * count)


def _groups(mesh: DeviceMesh) -> Iterator[str]:
    names = mesh.mesh_dim_names or ()
    yield from (name for i, name in enumerate(names) if mesh.size(i) > 1)
    if sum(size > 1 for size in mesh.shape) > 1:
        yield "+".join(names)


def _run(kind: str, group: str, x: torch.Tensor) -> None:
    communicator, axis = communicator_of(group)
    getattr(communicator, kind)(x, axis)()


def _links(group: str, device: torch.device, elements: int) -> list[Link]:
    """Latency and bandwidth of each kind of collective over one group."""
    communicator, axis = communicator_of(group)
    ranks = communicator.size(axis)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or ranks
    found = []
    for kind in KINDS:
        seconds, sent = [], []
        for size in (ranks * 16, elements // ranks * ranks):
            part = kind == "all_gather"  # each rank brings a part of the whole
            x = torch.zeros(size // ranks if part else size, device=device)
            x = x.view(ranks, -1) if kind in ("reduce_scatter", "all_to_all") else x
            whole = x.numel() * x.element_size() * (ranks if kind in ("all_gather", "all_to_all") else 1)
            _run("all_reduce", group, torch.zeros(1, device=device))  # the ranks begin together
            seconds.append(_seconds(lambda kind=kind, x=x: _run(kind, group, x), device))  # type: ignore[misc]
            sent.append(sent_bytes(kind, whole, ranks))
        bandwidth = (sent[1] - sent[0]) / max(seconds[1] - seconds[0], 1e-9)
        found.append(Link(kind, ranks, -(-ranks // local), seconds[0], bandwidth))
    return found


def _overlap(group: str, device: torch.device, size: int) -> float:
    """Which part of a collective is hidden while the device computes."""
    communicator, axis = communicator_of(group)
    if communicator.size(axis) == 1:
        return 0.0
    a = torch.randn(size, size, device=device)
    computing = _seconds(lambda: a @ a, device)
    x = torch.zeros(1 << 18, device=device)
    sending = _seconds(lambda: _run("all_reduce", group, x), device)
    count = max(1, round(sending / computing))  # as much computing as sending, so that all of it could be hidden

    def both() -> None:
        wait = communicator.all_reduce(x, axis)
        for _ in range(count):
            a @ a
        wait()

    together = _seconds(both, device)
    hidden = (count * computing + sending - together) / min(count * computing, sending)
    return min(1.0, max(0.0, hidden))


__all__ = ["calibrate"]
