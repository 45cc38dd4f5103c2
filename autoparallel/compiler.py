"""From a call to a program attached to its parameters, all ranks together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel.comm.groups import bind, inner_mesh, other_slices, whole_group, whole_group_name
from autoparallel.comm.world import PIPELINE_AXIS, count_ranks, device_of, make_mesh, mesh_text
from autoparallel.decisions.meshes import MeshChoice
from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.decisions.pipeline import Pipeline
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured
from autoparallel.placements import Invariant, format_layout, parse_layout
from autoparallel.plan import Plan
from autoparallel.planner.meshes import MeshSearch
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import prepare, stage_programs
from autoparallel.planner.reasons import PlanAgain
from autoparallel.planner.request import Request, Settled
from autoparallel.program import find_owners
from autoparallel.runtime.agreement import Agreement
from autoparallel.runtime.compiled import compile_body
from autoparallel.runtime.gradients import GradientStore
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.pipeline import attach_stages
from autoparallel.runtime.runner import Kind, Runner
from autoparallel.runtime.state import lay_out, materialize


@dataclass(frozen=True)
class Settings:
    """What all compilers of one model are given."""

    model: nn.Module
    agreement: Agreement
    store: GradientStore
    pipeline: Pipeline | None
    scaler: torch.amp.GradScaler | None


def compiler_for(settings: Settings, mesh: DeviceMesh, request: Request) -> Compiler:
    staged = PIPELINE_AXIS in (mesh.mesh_dim_names or ())
    return StagedCompiler(settings, mesh, request) if staged else Compiler(settings, mesh, request)


class OpenCompiler:
    """Chooses the mesh at the first call, all ranks together, and from then on compiles for it."""

    def __init__(self, settings: Settings, mesh: DeviceMesh, request: Request, unable: str) -> None:
        self.settings, self.mesh, self.request, self.unable = settings, mesh, request, unable
        self.chosen: Compiler | None = None

    def make_kind(self, module: ParallelModule, call: Call) -> Kind:
        """The first time, the mesh is chosen on the training graph."""
        if self.chosen is None:
            self.chosen = self._choose(module, call)
        return self.chosen.make_kind(module, call)

    def _choose(self, module: ParallelModule, call: Call) -> Compiler:
        settings, agreement = self.settings, self.settings.agreement
        planner = Planner(settings.model, self.request)
        captured = agreement.together(lambda: planner.capture(call, training=None if module.training else True))
        search = MeshSearch(
            replace(self.request, pipeline=settings.pipeline), captured, call, self.mesh.size(),
            self.unable or (_attributes_in_pipeline(captured) if captured.attributes else ""),
        )  # fmt: skip
        choice = search.choose(agreement.share)
        mesh = self.mesh
        if choice.mesh != self.request.axes:
            mesh = make_mesh(mesh.device_type, choice.mesh)
            staged = PIPELINE_AXIS in (mesh.mesh_dim_names or ())
            inner = inner_mesh(mesh, PIPELINE_AXIS) if staged else mesh
            settings.store.move(inner, bind(inner), whole_group_name(bind(mesh)) if staged else None)
            module.move(mesh)
        inner_axes = tuple(axis for axis in choice.mesh if axis[0] != PIPELINE_AXIS)
        compiler = compiler_for(settings, mesh, replace(self.request, axes=inner_axes))
        compiler.captured, compiler.choice = captured, choice
        return compiler


class Compiler:
    """Makes the program of each new kind of call; keeps what must be the same for all of them."""

    def __init__(self, settings: Settings, mesh: DeviceMesh, request: Request) -> None:
        self.model, self.agreement, self.store = settings.model, settings.agreement, settings.store
        self.mesh, self.request, self.planner = mesh, request, Planner(settings.model, request)
        self.at_rest: dict[str, ParameterPlan] | None = None
        self.first: Plan | None = None  # what settles the pipeline of all other kinds of calls
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
        reasons = PlanAgain(self.planner, replace(call, leaves=()))  # a plan keeps no batch alive
        body = compile_body(program) if self.request.hoist_all else program.body
        return Kind(Runner(program, self.store, self.model, body), plan.with_reasons(reasons))

    def _plan(self, captured: Captured, call: Call, at_rest: dict[str, ParameterPlan] | None) -> Plan:
        plan = self.request.plan
        if not isinstance(plan, Plan) or at_rest is not None:
            first = self.first
            settled = Settled(at_rest, first.pipeline, first.recompute) if first is not None else Settled(at_rest)
            plan = Plan.from_json(
                self.agreement.from_first(lambda: self.planner.search(captured, call, settled).to_json())
            )
        prepare(self.planner.request, captured, plan, call)
        self.first = self.first or plan
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


class StagedCompiler(Compiler):
    """The same for a mesh with an axis for a pipeline."""

    def __init__(self, settings: Settings, mesh: DeviceMesh, request: Request) -> None:
        super().__init__(settings, mesh, request)
        self.scaler = settings.scaler
        ranks = mesh.size((mesh.mesh_dim_names or ()).index(PIPELINE_AXIS))
        self.planner = Planner(settings.model, replace(request, stages=ranks, pipeline=settings.pipeline))
        self.owners: dict[str, int] = {}

    def _plan(self, captured: Captured, call: Call, at_rest: dict[str, ParameterPlan] | None) -> Plan:
        if captured.attributes:
            raise PlanError(_attributes_in_pipeline(captured))
        return super()._plan(captured, call, at_rest)

    def _build(self, captured: Captured, plan: Plan, call: Call, at_rest: dict[str, ParameterPlan]) -> Kind:
        """Builds every stage's program, on all ranks, and attaches this rank's."""
        staged = stage_programs(self.planner.request, captured, plan, call, self.store.prefix)
        self.agreement.require_same_text("the ranks have different programs:", f"{staged.text()}\n{plan.to_json()}")
        if self.at_rest is None:
            self.owners = find_owners(staged, self.store.parameters)
            self._settle(at_rest)
        compiled = compile_body if self.request.hoist_all else None
        prefix, redistributor = bind(self.mesh), self.planner.request.redistributor
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


def mesh_of(plan: Plan, model: nn.Module) -> DeviceMesh:
    """The mesh that a plan was made for, over all ranks. Raises ValueError where there are not as many."""
    world, axes = count_ranks(), plan.whole_mesh
    needed = math.prod(size for _, size in axes)
    if needed != world:
        raise ValueError(f"the plan is for the mesh {mesh_text(axes)} of {needed} ranks, the world has {world}")
    return make_mesh(device_of(model), axes)
