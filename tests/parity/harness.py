"""One training loop, run twice: on the plain model in one process, and on the compiled model in many.

`reference(recipe)` trains the plain model and never touches this package. `parallel(recipe)` sends the same recipe
to a pool of workers, where every rank compiles the model and runs the loop a user would write. `compare` holds the
two together in the order in which things happen, so that the first quantity it names is the first that went wrong.

[Note: what keeps a parity test from being empty]
- Ranks other than 0 start from other weights, so passing needs the broadcast of rank 0's.
- Every row of every batch is different, and rows hold different numbers of valid targets.
- The gradient norm exceeds the limit at every step, so clipping changes every gradient.
- Momentum makes an error of an early step visible in all later ones.
- The last call, in eval mode without a target, is of another kind than those that trained.
- Shards that should be equal (replicas) are compared bit for bit, by digest, over all ranks.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.captures import Captures, shared_captures
from tests.distributed import run_distributed
from tests.models import Case, build

AXES = {1: ("dp",), 2: ("dp", "tp"), 3: ("pod", "dp", "tp")}


@dataclass(frozen=True)
class Recipe:
    """One training run, small enough to send to a worker."""

    model: str
    mesh: tuple[int, ...] = (1,)
    plan: str = "auto"
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
    share_captures: bool = False  # trace the model once for all recipes of a grid, as tracing takes most of the time

    @property
    def world_size(self) -> int:
        return functools.reduce(int.__mul__, self.mesh)

    def __str__(self) -> str:
        mesh = "x".join(f"{name}{size}" for name, size in itertools.zip_longest(self.axes, self.mesh, fillvalue=""))
        dtype = "" if self.dtype == torch.float64 else f"-{str(self.dtype).removeprefix('torch.')}"
        pipeline = f"-{self.schedule}-{self.microbatches}" if self.schedule else ""
        return f"{self.model}-{mesh}-{self.plan}-accumulation{self.accumulation}{dtype}{pipeline}"


@dataclass
class Trace:
    """Everything a training run shows: global values, in the order in which they appear."""

    losses: list[list[Tensor]] = field(default_factory=list)  # [step][microbatch]
    outputs: list[list[Tensor]] = field(default_factory=list)  # the same, for models that return more than a loss
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)  # [step], before clipping
    norms: list[Tensor] = field(default_factory=list)  # [step]
    clipped: list[dict[str, Tensor | None]] = field(default_factory=list)  # [step], after clipping
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    buffers: dict[str, Tensor] = field(default_factory=dict)
    evaluation: Tensor | None = None  # outputs in eval mode, without a target, after the last step


@dataclass(frozen=True)
class Layout:
    """How one parameter lies on one rank after training."""

    placements: tuple[str, ...]
    shard: tuple[int, ...]  # this rank's coordinates on the axes that shard the parameter
    digest: str  # of the local bytes: equal shards must have equal digests


@dataclass
class RankTrace:
    losses: list[list[float]]
    norms: list[float]
    layouts: dict[str, Layout]
    trace: Trace | None  # of rank 0, and of one rank for each other part of a pipeline


def reference(recipe: Recipe) -> Trace:
    """Train the plain model in this process. Mesh and plan make no difference, so results are shared."""
    case = build(recipe.model, recipe.dtype)
    parts = recipe.microbatches if case.buffers else 0  # batch norm sees one microbatch at a time
    same = replace(recipe, mesh=(1,), plan="auto", axes=(), schedule="", stages_per_rank=1, share_captures=False)
    return _reference(replace(same, microbatches=parts))


@functools.lru_cache(maxsize=32)
def _reference(recipe: Recipe) -> Trace:
    case = build(recipe.model, recipe.dtype)
    return _train(case.model, case, recipe, compiled=False)


def parallel(recipe: Recipe, *, timeout: float = 150.0) -> list[RankTrace]:
    """Train the compiled model on as many processes as the mesh has ranks."""
    return run_distributed(_train_on_rank, recipe, world_size=recipe.world_size, timeout=timeout)


def _train_on_rank(recipe: Recipe) -> RankTrace:
    import autoparallel

    rank = dist.get_rank()
    case = build(recipe.model, recipe.dtype, seed=rank)
    mesh = _mesh(recipe.mesh, recipe.axes or AXES[len(recipe.mesh)])
    options: dict[str, Any] = {}
    if recipe.schedule:
        pipeline = autoparallel.Pipeline(recipe.schedule, recipe.microbatches, recipe.stages_per_rank)
        options = {"pipeline": pipeline, "outputs": "gather"}
    with shared_captures(_captured, recipe.model) if recipe.share_captures else nullcontext():
        model = autoparallel.compile(case.model, mesh, loss_fn=case.loss_fn, plan=recipe.plan, **options)
        trace = _train(model, case, recipe, compiled=True)
    layouts = {name: _layout(parameter) for name, parameter in model.named_parameters() if _is_here(parameter)}
    shown = rank == 0 or bool(recipe.schedule) and not any((mesh.get_coordinate() or ())[1:])
    return RankTrace(
        losses=[[loss.item() for loss in step] for step in trace.losses],
        norms=[norm.item() for norm in trace.norms],
        layouts=layouts,
        trace=trace if shown else None,
    )


_captured: Captures = {}


@functools.cache
def _mesh(shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=axes)


def _train(model: Any, case: Case, recipe: Recipe, *, compiled: bool) -> Trace:
    trace = Trace()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    for step in range(recipe.steps):
        losses: list[Tensor] = []
        outputs: list[Tensor] = []
        for micro in range(recipe.accumulation):
            last = micro == recipe.accumulation - 1
            args, kwargs = case.make_batch(step * recipe.accumulation + micro, recipe.rows)
            with model.no_sync() if compiled and not last else nullcontext():
                loss, others = _forward(model, case, recipe, args, kwargs, compiled)
                (loss / recipe.accumulation).backward()
            losses.append(_plain_scalar(loss, compiled))
            outputs.extend(_whole(output) for output in others)
        trace.losses.append(losses)
        trace.outputs.append(outputs)
        trace.gradients.append(_gradients(model, compiled))
        if compiled:
            norm = model.clip_grad_norm_(recipe.max_norm, norm_type=recipe.norm_type)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm, norm_type=recipe.norm_type)
        trace.norms.append(_whole(norm))
        trace.clipped.append(_gradients(model, compiled))
        optimizer.step()
        optimizer.zero_grad()
    trace.parameters = {name: _whole(p) for name, p in model.named_parameters() if _is_here(p)}
    trace.buffers = {name: _whole(buffer) for name, buffer in model.named_buffers()}

    model.eval()
    args, kwargs = case.make_batch(10_000, recipe.rows)
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
    trace.evaluation = _whole(output)
    return trace


def _forward(
    model: Any, case: Case, recipe: Recipe, args: Any, kwargs: Any, compiled: bool
) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the other outputs of a model that computes its loss itself."""
    if case.loss_fn is None:
        output = model(*args, **kwargs)
        return output["loss"], [output["logits"].detach()]
    if compiled:
        return model(*args, **kwargs), []
    if recipe.microbatches:
        parts = zip(*(arg.chunk(recipe.microbatches) for arg in args), strict=True)
        losses = [case.loss_fn(model(*part[:-1], **kwargs), part[-1]) for part in parts]
        return torch.stack(losses).mean(), []
    return case.loss_fn(model(*args[:-1], **kwargs), args[-1]), []


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.clone()


