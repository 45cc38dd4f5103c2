"""``verify()``: the user's own model against its plan, in float64, in real processes.

The model runs twice at the same time: as it is, in plain eager torch, in one process; and compiled, in one process for
each rank of the mesh.  Both do what a training step does (forward, backward, the gradient norm, clipping with a limit
that bites, a step of SGD), and everything that can be seen of it is compared.

[Note: the reference of a model with dropout] The masks of a compiled model depend on seed and global position only, so
they are the same for every mesh, but they are not those of eager torch.  For such a model the reference is the compiled
model on a mesh of one rank, and the report says so.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel import api, operators
from autoparallel.graph.capture import capture
from autoparallel.graph.captured import CaptureError, InputSpec, describe_inputs
from autoparallel.plan import Plan
from autoparallel.planner.presets import PRESETS
from autoparallel.processes import Job, PlainModelError, Process, require_plain_process, run_processes
from autoparallel.report.verification import Difference, VerifyReport
from autoparallel.rules import operator_name
from autoparallel.runtime.module import ParallelModule

MeshShape = int | Sequence[int] | Mapping[str, int]
AXIS_NAMES = ("dp", "tp", "ep")
TOLERANCES = {torch.float64: (1e-9, 1e-6), torch.float32: (1e-5, 1e-2)}
"""By dtype: where nothing is cast to a narrower dtype, and where the model itself does that."""

Record = tuple[int, str, str, Tensor | None]
"""What is compared: the step, what it is, its name, its value."""


def verify(
    model: nn.Module,
    mesh_shape: MeshShape,
    example_inputs: Any = (),
    loss_fn: Callable[..., Any] | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    plan: str | Plan = "auto",
    tolerance: float | str = "auto",
    dtype: torch.dtype = torch.float64,
    steps: int = 1,
    seed: int = 0,
    timeout: float = 300.0,
) -> VerifyReport:
    """Checks that a plan computes what the plain model computes, on this machine's CPU.

    Starts one process for each rank of the mesh and one for the reference, all with one thread; the user's model is
    copied, never changed.  Use a small configuration of the model: every process holds it, in ``dtype``.

    The difference of two tensors is ``max |a - b| / max(1, max |b|)``, where b is the reference's: relative for large
    values and absolute for small ones.

    Args:
        model: the plain model, in the mode (training or not) in which it is to be compared.
        mesh_shape: the number of ranks; or a tuple of sizes, for the axes "dp", "tp", "ep"; or sizes by axis name.
        example_inputs: the positional inputs of one call, the target last where there is a ``loss_fn``; one tensor is
            taken as the only input, a mapping as keyword inputs.  Tensors are global; floating-point ones are cast.
        loss_fn: called as ``loss_fn(output, target)``.  Without it, the loss is the scalar that the model returns, or,
            where it returns none, a fixed weighted sum of its outputs.
        example_kwargs: keyword inputs.
        plan: "auto", a preset, or a ``Plan``.
        tolerance: the largest difference that passes; "auto" is 1e-9 (1e-5 in float32), and 1e-6 for a float64 model
            that casts to a narrower dtype by itself, as many do in rotary tables and losses.
        dtype: what the model and its inputs are cast to, float64 or float32.
        steps: the number of training steps, all on the same inputs.
        seed: of dropout masks.
        timeout: seconds for everything; then all processes are stopped.

    Returns:
        The report: ``print`` it, or call its ``raise_if_failed()``.

    Raises:
        ValueError: for arguments that cannot be used.
        RuntimeError: when called from one of several ranks.
        ProcessError: when the model cannot be run or compiled, or a process dies or hangs; with its traceback.
    """
    require_plain_process("verify()")
    started = time.perf_counter()
    task = make_task(model, mesh_shape, example_inputs, loss_fn, example_kwargs, plan, dtype, steps, seed)
    if isinstance(tolerance, str) and tolerance != "auto":
        raise ValueError(f"tolerance is a number or 'auto', got {tolerance!r}")
    jobs = [Job(f"rank {rank}", "mesh", rank, task.ranks, _run_rank) for rank in range(task.ranks)]
    jobs.append(Job("the reference", "reference", 0, 1, _run_reference))
    *ranks, reference = run_processes(jobs, task, timeout)
    limit = TOLERANCES[dtype][bool(reference["casts"])] if isinstance(tolerance, str) else float(tolerance)
    first = ranks[0]
    differences = [*_compare(first["file"], reference["file"], first["layouts"]), *_compare_ranks(ranks)]
    if not differences:
        raise ValueError("there is nothing to compare: the model returns no tensor")
    return VerifyReport(
        model=type(model).__name__,
        mesh=task.axes,
        plan=first["plan"],
        dtype=dtype,
        tolerance=limit,
        differences=tuple(sorted(differences, key=lambda d: -d.value)),
        reference=reference["name"],
        layouts=first["layouts"],
        casts=reference["casts"],
        notes=tuple(reference["notes"]),
        seconds=time.perf_counter() - started,
    )


# ---------------------------------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class Task:
    """What all processes are given.

    Attributes:
        model: a copy of the user's, cast.
        args, kwargs: the inputs, cast.
        axes: the mesh.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Any] | None
    axes: tuple[tuple[str, int], ...]
    plan: str | Plan
    dtype: torch.dtype
    steps: int
    seed: int

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.axes)


