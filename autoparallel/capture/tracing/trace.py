"""What one trace notes beside operators, on the thread that makes it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from autoparallel import _torch
from autoparallel.capture.python.places_read import PlacesRead
from autoparallel.capture.refusals.refusals import INSTEAD_OF_WAYS
from autoparallel.capture.tracing.continuations import Continuation
from autoparallel.capture.tracing.inputs_read import InputsRead
from autoparallel.capture.tracing.tensor_attributes import TensorAttributes
from autoparallel.comm.current import Current
from autoparallel.graph.drawn_numbers import Script, script_of
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.hooks import HookTemplate
from autoparallel.graph.layers import mark_checkpointed
from autoparallel.graph.lines import line_of_frame
from autoparallel.operators.opaque import OpaqueCall

MOST_ALONE = 4
"""How often Python may ask on ways that do not meet again: with every such question there are twice as many."""


@dataclass(frozen=True)
class Answers:
    """What Python is told that asks whether tensors hold.

    Attributes:
        first: one question after another.
        rest: all further ones.
        most: how often it may ask.
        looks: the numbers of the questions at which it is noted what Python has.
    """

    first: tuple[bool, ...] = ()
    rest: bool = True
    most: int = 64
    looks: Container[int] = ()

    def __getitem__(self, number: int) -> bool:
        return self.first[number] if number < len(self.first) else self.rest


@dataclass(frozen=True)
class Question:
    """A tensor that Python has asked whether it holds.

    Attributes:
        value: what it was then.
        line: the one that asks.
        continuation: what Python had then; None where that is not noted.
    """

    value: Tensor
    line: str
    continuation: Continuation | None

    @property
    def results(self) -> list[Tensor]:
        """What a trace returns of it, its value last."""
        return [*(() if self.continuation is None else self.continuation.tensors), self.value]


def refused_question(number: int, line: str, first: int = 0) -> CaptureError:
    """The refusal of one question too many.

    Args:
        number: of those before it.
        first: of those before the first one with which each question doubles the ways.
    """
    since = f"from the {first + 1}th on " if first else ""
    what = f"Python asks for a tensor's value for the {number + 1}th time, and {since}every question doubles the ways"
    return refusal(f"{what} that a call may take,", line, INSTEAD_OF_WAYS)


class Trace:
    """What one trace has met.

    Args:
        originals: of the objects in the traced copy of the model, by id, what they are copies of.
        paths: of the modules of the copy, by id.
        existing: the tensors that the copy and its inputs have before the call, by id.
        left_out: what the trace leaves out is added, by the line of it.
        questions: the tensors are added that Python has asked whether they hold.
        as_compiled: what the model is told that asks ``torch.compiler.is_compiling()``.
        answers: what Python is told that asks for a tensor's value.
        calls: what stands behind the names in ``autoparallel::call``, which may be shared by several traces.
        hooks: the tensor hooks behind the names in ``autoparallel::hook``; shared, too.
        inputs: where Python may read values that follow from inputs.
        attributes: those that the user has set on tensors.
        places: what the functions that run load from.
        fixes_whole: whether whole numbers that it draws, or makes of floats, are fixed.

    Attributes:
        reads_values: whether Python reads a tensor's value.
        asked_at: the line at which it asks first whether it is compiled; None for a model that does not.
        runs: whether the model runs.
        gradient_asked_after: after how many questions it has asked last whether a tensor requires a gradient.
        fixed: the lines at which the model fixed a size that was open, by the size.
        ahead: the numbers that the call is given to draw, by what they are drawn from (see ``graph.drawn_numbers``).
        drawn: the lines at which it has drawn them; ``draws`` says what.
        has_open_whole: whether a whole number of these is left open.
        ranges: what the numbers are drawn from that it was not given, with these, as long as they live.
        scalars: the tensors of one number that it has drawn, and comparisons of them, by id, with their versions and
            what is known of them.
        listening: whether the model's own Python runs.
        counting: tensors that count up by one along their last dim, by id, with their version.
        has_leaves: whether the model has made a tensor of its own require gradients, which nobody is given.
        differentiates: the line at which it has taken gradients.
        places: of the inputs that are tensors, by the id of what stands for them; ``read_inputs`` has those that a
            function of torch has been given, ``requiring`` the places of those that the model has require gradients.
        of_functions: the tensors that ``autograd.Function``s have been given, and have given.
        kernels: the names of those that attention may run on where the model is called.
        script_depth: how many functions of TorchScript the model is in.
        numbers: the places among the inputs of numbers that are left open, and their values, by what stands for them.
        assumed: the relations of these that the model has asked for, and whether they hold in this call; and what it
            has made whole numbers of, with these.
    """

    def __init__(
        self,
        originals: Mapping[int, Any],
        paths: Mapping[int, str],
        existing: Collection[int],
        left_out: dict[str, str],
        questions: list[Question],
        *,
        as_compiled: bool = False,
        answers: Answers,
        calls: dict[str, OpaqueCall] | None = None,
        hooks: dict[str, HookTemplate] | None = None,
        inputs: InputsRead | None = None,
        attributes: TensorAttributes,
        places: PlacesRead,
        fixes_whole: bool = False,
    ) -> None:
        self.originals, self.paths, self.existing, self.as_compiled = originals, paths, existing, as_compiled
        self.answers, self.questions = answers, questions
        self.calls: dict[str, OpaqueCall] = {} if calls is None else calls
        self.hooks: dict[str, HookTemplate] = {} if hooks is None else hooks
        self.inputs, self.attributes, self.reads_values = inputs, attributes, False
        self._around = places
        self.asked_at: str | None = None
        self.gradient_asked_after, self.runs = 0, False
        self._running: list[FrameType] = []
        self.has_leaves, self.differentiates = False, ""
        self.places: dict[int, int] = {}
        self.read_inputs: set[int] = set()
        self.requiring: set[int] = set()
        self.of_functions: list[Tensor] = []
        self.kernels, self.script_depth = _torch.nn.attention_kernels(), 0
        self._regions: list[tuple[fx.Graph | None, int]] = []  # that the model is in
        self.counting: dict[int, tuple[Tensor, int]] = {}
        self.fixed: dict[int, str] = {}
        self.numbers: dict[Any, tuple[int, int | float]] = {}
        self.assumed: list[tuple[_torch.export.SymNode, bool | int]] = []
        self._answered: dict[str, bool] = {}  # by key
        self._of_call: tuple[Mapping[str, Tensor], Sequence[str], Callable[[], Mapping[str, Any]]] = {}, (), dict
        self.ahead: Mapping[str, tuple[Any, ...]] = {}
        self.drawn: dict[str, list[str]] = {}
        self.draws: dict[str, list[int]] = {}
        self.fixes_whole, self.has_open_whole = fixes_whole, False
        self.ranges: list[tuple[str, Callable[[], Any]]] = []
        self.scalars: dict[int, tuple[Tensor, int, Any]] = {}
        self.left_out = left_out
        self.listening = True

    def original(self, value: Any) -> Any:
        """What the user has for an object of the traced copy."""
        return self.originals.get(id(value), value)

    @property
    def draw_scripts(self) -> dict[str, Script]:
        """The numbers that it has drawn one by one, by what they are drawn from."""
        return {source: tuple(draws) for source, draws in self.draws.items()}

    def draw(self, source: str, below: int, line: str) -> Any:
        """Notes that it draws a number; what stands for it in [0, 1) if the call is given it, else None.

        Args:
            below: see ``Script``.
        """
        draws = self.draws.setdefault(source, [])
        draws.append(below)
        self.drawn.setdefault(source, []).append(line)
        for label, numbers in self.ahead.items():
            theirs, script = script_of(label, len(numbers))
            if theirs == source and script[: len(draws)] == tuple(draws):
                return numbers[len(draws) - 1]
        return None

    def note_counting(self, x: Tensor) -> None:
        """Notes that a tensor counts up by one along its last dim, as long as nothing is written into it."""
        self.counting[id(x)] = x, x._version

    def counts_up(self, x: Tensor) -> bool:
        """Whether a tensor is known to count up by one along its last dim."""
        entry = self.counting.get(id(x))
        return entry is not None and entry[1] == x._version

    def _known_of(self, x: Tensor) -> tuple[Any, ...]:
        """What Python may be told of a tensor's values in the trace."""
        if self.inputs is not None:  # numbers that are read: they may be others in each trace
            return (object(),)
        scalar = self.scalars.get(id(x))
        return self.counts_up(x), None if scalar is None or scalar[1] != x._version else str(scalar[2])

    def ask(self, value: Tensor, frame: FrameType, key: str = "") -> bool:
        """What Python is told that asks whether a tensor holds.

        Args:
            frame: the one that asks.
            key: of what is asked; of what has been asked before the answer is known.

        Raises:
            CaptureError: where it asks too often.
        """
        if key in self._answered:
            return self._answered[key]
        number, line, continuation = len(self.questions), line_of_frame(frame), None
        if number in self.answers.looks:
            held, buffers, changed = self._of_call
            with self.silent():
                everything = {**changed(), **self._around.now()}
                continuation = Continuation(
                    frame, self.originals, everything, held, buffers, self._answered, self._around.kept, self._running,
                    self._known_of,
                )  # fmt: skip
        is_last_way = continuation is not None and not continuation.may_be_met
        if number == min(self.answers.most, MOST_ALONE if is_last_way else self.answers.most):
            self.reads_values = True
            raise refused_question(number, line)
        self.questions.append(Question(value.detach().clone(), line, continuation))
        if key:
            self._answered[key] = self.answers[number]
        return self.answers[number]

    def note_call(
        self, held: Mapping[str, Tensor], buffers: Sequence[str], changed: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Notes what a call depends on beside the variables of functions.

        Args:
            held: the tensors of the copy, by name.
            buffers: the names of those that a call may change.
            changed: says what it has set until then, by label.
        """
        self._of_call, self.runs = (held, buffers, changed), True

    def end_call(self) -> None:
        """The model does not run any more, nor are its functions and what they hold kept."""
        self.runs = False
        self._running.clear()

    def note_inputs(self, inputs: Sequence[Any]) -> None:
        """Notes what stands for the inputs."""
        self.places = {id(x): place for place, x in enumerate(inputs) if isinstance(x, Tensor)}
        self.read_inputs.clear()
        self.requiring.clear()
        if self.inputs is not None:
            self.inputs.note_inputs(inputs)

    def note_read(self, args: Sequence[Any]) -> None:
        """Notes which inputs are among what a function of torch is given."""
        for x in args:
            if isinstance(x, list | tuple):
                self.note_read(x)
            elif id(x) in self.places:
                self.read_inputs.add(id(x))

    def require_same_inputs(self, places: Collection[int]) -> None:
        """Refuses a call that does not have inputs require gradients which others like it have require them."""
        if not self.requiring.issuperset(places):
            raise CaptureError(
                "an input's requires_grad becomes True inside of the model in some calls, and not in others that are "
                "given inputs of the same form\n"
                "What to change: make it require gradients before the call, or differentiate with respect to a tensor "
                "of the model's own (x = x.detach().requires_grad_())."
            )

    def note_number(self, number: Any, place: int, value: int | float) -> None:
        """Notes what stands for a number that is left open."""
        self.numbers[number.node.expr] = place, value

    def compare(self, relation: _torch.export.SymNode) -> bool | None:
        """What the model is told that compares numbers which are left open; None where whole ones or others decide."""
        is_open = self._holds_number(relation) or _torch.numbers.is_of_floats(relation.expr)
        value = self._value_of(relation) if is_open else None
        if value is None:
            return None
        self.assumed.append((relation, bool(value)))
        return bool(value)

    def cut(self, number: _torch.export.SymNode) -> int | None:
        """The whole number that the model is told which makes one of floats (``int(4 * x)``) that are left open; None
        where other values decide."""
        value = self._value_of(number) if self._holds_number(number) and not number.expr.is_Symbol else None
        if value is None:
            return None
        self.assumed.append((number, int(value)))
        return int(value)

    def _holds_number(self, node: _torch.export.SymNode) -> bool:
        """Whether numbers that are left open are among what something is made of."""
        return not node.expr.free_symbols.isdisjoint(self.numbers)

    def _value_of(self, node: _torch.export.SymNode) -> float | None:
        """What is made of sizes and numbers that are left open, in this call; None where others are among them."""
        values: dict[Any, float] = {}
        for symbol in node.expr.free_symbols:
            value = self.numbers[symbol][1] if symbol in self.numbers else _torch.export.hint_of(node, symbol)
            if value is None:
                return None
            values[symbol] = value
        return _torch.numbers.evaluator(node.expr)(values)

    def read(self, function: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """What a function reads of a tensor's values, where Python may be told (see ``inputs_read``); else None."""
        self.reads_values = True
        self.attributes.note_asked(tensor)
        return None if self.inputs is None else self.inputs.read(function, tensor)

    @property
    def in_region(self) -> bool:
        """Whether the model is in a region of ``torch.utils.checkpoint``."""
        return bool(self._regions)

    def begin_region(self) -> None:
        """A region of ``torch.utils.checkpoint`` begins."""
        self._regions.append(_torch.export.place_in_trace())

    def end_region(self) -> None:
        """The region that has begun last ends; its calls are marked."""
        for node in _torch.export.nodes_since(self._regions.pop()):
            mark_checkpointed(node)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside, Python runs that leaves no trace."""
        before, self.listening = self.listening, False
        try:
            yield
        finally:
            self.listening = before

    def run_silently(self, function: Callable[[], Any], tensors: Sequence[Any]) -> Any:
        """Runs Python on fake tensors without a trace of it; it may differentiate."""
        mode = next(m for x in tensors if (m := getattr(x, "fake_mode", None)) is not None)
        with self.silent(), _torch.export.unwatched(), mode, _torch.autograd.recording():
            return function()


CURRENT: Current[Trace | None] = Current(None)


def listening() -> Trace | None:
    trace = CURRENT.value
    return trace if trace is not None and trace.listening else None


def refuse(what: str, cure: str) -> CaptureError:
    """What the model does at the line that runs, and what to change (see :func:`~graph.errors.refusal`)."""
    return refusal(what, line_of_frame(sys._getframe(1)), cure)


def register(table: dict[str, Any], name: str, entry: object) -> str:
    """The name of what stands behind a call in a trace; equal ones share one, so that layers of them are alike."""
    while table.setdefault(name, entry) != entry:
        name += "'"
    return name


def fresh(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def with_results(values: tuple[Any, ...], places: Sequence[int], replacements: Sequence[Tensor]) -> tuple[Any, ...]:
    """Values with what a call has made in the places of tensors, which carries a gradient where they did."""
    out = list(values)
    for i, value in zip(places, replacements, strict=True):
        out[i] = value if values[i].requires_grad or not value.requires_grad else value.detach()
    return tuple(out) if type(values) is tuple else type(values)(*out)
