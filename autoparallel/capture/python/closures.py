"""What a model holds that reaches into it: functions with a closure (``self.act = lambda x: self.gain * x``), and weak
references (``self.parent = weakref.ref(parent)``).

``copy.deepcopy`` takes both as they are, so that those of a copy would reach into the model itself.
"""

from __future__ import annotations

import weakref
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from autoparallel import _torch
from autoparallel.capture.python.containers import everything_in
from autoparallel.capture.python.loads import loads_of
from autoparallel.capture.python.watched import TABLES
from autoparallel.graph.python_state import PythonState, is_data
from autoparallel.graph.surroundings import surroundings_of
from autoparallel.graph.variables import Cell, contents_of


class Closures:
    """The functions and weak references of a copy, which reach into the copy where those of the model reach into that.

    Args:
        model: the model.
        memo: that of ``copy.deepcopy``, which takes these functions for those of the model; it has fakes of tensors.
    """

    def __init__(self, model: nn.Module, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._inside = {id(module) for module in model.modules()} | {*memo}
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        self._functions: dict[int, FunctionType | None] = {}
        self._originals: list[FunctionType] = []
        self._registered = {*map(id, (*_torch.tensors.parameters_of(model), *model.buffers()))}
        self._surroundings = surroundings_of(model)
        held = held_by(model, FunctionType, partial)
        for function in [x for x in held if isinstance(x, FunctionType)]:
            self._follow(function)
        for partly in [x for x in held if isinstance(x, partial)]:  # what a run changes of its arguments is noted
            arguments = *partly.args, *partly.keywords.values()
            reaches = any(isinstance(x, torch.Tensor) or self._reaches(x) for x in (partly.func, *arguments))
            inside = everything_in(arguments)
            if not reaches and not any(isinstance(x, nn.Module) or id(x) in self._registered for x in inside):
                memo[id(partly)] = partly

    def fill(self, copied: nn.Module) -> None:
        """Lets them reach into the copy, once it is made."""
        for theirs, ours in self._cells.values():
            ours.cell_contents = self._twin(theirs.cell_contents)
        for function in self._originals:
            twin = self._memo[id(function)]
            twin.__defaults__ = tuple(map(self._twin, function.__defaults__ or ())) or None
            twin.__kwdefaults__ = {name: self._twin(x) for name, x in (function.__kwdefaults__ or {}).items()} or None
            vars(twin).update({name: self._twin(x) for name, x in vars(function).items()})
        objects = [x for key, x in self._memo.items() if key != id(x) and is_data(x)]  # what is shared is the user's
        for holder in (*copied.modules(), *objects):
            for name, value in list(vars(holder).items()):
                if isinstance(value, weakref.ref) and (twin := self._twin(value())) is not value():
                    vars(holder)[name] = self._memo[id(value)] = weakref.ref(twin)
                    self._memo.setdefault(id(self._memo), []).append(value)

    def state(self) -> PythonState:
        """What the functions reach, in the model itself: another may take its place."""
        state = PythonState()
        for theirs, _ in self._cells.values():
            state.watch("what a function of the model reaches", partial(contents_of, theirs), ("cell", id(theirs)))
        return state

    def _twin(self, value: Any) -> Any:
        if isinstance(value, MethodType) and id(value.__self__) in self._inside:
            return MethodType(value.__func__, self._memo.get(id(value.__self__), value.__self__))
        return self._memo.get(id(value), value)

    def _follow(self, function: FunctionType) -> bool:
        """Makes a function of the copy, where it reaches into the model; whether it does."""
        beside = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()
        if not function.__closure__ and not beside:
            return False
        if id(function) in self._functions:
            return self._functions[id(function)] is not None
        self._functions[id(function)] = None
        cells = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = contents_of(cell)
            is_bound = name in loads_of(function.__code__).bound or self._surroundings.name_of(Cell(cell, name))
            if isinstance(value, torch.Tensor) and id(value) not in self._registered and is_bound:
                pass  # what a run binds it to is looked after
            elif id(cell) not in self._cells and self._reaches(value):
                self._cells[id(cell)] = cell, CellType()
            cells.append(self._cells[id(cell)][1] if id(cell) in self._cells else cell)
        reaches = [self._reaches(x) for x in beside]  # all are followed
        if not any(reaches) and all(a is b for a, b in zip(cells, function.__closure__ or (), strict=True)):
            return False
        twin = FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells))
        twin.__qualname__ = function.__qualname__
        self._functions[id(function)] = self._memo[id(function)] = twin
        self._originals.append(function)
        self._memo.setdefault(id(self._memo), []).append(function)
        return True

    def _reaches(self, value: Any) -> bool:
        if isinstance(value, MethodType):
            return id(value.__self__) in self._inside
        return self._follow(value) if isinstance(value, FunctionType) else id(value) in self._inside


def held_by(model: nn.Module, *kinds: type) -> list[Any]:
    """The objects of some types that modules hold, as hooks, too, and in lists, dicts and objects of the user's."""
    attributes = [x for module in model.modules() for name, x in vars(module).items() if name not in TABLES]
    return [value for value in everything_in(attributes) if isinstance(value, kinds)]


def functions_attached(model: nn.Module, loss_fn: Any) -> list[FunctionType]:
    """The functions that hooks, attributes and a loss function are, and those in their closures: whoever attached them
    has what they hold, also where an installed package wrote them."""
    left, functions = [loss_fn, *held_by(model, FunctionType, MethodType)], dict[int, FunctionType]()
    while left:
        for value in everything_in(left.pop()):
            function = getattr(value, "__func__", value) if isinstance(value, MethodType) else value
            if isinstance(function, FunctionType) and id(function) not in functions:
                functions[id(function)] = function
                left += [x for cell in function.__closure__ or () if not isinstance(x := contents_of(cell), nn.Module)]
    return list(functions.values())
