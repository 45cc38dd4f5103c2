"""Finds the globals, closure cells and library generators that Python functions read while a model runs.

A profile hook learns which functions run; their byte code says which globals and cells they load.  What a function
loads is snapshotted before its first line runs, and compared when the run has ended.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import types
from collections.abc import Hashable, Mapping, Sequence, Set
from contextvars import ContextVar
from functools import partial
from inspect import unwrap
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.utils import stateless

from autoparallel import _torch
from autoparallel.capture.python.changes import StateChangedError
from autoparallel.capture.python.closures import held_by
from autoparallel.capture.python.containers import is_container, may_change
from autoparallel.capture.python.draws import Draws, drawing_threads
from autoparallel.capture.python.loads import Loads, loads_of
from autoparallel.capture.python.modules_apart import (
    attributes_of,
    is_of_tracing,
    modules_apart,
    set_attributes,
)
from autoparallel.capture.python.observed_classes import is_observed
from autoparallel.capture.python.places_read import PlacesRead, find_alone, may_be_state
from autoparallel.capture.python.profilers import Suspended, Watcher, resume
from autoparallel.capture.python.roots import Finder, attribute_of, find_nothing, holds_settings
from autoparallel.capture.python.running_functions import Closures, functions_before
from autoparallel.graph.errors import CaptureError, refused_draw
from autoparallel.graph.garbage import collected_rarely, count_as_old
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import (
    LIBRARIES,
    MISSING,
    OPAQUE,
    OURS,
    is_data,
    is_generated,
    is_installed,
    is_library,
    is_plain,
    is_users_file,
    slots_of,
)
from autoparallel.graph.surroundings import surroundings_of
from autoparallel.graph.variables import Attribute, Cell, Default, Global, Variable, arguments_of, cells_of

_CALL, _INIT = torch.nn.Module._call_impl.__code__, torch.nn.Module.__init__.__code__
_FUNCTIONAL_CALLS = tuple(unwrap(f).__code__ for f in (torch.func.functional_call, stateless.functional_call))
_LOG = logging.Logger._log.__code__
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_COLLECTIONS = (list, tuple, set, frozenset)
_OF_TENSORS = frozenset(map(id, (torch.Tensor, torch.nn.Parameter)))


def _key_id(key: Any) -> int:
    """The id of what a table is asked for, which may be the key itself."""
    return key if type(key) is int else id(key)


class GlobalsRead(Watcher):
    """A context that records which globals and cells the functions running in it load, and who draws from Python's and
    numpy's generators.

    Args:
        owners: objects whose methods run, but which are no part of the model, as the trainer of a bound loss function,
            with what finds the variables that have them.
        packages: the installed packages that the model's classes come from; what others hold is no state of its.
        model: the user's.
        attached: the functions that have been attached to it, whose closures are looked into whoever wrote them.

    Attributes:
        draws: those of the last run.
        shown: what functions of the user's print and log, by the line.
        names: of the variables read that are looked after (see ``graph.surroundings``): a copy has other values there.
    """

    def __init__(
        self,
        owners: list[tuple[Any, Finder]],
        packages: frozenset[str],
        model: torch.nn.Module,
        attached: Sequence[types.FunctionType],
    ) -> None:
        self._packages, self._surroundings = packages, surroundings_of(model)
        self.places = PlacesRead(self._surroundings, attached)
        self.names: set[str] = set()
        self._members = {id(x) for x in (*model.modules(), *_torch.tensors.parameters_of(model), *model.buffers())}
        self._classes = _OF_TENSORS | {*map(id, map(type, model.modules()))}
        self._codes: dict[int, tuple[types.CodeType, Loads | None]] = {}
        self._owners: dict[int, tuple[Any, Finder]] = {id(owner): (owner, find) for owner, find in owners}
        arguments = [x for function in held_by(model, partial) for x in arguments_of(function)]
        self._arguments = [(x.read(), x) for x in arguments if may_change(x.read())]
        self._closures, self._held = Closures(), set[Hashable]()
        self._new_modules: set[int] = set()
        self.draws = Draws()  # also of a run that does not begin
        self.shown: dict[str, str] = {}

    def __enter__(self) -> GlobalsRead:
        self.draws = Draws()
        self._before = sys.getprofile()
        self._uncollected = collected_rarely(0)  # nothing that a garbage collection calls runs for the model
        self._uncollected.__enter__()
        count_as_old()  # so that what is young is little (see Closures)
        self._suspended = Suspended()
        self._suspended.__enter__()
        sys.setprofile(self._hook)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        sys.setprofile(None)
        self._uncollected.__exit__(None, None, None)
        resume(self._before)
        self.places.forget_cached()
        self._suspended.__exit__(None, None, None)
        drawn = self.draws.generators()
        self.draws.put_back()
        changed = self.places.put_back()
        if kind is None or issubclass(kind, Exception) and not issubclass(kind, CaptureError):
            if drawn:
                threads = drawing_threads()
                raise StateChangedError(
                    lambda line: refused_draw(" and ".join(drawn), line, threads),
                    lambda _, reads: bool(reads.draws.generators()),
                )
            self.places.require_unchanged(changed)

    # -- while functions run ----------------------------------------------------------------------------------------

    def _hook(self, frame: types.FrameType, event: str, function: Any) -> None:
        if event != "call":
            if event in ("c_call", "c_return") and issubclass(type(getattr(function, "__self__", None)), random.Random):
                self.draws.pass_over(frame, event == "c_call")
            elif event == "c_call" and function is print:
                self._note_shown(frame, "print()")
            return
        code = frame.f_code
        if code is _LOG:
            self._note_shown(frame.f_back, "logging")
        if code is _CALL:
            module = frame.f_locals["self"]
            self._note_module(module, type(module).__name__, frame)
        elif code in _FUNCTIONAL_CALLS:  # before the module has what it is called with
            module = frame.f_locals["module"]
            self._note_module(module, type(module).__name__, _caller_of(frame))
        elif code is _INIT:
            self._new_modules.add(id(frame.f_locals["self"]))
        entry = self._codes.get(id(code))
        if entry is None:
            loads = loads_of(code) if self._looks_into(code, frame.f_globals) else None
            self._codes[id(code)] = code, loads
            if loads is not None:
                self._note_globals(frame, loads)
                self._note_comparisons(frame, loads)
                self._note_imports(frame, loads.imports)
                self._note_defaults(frame)
        else:
            loads = entry[1]
        if loads is None:
            return
        if loads.cells:
            self._note_cells(frame, loads)
        if loads.bases:
            self._note_bases(frame, loads.bases)
        if loads.first:
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            self._note_module(owner, type(owner).__name__, frame)
            if id(owner) in self._owners or isinstance(owner, type) and not is_installed(code.co_filename):
                label = owner.__name__ if isinstance(owner, type) else type(owner).__name__
                _, find = self._owners.get(id(owner), (None, find_nothing))
                for chain in loads.first:
                    self._add_chain(label, owner, chain, frame, find)

    def _note_shown(self, frame: types.FrameType | None, what: str) -> None:
        """Notes that something is shown to the user, unless an installed package does so."""
        while frame is not None and frame.f_code.co_filename == _LOG.co_filename:
            frame = frame.f_back
        if frame is not None and is_users_file(frame.f_code.co_filename):
            self.shown[line_of_frame(frame)] = f"{what}, which shows what there is when the model is traced"

    def _is_seen(self, method: Any) -> bool:
        """Whether it is noted what a method reads."""
        code = getattr(method, "__code__", None)
        return code is not None and self._looks_into(code, method.__globals__)

    def _looks_into(self, code: types.CodeType, table: Mapping[str, Any]) -> bool:
        """Whether a function is the user's or of a package that the model comes from. Others, as what a garbage
        collection calls, have nothing to do with the model."""
        if is_library(code.co_filename):
            return _is_executed(code, table)
        return not is_installed(code.co_filename) or str(table.get("__name__")).partition(".")[0] in self._packages

    def _note_globals(self, frame: types.FrameType, loads: Loads) -> None:
        table, chains = frame.f_globals, loads.globals
        installed = is_installed(frame.f_code.co_filename)
        if ("globals",) in chains and "globals" not in table:  # any of them
            chains |= {(name,) for name, value in table.items() if is_plain(value) and not name.startswith("__")}
        for name, *attributes in sorted(chains):
            value, variable = table.get(name, MISSING), Global(table, name)
            if self._is_looked_after(variable, name in loads.stored) or value is MISSING or _is_stand_in(value):
                continue
            # A package that fills a table where a type is missing finds for ours what it finds for theirs.
            is_told = _is_stand_in(table.get("type"))
            by_types = ("type",) in chains and not is_told and not (installed and name in loads.filled)
            self._require_apart(name, value, frame, self._members | self._classes if by_types else self._members)
            self._note_module(value, name, frame)
            if attributes and not is_plain(value) and not is_container(value):
                find = partial(find_alone, variable)
                if is_data(value) and not installed:
                    self._owners[id(value)] = value, find  # perhaps it is a method, which reads others
                if not installed:
                    self.places.add_link((id(table), name), name, variable.read)
                self._add_chain(name, value, tuple(attributes), frame, find)
            else:
                self.places.add_variable(variable, name, frame)

    def _require_apart(self, name: str, value: Any, frame: types.FrameType, members: Set[int]) -> None:
        """Refuses a table by modules, tensors or types of the model, by their ids, where a function looks into it."""
        if isinstance(value, dict | WeakKeyDictionary) and not members.isdisjoint(map(_key_id, value)):
            self.places.refuse(
                f"the model looks itself up in {name}, a {type(value).__name__} by modules, tensors or types, in "
                f"{line_of_frame(frame)}: what is traced, a copy, is not among them\n"
                "What to change: keep what is there in attributes of the modules; a tool that only looks at a model is "
                "given the plain one (with model.whole() as plain: ...)."
            )

    def _note_comparisons(self, frame: types.FrameType, loads: Loads) -> None:
        """Refuses the comparison of a class with one of the model's modules or of tensors where the code is not told
        that of the user's object, but one derived from it."""
        is_told = _is_stand_in(frame.f_globals.get("type"))
        classes = self._classes if not is_told else _OF_TENSORS if loads.asks_class else frozenset()
        for chain in sorted(loads.compared if classes else ()):
            value = frame.f_globals.get(chain[0], MISSING)
            for name in chain[1:]:
                value = getattr(value, name, MISSING)
            if any(id(x) in classes for x in (value if isinstance(value, _COLLECTIONS) else (value,))):
                self.places.refuse(
                    f"the model compares a type with {'.'.join(chain)} in {line_of_frame(frame)}: what is traced is of "
                    f"types that are derived from such\n"
                    f"What to change: isinstance(x, {'.'.join(chain)})."
                )

    def _note_bases(self, frame: types.FrameType, names: frozenset[str]) -> None:
        """Notes what is read of ``super()``: of the first class behind that of the function which has it."""
        owner, cls = frame.f_locals.get(frame.f_code.co_varnames[0]), frame.f_locals.get("__class__")
        classes = (owner if isinstance(owner, type) else type(owner)).__mro__
        for name in sorted(names) if cls in classes else ():
            base = next((c for c in classes[classes.index(cls) + 1 :] if name in vars(c)), None)
            if base is None or base.__module__.partition(".")[0] in LIBRARIES:
                continue
            label = f"{base.__name__}.{name}"
            if hasattr(vars(base)[name], "__get__"):
                self.places.add_link((id(base), name), label, partial(vars(base).get, name, MISSING))
            else:
                self._add_chain(base.__name__, base, (name,), frame)

    def _note_imports(self, frame: types.FrameType, chains: frozenset[tuple[str, ...]]) -> None:
        for name, *attributes in sorted(chains):
            module = sys.modules.get(name) or sys.modules.get(f"{frame.f_globals.get('__package__')}.{name}")
            if module is not None and attributes:
                self._add_chain(name, module, tuple(attributes), frame)

    def _note_defaults(self, frame: types.FrameType) -> None:
        """Notes the defaults of the function that runs, where one of its arguments may be a default, and arguments that
        a ``functools.partial`` of the model comes with."""
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [x for name in names if may_change(x := frame.f_locals.get(name))]
        if is_installed(code.co_filename) or not values:
            return
        for held, argument in self._arguments:
            if any(x is held for x in values) and not self._is_looked_after(argument):
                self.places.add_variable(argument, f"the argument {argument.name}", frame)
        for function in functions_before(frame, names[0]):
            for name in names:
                default = Default(function, name)
                if may_change(default.read()) and not self._is_looked_after(default):
                    self.places.add_variable(default, f"the default of {name}", frame)

    def _note_cells(self, frame: types.FrameType, loads: Loads) -> None:
        values, is_users = frame.f_locals, self.places.is_users(frame.f_code)
        cells: dict[str, types.CellType] | None = None
        for name, *attributes in sorted(loads.cells):
            value = values.get(name, MISSING)
            looked_after = None if is_plain(value) else self._surroundings.name_holding(value)
            if looked_after and name not in loads.stored:
                self.names.add(looked_after)
            if looked_after or value is MISSING or name not in loads.bound and _is_of_trace(value):
                continue
            if not (is_users or may_be_state(value)):
                continue
            self._require_apart(name, value, frame, self._members)
            self._note_module(value, name, frame)
            is_link = bool(attributes) and not is_plain(value) and not is_container(value)
            if is_link:
                find = partial(cells_of, frame.f_code, name, value)
                if is_data(value):
                    self._owners[id(value)] = value, find
                self._add_chain(name, value, tuple(attributes), frame, find)
            if cells is None:
                held = id(frame.f_code), tuple([id(values.get(n)) for n in frame.f_code.co_freevars])
                if held in self._held:
                    return
                self._held.add(held)
                cells = self._closures.cells_of(frame.f_code, values)
            variable = Cell(cells[name], name) if name in cells else None
            if variable is None or self._is_looked_after(variable, name in loads.stored):
                continue
            if is_link:
                self.places.add_link((id(variable.owner), name), name, variable.read, variable)
            else:
                self.places.add_variable(variable, name, frame)

    def _is_looked_after(self, variable: Variable, is_stored: bool = False) -> bool:
        """Whether a copy of the model has another value of a variable, which it reads unless it only binds it."""
        name = self._surroundings.name_of(variable)
        if name is not None and not is_stored:
            self.names.add(name)
        return name is not None

    def _add_chain(
        self,
        label: str,
        value: Any,
        attributes: tuple[str, ...],
        frame: types.FrameType,
        find: Finder = find_nothing,
    ) -> None:
        """An attribute of a module or of an object that is no part of the model.

        Args:
            find: finds the variables that have the object.
        """
        name = attributes[0]
        if value is os and name in ("environ", "getenv"):
            self.places.add((id(os), "environ"), "os.environ", lambda: dict(os.environ), frame)
            return
        if isinstance(value, ContextVar):
            self.places.add((id(value), "get"), label, partial(value.get, MISSING), frame)
            return
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] in LIBRARIES:
                if not is_installed(frame.f_code.co_filename):
                    self._note_function(label, value, attributes)
                return
        elif isinstance(value, type):
            if value.__module__.partition(".")[0] in LIBRARIES:
                return
        elif not isinstance(value, types.FunctionType | threading.local) and not is_data(value):
            self.places.require_usable(label, value, frame)
            if is_plain(attribute_of(value, name)) and not isinstance(value, (torch.Tensor, OPAQUE)):
                self.places.add((id(value), name), f"{label}.{name}", partial(attribute_of, value, name), frame)
            return
        if isinstance(value, types.ModuleType | type | types.FunctionType):
            attribute = Attribute(value, name)
            if self._is_looked_after(attribute):
                return
            find = partial(find_alone, attribute)
        in_slot = name in slots_of(value)  # where a copy is not given anything
        inside = getattr(value, "__dict__", {}).get(name, getattr(value if in_slot else type(value), name, MISSING))
        method = getattr(type(value), "__getattr__", None) if inside is MISSING else inside
        if holds_settings(value) and (inside is MISSING or hasattr(inside, "__get__")) and not self._is_seen(method):
            if inside is MISSING:
                inside = attribute_of(value, name)
            else:
                self.places.add((id(value), "all"), label, lambda: value, frame, find=find)
        if isinstance(inside, type) and len(attributes) > 1:
            self._add_chain(f"{label}.{name}", inside, attributes[1:], frame)
            return
        self._note_module(inside, f"{label}.{name}", frame)
        if inside is MISSING or isinstance(inside, OPAQUE) or hasattr(inside, "__get__"):
            return
        if not is_plain(inside) and len(attributes) > 1 and not is_container(inside):
            if not isinstance(inside, types.ModuleType):
                self.places.add_link((id(value), name), f"{label}.{name}", partial(getattr, value, name, MISSING))
            self._add_chain(f"{label}.{name}", inside, attributes[1:], frame, find)
            return
        read, write = partial(attribute_of, value, name), partial(setattr, value, name)
        self.places.add((id(value), name), f"{label}.{name}", read, frame, write, find_nothing if in_slot else find)

    def _note_function(self, label: str, library: types.ModuleType, names: tuple[str, ...]) -> None:
        """Notes which function of a library the user's code reads: another may take its place (``F.gelu = mine``)."""
        for name in names:
            inside = vars(library).get(name)
            label = f"{label}.{name}"
            if isinstance(inside, _FUNCTIONS):
                self.places.add_link((id(library), name), label, partial(vars(library).get, name, MISSING))
            if not isinstance(inside, types.ModuleType):
                return
            library = inside

    def _note_module(self, value: Any, label: str, frame: types.FrameType) -> None:
        """Notes what a module has that is no part of the model, as it may be called, and was not made by the call."""
        if not isinstance(value, torch.nn.Module) or is_observed(value) or id(value) in self._new_modules:
            return
        if "_modules" not in vars(value):  # its __init__, or a copy's __setstate__, has only begun
            self._new_modules.add(id(value))
            return
        if (id(value), "all") not in self.places and not is_of_tracing(value):
            for path, module in modules_apart(value, self._members).items():
                read, write = partial(attributes_of, module), partial(set_attributes, module)
                self.places.add((id(module), "all"), f"{label}.{path}" if path else label, read, frame, write)


