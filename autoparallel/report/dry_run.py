"""Running a rank's program without values: what it would send, save and compute, forward and backward.

The program runs on fake tensors of the local sizes, and plain autograd differentiates it as it does the real one.  So
what depends on autograd is asked of autograd, not guessed: which transposed collectives run, which parameters some
operator saves for its backward (a bucket gathered per use is gathered again only then), which activations are kept.
Only the boundary is played: buckets, which on real ranks talk to process groups (``runtime.buckets``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.collectives import redistribute
from autoparallel.groups import active_axes, use_communicator
from autoparallel.passes.bucket_collectives import Bucket
from autoparallel.passes.hoist_parameter_chains import ParameterChain, makes_tensor
from autoparallel.passes.insert_collectives import Redistribution, Sizes
from autoparallel.placements import COLLECTIVES, Layout, action, largest_piece
from autoparallel.plan import Plan
from autoparallel.planner.cost import operator_seconds
from autoparallel.planner.hardware import Profile
from autoparallel.program import LocalProgram
from autoparallel.redistribution import Step, local_numel, step_bytes
from autoparallel.rules.calls import is_tensor
from autoparallel.traffic import CountingMode, Traffic, TrafficCounter

UNSHARD, FORWARD, BACKWARD, GRADIENTS = "unshard", "forward", "backward", "gradients"
PHASES = (UNSHARD, FORWARD, BACKWARD, GRADIENTS)
"""Forward and backward of one microbatch; once a step, what is gathered before them and the gradients' reduction."""


@dataclass
class DryRun:
    """What a dry run found.

    Attributes:
        traffic: by phase.
        seconds: by phase, computing and communicating, nothing overlapped.
        activations: bytes that autograd saves for the backward, parameters and inputs aside.
        inputs: bytes of the inputs, buffers and constants.
        gathered: bytes of gathered parameters at the worst moment.
        regathered: the numbers of the buckets that the backward gathers again.
    """

    traffic: dict[str, Traffic] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    activations: int = 0
    inputs: int = 0
    gathered: int = 0
    regathered: list[int] = field(default_factory=list)


def dry_run(program: LocalProgram, plan: Plan, profile: Profile) -> DryRun:
    """Runs the program's forward and backward, on the sizes of the call that was planned for."""
    return _Player(program, plan, profile).play()


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


