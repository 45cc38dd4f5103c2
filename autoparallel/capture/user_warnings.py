"""The warnings that a model's own Python gives while it is traced."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autoparallel.graph.python_state import is_library

_REGISTRY: dict[Any, Any] = {}  # of what was shown, as every module has one


@contextmanager
def only_the_users() -> Iterator[None]:
    """Inside, warnings wait; afterwards the user's are given, each once however often the trace runs the model, under
    the user's filters.  Torch's own are about the trace, which is no business of the user's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    theirs = {(str(w.message), w.category, w.filename, w.lineno): w for w in caught if not is_library(w.filename)}
    for warning in theirs.values():
        warnings.warn_explicit(
            warning.message, warning.category, warning.filename, warning.lineno, _module_of(warning.filename), _REGISTRY
        )


def _module_of(filename: str) -> str | None:
    """The name that filters know a file's module by."""
    return next((n for n, m in list(sys.modules.items()) if getattr(m, "__file__", None) == filename), None)
