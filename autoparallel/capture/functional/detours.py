"""Ways that meet before the end: of questions one after another, only one is told otherwise in a trace.

Where two traces that have had different answers come to the same continuation (see ``tracing.continuations``), what
follows is the same whatever is asked there.  So what lies between becomes a call of its own, and n questions need n + 1
traces: each that goes another way at one of them, a detour, and the main one.  Where ways do not meet, each further
question doubles the traces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoparallel._torch.export import is_read
from autoparallel.capture.functional.way_graphs import (
    Asked,
    calls_behind,
    calls_between,
    place_of,
    read_outputs,
    reads_of,
    what_is_done,
)
from autoparallel.capture.functional.ways import Merger, Pair, Way, merge, note_merged, require_same_python
from autoparallel.capture.tracing.trace import MOST_ALONE, Answers, refused_question
from autoparallel.text import LOGGER

ASKS_OFTEN = (
    "the model asks %d times for a tensor's value, at first at %s: it is traced %d times, once for each question. An "
    "if that only skips the work on no rows may be left out"
)

Tracer = Callable[[Answers], Way]
"""Makes the trace of one way."""


class ApartError(Exception):
    """A detour leaves something behind that is not among what Python has where the ways meet."""


def trace_all(trace: Tracer) -> Way:
    """The program of all ways that a call may take by tensors' values.

    Raises:
        CaptureError: where it asks too often.
    """
    try:
        return _merge_all(trace)
    except ApartError:
        way = trace(Answers())
        _merge_behind(way, 0, 0, trace)
        return way


def _merge_all(trace: Tracer) -> Way:
    asked_after = [0]

    def noting(answers: Answers) -> Way:
        way = trace(answers)
        asked_after.append(way.trace.gradient_asked_after)
        return way

    way = noting(Answers(looks=range(Answers.most)))
    detours: list[Detour] = []
    other: Way | None = None
    for number in range(len(way.places)):
        if number == MOST_ALONE:
            LOGGER.warning(ASKS_OFTEN, len(way.places), way.findings.questions[0].line, len(way.places) + 1)
        other = noting(Answers((*[True] * number, False), looks=(number, number + 1)))
        place = _meeting_place(way, other, number)
        if place is None or not (detour := Detour(way, other, number, place)).meets():
            break
        detours.append(detour)
    first = _first_alone(detours)
    _merge_behind(way, first, first, noting, other if first == len(detours) else None)
    del detours[first:]
    if any(max(asked_after) > detour.number for detour in detours if detour.differs_in_gradients):
        raise ApartError
    for detour in reversed(detours):
        detour.make()
    return way


def _first_alone(detours: Sequence[Detour]) -> int:
    """The first question since which each doubles the ways: what is between a question and where its ways meet becomes
    a call, so that none that is asked there may have ways that meet behind it."""
    first = len(detours)
    while True:
        places = [x.place for x in detours[:first]]
        crossed = (i for i, x in enumerate(places) if x > first or any(other > x for other in places[i + 1 : x]))
        if (left := next(crossed, first)) == first:
            return first
        first = left


def _merge_behind(way: Way, number: int, alone: int, trace: Tracer, other: Way | None = None) -> None:
    """Merges all ways into one that begin as it does.

    Args:
        number: of the first question at which they may go other ways.
        alone: of the first one since which each doubles the ways.
        other: the way that is told otherwise there, if it has been traced.
    """
    if len(way.places) > alone + MOST_ALONE:
        last = alone + MOST_ALONE
        raise refused_question(last, way.findings.questions[last].line, alone)
    for last in reversed(range(number, len(way.places))):
        answers = Answers((*[way.trace.answers[i] for i in range(last)], False))
        second = trace(answers) if other is None or last > number else other
        _merge_behind(second, last + 1, alone, trace)
        merge(way, second)


def _meeting_place(way: Way, other: Way, number: int) -> int | None:
    """The question of the main way at which another comes to the same continuation; None where none is known to be."""
    (start, *behind), (its_start, *its_behind) = (x.findings.questions[number:] for x in (way, other))
    place = len(way.places) - len(its_behind)  # what follows asks as often
    if not its_behind or place <= number:
        return None
    here, there, begin, its_begin = (
        x.continuation for x in (behind[place - number - 1], its_behind[0], start, its_start)
    )
    assert here is not None and there is not None and begin is not None and its_begin is not None
    return place if here.is_met_by(there, begin, its_begin) else None


class Detour(Merger):
    """A way that is told otherwise at one question, and meets the main one again.

    Args:
        main, other: the ways.
        number: of the question.
        place: of the question of the main way at which they meet; the other's comes first behind it.

    Attributes:
        differs_in_gradients: whether some tensor then requires a gradient on one way alone.
    """

    def __init__(self, main: Way, other: Way, number: int, place: int) -> None:
        super().__init__(main, other, number)
        self.main, self.other, self.number, self.place = main, other, number, place
        ours, theirs = main.findings.questions[place], other.findings.questions[number + 1]
        assert ours.continuation is not None and theirs.continuation is not None
        self.differs_in_gradients = ours.continuation.gradients != theirs.continuation.gradients
        self.questions_left = len(main.findings.questions), len(other.findings.questions)

    def meets(self) -> bool:
        """Whether the ways do the same with the same from where they meet; nothing is merged yet."""
        require_same_python(self.main, self.other, self.number)
        self.share_beginning()
        leaves = self._leaves()
        pairs = self.common_end(*self._calls(), leaves)
        if any(_is_sized_by_values(x) and (x, y) not in pairs and self.twins.get(y) is not x for x, y in leaves):
            return False
        twins: dict[fx.Node, dict[fx.Node, None]] = {y: {x: None} for y, x in self.twins.items()}
        for x, y in (*leaves, *pairs):
            twins.setdefault(y, {})[x] = None
        ours, theirs = map(calls_behind, self._ends())
        is_met = _find_twins(ours, theirs, twins)
        results = [pair for _, pair in self.results() if isinstance(pair, tuple)]
        return is_met and all(x in twins.get(y, {}) for x, y in results)

    def make(self) -> None:
        """Makes a call of what the ways do until they meet.

        Raises:
            ApartError: where what follows on a further way reads what is not known there.
        """
        end, _ = self._ends()
        self._add_changes()
        behind = {end, *calls_behind(end), self.graph.output_node()}
        leaves = self._leaves()
        if len({x for x, _ in leaves}) < len({self.key(*pair) for pair in leaves}):
            raise ApartError
        read = [pair for pair in leaves if not behind.isdisjoint(pair[0].users)]
        values = self.join(*self._calls(), read)
        joined = {x: values[self.key(x, y)] for x, y in read if self.key(x, y) in values}
        if any(x not in joined and not behind.isdisjoint(x.users) for x in self.alone):
            raise ApartError
        for x, value in joined.items():
            for user in filter(behind.__contains__, [*x.users]):
                user.replace_input_with(x, value)
        for place in self.main.places[self.place :]:
            place.tensors = [joined.get(x, x) for x in place.tensors]
        output, specs = self.graph.output_node(), self.first.graph_signature.output_specs
        values_left: Any = output.args[0]
        output.args = (values_left[:-1],)
        specs.pop()
        self.erase()
        note_merged(self.main, self.other)

    def _places(self) -> tuple[Asked, Asked]:
        """Where the ways meet."""
        return self.main.places[self.place], self.other.places[self.number + 1]

    def _ends(self) -> tuple[fx.Node, fx.Node]:
        ours, theirs = self._places()
        return ours.question, theirs.question

    def _calls(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """What each way does until they meet."""
        ours, theirs = map(calls_between, self.questions, self._ends())
        return ours, theirs

    def _leaves(self) -> list[Pair]:
        """The tensors that both have where they meet."""
        ours, theirs = self._places()
        return [*dict.fromkeys(zip(ours.tensors, theirs.tensors, strict=True))]

    def _add_changes(self) -> None:
        """Has the program return what only the detour changes in place."""
        ours, theirs = (read_outputs(program)[0] for program in (self.first, self.second))
        for place in [place for place in theirs if place not in ours]:
            output = self.graph.output_node()
            values: Any = output.args[0]
            output.args = ((place_of(place, self.first), *values),)
            self.first.graph_signature.output_specs.insert(0, replace(theirs[place][0]))


def _find_twins(ours: Sequence[fx.Node], theirs: Sequence[fx.Node], twins: dict[fx.Node, dict[fx.Node, None]]) -> bool:
    """Whether calls do the same with what corresponds, perhaps in another order (what was written in place is read
    where it is read next).

    Args:
        twins: what corresponds to the nodes of the others; these calls are added.
    """
    table: dict[Any, list[fx.Node]] = {}
    for node in ours:
        table.setdefault((what_is_done(node), tuple(reads_of(node))), []).append(node)
    for node in theirs:
        what = what_is_done(node)
        reads = itertools.product(*(twins.get(x, ()) for x in reads_of(node)))
        alike = next((nodes for read in reads if (nodes := table.get((what, read)))), None)
        if alike is None:
            return False
        twins[node] = {alike.pop(0): None}
    left = {node for nodes in table.values() for node in nodes}  # what is noted of later questions is made of them
    return all(left.issuperset(node.users) and not node.is_impure() for node in left)


def _is_sized_by_values(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) and is_read(n) for n in value.shape)
