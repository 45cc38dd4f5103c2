"""All that depends on what Python does from where it asks for a tensor's value (its continuation).

Two traces that have had different answers may come to where everything is the same but what their tensors hold: the
places in the functions that run, their live variables (see ``live_names``), what the call has set until then, and which
tensors are one.  From there on they do the same, whatever they are told at further questions: so only what is between
needs to be traced once for each answer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor

from autoparallel import _torch
from autoparallel.capture.tracing.live_names import live_names
from autoparallel.graph.python_state import OURS

_OUTERMOST = f"{OURS}capture/training.py"
"""Where the call of the model begins."""

_OF_TRACER = (*(f"{_torch.export.FOLDER}{name}/" for name in ("fx", "export", "_export")), f"{OURS}_torch/")


@dataclass(frozen=True, eq=False)
class _Itself:
    """An object that is equal to none but itself."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value


@dataclass(frozen=True)
class _Function:
    """A function that runs.

    Attributes:
        number: of its call, among all in this trace that have been met.
        place: its code, and the instruction at which it is.
        variables: what the live ones hold, by name; all where nobody can tell on which it depends.
        is_known: whether these are all on which it depends.
    """

    number: int
    place: tuple[CodeType, int]
    variables: dict[str, Any]
    is_known: bool


class Continuation:
    """What Python has where it asks.

    Args:
        frame: the one that asks.
        originals: of the objects in the traced copy of the model, by id.
        changed: what the call has set until then, by label.
        held: the tensors of the copy, by name.
        buffers: the names of those that a call may change.
        answered: what is known of relations of sizes that only values tell.
        cache_size: how many results the caches of functions have kept until then.
        running: the functions that have been met in this trace; those that run are added.
        value_of: what is known of a tensor's values in a trace.

    Attributes:
        tensors: copies of those on which it depends, in the order in which it finds them.
        gradients: whether each requires a gradient, and is a leaf.
    """

    def __init__(
        self,
        frame: FrameType,
        originals: Mapping[int, Any],
        changed: Mapping[str, Any],
        held: Mapping[str, Tensor],
        buffers: Sequence[str],
        answered: Mapping[str, bool],
        cache_size: int,
        running: list[FrameType],
        value_of: Callable[[Tensor], Any],
    ) -> None:
        forms = _Forms(originals, {id(x): name for name, x in held.items()})
        frames = [*_frames_to(frame)][::-1]
        running += [x for x in frames if x not in running]
        written = {_name_of(label) for label in changed}
        self._functions = [forms.function(x, running.index(x), x is frame, written) for x in frames]
        self._changed = forms.mapping({label: x for label, x in changed.items() if held.get(label) is not x})
        for name in buffers:
            forms.form(held[name])
        self._cache_size = cache_size
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *_casts()
        self._kinds = [(*forms.kind_of(x), value_of(x)) for x in forms.tensors]
        self.gradients = [(x.requires_grad, x.is_leaf) for x in forms.tensors]
        self._sizes, self._numbers = _read_in(f"{self._kinds} {forms.numbers}"), _read_in(f"{forms.numbers}")
        self._answered = {key: x for key, x in answered.items() if not self._sizes.isdisjoint(_read_in(key))}
        self.tensors = [x.detach().clone() for x in forms.tensors]

    @property
    def may_be_met(self) -> bool:
        """Whether all can be told that the function depends on which asks."""
        return self._functions[-1].is_known

    def is_met_by(self, other: Continuation, start: Continuation, others_start: Continuation) -> bool:
        """Whether another trace goes on as this one does but for what tensors hold, and who asks whether they require
        gradients.

        Args:
            start, others_start: where both traces have had different answers.
        """
        if [x.place for x in self._functions] != [x.place for x in other._functions]:
            return False
        left = self._moved_since(start)
        if left != other._moved_since(others_start) or not all(x.is_known for x in self._functions[left:]):
            return False
        if self._cache_size != start._cache_size or other._cache_size != others_start._cache_size:
            return False
        return self._numbers <= start._sizes and self._has() == other._has()

    def _has(self) -> tuple[Any, ...]:
        variables = [x.variables for x in self._functions]
        return variables, self._changed, self._modes, self._kinds, self._answered

    def _moved_since(self, start: Continuation) -> int:
        """The first of the functions that has gone on since an earlier question, or has been called since then; what
        waits in those around it is what waited in them."""
        pairs = [*zip(self._functions, start._functions, strict=False)]
        same = next((i for i, (a, b) in enumerate(pairs) if a.number != b.number), len(pairs))
        return max(0, same - 1)


def _name_of(label: str) -> str:
    """The name of an attribute, or that of a variable, of which a label tells."""
    return re.split(r"[.\[]", label.partition("[")[0])[-1]


