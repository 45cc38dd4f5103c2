"""Who catches an error that is raised where a model runs: the statements around it, in the functions that run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from types import FrameType
from typing import Any

from autoparallel import _torch
from autoparallel.capture.tracing.sources import parse, path_to, place_in
from autoparallel.graph.python_state import OURS

_OUTERMOST = f"{OURS}capture/training.py"
"""Where the call of the model begins."""

_CHECKS_OF_TORCH = f"{_torch.export.FOLDER}distributions/"

_ASKED_BY_PYTHON = ("__next__", "__getitem__", "__getattr__")
"""Methods whose errors tell Python something: that a loop is over, or that there is no such attribute."""


def frames_of_model(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those around it, up to the call of the model; without those of torch's own Python, and ours."""
    while frame is not None and (name := frame.f_code.co_filename) != _OUTERMOST:
        if not name.startswith((OURS, _torch.export.FOLDER)) or name.startswith(_CHECKS_OF_TORCH):
            yield frame
        frame = frame.f_back


def path_of(frame: FrameType) -> list[ast.AST] | None:
    """What is around the instruction of a frame, within its function; None where there is no source."""
    place, tree = place_in(frame), parse(frame.f_code.co_filename)
    return None if place is None or tree is None else path_to(tree, place)


def catching(path: Sequence[ast.AST]) -> Iterator[ast.With | ast.AsyncWith | ast.Try | ast.TryStar]:
    """The statements of a path that are given the errors of what they are around."""
    for outer, inner in pairwise(path):
        if not isinstance(outer, ast.With | ast.AsyncWith | ast.Try | ast.TryStar):
            continue
        catches = not isinstance(outer, ast.Try | ast.TryStar) or outer.handlers
        if catches and any(inner is statement for statement in outer.body):
            yield outer


def is_caught(frame: FrameType) -> bool:
    """Whether somebody between a check and the call of the model may catch what it raises."""
    for outer in frames_of_model(frame):
        path = path_of(outer)
        if path is None or outer.f_code.co_name in _ASKED_BY_PYTHON:
            return True
        names = {**outer.f_globals, **outer.f_locals}
        if any(isinstance(x, ast.Try | ast.TryStar) or not lets_pass(x, names) for x in catching(path)):
            return True
    return False


def lets_pass(statement: ast.With | ast.AsyncWith, names: Mapping[str, Any]) -> bool:
    """Whether its context managers are known to catch nothing, as those of torch are."""
    return all(is_transparent(value_of(manager_of(item.context_expr), names)) for item in statement.items)


def manager_of(context: ast.expr) -> ast.expr:
    """What a context manager is made by, or is."""
    return context.func if isinstance(context, ast.Call) else context


def value_of(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of one, stands for; None where only a run would tell."""
    if isinstance(expression, ast.Attribute):
        return getattr(value_of(expression.value, names), expression.attr, None)
    return names.get(expression.id) if isinstance(expression, ast.Name) else None


def is_transparent(manager: Any) -> bool:
    """Whether a context manager is known to take no errors: none, or one of torch's."""
    return manager is nullcontext or str(getattr(manager, "__module__", "")).partition(".")[0] == "torch"
