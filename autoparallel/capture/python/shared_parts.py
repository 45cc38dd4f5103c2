"""What a model holds that ``copy.deepcopy`` cannot copy, such as locks, open files, threads and queues.

The copies of a model share it with the model.  What a call did with it would be done when it is traced, and never
again: so a forward may have it, but use only what has no state.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from io import IOBase
from queue import Queue, SimpleQueue
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from autoparallel.capture.python.containers import leaves_of
from autoparallel.capture.python.watched import INTERNAL
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.labels import label_in, label_of_entry
from autoparallel.graph.python_state import is_data

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)
_STATELESS = (ModuleType, MappingProxyType, *_LOCKS)
_ONCE = (IOBase, Queue, SimpleQueue, Executor, threading.Thread)


class SharedParts:
    """The parts of one model that its copies share with it.

    Attributes:
        by_id: the parts, as ``copy.deepcopy`` takes them in its memo.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Any] = {}

    def find(self, roots: Mapping[str, nn.Module], memo: Mapping[int, Any]) -> bool:
        """Looks for parts in the attributes of modules, and of objects that they hold; whether there are new ones.

        Args:
            roots: the model and its loss, by what the labels of their parts begin with.
            memo: of ``copy.deepcopy``.

        Raises:
            CaptureError: for an object of the user's of which each attribute can be copied.
        """
        modules = {label_in(prefix, path): m for prefix, root in roots.items() for path, m in root.named_modules()}
        memo = {**{id(module): module for module in modules.values()}, **memo, **self.by_id}
        parts = [
            part
            for path, module in modules.items()
            for name, value in vars(module).items()
            if name not in INTERNAL
            for part in _parts_of(label_in(path, name), value, memo)
        ]
        self.by_id |= {id(part): part for part in parts}
        return bool(parts)

    def is_unusable(self, value: Any) -> bool:
        """Whether a call may not use a value, as it would do something with it, or with what is in it, that no program
        does again."""
        if not isinstance(value, (list, tuple, dict)):
            return is_unusable(value) or id(value) in self.by_id and not isinstance(value, (Iterator, *_STATELESS))
        return any(self.is_unusable(x) for x in leaves_of(value)) if self.by_id else False


def is_unusable(value: Any) -> bool:
    """Whether a call may not use an object of Python's own library, wherever it has it from: what holds a file, a
    thread, or a queue."""
    return isinstance(value, _ONCE)


def refused_copy(label: str, kind: type, error: Exception) -> CaptureError:
    """Why an object cannot be in a model that is traced."""
    what = f"{label}, a {kind.__name__}," if label else kind.__name__
    return CaptureError(
        f"{what} cannot be copied for tracing ({type(error).__name__}: {error})\n"
        "What to change: make it such that copy.deepcopy(model) works (a __getattr__ of its class must raise "
        "AttributeError for what is not there)."
    )


def refused_use(label: str, value: Any, line: str) -> CaptureError:
    """Why a call may not use what the copies of a model share."""
    return refusal(
        f"the model uses {label}, a {type(value).__name__}: a trace would do so once, and no call again,",
        line,
        "return what it is to get as an output, and use it outside of the model",
    )


def _parts_of(label: str, value: Any, memo: Mapping[int, Any]) -> list[Any]:
    """What in a value cannot be copied, or the value itself."""
    error = _failure_of(value, memo)
    if error is None:
        return []
    if is_data(value):
        inside = {label_in(label, name): x for name, x in vars(value).items()}
    elif type(value) in (list, tuple, dict):
        inside = {
            label_of_entry(label, key): x for key, x in (value.items() if isinstance(value, dict) else enumerate(value))
        }
    else:
        inside = {}
    memo = {**memo, id(value): value}
    parts = [part for place, x in inside.items() for part in _parts_of(place, x, memo)]
    if not parts and (is_data(value) or isinstance(value, (torch.Tensor, nn.Module, list, tuple, dict, set))):
        raise refused_copy(label, type(value), error) from error
    return parts or [value]


def _failure_of(value: Any, memo: Mapping[int, Any]) -> Exception | None:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception as error:  # noqa: BLE001 - whatever the user's class raises
        return error
    return None
