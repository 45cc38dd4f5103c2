"""One device: a step, the clip and the optimizer against torch's own, memory and time against what was predicted.

A Llama-shaped decoder in bfloat16 on a mesh of one rank.  Times are medians over rounds in which the contenders take
turns, in one process; memory is the allocator's peak.  The first rows compare numbers: the compiled model's loss and
gradients in float64 with the plain model's, so that no time is told of a program that computes something else.

    python benchmarks/gpu.py [--size 1b] [--rounds 10] [--out folder]
    python benchmarks/gpu.py --device cpu --size tiny --rounds 2      # the same code where there is no GPU
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.hardware import Profile
from autoparallel.tools.calibration import calibrate
from autoparallel.tools.processes import FileStore

LEARNING_RATE = 1e-4
MAX_NORM = 1e-3  # bites at every step
STEPS = 4  # that a loop makes before it reads a loss


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder and of its batch."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    rows: int
    length: int


SHAPES = {
    "tiny": Shape(2, 32, 4, 64, 64, 2, 16),
    "1b": Shape(16, 2048, 32, 8192, 32000, 2, 2048),
}


class Block(nn.Module):
    """Causal attention and a gated MLP, each behind a root mean square norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(rows, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Token embedding, blocks, norm and head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Bench:
    """The device, and how time and memory are measured on it."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = torch.device(device), rounds
        self.on_gpu = device == "cuda"

    def seconds(self, *turns: Callable[[], object], together: int = 1) -> list[float]:
        """The median time of each of some functions that take turns; two rounds go before.

        Args:
            together: how often each is called in its turn, before the host waits for the device.
        """
        times: list[list[float]] = [[] for _ in turns]
        for number in range(self.rounds + 2):
            for turn, kept in zip(turns, times, strict=True):
                self._synchronize()
                begin = time.perf_counter()
                for _ in range(together):
                    turn()
                self._synchronize()
                if number > 1:
                    kept.append((time.perf_counter() - begin) / together)
        return [statistics.median(kept) for kept in times]

    def peak(self, turn: Callable[[], object]) -> float | None:
        """The most bytes that are allocated while a function runs; None on the CPU, which does not count them."""
        if not self.on_gpu:
            return None
        turn()
        torch.cuda.reset_peak_memory_stats()
        turn()
        return float(torch.cuda.max_memory_allocated())

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def _build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Decoder:
    torch.manual_seed(0)
    with torch.device(device):
        return Decoder(shape).to(dtype)


def _tokens(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (shape.rows, shape.length + 1), generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _step(model: Any, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def require_parity(bench: Bench, mesh: DeviceMesh) -> float:
    """The largest difference of loss and gradients in float64, which is small.

    Raises:
        AssertionError: if it is not.
    """
    shape = SHAPES["tiny"]
    plain = _build(shape, torch.float64, bench.device)
    ours = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=loss_fn)
    ids, targets = _tokens(shape, bench.device)
    expected, loss = loss_fn(plain(ids), targets), ours(ids, targets)
    expected.backward()
    loss.backward()
    off = float((loss - expected).abs().detach())
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert isinstance(p.grad, DTensor) and q.grad is not None
        off = max(off, float((p.grad.full_tensor() - q.grad).abs().max()))
    assert off < 1e-6, off  # the loss is computed in float32
    return off


def measure(bench: Bench, mesh: DeviceMesh, shape: Shape, profile: Profile) -> list[Sequence[str]]:
    """The rows of the table."""
    ids, targets = _tokens(shape, bench.device)
    eager = autoparallel.compile(_build(shape, torch.bfloat16, bench.device), mesh, loss_fn=loss_fn, hardware=profile)
    ours_eager = _step(eager, lambda: eager(ids, targets))
    peak = bench.peak(ours_eager)  # while there is no other model
    plain = _build(shape, torch.bfloat16, bench.device)
    fast = autoparallel.compile(
        _build(shape, torch.bfloat16, bench.device), mesh, loss_fn=loss_fn, hardware=profile, backend="inductor"
    )
    compiled = torch.compile(copy.deepcopy(plain))
    steps = {
        "plain eager": _step(plain, lambda: loss_fn(plain(ids), targets)),
        "torch.compile": _step(compiled, lambda: loss_fn(compiled(ids), targets)),
        "autoparallel": ours_eager,
        "autoparallel, inductor": _step(fast, lambda: fast(ids, targets)),
    }
    times = dict(zip(steps, bench.seconds(*steps.values(), together=STEPS), strict=True))
    rows: list[Sequence[str]] = []
    for ours, theirs, wanted in (
        ("autoparallel", "plain eager", 1.02),
        ("autoparallel, inductor", "torch.compile", 1.02),
    ):
        rows.append(_row("step", ours, times[ours], theirs, times[theirs], wanted))

    eager(ids, targets).backward()
    grads = [p.grad.to_local() for p in eager.parameters() if isinstance(p.grad, DTensor)]
    state = [torch.nn.Parameter(g.clone()) for g in grads]
    for p, g in zip(state, grads, strict=True):
        p.grad = g.clone()

    def floor() -> None:
        torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, 1.0)

    clip = bench.seconds(
        lambda: eager.clip_grad_norm_(MAX_NORM), floor, lambda: nn.utils.clip_grad_norm_(state, MAX_NORM)
    )
    rows.append(_row("clip", "clip_grad_norm_", clip[0], "two passes over the bytes", clip[1], 1.15))
    rows.append(_row("clip", "clip_grad_norm_", clip[0], "torch on plain tensors", clip[2], 1.0))
    mine, theirs_ = (torch.optim.AdamW(ps, lr=0.0, fused=True) for ps in (eager.parameters(), state))
    update = bench.seconds(mine.step, theirs_.step)
    rows.append(_row("optimizer", "fused AdamW", update[0], "on plain tensors", update[1], 1.1))

    found = eager.plan.prediction
    assert found is not None
    rows.append(_row("predicted", "step", found.seconds(), "measured", times["autoparallel"], 1.15))
    if peak is not None:
        guess = found.total_memory
        text = f"{guess / 1e9:.2f} GB", "measured", f"{peak / 1e9:.2f} GB", f"{guess / peak:.2f}"
        rows.append(("predicted", "peak", *text, "0.90 to 1.10"))
    return rows


def measure_policy(bench: Bench, mesh: DeviceMesh, shape: Shape, profile: Profile) -> list[Sequence[str]]:
    """The rows of parameters in float32 that are used in bfloat16, against FSDP2."""
    ids, targets = _tokens(shape, bench.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain = _build(shape, torch.float32, bench.device)
    rows: list[Sequence[str]] = []
    for backend, ours, theirs in (("eager", "", ""), ("inductor", ", inductor", ", blocks compiled")):
        mine = autoparallel.compile(
            copy.deepcopy(plain), mesh, loss_fn=loss_fn, precision=policy, hardware=profile, backend=backend
        )
        other = copy.deepcopy(plain)
        for block in other.blocks:
            if backend == "inductor":
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(other, mesh=mesh, mp_policy=policy)
        steps = [
            _step(mine, partial(mine, ids, targets)),
            _step(other, partial(_loss_of, other, ids, targets)),
        ]
        times = bench.seconds(*steps, together=STEPS)
        rows.append(_row("step, bfloat16 policy", f"autoparallel{ours}", times[0], f"FSDP2{theirs}", times[1], 1.0))
        if bench.on_gpu:
            steps[0]()
            extra = [(bench.peak(step) or 0.0) / 1e9 for step in steps]
            rows.append(("peak of both", "with ours", f"{extra[0]:.2f} GB", "with FSDP2", f"{extra[1]:.2f} GB", "", ""))
        del mine, other, steps
        gc.collect()
    return rows


def _loss_of(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss_fn(model(ids), targets)


def _row(what: str, ours: str, mine: float, theirs: str, other: float, wanted: float) -> Sequence[str]:
    return what, ours, f"{mine * 1e3:.2f} ms", theirs, f"{other * 1e3:.2f} ms", f"{mine / other:.3f}", f"{wanted:.2f}"


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=list(SHAPES), default="1b")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    bench = Bench(arguments.device, arguments.rounds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if bench.on_gpu else "gloo"
        dist.init_process_group(backend, store=FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        mesh = init_device_mesh(arguments.device, (1,), mesh_dim_names=("dp",))
        console = Console(width=110)
        console.print(f"parity in float64: off by {require_parity(bench, mesh):.1e}")
        profile = calibrate(mesh, "measured")
        profile.save(arguments.out / "profile.json")
        name = torch.cuda.get_device_name(0) if bench.on_gpu else "the CPU"
        title = f"{arguments.size} in bfloat16, one rank, {name}, torch {torch.__version__}"
        table = Table(*("what", "ours", "time", "instead", "time", "ratio", "wanted"), title=title)
        for rows in (measure, measure_policy):
            for row in rows(bench, mesh, SHAPES[arguments.size], profile):
                table.add_row(*row)
            gc.collect()
        console.print(table)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
