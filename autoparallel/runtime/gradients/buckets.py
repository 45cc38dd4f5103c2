"""Buckets of parameters at run time: gathered together, their gradients received together.

[Note: gather per use] A bucket that is gathered per use keeps nothing for the backward: while the body runs,
saved-tensor hooks recognise what operators save of a gathered parameter, by its storage, and save a note instead; the
backward gathers again what notes were saved of, which embeddings and biases are not.  The next bucket's gather is
started ahead, in the forward and in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autoparallel import _torch
from autoparallel.passes.bucket_collectives import Bucket
from autoparallel.passes.hoist_parameter_chains import ParameterChain, makes_tensor
from autoparallel.passes.recompute_layers import Region
from autoparallel.runtime.gradients.copies import KeptCopy
from autoparallel.runtime.gradients.derivatives import with_graph
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.gradients.travel import Gather, Tensors


class ParameterBucket(nn.Module):
    """Gathers the parameters of one bucket; called by the program, with no arguments.

    Args:
        bucket: what it holds and how it gathers.
        store: where its parameters are, and where their gradients go.
    """

    def __init__(self, bucket: Bucket, store: GradientStore) -> None:
        super().__init__()
        self.bucket = bucket
        self.store = store
        self.placeholders = [name for chain in bucket.chains for name in chain.placeholders]
        self.hooks: RegatherHooks | None = None
        self.following: ParameterBucket | None = None
        self._started: Gather | None = None
        # Which of its values have memory of their own, and are not parameters at rest or views of them.
        self.gathered = [c.dtype != c.rest_dtype or makes_tensor(path) for c in bucket.chains for path in c.paths]

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The bucket's parameters in the layouts of their uses, parameter by parameter."""
        values = _Unshard.apply(self, *[self.store.parameters[c.name] for c in self.bucket.chains])
        if self.hooks is not None:
            self.hooks.note(self, values)
            if self.following is not None:
                self.following.prefetch()
        return values

    def parameters_of(self, chains: Sequence[ParameterChain]) -> list[nn.Parameter]:
        """Some of the bucket's parameters at rest."""
        parameters = self.store.parameters
        return [parameters[chain.name] for chain in chains]

    def prefetch(self) -> None:
        """Starts the gather whose result the next ``gather`` returns."""
        if self._started is None:
            self._started = self.start(self.bucket.chains)

    def drop(self) -> None:
        """Waits for what is under way of a gather that has been started, and forgets it."""
        started, self._started = self._started, None
        if started is not None:
            started.abandon()

    def gather(self) -> Tensors:
        """This rank's values for every use."""
        if self.bucket.gather == "per_step":
            return self._once_per_step()
        started, self._started = self._started or self.start(self.bucket.chains), None
        return started()

    def _once_per_step(self) -> Tensors:
        """Keeps what is gathered under ``no_sync()`` for the calls that follow (see ``KeptCopy``)."""
        copy = self.store.copies.pop(self, None)
        chains = self.bucket.chains
        values = self.start(chains)() if copy is None else copy.values
        if not self.store.synchronise:
            self.store.copies[self] = copy or KeptCopy(values, self.parameters_of(chains))
        return [value.view_as(value) for value in values]

    def start(self, chains: Sequence[ParameterChain]) -> Gather:
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
    bucket.prefetch()
    bucket.store.passes.running().leftovers.append(bucket.drop)  # this backward may end without using it


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


@dataclass(frozen=True)
class _Note:
    """What is saved in place of a gathered parameter, or of a view of it, which may be of another dtype.

    Attributes:
        view: the size, the stride and the dtype, and whether it is to be conjugated or negated where it is read.
        offset: from where the parameter begins, in bytes.
    """

    bucket: ParameterBucket
    value: int
    view: _torch.tensors.View
    offset: int


