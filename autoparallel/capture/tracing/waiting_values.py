"""What waits in a function beside its variables: values in the middle of an expression, and what a loop goes over.

No function can see them.  But where they were made of variables and attributes that are still what they were then, it
says all of them what those hold.  Of a loop, the turn must be told by what its variables hold, too: no two of its turns
have the same.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterator
from inspect import getattr_static
from itertools import pairwise
from types import BuiltinFunctionType, FrameType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

from torch import Tensor, nn

from autoparallel.capture.tracing.errors import is_transparent, manager_of

_TELLING = ("range", "enumerate", "zip", "len")
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Waiting:
    """What waits in a frame.

    Args:
        frame: which calls another, or asks.
        written: the names of attributes that the call has set until then.
    """

    def __init__(self, frame: FrameType, written: Collection[str]) -> None:
        self._names = {**vars(builtins), **frame.f_globals, **frame.f_locals}
        self._shared = {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
        self._written = written

    def names_along(self, path: list[ast.AST]) -> frozenset[str] | None:
        """The variables of which all is made that waits along a path of the source; None where that is not known."""
        names: set[str] = set()
        if not isinstance(path[-1], ast.expr | ast.If | ast.Assert) or isinstance(path[-1], _REPEATED):
            return None
        for outer, inner in pairwise(path):
            held = self._held_by(outer, inner)
            targets = [outer.target] if isinstance(outer, ast.For) and inner in outer.body else []
            bound = {*_names_in(_meanwhile(outer), binds=True)} if held else set()
            if held is None or not all(self._lasts(x, bound) for x in held):
                return None
            if not all(_is_of_names(x) and bound.union(self._shared).isdisjoint(_names_in([x])) for x in targets):
                return None
            names.update(_names_in([*held, *targets]))
        return frozenset(names)

    def value_of(self, expression: ast.expr) -> Any:
        """What a name, an attribute, or a module in a container of modules is; None where only a run would tell."""
        if isinstance(expression, ast.Constant):
            return expression.value
        if isinstance(expression, ast.Name):
            return self._names.get(expression.id)
        if isinstance(expression, ast.Attribute):
            return _attribute_of(self.value_of(expression.value), expression.attr)
        if isinstance(expression, ast.Subscript) and _is_container(held := self.value_of(expression.value)):
            key = self.value_of(expression.slice)
            return held._modules.get(str(key + len(held) if isinstance(key, int) and key < 0 else key))
        return None

    def _held_by(self, outer: ast.AST, inner: ast.AST) -> list[ast.expr] | None:
        """What a statement or an expression holds while one of its parts is at work; None where nobody can tell."""
        if isinstance(outer, ast.For) and inner in outer.body:
            return [outer.iter] if self._tells_turns(outer.iter) else None
        if isinstance(outer, ast.With) and inner in outer.body:
            return self._held_by_managers([item.context_expr for item in outer.items])
        if isinstance(outer, ast.Match):
            bodies = [outer.subject, *(x for case in outer.cases for x in case.body)]
            return [] if inner in bodies else None
        if isinstance(outer, ast.AugAssign):
            return [outer.target] if inner is outer.value else None
        if isinstance(outer, ast.expr):
            return _held_before(outer, inner)
        return [] if any(inner is x for x in _at_work(outer)) else None

    def _held_by_managers(self, contexts: list[ast.expr]) -> list[ast.expr] | None:
        """What torch's own context managers are made with; None for others."""
        if not all(is_transparent(self.value_of(manager_of(x))) for x in contexts):
            return None
        return [x for context in contexts if isinstance(context, ast.Call) for x in arguments_of(context)]

    def _tells_turns(self, iterable: ast.expr) -> bool | None:
        """Whether what a loop goes over is another in each turn; None where it is not known."""
        function = self._teller(iterable)
        if isinstance(iterable, ast.Call):
            if function in ("range", "items", "keys"):
                return True
            sources = [self._tells_turns(x) for x in iterable.args[: 1 if function == "enumerate" else None]]
            if None in sources or function not in ("enumerate", "zip"):
                return None
            return function == "enumerate" or any(sources)
        if isinstance(iterable, ast.List | ast.Tuple):
            return _are_distinct([self.value_of(x) for x in iterable.elts])
        value = self.value_of(iterable)
        if isinstance(value, Tensor):
            return value.dim() > 0 and str(value.stride(0)) != "0"
        if type(value) in (dict, range) or isinstance(value, nn.ModuleDict) and _is_container(value):
            return True
        return _are_distinct([*value]) if type(value) in (list, tuple) or _is_container(value) else None

    def _teller(self, call: ast.expr) -> str:
        """The name of the function that is called where it only tells of what it is given; empty for others."""
        if not isinstance(call, ast.Call):
            return ""
        function, owner = call.func, None
        if isinstance(function, ast.Attribute):
            owner = self.value_of(function.value)
            is_table = isinstance(owner, nn.ModuleDict) and _is_container(owner)
            return function.attr * (is_table and function.attr in ("items", "keys"))
        name, value = getattr(function, "id", ""), self.value_of(function)
        stands_in = getattr(value, "__module__", "") == f"{__package__}.kinds_of_numbers"  # for that of Python
        name *= name in _TELLING and (stands_in or value is getattr(builtins, name))
        held = self.value_of(call.args[0]) if name == "len" and call.args else None
        return name * (name != "len" or isinstance(held, Tensor) or _is_container(held))

    def _lasts(self, expression: ast.AST, bound: Collection[str]) -> bool:
        """Whether an expression is still what it was: made of variables that nobody has bound since then, of what
        modules hold that nobody has set, and by functions that only tell of them.

        Args:
            bound: the variables that are bound meanwhile.
        """
        if isinstance(expression, ast.Constant):
            return True
        if isinstance(expression, ast.Name):
            is_shared = expression.id in self._shared and not isinstance(self._names.get(expression.id), nn.Module)
            return expression.id not in bound and not is_shared
        if isinstance(expression, ast.Attribute):
            owner = self.value_of(expression.value)
            is_held = isinstance(owner, nn.Module | ModuleType) or callable(getattr(type(owner), expression.attr, None))
            return is_held and expression.attr not in self._written and self._lasts(expression.value, bound)
        if isinstance(expression, ast.Call):
            owner = [expression.func.value] if isinstance(expression.func, ast.Attribute) else []
            parts = [*owner, *arguments_of(expression)]
            return bool(self._teller(expression)) and all(self._lasts(x, bound) for x in parts)
        if isinstance(expression, ast.Subscript) and self.value_of(expression) is None:
            sizes = expression.value
            if not isinstance(sizes, ast.Attribute) or sizes.attr != "shape":
                return False
            parts = [sizes.value, expression.slice]
            return isinstance(self.value_of(sizes.value), Tensor) and all(self._lasts(x, bound) for x in parts)
        kinds = ast.UnaryOp | ast.BinOp | ast.List | ast.Tuple | ast.Subscript
        parts = [x for x in ast.iter_child_nodes(expression) if isinstance(x, ast.expr)]
        return isinstance(expression, kinds) and all(self._lasts(x, bound) for x in parts)


