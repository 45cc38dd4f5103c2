"""``torch.compile(model, backend="autoparallel", options={"mesh": mesh})``: the second face.

Dynamo hands a backend a graph of torch calls whose inputs are the model's parameters and buffers beside the call's
own inputs.  It goes the same way as a model given to :func:`autoparallel.compile`: capture, search, passes.  The
caller owns the parameters here: plain tensors, whole on every rank, at rest always Invariant.  So a backward returns
complete gradients, equal on every rank, reduced in buckets; there is no ``no_sync()``, and outputs are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.api import BACKENDS
from autoparallel.capture.capture import capture
from autoparallel.comm.groups import bind
from autoparallel.comm.world import usable_mesh
from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.dynamo import GraphModel, Piece, find_graph_break
from autoparallel.graph.calls import fits
from autoparallel.graph.captured import Captured, CaptureError, InputSpec, leaf_value
from autoparallel.hardware import profile_for
from autoparallel.operators import set_random_state
from autoparallel.passes.bucket_collectives import Bucket
from autoparallel.placements import Invariant, Layout, format_layout
from autoparallel.placements.redistribution import Redistributor
from autoparallel.plan import Plan
from autoparallel.planner.fits import require_fits
from autoparallel.planner.layouts import cheapest
from autoparallel.planner.presets import PRESETS, constraints_for
from autoparallel.planner.space import SearchSpace
from autoparallel.program import LocalProgram, build_program, require_divides, wanted_outputs
from autoparallel.rules import rule_for
from autoparallel.rules.calls import tensor_operands
from autoparallel.runtime.agreement import Agreement, RankMismatchError, digest, tensor_digest
from autoparallel.runtime.compiled import compile_body
from autoparallel.runtime.exchange import CHECKED_CALLS
from autoparallel.runtime.gradients import GradientStore
from autoparallel.runtime.randomness import STREAM, Place, pack, unpack

OPTIONS = ("mesh", "plan", "memory_limit", "backend")


class GraphBreakError(CaptureError):
    """Dynamo cannot trace the model as one graph; the message names the line."""


@dataclass(frozen=True)
class Options:
    """The options of ``torch.compile(model, backend="autoparallel", options={...})``.

    Attributes:
        mesh: the mesh to train on; required.
        plan: "auto", a preset, or a :class:`Plan` whose parameters are whole at rest.
        memory_limit: bytes per device, as for :func:`autoparallel.compile`.
        backend: "eager" runs the rewritten program in plain autograd, "inductor" compiles it.
    """

    mesh: DeviceMesh
    plan: str | Plan = "auto"
    memory_limit: float | None = None
    backend: str = "eager"

    @staticmethod
    def parse(options: Mapping[str, Any] | None, mode: str | None) -> Options:
        """Checks what was passed to ``torch.compile``.

        Raises:
            ValueError: naming the option and what to pass.
        """
        given = dict(options or {})
        if mode is not None:
            raise ValueError(f"torch.compile(mode={mode!r}) means nothing to the backend 'autoparallel': leave it out")
        if not isinstance(given.get("mesh"), DeviceMesh):
            raise ValueError(
                "the backend 'autoparallel' needs to know the mesh: torch.compile(model, backend='autoparallel', "
                "options={'mesh': mesh}), where mesh = init_device_mesh(...)"
            )
        unknown = [name for name in given if name not in OPTIONS]
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}: expected one of {', '.join(OPTIONS)}")
        parsed = Options(**given)
        if isinstance(parsed.plan, str) and parsed.plan not in PRESETS:
            raise ValueError(f"unknown plan {parsed.plan!r}: expected one of {', '.join(PRESETS)}, or a Plan")
        if parsed.plan == "fsdp":
            raise ValueError(
                "plan='fsdp' shards the parameters, which torch.compile leaves whole with their owner: use "
                "autoparallel.compile(model, mesh, plan='fsdp'), or another plan here"
            )
        if parsed.backend not in BACKENDS:
            raise ValueError(f"unknown backend {parsed.backend!r}: expected one of {', '.join(BACKENDS)}")
        return parsed


def autoparallel(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend; called by Dynamo with each new graph.

    Raises:
        GraphBreakError: on every rank, when the graph is only a piece of the model.
        RankMismatchError: on every rank, when the ranks have different graphs or parameters.
    """
    parsed = Options.parse(options, mode)
    session = _session(usable_mesh(parsed.mesh, nn.Module()))
    piece = Piece(module, example_inputs)
    broken = find_graph_break(module)
    session.require_same_graph(piece, parsed, broken)
    if broken is not None:
        raise GraphBreakError(broken)
    session.require_same_parameters(piece, example_inputs)
    fragment = Fragment(piece, parsed, session)
    with _torch.outside_of_dynamo():
        fragment.prepare(example_inputs)
    return fragment


