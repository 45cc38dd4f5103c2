"""What lies alike on several ranks, and whether it does: parameters along the axes that do not shard them, buffers.

[Note: digests of replicas] A rank's memory or arithmetic that has erred once leaves a parameter that differs from its
replicas in some bits, and every later step makes more of it; nothing else shows that.  So now and then each rank shows
the others, in the exchange before a call, one number for all that it shares along the same axes.  On a CPU a tensor's
number is XXH3 of its bytes, which takes them as fast as memory gives them.  On other devices it is a sum of its words
with fixed odd weights, modulo 2^64, which is taken there: one word that differs always changes it, several do but for
one case in 2^32.  Moments of optimizers need no look of their own: where they differ, the next step moves the
parameter apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.checkpoint.folder import bytes_of
from autoparallel.comm.waiting import RankMismatchError
from autoparallel.comm.world import PIPELINE_AXIS
from autoparallel.runtime.parameters.slices import lies_elsewhere
from autoparallel.runtime.ranks.agreement import Agreement, digest

SETS = 8
"""The sets of tensors that a rank shares with others: one for each set of a mesh's three axes; the first, of none, is
that of the buffers, which all ranks share."""

SIZE = 8 * SETS
"""Bytes of a rank's digests."""

NAMED = 5
"""So many tensors an error names."""


class Replicas:
    """Compares what ranks have alike.

    Args:
        model: the model.
        mesh: tells the mesh of all ranks, which the first call may choose.
        every: from one comparison to the next it is so many calls; the first is at the first call.
    """

    def __init__(self, model: nn.Module, mesh: Callable[[], DeviceMesh], every: int) -> None:
        self.every = every
        self._model, self._mesh = model, mesh
        self._weights: dict[torch.device, Tensor] = {}

    def is_due(self, call: int) -> bool:
        """Whether they are compared before a call; calls are counted from 1."""
        return (call - 1) % self.every == 0

    def digests(self) -> bytes:
        """The digests of what this rank shares with others, for each set 8 bytes."""
        sets: list[list[tuple[str, int]]] = [[] for _ in range(SETS)]
        for name, mask, value in self._values():
            sets[mask].append((name, value))
        return b"".join(digest(*entries)[:8] for entries in sets)

    def require_same(self, shown: Tensor, agreement: Agreement, call: int) -> None:
        """Raises on every rank where replicas differ.

        Args:
            shown: every rank's digests, uint8 [ranks, SIZE].

        Raises:
            RankMismatchError: naming what differs, and where.
        """
        mesh = self._mesh()
        grid = shown.view(-1, SETS, 8)[_rows(mesh, agreement)]  # uint8 [*mesh, SETS, 8]
        if all(_is_same(grid[..., mask, :], _axes(mask, mesh)) for mask in range(SETS)):
            return
        agreement.mismatches += 1
        numbers = agreement.gather({name: (mask, value) for name, mask, value in self._values()})
        lines: list[str] = []
        for name in dict.fromkeys(name for values in numbers for name in values):
            having = {
                rank: values[name] for rank, values in zip(agreement.ranks, numbers, strict=True) if name in values
            }
            mask = next(mask for mask, _ in having.values())
            lines.extend(
                f"  {name}: {text}"
                for group in _groups(mesh.mesh, _axes(mask, mesh))
                if (text := _difference({rank: having[rank][1] for rank in group if rank in having}))
            )
        more = [f"  and {len(lines) - NAMED} more"] if len(lines) > NAMED else []
        raise RankMismatchError(
            "\n".join([
                f"the ranks have different values of what must be equal on them, before call {call}:",
                *lines[:NAMED],
                *more,
                "A rank has computed or kept something wrong, or a script has changed its values alone (under "
                "no_grad). Go on from the last checkpoint, without that machine if it is always the same one",
            ])
        )  # fmt: skip

    def _values(self) -> Iterator[tuple[str, int, int]]:
        """Name, set and number of every tensor that this rank shares with others."""
        named: list[tuple[str, int]] = []
        tensors: list[Tensor] = []
        for name, tensor in [*self._model.named_parameters(), *_torch.tensors.sorted_buffers(self._model)]:
            local, mask = _torch.dtensor.local_of(tensor).detach(), 0
            if lies_elsewhere(tensor):
                continue
            if isinstance(tensor, DTensor):
                mask = sum(1 << axis for axis, p in enumerate(tensor.placements) if not p.is_shard())
                if not mask:
                    continue
            if not local.is_meta:
                for place, part in enumerate(_torch.tensors.dense_parts(local)):
                    named.append((f"{name}, part {place}" if place else name, mask))
                    tensors.append(self._number(part))
        numbers = torch.stack([number.to(tensors[0].device) for number in tensors]).tolist() if tensors else []
        yield from ((name, mask, number) for (name, mask), number in zip(named, numbers, strict=True))

    def _number(self, x: Tensor) -> Tensor:
        """See [Note: digests of replicas]; int64 scalar on the device of ``x``."""
        if x.device.type != "cpu":
            return self._weighted_sum(x)
        return torch.tensor(xxhash.xxh3_64_intdigest(bytes_of(x.contiguous())) - 2**63)

    def _weighted_sum(self, x: Tensor) -> Tensor:
        if x.device not in self._weights:
            weights = torch.randint(-(2**63), 2**63 - 1, (1 << 22,), generator=torch.Generator().manual_seed(0))
            self._weights[x.device] = weights.bitwise_or(1).to(x.device)
        weights = self._weights[x.device]
        word = {1: torch.int8, 2: torch.int16}.get(x.dtype.itemsize, torch.int32)
        number = torch.zeros((), dtype=torch.int64, device=x.device)
        for words in x.contiguous().view(-1).view(word).split(len(weights)):
            number = number * 0x5DEECE66D + (words * weights[: len(words)]).sum()
        return number


def _rows(mesh: DeviceMesh, agreement: Agreement) -> Tensor:
    """Where each rank of a mesh stands among the rows of an exchange; int64 [*mesh]."""
    return torch.searchsorted(torch.tensor(agreement.ranks), mesh.mesh.long())


def _axes(mask: int, mesh: DeviceMesh) -> tuple[int, ...]:
    """The axes of the mesh of all ranks along which a set is the same; a pipeline's holds other parameters."""
    if not mask:
        return tuple(range(mesh.ndim))
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    inner = [axis for axis, name in enumerate(names) if name != PIPELINE_AXIS]  # which may stand anywhere
    return tuple(axis for bit, axis in enumerate(inner) if mask >> bit & 1)


def _is_same(digests: Tensor, axes: Sequence[int]) -> bool:
    first = digests
    for axis in axes:
        first = first.narrow(axis, 0, 1)
    return bool((digests == first).all())


def _groups(ranks: Tensor, axes: Sequence[int]) -> list[list[int]]:
    """The ranks of a mesh that have the same along some axes."""
    others = [axis for axis in range(ranks.ndim) if axis not in axes]
    size = math.prod(ranks.shape[axis] for axis in axes)
    groups: list[list[int]] = ranks.permute(*others, *axes).reshape(-1, size).tolist()
    return groups


def _difference(values: dict[int, int]) -> str:
    """Which ranks have other values than most; nothing where all are the same."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return ""
    if counts[0][1] == counts[1][1]:
        return f"ranks {', '.join(map(str, values))} do not have the same"
    odd = [str(rank) for rank, value in values.items() if value != counts[0][0]]
    rest = [str(rank) for rank, value in values.items() if value == counts[0][0]]
    return f"rank{'s' * (len(odd) > 1)} {', '.join(odd)} differ{'s' * (len(odd) < 2)} from {', '.join(rest)}"