def make_task(
    model: nn.Module,
    mesh_shape: MeshShape,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    example_kwargs: Mapping[str, Any] | None = None,
    plan: str | Plan = "auto",
    dtype: torch.dtype = torch.float64,
    steps: int = 1,
    seed: int = 0,
    cast: bool = True,
) -> Task:
    """Checks the arguments and copies what processes are given; ``cast=False`` keeps dtypes.

    Raises:
        ValueError: for arguments that cannot be used.
    """
    if isinstance(model, ParallelModule):
        raise ValueError("the model is compiled already: pass the plain model")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is not an nn.Module but {type(model).__name__}")
    if isinstance(plan, str) and plan not in PRESETS:
        raise ValueError(f"unknown plan {plan!r}: expected one of {', '.join(PRESETS)}, or a Plan")
    if cast and dtype not in TOLERANCES:
        raise ValueError(f"dtype is torch.float64 or torch.float32, got {dtype}")
    if steps < 1:
        raise ValueError(f"steps is at least 1, got {steps}")
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the model is on the meta device, so there is no plain model to compare with: build it on the cpu"
        )
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), {**example_inputs, **(example_kwargs or {})}
    else:
        args = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
        kwargs = dict(example_kwargs or {})
    if loss_fn is not None and len(args) < 1:
        raise ValueError("with a loss_fn, the last of the example_inputs is the target; there are no positional inputs")
    try:
        copied = copy.deepcopy(model).to("cpu", dtype if cast else None)
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be copied: {error}") from error
    if isinstance(loss_fn, nn.Module):
        loss_fn = copy.deepcopy(loss_fn).to("cpu", dtype if cast else None)
    args, kwargs = pytree.tree_map_only(Tensor, functools.partial(_copy, dtype if cast else None), (args, kwargs))
    return Task(copied, args, kwargs, loss_fn, parse_mesh(mesh_shape), plan, dtype, steps, seed)


def _copy(dtype: torch.dtype | None, x: Tensor) -> Tensor:
    return x.detach().to("cpu", dtype if dtype and x.is_floating_point() else x.dtype, copy=True)


def parse_mesh(mesh_shape: MeshShape) -> tuple[tuple[str, int], ...]:
    """The mesh axes by name and size.

    Raises:
        ValueError: for a mesh that cannot be.
    """
    if isinstance(mesh_shape, Mapping):
        axes = tuple((str(name), operator.index(size)) for name, size in mesh_shape.items())
    else:
        sizes = [mesh_shape] if isinstance(mesh_shape, int) else [operator.index(size) for size in mesh_shape]
        if len(sizes) > len(AXIS_NAMES):
            raise ValueError(f"a mesh has one to three axes, got {len(sizes)} sizes: {tuple(sizes)}")
        axes = tuple(zip(AXIS_NAMES, sizes, strict=False))
    if not 1 <= len(axes) <= 3 or any(size < 1 for _, size in axes):
        raise ValueError(f"a mesh has one to three axes of at least one rank each, got {mesh_shape!r}")
    return axes


# ------------------------------------------------------------------------------------------------- what processes do


def compile_task(task: Task, axes: Sequence[tuple[str, int]], plan: str | Plan) -> ParallelModule:
    """The task's model, compiled on a mesh over this process's group."""
    torch.manual_seed(task.seed)
    mesh = init_device_mesh("cpu", tuple(s for _, s in axes), mesh_dim_names=tuple(n for n, _ in axes))
    return api.compile(task.model, mesh, loss_fn=task.loss_fn, plan=plan)


