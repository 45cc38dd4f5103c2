"""Whether a text that Python makes is a message: only people read it, and nothing follows from it.

The source says so: the text, or what it becomes a part of, is printed, logged or warned of, raised, or given to a
function that does no more with it (a check with its message).  So it is where it is told by a variable's name, or where
a function returns it.  A text that goes any other way may decide about what is computed, and so may that of an error
which the model catches and reads.
"""

from __future__ import annotations

import ast
import builtins
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch

from autoparallel.capture.tracing.errors import (
    CONTEXT_MANAGER,
    catching,
    frames_of_model,
    is_transparent,
    manager_of,
    path_of,
    value_of,
)
from autoparallel.capture.tracing.kinds_of_numbers import STAND_INS
from autoparallel.capture.tracing.sources import place_of, source_of

OF_OBJECTS = ("__repr__", "__str__", "__format__")
"""Methods that make the text of an object for who asks for it."""

_LIBRARY = logging.__file__.removesuffix("logging/__init__.py")
_SHOWING = tuple([_LIBRARY + name for name in ("logging/", "warnings.py", "pdb.py")])
"""Where Python makes texts that it shows."""

_OF_STRINGS = ("format", "join", "strip", "rstrip", "lstrip", "lower", "upper", "replace", "ljust", "rjust", "center")
"""Methods of strings that give a text of texts."""

_MAKE_TEXT = (str, repr, format, ascii)
_ASK_NOTHING = (callable, isinstance, type, STAND_INS["isinstance"], STAND_INS["type"])
"""What answers the same of any text."""

_ERROR_ASKED_FOR = ("exc_info", "format_exc", "format_exception")
"""What gives the error that is handled, or its text."""

_IN_FUNCTIONS = ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>")
"""Frames that run a part of a function."""


def is_message(frame: FrameType, made_by: CodeType | None = None) -> bool:
    """Whether the text that a frame makes at its instruction is a message.

    Args:
        made_by: the function that the frame calls there, and which gives the text; None where it is Python's own.
    """
    if frame.f_code.co_filename.startswith(_SHOWING):
        return True
    path = path_of(frame)
    if path is None:
        return False
    scope = _scope_of(frame, path)
    expression = path[-1]
    if isinstance(expression, ast.Call):
        if made_by is not None:
            function = scope.value_of(expression.func)
            if getattr(getattr(function, "__func__", function), "__code__", None) is not made_by:
                return False
        elif (raised := scope.shows(expression)) is not None:
            return not scope.is_overheard(path, raised)
        elif not scope.makes_text(expression):
            return False
    return scope.is_told(path)


def showing_if(frame: FrameType) -> ast.If | None:
    """The ``if`` whose test a frame's instruction belongs to, where nothing but what is shown follows from that."""
    path = path_of(frame) or []
    at = next((i for i in range(len(path) - 1, -1, -1) if isinstance(path[i], ast.stmt)), 0)
    statement = path[at] if path else None
    if not isinstance(statement, ast.If) or statement.orelse:
        return None
    scope = _scope_of(frame, path)
    shows = all(scope.only_shows(x, path[: at + 1]) for x in statement.body)
    return statement if shows and scope.changes_nothing(statement.test) else None


