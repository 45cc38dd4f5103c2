"""The training loop and the comparison of `verify()`, run for a grid of models, meshes, plans and ways to train.

`reference(recipe)` trains the plain model in eager torch. `parallel(recipe)` sends the same recipe to a pool of
processes, where every rank compiles the model and trains it. `compare` holds the two together in the order in which
things happen, so that the first quantity it names is the first that went wrong.

[Note: what keeps a parity test from being empty]
- Ranks other than 0 start from other weights, so passing needs the broadcast of rank 0's.
- Every row of every batch is different, and rows hold different numbers of valid targets.
- The gradient norm exceeds the limit at every step, so clipping changes every gradient.
- Momentum makes an error of an early step visible in all later ones.
- The last call, in eval mode without a target, is of another kind than those that trained.
- Shards that should be equal (replicas) are compared bit for bit, by digest, over all ranks.

[Note: devices] The reference is trained on the CPU. With AUTOPARALLEL_TEST_DEVICE=cuda the ranks train on a GPU, which
they share, and talk over gloo still; a mesh of one rank has NCCL's group.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autoparallel
from autoparallel.planner.request.presets import Preset
from autoparallel.tools.parity import comparison
from autoparallel.tools.parity.comparison import RankSeen, Record, compare_ranks, seen_of
from autoparallel.tools.parity.task import Batch, Task
from autoparallel.tools.parity.training import Draws, LimitOf, parameters_here, train
from tests.captures import Captures, shared_captures
from tests.devices import DEVICE, on_device, send_through_host
from tests.distributed import run_distributed
from tests.models import Case, build

FLOOR = 1e-3  # a tensor's largest element, or this, is what its difference is relative to
AXES = {1: ("dp",), 2: ("dp", "tp"), 3: ("pod", "dp", "tp")}


@dataclass(frozen=True)
class Recipe:
    """One training run, small enough to send to a worker."""

    model: str
    mesh: tuple[int, ...] = (1,)
    plan: Preset = "auto"
    accumulation: int = 1
    dtype: torch.dtype = torch.float64
    steps: int = 5
    rows: int = 8  # per microbatch, over all ranks
    max_norm: float = 0.2
    norm_type: float = 2.0
    lr: float = 0.1
    momentum: float = 0.9
    axes: tuple[str, ...] = ()  # the names of the mesh axes; empty for the usual ones
    schedule: str = ""  # of a pipeline over an axis "pp"
    microbatches: int = 0
    stages_per_rank: int = 1
    options: tuple[tuple[str, Any], ...] = ()  # what else `compile()` is given
    share_captures: bool = False  # trace the model once for all recipes of a grid, as tracing takes most of the time

    @property
    def world_size(self) -> int:
        return functools.reduce(int.__mul__, self.mesh)

    def __str__(self) -> str:
        mesh = "x".join(f"{name}{size}" for name, size in itertools.zip_longest(self.axes, self.mesh, fillvalue=""))
        dtype = "" if self.dtype == torch.float64 else f"-{str(self.dtype).removeprefix('torch.')}"
        pipeline = f"-{self.schedule}-{self.microbatches}" if self.schedule else ""
        options = "".join(f"-{name}{value}" for name, value in self.options)
        return f"{self.model}-{mesh}-{self.plan}-accumulation{self.accumulation}{dtype}{pipeline}{options}"

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.axes or AXES[len(self.mesh)]


def reference(recipe: Recipe) -> list[Record]:
    """Train the plain model in this process. Mesh and plan make no difference, so results are shared."""
    case = build(recipe.model, recipe.dtype)
    parts = recipe.microbatches if case.buffers else 0  # batch norm sees one microbatch at a time
    same = replace(recipe, mesh=(1,), plan="auto", axes=(), schedule="", stages_per_rank=1, share_captures=False)
    return _reference(replace(same, microbatches=parts, options=()))


@functools.lru_cache(maxsize=32)
def _reference(recipe: Recipe) -> list[Record]:
    case = build(recipe.model, recipe.dtype)
    parts = max(recipe.microbatches, 1)
    task = _task(recipe, case, parts)
    records = list(train(case.model.train(), task, lambda *_: recipe.max_norm, Draws(task.seed)))
    return [*_averaged(records, parts, recipe.accumulation > 1), *_evaluate(case.model, case, recipe)]


def parallel(recipe: Recipe, *, timeout: float = 150.0) -> list[RankSeen]:
    """Train the compiled model on as many processes as the mesh has ranks."""
    return run_distributed(_train_on_rank, recipe, world_size=recipe.world_size, timeout=timeout)


def _train_on_rank(recipe: Recipe) -> RankSeen:
    """What a rank shows; records only of one rank of each part of a pipeline."""
    rank = dist.get_rank()
    if DEVICE != "cpu" and recipe.world_size > 1:
        send_through_host()
    case = build(recipe.model, recipe.dtype, seed=rank)
    case.model.to(DEVICE)
    mesh = _mesh(recipe.mesh, recipe.axis_names)
    options: dict[str, Any] = dict(recipe.options)
    if recipe.schedule:
        pipeline = autoparallel.Pipeline(recipe.schedule, recipe.microbatches, recipe.stages_per_rank)
        options |= {"pipeline": pipeline, "outputs": "gather"}
    with shared_captures(_captured, recipe.model) if recipe.share_captures else nullcontext():
        model = autoparallel.compile(case.model, mesh, loss_fn=case.loss_fn, plan=recipe.plan, **options).train()
        task = _task(recipe, case, device=DEVICE)
        records = list(train(model, task, _checked_limit(model, recipe), Draws(task.seed)))
        records += _evaluate(model, case, recipe)
    shown = rank == 0 or bool(recipe.schedule) and not any((mesh.get_coordinate() or ())[1:])
    seen = seen_of(model, records)
    return seen if shown else replace(seen, records=[])


_captured: Captures = {}


@functools.cache
def _mesh(shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if DEVICE == "cuda" and shape == (1,):
        return DeviceMesh.from_group(dist.new_group(backend="nccl"), DEVICE, mesh_dim_names=axes)
    return init_device_mesh(DEVICE, shape, mesh_dim_names=axes)


def _task(recipe: Recipe, case: Case, parts: int = 1, device: str = "cpu") -> Task:
    """What is trained, with each batch cut into parts."""
    batches = [case.make_batch(n, recipe.rows) for n in range(recipe.steps * recipe.accumulation)]
    batches = pytree.tree_map_only(Tensor, lambda x: x.to(device), batches)
    if parts > 1:
        batches = [
            (part, kwargs) for args, kwargs in batches for part in zip(*(x.chunk(parts) for x in args), strict=True)
        ]
    return Task(
        model=case.model,
        batches=tuple(Batch(args, kwargs) for args, kwargs in batches),
        loss_fn=case.loss_fn,
        axes=tuple(zip(recipe.axis_names, recipe.mesh, strict=True)),
        plan=recipe.plan,
        dtype=recipe.dtype,
        steps=recipe.steps,
        seed=0,
        optimizer=functools.partial(torch.optim.SGD, lr=recipe.lr, momentum=recipe.momentum),
        accumulation=recipe.accumulation * parts,
        norm_type=recipe.norm_type,
    )


def _averaged(records: list[Record], parts: int, several: bool) -> list[Record]:
    """The records with one loss for each whole batch, the mean over its parts; ``several``: a step has many batches."""
    if parts == 1:
        return records
    merged: list[Record] = []
    losses: list[Tensor] = []
    for step, kind, name, value in records:
        if kind != "loss":
            merged.append((step, kind, name, value))
            continue
        assert value is not None
        losses.append(value)
        if len(losses) == parts:
            text, _, number = name.rpartition(" ")
            batch = int(number) // parts
            whole = f"{text} {batch}" if several else name.removesuffix(f"of microbatch {number}").strip()
            merged.append((step, kind, whole, torch.stack(losses).mean()))
            losses = []
    return merged


def _checked_limit(model: nn.Module, recipe: Recipe) -> LimitOf:
    """The limit of every step's norm, at which gradients lie as their parameters do, or not at all."""

    def limit(step: int, grads: Sequence[Tensor]) -> float:
        here = dict(parameters_here(model))
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert isinstance(parameter, DTensor), f"{name} is not a DTensor"
            assert gradient is None or name in here, f"{name} lies elsewhere, but has a gradient here"
            if gradient is not None:
                assert isinstance(gradient, DTensor), f"the gradient of {name} is not a DTensor"
                assert gradient.placements == parameter.placements, f"the gradient of {name} lies otherwise than it"
        return recipe.max_norm

    return limit


