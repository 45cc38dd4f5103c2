"""Predicted against measured: time, peak memory and bytes of a step, for five models by every preset and "auto".

The profile is calibrated first, on the same ranks.  For every model the table shows whether the plan that the search
chose is as fast as the best measured preset, and how well the order of the predictions is that of the measurements.

    python benchmarks/planner_accuracy.py [--ranks 2] [--rounds 8] [--steps 2] [--only gpt,conv]

Run it on a quiet machine: ranks that do not get their cores make every number worse.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import autoparallel
from autoparallel.tools.calibration import calibrate
from benchmarks.side_by_side import GPT, VOCABULARY, Contender, launch, loss_fn, medians, tokens

PLANS = ("auto", "data_parallel", "fsdp", "tensor_parallel")
PROFILED = 6  # steps in which memory is measured
WANTED_CHOICE, WANTED_RANK, WANTED_MEMORY = 1.10, 0.90, 0.10


Made = tuple[nn.Module, tuple[Any, ...], Any]
"""A model, the arguments of a call (a dictionary alone: by name), and a loss function."""


def _regression(width: int, hidden: int, layers: int, rows: int) -> Made:
    blocks = [nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(layers)]
    return nn.Sequential(*blocks), (torch.randn(rows, width), torch.randn(rows, width)), F.mse_loss


def _wide() -> Made:
    """Large matrices and few rows."""
    return _regression(1024, 4096, 2, 32)


def _narrow() -> Made:
    """Small matrices and many rows."""
    return _regression(128, 256, 4, 4096)


def _gpt() -> Made:
    return GPT(), tokens(8), loss_fn


def _conv() -> Made:
    """Convolutions, batch norm and a linear head."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if after > before else []
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return model, (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))), F.cross_entropy


def _llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=128, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    ids, target = tokens(8)
    return LlamaForCausalLM(config), ({"input_ids": ids, "labels": target},), None


MODELS: dict[str, Callable[[], Made]] = {
    "wide": _wide, "narrow": _narrow, "gpt": _gpt, "conv": _conv, "llama": _llama,
}  # fmt: skip


class Trial:
    """One model by one plan: how it is stepped, and what is measured of it.

    Args:
        make: makes the model and its batch, the same ones on every rank.
        options: of ``compile()``.
    """

    def __init__(self, make: Callable[[], Made], mesh: Any, **options: Any) -> None:
        torch.manual_seed(0)
        model, inputs, loss = make()
        self.args, self.kwargs = ((), inputs[0]) if isinstance(inputs[0], dict) else (inputs, {})
        self.model = autoparallel.compile(model, mesh, loss_fn=loss, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def loss(self) -> torch.Tensor:
        """Forward and backward; the loss."""
        out = self.model(*self.args, **self.kwargs)
        loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out["loss"]
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """Forward, backward, and a step of AdamW."""
        self.loss()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def kept(self) -> int:
        """Bytes between steps: parameters, optimizer states, buffers and inputs of this rank."""
        values: list[Any] = [*self.model.parameters(), *self.model.buffers(), *self.args, *self.kwargs.values()]
        values += [v for state in self.optimizer.state.values() for v in state.values()]
        local = [v.to_local() if isinstance(v, DTensor) else v for v in values if isinstance(v, torch.Tensor)]
        return sum(v.untyped_storage().nbytes() for v in local)

    def peak(self) -> int:
        """The most bytes that this rank's tensors take in a step, as the CPU's allocator reports them.

        A step ends with the memory that it began with.  Where the profiler says otherwise it has missed what gloo's
        own threads freed: what is not freed while it looks counts for nothing.  The step is profiled several times, as
        often on all ranks, and the one of which least was missed counts.
        """
        found = []
        for _ in range(PROFILED):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                self.step()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "trace.json")
                profiled.export_chrome_trace(str(path))
                events = json.loads(path.read_text())["traceEvents"]
            found.append(_peak(sorted((e["ts"], e["args"]) for e in events if e.get("name") == "[memory]")))
        return self.kept() + min(found)[1]


