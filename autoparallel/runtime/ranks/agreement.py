"""Making sure that all ranks are about to do the same, before any of them enters a collective.

A collective that ranks enter with different sizes aborts the process, with different dtypes or in another order gives
wrong numbers, and one that a rank leaves out hangs (see the table in ``docs/errors.md``).  So the ranks compare
digests first, over a group of their own on the CPU, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoparallel import _torch
from autoparallel.checkpoint.folder import bytes_of
from autoparallel.comm import waiting
from autoparallel.comm.groups import CONTROL
from autoparallel.comm.waiting import Place, RankMismatchError
from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.errors import ReadAgainError

S = TypeVar("S")
T = TypeVar("T")

ROW = 160
"""The bytes that a rank shows the others at once: as many in every exchange, so that any two of them can meet."""


def digest(*parts: object) -> bytes:
    """32 bytes that stand for some values."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part if isinstance(part, bytes) else repr(part).encode())
        h.update(b"\0")
    return h.digest()


def tensor_digest(x: torch.Tensor) -> bytes:
    """A digest of a tensor's values."""
    return hashlib.sha256(bytes_of(x.detach().cpu().contiguous())).digest()


def is_same(digests: torch.Tensor) -> bool:
    """Whether all ranks have the same digest, one row each."""
    return bool((digests == digests[0]).all())