# -- what the calls on one mesh share -------------------------------------------------------------------------------


class _Session:
    """What all graphs on one mesh share."""

    def __init__(self, mesh: DeviceMesh, prefix: str) -> None:
        self.mesh, self.prefix = mesh, prefix
        self.agreement = Agreement(mesh)
        self.axes = tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        self.profile = profile_for(mesh.device_type)
        sizes = tuple(mesh.shape)
        self.redistributor = Redistributor(
            sizes, lambda kind, axes, size: self.profile.step_seconds(sizes, kind, axes, size)
        )
        self.whole: Layout = (Invariant,) * mesh.ndim

    def require_same_graph(self, piece: Piece, options: Options, broken: str | None) -> None:
        """All ranks compile the same graph with the same options, or all raise; the first word of a compilation."""
        if self.agreement.alone:
            return
        plan = options.plan.to_json() if isinstance(options.plan, Plan) else options.plan
        text = piece.describe(())
        mine = digest("compile", text, plan, options.memory_limit, options.backend, broken)
        self.meet(mine + bytes(32), lambda: broken or f"compiles a graph of {len(text)} nodes, plan {plan[:40]!r}")

    def meet(self, mine: bytes, describe: Callable[[], str]) -> torch.Tensor:
        """The table of every rank's 64 bytes, and of its place in the stream of random numbers; raises on all of them
        when the first 32 bytes differ.

        Compilations and calls open alike, so that a rank that compiles meets one that calls in one collective.
        """
        table = self.agreement.table(mine + pack(STREAM.place()))
        if not bool((table[:, :32] == table[0, :32]).all()):
            self.agreement.fail("the ranks call or compile the model differently:", describe())
        return table

    def require_same_parameters(self, piece: Piece, example_inputs: Sequence[Any]) -> None:
        """The caller owns the parameters, so it is for the caller to begin with the same on every rank."""
        if self.agreement.alone:
            return
        states = [(s.name, tensor_digest(example_inputs[i])) for i, s in piece.states.items()]
        table = self.agreement.table(b"".join(value[:8] for _, value in states) or bytes(8))
        for n, (name, _) in enumerate(states):
            column = table[:, 8 * n : 8 * n + 8]
            if not bool((column == column[0]).all()):
                raise RankMismatchError(
                    f"{name} has different values on different ranks. torch.compile leaves the parameters with their "
                    "owner, so give every rank the same ones: seed alike before the model is made, load the same "
                    "state dict, or broadcast the first rank's (autoparallel.compile does that by itself)"
                )


_SESSIONS: dict[str, _Session] = {}


def _session(mesh: DeviceMesh) -> _Session:
    prefix = bind(mesh)
    known = _SESSIONS.get(prefix)
    if known is None or known.mesh is not mesh and known.mesh != mesh:
        known = _SESSIONS[prefix] = _Session(mesh, prefix)
    return known


# -- running --------------------------------------------------------------------------------------------------------


