"""``compile()``: the whole way through, from a plain model to a module that trains on a mesh."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autoparallel.choosing import MeshSearch, refusal
from autoparallel.graph.captured import Captured
from autoparallel.groups import bind, inner_mesh, other_slices, whole_group, whole_group_name, with_data_axis
from autoparallel.meshes import Axes, MeshChoice
from autoparallel.placements import Invariant, format_layout, parse_layout
from autoparallel.plan import ParameterPlan, Plan, PlanError, mesh_text
from autoparallel.planner.hardware import Profile, profile_for
from autoparallel.planner.pins import parse_pins
from autoparallel.planner.presets import PRESETS
from autoparallel.planning import Planner, Request, limit_in_bytes
from autoparallel.report.reasons import Reasons
from autoparallel.runtime.agreement import Agreement
from autoparallel.runtime.calls import Call
from autoparallel.runtime.compiled import compile_body
from autoparallel.runtime.gradients import GradientStore
from autoparallel.runtime.limits import ClipGradNorm
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.optimizers import note_replaced
from autoparallel.runtime.runner import Kind, Runner
from autoparallel.runtime.state import (
    broadcast_from_first,
    lay_out,
    make_dtensors,
    materialize,
    require_on_device,
)
from autoparallel.staged import StagedPlanner, attach_stages, find_owners
from autoparallel.staging import PIPELINE_AXIS, Pipeline

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

OUTPUTS = ("auto", "gather", "sharded")
BACKENDS = ("eager", "inductor")


def compile(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    plan: str | Plan = "auto",
    pins: Mapping[str, Any] | Plan | None = None,
    forbid: Mapping[str, Any] | None = None,
    hardware: str | Path | Profile | None = None,
    memory_limit: float | None = None,
    outputs: str = "auto",
    backend: str = "eager",
    precision: MixedPrecisionPolicy | None = None,
    clip_grad_norm: float | Mapping[str, float] | ClipGradNorm | None = None,
    pipeline: Pipeline | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    check_inputs: int | None = None,
) -> ParallelModule:
    """Makes a plain single-device model train on a whole mesh.

    Args:
        model: the plain model; its parameters are replaced by ``DTensor``s of the same names. The first rank's
            weights are used. Parameters on the meta device are materialised, each rank its part.
        mesh: one to three named axes, and one named "pp" for a pipeline: the model is cut into stages that lie along
            it. None: all ranks of the launcher; without a launcher, one rank. With ``plan="auto"`` and nothing pinned,
            the first call then searches into which axes to factor them, a pipeline's among them, and so it does where
            a mesh of all ranks has one axis without a name. With a preset or pins they lie on one axis "dp", with a
            saved plan as it says.
        loss_fn: called as ``loss_fn(output, target)``; the last positional argument of a call is the target then. It
            returns the loss, or ``(sum, count)`` with an integer count: the loss is their quotient then.
        example_inputs: positional inputs of a first call (the target last): traces and plans now instead of then.
        plan: "auto", a preset ("data_parallel", "fsdp", "tensor_parallel", "expert_parallel"), or a :class:`Plan`.
        pins: what some parameters and modules must be, beside ``plan``: ``{"layers.*.up.weight": (Replicate(),
            Shard(0))}`` with one of torch's placements for each mesh axis, or None for an axis that stays open. A
            parameter lies so between steps; a module makes its result so. Or a saved :class:`Plan`, of which all is
            kept that the model still has, while the rest is searched again.
        forbid: the same for how they must not lie.
        hardware: what the plan is made for: "a100", "h100", "h200", "b200", "cpu", a profile, or the file of one that
            ``python -m autoparallel calibrate`` wrote. None: "h100" on GPUs, "cpu" on CPUs.
        memory_limit: bytes per device for parameters, gradients, optimizer states and saved activations; at most 1, a
            part of the device's memory.
        outputs: "gather" returns outputs whole, "sharded" as they are made; all of them can be differentiated. "auto"
            is "gather", unless the loss is known, because ``loss_fn`` computed it (its first scalar, if it returns
            several outputs) or because an output is called "loss": the others are sharded then, and differentiating
            them is an error. A pipeline differentiates its loss only.
        precision: torch's own ``MixedPrecisionPolicy``: the dtype parameters are cast to, then gathered and used in
            (``param_dtype``), the dtype gradients are reduced in (``reduce_dtype``; None: that of their use), and the
            dtype of the model's outputs before ``loss_fn`` (``output_dtype``). Parameters at rest, gradients and
            accumulators keep the model's dtype. Give an ``output_dtype`` of float32 for the loss to be computed in it.
        backend: "eager" runs the program in plain autograd, "inductor" compiles its body with ``torch.compile``.
        clip_grad_norm: every step of an optimizer first clips the gradients to this global norm, as
            :meth:`ParallelModule.clip_grad_norm_` does; a number, limits by pattern of parameter names, or a
            :class:`ClipGradNorm` with another p or a policy for norms that are not finite.
            ``model.last_grad_norm`` is the norm of the last step.
        pipeline: what to fix of the pipeline over "pp": its schedule, its number of microbatches or of stages per rank,
            or where it is cut. What is left open is planned.
        grad_scaler: the scaler of the loop. A pipeline must know it, because its gradients are computed before the
            loss is scaled; others need not be told.
        check_inputs: at every so many calls the ranks compare a sample of 512 elements of each plain input, so that a
            rank that has left out a batch is found; on the first three calls they compare all. 0: never after those.
            None: at every call on CPUs, where that costs tens of microseconds, and at every 100th on other devices,
            which must be waited for.

    Raises:
        TypeError, ValueError: for a mesh, a model or an option that cannot be used.
        RankMismatchError: on every rank, when the ranks have different models or options.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not a {type(model).__name__}")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh (see init_device_mesh), not a {type(mesh).__name__}")
    if not isinstance(plan, str | Plan):
        raise TypeError(f"plan must be one of {', '.join(PRESETS)}, or a Plan, not a {type(plan).__name__}")
    if isinstance(plan, str) and plan not in PRESETS:
        raise ValueError(f"unknown plan {plan!r}: expected one of {', '.join(PRESETS)}, or a Plan")
    if isinstance(plan, Plan) and (pins is not None or forbid is not None):
        raise ValueError("a Plan is carried out as it is, so that nothing can be pinned: give it as pins=plan instead")
    if outputs not in OUTPUTS:
        raise ValueError(f"unknown outputs {outputs!r}: expected one of {', '.join(OUTPUTS)}")
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    _require_policy(precision)
    if clip_grad_norm is not None and not isinstance(clip_grad_norm, ClipGradNorm):
        clip_grad_norm = ClipGradNorm(clip_grad_norm)
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise TypeError(f"pipeline must be an autoparallel.Pipeline, not a {type(pipeline).__name__}")
    if pipeline is not None and isinstance(plan, Plan):
        raise ValueError("a Plan is carried out as it is, with its own pipeline: leave pipeline=... out")
    if check_inputs is not None and (isinstance(check_inputs, bool) or not isinstance(check_inputs, int)):
        raise TypeError(f"check_inputs must be a number of calls, not a {type(check_inputs).__name__}")
    if check_inputs is not None and check_inputs < 0:
        raise ValueError(f"check_inputs must not be negative, got {check_inputs}")
    if isinstance(model, ParallelModule):
        raise ValueError("the model is compiled already")
    saved = plan if isinstance(plan, Plan) else pins if isinstance(pins, Plan) else None
    is_open = plan == "auto" and pins is None and forbid is None and _is_open(mesh)
    mesh = mesh_of(saved, model) if saved is not None and mesh is None else usable_mesh(mesh, model, is_open)
    is_open = is_open and mesh.size() > 1
    staged = PIPELINE_AXIS in (mesh.mesh_dim_names or ())
    if pipeline is not None and not staged and not is_open:
        raise ValueError("pipeline=... was given, but the mesh has no axis named 'pp' for it")
    unable = refusal(precision, outputs, grad_scaler, {p.dtype for p in model.parameters()})
    if staged and unable:
        raise ValueError(unable)
    mesh = with_data_axis(mesh) if staged else mesh
    inner = inner_mesh(mesh, PIPELINE_AXIS) if staged else mesh
    require_on_device(model, mesh)
    profile = profile_for(mesh.device_type, hardware)
    request = Request(
        axes=tuple(zip(inner.mesh_dim_names or (), inner.shape, strict=True)),
        profile=profile,
        plan=plan,
        pins=parse_pins(pins, forbid),
        loss_fn=loss_fn,
        memory_limit=limit_in_bytes(memory_limit, profile),
        outputs=outputs,
        precision=precision,
        device=mesh.device_type,
        hoist_all=backend == "inductor",
    )
    agreement = Agreement(mesh)
    _require_same_model(agreement, model, request, backend, clip_grad_norm, pipeline)
    prefix = bind(mesh)
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"]
    broadcast_from_first(tensors, mesh, whole_group(prefix))
    note_replaced(make_dtensors(model, mesh))
    everyone = whole_group_name(prefix) if staged else None
    store = GradientStore(inner, bind(inner), dict(model.named_parameters()), everyone)
    settings = _Settings(model, agreement, store, pipeline, grad_scaler)
    compiler = _OpenCompiler(settings, mesh, request, unable) if is_open else _compiler(settings, mesh, request)
    module = ParallelModule(
        model,
        mesh,
        agreement=agreement,
        store=store,
        make_kind=compiler.make_kind,
        has_loss_fn=loss_fn is not None,
        clip_grad_norm=clip_grad_norm,
        check_inputs=check_inputs,
    )
    if example_inputs is not None:
        module.prepare(*example_inputs)
    return module