def _evaluate(model: nn.Module, case: Case, recipe: Recipe) -> list[Record]:
    """The output of a call in eval mode, without a target."""
    model.eval()
    batch = case.make_batch(10_000, recipe.rows)
    args, kwargs = on_device(batch) if isinstance(next(model.parameters()), DTensor) else batch
    with torch.no_grad():
        if case.loss_fn is not None:
            output = model(*args[:-1], **kwargs)
        else:
            labels = kwargs.pop("labels")
            if case.decoder:
                kwargs["decoder_input_ids"] = labels.clamp(min=0)
            kwargs.pop("output_router_logits", None)  # asks for a loss of the routers beside that of the labels
            output = model(*args, **kwargs)["logits"]
    assert not isinstance(output, DTensor), "without a scalar loss, outputs are gathered and plain"
    return [(recipe.steps, "output", "in evaluation", output.detach().to("cpu", copy=True))]


# --------------------------------------------------------------------------------------------------------- comparison


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected entry, or to ``FLOOR``, if that is larger."""
    return comparison.difference(actual, expected, FLOOR)


def compare(actual: list[Record], expected: list[Record], tolerance: float) -> None:
    """Fail with the first quantity that differs, and how far the others of its kind are off."""
    differences = list(comparison.compare(actual, expected, {}, floor=FLOOR))
    wrong = [d for d in differences if not d.value <= tolerance]
    if wrong:
        step, kind = wrong[0].step, wrong[0].kind
        alike = [d for d in wrong if (d.step, d.kind) == (step, kind)]
        lines = "\n".join(f"  {d.value:9.2e}  {d.name}: {d.detail}" for d in alike[:12])
        raise AssertionError(f"step {step}: {kind}: {len(alike)} differ by more than {tolerance:g} (relative)\n{lines}")


def _joined(parts: list[list[Record]]) -> list[Record]:
    """The records of all parts of a pipeline, each of which holds other parameters."""
    joined: dict[tuple[int, str, str], Tensor | None] = {}
    for number, records in enumerate(parts):
        for step, kind, name, value in records:
            known = (step, kind, name) in joined
            assert not (known and kind in ("gradient", "parameter")), f"{name} lies with two stages"
            if known and kind == "buffer":
                assert number and torch.equal(value, joined[step, kind, name]), f"the ranks differ in {name}"  # type: ignore[arg-type]
            joined.setdefault((step, kind, name), value)
    return [(*key, value) for key, value in joined.items()]


def check_ranks_agree(ranks: list[RankSeen]) -> None:
    """Losses and norms are the same on all ranks, and equal shards are equal bit for bit."""
    wrong = [d for d in compare_ranks(ranks) if d.value > 0]
    assert not wrong, "\n".join(f"replicas of {d.name}, step {d.step}: {d.detail}" for d in wrong)


def check_not_vacuous(recipe: Recipe, ranks: list[RankSeen], expected: list[Record]) -> None:
    """The limit bites at every step, every parameter has a gradient that moves it, and a sharding plan shards."""
    case = build(recipe.model, recipe.dtype)
    initial = dict(case.model.named_parameters())
    first = {name: value for step, kind, name, value in expected if (step, kind) == (1, "gradient")}
    for step, kind, name, value in expected:
        if kind == "norm":
            assert value is not None and value > 1.05 * recipe.max_norm, (
                f"step {step}: norm {value} does not exceed the limit {recipe.max_norm:g}"
            )
        if kind == "parameter" and step == recipe.steps and name not in case.frozen:
            gradient = first[name]
            assert value is not None and gradient is not None, f"{name} has no gradient"
            # The gradient of a key's bias is zero but for rounding: softmax does not see it.
            moved = not torch.equal(value, initial[name].detach())
            assert gradient.abs().max() < 1e-7 or moved, f"{name} never moved"
    if recipe.plan in ("fsdp", "tensor_parallel") and recipe.world_size > 1:
        layouts = ranks[0].layouts
        assert any("S(" in p or "Shard" in p for layout in layouts.values() for p in layout), layouts


def check(
    recipe: Recipe, tolerance: float | None = None, expected: list[Record] | None = None, *, timeout: float = 150.0
) -> list[RankSeen]:
    """Train both ways and compare everything. `expected` takes the place of the plain model's run."""
    if expected is None:
        expected = reference(recipe)
    ranks = parallel(recipe, timeout=timeout)
    actual = _joined([rank.records for rank in ranks if rank.records])
    if tolerance is None:
        tolerance = build(recipe.model, recipe.dtype).tolerance
    compare(actual, expected, tolerance)
    check_ranks_agree(ranks)
    check_not_vacuous(recipe, ranks, expected)
    return ranks
