"""Calls in words: what ranks show each other where theirs differ, and what the log says of one that is traced anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree

from autoparallel.graph.beside import CARRIED
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import InputSpec, NumberSpec
from autoparallel.graph.carried_attributes import label_of, number_of
from autoparallel.graph.input_values import OF_VALUES
from autoparallel.graph.python_state import PythonState
from autoparallel.placements import Layout, format_layout
from autoparallel.text import LOGGER

MANY_VALUES = 3
"""Of so many changes of one value of Python's a call is advised to read a tensor instead."""


def describe_call(call: Call, states: Sequence[PythonState], synchronise: bool) -> str:
    """A call, with the values of Python's that are others than in each of the traces of such calls.

    Args:
        states: what these traces have read.
        synchronise: whether a backward of it would reduce gradients.
    """
    trained, count = sum(call.trainable), len(call.trainable)
    modes = ["train" if call.is_training else "eval"]
    modes += ["under no_grad"] * (not call.gradients) + ["in no_sync"] * (not synchronise)
    modes += [f"under autocast to {call.autocast}"] * (call.autocast is not None)
    modes += [f"{trained} of {count} parameters trained"] * (trained < count)
    places = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(len(call.specs)), call.in_spec))[0]
    inputs = [_describe_input(path, *x) for (path, _), *x in zip(places, call.specs, call.layouts, strict=True)]
    others = {label: state for state in states if (label := state.changed(call.values)) is not None}
    inputs += [
        f"{label} (other values)" if label.startswith(OF_VALUES) else "{0} as {2}".format(*state.describe(label))
        for label, state in others.items()
    ]
    return f"{', '.join(modes)}, inputs {', '.join(inputs)}"


def _describe_input(path: Sequence[Any], spec: InputSpec | Any, layout: Layout | None) -> str:
    """One input of a call in words, with the name of an argument in a container, of a keyword, or of an attribute."""
    name = (
        label_of(path[-1].key)
        if pytree.MappingKey(CARRIED) in path
        else pytree.keystr(tuple(path[2 if path[0].idx == 0 else 1 :]))
    )
    if isinstance(spec, InputSpec) and not spec.is_number:
        return (
            f"{f'{name} ' * bool(name)}{spec.shape} {spec.dtype}{f' DTensor {format_layout(layout)}' if layout else ''}"
        )
    if isinstance(spec, InputSpec):
        return f"{name} {number_of(spec.shape)}"
    return f"{f'{name} ' * bool(name)}{spec.value if isinstance(spec, NumberSpec) else spec!r}"


def log_change(changes: Sequence[tuple[str, PythonState]], seconds: float) -> None:
    """Says which value of Python's made a new kind of call, and what that took."""
    if not changes:
        return
    label, state = changes[-1]
    is_many = sum(name == label for name, _ in changes) == MANY_VALUES
    if label.startswith(OF_VALUES):
        LOGGER.warning("%s has changed: the model was captured and planned once more, in %.1f s", label, seconds)
        if is_many:
            LOGGER.warning(
                "%s has had %d values by now, each with a trace of its own: compute what follows from it before the "
                "call, and pass it in as a tensor", label, MANY_VALUES + 1,
            )  # fmt: skip
        return
    entry, before, now = state.describe(label)
    LOGGER.warning(
        "%s has changed from %s to %s: the model was captured and planned once more, in %.1f s", entry, before, now,
        seconds,
    )  # fmt: skip
    if is_many:
        LOGGER.warning(
            "%s has had %d values by now, each with a trace of its own: make it a tensor, such as a registered "
            "buffer that is updated in place, so that one trace serves all", entry, MANY_VALUES + 1,
        )  # fmt: skip
