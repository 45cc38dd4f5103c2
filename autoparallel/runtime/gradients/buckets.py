"""Buckets of parameters at run time: gathered together, their gradients received together.

[Note: gather per use] A bucket that is gathered per use keeps nothing for the backward: while the body runs,
saved-tensor hooks recognise what operators save of a gathered parameter, by its storage, and save a note instead; the
backward gathers again what notes were saved of, which embeddings and biases are not.  The next bucket's gather is
started ahead, in the forward and in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from autoparallel import _torch
from autoparallel.passes.bucket_collectives import Bucket
from autoparallel.passes.hoist_parameter_chains import ParameterChain, makes_tensor
from autoparallel.passes.recompute_layers import Region
from autoparallel.runtime.gradients.backwards import BackwardPass, require_single
from autoparallel.runtime.gradients.derivatives import with_graph
from autoparallel.runtime.gradients.program_parameters import KeptCopy, ProgramParameters
from autoparallel.runtime.gradients.travel import Gather, Tensors


class GatherAhead:
    """What is gathered, and may be started ahead of its use."""

    _started: Gather | None = None

    def start(self) -> Gather:
        """Starts to gather it."""
        raise NotImplementedError

    def prefetch(self, running: BackwardPass | None = None) -> None:
        """Starts the gather whose result the next ``take`` returns.

        Args:
            running: the backward that it is for, which may end without using it; None in a forward.
        """
        if self._started is None:
            self._started = self.start()
            if running is not None:
                running.leftovers.append(self.drop)

    def take(self) -> Tensors:
        """What is gathered; asked for once."""
        started, self._started = self._started or self.start(), None
        return started()

    def drop(self) -> None:
        """Waits for what is under way of a gather that has been started, and forgets it."""
        started, self._started = self._started, None
        if started is not None:
            started.abandon()


class ParameterBucket(nn.Module, GatherAhead):
    """Gathers the parameters of one bucket; called by the program, with no arguments.

    Args:
        bucket: what it holds and how it gathers.
        store: where its parameters are, and where their gradients go.
    """

    def __init__(self, bucket: Bucket, store: ProgramParameters) -> None:
        super().__init__()
        self.bucket = bucket
        self.store = store
        self.placeholders = [name for chain in bucket.chains for name in chain.placeholders]
        self.hooks: RegatherHooks | None = None
        # Which of its values have memory of their own, and are not parameters at rest or views of them.
        self.gathered = [c.dtype != c.rest_dtype or makes_tensor(path) for c in bucket.chains for path in c.paths]

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The bucket's parameters in the layouts of their uses, parameter by parameter."""
        values = _Unshard.apply(self, *[self.store.parameters[c.name] for c in self.bucket.chains])
        if self.hooks is not None:
            self.hooks.note(self, values)
        return values

    def parameters_of(self, chains: Sequence[ParameterChain]) -> list[nn.Parameter]:
        """Some of the bucket's parameters at rest."""
        parameters = self.store.parameters
        return [parameters[chain.name] for chain in chains]

    def gather(self) -> Tensors:
        """This rank's values for every use."""
        return self._once_per_step() if self.bucket.gather == "per_step" else self.take()

    def _once_per_step(self) -> Tensors:
        """Keeps what is gathered under ``no_sync()`` for the calls that follow (see ``KeptCopy``)."""
        copy = self.store.copies.pop(self, None)
        values = self.take() if copy is None else copy.values
        if not self.store.synchronise:
            self.store.copies[self] = copy or KeptCopy(values, self.parameters_of(self.bucket.chains))
        return [value.view_as(value) for value in values]

    def start(self) -> Gather:
        return self.start_some(self.bucket.chains)

    def start_some(self, chains: Sequence[ParameterChain]) -> Gather:
        """Starts to gather some of the bucket's parameters."""
        return self.store.gather(chains, [_torch.dtensor.local_of(x).detach() for x in self.parameters_of(chains)])


def gather_ahead(regions: Sequence[Region], buckets: Mapping[str, ParameterBucket]) -> None:
    """Lets each region that runs again start the gather that the one before it will need when it does.

    Args:
        buckets: those that the regions gather, by the name under which they call them.
    """
    first: ParameterBucket | None = None
    for region in regions:
        region.around = partial(_then_prefetch, first) if first is not None else nullcontext
        calls = (n.target for n in region.program.graph.nodes if n.op == "call_module")
        first = next((buckets[name] for name in calls if name in buckets), None)


@contextmanager
def _then_prefetch(bucket: ParameterBucket) -> Iterator[None]:
    yield
    bucket.prefetch(bucket.store.passes.running())


