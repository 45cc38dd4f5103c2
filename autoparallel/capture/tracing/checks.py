"""Python that asks a tensor whether it holds: ``if bad.any(): raise ValueError(...)``, ``if x.isfinite().all():``.

No trace has the values that it asks for.  Where one of both answers only raises, as in ``assert mask.any()``, the trace
goes the other way, as it does for ``torch._check``, and a warning names the line: a program that raised on some ranks
only would leave the others waiting.  Which way that is, Python's instructions say: of the two answers that a tensor may
give, exactly one must lead to nothing but an error, which nobody between the check and the call of the model may catch.
So it goes past an ``if`` that only prints, logs or warns.

Any other question with two answers becomes an output of the trace, which is made once for each (see
``functional.ways``).
"""

from __future__ import annotations

import ast
import dis
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from autoparallel import _torch
from autoparallel.capture.tracing.drawn_scalars import number_of
from autoparallel.capture.tracing.errors import is_caught
from autoparallel.capture.tracing.messages import showing_if
from autoparallel.capture.tracing.sources import Place, place_at
from autoparallel.capture.tracing.stand_ins import replacement
from autoparallel.capture.tracing.trace import Trace
from autoparallel.graph.input_values import mapped
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import OURS, is_tracers_file

_LISTENING = f"{OURS}capture/tracing/"
"""Where Python stands between a model's and torch's."""

CHECK = "a check of values, which eager makes at every call"
"""What a trace leaves out where one of two answers only raises."""

SHOWN = "what is printed, logged or warned of by values"
"""What a trace leaves out where an answer decides about nothing else."""

_MODULES_OF_TORCH = f"{_torch.export.FOLDER}nn/"
"""They leave out what would run on no rows, which then gets no gradient: adaptive softmax, whose ways are too many."""


def _ask(trace: Trace, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What Python is told that asks for a tensor's value: of a check that only raises, what lets it pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__"
        or frame.f_code.co_filename.startswith(_LISTENING)
        or frame.f_code is _OF_SIZES  # asks of a size whether it is 0
    ):
        frame = frame.f_back
    tensor, *others = (*args, *kwargs.values())
    if frame is None or getattr(tensor, "constant", None) is not None:
        return func(*args, **kwargs)
    instructions = list(dis.get_instructions(frame.f_code))
    ways = _ways_from(instructions, frame.f_lasti, func is _has)
    passes = True if _is_of_constraint(frame) else ways and _passing_answer(instructions, ways)
    if passes is not None and not is_caught(frame):
        trace.left_out[line_of_frame(frame)] = CHECK
        return passes
    if ways is not None and (statement := showing_if(frame)) is not None:
        trace.left_out[line_of_frame(frame)] = SHOWN
        return _silent_answer(instructions, ways, statement)
    if func in _EQUAL and tensor.shape != others[0].shape:
        return False  # whatever they hold
    alone = func is not _SYM_BOOL and not others
    if alone and (number := number_of(trace, tensor)) is not None:
        return number if func is Tensor.item else bool(number)
    if alone and (answer := trace.read(func, tensor)) is not None:
        return answer
    args, kwargs = mapped((args, kwargs), _torch.export.as_traced)
    if func is _SYM_BOOL and frame.f_code.co_filename.startswith(_MODULES_OF_TORCH):
        return _torch.export.guard_strictly(tensor)
    of_torch = frame.f_code.co_filename.startswith(_torch.export.FOLDER)
    value = None if of_torch else _question(func, *args, **kwargs)
    key = str(tensor) if func is _SYM_BOOL else ""
    return func(*args, **kwargs) if value is None else trace.ask(value, frame, key)


_CONSTRAINTS = constraints.Constraint.check.__code__.co_filename
_CHECKS_OF_CONSTRAINTS = Distribution.__init__.__code__.co_filename


def _is_of_constraint(frame: FrameType) -> bool:
    """Whether a constraint of ``torch.distributions`` asks on behalf of a check: what does not hold it returns at once,
    and the check raises."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename == _CONSTRAINTS:
        outer = outer.f_back
    return outer is not frame and outer is not None and outer.f_code.co_filename == _CHECKS_OF_CONSTRAINTS


def _question(func: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """The tensor of one element that holds where a call of the functions below answers True; None where the answer is
    another one, or no fake tensor's."""
    if func is _SYM_BOOL:
        return torch.ops.aten.scalar_tensor.default(torch.sym_ite(x, 1, 0)) > 0
    if not _torch.export.is_fake(x):
        return None
    if func in (Tensor.allclose, torch.allclose):
        return torch.isclose(x, *args, **kwargs).all()
    if func in _EQUAL:
        (other,) = (*args, *kwargs.values())
        return (x == other).all()
    is_one = all(size == 1 for size in x.shape)
    return x if is_one and (func in _TRUTH or x.dtype == torch.bool) else None