def _attribute_of(owner: Any, name: str) -> Any:
    """An attribute, of which no function of the user's is asked; None where one would be."""
    if isinstance(owner, nn.Module):
        tables = (vars(owner), owner._parameters, owner._buffers, owner._modules)
        if table := next((x for x in tables if name in x), None):
            return table[name]
    value = getattr_static(owner, name, None)
    return None if hasattr(value, "__get__") and not isinstance(value, _CALLED) else value


_CALLED = FunctionType | BuiltinFunctionType | MethodDescriptorType | type


def _is_container(value: Any) -> bool:
    """Whether a value is one of torch's containers of modules, which goes over what it has as these do."""
    names = ("__iter__", "__getitem__", "__len__")
    return any(
        isinstance(value, kind) and all(getattr(type(value), name) is getattr(kind, name) for name in names)
        for kind in _CONTAINERS
    )


def arguments_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(x.value for x in call.keywords)]


def _at_work(statement: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement for which nothing waits."""
    if isinstance(statement, ast.FunctionDef | ast.If | ast.Try | ast.While):
        yield from statement.body
    if isinstance(statement, ast.If | ast.Try | ast.For | ast.While):
        yield from statement.orelse
    if isinstance(statement, ast.If | ast.Assert):
        yield statement.test
    if isinstance(statement, ast.Expr | ast.Return | ast.Assign | ast.AnnAssign) and statement.value is not None:
        yield statement.value


def _held_before(outer: ast.expr, inner: ast.AST) -> list[ast.expr] | None:
    """The parts of an expression of which the values wait for one of its parts; None where nobody can tell."""
    if isinstance(outer, ast.Lambda):
        return [] if inner is outer.body else None
    if isinstance(outer, _ONE_BY_ONE):
        return []
    parts = [x for x in ast.iter_child_nodes(outer) if isinstance(x, ast.expr)]
    if isinstance(outer, ast.Call):
        parts = [outer.func, *arguments_of(outer)]
    is_in_order = isinstance(outer, ast.BinOp | ast.Compare | ast.Call | ast.Tuple | ast.List | ast.Subscript)
    return parts[: parts.index(inner)] if is_in_order and inner in parts else None


_REPEATED = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_ONE_BY_ONE = ast.BoolOp | ast.UnaryOp | ast.Attribute | ast.NamedExpr | ast.IfExp
"""Of their parts, none waits for another: an answer is gone when it is told."""


def _meanwhile(outer: ast.AST) -> list[ast.AST]:
    """What runs while something waits for a part of a statement or an expression."""
    if isinstance(outer, ast.For | ast.With):
        return [*outer.body]
    return [outer.value] if isinstance(outer, ast.AugAssign) else [outer]


def _is_of_names(target: ast.expr) -> bool:
    kinds = ast.Name | ast.Tuple | ast.List | ast.Starred | ast.expr_context
    return all(isinstance(x, kinds) for x in ast.walk(target))


def _names_in(nodes: Collection[ast.AST], binds: bool = False) -> Iterator[str]:
    """The variables of which the source speaks; those alone that it binds."""
    names = (x for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name))
    return (x.id for x in names if not (binds and isinstance(x.ctx, ast.Load)))


def _are_distinct(values: list[Any]) -> bool:
    """Whether values differ in what two traces can compare: which modules they are, or which numbers and names."""
    kinds = nn.Module | int | float | str
    keys = {id(x) if isinstance(x, nn.Module) else x for x in values if isinstance(x, kinds)}
    return len(keys) == len(values)
