"""Running a rank's program without values: what it would send, save and compute, forward and backward.

A dry run is the runtime itself on meta tensors of the local sizes, behind a communicator that sends nothing but counts
and keeps time (``predict.communicator``).  Autograd differentiates the program as it does the real one, and the
runtime's buckets gather parameters and reduce gradients.  So which transposed collectives run, which buckets are
gathered again, what is kept and what overlaps is observed, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autoparallel import _torch
from autoparallel._torch.autograd import AskedFor
from autoparallel.comm.groups import COMMUNICATOR
from autoparallel.comm.traffic import Traffic
from autoparallel.decisions.prediction import PredictedSpan
from autoparallel.graph.layers import layer_of
from autoparallel.graph.sizes import Sizes
from autoparallel.hardware import Profile
from autoparallel.operators.selective_checkpoint import Keeping
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.placements import Layout, largest_piece, to_dtensor_placements
from autoparallel.placements.redistribution import Step
from autoparallel.plan import Plan
from autoparallel.predict.communicator import BACKWARD, FORWARD, GRADIENTS, UNSHARD, MeteredCommunicator
from autoparallel.predict.meter import Clock, Ledger, Meter
from autoparallel.predict.unseen import call_without_data, is_unseen, stand_in
from autoparallel.program.program import LocalProgram
from autoparallel.rules.calls import is_tensor
from autoparallel.runtime.gradients.backwards import BackwardPass, Grads, reached
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.gradients.travel import Gather, Tensors, Travel, cast, local_at_end
from autoparallel.runtime.programs.runner import Runner

ACTIVATIONS, GATHERED, WORKING = "activations", "gathered parameters", "working memory"
GRADIENT_BUFFERS = "gradients"
"""What memory is for; working memory is what the backward makes on its way."""


@dataclass
class DryRun:
    """What a dry run observed.

    Attributes:
        traffic: by phase.
        seconds: by phase; what overlaps is counted once (see [Note: two clocks] in ``predict.meter``).
        reducing: seconds in which the gradients would be reduced with nothing beside.
        inputs: bytes of the inputs, buffers and constants.
        peak: bytes alive at the worst moment beside parameters, inputs and optimizer states, by what they are for.
        history: seconds since the begin and these bytes, whenever they changed.
        most: the most of these bytes while each module ran in each phase.
        regathered: the numbers of the buckets that the backward gathers again.
        reached: the parameters that a gradient comes back to.
        spans: what the time is spent on.
    """

    traffic: dict[str, Traffic] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    reducing: float = 0.0
    inputs: int = 0
    peak: dict[str, int] = field(default_factory=dict)
    history: list[tuple[float, int]] = field(default_factory=list)
    most: dict[tuple[str, str], int] = field(default_factory=dict)
    regathered: list[int] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    spans: list[PredictedSpan] = field(default_factory=list)


def dry_run(program: LocalProgram, plan: Plan, profile: Profile, roots: Collection[int] | None = None) -> DryRun:
    """Runs the program's forward and backward, on the sizes of the call that was planned for.

    Args:
        roots: where the program is a stage of a pipeline, the numbers of the outputs that its backward begins with;
            its gradients are added up then, not reduced.
    """
    clock = Clock(profile.overlap)
    communicator, ledger = MeteredCommunicator(plan, profile, clock), Ledger(clock)
    meter = Meter(profile, plan.axis_sizes, clock, ledger, communicator.begin)
    around = {region: region.around for region in program.regions.values()}
    try:
        with COMMUNICATOR.using(communicator), _plain_autograd():
            rank = _DryRank(program, plan, communicator, meter, roots)
            meter.layered = _has_layers(program.body)
            with meter:
                rank.step()
    finally:
        for region, function in around.items():  # of the runner that the program has got meanwhile
            region.around = function
    return DryRun(
        {phase: counter.result() for phase, counter in communicator.counters.items()},
        communicator.seconds,
        communicator.reducing,
        rank.inputs,
        ledger.peak,
        list(ledger.history),  # the ledger goes on when Python frees what the run has left, sooner or later
        dict(ledger.most),
        rank.runner.regathered,
        rank.store.reached,
        clock.spans,
    )


@contextmanager
def _plain_autograd() -> Iterator[None]:
    """Inside, autograd is as in training, whatever it is where a prediction is asked for: in an evaluation there are no
    gradients, and hooks on saved tensors and ``set_detect_anomaly`` read values, which there are none of."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),
        _torch.autograd.saved_as_they_are(),
    ):
        yield