def _contains(trace: Trace, contains: Callable[..., bool], self: Tensor, element: Any) -> bool:
    """Asks whether any element is equal, as ``element in x`` does."""
    if not isinstance(element, Tensor | int | float | complex):
        return contains(self, element)
    answer: bool = _ask(trace, _has, torch.eq(self, element).any())
    return answer


def _has(equal: Tensor) -> bool:
    return _BOOL(equal)


def _sym_bool(trace: Trace, ask: Callable[..., bool], self: torch.SymBool) -> bool:
    """The same for a relation of sizes that only values tell: how many rows a mask selects."""
    unasked = not _torch.export.is_unknown(self, trace.numbers)
    answer = ask(self) if unasked else _ask(trace, ask, self)
    if unasked:
        frame = sys._getframe(2)
        frame = frame.f_back or frame if frame.f_code is _OF_SIZES else frame
        if not is_tracers_file(frame.f_code.co_filename) or frame.f_code is _torch.nn.REQUIRES_ROWS:
            _torch.export.note_of_one(self, answer)
    return answer


_EQUAL = (Tensor.equal, torch.equal)
_BOOL, _SYM_BOOL = Tensor.__bool__, torch.SymBool.__bool__
_NONZERO = (Tensor.is_nonzero, torch.is_nonzero)
_TRUTH = (_BOOL, _has, *_NONZERO)
_OF_SIZES = torch.SymInt.__bool__.__code__
NAMES: tuple[tuple[Any, str, Any], ...] = (
    # Torch's own Python asks, too (F.gaussian_nll_loss), to which no TorchFunctionMode listens.
    replacement(Tensor, "__bool__", _ask),
    replacement(Tensor, "__contains__", _contains),
    replacement(torch.SymBool, "__bool__", _sym_bool),
)
CHECKED: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (Tensor.item, *_EQUAL, *_NONZERO, Tensor.allclose, torch.allclose), _ask
)
"""The functions that ask for a value, with what takes their place while a model is traced."""


def _ways_from(instructions: Sequence[dis.Instruction], offset: int, of_in: bool) -> tuple[int, int] | None:
    """Where Python goes on from an instruction that asks: where the answer is True, and where it is False.

    Args:
        of_in: whether the answer is that of ``in``; that of an element of a list that ``in`` looks through is not.
    """
    at = bisect_right(instructions, offset, key=lambda x: x.offset) - 1  # a call may stand at its cache, behind it
    if instructions[at].opname.startswith(("CALL", "PRECALL", "COMPARE_OP")):  # from 3.13 on, a comparison asks itself
        at += 1
    is_negated = of_in and instructions[at].arg == 1  # not in
    at += of_in
    while instructions[at].opname in ("UNARY_NOT", "TO_BOOL"):
        is_negated ^= instructions[at].opname == "UNARY_NOT"
        at += 1
    jump = instructions[at]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("_IF_TRUE", "_IF_FALSE")):
        return None
    ways = jump.argval, instructions[at + 1].offset
    return ways[::-1] if jump.opname.endswith("FALSE") ^ is_negated else ways


def _passing_answer(instructions: Sequence[dis.Instruction], ways: tuple[int, int]) -> bool | None:
    """The answer with which nothing is raised; None where not exactly one answer leads to nothing but an error."""
    raises, passes = (_only_raises(instructions, way) for way in ways)
    return None if raises == passes else not raises


def _silent_answer(instructions: Sequence[dis.Instruction], ways: tuple[int, int], statement: ast.If) -> bool:
    """The answer that is farther from what a statement shows: past it, or else in its test."""
    where = {x.offset: x.positions or dis.Positions() for x in instructions}
    true, false = (_distance(place_at(where[way]), statement) for way in ways)
    return true > false


def _distance(place: Place | None, statement: ast.If) -> int:
    """0 in the body of a statement, 1 in its test, 2 past it."""
    if place is None:
        return 2
    return 0 if any(map(place.is_in, statement.body)) else 1 if place.is_in(statement.test) else 2


def _only_raises(instructions: Sequence[dis.Instruction], offset: int) -> bool:
    """Whether every way on from an instruction ends in an error."""
    where = {instruction.offset: i for i, instruction in enumerate(instructions)}
    ways, visited = [where[offset]], set()
    while ways:
        at = ways.pop()
        name = instructions[at].opname
        if at in visited or name == "RAISE_VARARGS":
            continue
        visited.add(at)
        if name.startswith(("RETURN", "YIELD", "RERAISE")):
            return False
        if instructions[at].opcode in _JUMPS:
            ways.append(where[instructions[at].argval])
        if name not in _ALWAYS:
            ways.append(at + 1)
    return True


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
