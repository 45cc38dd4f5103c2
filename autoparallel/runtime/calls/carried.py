"""What the calls of a model are given beside their inputs: attributes of the model that they change, or that the loop
sets between them, and numbers that they draw.

A call that turns out to depend on more than it is given is read again, with that.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autoparallel.graph.beside import beside_in
from autoparallel.graph.calls import NUMBERS, Call
from autoparallel.graph.captured import Captured, NumberSpec
from autoparallel.graph.carried_attributes import ChangesAttributesError, is_changed
from autoparallel.graph.drawn_numbers import Script, drawn_ahead
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.python_state import PythonState
from autoparallel.operators import RandomState
from autoparallel.runtime.calls.exchange import Exchange
from autoparallel.runtime.calls.numbers_set import NumbersSet
from autoparallel.runtime.ranks.randomness import STREAM

_MOST_VALUES = 8
"""Of so many values of an attribute that calls change each may have a trace of its own."""


class Carried:
    """What calls are given.

    Args:
        exchange: what the ranks show each other about the model.

    Attributes:
        values: the attributes, by label, each with a value that it has had.
        draws: what calls are given to draw, by which some of them go on: scripts, by their names.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.values: dict[str, Any] = {}
        self.draws: dict[str, Script] = {}
        self._requiring: dict[Hashable, set[int]] = {}  # by the form of a call: places of inputs
        self._exchange, self._numbers = exchange, NumbersSet()
        self._changed_at: dict[str, str] = {}  # by label: the lines of the model that change it
        self._traced: dict[str, dict[float | str, str]] = {}  # by label: what had a trace of its own, and the line

    def add_requiring(self, call: Call, place: int) -> None:
        """Notes that forward has an input of such calls require a gradient."""
        form = _form_of(call.in_spec, call.training, call.arguments)
        self._requiring.setdefault(form, set()).add(place)

    def find_requiring(self, nesting: Any, training: tuple[bool, ...], leaves: Sequence[Any]) -> set[int]:
        """The places of the inputs that forward is known to have require a gradient, which do not yet."""
        places = self._requiring.get(_form_of(nesting, training, leaves), ()) if self._requiring else ()
        tensors = {i: leaves[i] for i in places if isinstance(leaves[i], torch.Tensor)}
        return {i for i, x in tensors.items() if x.is_floating_point() and not x.requires_grad}

    def draw_ahead(self) -> dict[str, tuple[float, ...]]:
        """The numbers that a call is given to draw: on every rank those that the first rank would draw."""
        if not self.draws:
            return {}
        drawn = drawn_ahead(self.draws, RandomState(*STREAM.place()))
        numbers = iter(self._exchange.of_first([number for numbers in drawn.values() for number in numbers]))
        return {label: tuple(itertools.islice(numbers, len(script))) for label, script in self.draws.items()}

    def add_changed(self, error: ChangesAttributesError) -> None:
        """Adds what a call changes.

        Raises:
            CaptureError: where that is given already.
        """
        if error.values.keys() <= self.values.keys():
            raise CaptureError(str(error)) from None
        self.values.update(error.values)
        self._changed_at.update(error.lines)

    def add_set(self, states: Sequence[PythonState], call: Call, model: nn.Module, loss_fn: Any) -> bool:
        """Adds the numbers that the loop has set since the last trace; whether there are any.

        Args:
            states: what the traces of such calls have read.
        """
        numbers = self._numbers.look(states, call.values, model, loss_fn)
        self.values.update(numbers)
        return bool(numbers)

    def given(self, call: Call) -> tuple[float, ...]:
        """The numbers of a call that are to be the same on every rank, among its arguments and of what the loop sets;
        where they are open, its kind does not tell them."""
        numbers = [s for s in call.specs[: len(call.specs) - call.attributes] if type(s) in NUMBERS]
        if self._numbers.labels:
            others = beside_in(call.specs, call.in_spec).others
            numbers += [value for label, value in others.items() if label in self._numbers.labels]
        return tuple(numbers)

    def drop_fixed(self, captured: Captured, call: Call) -> None:
        """Leaves out those numbers that the loop sets and the trace of a call fixes, which it reads by itself."""
        for label in self._numbers.leave(captured, fixes_numbers(captured, call), self.values, self._changed_at):
            del self.values[label]

    def require_open(self, captured: Captured, call: Call, before: Sequence[Captured]) -> None:
        """Raises where each call would be of another kind: all so far fix a number that they change, or have had many
        floats or strings, each with a trace of its own.

        Args:
            captured: the trace of a call.
            before: those of other calls of this kind.
        """
        for label, line in captured.pinned.items():
            if label in captured.attributes and len(before) >= _MOST_VALUES and all(label in x.pinned for x in before):
                what = f"every call changes {label}, a number, and fixes what it computes by it"
                cure = "make it a registered buffer (self.n += 1 works on a tensor), and take torch's functions of it"
                raise refusal(what, line, f"{cure} (torch.cos), or pass it in")
        for label, spec in beside_in(call.specs, call.in_spec).others.items():
            value = spec.value if isinstance(spec, NumberSpec) and fixes_numbers(captured, call) else spec
            if not isinstance(value, float | str) or not is_changed(label, captured.attributes):
                continue
            values = self._traced.setdefault(label, {})
            values.setdefault(value, next(reversed(captured.fixed), ""))
            if len(values) > _MOST_VALUES:
                what = (
                    f"calls change {label}, and each of the {len(values)} values that it has had needs its own trace,"
                )
                line = next(filter(None, values.values()), self._changed_at.get(label, "an unknown line"))
                cure = "make it a registered buffer (self.x *= 0.9 works on a tensor)"
                cure = "set it outside of forward" if isinstance(value, str) else cure
                raise refusal(what, line, f"{cure}, or pass it in")


def fixes_numbers(captured: Captured, call: Call) -> bool:
    """Whether a model fixes the numbers of a call that were to be open."""
    numbers = [i for i, spec in enumerate(call.specs) if isinstance(spec, NumberSpec) and not spec.is_drawn]
    return bool(numbers) and numbers[0] not in captured.numbers


def _form_of(nesting: Any, training: tuple[bool, ...], leaves: Iterable[Any]) -> Hashable:
    """By what a model decides whether an input is to require a gradient: the modes of its modules, and how inputs nest,
    their dims and flags."""
    kinds = tuple([
        x.ndim if isinstance(x, torch.Tensor) else x if isinstance(x, bool | str | None) else type(x)
        for x in leaves
    ])  # fmt: skip
    return str(nesting), training, kinds
