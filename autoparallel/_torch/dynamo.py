"""Dynamo and Inductor, which are imported at the first call."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import fx
from torch._compile import _disable_dynamo
from torch._guards import tracing
from torch.utils import _python_dispatch

F = TypeVar("F", bound=Callable[..., Any])


def left_by_dynamo(reason: str) -> Callable[[F], F]:
    """``torch.compiler.disable``, but Dynamo, whose import is a third of ours, is imported at the first call."""

    def decorate(function: F) -> F:
        disabled: Any = _disable_dynamo(function)
        disabled._torchdynamo_disable, disabled._torchdynamo_disable_msg = True, reason  # which Dynamo asks for
        return disabled

    return decorate


def outside_of_dynamo() -> AbstractContextManager[Any]:
    """A context in which a backend of ``torch.compile`` may trace on its own, apart from the trace that called it."""
    return tracing(None)


def source_of(node: fx.Node) -> str:
    """Where Dynamo found a graph input, such as ``L['self']._modules['up']._parameters['weight']``."""
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", node.name)
    return str(name() if callable(name) else name)


def graph_break_of(module: fx.GraphModule) -> tuple[str, list[traceback.FrameSummary]] | None:
    """Why Dynamo ended this graph before the end of the function, and where; None where it did not."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if not getattr(reason, "graph_break", False):
        return None
    return str(getattr(reason, "reason", "")), list(getattr(reason, "user_stack", []))


def leaves_frames() -> bool:
    """Whether Dynamo compiles nothing now, because a mode of the user's watches operators."""
    return bool(_python_dispatch.is_in_any_mode_without_ignore_compile_internals())


def leave_open(tensor: torch.Tensor, dims: list[int]) -> None:
    """Asks ``torch.compile`` to compile for any size of these dims, where it can."""
    torch._dynamo.maybe_mark_dynamic(tensor, dims)


def compile_by_inductor(graph: fx.GraphModule, inputs: list[Any], tag: str) -> Callable[..., Any]:
    """A graph of Dynamo's compiled by Inductor, its backward at once; kept in Inductor's folder for other processes,
    also where it has an ``autograd.Function``, whose traced backward is part of what it is found by.

    Args:
        tag: what else it is found by.
    """
    settings = {"autograd_cache_allow_custom_autograd_functions": True, "force_non_lazy_backward_lowering": True}
    tag = f"{torch.compiler.config.cache_key_tag} {tag}"
    with torch._functorch.config.patch(settings), torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")(graph, inputs)
    return compiled


def inductor_folder() -> str:
    """Where Inductor keeps what it compiled, for all processes of this user on this machine."""
    return str(importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir())


def is_compiled_call(filename: str, function: str) -> bool:
    """Whether a stack frame is the one in which ``torch.compile`` begins to run what it was given."""
    return filename.endswith("eval_frame.py") and function in ("compile_wrapper", "_fn")
