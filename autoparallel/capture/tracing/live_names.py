"""The local variables that a function may still read where it is: only of them does it depend what it does from there.

A variable is live before an instruction that reads it, and before one behind which it is live and which does not bind
it (A. Aho, M. Lam, R. Sethi, J. Ullman: Compilers, section 9.2.5).  What Python holds beside variables, no function
can see; what it was made of, the source says (see ``waiting_values``).
"""

from __future__ import annotations

import ast
import dis
from bisect import bisect_right
from collections.abc import Collection
from functools import cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR, CO_OPTIMIZED
from types import CodeType, FrameType, FunctionType

from torch import nn

from autoparallel.capture.tracing.errors import path_of
from autoparallel.capture.tracing.waiting_values import Waiting

_ALL = frozenset(("locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"))
"""Functions that may read every variable of who calls them."""


def live_names(frame: FrameType, asks: bool, written: Collection[str] = ()) -> frozenset[str] | None:
    """The variables that a frame depends on behind its instruction; None where nobody can tell what else it holds: in
    the middle of an expression, of a loop over what tells no turn from another, or of an error that is handled, in a
    generator, in a function that is not written in Python, or in the condition of a loop.

    Args:
        asks: whether it asks for a value there, and calls no other.
        written: the names of attributes that the call has set until then.
    """
    code, path = frame.f_code, path_of(frame)
    if path is None or not code.co_flags & CO_OPTIMIZED or code.co_flags & _RESUMED:
        return None
    waiting = Waiting(frame, written)
    if not (_asks_alone(frame, path[-1]) if asks else _calls_python(path[-1], waiting)):
        return None
    names = waiting.names_along(path)
    of_maker = code.co_varnames[: code.co_name == "__init__"]  # who makes an object is given it
    return None if names is None else names | live_at(code, frame.f_lasti) | {*of_maker}


_RESUMED = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


def _asks_alone(frame: FrameType, expression: ast.AST) -> bool:
    """Whether nothing but the answer follows where a frame asks."""
    instruction = next(x for x in dis.get_instructions(frame.f_code) if x.offset == frame.f_lasti)
    if instruction.opname.startswith(("POP_JUMP", "TO_BOOL", "UNARY_NOT")) or instruction.argrepr.startswith("bool("):
        return True  # from 3.13 on, a comparison may ask for what it gives
    function = expression.func if isinstance(expression, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr in _ASKING or _name_of(function) == "bool"


_ASKING = ("item", "equal", "allclose", "is_nonzero", "__bool__")


def _name_of(expression: ast.AST | None) -> str:
    return expression.id if isinstance(expression, ast.Name) else ""


def _calls_python(expression: ast.AST, waiting: Waiting) -> bool:
    """Whether no function of C stands between a frame and the one that it calls, and goes on from there."""
    if not isinstance(expression, ast.Call):
        return isinstance(expression, ast.Attribute)
    function = waiting.value_of(expression.func)
    if isinstance(function, type):
        return bool(function.__flags__ & _HEAP_TYPE)
    return isinstance(getattr(function, "__func__", function), FunctionType | nn.Module)


_HEAP_TYPE = 1 << 9
"""That of the classes that are written in Python (``Py_TPFLAGS_HEAPTYPE``)."""


def live_at(code: CodeType, offset: int) -> frozenset[str]:
    """The variables that are live behind an instruction."""
    if not _ALL.isdisjoint(code.co_names):
        return frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))
    instructions, live = _liveness(code)
    at = bisect_right(instructions, offset, key=lambda x: x.offset) - 1
    behind = (live[place] for place in _ways_on(code, at))
    return frozenset(code.co_freevars).union(*behind)


@cache
def _liveness(code: CodeType) -> tuple[list[dis.Instruction], list[frozenset[str]]]:
    """The instructions of a function, and which variables are live before each."""
    instructions = list(dis.get_instructions(code))
    live: list[frozenset[str]] = [frozenset()] * len(instructions)
    is_settled = False
    while not is_settled:
        is_settled = True
        for at in reversed(range(len(instructions))):
            reads, binds = _use(instructions[at])
            before = (frozenset().union(*(live[place] for place in _ways_on(code, at))) - binds) | reads
            is_settled &= before == live[at]
            live[at] = before
    return instructions, live


def _use(instruction: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """The variables that an instruction reads, and those that it binds: of those that functions within it share, too,
    which have what they hold where they are live themselves."""
    name, value = instruction.opname, instruction.argval
    if not any(kind in name for kind in ("_FAST", "_DEREF", "LOAD_CLOSURE")) or value is None:
        return frozenset(), frozenset()
    names = value if isinstance(value, tuple) else (value,)  # from 3.13 on, one may be of two variables
    parts = [x for x in name.replace("_AND_CLEAR", "").split("_") if x in ("LOAD", "STORE", "DELETE")]
    parts = parts if len(parts) == len(names) else parts[:1] * len(names)
    reads, binds = (
        frozenset(x for part, x in zip(parts, names, strict=True) if (part == "LOAD") == loads)
        for loads in (True, False)
    )
    return reads - (binds if parts[0] != "LOAD" else frozenset()), binds


@cache
def _ways_on(code: CodeType, at: int) -> tuple[int, ...]:
    """The instructions that may come behind one: the next, that to which it jumps, and those that handle its error."""
    instructions, places, handlers = _flow(code)
    instruction = instructions[at]
    ways = [handlers[at]] if handlers[at] is not None else []
    if instruction.opcode in _JUMPS:
        ways.append(places[instruction.argval])
    if not instruction.opname.startswith(_ENDS) and at + 1 < len(instructions):
        ways.append(at + 1)
    return tuple(x for x in ways if x is not None)


@cache
def _flow(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int], list[int | None]]:
    """The instructions of a function, their places by offset, and for each which one handles its error."""
    instructions = list(dis.get_instructions(code))
    places = {x.offset: i for i, x in enumerate(instructions)}
    handlers: list[int | None] = [None] * len(instructions)
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        for i, x in enumerate(instructions):
            if entry.start <= x.offset < entry.end:
                handlers[i] = places[entry.target]
    return instructions, places, handlers


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ENDS = ("JUMP_FORWARD", "JUMP_BACKWARD", "RETURN", "RAISE", "RERAISE")
