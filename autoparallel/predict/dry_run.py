"""Running a rank's program without values: what it would send, save and compute, forward and backward.

The program runs on meta tensors of the local sizes, and plain autograd differentiates it as it does the real one.  So
what depends on autograd is asked of autograd, not guessed: which transposed collectives run, which parameters some
operator saves for its backward (a bucket gathered per use is gathered again only then), which activations are kept.
Only the boundary is played: buckets, which on real ranks talk to process groups (``runtime.buckets``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.comm.groups import use_communicator
from autoparallel.comm.traffic import CountingMode, Traffic
from autoparallel.graph.sizes import Sizes
from autoparallel.hardware import Profile
from autoparallel.passes.bucket_collectives import Bucket
from autoparallel.passes.hoist_parameter_chains import ParameterChain, makes_tensor
from autoparallel.placements import largest_piece
from autoparallel.plan import Plan
from autoparallel.predict.attention import attention
from autoparallel.predict.meter import Clock, Ledger, Meter
from autoparallel.predict.transfers import BACKWARD, FORWARD, GRADIENTS, UNSHARD, Finish, Transfers
from autoparallel.predict.unseen import is_unseen, stand_in
from autoparallel.program import LocalProgram
from autoparallel.rules.calls import is_tensor

ACTIVATIONS, GATHERED, WORKING = "activations", "gathered parameters", "working memory"
GRADIENT_BUFFERS = "gradients"
"""What memory is for; working memory is what the backward makes on its way."""


@dataclass
class DryRun:
    """What a dry run found.

    Attributes:
        traffic: by phase.
        seconds: by phase; what overlaps is counted once (see [Note: two clocks] in ``predict.meter``).
        inputs: bytes of the inputs, buffers and constants.
        peak: bytes alive at the worst moment beside parameters, inputs and optimizer states, by what they are for.
        history: seconds since the begin and these bytes, whenever they changed.
        regathered: the numbers of the buckets that the backward gathers again.
        reached: the parameters that a gradient comes back to.
    """

    traffic: dict[str, Traffic] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    inputs: int = 0
    peak: dict[str, int] = field(default_factory=dict)
    history: list[tuple[float, int]] = field(default_factory=list)
    regathered: list[int] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)


def dry_run(program: LocalProgram, plan: Plan, profile: Profile, roots: Collection[int] | None = None) -> DryRun:
    """Runs the program's forward and backward, on the sizes of the call that was planned for.

    Args:
        roots: where the program is a stage of a pipeline, the numbers of the outputs that its backward begins with;
            its gradients are added up then, not reduced.
    """
    return _Player(program, plan, profile, roots).play()


class _MeshSizes:
    """The communicator of a dry run: knows how large the mesh is, and stands at its origin."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.mesh = mesh

    def size(self, axis: str) -> int:
        return math.prod(self.mesh[name] for name in axis.split("+"))

    def index(self, axis: str) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a dry run does not communicate, but {name} was called")


