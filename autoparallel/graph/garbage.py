"""When Python looks for garbage.

By itself it does so every 700 new objects: a sixth of the time in which models are traced and planned, for graphs are
many objects of which few are garbage.  What it calls then is no part of a model that is watched.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FEW, MANY = 20_000, 500_000  # new objects: where tensors of the user's may be among them, and where there are none


class _Asked:
    """What all threads have asked for, which share one collector."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: list[int] = []
        self.before = gc.get_threshold()

    def change(self, change: Callable[[int], None], objects: int) -> None:
        with self.lock:
            if not self.objects:
                self.before = gc.get_threshold()
            change(objects)
            youngest, *older = self.before
            if youngest and self.objects:
                youngest = max(youngest, *self.objects) if all(self.objects) else 0
            gc.set_threshold(youngest, *older)


_ASKED = _Asked()


@contextmanager
def collected_rarely(objects: int) -> Iterator[None]:
    """Has Python look for garbage only after so many new objects, or never for 0; where the user has it look less
    often, or looks himself, nothing changes."""
    _ASKED.change(_ASKED.objects.append, objects)
    try:
        yield
    finally:
        _ASKED.change(_ASKED.objects.remove, objects)


@contextmanager
def frozen_inside() -> Iterator[None]:
    """What is left out for ever inside (``gc.freeze``) is looked at again afterwards, unless the user had left out some
    before."""
    had = gc.get_freeze_count()
    try:
        yield
    finally:
        if not had:
            gc.unfreeze()


def count_as_old() -> None:
    """Has Python look at the objects that there are when it next looks at all, not now that there are many new ones;
    where the user has some of them left out for ever, nothing changes."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
