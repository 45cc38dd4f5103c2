"""One program for a call that fills what is empty, and for those after it.

Before:
    if self.config.problem_type is None: self.config.problem_type = "regression"    # read: nothing
After:
    the next call reads "regression", and is served by the same program

[Note: when that is sound] What a call reads belongs to its kind, so that the next one, which reads what this one has
set, is of another kind.  A copy is run once more as it is, and one as the next call will find the model.  Where both
make the same operators of the same parameters, inputs and constants, in the same modes of autograd, and give the same
(see ``capture.functional.layers``), one trace is that of both calls.  All that either reads belongs to both kinds,
and so does what the first one has set and the next one leaves as it is: the program sets it after every call.  A call
that asks for a tensor's value, or draws of Python's, is left as it is, and so is one that keeps a tensor or a
container which the next one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoparallel.capture.functional.layers import Record
from autoparallel.capture.python.changes import Written
from autoparallel.capture.tracing.trace import Trace
from autoparallel.capture.training import Training
from autoparallel.graph.python_state import PythonState, is_plain


def read_of_next(
    written: Mapping[str, Written], make: Callable[[], Training], run: Callable[[Training], tuple[list[Any], Trace]]
) -> PythonState | None:
    """What the next call reads, where the program of this one serves it; None where nobody knows that it does.

    Args:
        written: what the call has set.
        make: makes a copy of the model.
        run: calls one; the leaves of what it gives, and what was noted.
    """
    first, following = make(), make()
    following.recorder.fill(value for value in written.values() if is_plain(value.value))
    asks = False

    def give(copy: Training) -> dict[str, Any]:
        """What a copy gives, but for what the first call alone sets."""
        nonlocal asks
        leaves, trace = run(copy)
        asks |= bool(trace.questions or trace.drawn)
        return _parts(copy, leaves)

    after = Record(following, give)
    left = written.keys() - following.findings.attributes.keys()
    before = Record(first, lambda copy: {name: part for name, part in give(copy).items() if name not in left})
    state = following.recorder.state()
    unknown = any(name in left or name in state.places for name, x in written.items() if not is_plain(x.value))
    if asks or unknown or not before.equals(after):
        return None
    for name in left:
        state.add(name, written[name].table, written[name].name)
    return state


def _parts(copy: Training, leaves: list[Any]) -> dict[str, Any]:
    """What a copy gives, and how it nests; of attributes by their labels."""
    findings = copy.findings
    attributes, outputs = findings.take_attributes(leaves)
    whole = outputs, str(findings.spec), findings.counted, sorted(copy.recorder.buffers.rebound)
    return {"": whole} | {name: (values, str(spec)) for name, (spec, values) in attributes.items()}


def state_of_next(state: PythonState, of_next: PythonState, written: Mapping[str, Written]) -> PythonState | None:
    """All that belongs to the kind of the next call; None where a label stands for more than one place.

    Args:
        state: what belongs to the kind of the call.
        of_next: what the next one reads, or leaves as the call has set it.
        written: what the call has set.
    """
    merged = PythonState()
    merged.merge(state)
    merged.merge(of_next)
    for label, value in written.items():
        if merged.places.get(label, place := (id(value.table), value.name)) != place:
            return None
        if label in merged.attributes:
            merged.attributes[label] = value.table, value.name, value.value
    return merged