def _read_in(text: str) -> frozenset[str]:
    """The sizes and numbers that only values tell, of which a text speaks."""
    return frozenset(re.findall(r"u\d+", text))


def _casts() -> Iterator[Any]:
    """What decides of the dtypes of what is computed."""
    yield torch.get_default_dtype()
    for device in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _frames_to(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those around it, up to the call of the model, without those of the tracer, which hand on what they
    are given."""
    while frame is not None and (name := frame.f_code.co_filename) != _OUTERMOST:
        if not name.startswith(_OF_TRACER):
            yield frame
        frame = frame.f_back


class _Forms:
    """Objects of a trace as what can be compared with those of another.

    Args:
        originals: see ``Continuation``.
        names: of the tensors of the copy, by id.

    Attributes:
        tensors: those that it has met.
        numbers: and the open numbers.
    """

    def __init__(self, originals: Mapping[int, Any], names: Mapping[int, str]) -> None:
        self._originals, self._names = originals, names
        self.tensors: list[Tensor] = []
        self.numbers: list[str] = []
        self._places: dict[int, int] = {}
        self._memory: dict[int, int] = {}
        self._open: dict[int, int] = {}  # containers and objects, by id, in the order in which they are met
        self._alive: list[Any] = []

    def function(self, frame: FrameType, number: int, asks: bool, written: Collection[str]) -> _Function:
        live = live_names(frame, asks, written)
        variables = {name: x for name, x in frame.f_locals.items() if live is None or name in live}
        form = self.mapping(dict(sorted(variables.items())))
        return _Function(number, (frame.f_code, frame.f_lasti), form, live is not None)

    def mapping(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.form(x) for name, x in values.items()}

    def form(self, value: Any) -> Any:
        """What an object is, but for what its tensors hold."""
        kind = type(value)
        if isinstance(value, Tensor) and _torch.export.is_fake(value):
            if id(value) not in self._places:
                self._places[id(value)] = len(self.tensors)
                self.tensors.append(value)
                return Tensor, self._places[id(value)], self.mapping(_set_on(value))
            return Tensor, self._places[id(value)]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            self.numbers.append(str(value))
            return kind, str(value)
        if kind in _BY_VALUE:
            return kind, repr(value)
        original = self._originals.get(id(value), value)
        if original is not value or isinstance(value, Enum | _SHARED):
            return _Itself(original)
        if id(value) in self._open:
            return kind, self._open[id(value)]
        self._open[id(value)] = len(self._open)
        self._alive.append(value)  # no other may have its id
        beside = [self.mapping(getattr(value, "__dict__", {})), getattr(value, "default_factory", None)]
        if isinstance(value, list | tuple | deque | set | frozenset):
            return kind, [*map(self.form, value)], beside
        if isinstance(value, dict):
            return kind, [(self.form(key), self.form(x)) for key, x in value.items()], beside
        if kind is slice:
            return kind, [self.form(x) for x in (value.start, value.stop, value.step)]
        if kind is MethodType:
            return kind, self.form(value.__func__), self.form(value.__self__)
        if kind is FunctionType:
            cells = [self.form(x.cell_contents) if _has_value(x) else _EMPTY for x in value.__closure__ or ()]
            beside = [self.form(x) for x in (value.__defaults__, value.__kwdefaults__, vars(value))]
            return kind, _Itself(value.__code__), cells, beside
        if _is_of_user(kind):
            return kind, self.mapping(vars(value))
        return _Itself(object())  # another one in each trace, as far as anybody knows

    def kind_of(self, x: Tensor) -> tuple[Any, ...]:
        """What Python can see of a tensor without its values, and which others have their values where it has them."""
        kind: tuple[Any, ...] = type(x), self._names.get(id(x), ""), str(tuple(x.shape)), x.dtype, x.device, x.layout
        if x.layout == torch.strided:
            memory = self._memory.setdefault(_torch.tensors.memory_mark(x), len(self._memory))
            kind += memory, str(x.stride()), str(x.storage_offset())
        return kind


_BY_VALUE = {
    type(None), bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
}  # fmt: skip

_SHARED = (
    type | ModuleType | BuiltinFunctionType | MethodDescriptorType | torch._ops.OpOverload | torch._ops.OpOverloadPacket
)
"""What two traces have in common."""


_EMPTY = "empty"


def _has_value(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _set_on(x: Tensor) -> dict[str, Any]:
    """The attributes that the user has set on a tensor."""
    return {name: value for name, value in vars(x).items() if name not in _torch.export.attributes_of_fakes()}


def _is_of_user(kind: type) -> bool:
    """Whether all that objects of a class hold is in their ``__dict__``."""
    mro: Sequence[type] = kind.__mro__[:-1]
    written = all(x.__flags__ & 1 << 9 and not vars(x).get("__slots__") for x in mro)
    return written and not any(x.__module__.partition(".")[0] == "torch" for x in mro)
