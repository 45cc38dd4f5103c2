"""The way from a call to a program that is attached to its parameters, which all ranks go together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoparallel import _torch
from autoparallel.comm.groups import bind, inner_mesh, other_slices, whole_group, whole_group_name
from autoparallel.comm.world import PIPELINE_AXIS, count_ranks, device_of, make_mesh, mesh_size, mesh_text
from autoparallel.data import from_json, to_json
from autoparallel.decisions.meshes import MeshChoice
from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.graph.beside import beside_in
from autoparallel.graph.calls import Call, sizes_of
from autoparallel.graph.captured import Captured, InputSpec
from autoparallel.graph.carried_attributes import computed_attributes
from autoparallel.graph.changed_arguments import shown_changes
from autoparallel.graph.errors import CaptureError
from autoparallel.graph.garbage import FEW, collected_rarely
from autoparallel.passes.sort_calls import sort_calls
from autoparallel.placements import Invariant, format_layout, parse_layout
from autoparallel.plan import Plan
from autoparallel.planner.candidates.meshes import MeshSearch
from autoparallel.planner.fits import UnevenError, require_lies
from autoparallel.planner.plan_cache import PlanCache
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import prepare, require_stages
from autoparallel.planner.reasons import PlanAgain
from autoparallel.planner.request.request import UNSETTLED, Request, Settled
from autoparallel.predict.cost import workload_of
from autoparallel.program.program import LocalProgram
from autoparallel.program.stages import StagedProgram, find_owners
from autoparallel.report.explain import headline
from autoparallel.report.progress import UNSHOWN, Progress
from autoparallel.runtime.calls.kinds import Kind
from autoparallel.runtime.dtensors.stages import note_stages
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.parameters.hooks import keep_without_gradient
from autoparallel.runtime.parameters.slices import lies_elsewhere
from autoparallel.runtime.parameters.state import aliases_kept, lay_out, materialize
from autoparallel.runtime.programs.compiled import Body, plain_body
from autoparallel.runtime.programs.pipeline import attach_stages
from autoparallel.runtime.programs.runner import Runner
from autoparallel.runtime.ranks.agreement import Agreement
from autoparallel.runtime.steps.scalers import agree_on_overflows
from autoparallel.text import LOGGER

TAKEN_FOR_GRANTED = (
    "%s, for all that is known: the microbatches of the pipeline take it to work row by row, forward and backward; "
    "autoparallel.register_rule() says so of an autograd.Function"
)


@dataclass(frozen=True)
class Settings:
    """What a compiler is given beside a mesh and a request.

    Attributes:
        model: the plain model, or a graph of Dynamo's as one.
        agreement: all ranks.
        store: the parameters, and where their gradients go.
        make_body: what runs the body of a program.
        lent: whether the parameters are given with each call, whole, by an owner who keeps them.
        scaler: the gradient scaler, which a pipeline must know.
        unable: why the options do not go with a pipeline; empty where they do.
        cache: of plans; the first rank's is used.
    """

    model: nn.Module
    agreement: Agreement
    store: GradientStore
    make_body: Callable[[LocalProgram], Body] = plain_body
    lent: bool = False
    scaler: torch.amp.GradScaler | None = None
    unable: str = ""
    cache: PlanCache = field(default_factory=PlanCache)


_SAME = (
    "What to change: have forward compute the same on every rank, and return it in the same order. Where it goes "
    "through a set of strings, which each process has in another order: sorted(names), or PYTHONHASHSEED=0 for all."
)
"""What makes programs of ranks the same."""


class Compiler:
    """Makes the program of each new kind of call; keeps what must be the same for all of them.

    Args:
        mesh: all ranks, on the axes that are planned for.
        request: about the mesh's axes other than a pipeline's.
        is_open: whether the ranks may be factored into other axes; this is decided at the first call.

    Attributes:
        model, agreement, store: as in the settings.
        at_rest: how every parameter lies; None before the first kind is planned.
        first: the first plan, which settles the pipeline of all other kinds.
        owners: in a pipeline, the rank on its axis on which each parameter lies.
    """

    def __init__(self, settings: Settings, mesh: DeviceMesh, request: Request, is_open: bool = False) -> None:
        self.settings, self.is_open = settings, is_open
        self.model, self.agreement, self.store = settings.model, settings.agreement, settings.store
        self.choice: MeshChoice | None = None
        self.owners: dict[str, int] = {}
        self.at_rest: dict[str, ParameterPlan] | None = None
        self.first: Plan | None = None
        self._progress = UNSHOWN
        self._is_carried_out = False  # the plan that was given, by a call that it is about
        self._sorts_calls = False  # of graphs, because ranks have traced them in other orders
        self._alike = [weakref.ref(self)]  # the compilers of this model and of its copies
        self._lie_on(mesh, request)
        if settings.lent and self._saved_plan is None:
            self.at_rest = dict.fromkeys(self.store.parameters, self._whole())

    @property
    def _saved_plan(self) -> Plan | None:
        """The plan that was given; None where plans are searched."""
        return self.request.plan if isinstance(self.request.plan, Plan) else None

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The user's loss function; None where the model makes its own."""
        return self.request.loss_fn

    def _lie_on(self, mesh: DeviceMesh, request: Request) -> None:
        self.mesh, self.request = mesh, request.on(tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)))
        self.planner = Planner(self.model, self.request, cache=self.settings.cache)
        self.planner.sorts_calls = self._sorts_calls

    def copied(self, model: nn.Module) -> Compiler:
        """What compiles a copy of the model, with a store of its own.

        The parameters of both lie alike: as they do now, or from when one of them is planned.
        """
        parameters = dict(model.named_parameters())
        store = GradientStore(self.store.mesh, self.store.prefix, parameters, self.store.everyone)
        other = Compiler(replace(self.settings, model=model, store=store), self.mesh, self.request, self.is_open)
        other._alike = self._alike
        self._alike.append(weakref.ref(other))
        other._follow(self)
        return other

    def _follow(self, other: Compiler) -> None:
        """Takes over what another compiler has settled, but for how the parameters lie."""
        if self.mesh != other.mesh:
            self.store.move(other.store.mesh, other.store.prefix, other.store.everyone)
            self._lie_on(other.mesh, other.request)
        self.choice, self.is_open = other.choice, other.is_open
        self.owners, self.first, self.at_rest = other.owners, other.first, other.at_rest
        self._is_carried_out = other._is_carried_out
        self.store.offloads_states = other.store.offloads_states

    # -- a kind of call ---------------------------------------------------------------------------------------------

    @collected_rarely(FEW)
    def make_kind(self, call: Call, trace: Captured | None = None) -> Kind:
        """Captures, plans, builds and attaches; every rank alike, before any collective of the model.

        Args:
            trace: what an earlier kind was made of, and serves this call, too: it is planned once more.
        """
        title = f"{type(self.model).__name__} in {'training' if call.is_training else 'evaluation'}"
        self._progress = Progress(title, self.agreement.is_first)
        at_rest = self.at_rest
        if at_rest is None and self._saved_plan is not None:
            at_rest = self._lie_as(self._saved_plan)
        elif at_rest is None and not call.is_training:
            at_rest = self._plan_at_rest(call)
        if self.is_open:
            captured = self._choose_mesh(call)
        elif trace is not None:
            captured = replace(trace.copy(), actual=sizes_of(trace, call.specs))
        else:
            captured = self._capture(call)
        trace = captured.copy() if captured.lengths or captured.batches else None
        try:
            plan = self._plan(captured, call, at_rest)
        except PlanError as error:
            if at_rest is not None:
                raise
            at_rest = self._plan_larger(captured, call, error)
            plan = self._plan(captured, call, at_rest)
        plan = replace(plan, choice=self.choice or plan.choice)
        with self._progress.phase("build"):
            kind = self._attach(captured, plan, call, self._layouts_at_rest(plan) if at_rest is None else at_rest)
        self._progress.conclude(lambda: headline(kind.plan) if call.is_training else "a program of its own")
        return replace(kind, trace=trace)

    def _is_about(self, call: Call) -> bool:
        """Whether a call is what a plan is made for: it trains, by ``forward``, with a loss where there is a function
        for it."""
        beside = beside_in(call.specs, call.in_spec)
        return call.trains and beside.method is None and (call.with_target or self.loss_fn is None)

    def _lie_as(self, plan: Plan) -> dict[str, ParameterPlan]:
        """How every parameter lies where a plan is given, whatever call comes first."""
        shapes = {name: parameter.shape for name, parameter in self.store.parameters.items()}
        require_lies(plan, shapes, self.request.axes)
        require_stages(self.request, plan)
        self.first = plan
        return self._layouts_at_rest(plan)

    def _plan_at_rest(self, call: Call) -> dict[str, ParameterPlan]:
        """How every parameter lies where a call comes first that does not train: as for the graph that trains, on a
        batch that divides, or, of a model that has none with other inputs than the call's, on that of the call."""
        trained = self._round_batch(call)
        if self.is_open:
            captured = self._choose_mesh(trained)
        else:
            try:
                captured = self._capture(trained, training=True)
            except CaptureError:
                if trained.batch == call.batch:
                    raise
                trained, captured = call, self._capture(call, training=True)
        return self._layouts_at_rest(self._plan(captured, trained, None))

    def _plan_larger(self, captured: Captured, call: Call, error: PlanError) -> dict[str, ParameterPlan]:
        """How every parameter lies where a preset or a pipeline cannot cut the batch of a call that comes first, for
        which there is an error: as for the next larger batch that it can."""
        even = self._round_batch(call, captured.batch_dims)
        if even.specs == call.specs or self.request.plan == "auto" and not self.request.stages:
            raise error
        try:
            larger = self._capture(even)
        except CaptureError:  # the model has no other
            raise error from None
        return self._layouts_at_rest(self._plan(larger, even, None))

    def _round_batch(self, call: Call, dims: Mapping[int, int] | None = None) -> Call:
        """The same call with a batch that can be cut over all ranks and into microbatches, as one that trains has.

        Args:
            dims: which dim is the batch, where it is not the first one (see ``Captured.batch_dims``).
        """
        pipeline = self.request.pipeline
        count = self.request.microbatches if pipeline is None else pipeline.microbatches
        pieces = self.mesh.size() * (count or 1)
        specs = list(call.specs)
        places = dims or {i: 0 for i, s in enumerate(specs) if isinstance(s, InputSpec) and s.batch}
        before = next((specs[leaf].shape[dim] for leaf, dim in (dims or {}).items()), call.batch)
        rows = -(-before // pieces) * pieces
        for leaf, dim in places.items():
            shape = list(specs[leaf].shape)
            shape[dim] = shape[dim] // before * rows
            specs[leaf] = replace(specs[leaf], shape=tuple(shape))
        return replace(call, specs=tuple(specs), batch=call.batch if dims else rows)

    def _choose_mesh(self, call: Call) -> Captured:
        """Chooses the mesh on the training graph, all ranks together; the graph."""
        request, mesh = self.request, self.mesh
        captured = self._capture(call, training=None if call.is_training else True)
        unable = self.settings.unable or _why_not_staged(captured)
        search = MeshSearch(request, captured, call, mesh.size(), unable)
        with self._progress.phase("mesh"):
            self.choice, self.is_open = self._choice(search), False
        axes = self.choice.mesh
        if axes != request.axes:
            mesh = make_mesh(mesh.device_type, axes)
            staged = axes[0][0] == PIPELINE_AXIS
            inner = inner_mesh(mesh, PIPELINE_AXIS) if staged else mesh
            self.store.move(inner, bind(inner, mesh), whole_group_name(bind(mesh)) if staged else None)
        self._lie_on(mesh, request)
        return captured

    def _choice(self, search: MeshSearch) -> MeshChoice:
        """What a search chooses, or has chosen before, where the first rank's cache knows."""
        cache, agreement, key = self.settings.cache, self.agreement, None
        if agreement.is_first:
            key = cache.key(search.request, search.captured, search.call, UNSETTLED, search.devices, search.refusal)
        text = agreement.of_first(cache.get(key, lambda text: from_json(MeshChoice, text, 1) and text) or "")
        if text:
            return from_json(MeshChoice, text, 1)
        choice = search.choose(agreement.share)
        cache.put(key, to_json(choice, 1))
        return choice

    def _capture(self, call: Call, training: bool | None = None) -> Captured:
        with self._progress.phase("capture"):
            with self.agreement.together():
                self._require_same_names()
                captured = self.planner.capture(call, training=training)
            if not self._sorts_calls and not self.agreement.is_same_text(str(captured.graph)):
                self._sorts_calls = self.planner.sorts_calls = True
                captured = sort_calls(captured)
            if self._sorts_calls:
                self.agreement.require_same_text("the ranks have different programs:", str(captured.graph), _SAME)
            return captured

    def _require_same_names(self) -> None:
        """Raises where a module that came to another place has taken a parameter there, which is known by its name."""
        parameters = self.store.parameters
        for name, parameter in self.model.named_parameters():
            if not self.settings.lent and parameters.get(name) is not parameter:
                raise CaptureError(
                    f"{name} was another parameter, or none, in compile()\n"
                    "What to change: change a plain model (with model.whole() as plain: new = copy.deepcopy(plain)), "
                    "then compile it, and make its optimizer."
                )

    def _plan(self, captured: Captured, call: Call, at_rest: dict[str, ParameterPlan] | None) -> Plan:
        saved, first = self._saved_plan, self.first
        if self.request.stages and (why_not := _why_not_staged(captured)):
            raise PlanError(
                f"{why_not}\n"
                "What to change: add up in a registered buffer (self.tokens += mask.sum()), set the rest outside of "
                "forward, or use a mesh without 'pp'."
            )
        if saved is not None and call.trains and self._carries_out(saved, captured, call):
            plan = saved
        else:
            settled = Settled(at_rest)
            if first is not None:
                settled = Settled(at_rest, first.pipeline, first.recompute, first.offload_optimizer)
            with self._progress.phase("plan"):
                with self.agreement.together():
                    text = self.planner.search(captured, call, settled).to_json() if self.agreement.is_first else ""
                plan = Plan.from_json(self.agreement.of_first(text))
        prepare(self.request, captured, plan, call)
        self.first = first or plan
        return plan

    def _carries_out(self, plan: Plan, captured: Captured, call: Call) -> bool:
        """Whether a call that trains runs by the plan that was given.

        Raises:
            PlanError: where the first that the plan is about does not, but for sizes that do not divide.
        """
        try:
            prepare(self.request, captured.copy(), plan, call)
        except PlanError as error:
            if self._is_about(call) and not self._is_carried_out and not isinstance(error, UnevenError):
                raise
            LOGGER.info("a kind of call is planned anew, around parameters as they lie: %s", error)
            return False
        self._is_carried_out = True
        return True

    def _attach(self, captured: Captured, plan: Plan, call: Call, at_rest: dict[str, ParameterPlan]) -> Kind:
        """Builds the program, or every stage's, and attaches this rank's to the parameters, which then lie as
        ``at_rest`` says."""
        store, request, make_body = self.store, self.request, self.settings.make_body
        plan = replace(plan, work=workload_of(captured, call, request.profile))
        plan, built = self.planner.finish(captured, plan, call, store.prefix, self.owners)
        self._require_same_program(built, plan)
        if plan.pipeline is None:
            bare = replace(call, leaves=captured.state.read_of(call.leaves))  # a plan keeps no batch alive
            plan = plan.with_reasons(PlanAgain(self.planner, bare))
        if isinstance(built, LocalProgram):
            self._settle(at_rest)
            return Kind(Runner(built, store, self.model, make_body), plan)
        if call.trains and captured.weight.mixes:
            LOGGER.warning(TAKEN_FOR_GRANTED, captured.weight.mixes)
        owners = self.owners or find_owners(built, store.parameters)
        self.owners = owners if request.stages else {}
        self._settle(at_rest)
        runner = attach_stages(built, store, self.model, bind(self.mesh), owners, request.redistributor, make_body)
        runner.scaler = self.settings.scaler
        if self.first is not None and self.first.staging is not None:
            runner.usual = self.first.staging.microbatches
        if runner.scaler is not None and store.everyone is not None:
            agree_on_overflows(runner.scaler, store.everyone, runner.device)
        return Kind(runner, plan)

    def _require_same_program(self, program: LocalProgram | StagedProgram, plan: Plan) -> None:
        text = f"{program.text()}\n{plan.to_json()}"
        self.agreement.require_same_text("the ranks have different programs:", text, _SAME)

    # -- parameters at rest -----------------------------------------------------------------------------------------

    def _whole(self) -> ParameterPlan:
        return ParameterPlan(format_layout((Invariant,) * self.store.mesh.ndim))

    def _layouts_at_rest(self, plan: Plan) -> dict[str, ParameterPlan]:
        """How every parameter lies from now on; whole, where the plan does not meet it."""
        return {name: plan.parameters.get(name, self._whole()) for name in self.store.parameters}

    def _settle(self, at_rest: dict[str, ParameterPlan]) -> None:
        """Gives every parameter its layout at rest, in place, once; what an owner lends lies so already."""
        if self.at_rest is not None:
            return
        if not self.settings.lent:
            self._lay_out(at_rest)
        self.at_rest = at_rest  # not before: what failed is tried again at the next call
        for reference in self._alike:
            other = reference()
            if other is not None and other.at_rest is None:
                other._follow(self)
                other._lay_out(at_rest)

    def _lay_out(self, at_rest: dict[str, ParameterPlan]) -> None:
        """Gives parameters values, where they are on the meta device, and their layouts; says where states lie."""
        store = self.store
        store.offloads_states = self.first is not None and self.first.offload_optimizer
        layouts = {name: parse_layout(plan.at_rest) for name, plan in at_rest.items()}
        homes = dict.fromkeys(store.parameters, store.mesh)
        if self.owners:
            slices = other_slices(self.mesh, PIPELINE_AXIS, store.mesh)
            note_stages(self.mesh, slices)
            homes = {name: slices[self.owners[name]] for name in store.parameters}
        with aliases_kept(store.parameters):
            if any(_torch.dtensor.local_of(t).is_meta for t in [*store.parameters.values(), *self.model.buffers()]):
                materialize(self.model, layouts, self.mesh, whole_group(bind(self.mesh)), homes)
            for name, parameter in store.parameters.items():
                try:
                    lay_out(parameter, layouts[name], homes[name])
                except RuntimeError as error:
                    raise RuntimeError(f"{name} cannot be given its layout: {error}") from error
                if lies_elsewhere(parameter):
                    keep_without_gradient(parameter)
        store.note_layouts()


def _why_not_staged(captured: Captured) -> str:
    """What a call keeps that one stage makes of its rows; empty for nothing."""
    computed = computed_attributes(captured)
    return f"a call {shown_changes(computed)}, which a pipeline does not carry from stage to stage" if computed else ""


def mesh_of(plan: Plan, model: nn.Module) -> DeviceMesh:
    """The mesh that a plan was made for, over all ranks. Raises ValueError where there are not as many."""
    world, axes = count_ranks(), plan.whole_mesh
    needed = mesh_size(axes)
    if needed != world:
        raise ValueError(f"the plan is for the mesh {mesh_text(axes)} of {needed} ranks, the world has {world}")
    return make_mesh(device_of(model), axes)