class _Player:
    def __init__(self, program: LocalProgram, plan: Plan, profile: Profile) -> None:
        self.program, self.plan, self.profile = program, plan, profile
        self.sizes = Sizes(program.captured.actual)
        self.phase = FORWARD
        self.counters = {phase: TrafficCounter() for phase in PHASES}
        self.found = DryRun()
        self.per_use = [b for b in program.buckets if b.per_use]
        self.owners: dict[Any, Bucket] = {}
        self.notes: dict[int, int] = dict.fromkeys((b.number for b in self.per_use), 0)
        self.gathered: set[int] = set()
        self.kept: dict[Any, int] = {}
        self.known: set[Any] = set()

    def play(self) -> DryRun:
        """Forward, then backward from every output that a gradient can come from."""
        before = use_communicator(_MeshSizes(dict(self.plan.mesh)))
        try:
            with _torch.make_fake_mode(), CountingMode(self.add, fake=True), torch.enable_grad():
                with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                    results = _Body(self).run(*self.placeholders())
                self.phase = BACKWARD
                results = results[len(self.program.captured.mutated_buffers) :]
                flowing = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
                if flowing:
                    torch.autograd.backward(flowing, [torch.ones_like(r) for r in flowing])
        finally:
            use_communicator(before)
        self.found.traffic = {phase: counter.result() for phase, counter in self.counters.items()}
        self.found.activations = sum(self.kept.values())
        self.found.gathered = self._gathered_bytes()
        return self.found

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
                value = self.local(node)
                self.found.inputs += _bytes(value)
                if node.name in inputs and node.meta["differentiable"]:
                    value.requires_grad_()
            if isinstance(value, torch.Tensor):
                self.known.add(_torch.StorageWeakRef(value.untyped_storage()))
            found.append(value)
        return found

    def local(self, node: fx.Node) -> Any:
        """A rank's part of a node's value."""
        if not is_tensor(node):
            return self.sizes(node.meta["val"])
        return self.empty(self.sizes.shape(node), node.meta["placements"], node.meta["val"].dtype)

    def empty(self, shape: Sequence[int], layout: Layout, dtype: torch.dtype) -> torch.Tensor:
        """A rank's part of a tensor that lies as ``layout`` says."""
        return torch.empty(largest_piece(shape, layout, self.plan.axis_sizes), dtype=dtype)

    # -- what is sent -----------------------------------------------------------------------------------------------

    def add(self, kind: str, axis: str, full_bytes: int, ranks: int) -> None:
        """Counts one collective in the phase that runs now."""
        self.counters[self.phase].add(kind, axis, full_bytes, ranks)
        if ranks > 1:
            names = self.plan.axis_names
            axes = [names.index(name) for name in axis.split("+")]
            self.spend(self.profile.step_seconds(self.plan.axis_sizes, kind, axes, full_bytes))

    def spend(self, seconds: float, phase: str | None = None) -> None:
        """Counts time in a phase, the one that runs now unless told."""
        self.found.seconds[phase or self.phase] += seconds

    def travel(
        self,
        chains: Sequence[ParameterChain],
        paths: Sequence[Sequence[Step]],
        start: Sequence[Layout],
        itemsize: int,
    ) -> None:
        """Takes the tensors of many chains along their paths: each step is one collective for all of them."""
        layouts = list(start)
        sizes = self.plan.axis_sizes
        for steps in zip(*paths, strict=True):
            full = 0
            for i, (chain, step) in enumerate(zip(chains, steps, strict=True)):
                full += step_bytes(step, layouts[i], chain.shape, itemsize, sizes)
                layouts[i] = step.apply(layouts[i])
            self.step(steps[0], full)

    def step(self, step: Step, full_bytes: int) -> None:
        """One step of a redistribution outside of the body."""
        kind = action(step.src, step.dst)
        if kind in COLLECTIVES:
            ranks = math.prod(self.plan.axis_sizes[i] for i in step.axes)
            axis = "+".join(self.plan.axis_names[i] for i in step.axes)
            self.add(kind, active_axes(axis, dict(self.plan.mesh).__getitem__), full_bytes, ranks)
        else:
            self.spend(self.profile.step_seconds(self.plan.axis_sizes, kind, step.axes, full_bytes))

    # -- buckets, as runtime.buckets has them -----------------------------------------------------------------------

    def unshard(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """Gathers a bucket; its gradients are reduced when they arrive."""
        leaf = torch.empty((), requires_grad=bucket.chains[0].trainable)
        values = _Unshard.apply(self, bucket, leaf)
        for value, path in zip(values, (p for c in bucket.chains for p in c.paths), strict=True):
            storage = _torch.StorageWeakRef(value.untyped_storage())
            self.known.add(storage)
            if bucket.per_use and makes_tensor(path):
                self.owners[storage] = bucket
        return values

    def gather(self, bucket: Bucket) -> None:
        """Counts what gathering a bucket costs."""
        chains = bucket.chains
        before, self.phase = self.phase, UNSHARD if bucket.gather == "per_step" else self.phase
        for use in range(len(chains[0].uses)):
            at_rest = [c.at_rest for c in chains]
            self.travel(chains, [c.paths[use] for c in chains], at_rest, chains[0].dtype.itemsize)
        self.phase = before

    def receive(self, chains: Sequence[ParameterChain]) -> None:
        """Counts the reduction of the gradients of some chains of a bucket."""
        itemsize = chains[0].reduce_dtype.itemsize
        self.travel(chains, [c.each for c in chains], [c.made for c in chains], itemsize)
        before, self.phase = self.phase, GRADIENTS
        self.travel(chains, [c.sync for c in chains], [c.accumulator for c in chains], itemsize)
        self.phase = before

    def pack(self, tensor: torch.Tensor) -> Any:
        """Notes what autograd saves: a gathered parameter is not kept but gathered again."""
        storage = _torch.StorageWeakRef(tensor.untyped_storage())
        bucket = self.owners.get(storage)
        if bucket is not None:
            self.notes[bucket.number] += 1
            return bucket, tensor
        if storage not in self.known:
            self.kept[storage] = tensor.untyped_storage().nbytes()
        return None, tensor

    def unpack(self, saved: tuple[Bucket | None, torch.Tensor]) -> torch.Tensor:
        """Gathers a bucket again, and the one before it ahead of time, as ``RegatherHooks`` does."""
        bucket, tensor = saved
        if bucket is None:
            return tensor
        if bucket.number not in self.gathered:
            self._gather_again(bucket)
            self.gathered.add(bucket.number)
            for earlier in reversed(self.per_use[: self.per_use.index(bucket)]):
                if self.notes[earlier.number] > 0:
                    self._gather_again(earlier)
                    break
        self.notes[bucket.number] -= 1
        if self.notes[bucket.number] <= 0:
            self.gathered.discard(bucket.number)
        return tensor

    def _gather_again(self, bucket: Bucket) -> None:
        if bucket.number not in self.found.regathered:
            self.found.regathered.append(bucket.number)
            self.gather(bucket)

    def _gathered_bytes(self) -> int:
        """Parameters gathered before the body stay; of those gathered per use, one is used while the next comes."""
        hoisted = sum(self._made_bytes(b) for b in self.program.buckets if not b.per_use)
        sizes = [self._made_bytes(b) for b in self.per_use]
        return hoisted + max((a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=False)), default=0)

    def _made_bytes(self, bucket: Bucket) -> int:
        total = 0
        for chain in bucket.chains:
            for use, path in zip(chain.uses, chain.paths, strict=True):
                if makes_tensor(path) or chain.dtype != chain.rest_dtype:
                    total += local_numel(chain.shape, use, self.plan.axis_sizes) * chain.dtype.itemsize
        return total