class Agreement:
    """Some ranks, talking about what they are about to do; one object for all meshes of them and models on these.

    Args:
        ranks: as they stand in every process group.
        device: the kind of device of their meshes, whose time-out theirs is.

    Attributes:
        group: the process group; None for one rank.
        mismatches: how often the ranks have found that they do not do the same.
    """

    def __init__(self, ranks: list[int], device: str) -> None:
        self.ranks, self.alone, self.mismatches = ranks, len(ranks) == 1, 0
        self._models, self._exchanges = 0, 0
        self._outstanding: Callable[[], None] | None = None  # the check of the last exchange, while nobody has made it
        self.group: Any = None
        if not self.alone:
            self.group = dist.new_group(
                ranks,
                timeout=_torch.distributed.timeout_of(dist.group.WORLD, device),
                backend="gloo",
                use_local_synchronization=len(ranks) < dist.get_world_size(),
                group_desc=CONTROL,
            )

    @property
    def is_open(self) -> bool:
        """Whether the process group has not been destroyed."""
        return self.group is None or _torch.distributed.is_open(self.group)

    def next_model(self) -> int:
        """The number of a model that is compiled now, among those on the same ranks."""
        self._models += 1
        return self._models

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that makes what only one of them makes."""
        return self.alone or dist.get_rank() == self.ranks[0]

    @property
    def broken(self) -> str | None:
        """Why these ranks cannot go on, if they cannot."""
        return waiting.broken(self.ranks)

    def ask(self, row_digest: bytes, what: str = "compile()") -> Callable[[], torch.Tensor]:
        """Sends this rank's digest, and returns a function that waits for every rank's: a table of a row each.

        Args:
            row_digest: this rank's; at most ``ROW`` bytes are sent together with those of any other exchange.
            what: what the ranks are about to do, for errors.
        """
        row = torch.frombuffer(bytearray(row_digest.ljust(ROW, b"\0")), dtype=torch.uint8)
        if self.alone:
            return lambda: row.unsqueeze(0)
        self.settle()
        self._exchanges += 1
        waiting.enter(Place(tuple(self.ranks), self._exchanges, what))
        table = torch.empty(len(self.ranks), len(row), dtype=torch.uint8)
        with waiting.explained():
            work = _torch.distributed.all_gather_single(table.view(-1), row, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            waiting.wait(work, True)
            return table

        return wait

    def later(self, check: Callable[[], None]) -> Callable[[], None]:
        """A check that is made once: when it is called, or at the latest before these ranks' next exchange."""

        def once() -> None:
            if self._outstanding is once:
                self._outstanding = None
                check()

        self._outstanding = once
        return once

    def settle(self) -> None:
        """Makes the check of the last exchange, if nobody has."""
        if self._outstanding is not None:
            self._outstanding()

    def require_same(self, digests: torch.Tensor, what: str, describe: Callable[[], str]) -> None:
        """Raises on every rank when the digests differ on any.

        Args:
            digests: every rank's, one row each.
            what: what they are of, to begin the message with.
            describe: this rank's version, in words; asked for only when they differ.

        Raises:
            RankMismatchError: naming the ranks, and what each has.
        """
        if not is_same(digests):
            self.mismatches += 1
            raise _mismatch(what, self.ranks, self.gather(describe()))

    def is_same_text(self, text_here: str) -> bool:
        """Whether all ranks have the same text."""
        return is_same(self.ask(digest(text_here))())

    def require_same_text(self, what: str, text_here: str, cure: str = "") -> None:
        """Raises on every rank when a text of several lines differs on any; the message shows the first such line, and
        ends with the cure."""
        if self.is_same_text(text_here):
            return
        rows = itertools.zip_longest(*(text.splitlines() for text in self.gather(text_here)), fillvalue="nothing more")
        error = _mismatch(what, self.ranks, next(row for row in rows if len(set(row)) > 1))
        raise RankMismatchError(f"{error}\n{cure}") if cure else error

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, in the order of their numbers."""
        parts: list[Any] = [value] * len(self.ranks)
        if not self.alone:
            with waiting.explained():
                dist.all_gather_object(parts, value, group=self.group)
        return parts

    @contextmanager
    def together(self) -> Iterator[None]:
        """When something inside raises on any rank, every rank raises; where only some would read a call again, the
        same error."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - raised again below
            error = caught
        reads_again = isinstance(error, ReadAgainError)
        failures = self.gather(None if error is None else (isinstance(error, PlanError), str(error), reads_again))
        if len({failure is not None and failure[2] for failure in failures}) > 1:
            texts = ["it is captured" if failure is None else failure[1] for failure in failures]
            raise _mismatch("the ranks capture the call differently:", self.ranks, texts)
        if error is not None:
            raise error
        for rank, failure in zip(self.ranks, failures, strict=True):
            if failure is not None:
                is_about_plan, text, _ = failure
                raise (PlanError if is_about_plan else RankMismatchError)(f"rank {rank} failed: {text}")

    def share(self, action: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """What an action makes of every item, each done by one rank; raises on every rank where it does on one."""
        place, count = self.ranks.index(dist.get_rank()), len(self.ranks)
        with self.together():
            part = [action(item) for item in items[place::count]]
        parts = self.gather(part)
        return [parts[i % count][i // count] for i in range(len(items))]

    def of_first(self, text: str) -> str:
        """What the first rank gives, on all ranks."""
        box = [text]
        if not self.alone:
            with waiting.explained():
                dist.broadcast_object_list(box, src=self.ranks[0], group=self.group)
        return box[0]


def _mismatch(what: str, ranks: Sequence[int], texts: Sequence[str]) -> RankMismatchError:
    having: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        having.setdefault(text, []).append(rank)
    lines = [f"  rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in having.items()]
    return RankMismatchError(f"{what}\n" + "\n".join(lines))


_AGREEMENTS: dict[tuple[int, ...], Agreement] = {}


def agreement_of(mesh: DeviceMesh) -> Agreement:
    """The ranks of a mesh, which make a group together where they have none."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    agreement = _AGREEMENTS.get(tuple(ranks))
    if agreement is None or not agreement.is_open:
        waiting.forget()
        agreement = _AGREEMENTS[tuple(ranks)] = Agreement(ranks, mesh.device_type)
    return agreement


def agreement_over(mesh: DeviceMesh) -> Agreement | None:
    """The ranks of a mesh that models are compiled for, or of one that it is part of; None where there are none."""
    ranks = {*mesh.mesh.flatten().tolist()}
    whole = [agreement for agreement in _AGREEMENTS.values() if ranks.issubset(agreement.ranks) and agreement.is_open]
    return min(whole, key=lambda agreement: len(agreement.ranks), default=None)


def agree_on(mesh: DeviceMesh, what: str, *digests: bytes) -> None:
    """Has the ranks of a mesh that models are compiled for show each other that they are about to do the same.

    Args:
        digests: of what else must be the same.

    Raises:
        RankMismatchError: on every rank, where some do something else.
    """
    agreement = agreement_over(mesh)
    if agreement is not None:
        table = agreement.ask(digest(what, *digests), what)()
        contents = "".join(f" ({x.hex()[:8]})" for x in digests)
        agreement.require_same(table[:, :32], "the ranks call the model differently:", lambda: what + contents)
