"""``torch.compile(model, backend="autoparallel", options={"mesh": mesh})``: the second face.

Dynamo hands a backend a graph of torch calls whose inputs are the model's parameters and buffers beside the call's
own inputs.  As a model whose parameters are given with each call it goes the way of a model that is given to
:func:`autoparallel.compile`: the same compiler, the same runner.  The caller owns the parameters here: plain tensors,
whole on every rank, at rest always Invariant.  So a backward returns complete gradients, equal on every rank, reduced
in buckets; there is no ``no_sync()``, and outputs are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.api import require_options
from autoparallel.comm.groups import bind
from autoparallel.comm.waiting import RankMismatchError
from autoparallel.comm.world import PIPELINE_AXIS, usable_mesh
from autoparallel.compiler import Compiler, Settings
from autoparallel.decisions.parameters import PlanError, matching
from autoparallel.dynamo import GraphModel, Piece, find_graph_break
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import InputSpec
from autoparallel.graph.errors import CaptureError
from autoparallel.hardware import Profile
from autoparallel.plan import Plan
from autoparallel.planner.request.pins import Pins, parse_pins
from autoparallel.planner.request.request import Request, limit_in_bytes, profile_of_run
from autoparallel.predict.optimizer import MakeOptimizer
from autoparallel.runtime.calls.call import run_call
from autoparallel.runtime.calls.exchange import Exchange
from autoparallel.runtime.calls.kinds import Kinds
from autoparallel.runtime.gradients.lent import LentParameters
from autoparallel.runtime.programs.compiled import make_body_of
from autoparallel.runtime.ranks.agreement import Agreement, agreement_of, digest, is_same, tensor_digest

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

USE_COMPILE = "use autoparallel.compile(model, mesh, ...)"

MEANINGLESS = {
    "loss_fn": "call the loss function on the model's output, inside or outside of what torch.compile is given",
    "example_inputs": "Dynamo traces at the first call: make one",
    "outputs": "outputs are whole here; for sharded ones " + USE_COMPILE,
    "clip_grad_norm": "gradients are whole here: torch.nn.utils.clip_grad_norm_(model.parameters(), ...) clips them",
    "pipeline": "a pipeline needs its parameters spread over the ranks: " + USE_COMPILE,
    "grad_scaler": "only a pipeline must know the scaler: leave it out",
}
"""Options of ``compile()`` that this face has no use for, and what to do instead."""


class GraphBreakError(CaptureError):
    """Dynamo cannot trace the model as one graph; the message names the line."""


@dataclass(frozen=True)
class Options:
    """The options of ``torch.compile(model, backend="autoparallel", options={...})``.

    Attributes:
        mesh: the mesh to train on; required.
        plan: "auto", a preset, or a :class:`Plan` whose parameters are whole at rest.
        pins, forbid, hardware, memory_limit, optimizer, precision, check_inputs: as :func:`autoparallel.compile` takes
            them; what is pinned of parameters must leave them whole.
        backend: as :func:`autoparallel.compile` takes it.
    """

    mesh: DeviceMesh
    plan: str | Plan = "auto"
    pins: Mapping[str, Any] | Plan | None = None
    forbid: Mapping[str, Any] | None = None
    hardware: str | Path | Profile | None = None
    memory_limit: float | str | None = None
    optimizer: MakeOptimizer | None = None
    backend: str = "eager"
    precision: MixedPrecisionPolicy | None = None
    check_inputs: int | None = None

    @staticmethod
    def parse(options: Mapping[str, Any] | None, mode: str | None) -> Options:
        """Checks what was passed to ``torch.compile``.

        Raises:
            TypeError, ValueError: naming the option and what to pass.
        """
        passed = dict(options or {})
        if mode is not None:
            raise ValueError(f"torch.compile(mode={mode!r}) means nothing to the backend 'autoparallel': leave it out")
        if not isinstance(passed.get("mesh"), DeviceMesh):
            raise ValueError(
                "the backend 'autoparallel' needs to know the mesh: torch.compile(model, backend='autoparallel', "
                "options={'mesh': mesh}), where mesh = init_device_mesh(...)"
            )
        names = [field.name for field in fields(Options)]
        for name in passed:
            if name in MEANINGLESS:
                raise ValueError(f"{name!r} means nothing to the backend 'autoparallel': {MEANINGLESS[name]}")
            if name not in names:
                raise ValueError(f"unknown option {name!r}: expected one of {', '.join(names)}")
        parsed = Options(**passed)
        require_options(
            parsed.plan, parsed.pins, parsed.forbid, "gather", parsed.backend, parsed.precision, parsed.check_inputs
        )
        if parsed.plan in ("fsdp", "hybrid", "fsdp_tensor_parallel"):
            raise ValueError(
                f"plan={parsed.plan!r} shards the parameters, which torch.compile leaves whole with their owner: use "
                f"autoparallel.compile(model, mesh, plan={parsed.plan!r}), or another plan here"
            )
        if isinstance(parsed.plan, Plan):
            sharded = [name for name, p in parsed.plan.parameters.items() if "S" in p.at_rest or p.gather == "per_use"]
            if sharded:
                raise PlanError(
                    f"the plan shards {sharded[0]} at rest, or gathers it for each use, but torch.compile leaves "
                    "parameters whole with their owner: use autoparallel.compile(model, mesh, plan=plan)"
                )
        return parsed

    def request(self, mesh: DeviceMesh) -> Request:
        """What is asked of the planner."""
        profile = profile_of_run(mesh.device_type, self.hardware, self.backend, self.optimizer)
        return Request(
            axes=tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
            profile=profile,
            plan=self.plan,
            pins=parse_pins(self.pins, self.forbid),
            memory_limit=limit_in_bytes(self.memory_limit, profile),
            outputs="gather",
            precision=self.precision,
            device=mesh.device_type,
            microbatches=1,
            offload_optimizer=False,  # it is the owner's
            compiled=self.backend != "eager",
        )


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
    mesh = usable_mesh(parsed.mesh, nn.Module())
    if PIPELINE_AXIS in (mesh.mesh_dim_names or ()):
        raise ValueError(f"the mesh has an axis {PIPELINE_AXIS!r}, but {MEANINGLESS['pipeline']}")
    request = parsed.request(mesh)
    piece = Piece(module, example_inputs)
    broken = find_graph_break(module)
    agreement = agreement_of(mesh)
    _require_same_graph(agreement, piece, request, parsed.backend, broken)
    if broken is not None:
        raise GraphBreakError(broken)
    _require_same_parameters(agreement, piece, example_inputs)
    _require_whole(request.pins, piece)
    fragment = Fragment(piece, mesh, request, agreement, parsed)
    with _torch.dynamo.outside_of_dynamo():
        fragment.prepare(example_inputs)
    return fragment


def _require_same_graph(agreement: Agreement, piece: Piece, request: Request, backend: str, broken: str | None) -> None:
    """All ranks compile the same graph with the same options, or all raise; the first word of a compilation."""
    text, plan = piece.describe(()), request.plan
    plan = plan.to_json() if isinstance(plan, Plan) else plan
    options = plan, request.pins.text(), request.profile, request.memory_limit, request.precision, backend
    digests = agreement.ask(digest("compile", text, *options, broken))()
    agreement.require_same(
        digests, "the ranks call or compile the model differently:",
        lambda: broken or f"compiles a graph of {len(text)} nodes, plan {plan[:40]!r}",
    )  # fmt: skip


def _require_same_parameters(agreement: Agreement, piece: Piece, example_inputs: Sequence[Any]) -> None:
    """The caller owns the parameters, so it is for the caller to begin with the same on every rank."""
    if agreement.alone:
        return
    states = [(s.name, tensor_digest(example_inputs[i])) for i, s in piece.states.items()]
    table = agreement.ask(b"".join(value[:8] for _, value in states) or bytes(8))()
    for n, (name, _) in enumerate(states):
        if not is_same(table[:, 8 * n : 8 * n + 8]):
            raise RankMismatchError(
                f"{name} has different values on different ranks. torch.compile leaves the parameters with their "
                "owner, so give every rank the same ones: seed alike before the model is made, load the same "
                "state dict, or broadcast the first rank's (autoparallel.compile does that by itself)"
            )


def _require_whole(pins: Pins, piece: Piece) -> None:
    """Refuses pins that do not leave a parameter whole."""
    names = {state.name: None for state in piece.states.values() if state.is_parameter}
    for pin in pins.pins:
        shards = any(text.startswith("S") for text in pin.placements)
        if shards != pin.forbid and matching(pin.pattern, names):
            raise PlanError(
                f"{pin}: torch.compile leaves parameters whole with their owner: pin the result of a module, or use "
                "autoparallel.compile(model, mesh, pins=...)"
            )


class Fragment:
    """What Dynamo calls in place of its graph: the program of one rank, one for each kind of call."""

    def __init__(
        self, piece: Piece, mesh: DeviceMesh, request: Request, agreement: Agreement, options: Options
    ) -> None:
        self.piece, self.model = piece, GraphModel(piece)
        self.store = LentParameters(mesh, bind(mesh), dict(self.model.named_parameters()))
        settings = Settings(self.model, agreement, self.store, make_body_of(options.backend), lent=True)
        exchange = Exchange(agreement, self.store, "torch.compile", mesh.device_type, options.check_inputs, False)
        self.kinds = Kinds(Compiler(settings, mesh, request), exchange)
        self._parameters = [(i, state.name) for i, state in piece.states.items() if state.is_parameter]
        self._in_spec = pytree.tree_structure((tuple(piece.inputs), {}))

    def prepare(self, arguments: Sequence[Any]) -> None:
        """Captures and plans for a call like this one."""
        self.kinds.of(lambda: (self._call_of(arguments), None))

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        parameters = {name: arguments[i] for i, name in self._parameters}
        with self.model.holding(arguments), self.store.holding(parameters):
            return tuple(run_call(self.kinds, lambda: (self._call_of(arguments), None), (), {}))

    def _call_of(self, arguments: Sequence[Any]) -> Call:
        """The call of the model; the batch is the first dim of the inputs where Dynamo leaves it open."""
        piece = self.piece
        dynamic = [arguments[i].shape[0] for i in piece.inputs if i in piece.dynamic]
        batch = int(dynamic[0]) if dynamic else 0
        leaves: list[Any] = []
        specs: list[Any] = []
        for i in piece.inputs:
            x = arguments[i]
            leaves.append(int(x) if isinstance(x, torch.SymInt) else x)
            if not isinstance(x, torch.Tensor):
                specs.append(leaves[-1])
                continue
            shape = tuple(int(s) for s in x.shape)
            multiple = shape[0] // batch if i in piece.dynamic and batch and shape[0] % batch == 0 else 0
            specs.append(InputSpec(shape, x.dtype, x.requires_grad, multiple))
        none = (None,) * len(leaves)
        gradients = torch.is_grad_enabled()
        return Call(tuple(leaves), tuple(specs), none, self._in_spec, batch, False, (), (), gradients)
