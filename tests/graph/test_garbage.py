"""When Python looks for garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from autoparallel.graph.garbage import collected_rarely, count_as_old, frozen_inside


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    gc.unfreeze()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("objects", [0, 20_000])
@pytest.mark.parametrize("youngest", [0, 700, 50_000])
def test_garbage_is_looked_for_rarely_inside_and_as_before_after_it(youngest: int, objects: int) -> None:
    gc.set_threshold(youngest, 10, 10)
    inside = max(youngest, objects) if youngest and objects else 0
    with pytest.raises(ZeroDivisionError), collected_rarely(objects):
        assert gc.get_threshold() == (inside, 10, 10)
        raise ZeroDivisionError
    assert gc.get_threshold() == (youngest, 10, 10)


def test_who_is_done_first_takes_nothing_from_another_thread() -> None:
    gc.set_threshold(700, 10, 10)
    one, other = collected_rarely(0), collected_rarely(20_000)
    with one:
        other.__enter__()
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 20_000
    other.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 700


class _Node:
    def __init__(self) -> None:
        self.itself = self


def test_what_counts_as_old_is_young_no_more_but_garbage_when_all_is_looked_at() -> None:
    gc.set_threshold(0)
    seen = weakref.ref(_Node())
    count_as_old()
    gc.collect(1)
    assert seen() is not None and gc.get_freeze_count() == 0
    gc.collect()
    assert seen() is None


def test_what_the_user_has_left_out_stays_so() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        count_as_old()
        assert 0.9 * before < gc.get_freeze_count() <= before  # what nobody refers to any more is gone
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("before", [False, True])
def test_what_is_left_out_inside_is_looked_at_again_unless_the_user_had_left_out_some(before: bool) -> None:
    if before:
        gc.freeze()
    with pytest.raises(ZeroDivisionError), frozen_inside():
        gc.freeze()
        raise ZeroDivisionError
    assert bool(gc.get_freeze_count()) == before
    gc.unfreeze()
