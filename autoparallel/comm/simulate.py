"""All ranks of a mesh as threads of one process, for tests and proofs: no process group, no launcher.

The operators of a program communicate through ``groups.communicator_of``; here that seam leads to a rendezvous of
threads.  Forward and backward both work, because eager autograd on a CPU runs the backward in the calling thread.

The ranks take turns: one runs until it waits for the others.  Threads that compete for the interpreter are slower.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoparallel.comm.groups import Wait, use_communicator
from autoparallel.placements import Layout


class _Rendezvous:
    def __init__(self, count: int, timeout: float) -> None:
        self.barrier = threading.Barrier(count, timeout=timeout)
        self.slots: list[Any] = [None] * count
        self.turn = threading.Lock()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self._wait()
        values = list(self.slots)
        self._wait()
        return values

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class _ThreadCommunicator:
    def __init__(self, rank: int, names: Sequence[str], shape: Sequence[int], meeting: _Rendezvous) -> None:
        self.rank, self.names, self.shape, self.meeting = rank, list(names), list(shape), meeting
        self.coordinates = list(torch.cartesian_prod(*[torch.arange(n) for n in shape]).view(-1, len(shape)).tolist())

    def _axes(self, axis: str) -> list[int]:
        return [self.names.index(name) for name in axis.split("+")]

    def size(self, axis: str) -> int:
        return int(torch.Size([self.shape[i] for i in self._axes(axis)]).numel())

    def index(self, axis: str) -> int:
        return self._position(self.rank, axis)

    def _position(self, rank: int, axis: str) -> int:
        position = 0
        for i in self._axes(axis):
            position = position * self.shape[i] + self.coordinates[rank][i]
        return position

    def _peers(self, axis: str) -> list[int]:
        axes = self._axes(axis)
        mine = self.coordinates[self.rank]
        same = [
            rank
            for rank, c in enumerate(self.coordinates)
            if all(c[i] == mine[i] for i in range(len(self.shape)) if i not in axes)
        ]
        return sorted(same, key=lambda rank: self._position(rank, axis))

    def _collect(self, x: torch.Tensor, axis: str, kind: str) -> list[torch.Tensor]:
        call = f"{kind} of {x.dtype} {tuple(x.shape)} over {axis!r}"
        met = self.meeting.exchange(self.rank, (call, x.detach().clone()))
        calls = [call for call, _ in met]
        if len(set(calls)) > 1:
            raise RuntimeError(f"the ranks meet in different collectives: {dict(enumerate(calls))}")
        return [met[peer][1] for peer in self._peers(axis)]

    def all_reduce(self, x: torch.Tensor, axis: str, op: str = "sum") -> Wait:
        stacked = torch.stack(self._collect(x, axis, f"all_reduce({op})"))
        x.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))
        return lambda: x

    def all_gather(self, x: torch.Tensor, axis: str) -> Wait:
        out = torch.stack(self._collect(x, axis, "all_gather"))
        return lambda: out

    def reduce_scatter(self, x: torch.Tensor, axis: str) -> Wait:
        out = torch.stack(self._collect(x, axis, "reduce_scatter")).sum(0)[self.index(axis)]
        return lambda: out

    def all_to_all(self, x: torch.Tensor, axis: str) -> Wait:
        index = self.index(axis)
        out = torch.stack([value[index] for value in self._collect(x, axis, "all_to_all")])
        return lambda: out

    def all_to_all_rows(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], axis: str
    ) -> torch.Tensor:
        met = self.meeting.exchange(self.rank, (axis, x.detach().clone(), list(sent)))
        if len({name for name, _, _ in met}) > 1:
            raise RuntimeError(f"the ranks meet in all_to_all_rows over different axes: {[m[0] for m in met]}")
        index = self.index(axis)
        out = torch.cat([met[peer][1].split(met[peer][2])[index] for peer in self._peers(axis)])
        if len(out) != sum(received):
            raise RuntimeError(f"rank {self.rank} expects {sum(received)} rows over {axis!r}, and is sent {len(out)}")
        return out


def simulate(
    function: Callable[[int], Any], shape: Sequence[int], names: Sequence[str], timeout: float = 60
) -> list[Any]:
    """Runs ``function(rank)`` for every rank of a mesh, each in a thread, and returns the results by rank.

    Args:
        function: what a rank does; its operators may name the axes under any prefix.
        shape, names: the mesh.
        timeout: for how many seconds ranks wait for one another in a collective.

    Raises:
        RuntimeError: when ranks meet in different collectives, or one does not come.
        the first exception of any rank; the other ranks are released.
    """
    count = int(torch.Size(shape).numel())
    meeting = _Rendezvous(count, timeout)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        use_communicator(_ThreadCommunicator(rank, names, shape, meeting))
        try:
            with meeting.turn:
                results[rank] = function(rank)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors.append(error)
            meeting.barrier.abort()
        finally:
            use_communicator(None)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if meeting.barrier.broken:
        raise RuntimeError(f"a rank did not come to a collective that the others waited in for {timeout} s")
    return results


class ReplicasDiffer(ValueError):
    """Ranks that should hold the same bits do not."""


def coordinates(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Every rank's coordinate on a mesh, in the order of ranks."""
    return list(itertools.product(*(range(n) for n in shape)))


def combine(values: Sequence[torch.Tensor], layout: Layout, shape: Sequence[int]) -> torch.Tensor:
    """The global value of what the ranks of a mesh hold.

    Raises:
        ReplicasDiffer: when ranks that must hold the same hold other bits.
    """
    axes = [axis for axis, placement in enumerate(layout) if placement.kind in "SP"]
    pieces: dict[tuple[int, ...], torch.Tensor] = {}
    for at, value in zip(coordinates(shape), values, strict=True):
        same = pieces.setdefault(tuple(at[axis] for axis in axes), value)
        if not torch.equal(same.nan_to_num(), value.nan_to_num()):
            raise ReplicasDiffer("ranks that hold the same differ")
    for axis in reversed(axes):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for at in sorted(pieces):
            groups.setdefault(at[:-1], []).append(pieces[at])
        placement = layout[axis]
        pieces = {
            at: torch.cat(parts, placement.dim) if placement.kind == "S" else sum(parts[1:], parts[0])
            for at, parts in groups.items()
        }
    return pieces[()]