def _plain_scalar(loss: Tensor, compiled: bool) -> Tensor:
    assert not isinstance(loss, DTensor), "a scalar output is plain"
    assert loss.dim() == 0
    return loss.detach().clone()


def _gradients(model: nn.Module, compiled: bool) -> dict[str, Tensor | None]:
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if not _is_here(parameter):
            assert gradient is None, f"{name} lies elsewhere, but has a gradient here"
            continue
        if compiled:
            assert isinstance(parameter, DTensor), f"{name} is not a DTensor"
            if gradient is not None:
                assert isinstance(gradient, DTensor), f"the gradient of {name} is not a DTensor"
                assert gradient.placements == parameter.placements, f"the gradient of {name} lies otherwise than it"
        gradients[name] = None if gradient is None else _whole(gradient)
    return gradients


def _is_here(parameter: Tensor) -> bool:
    """Whether this rank has a part of a parameter; else it is one of another rank's stage."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is not None


def _layout(parameter: Tensor) -> Layout:
    assert isinstance(parameter, DTensor)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    sharded = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    local = parameter.to_local().detach().contiguous()
    return Layout(
        placements=tuple(map(str, parameter.placements)),
        shard=tuple(coordinate[axis] for axis in sharded),
        digest=hashlib.sha256(local.numpy().tobytes()).hexdigest(),
    )


# --------------------------------------------------------------------------------------------------------- comparison


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected entry (or to 0.001, if that is larger)."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.double(), expected.double()
    scale = max(expected.abs().max().item(), 1e-3)
    worst = (actual - expected).abs().max().item() / scale
    return worst if worst == worst else float("inf")  # NaN anywhere is a difference


def compare(actual: Trace, expected: Trace, tolerance: float) -> None:
    """Fail with the first quantity that differs, and how far the others of its kind are off."""
    for step in range(len(expected.losses)):
        _check(f"step {step}: loss", _numbered(actual.losses[step]), _numbered(expected.losses[step]), tolerance)
        _check(f"step {step}: outputs", _numbered(actual.outputs[step]), _numbered(expected.outputs[step]), tolerance)
        _check(f"step {step}: gradient", actual.gradients[step], expected.gradients[step], tolerance)
        _check(f"step {step}: norm", {"": actual.norms[step]}, {"": expected.norms[step]}, tolerance)
        _check(f"step {step}: clipped gradient", actual.clipped[step], expected.clipped[step], tolerance)
    _check("after training: parameter", actual.parameters, expected.parameters, tolerance)
    _check("after training: buffer", actual.buffers, expected.buffers, tolerance)
    _check("evaluation", {"output": actual.evaluation}, {"output": expected.evaluation}, tolerance)


def _joined(parts: list[Trace]) -> Trace:
    """One trace from those of the parts of a pipeline, each of which holds other parameters."""
    first, *others = parts
    for other in others:
        for mine, its in ((first.gradients, other.gradients), (first.clipped, other.clipped)):
            for step, gradients in enumerate(its):
                assert not mine[step].keys() & gradients.keys(), "a parameter lies with two stages"
                mine[step] |= gradients
        first.parameters |= other.parameters
        for name, buffer in other.buffers.items():
            assert torch.equal(buffer, first.buffers[name]), f"the ranks have different values of {name}"
    return first


def _numbered(tensors: list[Tensor]) -> dict[str, Tensor | None]:
    return {f"microbatch {index}": tensor for index, tensor in enumerate(tensors)}


def _check(what: str, actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    missing, extra = expected.keys() - actual.keys(), actual.keys() - expected.keys()
    assert not missing and not extra, f"{what}: missing {sorted(missing)}, unexpected {sorted(extra)}"
    wrong: list[tuple[str, float]] = []
    for name, value in expected.items():
        if (value is None) != (actual[name] is None):
            wrong.append((f"{name} ({'None' if actual[name] is None else 'not None'})", float("inf")))
        elif value is not None and (off := difference(actual[name], value)) > tolerance:
            wrong.append((name + _describe(actual[name], value), off))
    if wrong:
        lines = "\n".join(f"  {off:9.2e}  {name}" for name, off in wrong[:12])
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(expected)} differ by more than {tolerance:g} (relative)\n{lines}"
        )


def _describe(actual: Tensor, expected: Tensor) -> str:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f": {tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    if expected.numel() == 1:
        return f": {actual.item():.12g}, expected {expected.item():.12g}"
    return f": norm {actual.double().norm().item():.6g}, expected {expected.double().norm().item():.6g}"


def check_ranks_agree(ranks: list[RankTrace]) -> None:
    """Losses and norms are the same on all ranks, and equal shards are equal bit for bit."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        assert other.losses == first.losses, f"losses of ranks 0 and {rank} differ"
        assert other.norms == first.norms, f"norms of ranks 0 and {rank} differ"
    for name in {name: None for trace in ranks for name in trace.layouts}:
        holders = {rank: other.layouts[name] for rank, other in enumerate(ranks) if name in other.layouts}
        layout = next(iter(holders.values()))
        digests: dict[tuple[int, ...], str] = {}
        for rank, mine in holders.items():
            assert mine.placements == layout.placements, f"{name}: ranks 0 and {rank} place it differently"
            known = digests.setdefault(mine.shard, mine.digest)
            assert known == mine.digest, f"{name}: replicas of shard {mine.shard} differ, seen on rank {rank}"


