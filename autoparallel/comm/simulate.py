"""All ranks of a mesh as threads of one process, for tests and proofs: no process group, no launcher.

Operators and the runtime, pipelines included, communicate through ``groups.communicator_of``; here that seam leads to
a meeting of threads.  Forward and backward both work, because eager autograd on a CPU runs the backward in the calling
thread.

The ranks take turns: one runs until it waits for the others.  Threads that compete for the interpreter are slower, and
ranks that all wait for one another are found out at once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoparallel.comm.communicator import Wait
from autoparallel.comm.groups import COMMUNICATOR
from autoparallel.placements import Layout


class _Meeting:
    """Where the ranks hand values to one another, one of them running at a time."""

    def __init__(self, count: int) -> None:
        self.turn = threading.Condition()
        self.failure: BaseException | None = None
        self._running = count
        self._waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self._rounds: dict[Any, dict[int, tuple[str, Any]]] = {}
        self._counts: dict[Any, int] = {}
        self._messages: dict[Any, list[torch.Tensor]] = {}
        self._receives: dict[Any, int] = {}

    def exchange(self, rank: int, peers: Sequence[int], call: str, value: Any) -> list[Any]:
        """What every one of the peers, of whom this rank is one, has brought to the same call."""
        group = tuple(peers)
        number = self._counts[rank, group] = self._counts.get((rank, group), 0) + 1
        met = self._rounds.setdefault((group, number), {})
        met[rank] = call, value
        self._wait(rank, call, lambda: len(met) == len(group))
        if len({call for call, _ in met.values()}) > 1:
            raise RuntimeError(f"the ranks meet in different collectives: { {r: c for r, (c, _) in met.items()} }")
        self._rounds.pop((group, number), None)
        return [met[peer][1] for peer in peers]

    def send(self, source: int, target: int, axis: str, x: torch.Tensor) -> None:
        """Leaves a message."""
        self._messages.setdefault((source, target, axis), []).append(x.detach().clone())
        self.turn.notify_all()

    def receive(self, source: int, target: int, axis: str) -> Callable[[], torch.Tensor]:
        """Asks for a message, and returns a function that waits for it: messages go to who asked first."""
        key = source, target, axis
        number = self._receives[key] = self._receives.get(key, -1) + 1
        queue = self._messages.setdefault(key, [])

        def wait() -> torch.Tensor:
            self._wait(target, f"receive from rank {source} over {axis!r}", lambda: len(queue) > number)
            return queue[number]

        return wait

    def leave(self, failure: BaseException | None) -> None:
        """A rank has come to its end; its failure releases the others."""
        self._running -= 1
        self.failure = self.failure or failure
        self._look()
        self.turn.notify_all()

    def _wait(self, rank: int, call: str, ready: Callable[[], bool]) -> None:
        self._waiting[rank] = call, ready
        self._look()
        self.turn.notify_all()
        self.turn.wait_for(lambda: self.failure is not None or ready())
        del self._waiting[rank]
        if self.failure is not None:
            raise _Released

    def _look(self) -> None:
        """Finds out whether every rank waits for another."""
        waits = [self._waiting[rank] for rank in sorted(self._waiting)]
        if self.failure is not None or not waits or len(waits) < self._running or any(ready() for _, ready in waits):
            return
        alike = len({call for call, _ in waits}) == 1
        why = "wait for one that did not come" if alike else "wait in different collectives"
        calls = {rank: call for rank, (call, _) in sorted(self._waiting.items())}
        self.failure = RuntimeError(f"the ranks {why}: {calls}")


class _Released(BaseException):
    """Ends a rank whose peers have failed."""


class _ThreadCommunicator:
    def __init__(self, rank: int, names: Sequence[str], shape: Sequence[int], meeting: _Meeting) -> None:
        self.rank, self.names, self.shape, self.meeting = rank, list(names), list(shape), meeting
        self.coordinates = coordinates(shape)

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

    def ranks(self, axis: str) -> list[int]:
        axes = self._axes(axis)
        here = self.coordinates[self.rank]
        same = [
            rank
            for rank, c in enumerate(self.coordinates)
            if all(c[i] == here[i] for i in range(len(self.shape)) if i not in axes)
        ]
        return sorted(same, key=lambda rank: self._position(rank, axis))

    def settle(self) -> None:
        pass

    def send(self, x: torch.Tensor, axis: str, peer: int) -> Wait:
        self.meeting.send(self.rank, self.ranks(axis)[peer], axis, x)
        return lambda: x

    def receive(self, out: torch.Tensor, axis: str, peer: int) -> Wait:
        wait = self.meeting.receive(self.ranks(axis)[peer], self.rank, axis)
        return lambda: out.copy_(wait())

    def _collect(self, x: torch.Tensor, axis: str, kind: str) -> list[torch.Tensor]:
        call = f"{kind} of {x.dtype} {tuple(x.shape)} over {axis!r}"
        return self.meeting.exchange(self.rank, self.ranks(axis), call, x.detach().clone())

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
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], axis: str
    ) -> torch.Tensor:
        peers = self.ranks(axis)
        brought = x.detach().clone(), list(send_counts)
        met = self.meeting.exchange(self.rank, peers, f"all_to_all_rows over {axis!r}", brought)
        index = self.index(axis)
        out = torch.cat([rows.split(counts)[index] for rows, counts in met])
        if len(out) != sum(receive_counts):
            raise RuntimeError(
                f"rank {self.rank} expects {sum(receive_counts)} rows over {axis!r}, and is sent {len(out)}"
            )
        return out


def simulate(function: Callable[[int], Any], shape: Sequence[int], names: Sequence[str]) -> list[Any]:
    """Runs ``function(rank)`` for every rank of a mesh, each in a thread, and returns the results by rank.

    Args:
        function: what a rank does; its operators may name the axes under any prefix.
        shape, names: the mesh.

    Raises:
        RuntimeError: when ranks meet in different collectives, or every rank waits for one that does not come.
        the first exception of any rank; the other ranks are released.
    """
    count = int(torch.Size(shape).numel())
    meeting = _Meeting(count)
    results: list[Any] = [None] * count

    def body(rank: int) -> None:
        failure: BaseException | None = None
        with COMMUNICATOR.using(_ThreadCommunicator(rank, names, shape, meeting)), meeting.turn:
            try:
                results[rank] = function(rank)
            except _Released:
                pass
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                failure = error
            finally:
                meeting.leave(failure)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.failure is not None:
        raise meeting.failure
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
