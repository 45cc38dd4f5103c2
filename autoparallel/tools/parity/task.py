"""What is verified: a copy of the user's model, its batches, and how it is trained."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoparallel import _torch, api
from autoparallel.comm.world import PIPELINE_AXIS, MeshShape, axes_of, count_ranks, mesh_size
from autoparallel.graph.nesting import map_tensors
from autoparallel.graph.plain_tensors import held_unregistered, not_copied
from autoparallel.plan import Plan
from autoparallel.planner.request.presets import PRESETS, Preset
from autoparallel.predict.optimizer import MakeOptimizer
from autoparallel.runtime.module import ParallelModule

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

BeforeStep = Callable[[nn.Module, int], None]
DTYPES = (torch.float64, torch.float32)


@dataclass(frozen=True)
class Batch:
    """The inputs of one call, on the cpu and in the task's dtype."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What all processes are given.

    Attributes:
        model: a copy of the user's, cast.
        batches: taken in turn, ``accumulation`` of them in each step.
        axes: the mesh.
        dtype: what model and batches are cast to; None leaves them.
        optimizer: makes the optimizer from the trained parameters.
        precision: as ``compile()`` takes it.
        accumulation: how many batches a step takes the mean over.
        norm_type: of the norm that is clipped.
        before_step: called with the model, plain or compiled, and the number of the step that comes.
    """

    model: nn.Module
    batches: tuple[Batch, ...]
    loss_fn: Callable[..., Any] | None
    axes: tuple[tuple[str, int], ...]
    plan: Preset | Plan
    dtype: torch.dtype | None
    steps: int
    seed: int
    optimizer: MakeOptimizer
    precision: MixedPrecisionPolicy | None = None
    accumulation: int = 1
    norm_type: float = 2.0
    before_step: BeforeStep = lambda model, step: None

    @property
    def ranks(self) -> int:
        return mesh_size(self.axes)

    @property
    def is_open_ended(self) -> bool:
        """Whether rounding decides how far results may be off, so that no fixed tolerance fits."""
        return self.dtype is None or self.precision is not None

    def batch(self, step: int, number: int = 1) -> Batch:
        """A batch of a step; the first step is 1, and so is its first batch."""
        return self.batches[((step - 1) * self.accumulation + number - 1) % len(self.batches)]

    def copy(self, dtype: torch.dtype | None = None) -> Task:
        """The task with a model and inputs of its own, cast where a dtype is given."""
        loss_fn = _copy_model(self.loss_fn, dtype) if isinstance(self.loss_fn, nn.Module) else self.loss_fn
        batches = tuple(_cast_batch(batch, dtype) for batch in self.batches)
        model = _copy_model(self.model, dtype)
        return replace(self, model=model, loss_fn=loss_fn, batches=batches, dtype=dtype or self.dtype)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer where none is given; momentum makes an error of an early step visible in all later ones."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_task(
    model: nn.Module,
    mesh_shape: MeshShape,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Preset | Plan = "auto",
    dtype: torch.dtype | None = None,
    steps: int | None = None,
    seed: int = 0,
    optimizer: MakeOptimizer | None = None,
    precision: MixedPrecisionPolicy | None = None,
    before_step: BeforeStep | None = None,
) -> Task:
    """Checks the arguments and copies what processes are given.

    Raises:
        ValueError: for arguments that cannot be used.
    """
    if isinstance(model, ParallelModule):
        raise ValueError("the model is compiled already: pass the plain model")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is not an nn.Module but {type(model).__name__}")
    if isinstance(plan, str) and plan not in PRESETS:
        raise ValueError(f"unknown plan {plan!r}: expected one of {', '.join(PRESETS)}, or a Plan")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is torch.float64 or torch.float32, or None for the model's own, got {dtype}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps is at least 1, got {steps}")
    if any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "the model is on the meta device, so there is no plain model to compare with: build it on the cpu"
        )
    batches = _batches(example_inputs, example_kwargs or {})
    if loss_fn is not None and any(not batch.args for batch in batches):
        raise ValueError("with a loss_fn, the last of the example_inputs is the target; there are no positional inputs")
    axes = axes_of(mesh_shape)
    task = Task(
        model, batches, loss_fn, axes, plan, dtype, steps or len(batches), seed, optimizer or sgd, precision
    )  # fmt: skip
    if before_step is not None:
        task = replace(task, before_step=before_step)
    try:
        return task.copy(dtype)
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be copied: {error}") from error


def _batches(example_inputs: Any, kwargs: Mapping[str, Any]) -> tuple[Batch, ...]:
    """One batch, or several where a list of calls' inputs is given."""
    several = isinstance(example_inputs, list) and example_inputs
    if several and all(isinstance(item, tuple | Mapping) for item in example_inputs):
        return tuple(batch for item in example_inputs for batch in _batches(item, kwargs))
    if isinstance(example_inputs, Mapping):
        return (Batch((), {**example_inputs, **kwargs}),)
    args = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
    return (Batch(args, dict(kwargs)),)


def _cast_batch(batch: Batch, dtype: torch.dtype | None) -> Batch:
    args, kwargs = map_tensors(functools.partial(_copy, dtype), (batch.args, batch.kwargs))
    return Batch(args, kwargs)


def _cast(dtype: torch.dtype | None, x: Tensor) -> Tensor:
    """A tensor on the cpu; a complex one has two numbers of the dtype."""
    if dtype is None or not (x.is_floating_point() or x.is_complex()):
        return x.to("cpu")
    return x.to("cpu", dtype.to_complex() if x.is_complex() else dtype)


def _copy(dtype: torch.dtype | None, x: Tensor) -> Tensor:
    return _cast(dtype, x.detach()).clone().requires_grad_(x.requires_grad)


def _copy_model(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy on the cpu with its hooks; ``copy.deepcopy`` leaves out those of parameters.

    Modules that it holds without having registered them, as a teacher in a list, are cast with it."""
    memo = {id(held): held for held in not_copied(model)}
    copied = copy.deepcopy(model, memo)
    theirs, ours = ({id(module): module for module in held_unregistered(m)[1]} for m in (model, copied))
    _torch.nn.cast_module(copied, functools.partial(_cast, dtype))
    for key in ours.keys() - theirs.keys():
        _torch.nn.cast_module(ours[key], lambda x: x if x.is_meta else _cast(dtype, x))
    for parameter, copy_of_it in zip(model.parameters(), copied.parameters(), strict=True):
        _torch.autograd.copy_parameter_hooks(parameter, copy_of_it)
    return copied


def compile_task(task: Task) -> ParallelModule:
    """The task's model, compiled on a mesh over this process's group."""
    torch.manual_seed(task.seed)
    count_ranks()  # without a launcher, of one rank
    mesh = init_device_mesh("cpu", tuple(s for _, s in task.axes), mesh_dim_names=tuple(n for n, _ in task.axes))
    return api.compile(
        task.model,
        mesh,
        loss_fn=task.loss_fn,
        plan=task.plan,
        precision=task.precision,
        outputs="gather" if PIPELINE_AXIS in dict(task.axes) else "auto",  # a pipeline keeps its loss alone otherwise
    )
