"""Buckets of parameters at run time: gathered together, their gradients received together.

[Note: gather per use] A bucket that is gathered per use keeps nothing for the backward: while the body runs,
saved-tensor hooks recognise what operators save of a gathered parameter, by its storage, and save a note instead; the
backward gathers the bucket again.  The next bucket's gather is started ahead, in the forward and in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from autoparallel import _torch
from autoparallel.passes.bucket_collectives import Bucket
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.passes.recompute_layers import Region
from autoparallel.runtime.backwards import BackwardPasses, Tensors, Travel


class Gather:
    """The parameters of a bucket on their way to their uses; a call waits for them.

    Args:
        count: of the parameters.
        travels: one for each use, of all parameters.
    """

    def __init__(self, count: int, travels: Sequence[Travel]) -> None:
        self._count, self._travels = count, travels

    def __call__(self) -> Tensors:
        """This rank's values, parameter by parameter, for each of its uses; asked for once."""
        columns = [travel() for travel in self._travels]
        return [column[i] for i in range(self._count) for column in columns]

    def abandon(self) -> None:
        """Waits for what is under way, and forgets it."""
        for travel in self._travels:
            travel.abandon()


Grads = Sequence[Sequence[torch.Tensor | None]]
"""The gradients of a bucket's parameters: for each, one for every use; None where none was reached."""


class GradientReceiver(Protocol):
    """What the boundary between parameters and a program needs: the parameters, and where their gradients go."""

    synchronise: bool

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...
    @property
    def passes(self) -> BackwardPasses: ...
    @property
    def kept(self) -> dict[ParameterBucket, None]: ...
    def gather(self, chains: Sequence[ParameterChain], values: Tensors) -> Gather: ...
    def receive(
        self, chains: Sequence[ParameterChain], grads: Grads, accumulated: Sequence[bool]
    ) -> list[torch.Tensor | None]: ...


def reached(
    chains: Sequence[ParameterChain], grads: Grads, accumulated: Sequence[bool] | None = None
) -> list[tuple[ParameterChain, Sequence[torch.Tensor | None]]]:
    """The parameters of a bucket that a backward has reached, with their gradients.

    Args:
        accumulated: where ``.grad`` is added to, for which of them; None where gradients are handed on.

    Raises:
        RuntimeError: where ``.grad`` of none is added to.
    """
    if accumulated is not None and not any(accumulated):
        raise RuntimeError(
            "torch.autograd.grad() with respect to parameters is not supported on a model compiled by "
            "autoparallel\nWhat to change: call backward() and read .grad."
        )
    wanted = accumulated or [True] * len(chains)
    rows = zip(chains, grads, wanted, strict=True)
    return [(chain, row) for chain, row, want in rows if want and any(grad is not None for grad in row)]


class ParameterBucket(nn.Module):
    """Gathers the parameters of one bucket; called by the program, with no arguments.

    Args:
        bucket: what it holds and how it gathers.
        store: where its gradients go.
    """

    def __init__(self, bucket: Bucket, store: GradientReceiver) -> None:
        super().__init__()
        self.bucket = bucket
        self.store = store
        self.placeholders = [name for chain in bucket.chains for name in chain.placeholders]
        self.hooks: RegatherHooks | None = None
        self.following: ParameterBucket | None = None
        self._started: Gather | None = None
        self._kept: tuple[Tensors, Tensors] | None = None  # what was gathered, and the parameters then

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The bucket's parameters in the layouts of their uses, parameter by parameter."""
        values = _Unshard.apply(self, *(self.store.parameters[c.name] for c in self.bucket.chains))
        if self.hooks is not None:
            self.hooks.own(self, values)
            if self.following is not None:
                self.following.prefetch()
        return values

    def local_parameters(self) -> Tensors:
        """This rank's tensors of the parameters at rest."""
        return [_torch.local_of(self.store.parameters[c.name]).detach() for c in self.bucket.chains]

    def prefetch(self) -> None:
        """Starts the gather whose result the next ``gather`` returns."""
        if self._started is None:
            self._started = self._start()

    def drop(self) -> None:
        """Waits for what is under way of a gather that has been started, and forgets it."""
        started, self._started = self._started, None
        if started is not None:
            started.abandon()

    def gather(self) -> Tensors:
        """This rank's values for every use."""
        if self.bucket.gather == "per_step":
            return self._once_per_step()
        started, self._started = self._started or self._start(), None
        return started()

    def _once_per_step(self) -> Tensors:
        """Keeps what is gathered under ``no_sync()`` for the calls that follow (see ``GradientStore.drop_stale``)."""
        copy, self._kept = self._kept, None
        values = self._start()() if copy is None else copy[0]
        if self.store.synchronise:
            self.store.kept.pop(self, None)
        else:
            self._kept = values, [p.clone() for p in self.local_parameters()] if copy is None else copy[1]
            self.store.kept[self] = None
        return values

    def has_changed(self) -> bool:
        """Whether this rank's part of a parameter is no longer the one of the kept copy.

        Values are compared, because writing through ``p.data`` or by an operator over lists of tensors, as optimizers
        use them, changes no version of a ``DTensor``.
        """
        pairs = () if self._kept is None else zip(self._kept[1], self.local_parameters(), strict=True)
        return any(not torch.equal(before, now) for before, now in pairs)

    def forget(self) -> None:
        """Drops the kept copy."""
        self._kept = None

    def _start(self) -> Gather:
        return self.store.gather(self.bucket.chains, self.local_parameters())


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
        return tuple(value.view_as(value) for value in bucket.gather())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        bucket: ParameterBucket = ctx.bucket
        chains = bucket.bucket.chains
        uses = len(chains[0].uses)
        rows = [list(grads[i * uses : (i + 1) * uses]) for i in range(len(chains))]
        return None, *bucket.store.receive(chains, rows, _torch.accumulated(ctx, len(chains)))