class _DryRank:
    """One rank's model on meta tensors, and a step of its training."""

    def __init__(
        self,
        program: LocalProgram,
        plan: Plan,
        communicator: MeteredCommunicator,
        meter: Meter,
        roots: Collection[int] | None,
    ) -> None:
        self.program, self.plan, self.roots = program, plan, roots
        self.communicator, self.ledger, self.clock = communicator, meter.ledger, meter.clock
        self.sizes = Sizes(program.captured.actual)
        self.inputs = 0
        self.values = self.placeholders()
        self.store = _DryStore(plan, program, communicator, meter, reduces=roots is None)
        with self.ledger.holding(""):  # memory that is there anyway
            self.ledger.add([*self.values.values(), *map(_torch.dtensor.local_of, self.store.parameters.values())])
        self.runner = _DryRunner(program, self.store, nn.Module(), lambda _: self.run_body)
        self.runner.fixed = {name: self.values[name] for name in program.captured.constants}

    def step(self) -> None:
        """Forward, then backward from every output that a gradient can come from."""
        results = self.forward()
        flowing = [
            r
            for i, r in enumerate(results)
            if isinstance(r, torch.Tensor) and r.requires_grad and (self.roots is None or i in self.roots)
        ]
        self.communicator.begin_phase(BACKWARD)
        with self.ledger.holding(WORKING):
            if flowing:
                # A training loop holds what the model returned while it differentiates the loss.
                torch.autograd.backward(flowing, [torch.ones_like(r) for r in flowing])
        self.communicator.begin_phase(GRADIENTS)

    def forward(self) -> Sequence[Any]:
        """What the model returns."""
        captured = self.program.captured
        held: dict[str, torch.Tensor] = {}
        self.communicator.phase = UNSHARD
        for bucket in self.runner.hoisted:
            if bucket.bucket.gather == "per_step":
                held.update(zip(bucket.placeholders, bucket(), strict=True))
        self.communicator.begin_phase(FORWARD)
        leaves = [None if name is None else self.values[name] for name in captured.inputs]
        buffers = {path: self.values[name] for name, path in captured.buffers.items()}
        with self.ledger.holding(ACTIVATIONS):
            return self.runner(leaves, buffers, held)[len(captured.mutated) :]

    def placeholders(self) -> dict[str, Any]:
        """Buffers, constants and inputs, by placeholder."""
        captured = self.program.captured
        inputs = {name for name in captured.inputs if name is not None}
        names = {*inputs, *captured.buffers, *captured.constants}
        numbers = {captured.inputs[i] for i in captured.numbers}
        values: dict[str, Any] = {}
        for node in self.program.body.graph.nodes:
            if node.op == "placeholder" and node.name in names:
                # A number is read into Python, which a tensor without a value does not allow.
                dtype = node.meta["val"].dtype if node.name in numbers else None
                values[node.name] = value = self.local(node) if dtype is None else torch.ones((), dtype=dtype)
                self.inputs += _torch.tensors.bytes_in(value)
                if node.name in inputs and node.meta["differentiable"]:
                    value.requires_grad_()
        return values

    def local(self, node: fx.Node) -> Any:
        """A rank's part of a node's value."""
        if not is_tensor(node):
            return self.sizes(node.meta["val"])
        return _empty(self.sizes.shape(node), node.meta["placements"], node.meta["val"].dtype, self.plan)

    def run_body(self, *arguments: Any) -> Any:
        """Runs the program's body on meta tensors."""
        return _Body(self, self.program.body).run(*arguments)


class _DryRunner(Runner):
    """The runner of a dry run, which leaves the program as it is: an interpreter calls the modules by name."""

    def _complete_graphs(self) -> None:
        pass


