"""Whether a text that Python makes is a message: only people read it, and nothing follows from it.

The source says so: the text, or what it becomes a part of, is printed, logged or warned of, raised, or given to a
function that does no more with it (a check with its message).  So it is where it is told by a variable's name, or where
a function returns it.  A text that goes any other way may decide about what is computed.
"""

from __future__ import annotations

import ast
import builtins
import logging
import sys
import warnings
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from autoparallel.capture.tracing.sources import parse, path_to, place_in, place_of

OF_OBJECTS = ("__repr__", "__str__", "__format__")
"""Methods that make the text of an object for who asks for it."""

_LIBRARY = logging.__file__.removesuffix("logging/__init__.py")
_SHOWING = tuple([_LIBRARY + name for name in ("logging/", "warnings.py", "pdb.py")])
"""Where Python makes texts that it shows."""

_OF_STRINGS = ("format", "join", "strip", "rstrip", "lstrip", "lower", "upper", "replace", "ljust", "rjust", "center")
"""Methods of strings that give a text of texts."""

_MAKE_TEXT = (str, repr, format, ascii)
_ASK_NOTHING = (callable, isinstance, type)
"""What answers the same of any text."""

_IN_FUNCTIONS = ("<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>")
"""Frames that run a part of a function."""


def is_message(frame: FrameType, made_by: CodeType | None = None) -> bool:
    """Whether the text that a frame makes at its instruction is a message.

    Args:
        made_by: the function that the frame calls there, and which gives the text; None where it is Python's own.
    """
    if frame.f_code.co_filename.startswith(_SHOWING):
        return True
    place, tree = place_in(frame), parse(frame.f_code.co_filename)
    if place is None or tree is None:
        return False
    path = path_to(tree, place)
    scope = _Scope(path[0], _names(frame.f_globals, frame.f_locals), frame)
    expression = path[-1]
    if isinstance(expression, ast.Call):
        if made_by is not None:
            function = scope.value_of(expression.func)
            if getattr(getattr(function, "__func__", function), "__code__", None) is not made_by:
                return False
        elif scope.shows(expression):
            return True
        elif not scope.makes_text(expression):
            return False
    return scope.is_told(path)


def _names(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """What the names in a function stand for."""
    return dict(ChainMap(*[dict(table) for table in reversed(tables)], vars(builtins)))


@dataclass
class _Scope:
    """A function in which a text goes from one expression into another.

    Attributes:
        function: its source.
        names: what its names stand for.
        frame: the one that runs it; None where none does.
        visited: the variables that are looked at.
    """

    function: ast.AST
    names: Mapping[str, Any]
    frame: FrameType | None = None
    visited: set[tuple[ast.AST, str]] = field(default_factory=set)

    def is_told(self, path: Sequence[ast.AST]) -> bool:
        """Whether the last expression of a path gives a text that is only told.

        Args:
            path: the statements and expressions around it within a function, from the outside in.
        """
        for i in range(len(path) - 2, -1, -1):
            outer, text = path[i : i + 2]
            match outer:
                case ast.Expr() | ast.Raise():
                    return True  # of a value that nobody takes
                case ast.Assert():
                    return text is outer.msg
                case ast.Compare():
                    return all(isinstance(operator, ast.Is | ast.IsNot) for operator in outer.ops)
                case ast.Assign():
                    return all(isinstance(x, ast.Name) and self.tells(x.id) for x in outer.targets)
                case ast.AugAssign() | ast.AnnAssign():
                    return isinstance(outer.target, ast.Name) and self.tells(outer.target.id)
                case ast.Return():
                    return self._is_result_told(path[0])
                case ast.Call() if text is not outer.func and (told := self._is_argument_told(outer, text)) is not None:
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

    def _is_argument_told(self, call: ast.Call, text: ast.AST) -> bool | None:
        """Whether a call only tells a text that it is given; None where it gives another that has it in it."""
        if self.makes_text(call):
            return None
        function = self.value_of(call.func)
        return self.shows(call) or any(function is x for x in _ASK_NOTHING) or self._tells_argument(call, text)

    def makes_text(self, call: ast.Call) -> bool:
        """Whether a call gives a text, or an error, that is made of what it is given."""
        function = self.value_of(call.func)
        if any(function is x for x in _MAKE_TEXT) or isinstance(function, type) and issubclass(function, BaseException):
            return True
        if not isinstance(call.func, ast.Attribute):
            return False
        is_string = isinstance(call.func.value, ast.Constant | ast.JoinedStr)
        return call.func.attr in OF_OBJECTS or is_string and call.func.attr in _OF_STRINGS

    def shows(self, call: ast.Call) -> bool:
        """Whether a call prints, logs, warns, or checks something, with a message."""
        function = self.value_of(call.func)
        owner = self.value_of(call.func.value) if isinstance(call.func, ast.Attribute) else None
        module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
        is_check = module == "torch" and name.startswith(("_check", "_assert"))
        is_logged = module == "logging" or isinstance(owner, logging.Logger | logging.LoggerAdapter)
        return is_check or is_logged or function is print or function is warnings.warn

    def _tells_argument(self, call: ast.Call, text: ast.AST) -> bool:
        """Whether a function that is written in Python only tells an argument."""
        function = self.value_of(call.func)
        plain = function.__func__ if isinstance(function, MethodType) else function
        source = _source_of(plain.__code__) if isinstance(plain, FunctionType) else None
        if source is None or any(isinstance(x, ast.Starred) for x in call.args):
            return False
        positional = [x.arg for x in source.args.posonlyargs + source.args.args][plain is not function :]
        by_name = {*positional, *[x.arg for x in source.args.kwonlyargs]}
        names = dict(zip(map(id, call.args), positional, strict=False))
        names |= {id(x.value): x.arg for x in call.keywords if x.arg in by_name}
        if id(text) not in names:
            return False
        return _Scope(source, _names(plain.__globals__, _modules_of(source)), visited=self.visited).tells(
            names[id(text)]
        )

    def value_of(self, expression: ast.expr) -> Any:
        """What a name, or an attribute of one, stands for; None where only a run would tell."""
        if isinstance(expression, ast.Attribute):
            return getattr(self.value_of(expression.value), expression.attr, None)
        return self.names.get(expression.id) if isinstance(expression, ast.Name) else None


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


@cache
def _source_of(code: CodeType) -> ast.FunctionDef | None:
    """The source of a function; None where there is none."""
    tree = parse(code.co_filename)
    functions = (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)) if tree is not None else ()
    lines = (code.co_name, code.co_firstlineno)
    return next((x for x in functions if (x.name, _first_line(x)) == lines), None)


def _first_line(function: ast.FunctionDef) -> int:
    """The line at which Python says that a function begins: that of its first decorator."""
    return min([function.lineno, *[x.lineno for x in function.decorator_list]])


def _modules_of(function: ast.FunctionDef) -> dict[str, Any]:
    """The modules that a function imports."""
    names = [name for x in ast.walk(function) if isinstance(x, ast.Import) for name in x.names]
    return {x.asname or x.name: sys.modules.get(x.name) for x in names if x.asname or "." not in x.name}