class Fragment:
    """What Dynamo calls in place of its graph: the program of one rank, one for each kind of call."""

    def __init__(self, piece: Piece, options: Options, session: _Session) -> None:
        self.piece, self.options, self.session = piece, options, session
        self.model = GraphModel(piece)
        self.store = GradientStore(session.mesh, session.prefix, {})
        self.positions = {state.name: i for i, state in piece.states.items()}
        self.calls = 0
        self._runners: dict[Any, _Runner] = {}

    def prepare(self, arguments: Sequence[Any]) -> None:
        """Captures and plans for a call like this one."""
        specs, batch = self._describe(arguments)
        self._runner(specs, batch)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        specs, batch = self._describe(arguments)
        place = self._require_same_call(specs, arguments)
        runner = self._runner(specs, batch)
        require_divides(runner.program, specs, batch)
        self.calls += 1
        if runner.program.captured.draws:
            set_random_state(STREAM.draw(place))
        return runner(arguments)

    def _describe(self, arguments: Sequence[Any]) -> tuple[list[Any], int]:
        """The inputs as capture wants them; the batch is the first dim of those where Dynamo leaves it open."""
        dynamic = [arguments[i].shape[0] for i in self.piece.inputs if i in self.piece.dynamic]
        batch = int(dynamic[0]) if dynamic else 0
        specs: list[Any] = []
        for i in self.piece.inputs:
            x = arguments[i]
            if not isinstance(x, torch.Tensor):
                specs.append(int(x) if isinstance(x, torch.SymInt) else x)
                continue
            shape = tuple(int(s) for s in x.shape)
            multiple = shape[0] // batch if i in self.piece.dynamic and batch and shape[0] % batch == 0 else 0
            specs.append(InputSpec(shape, x.dtype, x.requires_grad, multiple))
        return specs, batch

    def _require_same_call(self, specs: Sequence[Any], arguments: Sequence[Any]) -> Place:
        """The place of the first rank in its stream of random numbers, once all ranks have shown the same call."""
        if self.session.agreement.alone:
            return STREAM.place()
        mine = digest("call", repr(specs), torch.is_grad_enabled(), self.calls, len(self._runners))
        tensors = [arguments[i] for i in self.piece.inputs if isinstance(arguments[i], torch.Tensor)]
        values = digest(*map(tensor_digest, tensors)) if self.calls < CHECKED_CALLS else bytes(32)
        shown = [f"{list(s.shape)} {s.dtype}" if isinstance(s, InputSpec) else repr(s) for s in specs]
        table = self.session.meet(mine + values, lambda: f"calls with inputs {', '.join(shown)}")
        if not bool((table[:, :64] == table[0, :64]).all()):
            raise RankMismatchError(
                "the ranks pass different values as inputs. An input is the global batch, the same on every rank "
                "(unlike DistributedDataParallel, which takes each rank's own rows): pass the same batch everywhere"
            )
        return unpack(table[0, 64:80])

    def _runner(self, specs: Sequence[Any], batch: int) -> _Runner:
        key = repr([
            (s.batch, s.shape[1:] if s.batch else s.shape, s.dtype, s.requires_grad) if isinstance(s, InputSpec) else s
            for s in specs
        ])  # fmt: skip
        runner = self._runners.get(key)
        if runner is not None and not fits(runner.program.captured, specs):
            key = f"{key} {batch}"
            runner = self._runners.get(key)
        if runner is None:
            runner = self._build(specs, batch)
            self._runners[key] = runner
        return runner

    def _build(self, specs: Sequence[Any], batch: int) -> _Runner:
        session, agreement = self.session, self.session.agreement
        captured = agreement.together(lambda: self._capture(specs, batch))
        outputs = wanted_outputs(captured, "gather", session.mesh.ndim)
        plan = self._plan(captured, outputs)
        program = build_program(
            captured,
            plan,
            prefix=session.prefix,
            redistributor=session.redistributor,
            outputs=outputs,
            inputs={},
            device=torch.device(session.mesh.device_type),
            hoist_all=True,
        )
        text = program.text()
        agreement.require_same(
            "the ranks have different programs:", digest(text, plan.to_json()), lambda: f"{len(text)} characters"
        )
        return _Runner(self, program, plan)

    def _capture(self, specs: Sequence[Any], batch: int) -> Captured:
        in_spec = pytree.tree_structure((tuple(range(len(specs))), {}))
        captured = capture(
            self.model,
            specs,
            in_spec,
            loss_fn=None,
            least_batch=2 * self.session.mesh.size() if batch else 0,
            batch=batch,
            detach_beside_loss=False,
        )
        if not captured.actual:
            mark_batch(captured)
        return captured

    def _plan(self, captured: Captured, outputs: Sequence[Layout | None]) -> Plan:
        session, requested = self.session, self.options.plan
        if isinstance(requested, Plan):
            require_fits(requested, captured.graph, session.axes)
            sharded = [n for n in requested.parameters if requested.at_rest(n) != session.whole]
            if sharded:
                raise PlanError(
                    f"the plan shards {sharded[0]} at rest, but torch.compile leaves parameters whole with their "
                    "owner: use autoparallel.compile(model, mesh, plan=plan)"
                )
            return requested
        whole = ParameterPlan(format_layout(session.whole))

        def plan() -> str:
            space = SearchSpace(
                captured,
                session.axes,
                session.profile,
                constraints_for(requested, [n for n, _ in session.axes]),
                session.redistributor,
                outputs,
                pinned={name: whole for name in captured.parameters.values()},
            )
            return cheapest(space, requested, self.options.memory_limit).to_json()

        return Plan.from_json(session.agreement.from_first(plan))


