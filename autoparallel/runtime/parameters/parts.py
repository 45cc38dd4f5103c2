"""Views of gathered copies of ``DTensor``s: what they are views of, and what becomes of them when that changes.

On one process a row of a weight that a loop keeps has the weight's values at any time.  A row of a copy that was
gathered has those of then; so where the weight changes, the row is made one that nobody can read, or is made again
where the whole is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from autoparallel import _torch
from autoparallel.runtime.parameters.slices import place_of

_OLD = (
    "a part of a parameter, a gradient or a state, which lies across ranks, was taken before that has changed, and has "
    "the values of then\nWhat to change: take it again (row = weight[0]) after an optimizer's step, a backward or a "
    "write; where the values of then are meant, keep a copy of it (weight[0].clone())."
)


@dataclass(frozen=True)
class Origin:
    """What a view is a view of.

    Attributes:
        base: the tensor whose memory it would share on one device.
        steps: makes it of the whole base.
    """

    base: DTensor
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()

    def follow(self, whole: Tensor) -> Tensor:
        """The view of the whole base."""
        for step in self.steps:
            whole = step(whole)
        return whole


_ORIGINS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def origin_of(view: Tensor) -> Origin | None:
    """What a tensor is a view of, where it was gathered for it."""
    origin: Origin | None = _ORIGINS.get(view) if _ORIGINS else None
    return origin


def note_origin(view: Tensor, origin: Origin) -> None:
    """Notes of a view of a gathered copy what it is of."""
    _ORIGINS[view] = origin


def forget_origin(view: Tensor) -> None:
    """Has a tensor be no view any more."""
    if _ORIGINS:
        _ORIGINS.pop(view, None)


def note_changes(tensors: Iterable[Tensor | None]) -> None:
    """Has views of gathered copies raise when they are read, because the tensors that they are of have changed."""
    if not _ORIGINS:
        return
    storages = {_storage_of(x) for x in tensors if x is not None}
    for view, origin in list(_ORIGINS.items()):
        if _storage_of(origin.base) in storages and _storage_of(origin.base) != _storage_of(view):
            _torch.dtensor.make_unreadable(view, _OLD)


def make_again(base: DTensor, whole: Tensor) -> None:
    """Gives views of gathered copies of a tensor its values of now; those of its parts raise when they are read."""
    views = [(view, origin) for view, origin in _ORIGINS.items() if place_of(origin.base) == place_of(base)]
    note_changes([base])
    for view, origin in views:
        if _storage_of(view) != _storage_of(base):
            _torch.dtensor.become(view, _torch.dtensor.replicated(origin.follow(whole), base.device_mesh))


def _storage_of(tensor: Tensor) -> int:
    return _torch.tensors.storage_mark(_torch.dtensor.local_of(tensor))
