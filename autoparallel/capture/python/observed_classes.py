"""Classes derived from those of a traced copy's objects, whose attribute access an observer is told of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType, MethodType
from typing import Any, Protocol

import torch
from torch import nn

from autoparallel import _torch
from autoparallel.capture.python.classes_asked import COMPARISONS, is_attribute_asked, use_behind
from autoparallel.graph.python_state import LIBRARIES, is_generated, is_library, is_tracers_file, is_users


class Observer(Protocol):
    """What is told of access to objects, by their ``__dict__``; ``write`` also of what is deleted.

    ``read_all`` is told of code that asks for the ``__dict__`` itself, and gives it what the user's object has;
    ``read_class`` is told of what is read of a class, and ``read_all_of_class`` of code that is given one;
    ``is_attribute`` tells which buffers of a copy are plain attributes of the user's.
    """

    def read(self, table: dict[str, Any], name: str) -> None: ...
    def read_all(self, table: dict[str, Any]) -> Mapping[str, Any]: ...
    def read_class(self, cls: type, name: str) -> None: ...
    def read_all_of_class(self, cls: type) -> None: ...
    def write(self, table: dict[str, Any], name: str) -> None: ...
    def is_attribute(self, table: dict[str, Any], name: str) -> bool: ...


_OBSERVERS: dict[int, Observer] = {}
"""By the id of an object's ``__dict__``: it is the same for the proxies that ``torch.export`` puts around modules."""

_OF_CLASSES: dict[type, Observer] = {}
"""By the class of ours that an object has got."""

_CLASSES: dict[type, type] = {}
_METACLASSES: dict[type, type] = {}
_BODIES: dict[type, frozenset[str]] = {}
"""What a class of ours had when it was made."""


def observe(subject: Any, observer: Observer) -> None:
    """Tells an observer of every access to an object's attributes from now on.

    Raises:
        TypeError: for an object whose class cannot be another, or wants to know of those derived from it.
    """
    object.__setattr__(subject, "__class__", _observed_class(type(subject)))  # also of a frozen dataclass
    _OBSERVERS[id(object.__getattribute__(subject, "__dict__"))] = _OF_CLASSES[type(subject)] = observer


def release(subject: Any) -> None:
    """Tells nobody of an object any more, and forgets what has been set on its class."""
    _OBSERVERS.pop(id(vars(subject)), None)
    _OF_CLASSES.pop(type(subject), None)
    for name in written_to(type(subject)):
        delattr(type(subject), name)


def is_observed(subject: Any) -> bool:
    """Whether an object is one of a copy, of whose access somebody is told, or a proxy that torch has put around it."""
    return _class_of_ours(type(subject)) is not None


def class_told(value: Any, cls: type, frame: FrameType) -> type:
    """The class of an object as code is told that asks for it: that of the user's object.

    Where the code goes on to an attribute of it, it is the one of ours, which tells an observer. Of what becomes of it
    otherwise nobody is told, so that all which it has counts as read, unless it is compared at once.

    Args:
        value: of a copy, or any other.
        cls: its class.
        frame: at the instruction that asks.
    """
    if issubclass(cls, _torch.export.TRACED):
        return nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
    ours = _class_of_ours(cls)
    if ours is None:
        return cls
    use = use_behind(frame)
    if use and use[:2] != "__" and use not in COMPARISONS:
        return cls
    return ours.__mro__[1] if use else _class_given(ours)


def asks_for_class(frame: FrameType) -> bool:
    """Whether a frame of a model's, or of a method that ``dataclasses`` has made for it, is at ``x.__class__``."""
    filename = frame.f_code.co_filename
    return (is_generated(filename) or not is_library(filename)) and is_attribute_asked(frame, "__class__")


def attributes_among_buffers(table: dict[str, Any]) -> list[str]:
    """The buffers of an object of a copy that are plain attributes of the user's, by its ``__dict__``."""
    observer = _OBSERVERS.get(id(table))
    if observer is None:
        return []
    return [name for name in table.get("_buffers") or () if observer.is_attribute(table, name)]


def written_to(cls: type) -> list[str]:
    """What has been set on a class of ours since it was made, but for what Python keeps there; nothing for another."""
    return [name for name in vars(cls) if name not in _BODIES[cls] and name[:2] != "__"] if cls in _BODIES else []