class _Unshard(torch.autograd.Function):
    """The boundary between parameters at rest and the program: gathers forward, accumulates or reduces backward."""

    @staticmethod
    def forward(ctx: Any, bucket: ParameterBucket, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        _torch.autograd.run_early(ctx)  # reduces beside the rest of the backward
        return tuple(bucket.gather())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        require_single(*grads)
        bucket: ParameterBucket = ctx.bucket
        chains, store = bucket.bucket.chains, bucket.store
        # Counted before there are other lists of them; what a collective makes is nobody else's.
        shared = set[int]() if chains[0].sync else _torch.autograd.held_by_others(grads)
        asked_for = _torch.autograd.asked_for(ctx, len(chains))
        store.begin_backward()
        uses = len(chains[0].uses)
        rows = [grads[i : i + uses] for i in range(0, len(grads), uses)]
        if torch.is_grad_enabled():
            return None, *with_graph(store, chains, rows, asked_for)
        return None, *store.receive(chains, rows, asked_for, shared)


@dataclass(eq=False)
class _Again(GatherAhead):
    """A bucket that a backward gathers again.

    Attributes:
        following: the bucket that is gathered after it.
        notes: how many the body has saved that the backward has not read.
        parameters: the places of those that it needs again.
        values: what has been gathered, by place among the bucket's values, while there are notes of it.
    """

    bucket: ParameterBucket
    following: ParameterBucket | None
    notes: int = 0
    parameters: set[int] = field(default_factory=set)
    values: dict[int, torch.Tensor] | None = None

    @property
    def uses(self) -> int:
        """How many values the bucket has of each parameter."""
        return len(self.bucket.bucket.chains[0].uses)

    def start(self) -> Gather:
        """Starts to gather what is needed again."""
        chains = self.bucket.bucket.chains
        return self.bucket.start_some([chains[i] for i in sorted(self.parameters)])

    def gather(self) -> dict[int, torch.Tensor]:
        """What is needed again, by place."""
        places = [i * self.uses + use for i in sorted(self.parameters) for use in range(self.uses)]
        return dict(zip(places, self.take(), strict=True))


@dataclass(frozen=True)
class _Value:
    """One of the values of a bucket that has been gathered.

    Attributes:
        place: which one.
        first_byte: where it begins in its storage.
        storage: keeps the storage's mark from others.
    """

    again: _Again
    place: int
    first_byte: int
    storage: _torch.tensors.StorageWeakRef


@dataclass(frozen=True)
class _Note:
    """What is saved in place of a gathered parameter, or of a view of it, which may be of another dtype.

    Attributes:
        value: the parameter.
        view: the size, the stride and the dtype, and whether it is to be conjugated or negated where it is read.
        offset: from where the parameter begins, in bytes.
    """

    value: _Value
    view: _torch.tensors.View
    offset: int


class RegatherHooks(torch.autograd.graph.saved_tensors_hooks):
    """Saves notes instead of gathered parameters while a body runs (see [Note: gather per use]).

    Args:
        buckets: the buckets gathered per use, in the order in which the body calls them.
    """

    def __init__(self, buckets: Sequence[ParameterBucket]) -> None:
        self._buckets = {b: _Again(b, following) for b, following in zip_longest(buckets, buckets[1:])}
        self._values: dict[int, _Value] = {}  # by the marks of storages
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        for bucket in self._buckets:
            bucket.hooks = self
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        for bucket in self._buckets:
            bucket.hooks = None
            bucket.drop()  # what parameters are now, another call must not be given

    def note(self, bucket: ParameterBucket, values: Sequence[torch.Tensor]) -> None:
        """Notes the storages of a bucket that has just been gathered, and starts to gather the one that follows."""
        again = self._buckets[bucket]
        for i, (value, gathered) in enumerate(zip(values, bucket.gathered, strict=True)):
            if gathered:
                memory = value.untyped_storage()
                storage = _torch.tensors.StorageWeakRef(memory)
                self._values[storage.cdata] = _Value(again, i, _torch.tensors.first_byte(value), storage)
                if memory.nbytes() != value.nbytes:  # how it lies among others follows from what is gathered with it
                    again.parameters.update(range(len(bucket.bucket.chains)))
        if again.following is not None:
            again.following.prefetch()

    def regathered(self) -> list[Bucket]:
        """The buckets that the backward will gather again."""
        return [bucket.bucket for bucket, again in self._buckets.items() if again.notes]

    def _pack(self, tensor: torch.Tensor) -> _Note | tuple[torch.Tensor, int]:
        value = self._values.get(_torch.tensors.storage_mark(tensor))
        if value is None:
            return tensor, tensor._version  # which torch does not compare where hooks save
        value.again.notes += 1
        value.again.parameters.add(value.place // value.again.uses)
        return _Note(value, _torch.tensors.View.of(tensor), _torch.tensors.first_byte(tensor) - value.first_byte)

    def _unpack(self, saved: _Note | tuple[torch.Tensor, int]) -> torch.Tensor:
        if not isinstance(saved, _Note):
            tensor, version = saved
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} that the backward needs was changed in place after the "
                    "call of the model that has read it: an input, or a buffer\n"
                    "What to change: call backward() before, or change a copy (x = x.clone())."
                )
            return tensor
        again = saved.value.again
        if again.values is None:
            with torch.no_grad():
                again.values = again.gather()
            self._prefetch_before(again)
        base = again.values[saved.value.place]
        again.notes -= 1
        if again.notes <= 0:
            again.values = None
        return saved.view.at(base, saved.offset)

    def _prefetch_before(self, again: _Again) -> None:
        """Starts the gather that the backward most likely needs next: the bucket used just before this one."""
        order = list(self._buckets.values())
        for earlier in reversed(order[: order.index(again)]):
            if earlier.notes > 0:
                if earlier.values is None:
                    earlier.prefetch(earlier.bucket.store.passes.running())
                return