class _DryStore(GradientStore):
    """The gradients of a dry run; knows what is sent once a step, and what memory is for.

    Args:
        reduces: whether gradients are reduced; where a pipeline adds them up, only whose they are is noted.

    Attributes:
        reached: the parameters that a gradient has come back to.
    """

    def __init__(
        self, plan: Plan, program: LocalProgram, communicator: MeteredCommunicator, meter: Meter, *, reduces: bool
    ) -> None:
        self.communicator, self.meter, self.reduces = communicator, meter, reduces
        self._scatters = not reduces and plan.pipeline is None
        self._adds_up = plan.microbatches > 1
        self.reached: list[str] = []
        self._each: int | None = None  # how many steps of the gradients that are reduced now every microbatch takes
        ranks = torch.arange(communicator.size("+".join(plan.axis_names)), device="cpu").view(plan.axis_sizes)
        mesh = _torch.dtensor.mesh_without_groups("cpu", ranks, plan.axis_names, 0)
        parameters: dict[str, Any] = {}
        for chain in program.chains.values():
            local = _empty(chain.shape, chain.at_rest, chain.rest_dtype, plan)
            value = _torch.dtensor.from_part(local, mesh, to_dtensor_placements(chain.at_rest), chain.shape)
            parameters[chain.name] = value.requires_grad_(chain.trainable)
        super().__init__(mesh, "mesh", parameters)

    def gather(self, chains: Sequence[ParameterChain], values: Tensors) -> Gather:
        """As on a real rank."""
        with self.meter.copying(GATHERED):
            return super().gather(chains, values)

    def receive(
        self, chains: Sequence[ParameterChain], grads: Grads, asked_for: AskedFor, shared: Collection[int]
    ) -> list[torch.Tensor | None]:
        """As on a real rank; where gradients are added up, the sums are counted apart (see ``predict.predict``)."""
        rows = reached(chains, grads, asked_for.inputs)
        self.reached += [chain.name for chain, _ in rows]
        if self.reduces:
            if self._adds_up:  # to the sums of the microbatches before, which takes what a copy does
                shared = {id(grad) for row in grads for grad in row}
            return super().receive(chains, grads, asked_for, shared)
        if rows and self._scatters:
            sums = cast(self.sum_uses(rows), chains[0].reduce_dtype)
            self._each = len(rows[0][0].each)
            with self.meter.ledger.holding(GRADIENT_BUFFERS):
                self.passes.running().expect(self.start(sums, [chain.each for chain, _ in rows]), _add_up)
            self._each = None
        return [None] * len(chains)

    def receive_sums(
        self, chains: Sequence[ParameterChain], values: Tensors, shared: Collection[int] = (), *, owned: bool = False
    ) -> None:
        """As on a real rank."""
        self._each = len(chains[0].each)
        with self.meter.ledger.holding(GRADIENT_BUFFERS):
            super().receive_sums(chains, values, shared, owned=owned)
        self._each = None

    def start(self, tensors: Tensors, paths: Sequence[Sequence[Step]], *, owned: bool = False) -> Travel:
        """As on a real rank; every step counts in its phase."""
        kind, each = (GATHERED, len(paths[0])) if self._each is None else (GRADIENT_BUFFERS, self._each)
        begins, steps = [], list(zip(*paths, strict=True))
        for i, step in enumerate(steps):
            phase = self.communicator.phase if i < each else GRADIENTS
            begins.append(partial(self._begin, kind, phase, partial(self._start_step, step, owned and not i)))
        return Travel(tensors, begins, local_at_end(steps))

    def along(self, value: torch.Tensor, shape: tuple[int, ...], src: Layout, dst: Layout) -> torch.Tensor:
        """As on a real rank."""
        with self.meter.copying(self.meter.ledger.kind):
            return super().along(value, shape, src, dst)

    def _begin(
        self, kind: str, phase: str, start: Callable[[Tensors], Callable[[], Tensors]], tensors: Tensors
    ) -> Callable[[], Tensors]:
        with self.meter.copying(kind), self.communicator.during(phase):
            wait = start(tensors)

        def finish() -> Tensors:
            with self.meter.copying(kind):
                return wait()

        return finish

    def _finish_backward(self, ended: BackwardPass) -> None:
        if self.reduces:
            self.communicator.begin_phase(GRADIENTS)
        with self.meter.ledger.holding(GRADIENT_BUFFERS):
            super()._finish_backward(ended)


def _add_up(gradients: Tensors) -> None:
    """Takes as long as adding gradients to those of the microbatches before."""
    for gradient in gradients:
        gradient.add_(gradient)


class _Body(fx.Interpreter):
    """Runs the body, or one of its regions, on meta tensors."""

    def __init__(self, rank: _DryRank, program: fx.GraphModule) -> None:
        super().__init__(program)
        self.extra_traceback = False  # the second run of a region ends in an exception, when it has made enough
        self.rank = rank

    def run_node(self, n: fx.Node) -> Any:
        if is_unseen(n):
            return stand_in(n, *self.fetch_args_kwargs_from_env(n), partial(self.shape_of, n))
        module = self.rank.clock.module = n.meta.get("module", self.rank.clock.module)
        # As an interpreter does, which also notes which node runs, for what is traced beneath: nothing is.
        result = getattr(self, n.op)(n.target, *self.fetch_args_kwargs_from_env(n))
        if n.op == "call_function":
            self.rank.clock.layers[module] = layer_of(n)
            _torch.autograd.mark_module(result, module)
        return result

    def shape_of(self, node: fx.Node, traced: torch.Tensor) -> tuple[int, ...]:
        """A rank's shape of one of the results of a node."""
        shape = tuple(self.rank.sizes(size) for size in traced.shape)
        if not is_tensor(node):  # several results are whole
            return shape
        return tuple(largest_piece(shape, node.meta["placements"], self.rank.plan.axis_sizes))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in self.rank.runner.modules:
            return self.rank.runner.modules[target]()
        region = self.rank.program.regions[target]
        meter = self.rank.store.meter
        before, meter.layered = meter.layered, _has_layers(region.program)
        try:
            # An interpreter for each run: one that is stopped in the middle would hold what it has made.
            return region.run(lambda *inputs: _Body(self.rank, region.program).run(*inputs), *args)
        finally:
            meter.layered = before

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, Keeping):
            return target.call(lambda *a, **k: self.call_function(target.target, a, k), args, kwargs)
        return call_without_data(target, args, kwargs, self.rank.store.meter.profile)


def _has_layers(program: fx.GraphModule) -> bool:
    """Whether some of a graph's calls are a layer's; in its order, as they are mostly among the first."""
    return any(layer_of(node) for node in program.graph.nodes if node.op == "call_function")


def _empty(shape: Sequence[int], layout: Layout, dtype: torch.dtype, plan: Plan) -> torch.Tensor:
    """A rank's part of a tensor that lies as ``layout`` says."""
    return torch.empty(largest_piece(shape, layout, plan.axis_sizes), dtype=dtype, device="meta")