def _observed_class(cls: type) -> type:
    """A class derived from another, whose attribute access is told of.

    Raises:
        TypeError: for a class that wants to know of those derived from it, which may register them.
    """
    asks = [c for c in cls.__mro__[:-1] if "__init_subclass__" in vars(c)]
    if any(c.__module__.partition(".")[0] not in (*LIBRARIES, "transformers") for c in asks):
        raise TypeError(f"{cls.__name__} has an __init_subclass__")
    if cls not in _CLASSES:
        methods: Any = cls
        get, put, remove = methods.__getattribute__, methods.__setattr__, methods.__delattr__

        def __getattribute__(self: Any, name: str) -> Any:
            if name == "__class__":
                frame = sys._getframe(1)
                if asks_for_class(frame):
                    return class_told(self, type(self), frame)
            if name[:2] == "__" and name != "__dict__":
                return get(self, name)
            table = get(self, "__dict__")
            observer = _OBSERVERS.get(id(table))
            if observer is not None and name != "__dict__":
                observer.read(table, name)
            elif observer is not None and _asks_for_model(self, sys._getframe(1).f_code.co_filename):
                return observer.read_all(table)
            return _of_users_class(get(self, name))

        def __setattr__(self: Any, name: str, value: Any) -> None:
            table = vars(self)
            observer = _OBSERVERS.get(id(table))
            if observer is not None:
                observer.write(table, name)
                if name in table.get("_buffers", ()) and observer.is_attribute(table, name):
                    table["_buffers"][name] = value  # which may be no tensor
                    return
            put(self, name, value)

        def __delattr__(self: Any, name: str) -> None:
            observer = _OBSERVERS.get(id(vars(self)))
            if observer is not None:
                observer.write(vars(self), name)
            remove(self, name)

        def __reduce_ex__(self: Any, protocol: int) -> Any:
            observer = _OBSERVERS.get(id(get(self, "__dict__")))
            if observer is not None and _asks_for_model(self, sys._getframe(1).f_code.co_filename):
                observer.read_all(vars(self))  # of which ``copy`` asks in C
            return methods.__reduce_ex__(self, protocol)

        body = {
            "__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__,
            "__getattribute__": __getattribute__, "__setattr__": __setattr__, "__delattr__": __delattr__,
            "__reduce_ex__": __reduce_ex__,
        }  # fmt: skip
        metaclass = _observed_metaclass(type(cls))
        arguments = cls.__name__, (cls,), body
        # A metaclass of the user's may register what it makes.
        observed = type.__new__(metaclass, *arguments) if is_users(type(cls)) else metaclass(*arguments)
        _CLASSES[cls], _BODIES[observed] = observed, frozenset(vars(observed))
    return _CLASSES[cls]


def _of_users_class(value: Any) -> Any:
    """What is read of an object or a class: a method of a class of ours as one of the user's, which it may compare."""
    if type(value) is MethodType and isinstance(value.__self__, type):
        ours = _class_of_ours(value.__self__)
        return value if ours is None else MethodType(value.__func__, _class_given(ours))
    return value


def _class_of_ours(cls: type) -> type | None:
    """The class of ours that a class is, or that torch has derived it from."""
    return next((c for c in cls.__mro__ if c in _BODIES), None)


def _class_given(ours: type) -> type:
    """The user's class that one of ours is derived from, all of which code may read that is given it."""
    if ours in _OF_CLASSES:
        _OF_CLASSES[ours].read_all_of_class(ours)
    return ours.__mro__[1]


def _asks_for_model(subject: Any, filename: str) -> bool:
    """Whether code in a file asks for a ``__dict__`` as a model's does, also by Python's own: ``"a" in namespace``,
    ``copy.copy(config)``."""
    return not is_library(filename) or not isinstance(subject, nn.Module) and not is_tracers_file(filename)


def _observed_metaclass(metaclass: type) -> Any:
    """A class of classes derived from another, whose classes tell of what is read of them: ``type(self).name``."""
    if metaclass not in _METACLASSES:
        get: Any = metaclass.__getattribute__

        def __getattribute__(cls: Any, name: str) -> Any:
            observer = _OF_CLASSES.get(cls)
            if observer is not None and name[:2] != "__":
                observer.read_class(cls, name)
            return _of_users_class(get(cls, name))

        body = {"__module__": metaclass.__module__, "__getattribute__": __getattribute__}
        _METACLASSES[metaclass] = type(metaclass)(metaclass.__name__, (metaclass,), body)
    return _METACLASSES[metaclass]