def _require_policy(precision: object) -> None:
    if precision is None:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not isinstance(precision, MixedPrecisionPolicy):
        raise TypeError(
            "precision must be a torch.distributed.fsdp.MixedPrecisionPolicy, not a "
            f"{precision if isinstance(precision, torch.dtype) else type(precision).__name__}"
        )


def _is_open(mesh: DeviceMesh | None) -> bool:
    """Whether the search may factor a mesh into axes."""
    return mesh is None or not mesh.mesh_dim_names and mesh.ndim == 1 and mesh.size() == dist.get_world_size()


def usable_mesh(mesh: DeviceMesh | None, model: nn.Module, is_open: bool = False) -> DeviceMesh:
    """The mesh to train on; None means all ranks, and so does an open one. Raises ValueError for one that cannot be
    used."""
    if mesh is None:
        world, device = count_ranks(), _device_of(model)
        mesh = init_device_mesh(device, (world,), mesh_dim_names=("dp",))
    elif is_open:
        mesh = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("dp",))
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError(
            "the mesh has no axis names: pass mesh_dim_names to init_device_mesh, for example ('dp', 'tp'). One axis "
            "of all ranks may go without a name where plan='auto' decides on the axes"
        )
    if len(set(names) - {PIPELINE_AXIS}) > 3:
        raise ValueError(f"a mesh has one to three axes beside 'pp', this one has {mesh.ndim}: {names}")
    if mesh.mesh.numel() > dist.get_world_size():
        raise ValueError(f"the mesh has {mesh.mesh.numel()} ranks, the world has {dist.get_world_size()}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh; call compile() on the mesh's ranks only")
    return mesh