def check_not_vacuous(recipe: Recipe, ranks: list[RankTrace], expected: Trace) -> None:
    """The limit bites at every step, every parameter has a gradient that moves it, and a sharding plan shards."""
    for step, norm in enumerate(expected.norms):
        assert norm > 1.05 * recipe.max_norm, (
            f"step {step}: norm {norm:g} does not exceed the limit {recipe.max_norm:g}"
        )
    initial = dict(build(recipe.model, recipe.dtype).model.named_parameters())
    for name, parameter in expected.parameters.items():
        gradient = expected.gradients[0][name]
        if name in build(recipe.model, recipe.dtype).frozen:
            continue
        assert gradient is not None, f"{name} has no gradient"
        # The gradient of a key's bias is zero but for rounding: softmax does not see it.
        assert gradient.abs().max() < 1e-7 or not torch.equal(parameter, initial[name].detach()), f"{name} never moved"
    if recipe.plan in ("fsdp", "tensor_parallel") and recipe.world_size > 1:
        layouts = ranks[0].layouts
        assert any("S(" in p or "Shard" in p for layout in layouts.values() for p in layout.placements), layouts


def check(
    recipe: Recipe, tolerance: float | None = None, expected: Trace | None = None, *, timeout: float = 150.0
) -> list[RankTrace]:
    """Train both ways and compare everything. `expected` takes the place of the plain model's run."""
    if expected is None:
        expected = reference(recipe)
    ranks = parallel(recipe, timeout=timeout)
    actual = _joined([rank.trace for rank in ranks if rank.trace is not None])
    if tolerance is None:
        tolerance = build(recipe.model, recipe.dtype).tolerance
    compare(actual, expected, tolerance)
    check_ranks_agree(ranks)
    check_not_vacuous(recipe, ranks, expected)
    return ranks
