"""One pipeline stage at run time: its forward and backward for one microbatch, and its gradients until the step.

[Note: gradients of a schedule] A schedule runs inside of the model's call, and what it computes becomes ``.grad`` only
when the user differentiates the loss.  So each stage adds up its gradients apart, in the layouts in which they are
made, without communication; ``backward()`` then scales them by what the user has done to the loss, and gives them to
the store like those of any other backward: they are added to ``.grad`` under ``no_sync()``, or reduced, once.

[Note: parameters of a schedule] Parameters stay the same while a schedule runs.  So those that a step gathers once, or
that are not gathered, are handed to the stage once, as leaves: autograd adds the gradients of all microbatches to those
of the leaves, each as soon as it is made.  It adds in place, and what it adds to is the first gradient it got, whose
memory may be another's, too: two parameters that are viewed and added get views of one gradient.  So these are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoparallel import _torch
from autoparallel._torch.autograd import AskedFor
from autoparallel.comm.collectives import settled
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.cut_stages import Crossing, StageGraph
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.passes.split_weight_gradients import Deferred, collect_deferred
from autoparallel.placements import largest_piece
from autoparallel.program.program import LocalProgram
from autoparallel.runtime.gradients.backwards import Grads, reached
from autoparallel.runtime.gradients.buckets import ParameterBucket
from autoparallel.runtime.gradients.program_parameters import ProgramParameters
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.gradients.travel import Tensors
from autoparallel.runtime.programs.runner import Runner
from autoparallel.runtime.ranks.messages import Form


class StageGradients(ProgramParameters):
    """The parameters of one stage, and their gradients while a schedule runs.

    Args:
        store: the gradients of all the model's parameters.
        borrowed: parameters that lie with another stage, by name.
        alone: whether there is no other stage, so that each microbatch's gradients are reduced where the plan says so.
    """

    def __init__(self, store: GradientStore, borrowed: Mapping[str, nn.Parameter], *, alone: bool = False) -> None:
        super().__init__(store.mesh, store.prefix, {**store.parameters, **borrowed})
        self.store, self.alone = store, alone
        self.copies = store.copies
        self.sums: dict[str, torch.Tensor] = {}
        self._leaves: list[tuple[ParameterChain, list[torch.Tensor]]] = []
        self._without: list[torch.Tensor] = []  # leaves that have no gradient yet
        self._claimed: set[_torch.tensors.StorageWeakRef] = set()  # memory of gradients that leaves, or others, have

    def hold(self, bucket: ParameterBucket, differentiate: bool) -> dict[str, torch.Tensor]:
        """A bucket's parameters for all microbatches, by placeholder (see [Note: parameters of a schedule])."""
        leaves = [value.detach() for value in bucket.gather()]
        held = dict(zip(bucket.placeholders, leaves, strict=True))
        for chain in bucket.bucket.chains if differentiate else ():
            if chain.trainable:
                trained = [held[name].requires_grad_() for name in chain.placeholders]
                for leaf in trained:
                    if leaf.dtype != chain.accumulator_dtype:
                        leaf.grad_dtype = chain.accumulator_dtype
                self._leaves.append((chain, trained))
                self._without += trained
        return held

    def separate(self, others: Iterable[torch.Tensor]) -> None:
        """Sees to it, after a backward, that the leaves' gradients share no memory with each other or with others."""
        if not self._without:
            return
        self._claimed.update(_torch.tensors.StorageWeakRef(x.untyped_storage()) for x in others)
        without = []
        for leaf in self._without:
            if leaf.grad is None:
                without.append(leaf)
                continue
            if _torch.tensors.StorageWeakRef(leaf.grad.untyped_storage()) in self._claimed:
                leaf.grad = leaf.grad.clone(memory_format=torch.contiguous_format)
            self._claimed.add(_torch.tensors.StorageWeakRef(leaf.grad.untyped_storage()))
        self._without = without

    def receive(
        self, chains: Sequence[ParameterChain], grads: Grads, asked_for: AskedFor, shared: Collection[int]
    ) -> list[torch.Tensor | None]:
        """Adds one microbatch's gradients to the sums, at once or when they are reduced; autograd is handed nothing."""
        rows = reached(chains, grads, asked_for.inputs)
        some, values = [chain for chain, _ in rows], self.sum_uses(rows)
        if self._reduces(some):
            travel = self.reduce(some, values, [chain.each for chain in some])
            self.passes.running().expect(travel, partial(self._add_up, some))
        else:
            self._add_up(some, values)
        return [None] * len(chains)

    def _add_up(self, chains: Sequence[ParameterChain], values: Tensors) -> None:
        """Adds gradients to the sums."""
        sums: Tensors = []
        addends: Tensors = []
        for chain, value in zip(chains, values, strict=True):
            total = self.sums.get(chain.name)
            if total is None:
                copied = value.to(chain.accumulator_dtype, copy=True, memory_format=torch.contiguous_format)
                self.sums[chain.name] = copied
            else:
                sums.append(total)
                addends.append(value if value.dtype == total.dtype else value.to(total.dtype))
        if sums:
            torch._foreach_add_(sums, addends)

    def _reduces(self, chains: Sequence[ParameterChain]) -> bool:
        """Whether each microbatch's gradients are reduced before they are added to the sums."""
        return self.alone and bool(chains) and bool(chains[0].each)

    def added(self, chain: ParameterChain) -> ParameterChain:
        """The way that is left to a parameter's summed gradients."""
        left = {chain.when: ((), chain.sync)}
        return replace(chain, gradient_layout=chain.accumulator, ways=left) if self.alone else chain

    def take(self) -> dict[str, torch.Tensor]:
        """The sums, which begin anew; what was held is let go of."""
        sums, held = self.sums, self._leaves
        self.forget()
        for chain, leaves in held:
            grads = [leaf.grad for leaf in leaves]
            if any(grad is not None for grad in grads):
                totals = self.sum_uses([(chain, grads)])
                if self._reduces([chain]):
                    totals = self.reduce([chain], totals, [chain.each])()
                sums[chain.name] = settled(totals[0]).contiguous()
        return sums

    def forget(self) -> None:
        """Lets go of the sums and of what was held."""
        self.sums, self._leaves, self._without, self._claimed = {}, [], [], set()


