"""``isinstance(x.shape[0], int)``, ``type(scale) is float``: what a model is told of sizes and numbers that a trace
leaves open, which are of torch's own types."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from autoparallel import _torch
from autoparallel._torch.numbers import KINDS
from autoparallel.capture.python.observed_classes import class_told
from autoparallel.capture.tracing.trace import listening
from autoparallel.graph.arrays import Array
from autoparallel.graph.python_state import is_installed, is_library

_STAND_FOR: dict[type, type] = {**KINDS, Array: np.ndarray}


def _is_instance(value: Any, kinds: Any, /) -> bool:
    """As ``isinstance``."""
    kind = _STAND_FOR.get(type(value))
    return isinstance(value, kinds) or kind is not None and issubclass(kind, kinds)


class _Asking(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        value = type(*args, **kwargs)
        if value is type:  # type(nn.Module) is type
            return cls
        if len(args) > 1:  # it makes a class
            return value
        return class_told(args[0], _STAND_FOR.get(value, value), sys._getframe(1))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


class _Type(type, metaclass=_Asking):
    """As ``type``."""


class _Converting(type):
    """Of a class that converts numbers: it converts those that a trace leaves open, too, which Python's would fix."""

    def __call__(cls, *args: Any) -> Any:
        base = cls.__mro__[1]
        if len(args) != 1:
            return base(*args)
        value = args[0]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = _value_of(value, base)
        return _convert(value, base) if isinstance(value, torch.SymInt | torch.SymFloat) else base(value)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__mro__[1]

    def __hash__(cls) -> int:
        return hash(cls.__mro__[1])

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])


class _Float(float, metaclass=_Converting):
    """As ``float``."""


class _Int(int, metaclass=_Converting):
    """As ``int``."""


_CONVERTERS: Mapping[str, type] = {"float": _Float, "int": _Int}


def _convert(value: Any, kind: type) -> Any:
    """An open number as one of another kind.  A whole number of a float is fixed where the trace fixes such numbers,
    and read where values tell which it is."""
    trace = listening()
    if trace is not None and kind is int and isinstance(value, torch.SymFloat):
        if _torch.export.is_read(value, trace.numbers):
            return int(value)
        trace.has_open_whole = not trace.fixes_whole
        if trace.fixes_whole:
            return int(value)
    return torch.sym_int(value) if kind is int else torch.sym_float(value)


def _value_of(tensor: torch.Tensor, kind: type) -> Any:
    """The value of a tensor of one element, which may be open; a tensor of floats is no whole number, as one may be
    NaN, of which Python makes none."""
    if tensor.is_complex() or tensor.is_floating_point() and kind is int:
        return tensor
    return (tensor if tensor.is_floating_point() else tensor.to(torch.int64)).item()


def _divmod(x: Any, y: Any, /) -> Any:
    """As ``divmod``, which torch's types have not."""
    return (x // y, x % y) if {type(x), type(y)} & KINDS.keys() else divmod(x, y)


def _len(value: Any, /) -> Any:
    """As ``len``, which must return an ``int``: of a tensor the size of its first dim, which may be open."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else len(value)


STAND_INS: Mapping[str, Any] = {"isinstance": _is_instance, "type": _Type, "divmod": _divmod, "len": _len}
"""What stands for functions of Python in modules of the user's while models are traced."""


def names_in_modules(functions: Sequence[tuple[Any, Any]]) -> Iterator[tuple[ModuleType, str, Any]]:
    """The names by which functions of the users' modules call what has a stand-in, with that; a module may have such a
    name of its own.

    Args:
        functions: those of libraries that modules may have imported, under any name, with what stands for them.
    """
    by_id = {id(function): stand_in for function, stand_in in functions}
    for name, module in [*sys.modules.items()]:
        table = vars(module) if isinstance(module, ModuleType) else {}
        file = table.get("__file__")
        if name == "__main__" or file is not None and not is_library(file):
            stand_ins = dict(STAND_INS) | {kind: _CONVERTERS[kind] for kind in _kinds_called(file)}
            yield from [(module, key, stand_ins[key]) for key in stand_ins.keys() - table.keys()]
            yield from [(module, key, by_id[id(value)]) for key, value in table.items() if id(value) in by_id]


@functools.cache
def _kinds_called(file: str | None) -> frozenset[str]:
    """Which of ``int`` and ``float`` functions of a user's module call, and name otherwise only where types are told
    apart: as a dtype, or in a table, it must be Python's own."""
    if file is None or is_installed(file):
        return frozenset()
    try:
        source = ast.parse(Path(file).read_text())
    except (OSError, ValueError, SyntaxError):
        return frozenset()
    functions = [x for x in ast.walk(source) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    inside = {id(x): x for function in functions for x in ast.walk(function)}
    told: set[int] = set()
    called: set[str] = set()
    for node in inside.values():
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                told.update(map(id, ast.walk(kinds)))
            case ast.Call(func=ast.Name(id="map"), args=[ast.Name() as kind, *_]) | ast.Call(func=ast.Name() as kind):
                told.add(id(kind))
                called.add(kind.id)
            case ast.Compare(ops=[ast.In() | ast.NotIn() | ast.Eq() | ast.NotEq()], comparators=[kinds]):
                told.update(map(id, ast.walk(kinds)))
            case ast.arg(annotation=ast.expr() as kind) | ast.AnnAssign(annotation=kind):
                told.update(map(id, ast.walk(kind)))
            case ast.FunctionDef(returns=ast.expr() as kind) | ast.AsyncFunctionDef(returns=ast.expr() as kind):
                told.update(map(id, ast.walk(kind)))
    named = {x.id for x in inside.values() if isinstance(x, ast.Name) and id(x) not in told}
    return frozenset(called & _CONVERTERS.keys() - named)
