"""Plans within limits, measured: peak memory, time, and parity in float64 with one process.

The limits are parts of what the plan without a limit was measured to take.  For each, the table shows what "auto" chose
to save memory by, the measured peak over the limit, the time over that of the best preset within the same limit, and
how far the loss and the gradients are from one process's, relative to the largest of each.  Times are the least of
rounds in which plans alternate, on the clock and on a rank's processor (what a busy machine does to the former is not
in the latter, and neither is what a rank waits for); the plan without a limit is not timed, which
``planner_accuracy`` does.

    python benchmarks/measured_limits.py [--ranks 2] [--rounds 5] [--steps 2] [--only gpt,vit] [--shares 0.8,0.6]

``--rounds 0`` times nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import CPU
from autoparallel.tools.calibration import calibrate
from benchmarks.planner_accuracy import Made, Trial, mesh_of_trials, parser_of_trials
from benchmarks.side_by_side import GPT, launch, loss_fn, tokens

SHARES = (0.8, 0.6, 0.45)
PRESETS = ("data_parallel", "fsdp", "tensor_parallel")
WANTED_MEMORY, WANTED_TIME, WANTED_PARITY = 1.10, 1.10, 1e-9


class _Output(nn.Module):
    """One output of a model of transformers, which casts nothing to float32 on the way to it."""

    def __init__(self, model: nn.Module, eps: float = 1e-6) -> None:
        super().__init__()
        self.model = model
        for name, module in list(model.named_modules()):
            if type(module).__name__.endswith("RMSNorm"):
                weight: Any = module.weight
                model.set_submodule(name, nn.RMSNorm(len(weight), eps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(x).logits
        return logits


def _gpt() -> Made:
    return GPT(), tokens(16), loss_fn


def _llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return _Output(LlamaForCausalLM(config)), tokens(8), loss_fn


def _moe() -> Made:
    from tests.models.mixtures import MoEConfig, MoEGPT

    config = MoEConfig(vocabulary=2048, context=128, width=128, heads=4, layers=3, experts=4, hidden=256, capacity=2.0)
    ids, labels = tokens(8)
    return MoEGPT(config), ({"input_ids": ids, "labels": labels},), None


def _resnet() -> Made:
    from tests.models.small import ResNet18

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 32, 32, generator=generator, dtype=torch.float64)
    return ResNet18(3, 10, 16), (images, torch.randint(0, 10, (32,), generator=generator)), F.cross_entropy


def _vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768, num_labels=100,
        image_size=64, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 3, 64, 64, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 100, (32,), generator=generator)
    return _Output(ViTForImageClassification(config)), (images, labels), F.cross_entropy


MODELS: dict[str, Callable[[], Made]] = {"gpt": _gpt, "llama": _llama, "moe": _moe, "resnet": _resnet, "vit": _vit}


def _double(make: Callable[[], Made]) -> Callable[[], Made]:
    def made() -> Made:
        model, inputs, loss = make()
        return model.double().train(), inputs, loss

    return made


def reference(make: Callable[[], Made]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of one process."""
    torch.manual_seed(0)
    model, inputs, loss_fn = make()
    if loss_fn is not None:
        loss = loss_fn(model(*inputs[:-1]), inputs[-1])
    else:
        loss = model(**inputs[0])["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def deviation(trial: Trial, expected: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> float:
    """How far a call's loss and gradients are from one process's, relative to the loss and the largest gradient.

    Some gradients are nothing but what sums leave of zeros: that of the bias of attention's keys.
    """
    loss, gradients = expected
    off = float((trial.loss() - loss).abs() / loss.abs())
    grads = {name: p.grad for name, p in trial.model.named_parameters()}
    found = {name: grad.full_tensor() for name, grad in grads.items() if isinstance(grad, DTensor)}
    assert found.keys() == gradients.keys(), found.keys() ^ gradients.keys()
    trial.optimizer.zero_grad()
    largest = max(float(g.abs().max()) for g in gradients.values())
    return max(off, *(float((found[name] - g).abs().max()) / largest for name, g in gradients.items()))


def _largest(value: float) -> float:
    """The largest of all ranks' values."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return float(max(values))


def _means(plan: Any) -> str:
    """What saves memory in a plan."""
    found = [f"{len(plan.recompute)} layers again"] if plan.recompute else []
    found += [f"{plan.loss_chunks} chunks"] if plan.loss_chunks > 1 else []
    found += [f"{plan.microbatches} microbatches"] if plan.microbatches > 1 else []
    gathered = sum(p.gather == "per_use" for p in plan.parameters.values())
    found += [f"{gathered} gathered per use"] if gathered else []
    return ", ".join(found) or "-"


def _within(make: Callable[[], Made], mesh: Any, **options: Any) -> Trial | None:
    """A trial that has been planned and stepped, if a plan fits."""
    trial = Trial(make, mesh, **options)
    try:
        trial.step()
    except PlanError as error:
        if dist.get_rank() == 0:
            print(f"{options['plan']}: {error}")
        return None
    return trial


def _run(arguments: argparse.Namespace) -> None:
    mesh = mesh_of_trials()
    hardware = calibrate(mesh, f"{mesh.size()} processes") if arguments.rounds else CPU
    for name in arguments.only or MODELS:
        table = Table(title=f"{name}: {mesh.size()} processes of one thread, mesh {tuple(mesh.shape)}; AdamW, float64")
        heads = (
            "limit MB",
            "predicted MB",
            "measured MB",
            "measured / limit",
            "ms",
            "best preset ms",
            "ratio",
            "CPU ms",
            "best preset's",
            "ratio",
            "parity",
        )
        for column in ("limit", "saves memory by", *heads):
            table.add_column(column, justify="left" if column == "saves memory by" else "right")
        make = _double(MODELS[name])
        expected = reference(make)
        whole = 0.0  # what the plan without a limit takes
        for share in (1.0, *arguments.shares):
            limit = share * whole or None
            options = {"hardware": hardware, "memory_limit": limit}
            trial = Trial(make, mesh, plan="auto", **options)
            try:
                off = _largest(deviation(trial, expected))
            except PlanError as error:
                table.add_row(f"{share:.0%}", f"none fits: {error}", f"{(limit or 0) / 1e6:.1f}")
                continue
            trial.step()
            peak = _largest(trial.peak())
            whole = whole or peak
            plan = trial.model.plan
            assert plan.prediction is not None
            cells = [f"{(limit or peak) / 1e6:.1f}", f"{plan.prediction.total_memory / 1e6:.1f}", f"{peak / 1e6:.1f}"]
            cells.append(_verdict(peak / limit, WANTED_MEMORY) if limit else "")
            timed = limit and arguments.rounds
            cells += _times(trial, make, mesh, arguments, options) if timed else [""] * 6
            cells.append(f"{off:.0e}" + (" (missed)" if off > WANTED_PARITY else ""))
            table.add_row(f"{share:.0%}", _means(plan), *cells)
        if dist.get_rank() == 0:
            Console(width=190).print(table)


def _times(
    trial: Trial, make: Callable[[], Made], mesh: Any, arguments: argparse.Namespace, options: dict[str, Any]
) -> list[str]:
    """Milliseconds of a trial's step on the clock, of the best preset's with the same options, and their ratio; then
    the same of what a rank computes."""
    presets = {preset: _within(make, mesh, plan=preset, **options) for preset in PRESETS}
    trials = [trial, *[other for other in presets.values() if other is not None]]
    if len(trials) == 1:
        return ["", "none fits", ""] * 2
    rounds = [[_step(each, arguments.steps) for each in trials] for _ in range(arguments.rounds)]
    cells = []
    for clock in (0, 1):
        own, *others = [_largest(min(row[i][clock] for row in rounds)) for i in range(len(trials))]
        cells += [f"{own:.0f}", f"{min(others):.0f}", _verdict(own / min(others), WANTED_TIME)]
    return cells


def _step(trial: Trial, steps: int) -> tuple[float, float]:
    """Milliseconds of a step on the clock, and of this process's threads on a processor."""
    dist.barrier()
    begun = time.perf_counter(), time.process_time()
    for _ in range(steps):
        trial.step()
    return (time.perf_counter() - begun[0]) / steps * 1e3, (time.process_time() - begun[1]) / steps * 1e3


def _verdict(ratio: float, wanted: float) -> str:
    return f"{ratio:.2f}" + ("" if ratio <= wanted else " (missed)")


if __name__ == "__main__":
    parser = parser_of_trials(__doc__, MODELS, rounds=5)
    parser.add_argument("--shares", type=lambda text: [*map(float, text.split(","))], default=SHARES, help="the limits")
    arguments = parser.parse_args()
    launch(_run, arguments, ranks=arguments.ranks)