def _is_executed(code: types.CodeType, table: Mapping[str, Any]) -> bool:
    """Whether a function is of text that the user's own code gives ``exec``, or Python by ``-c``; data classes make
    their methods so, too, and named tuples in no module. Text that has a file name of its own may be in none."""
    name = str(table.get("__name__", ""))
    module = sys.modules.get(name)
    if module is not None:
        is_users = is_users_file(getattr(module, "__file__", None) or "<stdin>")
    else:
        is_users = bool(name) and code.co_filename != "<string>"
    return is_users and is_generated(code.co_filename) and not code.co_qualname.startswith("__create_fn__")


def _is_stand_in(value: Any) -> bool:
    """Whether a global of a user's module is there only while a model is traced (see ``tracing.kinds_of_numbers``)."""
    if isinstance(value, type):
        return value.__module__.startswith("autoparallel.capture.")
    code = getattr(value, "__code__", None)
    return isinstance(code, types.CodeType) and code.co_filename.startswith(OURS)


def _caller_of(frame: types.FrameType) -> types.FrameType:
    """The function of the user's that called one of an installed package, through others of such or not."""
    while frame.f_back is not None and is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_of_trace(value: Any) -> bool:
    """Whether a function that the call makes has a value of the call in a cell."""
    return isinstance(value, torch.SymInt) or isinstance(value, torch.Tensor) and _torch.export.is_fake(value)
