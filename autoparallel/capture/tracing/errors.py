"""Who catches an error that is raised where a model runs: the statements around it, in the functions that run."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import FrameType, FunctionType
from typing import Any

from autoparallel import _torch
from autoparallel.capture.tracing.sources import parse, path_to, place_in, place_of, source_of
from autoparallel.graph.python_state import OURS, is_tracers_file

_OUTERMOST = f"{OURS}capture/training.py"
"""Where the call of the model begins."""

_CHECKS_OF_TORCH = f"{_torch.export.FOLDER}distributions/"

CONTEXT_MANAGER = contextlib.contextmanager(iter).__code__
"""The function that ``contextmanager`` makes of one that yields."""

_GO_ON = (ast.Return, ast.Break, ast.Continue)

_ASKED_BY_PYTHON = ("__next__", "__getitem__", "__getattr__")
"""Methods whose errors tell Python something: that a loop is over, or that there is no such attribute."""


def frames_of_model(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those around it, up to the call of the model; without those of torch's own Python, and ours."""
    while frame is not None and (name := frame.f_code.co_filename) != _OUTERMOST:
        if not is_tracers_file(name) or name.startswith(_CHECKS_OF_TORCH):
            yield frame
        frame = frame.f_back


def path_of(frame: FrameType) -> list[ast.AST] | None:
    """What is around the instruction of a frame, within its function; None where there is no source."""
    place, tree = place_in(frame), parse(frame.f_code.co_filename)
    return None if place is None or tree is None else path_to(tree, place)


def catching(path: Sequence[ast.AST]) -> Iterator[ast.With | ast.AsyncWith | ast.Try | ast.TryStar]:
    """The statements of a path that are given the errors of what they are around."""
    for outer, inner in pairwise(path):
        if not isinstance(outer, ast.With | ast.AsyncWith | ast.Try | ast.TryStar):
            continue
        catches = not isinstance(outer, ast.Try | ast.TryStar) or outer.handlers
        if catches and any(inner is statement for statement in outer.body):
            yield outer


def is_caught(frame: FrameType) -> bool:
    """Whether somebody between a check and the call of the model may catch what it raises."""
    for outer in frames_of_model(frame):
        if outer.f_code.co_name in _ASKED_BY_PYTHON:
            return True
        if not outer.f_code.co_exceptiontable:  # it handles nothing, also where there is no source (typed in a prompt)
            continue
        path = path_of(outer)
        if path is None:
            return True
        names = {**outer.f_globals, **outer.f_locals}
        if is_taken(path, names):
            return True
    return False


def is_taken(path: Sequence[ast.AST], names: Mapping[str, Any]) -> bool:
    """Whether a statement of a path may catch the errors of what it is around."""
    return any(
        not (raises_again(x) if isinstance(x, ast.Try | ast.TryStar) else lets_pass(x, names)) for x in catching(path)
    )


def raises_again(statement: ast.Try | ast.TryStar) -> bool:
    """Whether whatever its handlers catch ends in an error, as where they say more of it (``raise ... from e``)."""
    return all(
        isinstance(handler.body[-1], ast.Raise) and not any(isinstance(x, _GO_ON) for x in own_nodes(handler))
        for handler in statement.handlers
    ) and not goes_on(statement)


def goes_on(statement: ast.Try | ast.TryStar) -> bool:
    """Whether an error is lost at its end (``finally: return``)."""
    return any(isinstance(x, _GO_ON) for end in statement.finalbody for x in ast.walk(end))


def lets_pass(statement: ast.With | ast.AsyncWith, names: Mapping[str, Any]) -> bool:
    """Whether its context managers are known to catch nothing."""
    contexts = [item.context_expr for item in statement.items]
    return all(lets_errors_out(value_of(manager_of(x), names), isinstance(x, ast.Call)) for x in contexts)


def manager_of(context: ast.expr) -> ast.expr:
    """What a context manager is made by, or is."""
    return context.func if isinstance(context, ast.Call) else context


def value_of(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of one, stands for; None where only a run would tell."""
    if isinstance(expression, ast.Attribute):
        return getattr(value_of(expression.value, names), expression.attr, None)
    return names.get(expression.id) if isinstance(expression, ast.Name) else None


def is_transparent(manager: Any) -> bool:
    """Whether a context manager is known to take neither errors nor what is printed: none, or one of torch's."""
    return manager is contextlib.nullcontext or str(getattr(manager, "__module__", "")).partition(".")[0] == "torch"


def lets_errors_out(manager: Any, is_called: bool) -> bool:
    """Whether a context manager is known to catch nothing: a transparent one, a generator that catches nothing at its
    ``yield``, or a class whose ``__exit__`` returns nothing.

    Args:
        is_called: whether it is what makes one: a class, or a function.
    """
    if is_transparent(manager):
        return True
    if getattr(manager, "__code__", None) is not CONTEXT_MANAGER:
        kind = manager if is_called else type(manager)
        classes = kind.__mro__ if is_called == isinstance(manager, type) else ()
        return _returns_nothing([vars(x)["__exit__"] for x in classes if "__exit__" in vars(x)])
    plain = getattr(manager, "__wrapped__", None)
    if not isinstance(plain, FunctionType) or (definition := source_of(plain.__code__)) is None:
        return False
    nodes = [*own_nodes(definition)]
    is_lost = any(goes_on(node) for node in nodes if isinstance(node, ast.Try | ast.TryStar))
    places = [place for x in nodes if isinstance(x, ast.Yield) and (place := place_of(x)) is not None]
    return not is_lost and not any(is_taken(path_to(definition, x), plain.__globals__) for x in places)


def _returns_nothing(methods: Sequence[Any]) -> bool:
    """Whether an ``__exit__`` returns nothing, or what that of the next class in line does, which returns nothing."""
    if not methods or not isinstance(methods[0], FunctionType):
        return False
    definition = source_of(methods[0].__code__)
    returned = [] if definition is None else [x.value for x in own_nodes(definition) if isinstance(x, ast.Return)]
    other = [x for x in returned if not (x is None or isinstance(x, ast.Constant) and not x.value)]
    is_next = all(isinstance(x, ast.Call) and ast.unparse(x.func) == "super().__exit__" for x in other)
    return definition is not None and is_next and (not other or _returns_nothing(methods[1:]))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What stands in a function, without the functions within it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from own_nodes(node)
