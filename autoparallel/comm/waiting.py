"""Waiting for other ranks, so that an error says who is missing and where the others are.

[Note: notes between ranks] A rank that raises by itself while others wait for it in a collective cannot tell them so
through a collective.  It leaves a note in the store that the process group was made with.  A rank that has waited for a
while says there where it waits, and looks for a note of one that has raised; when waiting fails, the ranks that have
left no note are those that are missing.  Notes belong to a period, from one agreement of the ranks to the next, so that
an old one misleads nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from autoparallel import _torch

FIRST_LOOK = timedelta(seconds=2)
"""How long a rank waits before it says so and looks for notes; every further look is after twice the time."""

LAST_LOOK = timedelta(seconds=60)
"""The longest time between two looks."""

GRACE = 1.0
"""How many seconds a rank whose waiting has failed gives the others to say where they are."""

RAISED = "raised"


class RankMismatchError(RuntimeError):
    """The ranks are not doing the same, or one is missing; raised on all that can raise."""


@dataclass(frozen=True)
class Place:
    """Where a rank is in what it does with others.

    Attributes:
        ranks: all that do it.
        period: how often they have agreed so far.
        text: what they agreed on last, or are about to.
    """

    ranks: tuple[int, ...]
    period: int
    text: str

    def key(self, rank: int | str) -> str:
        """Where a rank's note stands in the store."""
        group = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        return f"autoparallel/{group}/{self.period}/{rank}"


@dataclass
class _State:
    """This process: where it is, how long it has waited, and which groups of ranks cannot go on, and why."""

    place: Place | None = None
    waited: float = 0.0
    broken: dict[tuple[int, ...], str] = field(default_factory=dict)


_HERE = _State()


def enter(place: Place) -> None:
    """Notes where this process is from now on."""
    _HERE.place = place


def broken(ranks: Sequence[int]) -> str | None:
    """Why some ranks cannot go on, if they cannot: a collective of theirs was given up."""
    return _HERE.broken.get(tuple(ranks))


def forget() -> None:
    """Forgets what belongs to process groups that are gone."""
    _HERE.place, _HERE.broken = None, {}


def wait(work: Any, sliced: bool) -> None:
    """Waits for a collective.

    Args:
        sliced: whether its backend can wait for some time and then go on waiting, as gloo can.

    Raises:
        RankMismatchError: when it fails, or when another rank has raised instead of coming; it names the ranks.
    """
    if work is None:
        return
    begun = time.perf_counter()
    try:
        _wait(work, sliced)
    finally:
        _HERE.waited += time.perf_counter() - begun


def waited_seconds() -> float:
    """How long this process has stood still for collectives so far; next to nothing where a device waits itself."""
    return _HERE.waited


def _wait(work: Any, sliced: bool) -> None:
    place = _HERE.place
    if not sliced or place is None:
        work.wait()
        return
    moment, said = FIRST_LOOK, False
    while True:
        try:
            work.wait(moment)
            break
        except RuntimeError:
            if work.is_completed():
                with explained():
                    work.wait()  # it may have succeeded since
                break
        _say(place)
        said = True
        note = _note(place, RAISED)
        if note is not None:
            _give_up(place, f"{note}, while the others waited for it in {place.text}")
        moment = min(2 * moment, LAST_LOOK)
    if said:
        _take_back(place)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Has the failure of an exchange with other ranks say which of them are missing."""
    try:
        yield
    except RankMismatchError:
        raise
    except RuntimeError as error:
        place = _HERE.place
        if place is None:
            raise
        _explain(place, error)


def note_raised(error: BaseException | None = None) -> None:
    """Tells the ranks that may be waiting for this one that it has raised instead; None where nobody knows what."""
    place = _HERE.place
    if place is None or isinstance(error, RankMismatchError):
        return
    what = "" if error is None else f": {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    _set(place.key(RAISED), f"rank {dist.get_rank()} raised in {place.text}{what}")


def cause_elsewhere() -> str | None:
    """What another rank has raised in what this one takes part in, if it has said so."""
    return None if _HERE.place is None else _note(_HERE.place, RAISED)


def _explain(place: Place, error: RuntimeError) -> NoReturn:
    """Says who is missing, and where the others are."""
    _say(place)
    time.sleep(GRACE)
    cause = str(error).splitlines()[0]
    raised = _note(place, RAISED)
    notes = {rank: _note(place, rank) for rank in place.ranks}
    missing = [str(rank) for rank, note in notes.items() if note is None]
    lines = [f"  rank {rank}: {note or 'no sign of it'}" for rank, note in notes.items()]
    who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else "every rank"
    what = "did not come" if missing else "waits, but not for the same"
    head = f"{raised}; the others waited for it" if raised else f"{who} {what}: waited"
    _give_up(place, "\n".join([f"{head} in {place.text} ({cause})", *lines]), error)


def _give_up(place: Place, text: str, cause: BaseException | None = None) -> NoReturn:
    _HERE.broken[place.ranks] = text.splitlines()[0]
    raise RankMismatchError(text) from cause


def _say(place: Place) -> None:
    _set(place.key(dist.get_rank()), f"waits in {place.text}")


def _take_back(place: Place) -> None:
    with contextlib.suppress(RuntimeError):
        _torch.distributed.default_store().delete_key(place.key(dist.get_rank()))


def _set(key: str, text: str) -> None:
    with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that kept it
        _torch.distributed.default_store().set(key, text)


def _note(place: Place, of: int | str) -> str | None:
    with contextlib.suppress(RuntimeError):
        store = _torch.distributed.default_store()
        if store.check([place.key(of)]):
            return str(store.get(place.key(of)).decode())
    return None