def _peak(events: Sequence[tuple[float, dict[str, Any]]]) -> tuple[int, int]:
    """Bytes of blocks whose freeing was missed, and the most that the others took at once.

    A block whose address is taken again had been freed at some time before, which is not said: it is missed, too.

    Args:
        events: when memory was taken or given back, and which.
    """
    changes: list[int] = []
    missed = 0
    taken: dict[int, int] = {}  # addresses, and where they were taken
    for _, event in events:
        address, size = event["Addr"], event["Bytes"]
        if size > 0:
            lost = taken.pop(address, None)
            if lost is not None:
                missed += changes[lost]
                changes.append(-changes[lost])
            taken[address] = len(changes)
            changes.append(size)
        else:
            taken.pop(address, None)
            changes.append(size)
    missed += sum(changes[i] for i in taken.values())
    for i in taken.values():
        changes[i] = 0
    return missed, max(itertools.accumulate(changes))


def _verdict(ratio: float, good: bool) -> str:
    return f"{ratio:.2f}" + ("" if good else " (missed)")


def mesh_of_trials() -> DeviceMesh:
    """All ranks on one axis; of four, two on each of two."""
    world = dist.get_world_size()
    shape, names = ((2, 2), ("dp", "tp")) if world == 4 else ((world,), ("dp",))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _run(arguments: argparse.Namespace) -> None:
    mesh = mesh_of_trials()
    world, shape = mesh.size(), tuple(mesh.shape)
    hardware = calibrate(mesh, f"{world} processes")
    console = Console(width=150)
    table = Table(title=f"{world} processes of one thread, mesh {shape}, calibrated; AdamW, float32")
    heads = ("measured ms", "predicted ms", "ratio", "measured MB", "predicted MB", "ratio", "bytes")
    for column in ("model", "plan", *heads):
        table.add_column(column, justify="left" if column in ("model", "plan") else "right")
    summary = Table("model", "chosen / best preset", "rank correlation", "largest memory error")
    measured: list[float] = []
    predicted: list[float] = []
    for name in arguments.only or MODELS:
        trials = {plan: Trial(MODELS[name], mesh, plan=plan, hardware=hardware) for plan in PLANS}
        for trial in trials.values():
            trial.step()
        times = medians([Contender(p, t.step) for p, t in trials.items()], arguments.rounds, arguments.steps)
        errors, guesses = [], []
        for (plan, trial), time in zip(trials.items(), times, strict=True):
            found = trial.model.plan.prediction
            assert found is not None
            with autoparallel.count_traffic() as traffic:
                trial.step()
            exact = "exact" if traffic.result() == found.step() else "differ"
            peak, guess = trial.peak(), found.seconds() * 1e3
            errors.append(found.total_memory / peak - 1)
            guesses.append(guess)
            table.add_row(
                name, plan, f"{time:.1f}", f"{guess:.1f}", f"{guess / time:.2f}", f"{peak / 1e6:.1f}",
                f"{found.total_memory / 1e6:.1f}", f"{1 + errors[-1]:.2f}", exact,
            )  # fmt: skip
        best = min(times[1:])
        rank = float(spearmanr(times, guesses).statistic)
        worst = max(errors, key=abs)
        summary.add_row(
            name, _verdict(times[0] / best, times[0] / best <= WANTED_CHOICE), _verdict(rank, rank >= WANTED_RANK),
            f"{100 * worst:+.0f}%" + ("" if abs(worst) <= WANTED_MEMORY else " (missed)"),
        )  # fmt: skip
        measured += times
        predicted += guesses
    overall = float(spearmanr(measured, predicted).statistic)
    summary.add_row("all", "", _verdict(overall, overall >= WANTED_RANK), "")
    if dist.get_rank() == 0:
        console.print(table)
        console.print(summary)


def parser_of_trials(text: str, models: Iterable[str], rounds: int) -> argparse.ArgumentParser:
    """The command line of a benchmark of plans: the ranks, rounds, steps and models."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="2 or 4")
    parser.add_argument("--rounds", type=int, default=rounds, help="in which plans are timed")
    parser.add_argument("--steps", type=int, default=2, help="steps per plan and round")
    parser.add_argument("--only", type=lambda names: names.split(","), help=f"of {', '.join(models)}")
    return parser


if __name__ == "__main__":
    arguments = parser_of_trials(__doc__, MODELS, rounds=8).parse_args()
    launch(_run, arguments, ranks=arguments.ranks)