@dataclass
class _Scope:
    """A function in which a text goes from one expression into another.

    Attributes:
        function: its source.
        names: what its names stand for.
        frame: the one that runs it; None where none does.
        caller: whether what it raises or shows is read outside of it, where no frame runs it.
        visited: the variables that are looked at.
    """

    function: ast.AST
    names: Mapping[str, Any]
    frame: FrameType | None = None
    caller: Callable[[bool], bool] | None = None
    visited: set[tuple[ast.AST, str]] = field(default_factory=set)

    def is_told(self, path: Sequence[ast.AST]) -> bool:
        """Whether the last expression of a path gives a text that is only told.

        Args:
            path: the statements and expressions around it within a function, from the outside in.
        """
        for i in range(len(path) - 2, -1, -1):
            outer, text = path[i : i + 2]
            match outer:
                case ast.Expr():
                    return True  # of a value that nobody takes
                case ast.Raise():
                    return not self.is_overheard(path[: i + 1])
                case ast.Assert():
                    return text is outer.msg and not self.is_overheard(path[: i + 1])
                case ast.Compare():
                    return all(isinstance(operator, ast.Is | ast.IsNot) for operator in outer.ops)
                case ast.Assign():
                    return all(isinstance(x, ast.Name) and self.tells(x.id) for x in outer.targets)
                case ast.AugAssign() | ast.AnnAssign():
                    return isinstance(outer.target, ast.Name) and self.tells(outer.target.id)
                case ast.Return():
                    return self._is_result_told(path[0])
                case ast.Call() if (
                    text is not outer.func and (told := self._is_argument_told(path[: i + 1], text)) is not None
                ):
                    return told
                case ast.Call():
                    pass
                case _ if not _is_part(outer, text):
                    return False
        return isinstance(path[0], ast.Lambda) and self._is_result_told(path[0])

    def tells(self, name: str) -> bool:
        """Whether all that is done with a variable is to tell it."""
        if not isinstance(self.function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return False
        if (self.function, name) in self.visited:
            return True
        self.visited.add((self.function, name))
        outer = {child: node for node in ast.walk(self.function) for child in ast.iter_child_nodes(node)}
        if any(isinstance(x, ast.Global | ast.Nonlocal) and name in x.names for x in outer):
            return False
        reads = [x for x in outer if isinstance(x, ast.Name) and x.id == name and isinstance(x.ctx, ast.Load)]
        return all(self.is_told(self._path_to(read, outer)) for read in reads)

    def _path_to(self, node: ast.AST, outer: Mapping[ast.AST, ast.AST]) -> list[ast.AST]:
        """What is around an expression, up to the function with a name that it is in."""
        path = [node]
        while node is not self.function and (len(path) == 1 or not isinstance(node, ast.FunctionDef)):
            node = outer[node]
            if place_of(node) is not None:
                path.insert(0, node)
        return path

    def _is_result_told(self, function: ast.AST) -> bool:
        """Whether what a function gives is only told."""
        if function is not self.function:
            return isinstance(function, ast.FunctionDef) and self.tells(function.name)
        if self.frame is None or self.frame.f_back is None or self.frame.f_code.co_name in _IN_FUNCTIONS:
            return False
        return is_message(self.frame.f_back, self.frame.f_code)

    def _is_argument_told(self, path: Sequence[ast.AST], text: ast.AST) -> bool | None:
        """Whether the call at the end of a path only tells a text that it is given; None where it gives another that
        has it in it."""
        call = path[-1]
        assert isinstance(call, ast.Call)
        if self.makes_text(call):
            return None
        if (raised := self.shows(call)) is not None:
            return not self.is_overheard(path, raised)
        function = self.value_of(call.func)
        return any(function is x for x in _ASK_NOTHING) or self._tells_argument(path, call, text)

    def makes_text(self, call: ast.Call) -> bool:
        """Whether a call gives a text, or an error, that is made of what it is given."""
        function = self.value_of(call.func)
        if any(function is x for x in _MAKE_TEXT) or isinstance(function, type) and issubclass(function, BaseException):
            return True
        if not isinstance(call.func, ast.Attribute):
            return False
        is_string = isinstance(call.func.value, ast.Constant | ast.JoinedStr)
        return call.func.attr in OF_OBJECTS or is_string and call.func.attr in _OF_STRINGS

    def shows(self, call: ast.Call) -> bool | None:
        """Whether a call warns, or checks something, with a message, which may be raised, or else prints or logs it;
        None for any other."""
        function = self.value_of(call.func)
        owner = self.value_of(call.func.value) if isinstance(call.func, ast.Attribute) else None
        module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
        if function is warnings.warn or module == "torch" and name.startswith(("_check", "_assert")):
            return True
        is_logged = module == "logging" or isinstance(owner, logging.Logger | logging.LoggerAdapter)
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
            is_logged = self.value_of(call.func.value.func) is logging.getLogger
        is_printed = function is print and not any(x.arg in ("file", None) for x in call.keywords)
        return False if is_logged or is_printed else None

    def only_shows(self, statement: ast.stmt, path: Sequence[ast.AST]) -> bool:
        """Whether a statement, behind a path, prints, logs or warns, and does nothing else."""
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call):
            return isinstance(statement, ast.Pass)
        raised = self.value_of(call.func) is warnings.warn
        if not raised and self.shows(call) is not False or self.is_overheard(path, raised):
            return False
        return all(self.changes_nothing(x) for x in (*call.args, *(x.value for x in call.keywords)))

    def changes_nothing(self, expression: ast.expr) -> bool:
        """Whether an expression is known to be made of nothing but values, questions and texts."""
        calls = [x for x in ast.walk(expression) if isinstance(x, ast.Call)]
        others = any(isinstance(x, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for x in ast.walk(expression))
        return not others and all(self.makes_text(x) or self._asks_of_tensors(x) for x in calls)

    def _asks_of_tensors(self, call: ast.Call) -> bool:
        """Whether a call has the name of a function of tensors that writes nothing, and is none of the user's."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        function = self.value_of(call.func)
        of_torch = isinstance(function, BuiltinFunctionType | FunctionType | MethodType | None) and (
            function is None or (function.__module__ or "torch").startswith("torch")
        )
        return of_torch and hasattr(torch.Tensor, name) and not name.endswith("_")

    def is_overheard(self, path: Sequence[ast.AST], raised: bool = True) -> bool:
        """Whether the model reads what is raised, or has what is shown, at the end of a path in it."""
        statements = catching(path) if path[0] is self.function else ast.walk(self.function)
        if any(self._overhears(x, raised) for x in statements):
            return True
        if self.frame is not None:
            return _is_overheard_around(self.frame.f_back, raised)
        return self.caller is None or self.caller(raised)

    def _overhears(self, statement: ast.AST, raised: bool = True) -> bool:
        """Whether a statement reads an error that is raised in it, or has what is shown there."""
        if isinstance(statement, ast.With | ast.AsyncWith):
            contexts = [item.context_expr for item in statement.items]
            return any(map(self._has_shown, contexts)) or raised and not all(map(self._leaves_unread, contexts))
        handlers = statement.handlers if raised and isinstance(statement, ast.Try | ast.TryStar) else []
        return any(x.name and not self.tells(x.name) or self._asks_for_error(x) for x in handlers)

    def _asks_for_error(self, part: ast.AST) -> bool:
        """Whether a part of a function asks Python for the error that is handled."""
        names = [x for x in ast.walk(part) if isinstance(x, ast.Name | ast.Attribute)]
        return any(
            (x.id if isinstance(x, ast.Name) else x.attr) in _ERROR_ASKED_FOR or self.value_of(x) is sys.exception
            for x in names
        )

    def _has_shown(self, context: ast.expr) -> bool:
        """Whether a context manager keeps what is printed or warned of."""
        function = self.value_of(manager_of(context))
        records = isinstance(context, ast.Call) and bool(context.args or context.keywords)
        return function in (redirect_stdout, redirect_stderr) or function is warnings.catch_warnings and records

    def _leaves_unread(self, context: ast.expr) -> bool:
        """Whether a context manager is known to read no error."""
        function = self.value_of(manager_of(context))
        if is_transparent(function) or function in (suppress, warnings.catch_warnings):
            return True
        plain = getattr(function, "__wrapped__", None)
        is_generator = isinstance(plain, FunctionType) and getattr(function, "__code__", None) is CONTEXT_MANAGER
        if not is_generator:
            plain = getattr(function if isinstance(function, type) else type(function), "__exit__", None)
        scope = self._scope_of(plain) if isinstance(plain, FunctionType) else None
        if scope is None or scope._asks_for_error(scope.function):
            return False
        if is_generator:
            return not any(map(scope._overhears, ast.walk(scope.function)))
        arguments = scope.function.args
        named = [x.arg for x in (arguments.posonlyargs + arguments.args)[1:]]
        return all(map(scope.tells, named + ([arguments.vararg.arg] if arguments.vararg else [])))

    def _tells_argument(self, path: Sequence[ast.AST], call: ast.Call, text: ast.AST) -> bool:
        """Whether a function that is written in Python only tells an argument."""
        function = self.value_of(call.func)
        plain = function.__func__ if isinstance(function, MethodType) else function
        scope = self._scope_of(plain, partial(self.is_overheard, path)) if isinstance(plain, FunctionType) else None
        if scope is None or any(isinstance(x, ast.Starred) for x in call.args):
            return False
        arguments = scope.function.args
        positional = [x.arg for x in arguments.posonlyargs + arguments.args][plain is not function :]
        by_name = {*positional, *[x.arg for x in arguments.kwonlyargs]}
        names = dict(zip(map(id, call.args), positional, strict=False))
        names |= {id(x.value): x.arg for x in call.keywords if x.arg in by_name}
        return id(text) in names and scope.tells(names[id(text)])

    def _scope_of(self, function: FunctionType, caller: Callable[[bool], bool] | None = None) -> _FunctionScope | None:
        """A function that no frame runs; None where it has no source."""
        source = source_of(function.__code__)
        if source is None:
            return None
        of_others = {x: None for x in function.__code__.co_freevars}
        names = _names(source, {**function.__globals__, **of_others}, _modules_of(source))
        return _FunctionScope(source, names, caller=caller, visited=self.visited)

    def value_of(self, expression: ast.expr) -> Any:
        """What a name, or an attribute of one, stands for; None where only a run would tell."""
        return value_of(expression, self.names)


@dataclass
class _FunctionScope(_Scope):
    """A function with a name."""

    function: ast.FunctionDef


def _scope_of(frame: FrameType, path: Sequence[ast.AST]) -> _Scope:
    """The function that a frame runs."""
    return _Scope(path[0], _names(path[0], frame.f_globals, frame.f_locals), frame)


def _is_overheard_around(frame: FrameType | None, raised: bool) -> bool:
    """Whether the model reads an error that a frame's instruction raises, or has what is shown there."""
    for outer in frames_of_model(frame):
        path = path_of(outer)
        if path is None:
            return True
        scope = _scope_of(outer, path)
        if any(scope._overhears(x, raised) for x in catching(path)):
            return True
    return False


def _names(function: ast.AST, outside: Mapping[str, Any], inside: Mapping[str, Any]) -> dict[str, Any]:
    """What names in a function stand for: those that it binds never, or once.

    Args:
        outside, inside: by name what it is outside of the function, and in it.
    """
    times = Counter(_bound_in(function))
    names = {**vars(builtins), **outside}
    return {n: x for n, x in names.items() if not times[n]} | {n: x for n, x in inside.items() if times[n] <= 1}


def _bound_in(function: ast.AST) -> Iterator[str]:
    """The names that a function binds, with those that functions in it bind."""
    for node in ast.walk(function):
        match node:
            case ast.Name(ctx=ast.Store() | ast.Del()):
                yield node.id
            case ast.arg():
                yield node.arg
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node is not function:
                yield node.name
            case ast.alias():
                yield (node.asname or node.name).partition(".")[0]
            case ast.ExceptHandler(name=str()):
                yield str(node.name)
            case ast.Global() | ast.Nonlocal():
                yield from (*node.names, *node.names)  # others may bind them, too


def _is_part(outer: ast.AST, text: ast.AST) -> bool:
    """Whether a text becomes a part of what is around it, or is what a lambda gives."""
    match outer:
        case ast.BinOp():
            return isinstance(outer.op, ast.Add | ast.Mod)
        case ast.IfExp():
            return text is not outer.test
        case ast.Attribute():
            return outer.attr in _OF_STRINGS
        case ast.ListComp() | ast.GeneratorExp():
            return text is outer.elt
    return isinstance(outer, ast.JoinedStr | ast.FormattedValue | ast.Tuple | ast.List | ast.Starred | ast.Lambda)


def _modules_of(function: ast.FunctionDef) -> dict[str, Any]:
    """The modules that a function imports."""
    names = [name for x in ast.walk(function) if isinstance(x, ast.Import) for name in x.names]
    return {x.asname or x.name: sys.modules.get(x.name) for x in names if x.asname or "." not in x.name}
