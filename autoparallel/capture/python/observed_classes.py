"""Classes derived from those of a traced copy's objects, whose attribute access an observer is told of."""

from __future__ import annotations

from typing import Any, Protocol

from autoparallel.graph.python_state import LIBRARIES


class Observer(Protocol):
    """What is told of access to objects, by their ``__dict__``; ``write`` also of what is deleted."""

    def read(self, table: dict[str, Any], name: str) -> None: ...
    def write(self, table: dict[str, Any], name: str) -> None: ...


_OBSERVERS: dict[int, Observer] = {}
"""By the id of an object's ``__dict__``: it is the same for the proxies that ``torch.export`` puts around modules."""

_CLASSES: dict[type, type] = {}
_BODIES: dict[type, frozenset[str]] = {}
"""What a class of ours had when it was made."""


def observe(subject: Any, observer: Observer) -> None:
    """Tells an observer of every access to an object's attributes from now on.

    Raises:
        TypeError: for an object whose class cannot be another, or wants to know of those derived from it.
    """
    object.__setattr__(subject, "__class__", _observed_class(type(subject)))  # also of a frozen dataclass
    _OBSERVERS[id(vars(subject))] = observer


def release(subject: Any) -> None:
    """Tells nobody of an object any more, and forgets what has been set on its class."""
    _OBSERVERS.pop(id(vars(subject)), None)
    for name in written_to(type(subject)):
        delattr(type(subject), name)


def written_to(cls: type) -> list[str]:
    """What has been set on a class of ours since it was made; nothing for another."""
    return [name for name in vars(cls) if name not in _BODIES[cls]] if cls in _BODIES else []


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
            if name[:2] == "__":
                return get(self, name)
            table = get(self, "__dict__")
            observer = _OBSERVERS.get(id(table))
            if observer is not None:
                observer.read(table, name)
            return get(self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            observer = _OBSERVERS.get(id(vars(self)))
            if observer is not None:
                observer.write(vars(self), name)
            put(self, name, value)

        def __delattr__(self: Any, name: str) -> None:
            observer = _OBSERVERS.get(id(vars(self)))
            if observer is not None:
                observer.write(vars(self), name)
            remove(self, name)

        body = {
            "__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__,
            "__getattribute__": __getattribute__, "__setattr__": __setattr__, "__delattr__": __delattr__,
        }  # fmt: skip
        observed = type(cls)(cls.__name__, (cls,), body)
        _CLASSES[cls], _BODIES[observed] = observed, frozenset(vars(observed))
    return _CLASSES[cls]