class RegatherHooks(torch.autograd.graph.saved_tensors_hooks):
    """Saves notes instead of gathered parameters while a body runs (see [Note: gather per use]).

    Args:
        buckets: the buckets gathered per use, in the order of their first uses.
    """

    def __init__(self, buckets: Sequence[ParameterBucket]) -> None:
        self._buckets = list(buckets)
        self._owners: dict[int, tuple[ParameterBucket, int, int]] = {}  # by the marks of storages
        self._storages: list[_torch.tensors.StorageWeakRef] = []  # so that no others get these marks
        self._notes: dict[ParameterBucket, int] = dict.fromkeys(buckets, 0)
        self._noted: dict[ParameterBucket, set[int]] = {bucket: set() for bucket in buckets}  # places of parameters
        self._started: dict[ParameterBucket, Gather] = {}  # ahead
        self._gathered: dict[ParameterBucket, dict[int, torch.Tensor]] = {}  # by places among the values
        self._visited: set[ParameterBucket] = set()
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        for bucket, following in zip(self._buckets, [*self._buckets[1:], None], strict=True):
            bucket.hooks, bucket.following = self, following
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        for bucket in self._buckets:
            bucket.hooks = None
            if args and args[0] is not None:
                bucket.drop()

    def note(self, bucket: ParameterBucket, values: Sequence[torch.Tensor]) -> None:
        """Notes the storages of a bucket that has just been gathered."""
        for i, (value, gathered) in enumerate(zip(values, bucket.gathered, strict=True)):
            if gathered:
                memory = value.untyped_storage()
                storage = _torch.tensors.StorageWeakRef(memory)
                self._storages.append(storage)
                self._owners[storage.cdata] = bucket, i, _torch.tensors.first_byte(value)
                if memory.nbytes() != value.nbytes:  # how it lies among others follows from what is gathered with it
                    self._noted[bucket].update(range(len(bucket.bucket.chains)))

    def regathered(self) -> list[Bucket]:
        """The buckets that the backward will gather again."""
        return [b.bucket for b, count in self._notes.items() if count]

    def _pack(self, tensor: torch.Tensor) -> _Note | tuple[torch.Tensor, int]:
        owner = self._owners.get(_torch.tensors.storage_mark(tensor))
        if owner is None:
            return tensor, tensor._version  # which torch does not compare where hooks save
        bucket, value, base = owner
        self._notes[bucket] += 1
        self._noted[bucket].add(value // len(bucket.bucket.chains[0].uses))
        return _Note(bucket, value, _torch.tensors.View.of(tensor), _torch.tensors.first_byte(tensor) - base)

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
        bucket = saved.bucket
        values = self._gathered.get(bucket)
        if values is None:
            with torch.no_grad():
                values = self._gathered[bucket] = self._gather(bucket)
            self._visited.add(bucket)
            self._prefetch_before(bucket)
        base = values[saved.value]
        self._notes[bucket] -= 1
        if self._notes[bucket] <= 0:
            del self._gathered[bucket]
        return saved.view.at(base, saved.offset)

    def _start(self, bucket: ParameterBucket) -> Gather:
        return bucket.start([bucket.bucket.chains[i] for i in sorted(self._noted[bucket])])

    def _gather(self, bucket: ParameterBucket) -> dict[int, torch.Tensor]:
        uses = len(bucket.bucket.chains[0].uses)
        places = [i * uses + use for i in sorted(self._noted[bucket]) for use in range(uses)]
        return dict(zip(places, (self._started.pop(bucket, None) or self._start(bucket))(), strict=True))

    def _drop(self, bucket: ParameterBucket) -> None:
        started = self._started.pop(bucket, None)
        if started is not None:
            started.abandon()

    def _prefetch_before(self, bucket: ParameterBucket) -> None:
        """Starts the gather that the backward most likely needs next: the bucket used just before this one."""
        for earlier in reversed(self._buckets[: self._buckets.index(bucket)]):
            if self._notes[earlier] > 0:
                if earlier not in self._gathered and earlier not in self._visited and earlier not in self._started:
                    self._started[earlier] = self._start(earlier)
                    # The backward may end without using it.
                    earlier.store.passes.running().leftovers.append(partial(self._drop, earlier))
                return