@dataclass
class _Microbatch:
    """What the backward of one microbatch needs."""

    incoming: dict[int, torch.Tensor]
    outgoing: dict[int, torch.Tensor]
    loss: torch.Tensor | None
    deferred: list[Deferred] = field(default_factory=list)


@dataclass(frozen=True)
class StageOutputs:
    """What a stage's forward made.

    Attributes:
        buffers: new values of buffers, by name.
        results: the model's outputs, by their number among the results of the whole graph.
        outgoing: the values for other stages, by the number of the crossing.
    """

    buffers: dict[str, torch.Tensor]
    results: dict[int, torch.Tensor]
    outgoing: dict[int, torch.Tensor]


class Stage:
    """One stage of a pipeline on this rank.

    Args:
        index: its place in the pipeline.
        graph: what it was cut to.
        program: its local program.
        gradients: its parameters, and where their gradients are added up.
        plain, make_body: as :class:`Runner` takes them.
        loss: the number of the loss among the results, where this stage makes it.
    """

    def __init__(
        self,
        index: int,
        graph: StageGraph,
        program: LocalProgram,
        gradients: StageGradients,
        plain: nn.Module,
        make_body: Callable[[LocalProgram], Callable[..., Any]],
        loss: int | None,
    ) -> None:
        self.index, self.graph, self.program, self.gradients, self.loss = index, graph, program, gradients, loss
        self.runner = Runner(program, gradients, plain, make_body)
        self._microbatches: dict[int, _Microbatch] = {}
        self._held: dict[str, torch.Tensor] = {}
        modules = [n.meta.get("module", "") for n in program.calls() if n.op == "call_function"]
        named = [m for m in modules if m]
        self.name = f"stage {index} ({named[0]} to {named[-1]})" if named else f"stage {index}"

    def begin(self, differentiate: bool) -> None:
        """Takes the parameters that stay the same for a call's microbatches; ends what an exception has left."""
        self.gradients.passes.end_dead()
        self.gradients.synchronise = self.gradients.store.synchronise
        for bucket in self.runner.hoisted:
            if bucket.bucket.gather != "per_microbatch":
                self._held.update(self.gradients.hold(bucket, differentiate))

    def end(self) -> dict[str, torch.Tensor]:
        """The summed gradients of a call, by parameter."""
        sums = self.gradients.take()
        self.forget()
        return sums

    def forget(self) -> None:
        """Lets go of all that a call has kept, or that an interrupted one has left."""
        self._held = {}
        self._microbatches.clear()
        self.gradients.forget()

    def forward(
        self,
        microbatch: int,
        leaves: Sequence[Any],
        received: Mapping[int, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        differentiate: bool,
    ) -> StageOutputs:
        """Runs the forward; with ``differentiate``, keeps what its backward needs."""
        inputs: dict[int, torch.Tensor] = {}
        for crossing in self.graph.incoming:
            x = received[crossing.number]
            inputs[crossing.number] = x.requires_grad_(differentiate and self.index in crossing.flows)
        deferred: list[Deferred] = []
        with torch.set_grad_enabled(differentiate), collect_deferred(deferred):
            values = list(self.runner([*leaves, *inputs.values()], buffers, self._held))
        captured, graph = self.graph.captured, self.graph
        count = len(captured.mutated)
        changed = {p: x.detach() for p, x in zip(captured.mutated, values[:count], strict=True)}
        results = dict(zip(graph.results, values[count : count + len(graph.results)], strict=True))
        outgoing = dict(zip((c.number for c in graph.outgoing), values[count + len(graph.results) :], strict=True))
        if differentiate:
            loss = results[self.loss] if self.loss is not None else None
            self._microbatches[microbatch] = _Microbatch(inputs, outgoing, loss, deferred)
        return StageOutputs(
            changed,
            {i: x.detach() for i, x in results.items()},
            {i: settled(x.detach()).contiguous() for i, x in outgoing.items()},
        )

    def backward(
        self, microbatch: int, seed: torch.Tensor | float, grads: Mapping[int, Sequence[torch.Tensor]], split: bool
    ) -> dict[int, torch.Tensor]:
        """Differentiates one microbatch; with ``split``, leaves the gradients of parameters to :meth:`weights`.

        Args:
            seed: what the loss is multiplied by, where this stage makes it.
            grads: for each value it has sent, the gradients that came back.

        Returns:
            The gradients of the values it has received, by the number of the crossing.
        """
        saved = self._microbatches[microbatch]
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        for number, value in saved.outgoing.items():
            if value.requires_grad and grads.get(number):
                first, *others = grads[number]
                roots.append(value)
                seeds.append(sum(others, first))
        if saved.loss is not None and saved.loss.requires_grad:
            roots.append(saved.loss)
            seeds.append(torch.as_tensor(seed, dtype=saved.loss.dtype, device=saved.loss.device).reshape(()))
        if roots:
            torch.autograd.backward(roots, seeds)
        back: dict[int, torch.Tensor] = {}
        for crossing in self.graph.incoming:
            if self.index in crossing.flows:
                x = saved.incoming[crossing.number]
                back[crossing.number] = torch.zeros_like(x) if x.grad is None else settled(x.grad).contiguous()
        self.gradients.separate(back.values())
        saved.incoming, saved.outgoing, saved.loss = {}, {}, None
        if not split:
            self.weights(microbatch)
        return back

    def weights(self, microbatch: int) -> None:
        """Computes the gradients of parameters that :meth:`backward` has left."""
        saved = self._microbatches.pop(microbatch)
        roots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for deferred in saved.deferred:
            for weight, grad in deferred.run():
                root = roots.get(id(weight))
                roots[id(weight)] = (weight, grad if root is None else root[1] + grad)
        if roots:
            torch.autograd.backward([w for w, _ in roots.values()], [g for _, g in roots.values()])
            self.gradients.separate(())


def form_of(crossing: Crossing, program: LocalProgram, axis_sizes: Sequence[int], actual: Mapping[Any, int]) -> Form:
    """The form in which the stage of ``program`` receives a value, where the traced symbols are these sizes."""
    node = next(n for n in program.body.graph.nodes if n.op == "placeholder" and n.name == crossing.name)
    return Form(largest_piece(Sizes(actual).shape(node), node.meta["placements"], axis_sizes), node.meta["val"].dtype)