@dataclass(frozen=True)
class _Note:
    """What is saved in place of a gathered parameter, or of a view of it."""

    bucket: Bucket
    value: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Player:
    def __init__(
        self, program: LocalProgram, plan: Plan, profile: Profile, roots: Collection[int] | None = None
    ) -> None:
        self.program, self.plan, self.profile, self.roots = program, plan, profile, roots
        self.sizes = Sizes(program.captured.actual)
        self.found = DryRun()
        self.clock = Clock(profile.overlap)
        self.net = Transfers(plan, profile, self.clock)
        self.ledger = Ledger(self.clock)
        self.per_use = [b for b in program.buckets if b.per_use]
        self.owners: dict[Any, tuple[Bucket, int]] = {}
        self.notes: dict[int, int] = dict.fromkeys((b.number for b in self.per_use), 0)
        self.started: dict[int, Finish] = {}
        self.gathered: dict[int, list[torch.Tensor]] = {}
        self.seen: set[int] = set()
        self.running: list[tuple[Sequence[ParameterChain], Finish]] = []
        self.gradients: list[torch.Tensor] = []
        self.results: Sequence[Any] = ()

    def play(self) -> DryRun:
        """Forward, then backward from every output that a gradient can come from."""
        before = use_communicator(_MeshSizes(dict(self.plan.mesh)))
        counting = CountingMode(self.net.add, dry=True)
        meter = Meter(self.profile, self.plan.axis_sizes, self.clock, self.ledger)
        try:
            # What the user asks of autograd meanwhile (set_detect_anomaly) reads values, which there are none of.
            with counting, meter, torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
                flowing = self.forward()
                self.net.finish_phase(FORWARD)
                self.net.phase = BACKWARD
                with self.ledger.holding(WORKING):
                    if flowing:
                        torch.autograd.backward(flowing, [torch.ones_like(r) for r in flowing])
                    self.net.finish_phase(BACKWARD)
                    self.hand_out()
                self.net.finish_phase(GRADIENTS)
        finally:
            use_communicator(before)
        self.found.traffic = {phase: counter.result() for phase, counter in self.net.counters.items()}
        self.found.seconds = self.net.seconds
        self.found.peak, self.found.history = self.ledger.peak, self.ledger.history
        return self.found

    def forward(self) -> list[torch.Tensor]:
        """Runs the body and returns the outputs that are differentiated."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            inputs = self.placeholders()
            with self.ledger.holding(ACTIVATIONS):
                results = _Body(self).run(*inputs)
        # A training loop holds what the model returned while it differentiates the loss.
        self.results = results[len(self.program.captured.mutated_buffers) :]
        return [
            r
            for i, r in enumerate(self.results)
            if isinstance(r, torch.Tensor) and r.requires_grad and (self.roots is None or i in self.roots)
        ]

    # -- what goes in -----------------------------------------------------------------------------------------------

    def placeholders(self) -> list[Any]:
        """Values for the body's inputs: parameters gathered before it, buffers, constants, inputs."""
        values: dict[str, torch.Tensor] = {}
        for bucket in self.program.buckets:
            if not bucket.per_use:
                names = [name for chain in bucket.chains for name in chain.placeholders]
                values.update(zip(names, self.unshard(bucket), strict=True))
        inputs = {name for name in self.program.captured.inputs if name is not None}
        found: list[Any] = []
        for node in self.program.body.graph.nodes:
            if node.op != "placeholder":
                continue
            value: Any = values.get(node.name)
            if value is None:
                with self.ledger.holding(""):
                    value = self.local(node)
                self.found.inputs += _bytes(value)
                if node.name in inputs and node.meta["differentiable"]:
                    value.requires_grad_()
            found.append(value)
        return found

    def local(self, node: fx.Node) -> Any:
        """A rank's part of a node's value."""
        if not is_tensor(node):
            return self.sizes(node.meta["val"])
        return self.net.empty(self.sizes.shape(node), node.meta["placements"], node.meta["val"].dtype)

    def at_rest(self, bucket: Bucket) -> list[torch.Tensor]:
        """Parameters as they lie at rest: memory that is there anyway, unless they are cast."""
        chains = bucket.chains
        with self.ledger.holding(self.ledger.kind if chains[0].dtype != chains[0].rest_dtype else ""):
            return [self.net.empty(c.shape, c.at_rest, c.dtype) for c in chains]

    # -- buckets, as runtime.buckets has them -----------------------------------------------------------------------

    def unshard(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """Gathers a bucket; its gradients are reduced when they arrive."""
        leaf = torch.empty((), device="meta", requires_grad=bucket.chains[0].trainable)
        values = _Unshard.apply(self, bucket, leaf)
        if bucket.per_use:
            paths = [(chain, path) for chain in bucket.chains for path in chain.paths]
            for i, (value, (chain, path)) in enumerate(zip(values, paths, strict=True)):
                if makes_tensor(path) or chain.dtype != chain.rest_dtype:
                    self.owners[_torch.StorageWeakRef(value.untyped_storage())] = bucket, i
            later = self.per_use[self.per_use.index(bucket) + 1 :]
            if later and self.net.phase == FORWARD:
                self.prefetch(later[0])
        return values

    def prefetch(self, bucket: Bucket) -> None:
        """Starts gathering a bucket ahead of its use."""
        if bucket.number not in self.started:
            self.started[bucket.number] = self.start(bucket)

    def start(self, bucket: Bucket) -> Finish:
        """Starts gathering a bucket."""
        chains = bucket.chains
        phase = UNSHARD if bucket.gather == "per_step" else self.net.phase
        columns = []
        with self.ledger.holding(GATHERED):
            at_rest, layouts = self.at_rest(bucket), [c.at_rest for c in chains]
            for use in range(len(chains[0].uses)):
                paths = [c.paths[use] for c in chains]
                columns.append(self.net.travel(chains, paths, at_rest, layouts, [phase] * len(paths[0])))

        def finish() -> list[torch.Tensor]:
            with self.ledger.holding(GATHERED):
                done = [column() for column in columns]
            return [column[i] for i in range(len(chains)) for column in done]

        return finish

    def gather(self, bucket: Bucket) -> list[torch.Tensor]:
        """This rank's values for every use, waited for."""
        begun = self.clock.now
        values = (self.started.pop(bucket.number, None) or self.start(bucket))()
        if bucket.gather == "per_step":
            self.net.seconds[UNSHARD] += self.clock.now - begun
        return values

    def receive(self, chains: Sequence[ParameterChain], grads: Sequence[torch.Tensor]) -> None:
        """Starts the reduction of the gradients of some chains of a bucket."""
        self.found.reached += [chain.name for chain in chains]
        if self.roots is not None:
            return
        dtype, first = chains[0].reduce_dtype, chains[0]
        paths = [(*c.each, *c.sync) for c in chains]
        phases = [self.net.phase] * len(first.each) + [GRADIENTS] * len(first.sync)
        with self.ledger.holding(GRADIENT_BUFFERS):
            sent = [g.to(dtype) if g.dtype != dtype else g if paths[0] else g.clone() for g in grads]
            finish = self.net.travel(chains, paths, sent, [c.made for c in chains], phases)
        self.running.append((chains, finish))

    def hand_out(self) -> None:
        """The end of the backward: what has been reduced becomes the gradients."""
        self.net.phase = GRADIENTS
        with self.ledger.holding(GRADIENT_BUFFERS):
            while self.running:
                chains, finish = self.running.pop(0)
                self.gradients += _kept(chains, finish())

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Around the second run of a region: then the bucket that the one before it needs is gathered ahead."""
        yield
        if number:
            before = list(self.program.regions.values())[number - 1]
            names = {n.target for n in before.program.graph.nodes if n.op == "call_module"}
            for bucket in [b for b in self.per_use if b.name in names][:1]:
                self.prefetch(bucket)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Notes what autograd saves: a gathered parameter is not kept but gathered again."""
        owner = self.owners.get(_torch.StorageWeakRef(tensor.untyped_storage()))
        if owner is None or owner[0].number not in self.notes:
            return tensor
        bucket, value = owner
        self.notes[bucket.number] += 1
        return _Note(bucket, value, tensor.size(), tensor.stride(), 0)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Gathers a bucket again, and the one before it ahead of time, as ``RegatherHooks`` does."""
        if not isinstance(saved, _Note):
            return saved
        bucket = saved.bucket
        if bucket.number not in self.gathered:
            self.gathered[bucket.number] = self._gather_again(bucket)
            for earlier in reversed(self.per_use[: self.per_use.index(bucket)]):
                if self.notes[earlier.number] > 0:
                    if earlier.number not in self.gathered and earlier.number not in self.seen:
                        self.seen.add(earlier.number)
                        self.found.regathered.append(earlier.number)
                        self.started[earlier.number] = self.start(earlier)
                    break
        value = self.gathered[bucket.number][saved.value]
        self.notes[bucket.number] -= 1
        if self.notes[bucket.number] <= 0:
            del self.gathered[bucket.number]
        return value.as_strided(saved.size, saved.stride, saved.offset)

    def _gather_again(self, bucket: Bucket) -> list[torch.Tensor]:
        if bucket.number not in self.seen:
            self.seen.add(bucket.number)
            self.found.regathered.append(bucket.number)
        with torch.no_grad():
            return self.gather(bucket)


class _Unshard(torch.autograd.Function):
    """The boundary between parameters at rest and the body, as ``runtime.buckets`` has it."""

    @staticmethod
    def forward(ctx: Any, player: _Player, bucket: Bucket, leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.player, ctx.bucket = player, bucket
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in player.gather(bucket))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        chains = ctx.bucket.chains
        uses = len(chains[0].uses)
        reached: list[ParameterChain] = []
        sums: list[torch.Tensor] = []
        for i, chain in enumerate(chains):
            present = [g for g in grads[i * uses : (i + 1) * uses] if g is not None]
            if present:
                reached.append(chain)
                sums.append(functools.reduce(torch.add, present) if _alike(present) else present[0])
        if reached:
            ctx.player.receive(reached, sums)
        return None, None, None


def _kept(chains: Sequence[ParameterChain], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Reduced gradients as ``.grad`` keeps them: one that was sliced is copied, so that the whole need not live."""
    return [
        v.to(c.rest_dtype) if v.dtype != c.rest_dtype else v.clone() if c.ends_in_slice else v
        for v, c in zip(values, chains, strict=True)
    ]


def _alike(tensors: Sequence[torch.Tensor]) -> bool:
    return all(t.shape == tensors[0].shape for t in tensors)


class _Body(fx.Interpreter):
    """Runs the body, or one of its regions, on meta tensors."""

    def __init__(self, player: _Player, program: fx.GraphModule | None = None) -> None:
        super().__init__(program or player.program.body)
        self.extra_traceback = False  # the second run of a region ends in an exception, when it has made enough
        self.player = player
        self.buckets = {b.name: b for b in player.program.buckets}

    def run_node(self, n: fx.Node) -> Any:
        if is_unseen(n):
            return stand_in(n, *self.fetch_args_kwargs_from_env(n), partial(self.shape_of, n))
        return super().run_node(n)

    def shape_of(self, node: fx.Node, traced: torch.Tensor) -> tuple[int, ...]:
        """A rank's shape of one of the results of a node."""
        shape = tuple(self.player.sizes(size) for size in traced.shape)
        if not is_tensor(node):  # several results are whole
            return shape
        return tuple(largest_piece(shape, node.meta["placements"], self.player.plan.axis_sizes))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in self.buckets:
            return self.player.unshard(self.buckets[target])
        regions = self.player.program.regions
        region = regions[target]
        region.around = partial(self.player.around, list(regions).index(target))
        # An interpreter for each run: one that is stopped in the middle would hold what it has made.
        return region.run(lambda *inputs: _Body(self.player, region.program).run(*inputs), *args)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.scaled_dot_product_attention.default:
            return attention(*args, **kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return super().call_function(target, args, kwargs)


def _bytes(value: Any) -> int:
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)
