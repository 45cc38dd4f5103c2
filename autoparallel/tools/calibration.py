"""Measuring a hardware profile on the ranks of a real mesh.

All ranks compute and communicate at the same time, as they will in training: ranks that share cores or memory get their
share of them.  For the same reason a collective costs what it adds to a program that computes: ranks do not arrive at
it together, and what sends may have to be woken.  Collectives one after the other find all ranks ready, and look three
times as fast on processes that share a machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.comm.groups import bind, communicator_of, whole_group
from autoparallel.hardware import RESERVE, Link, Profile, profile_for
from autoparallel.placements import COLLECTIVES, sent_bytes
from autoparallel.text import Table, duration, operations, units

SAMPLE = 0.5
"""Seconds for which whatever needs no other rank is repeated, at least."""
ROUNDS = 20
"""How many times a collective is measured, each time after something was computed."""


def calibrate(mesh: DeviceMesh, name: str = "measured") -> Profile:
    """Measures what this mesh's devices and links reach; every rank must call it, and gets the same profile.

    Args:
        name: of the profile.
    """
    prefix = bind(mesh)
    group = whole_group(prefix)
    device = torch.device(mesh.device_type)
    large = device.type != "cpu"
    watch = _Stopwatch(device, f"{prefix}/{'+'.join(mesh.mesh_dim_names or ())}")
    flops = {dtype: _matmul_rate(watch, dtype, 8192 if large else 384) for dtype in _dtypes(device)}
    used = torch.bfloat16 if large else torch.float32
    attention = _attention(watch, flops[used], used, (2, 32, 4096, 128) if large else (2, 8, 256, 64))
    bandwidth = _memory_bandwidth(watch, 1 << 27 if large else 1 << 20)
    launch = _launch(watch)
    links: list[Link] = []
    for axes in _groups(mesh):
        links += _links(watch, f"{prefix}/{axes}", 1 << 26 if large else 1 << 21)
    overlap = _overlap(watch, 1 << 24 if large else 1 << 18)
    base = profile_for(device.type)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    reduced = [link for link in links if link.kind == "all_reduce"]
    profile = Profile(
        name=name,
        flops=flops,
        memory_bandwidth=bandwidth,
        launch=launch,
        latency=reduced[0].latency if reduced else base.latency,
        bandwidth=reduced[0].bandwidth if reduced else base.bandwidth,
        memory=float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None,
        reserve=RESERVE if device.type == "cuda" else 0.0,
        default_flops=flops[torch.float32],
        attention=attention,
        node=local if 0 < local < mesh.size() else 0,
        network_latency=base.network_latency,
        network_bandwidth=base.network_bandwidth or base.bandwidth,
        overlap=overlap,
        copies=base.copies,
        unfolds=base.unfolds,
        composes=base.composes,
        links=tuple(links),
        host_bandwidth=_host_bandwidth(watch, 1 << 28) if large else None,
    )
    texts: list[str] = [profile.to_json()]
    dist.broadcast_object_list(texts, src=int(mesh.mesh.flatten()[0]), group=group)
    return Profile.from_json(texts[0])


def _dtypes(device: torch.device) -> list[torch.dtype]:
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    return [*dtypes, torch.float16] if device.type == "cuda" else dtypes


class _Stopwatch:
    """Measures calls while all ranks of a group make them.

    Args:
        device: this rank's.
        group: of all ranks that measure.
    """

    def __init__(self, device: torch.device, group: str) -> None:
        self.device = device
        self.communicator, self.axis = communicator_of(group)

    def seconds(self, run: Callable[[], object]) -> float:
        """The time of a call that needs no other rank: the mean, because ranks may share cores by turns."""
        self.communicator.all_reduce(torch.zeros(1, device=self.device), self.axis)()  # the ranks begin together
        times: list[float] = []
        while len(times) < 5 or sum(times) < SAMPLE:
            times.append(self._once(run))
        return statistics.mean(times[2:])

    def beside_computing(self, *runs: Callable[[Callable[[], object]], object]) -> tuple[float, list[float]]:
        """The time of computing, and what it takes more where a call may communicate around it.

        Ranks wait for the latest of them, which is seldom late and then by much: so these are means (but for the
        worst tenth), of calls that take turns.

        Args:
            runs: told how to compute.
        """
        size, count = (512, 3) if self.device.type == "cpu" else (4096, 1)  # some milliseconds
        a, b = (torch.randn(size, size, device=self.device) for _ in range(2))

        def compute() -> None:
            for _ in range(count):
                a @ b

        turns: list[Callable[[], object]] = [compute, *(partial(run, compute) for run in runs)]
        rounds = [[self._once(turn) for turn in turns] for _ in range(2 + ROUNDS)]
        computing, *others = (
            statistics.mean(sorted(times)[: -(ROUNDS // 10)]) for times in zip(*rounds[2:], strict=True)
        )
        return computing, [max(other - computing, 1e-7) for other in others]

    def _once(self, run: Callable[[], object]) -> float:
        self._synchronize()
        begin = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _matmul_rate(watch: _Stopwatch, dtype: torch.dtype, size: int) -> float:
    """What a linear layer reaches, forward and backward: three products, two of them of transposed matrices."""
    x, weight = (torch.randn(size, size, device=watch.device).to(dtype).requires_grad_() for _ in range(2))
    gradient = torch.ones_like(x)
    return 3 * 2 * size**3 / watch.seconds(lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), gradient))


def _attention(watch: _Stopwatch, rate: float, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> float:
    """The part of a matrix product's rate that fused causal attention reaches, forward and backward."""
    batch, heads, rows, width = shape
    q, k, v = (torch.randn(shape, device=watch.device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.ones_like(q)

    def run() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

    products = 2 + 5  # of rows x rows x width: two forward, and five backward
    points = products * 2 * batch * heads * rows * rows * width / 2  # half of the scores are masked
    return points / watch.seconds(run) / rate


def _memory_bandwidth(watch: _Stopwatch, elements: int) -> float:
    """Bytes per second of the operators that a model is bound by memory in, as they come."""
    width = 256 if watch.device.type == "cpu" else 4096
    x, y = (torch.randn(elements // width, width, device=watch.device) for _ in range(2))
    heads = x.t() if watch.device.type == "cpu" else x.view(-1, width, width // 128, 128).transpose(1, 2)
    moved = x.numel() * x.element_size()
    rates = [
        3 * moved / watch.seconds(lambda: x + y),
        2 * moved / watch.seconds(lambda: F.gelu(x)),
        2 * moved / watch.seconds(lambda: F.layer_norm(x, (width,))),
        2 * moved / watch.seconds(heads.contiguous),
    ]
    return statistics.geometric_mean(rates)


def _host_bandwidth(watch: _Stopwatch, count: int) -> float:
    """Bytes per second between the device and pinned host memory, there and back, all ranks of a node at once."""
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=watch.device)

    def both() -> None:
        device.copy_(host, non_blocking=True)
        host.copy_(device, non_blocking=True)

    return 2 * count / watch.seconds(both)


def _launch(watch: _Stopwatch) -> float:
    """Seconds of an operator that does next to nothing, in a chain that is differentiated.

    A GPU has many of them waiting: how fast they come does not matter, if they come faster than they are done.
    """
    count = 100

    def chain() -> None:
        x = start = torch.zeros(8, device=watch.device, requires_grad=True)
        for _ in range(count):
            x = x * 1.5
        torch.autograd.grad(x.sum(), start)

    if watch.device.type == "cpu":
        return watch.seconds(chain) / (2 * count)
    x = torch.randn(8192, 8192, device=watch.device, dtype=torch.bfloat16)
    times: list[float] = []
    for _ in range(ROUNDS):
        begin, end = (torch.Event(watch.device, enable_timing=True) for _ in range(2))
        for _ in range(10):
            x @ x
        begin.record()
        chain()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times) / (2 * count)


def _groups(mesh: DeviceMesh) -> Iterator[str]:
    names = mesh.mesh_dim_names or ()
    yield from (name for i, name in enumerate(names) if mesh.size(i) > 1)
    if sum(size > 1 for size in mesh.shape) > 1:
        yield "+".join(names)


def _links(watch: _Stopwatch, group: str, elements: int) -> list[Link]:
    """Latency and bandwidth of each kind of collective over one group."""
    communicator, axis = communicator_of(group)
    ranks = communicator.size(axis)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or ranks
    runs: list[Callable[[Callable[[], object]], object]] = []
    volumes = []
    for kind in COLLECTIVES:
        for size in (ranks * 16, elements // ranks * ranks):
            part = kind == "all_gather"  # each rank brings a part of the whole
            x = torch.zeros(size // ranks if part else size, device=watch.device)
            x = x.view(ranks, -1) if kind in ("reduce_scatter", "all_to_all") else x
            whole = x.numel() * x.element_size() * (ranks if kind in ("all_gather", "all_to_all") else 1)
            volumes.append(sent_bytes(kind, whole, ranks))

            def run(compute: Callable[[], object], kind: str = kind, x: torch.Tensor = x) -> None:
                compute()
                getattr(communicator, kind)(x, axis)()

            runs.append(run)
    _, seconds = watch.beside_computing(*runs)
    links = []
    for kind, few, many, small, large in zip(
        COLLECTIVES, volumes[::2], volumes[1::2], seconds[::2], seconds[1::2], strict=True
    ):
        latency = min(small, large)
        bandwidth = (many - few) / max(large - latency, 1e-9)
        links.append(Link(kind, ranks, -(-ranks // local), latency, bandwidth))
    return links


def _overlap(watch: _Stopwatch, elements: int) -> float:
    """Which part of a collective is hidden while the device computes."""
    communicator, axis = watch.communicator, watch.axis
    if communicator.size(axis) == 1:
        return 0.0
    x = torch.zeros(elements, device=watch.device)

    def apart(compute: Callable[[], object]) -> None:
        compute()
        communicator.all_reduce(x, axis)()

    def beside(compute: Callable[[], object]) -> None:
        wait = communicator.all_reduce(x, axis)
        compute()
        wait()

    computing, (one_by_one, together) = watch.beside_computing(apart, beside)
    return min(1.0, max(0.0, (one_by_one - together) / min(computing, one_by_one)))


def profile_tables(profile: Profile) -> list[Table]:
    """The numbers of a hardware profile."""
    rates = [
        (f"matrix products in {str(dtype).removeprefix('torch.')}", f"{operations(rate)}/s")
        for dtype, rate in profile.flops.items()
    ]
    rates += [
        ("memory", f"{units(profile.memory_bandwidth)}/s"),
        *(
            []
            if profile.host_bandwidth is None
            else [("to host memory, and back", f"{units(profile.host_bandwidth)}/s")]
        ),
        ("an operator at least", duration(profile.launch)),
        ("of a collective, hidden behind computing", f"{100 * profile.overlap:.0f}%"),
    ]
    links = [
        (link.kind, str(link.ranks), str(link.nodes), duration(link.latency), f"{units(link.bandwidth)}/s")
        for link in profile.links
    ]
    costs = ("latency", "bandwidth")
    return [
        Table(("what", "reaches"), rates, right=["reaches"]),
        Table(("collective", "ranks", "nodes", *costs), links, right=costs),
    ]
