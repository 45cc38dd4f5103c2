"""Numbers that the loop sets between calls: ``for m in dropouts: m.p = rate``, ``model.step = step``, and around the
model ``args.beta = beta``.

A value of Python's that has changed makes another kind of call.  A number that has, also in a list or a dict, is given
to calls as those that they change themselves (see ``graph.carried_attributes``), so that one trace serves all its
values.  Where the model fixes what it computes by it, it is read into the trace as before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from autoparallel.graph.captured import Captured
from autoparallel.graph.carried_attributes import may_be_carried
from autoparallel.graph.labels import is_entry
from autoparallel.graph.plain_tensors import attribute_at, holder_of
from autoparallel.graph.python_state import MISSING, PythonState, shown, slots_of
from autoparallel.text import LOGGER

_MOST_AT_ONCE = 32
"""Of a list or dict with more that have changed, each time has a trace of its own."""


class NumbersSet:
    """The numbers of a model, or around it, that the loop has set.

    Attributes:
        labels: of those that calls are given.
        fixed: of those that the model has fixed.
    """

    def __init__(self) -> None:
        self.labels: set[str] = set()
        self.fixed: set[str] = set()

    def look(
        self, states: Sequence[PythonState], values: Sequence[Any], model: nn.Module, loss_fn: Any
    ) -> dict[str, Any]:
        """The numbers that are other ones than the last trace has read, by label, with what they were then.

        Args:
            states: what the traces of such calls have read.
            values: the inputs of the call.
        """
        numbers: dict[str, Any] = {}
        for place in states[-1].changes(values) if states else ():
            changed = states[-1].numbers_of(place)
            if len(changed) > _MOST_AT_ONCE or not all(may_be_carried(now) for _, now in changed.values()):
                continue
            for label, (before, now) in changed.items():
                if _value_at(model, label, loss_fn) is not now:  # it is none of the model's
                    look_after = states[-1].around.get(place)
                    path = None if look_after is None else look_after()
                    label = "" if path is None else path + label.removeprefix(place)
                if label and label not in self.fixed | self.labels:  # one of those may be read where it is not given
                    numbers[label] = before
        if numbers:
            self.labels |= numbers.keys()
            label, before = next(iter(numbers.items()))
            LOGGER.warning(
                "%s has changed from %s to %s%s: the model is captured and planned once more, with such numbers left "
                "open", label, shown(before), shown(_value_at(model, label, loss_fn)),
                f" (and {len(numbers) - 1} more)" * (len(numbers) > 1),
            )  # fmt: skip
        return numbers

    def leave(
        self, captured: Captured, fixes_floats: bool, carried: Mapping[str, Any], written: Collection[str]
    ) -> set[str]:
        """The numbers that calls are no longer given, as their trace fixes them.

        Args:
            carried: what calls are given, with a value of each.
            written: what they change themselves.
        """
        self.labels.difference_update(written)
        floats = {label for label in self.labels if type(carried[label]) is float} if fixes_floats else set()
        left = self.labels & (captured.pinned.keys() | floats)
        self.labels -= left
        self.fixed |= left
        return left


def _value_at(model: nn.Module, label: str, loss_fn: Any) -> Any:
    """What has a label; ``MISSING`` also for what is in a slot, where a copy is not given anything."""
    path, _, name = label.rpartition(".")
    try:
        in_slot = not is_entry(label) and name in slots_of(holder_of(model, path, loss_fn))
        return MISSING if in_slot else attribute_at(model, label, loss_fn)
    except (AttributeError, LookupError):
        return MISSING