def mark_batch(captured: Captured) -> None:
    """Notes on every node which factors run over the batch, where the trace has fixed the batch's size.

    The first dim of the first input, and of those as long, is the batch; it is followed from factor to factor.
    """
    nodes = {n.name: n for n in captured.graph.nodes if n.op == "placeholder"}
    inputs = [nodes[name] for name in captured.inputs if name is not None and nodes[name].meta["val"].ndim]
    rows = inputs[0].meta["val"].shape[0] if inputs else 0
    batched = {n: {0} for n in inputs if rows and n.meta["val"].shape[0] % rows == 0}
    for node in captured.graph.nodes:
        rule = rule_for(node)
        if rule is None:
            continue
        found: dict[str, None] = {}
        for operand, dims in zip(tensor_operands(node), rule.operands, strict=True):
            found |= {dims[d][0]: None for d in batched.get(operand, ()) if dims[d]}
        if found:
            node.meta["batch_factors"] = tuple(found)
            batched[node] = {d for d, dim in enumerate(rule.result) if dim and dim[0] in found}


class _Runner:
    """A program whose parameters come with each call."""

    def __init__(self, fragment: Fragment, program: LocalProgram, plan: Plan) -> None:
        self.fragment, self.program, self.plan = fragment, program, plan
        captured = program.captured
        self.positions = {node: fragment.positions[name] for node, name in captured.buffers.items()}
        for node, position in zip(captured.inputs, fragment.piece.inputs, strict=True):
            if node is not None:
                self.positions[node] = position
        self.mutated = [fragment.positions[name] for name in captured.mutated_buffers]
        self.order = [n.name for n in program.body.graph.nodes if n.op == "placeholder"]
        self.body: Callable[..., Any] = program.body
        if fragment.options.backend == "inductor":
            self.body = compile_body(program)

    def __call__(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        values: dict[str, Any] = {**self.program.captured.constants}
        values |= {node: arguments[position] for node, position in self.positions.items()}
        for bucket in self.program.buckets:
            parameters = [arguments[self.fragment.positions[chain.name]] for chain in bucket.chains]
            results = iter(_Unshard.apply(self.fragment.store, bucket, *parameters))
            for chain in bucket.chains:
                values.update(zip(chain.placeholders, results, strict=False))
        results = self.body(*(values[name] for name in self.order))
        count = len(self.mutated)
        with torch.no_grad():
            for position, value in zip(self.mutated, results[:count], strict=True):
                arguments[position].copy_(value)
        outputs: list[Any] = list(results)
        for i in range(count, len(outputs)):
            if outputs[i].requires_grad:
                outputs[i] = _Output.apply(outputs[i])
        return tuple(leaf_value(leaf, outputs, {}) for leaf in self.program.captured.outputs)


class _Unshard(torch.autograd.Function):
    """The boundary between whole parameters and their uses: cuts forward, reduces a bucket's gradients backward."""

    @staticmethod
    def forward(ctx: Any, store: GradientStore, bucket: Bucket, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.store, ctx.bucket = store, bucket
        ctx.set_materialize_grads(False)
        chains = bucket.chains
        values = [p.detach() for p in parameters]
        started = [store.start(values, [c.paths[use] for c in chains]) for use in range(len(chains[0].uses))]
        columns = [finish() for finish in started]
        return tuple(column[i].view_as(column[i]) for i in range(len(chains)) for column in columns)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        _refuse_second_derivative()
        store: GradientStore = ctx.store
        chains = ctx.bucket.chains
        uses = len(chains[0].uses)
        rows = [list(grads[i * uses : (i + 1) * uses]) for i in range(len(chains))]
        reached = [i for i, row in enumerate(rows) if any(g is not None for g in row)]
        totals = [store.sum_uses(chains[i], rows[i]) for i in reached]
        finished = store.start(totals, [chains[i].sync for i in reached])() if reached else []
        complete = dict(zip(reached, finished, strict=True))
        return (None, None, *(complete.get(i) for i in range(len(chains))))


class _Output(torch.autograd.Function):
    """The boundary between the program and what the caller does with one of its outputs."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        _refuse_second_derivative()
        return grads[0]


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "backward(create_graph=True) through a model compiled by autoparallel is not supported: a second "
            "derivative would be taken of one rank's part only. Compute it on the plain model."
        )


__all__ = ["Fragment", "GraphBreakError", "Options", "autoparallel", "mark_batch"]
