"""When Python looks for garbage.

By itself it does so every 700 new objects: a sixth of the time in which models are traced and planned, for graphs are
many objects of which few are garbage.  What it calls then is no part of a model that is watched.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FEW, MANY = 20_000, 500_000  # new objects: where tensors of the user's may be among them, and where there are none


@contextmanager
def collected_rarely(objects: int) -> Iterator[None]:
    """Has Python look for garbage only after so many new objects, or never for 0; where the user has it look less
    often, or looks himself, nothing changes."""
    youngest, *older = gc.get_threshold()
    if youngest:
        gc.set_threshold(max(youngest, objects) if objects else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(youngest, *older)


def count_as_old() -> None:
    """Has Python look at the objects that there are when it next looks at all, not now that there are many new ones;
    where the user has some of them left out for ever, nothing changes."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