def _run_rank(process: Process, task: Task) -> dict[str, Any]:
    module = compile_task(task, task.axes, task.plan)
    notes: list[str] = []
    records = list(_train(module, task, notes, lambda step, _: float(process.shared.get(f"limit{step}"))))
    layouts, shards = {}, {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        coordinate = parameter.device_mesh.get_coordinate() or ()
        kinds = zip(coordinate, parameter.placements, strict=True)
        shard = tuple(c for c, placement in kinds if not placement.is_replicate())
        layouts[name] = tuple(map(str, parameter.placements))
        shards[name] = (shard, _digest(parameter.to_local().detach()))
    seen = {
        f"{kind} {name}".strip(): _digest(x)
        for _, kind, name, x in records
        if kind in ("loss", "norm") and x is not None
    }
    result: dict[str, Any] = {"shards": shards, "seen": seen, "layouts": layouts}
    if process.rank == 0:
        torch.save(records, process.directory / "ranks")
        result |= {"file": "ranks", "plan": module.plan}
    return result


def _run_reference(process: Process, task: Task) -> dict[str, Any]:
    torch.manual_seed(task.seed)
    graph = _captured_graph(task)
    casts = _narrowing_casts(graph, task.dtype)
    name, model = "the plain model, in eager torch", task.model
    if any(node.target is operators.dropout for node in graph.nodes):
        name = "the compiled model on a mesh of one rank, because dropout is active"
        model = compile_task(task, (("dp", 1),), "auto")

    def half(step: int, grads: Sequence[Tensor]) -> float:
        norm = torch.stack([g.norm() for g in grads]).norm().item() if grads else 0.0
        limit = norm / 2 if 0 < norm < math.inf else 1.0
        process.shared.set(f"limit{step}", repr(limit))
        return limit

    notes: list[str] = []
    torch.save(list(_train(model, task, notes, half)), process.directory / "reference")
    return {"file": "reference", "casts": casts, "name": name, "notes": notes}


def _captured_graph(task: Task) -> fx.Graph:
    leaves, spec = pytree.tree_flatten((task.args, task.kwargs))
    specs, batch = describe_inputs(leaves)
    tensors = any(isinstance(s, InputSpec) for s in specs)
    try:
        captured = capture(
            task.model, specs, spec, loss_fn=task.loss_fn, least_batch=2 * task.ranks if tensors else 1, batch=batch
        )
    except CaptureError:
        try:  # where the plain model fails as well, its own error is the one to show
            with torch.no_grad():
                _call(task.model, task, with_target=True)
        except Exception as error:
            raise PlainModelError(f"the plain model fails by itself: {type(error).__name__}: {error}") from error
        raise
    return captured.graph


def _narrowing_casts(graph: fx.Graph, dtype: torch.dtype) -> tuple[str, ...]:
    """Where the model itself casts to a dtype narrower than ``dtype``: ``module path: operator to dtype``."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        operands = [a.meta.get("val") for a in node.all_input_nodes]
        widths = [v.dtype.itemsize for v in operands if isinstance(v, Tensor) and v.is_floating_point()]
        if widths and value.dtype.itemsize < min(max(widths), dtype.itemsize):
            narrow = str(value.dtype).removeprefix("torch.")
            found[f"{node.meta.get('module') or 'the top level'}: {operator_name(node.target)} to {narrow}"] = None
    return tuple(found)


def _call(model: nn.Module, task: Task, with_target: bool) -> Any:
    if task.loss_fn is None:
        return model(*task.args, **task.kwargs)
    if isinstance(model, ParallelModule):
        return model(*(task.args if with_target else task.args[:-1]), **task.kwargs)
    output = model(*task.args[:-1], **task.kwargs)
    return task.loss_fn(output, task.args[-1]) if with_target else output


def _train(
    model: nn.Module, task: Task, notes: list[str], limit_of: Callable[[int, Sequence[Tensor]], float]
) -> Iterator[Record]:
    """Takes the steps of one training run and tells everything that can be seen of them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9) if trained else None
    if optimizer is None:
        notes.append("no parameter is trainable, so there are no gradients to compare")
    for step in range(1, task.steps + 1):
        with torch.set_grad_enabled(optimizer is not None):
            outputs = list(_tensors(_call(model, task, with_target=True)))
            loss, loss_name = _loss(outputs, task, notes if step == 1 else [])
        for name, value in outputs:
            yield step, "loss" if name == loss_name else "output", name, _whole(value)
        if optimizer is not None:
            loss.backward()
            yield from _gradients(step, "gradient", model)
            grads = [g for _, _, _, g in _gradients(step, "", model) if g is not None]
            limit = limit_of(step, grads)
            if isinstance(model, ParallelModule):
                norm = model.clip_grad_norm_(limit)
            else:
                norm = nn.utils.clip_grad_norm_(trained, limit)
            yield step, "norm", "", _whole(norm)
            yield from _gradients(step, "clipped gradient", model)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                yield step, "parameter", name, _whole(parameter)
        for name, buffer in model.named_buffers():
            yield step, "buffer", name, _whole(buffer)
    if task.loss_fn is not None and not _takes_target(task):
        with torch.no_grad():
            for name, value in _tensors(_call(model, task, with_target=False)):
                yield task.steps, "output", name, _whole(value)


def _takes_target(task: Task) -> bool:
    """Whether a call without a target would be taken for one whose last input is the target."""
    try:
        inspect.signature(task.model.forward).bind(*task.args[:-2], **task.kwargs)
    except TypeError:
        return False
    return len(task.args) > 1