@dataclass(frozen=True)
class _Note:
    """What is saved in place of a gathered parameter, or of a view of it."""

    bucket: ParameterBucket
    value: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class RegatherHooks(torch.autograd.graph.saved_tensors_hooks):
    """Saves notes instead of gathered parameters while a body runs (see [Note: gather per use]).

    Args:
        buckets: the buckets gathered per use, in the order of their first uses.
    """

    def __init__(self, buckets: Sequence[ParameterBucket]) -> None:
        self._buckets = list(buckets)
        self._owners: dict[_torch.StorageWeakRef, tuple[ParameterBucket, int, int]] = {}
        self._notes: dict[ParameterBucket, int] = dict.fromkeys(buckets, 0)
        self._gathered: dict[ParameterBucket, Tensors] = {}
        self._seen: set[ParameterBucket] = set()
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

    def own(self, bucket: ParameterBucket, values: Sequence[torch.Tensor]) -> None:
        """Notes the storages of a bucket that has just been gathered."""
        at_rest = {_torch.StorageWeakRef(p.untyped_storage()) for p in bucket.local_parameters()}
        for i, value in enumerate(values):
            storage = _torch.StorageWeakRef(value.untyped_storage())
            if storage not in at_rest:
                self._owners[storage] = bucket, i, int(value.storage_offset())

    def regathered(self) -> list[Bucket]:
        """The buckets that the backward will gather again."""
        return [b.bucket for b, count in self._notes.items() if count]

    def _pack(self, tensor: torch.Tensor) -> _Note | tuple[torch.Tensor, int]:
        owner = self._owners.get(_torch.StorageWeakRef(tensor.untyped_storage()))
        if owner is None:
            return tensor, tensor._version  # which torch does not compare where hooks save
        bucket, value, base = owner
        self._notes[bucket] += 1
        offset = int(tensor.storage_offset()) - base
        return _Note(bucket, value, tensor.size(), tensor.stride(), offset)

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
                values = self._gathered[bucket] = bucket.gather()
            self._seen.add(bucket)
            self._prefetch_before(bucket)
        base = values[saved.value]
        self._notes[bucket] -= 1
        if self._notes[bucket] <= 0:
            del self._gathered[bucket]
        return base.as_strided(saved.size, saved.stride, saved.offset + base.storage_offset())

    def _prefetch_before(self, bucket: ParameterBucket) -> None:
        """Starts the gather that the backward most likely needs next: the bucket used just before this one."""
        for earlier in reversed(self._buckets[: self._buckets.index(bucket)]):
            if self._notes[earlier] > 0:
                if earlier not in self._gathered and earlier not in self._seen:
                    earlier.prefetch()
                    earlier.store.passes.running().leftovers.append(earlier.drop)  # it may end without using it
                return
