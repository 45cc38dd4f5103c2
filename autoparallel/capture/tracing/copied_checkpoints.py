"""Checkpointing that a repository has written itself, as an ``autograd.Function`` that runs modules again.

UNets of diffusion models do, since guided-diffusion: ``CheckpointFunction.apply(run, count, *inputs, *parameters)``,
with how many inputs there are. What a Function's Python does cannot be told in general, so these are known by their
source: it is the same, but for the name that it has for torch.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoparallel.capture.tracing.sources import source_of
from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of_frame

_DIGESTS = frozenset(
    {
        "fb7b6601c032e65b37c297ba7a5a09304669c3b379c32c72b0b5f9fd64bf693e",
        "3d45885fe9e93400058053aca41ffe30644c87713455b9f47b6443e531fbd06a",
    }
)
"""Of guided-diffusion, improved-diffusion, consistency_models, latent-diffusion and stable-diffusion; and of
generative-models, which enters autocast again."""


@cache
def is_copied_checkpoint(cls: type[torch.autograd.Function]) -> bool:
    """Whether a Function computes what the function computes that it is given, and the gradients that it has."""
    return _digest_of(cls) in _DIGESTS


def _digest_of(cls: type[torch.autograd.Function]) -> str:
    """Of the source of what a Function does; empty where there is none."""
    texts = []
    for function in (cls.forward, cls.backward):
        source = source_of(function.__code__) if isinstance(function, FunctionType) else None
        if source is None:
            return ""
        tree = copy.deepcopy(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and function.__globals__.get(node.id) is torch:
                node.id = "torch"
        texts += [ast.unparse(tree.args), *map(ast.unparse, tree.body)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


class GivenTensors(TorchFunctionMode):
    """Inside, what carries a gradient must be among some tensors, or be made of them.

    Raises:
        CaptureError: for all else, whose gradient eager's backward leaves out.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._held: dict[int, Any] = {id(x): x for x in tensors}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in pytree.arg_tree_leaves(*args, **(kwargs or {})):
            if isinstance(x, Tensor) and x.requires_grad and id(x) not in self._held:
                raise refusal(
                    "a function that is checkpointed reads a parameter or an activation that the checkpoint is not "
                    "given, whose gradient its backward leaves out,",
                    line_of_frame(sys._getframe(1)),
                    "give it to the checkpoint, or use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
                )
        out = func(*args, **(kwargs or {}))
        self._held.update({id(x): x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)})
        return out