class _Unshard(torch.autograd.Function):
    """The boundary between parameters at rest and the body, as ``runtime.buckets`` has it."""

    @staticmethod
    def forward(ctx: Any, player: _Player, bucket: Bucket, leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.player, ctx.bucket = player, bucket
        ctx.set_materialize_grads(False)
        player.gather(bucket)
        return tuple(player.empty(c.shape, use, c.dtype) for c in bucket.chains for use in c.uses)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        chains = ctx.bucket.chains
        uses = len(chains[0].uses)
        reached = [
            chain for i, chain in enumerate(chains) if any(g is not None for g in grads[i * uses : (i + 1) * uses])
        ]
        if reached:
            ctx.player.receive(reached)
        return None, None, None


class _Body(fx.Interpreter):
    """Runs the body on fake tensors and adds up what its operators cost."""

    def __init__(self, player: _Player) -> None:
        super().__init__(player.program.body)
        self.player = player
        self.buckets = {b.name: b for b in player.program.buckets}

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.player.unshard(self.buckets[target])

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "device" in kwargs:  # fake tensors live on the CPU, whatever the program's device
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, torch.Tensor):
            self._price(n, result)
        return result

    def _price(self, node: fx.Node, result: torch.Tensor) -> None:
        player = self.player
        done: Redistribution | None = node.meta.get("redistribution")
        backward = bool(node.meta.get("backward"))
        if done is not None and node.target is redistribute:
            shape, itemsize = player.sizes.shape(node), node.meta["val"].element_size()
            steps = [(FORWARD, done.step, done.before)]
            if backward:
                steps.append((BACKWARD, done.step.transposed(), done.step.apply(done.before)))
            sizes = player.plan.axis_sizes
            for phase, step, before in steps:
                kind = action(step.src, step.dst)
                if kind not in COLLECTIVES:  # those are counted, and paid, when they run
                    full = step_bytes(step, before, shape, itemsize, sizes)
                    player.spend(player.profile.step_seconds(sizes, kind, step.axes, full), phase)
            return
        if node.target is operator.getitem:
            return
        operands = [self.env[x] for x in node.all_input_nodes]
        moved = sum(_bytes(x) for x in (*operands, result))
        forward_seconds, backward_seconds = operator_seconds(
            player.profile, node.meta.get("rule"), node.meta.get("modes", ()), player.plan.axis_sizes,
            player.sizes, moved, result.dtype,
        )  # fmt: skip
        player.spend(forward_seconds, FORWARD)
        if backward:
            player.spend(backward_seconds, BACKWARD)


def _bytes(value: Any) -> int:
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)