def _loss(outputs: Sequence[tuple[str, Tensor]], task: Task, notes: list[str]) -> tuple[Tensor, str | None]:
    """What is differentiated, and its name among the outputs."""
    floating = [(n, x) for n, x in outputs if x.is_floating_point() and x.requires_grad]
    scalars = {n: x for n, x in floating if x.ndim == 0}
    if scalars:
        name = "loss" if "loss" in scalars else next(iter(scalars))
        if len(scalars) > 1:
            notes.append(f"the model returns {len(scalars)} scalars; {name!r} is differentiated")
        return scalars[name], name
    if not torch.is_grad_enabled():
        return torch.zeros(()), None
    if not floating:
        raise ValueError("no output of the model depends differentiably on its parameters, though some are trainable")
    notes.append("there is no scalar loss: a fixed weighted sum of the outputs is differentiated")
    generator = torch.Generator().manual_seed(task.seed)
    total = [(x * torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum() for _, x in floating]
    return torch.stack(total).sum(), None


def _tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, with the keys and indices that lead to them."""
    if isinstance(output, Tensor):
        yield name, output
        return
    if isinstance(output, Mapping):
        children: list[tuple[Any, Any]] = list(output.items())
    elif isinstance(output, (tuple, list)):
        children = list(zip(getattr(output, "_fields", range(len(output))), output, strict=True))
    else:
        leaves = pytree.tree_leaves(output)
        children = [] if len(leaves) == 1 and leaves[0] is output else list(enumerate(leaves))
    for key, child in children:
        yield from _tensors(child, f"{name}.{key}" if name else str(key))


def _gradients(step: int, kind: str, model: nn.Module) -> Iterator[Record]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield step, kind, name, None if parameter.grad is None else _whole(parameter.grad)


def _whole(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()  # a replicated one would be the tensor itself


def _digest(x: Tensor) -> str:
    data = x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return hashlib.sha256(data).hexdigest()


# --------------------------------------------------------------------------------------------------------- comparing


def difference(actual: Tensor, expected: Tensor) -> float:
    """``max |actual - expected| / max(1, max |expected|)``; inf where shapes, dtypes or non-finite values differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    if not expected.is_floating_point() and not expected.is_complex():
        actual, expected = actual.double(), expected.double()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    off = torch.where(same, 0.0, (actual - expected).abs())
    largest = expected.abs()[expected.isfinite()].max().item() if bool(expected.isfinite().any()) else 0.0
    value = off.max().item() / max(1.0, largest)
    return math.inf if math.isnan(value) else value


def _compare(
    actual: Sequence[Record], expected: Sequence[Record], layouts: Mapping[str, tuple[str, ...]]
) -> Iterator[Difference]:
    found = {(step, kind, name): value for step, kind, name, value in actual}
    for step, kind, name, value in expected:
        mine = found.pop((step, kind, name), None)
        layout = layouts.get(name, ()) if kind != "buffer" else ()
        if value is None and mine is None:
            continue
        if value is None or mine is None:
            detail = f"{'a value' if mine is not None else 'None'}, expected {'None' if value is None else 'a value'}"
            yield Difference(kind, name, math.inf, step, layout, detail)
        else:
            yield Difference(kind, name, difference(mine, value), step, layout, _describe(mine, value), _size(value))
    for step, kind, name in found:
        yield Difference(kind, name, math.inf, step, (), "the reference has nothing of this name")


def _size(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() and x.dtype != torch.bool else math.inf


def _describe(actual: Tensor, expected: Tensor) -> str:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    if expected.numel() == 1:
        return f"{actual.item():.10g}, expected {expected.item():.10g}"
    return f"norm {actual.double().norm().item():.6g}, expected {expected.double().norm().item():.6g}"


def _compare_ranks(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Difference]:
    """What must be the same, bit for bit, on several ranks: replicas of parameters, losses and norms."""
    if len(ranks) == 1:
        return
    for name, layout in ranks[0]["layouts"].items():
        known: dict[Any, str] = {}
        wrong = next(
            (r for r, x in enumerate(ranks) if known.setdefault(*x["shards"][name]) != x["shards"][name][1]), None
        )
        text = "equal on all ranks" if wrong is None else f"rank {wrong} has other values than another rank"
        yield Difference("replicas", name, 0.0 if wrong is None else math.inf, 0, layout, text)
    for name, digest in ranks[0]["seen"].items():
        wrong = next((r for r, x in enumerate(ranks) if x["seen"].get(name) != digest), None)
        text = "equal on all ranks" if wrong is None else f"rank {wrong} has another value than rank 0"
        yield Difference("replicas", name, 0.0 if wrong is None else math.inf, 0, (), text)


__all__ = ["Difference", "VerifyReport", "compile_task", "difference", "make_task", "parse_mesh", "verify"]
