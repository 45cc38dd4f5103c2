"""Which rows of a batch each rank wants, and batches of which every rank has its own rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree
from torch.utils.data import Sampler

from autoparallel.comm.groups import communicator_of, group_name
from autoparallel.comm.world import from_host
from autoparallel.graph.captured import Captured
from autoparallel.graph.nesting import flatten

T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """Which of the equal parts of a batch a rank wants.

    Attributes:
        axes: the mesh axes over which batches are cut.
        count: the number of parts.
        index: this rank's.
    """

    axes: tuple[int, ...]
    count: int
    index: int

    @staticmethod
    def on(mesh: DeviceMesh, axes: tuple[int, ...]) -> Rows:
        """The rows of this rank, where a batch is cut over some axes of a mesh."""
        coordinate, index = mesh.get_coordinate(), 0
        assert coordinate is not None
        for axis in axes:
            index = index * mesh.size(axis) + coordinate[axis]
        return Rows(axes, math.prod(mesh.size(axis) for axis in axes), index)

    def part(self, size: int) -> range:
        """The rows of this rank in a batch of ``size``; the first parts have one more where they are not equal."""
        each, more = divmod(size, self.count)
        start = self.index * each + min(self.index, more)
        return range(start, start + each + (self.index < more))


def batch_axes(captured: Captured) -> tuple[int, ...]:
    """The mesh axes over which a program cuts the rows of its first tensor, from what its passes have noted."""
    axes: set[int] = set()

    def follow(node: fx.Node) -> None:
        axes.update(i for i, p in enumerate(node.meta["placements"]) if p.kind == "S" and p.dim == 0)
        for user in node.users:
            if "redistribution" in user.meta:
                follow(user)

    first = next(
        (x for x in captured.input_nodes if isinstance(x.meta["val"], torch.Tensor) and x.meta["val"].ndim), None
    )
    if first is not None:
        follow(first)
    return tuple(sorted(axes))


def from_rows(batch: T, rows: Rows, mesh: DeviceMesh, prefix: str, all_counts: Callable[[int], list[int]]) -> T:
    """See ``ParallelModule.local_rows``; ``all_counts`` shows every rank how many rows each of them has."""
    leaves, spec = flatten(batch)
    row_count = next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim), 0)
    table = torch.tensor(all_counts(row_count)).view(tuple(mesh.shape))
    parts = table.permute(*rows.axes, *(i for i in range(mesh.ndim) if i not in rows.axes)).reshape(rows.count, -1)
    if bool((parts != parts[:, :1]).any()):
        raise ValueError(
            f"local_rows(): ranks that want the same rows have {sorted(set(table.flatten().tolist()))} of them; the "
            f"plan cuts a batch into {rows.count} parts (model.sampler() hands them out)"
        )
    if rows.count == 1:
        return batch
    counts = parts[:, 0].tolist()
    placements = [Shard(0) if axis in rows.axes else Replicate() for axis in range(mesh.ndim)]
    group = group_name(prefix, mesh.mesh_dim_names or (), rows.axes)
    for i, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor) or not x.ndim or not row_count or x.shape[0] % row_count:
            continue
        x = from_host(x, mesh)
        if len(set(counts)) == 1:
            leaves[i] = DTensor.from_local(x, mesh, placements, run_check=False)
        else:
            leaves[i] = _gather(x, [count * (x.shape[0] // row_count) for count in counts], group)
    return pytree.tree_unflatten(leaves, spec)


def _gather(x: torch.Tensor, counts: list[int], group: str) -> torch.Tensor:
    """The rows of all ranks of a group, which have different numbers of them."""
    if x.requires_grad:
        raise ValueError("local_rows(): ranks have different numbers of rows, and an input that is differentiated")
    communicator, axis = communicator_of(group)
    padded = x.new_zeros((max(counts), *x.shape[1:]))
    padded[: x.shape[0]] = x
    parts = communicator.all_gather(padded, axis)()
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


class RowSampler(Sampler[list[int]]):
    """Yields, batch by batch, the indices of the samples that this rank reads; see ``ParallelModule.sampler``.

    Args:
        rows_of: tells which rows this rank wants, once there is a plan.
        samples: how many there are.
        batch_size: of the batch of all ranks.
        shuffle: whether every epoch has an order of its own.
        seed: what the orders follow from, with the epoch; the same on every rank.
        drop_last: whether samples that fill no batch are left out.

    Attributes:
        epoch: the number of the epoch that comes or runs; it grows by itself.
    """

    def __init__(
        self, rows_of: Callable[[], Rows], samples: int, batch_size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        self._rows_of, self._samples, self._batch_size = rows_of, samples, batch_size
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._next = self._start = 0  # by number among all ranks' samples of the epoch

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return (self._samples if self._drop_last else self._samples + self._batch_size - 1) // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        rows, size = self._rows_of(), self._batch_size
        last = 0 if self._drop_last else self._samples % size
        for length in (size, last):
            if 0 < length < rows.count and self._samples >= length:
                raise ValueError(
                    f"a batch of {length} samples leaves ranks without any, where the plan cuts batches into "
                    f"{rows.count} parts: use drop_last=True, or another batch_size"
                )
        start, self._start = self._start, 0
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        order = torch.randperm(self._samples, generator=generator).tolist() if self._shuffle else range(self._samples)
        for first in range(start, len(self) * size, size):
            batch = order[first : first + size]
            self._next = first + len(batch)
            yield [batch[row] for row in rows.part(len(batch))]
        self.epoch, self._next = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes, where it is not the one after the last."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """The place in the data by the number of the sample that comes next; it holds on any mesh."""
        return {"epoch": self.epoch, "seed": self._seed, "sample": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from a place: the next iteration begins there."""
        self.epoch, self._seed = state["epoch"], state["seed"]
        self._start = self._next = state["sample"]


def count_samples(dataset: object) -> int:
    """How many samples a dataset has.

    Raises:
        TypeError: where it does not know.
    """
    if isinstance(dataset, int):
        return dataset
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"sampler() needs a dataset that has a length, not a {type(dataset).__name__}: let an iterable dataset "
            "yield each rank's rows itself, and give them to model.local_rows()"
        )
    return len(dataset)