def mesh_of(plan: Plan, model: nn.Module) -> DeviceMesh:
    """The mesh that a plan was made for, over all ranks. Raises ValueError where there are not as many."""
    world, axes = count_ranks(), plan.whole_mesh
    needed = math.prod(size for _, size in axes)
    if needed != world:
        raise ValueError(f"the plan is for the mesh {mesh_text(axes)} of {needed} ranks, the world has {world}")
    return _make_mesh(_device_of(model), axes)


def _make_mesh(device: str, axes: Axes) -> DeviceMesh:
    return init_device_mesh(device, tuple(n for _, n in axes), mesh_dim_names=tuple(name for name, _ in axes))


def _device_of(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")


def count_ranks() -> int:
    """The number of ranks; without a launcher, a world of one is made."""
    if not dist.is_initialized() and "RANK" not in os.environ:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def _require_same_model(agreement: Agreement, model: nn.Module, request: Request, *options: object) -> None:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    plan = request.plan
    options = (request.memory_limit, request.outputs, *options, request.precision, request.profile)
    lines = [
        f"model {type(model).__name__}",
        f"plan {plan!r}, options {options}" if isinstance(plan, str) else f"options {options}, plan",
        *(plan.to_json().splitlines() if isinstance(plan, Plan) else ()),
        *request.pins.text().splitlines(),
        *(f"{n} {list(t.shape)} {t.dtype} on {t.device.type}{', trained' * t.requires_grad}" for n, t in tensors),
    ]
    agreement.require_same_text("the ranks compile different models or options:", "\n".join(lines))


@dataclass(frozen=True)
class _Settings:
    """What all compilers of one model are given."""

    model: nn.Module
    agreement: Agreement
    store: GradientStore
    pipeline: Pipeline | None
    scaler: torch.amp.GradScaler | None


def _compiler(settings: _Settings, mesh: DeviceMesh, request: Request) -> _Compiler:
    staged = PIPELINE_AXIS in (mesh.mesh_dim_names or ())
    return _StagedCompiler(settings, mesh, request) if staged else _Compiler(settings, mesh, request)


class _OpenCompiler:
    """Chooses the mesh at the first call, all ranks together, and from then on compiles for it."""

    def __init__(self, settings: _Settings, mesh: DeviceMesh, request: Request, unable: str) -> None:
        self.settings, self.mesh, self.request, self.unable = settings, mesh, request, unable
        self.chosen: _Compiler | None = None

    def make_kind(self, module: ParallelModule, call: Call) -> Kind:
        """The first time, the mesh is chosen on the training graph."""
        if self.chosen is None:
            self.chosen = self._choose(module, call)
        return self.chosen.make_kind(module, call)

    def _choose(self, module: ParallelModule, call: Call) -> _Compiler:
        settings, agreement = self.settings, self.settings.agreement
        planner = Planner(settings.model, self.request)
        captured = agreement.together(lambda: planner.capture(call, training=None if module.training else True))
        search = MeshSearch(
            settings.model, self.request, captured, call, self.mesh.size(), settings.pipeline,
            self.unable or (_attributes_in_pipeline(captured) if captured.attributes else ""),
        )  # fmt: skip
        choice = search.choose(agreement.share)
        mesh = self.mesh
        if choice.mesh != self.request.axes:
            mesh = _make_mesh(mesh.device_type, choice.mesh)
            staged = PIPELINE_AXIS in (mesh.mesh_dim_names or ())
            inner = inner_mesh(mesh, PIPELINE_AXIS) if staged else mesh
            settings.store.move(inner, bind(inner), whole_group_name(bind(mesh)) if staged else None)
            module.move(mesh)
        inner_axes = tuple(axis for axis in choice.mesh if axis[0] != PIPELINE_AXIS)
        compiler = _compiler(settings, mesh, replace(self.request, axes=inner_axes))
        compiler.captured, compiler.choice = captured, choice
        return compiler


class _Compiler:
    """Makes the program of each new kind of call; keeps what must be the same for all of them."""

    def __init__(self, settings: _Settings, mesh: DeviceMesh, request: Request) -> None:
        self.model, self.agreement, self.store = settings.model, settings.agreement, settings.store
        self.mesh, self.request, self.planner = mesh, request, Planner(settings.model, request)
        self.at_rest: dict[str, ParameterPlan] | None = None
        self.captured: Captured | None = None  # the first graph, where the mesh was chosen on it
        self.choice: MeshChoice | None = None

    def make_kind(self, module: ParallelModule, call: Call) -> Kind:
        """Captures, plans and builds; every rank alike, before any collective of the model."""
        at_rest = self.at_rest
        if at_rest is None and not module.training:
            # Layouts at rest are planned on the training graph, whatever is called first.
            at_rest = self._resting(self._plan(self._capture(call, training=True), call, None))
        captured = self._capture(call)
        plan = self._plan(captured, call, at_rest)
        plan = replace(plan, choice=self.choice or plan.choice)
        return self._build(captured, plan, call, self._resting(plan) if at_rest is None else at_rest)

    def _capture(self, call: Call, training: bool | None = None) -> Captured:
        known, self.captured = self.captured, None
        return known or self.agreement.together(lambda: self.planner.capture(call, training=training))

    def _build(self, captured: Captured, plan: Plan, call: Call, at_rest: dict[str, ParameterPlan]) -> Kind:
        """Builds the program and attaches it to the parameters, which then lie as ``at_rest`` says."""
        plan, program = self.planner.finish(captured, plan, call, self.store.prefix)
        self.agreement.require_same_text("the ranks have different programs:", f"{program.text()}\n{plan.to_json()}")
        if self.at_rest is None:
            self._settle(at_rest)
        reasons = Reasons(self.planner, replace(call, leaves=()))  # a plan keeps no batch alive
        body = compile_body(program) if self.request.hoist_all else program.body
        return Kind(Runner(program, self.store, self.model, body), plan.with_reasons(reasons))

    def _plan(self, captured: Captured, call: Call, at_rest: dict[str, ParameterPlan] | None) -> Plan:
        plan = self.request.plan
        if not isinstance(plan, Plan) or at_rest is not None:
            plan = Plan.from_json(
                self.agreement.from_first(lambda: self.planner.search(captured, call, at_rest).to_json())
            )
        self.planner.prepare(captured, plan)
        return plan

    def _resting(self, plan: Plan) -> dict[str, ParameterPlan]:
        """How every parameter lies from now on; whole, where the plan does not meet it."""
        whole = ParameterPlan(format_layout((Invariant,) * self.store.mesh.ndim))
        return {name: plan.parameters.get(name, whole) for name in self.store.parameters}

    def _homes(self) -> dict[str, DeviceMesh]:
        """The mesh that each parameter lies on."""
        return dict.fromkeys(self.store.parameters, self.store.mesh)

    def _settle(self, at_rest: dict[str, ParameterPlan]) -> None:
        """Gives every parameter its layout at rest, in place."""
        layouts = {name: parse_layout(plan.at_rest) for name, plan in at_rest.items()}
        homes = self._homes()
        if any(_is_meta(p) for p in [*self.store.parameters.values(), *self.model.buffers()]):
            materialize(self.model, layouts, self.mesh, whole_group(bind(self.mesh)), homes)
        for name, parameter in self.store.parameters.items():
            lay_out(parameter, layouts[name], homes[name])
        self.store.note_storages()
        self.at_rest = at_rest


class _StagedCompiler(_Compiler):
    """The same for a mesh with an axis for a pipeline."""

    planner: StagedPlanner

    def __init__(self, settings: _Settings, mesh: DeviceMesh, request: Request) -> None:
        super().__init__(settings, mesh, request)
        self.scaler = settings.scaler
        ranks = mesh.size((mesh.mesh_dim_names or ()).index(PIPELINE_AXIS))
        self.planner = StagedPlanner(settings.model, request, ranks, settings.pipeline or Pipeline())
        self.owners: dict[str, int] = {}

    def _plan(self, captured: Captured, call: Call, at_rest: dict[str, ParameterPlan] | None) -> Plan:
        if captured.attributes:
            raise PlanError(_attributes_in_pipeline(captured))
        plan = super()._plan(captured, call, at_rest)
        if plan.pipeline is None or plan.pipeline.ranks != self.planner.ranks:
            raise PlanError(f"the plan is not for a pipeline over {self.planner.ranks} ranks: plan again")
        if self.planner.stages is None:
            self.planner.stages, self.planner.recompute = plan.pipeline, plan.recompute
        return plan

    def _build(self, captured: Captured, plan: Plan, call: Call, at_rest: dict[str, ParameterPlan]) -> Kind:
        """Builds every stage's program, on all ranks, and attaches this rank's."""
        staged = self.planner.build_stages(captured, plan, call, self.store.prefix)
        self.agreement.require_same_text("the ranks have different programs:", f"{staged.text()}\n{plan.to_json()}")
        if self.at_rest is None:
            self.owners = find_owners(staged, self.store.parameters)
            self._settle(at_rest)
        compiled = compile_body if self.request.hoist_all else None
        prefix, redistributor = bind(self.mesh), self.planner.redistributor
        runner = attach_stages(staged, self.store, self.model, prefix, self.owners, redistributor, compiled)
        runner.scaler = self.scaler
        if captured.objective is not None and self.model.training:
            plan = self.planner.with_traffic(staged, plan, call, self.owners)
        return Kind(runner, plan)

    def _homes(self) -> dict[str, DeviceMesh]:
        slices = other_slices(self.mesh, PIPELINE_AXIS, self.store.mesh)
        return {name: slices[self.owners[name]] for name in self.store.parameters}


def _attributes_in_pipeline(captured: Captured) -> str:
    return (
        f"a call sets {', '.join(captured.attributes)}, which a pipeline does not carry from stage to stage: return "
        "what is set as an output, or use a mesh without 'pp'"
    )


def _is_meta(tensor: torch.Tensor) -> bool:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).device.type == "meta"
