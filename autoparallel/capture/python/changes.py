"""What a call changes of Python's: what leaves the program, what is given to it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoparallel._torch.numbers import KINDS
from autoparallel.capture.python.containers import leaves_of
from autoparallel.capture.python.watched import may_leave
from autoparallel.graph.carried_attributes import may_be_carried
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.leaves import TYPES
from autoparallel.graph.python_state import MISSING, is_data, is_plain, shown
from autoparallel.graph.variables import Variable

IN_THE_MODEL = (
    "keep what changes in the model, as a registered buffer: a module that holds the model and the loss function, and "
    "returns the loss, is compiled without loss_fn"
)
"""What to change in a loss function."""


@dataclass(frozen=True)
class Written:
    """What a call has set.

    Attributes:
        table, name: where it stands in the user's object.
        value: what was set.
        fills: whether the call had read that nothing was there.
        line: at which it was set; empty where that is not known.
    """

    table: Mapping[str, Any]
    name: str
    value: Any
    fills: bool
    line: str = ""

    @property
    def may_stay(self) -> bool:
        """Whether a call can be given what stood there, and return that in the place of what it sets otherwise."""
        before = self.table.get(self.name, MISSING)
        kinds = {_kind_of(before), _kind_of(self.value)}
        return all(map(may_be_carried, (before, self.value))) and (len(kinds) == 1 or kinds <= {*TYPES})

    @property
    def kind_before(self) -> str:
        """What stood there, where that is of another type."""
        before = self.table.get(self.name, MISSING)
        kind = _kind_of(before).__name__
        return "" if before is MISSING or _kind_of(self.value) is _kind_of(before) else f"of type {kind}"


def _kind_of(value: Any) -> type:
    """The type of a value, but one for all tensors, and that of Python's for open numbers."""
    return torch.Tensor if isinstance(value, torch.Tensor) else KINDS.get(type(value), type(value))


class StateChangedError(CaptureError):
    """Something outside of the graph that a run has changed, on a line that is not known yet.

    Args:
        at: makes the refusal, once the line is known.
        has_changed: tells, while a copy runs again, whether it has changed by now.
    """

    def __init__(self, at: Callable[[str], CaptureError], has_changed: Callable[[Any, Any], bool]) -> None:
        super().__init__(str(at("an unknown line")))
        self.at, self.has_changed = at, has_changed

    @staticmethod
    def refusing(what: str, cure: str, has_changed: Callable[[Any, Any], bool]) -> StateChangedError:
        """As :func:`~graph.errors.refusal` says it."""
        return StateChangedError(lambda line: refusal(what, line, cure), has_changed)


class ContainerChangedError(StateChangedError):
    """A list or dict that a run has changed, and that a journal may stand for (see ``journals``).

    Attributes:
        label: where the model has it.
    """

    def __init__(self, refused: StateChangedError, label: str) -> None:
        super().__init__(refused.at, refused.has_changed)
        self.label = label


class VariablesChangedError(StateChangedError):
    """Variables around the model that a run has changed, and that may be looked after (see ``graph.surroundings``)."""

    def __init__(self, refused: StateChangedError, variables: Sequence[Variable]) -> None:
        super().__init__(refused.at, refused.has_changed)
        self.variables = variables


def refused_past_the_model(label: str, place: str, line: str) -> CaptureError:
    """Why something that a call changes cannot be reached in two ways.

    Args:
        label: where the model has it.
        place: where it is read otherwise.
    """
    what = f"a call changes {label}, and reads it as {place}, too, where a trace would find what it was before,"
    return refusal(what, line, f"read it there through the model, which has it as {label}")


def refused_buffer(label: str, before: Any, now: Any, line: str) -> CaptureError | None:
    """The refusal of a buffer that is bound to something which cannot take its place; None where it can."""
    if not isinstance(now, torch.Tensor) or not isinstance(before, torch.Tensor):
        return refusal(
            f"a call sets the buffer {label} from {shown(before)} to {shown(now)}",
            line,
            "register it in __init__, as a tensor of its final shape, and update its values; or call the plain model "
            "once before compile(), if only a first call does",
        )
    if now.shape != before.shape or now.dtype != before.dtype:
        return refusal(
            f"a call replaces the buffer {label}, {tuple(before.shape)} {before.dtype}, by one of {tuple(now.shape)} "
            f"{now.dtype},",
            line,
            "keep its shape and dtype; if it is a cache for one shape, call the model once before compile()",
        )
    return None


def refused_gradient(label: str, line: str) -> CaptureError:
    """The refusal of a tensor with a gradient in a place that calls read."""
    return refusal(
        f"a call keeps a tensor that has a gradient in {label}, and reads what was there before,",
        line,
        "keep it without one (detach()), and return as an output what is differentiated",
    )


def refused_trained(place: str, line: str) -> CaptureError:
    """The refusal of a tensor with a gradient that no optimizer of the model's parameters sees."""
    return refusal(
        f"{place} is a parameter or trained, but it is not among the model's parameters; it is read",
        line,
        "move it into the model and register it there (nn.Parameter, nn.ParameterList, nn.ParameterDict, "
        "nn.ModuleList), or keep a plain tensor (detach())",
    )


def is_first_value(before: Any, now: Any) -> bool:
    """Whether a call fills a cache that was empty: the next call reads what is there then, and is of another kind."""
    return (before is MISSING or before is None) and all(
        isinstance(leaf, torch.Tensor) or is_plain(leaf) for leaf in leaves_of(now)
    )


def advice_on(before: Any, value: Any) -> str:
    """What to do with a value that calls change, instead.

    Args:
        before: what stood there.
    """
    if (before is MISSING or before is None) and not isinstance(value, torch.Tensor | list | tuple):
        return "set it in __init__, or call the plain model once before compile(), if only a first call sets it"
    if isinstance(value, torch.Tensor):
        return "register it as a buffer (self.register_buffer(name, tensor)) and update it, or return it and pass it in"
    if isinstance(value, bool):
        return "set it outside of forward (by a call of the plain model before compile(), if only a first call does)"
    if is_data(value):
        return "set its attributes instead (self.state.step += 1), or keep a NamedTuple of numbers in its place"
    if isinstance(value, list | tuple):
        return "keep the last few in a deque(maxlen=8), return what is collected, or set it outside of forward"
    is_number = isinstance(value, int | float | torch.SymInt)
    in_buffer = "keep it in a registered buffer (self.n += 1 works on a tensor), " if is_number else ""
    return f"{in_buffer}set it outside of forward, or pass it in"


def require_may_leave(value: Any, label: str, line: str) -> None:
    """Raises for a value that cannot leave the program in an attribute."""
    for leaf in leaves_of(value):
        if not may_leave(leaf):
            raise refusal(
                f"a call sets {label} to a {type(leaf).__name__}",
                line,
                "set it outside of forward, or keep tensors, numbers and strings, or lists and dicts of them, in it",
            )
