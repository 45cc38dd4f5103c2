"""Making sure that all ranks are about to do the same, before any of them enters a collective.

A collective that ranks enter with different sizes aborts the process, with different dtypes or in another order gives
wrong numbers, and one that a rank leaves out hangs (see the table in ``docs/errors.md``).  So the ranks compare
digests first, over a group of their own on the CPU, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoparallel import _torch
from autoparallel.groups import CONTROL, CONTROL_TIMEOUT
from autoparallel.plan import PlanError

S = TypeVar("S")
T = TypeVar("T")
_GROUPS: dict[tuple[int, ...], Any] = {}


class RankMismatchError(RuntimeError):
    """The ranks are not doing the same; raised on all of them, before any collective of the model."""


def digest(*parts: object) -> bytes:
    """32 bytes that stand for some values."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part if isinstance(part, bytes) else repr(part).encode())
        h.update(b"\0")
    return h.digest()


def tensor_digest(x: torch.Tensor) -> bytes:
    """A digest of a tensor's values."""
    data = x.detach().cpu().contiguous()
    return hashlib.sha256(data.view(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"").digest()


class Agreement:
    """The ranks of one mesh, talking about what they are about to do."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self.alone = len(self.ranks) == 1
        self.group: Any = None
        if not self.alone:
            key = tuple(self.ranks)
            if key not in _GROUPS:
                _GROUPS[key] = dist.new_group(
                    self.ranks,
                    timeout=CONTROL_TIMEOUT,
                    backend="gloo",
                    use_local_synchronization=len(self.ranks) < dist.get_world_size(),
                    group_desc=CONTROL,
                )
            self.group = _GROUPS[key]

    def ask(self, mine: bytes) -> Callable[[], torch.Tensor]:
        """Sends this rank's digest, and returns a function that waits for every rank's: a table of a row each."""
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if self.alone:
            return lambda: own.unsqueeze(0)
        table = torch.empty(len(self.ranks), len(own), dtype=torch.uint8)
        work = _torch.all_gather_single(table.view(-1), own, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return table

        return wait

    def table(self, mine: bytes) -> torch.Tensor:
        """Every rank's digest, one row each."""
        return self.ask(mine)()

    def require_same(self, what: str, mine: bytes, describe: Callable[[], str]) -> None:
        """Raises on every rank when the digests differ on any.

        Args:
            what: what the digest is of, to begin the message with.
            describe: this rank's version, in words; asked for only when they differ.

        Raises:
            RankMismatchError: naming the ranks, and what each has.
        """
        table = self.table(mine)
        if bool((table == table[0]).all()):
            return
        self.fail(what, describe())

    def require_same_text(self, what: str, mine: str) -> None:
        """Raises on every rank when a text of several lines differs on any; the message shows the first such line."""
        table = self.table(digest(mine))
        if bool((table == table[0]).all()):
            return
        rows = itertools.zip_longest(*(text.splitlines() for text in self._texts(mine)), fillvalue="nothing more")
        raise _mismatch(what, self.ranks, next(row for row in rows if len(set(row)) > 1))

    def fail(self, what: str, own: str) -> NoReturn:
        """Raises ``RankMismatchError`` with every rank's description; all ranks must call it."""
        raise _mismatch(what, self.ranks, self._texts(own))

    def _texts(self, own: str) -> list[str]:
        texts: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(texts, own, group=self.group)
        return texts

    def together(self, action: Callable[[], T]) -> T:
        """Runs something that may raise; when it raises on any rank, every rank raises."""
        error: BaseException | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as caught:  # noqa: BLE001 - raised again below
            error = caught
        if not self.alone:
            texts: list[Any] = [None] * len(self.ranks)
            dist.all_gather_object(texts, None if error is None else str(error), group=self.group)
            failed = [(r, t) for r, t in zip(self.ranks, texts, strict=True) if t is not None]
            if failed and error is None:
                raise RankMismatchError(f"rank {failed[0][0]} failed: {failed[0][1]}")
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def share(self, action: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """What an action makes of every item, each done by one rank; raises on every rank where it does on one."""
        if self.alone:
            return [action(item) for item in items]
        place, count = self.ranks.index(dist.get_rank()), len(self.ranks)
        mine = self.together(lambda: [action(item) for item in items[place::count]])
        parts: list[Any] = [None] * count
        dist.all_gather_object(parts, mine, group=self.group)
        return [parts[i % count][i // count] for i in range(len(items))]

    def from_first(self, make: Callable[[], str]) -> str:
        """The text that the first rank makes, on all ranks; its error, if it raises, too."""
        if self.alone:
            return make()
        error: Exception | None = None
        box: list[Any] = [None]
        if dist.get_rank() == self.ranks[0]:
            try:
                box = [(None, make())]
            except Exception as caught:  # noqa: BLE001 - raised below, on every rank
                error, box = caught, [(type(caught), str(caught))]
        dist.broadcast_object_list(box, src=self.ranks[0], group=self.group)
        kind, text = box[0]
        if error is not None:
            raise error
        if kind is not None:
            raise (kind if issubclass(kind, PlanError) else RankMismatchError)(f"rank {self.ranks[0]}: {text}")
        return text


def _mismatch(what: str, ranks: Sequence[int], texts: Sequence[str]) -> RankMismatchError:
    having: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        having.setdefault(text, []).append(rank)
    lines = [f"  rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in having.items()]
    return RankMismatchError(f"{what}\n" + "\n".join(lines))


def forget_groups() -> None:
    """Forgets the groups; for processes that destroy their process groups and make new ones."""
    _GROUPS.clear()


__all__ = ["Agreement", "RankMismatchError", "digest", "forget_groups", "tensor_digest"]
