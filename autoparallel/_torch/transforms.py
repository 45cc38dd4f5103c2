"""Transforms of ``torch.func`` and traces: which are running, and what is below what they show their functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import eager_transforms, predispatch, pyfunctorch, vmap
from torch.utils._python_dispatch import _disable_current_modes

_C = torch._C._functorch
_JIT: Any = torch._C

TRANSFORMS = eager_transforms
"""Has ``grad_and_value_impl``, ``_vjp_with_argnums`` and ``_jvp_with_argnums``, of which all others are made."""

VMAP: Any = vmap
"""Calls ``_remove_batch_dim`` of each result, with the dim that the parts are to be in."""

ENTER_VMAP, LEAVE_VMAP = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
"""What a trace notes where ``vmap`` begins, with the number of parts and how these draw random numbers, and ends."""


@contextmanager
def outside_of_traces() -> Iterator[None]:
    """Inside, nothing shows in the trace that ``torch.export`` or ``torch.jit`` may be making."""
    state = _JIT._get_tracing_state()
    _JIT._set_tracing_state(None)
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield
    finally:
        _JIT._set_tracing_state(state)


def is_transforming() -> bool:
    """Whether a transform is running."""
    return _C.maybe_current_level() is not None


def is_batch(tensor: torch.Tensor) -> bool:
    """Whether a tensor is several at once: of ``torch.func.vmap``, or of ``is_grads_batched=True``."""
    return bool(_C.is_batchedtensor(tensor) or _C.is_legacy_batchedtensor(tensor))


def is_differentiating() -> bool:
    """Whether one is running that differentiates."""
    return any(x.key() != _C.TransformType.Vmap for x in _C.get_interpreter_stack() or ())


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what a transform shows its function."""
    return bool(_C.is_functorch_wrapped_tensor(tensor))


def below_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with all dims, of which transforms show their function a part."""
    while _C.is_functorch_wrapped_tensor(tensor):
        tensor = _C.get_unwrapped(tensor)
    return tensor


def running_batches() -> dict[int, Any]:
    """The sizes of the dims that the ``vmap``s which run take away, by their levels; the outermost comes first."""
    stack = _C.get_interpreter_stack() or ()
    return {x.level(): _C.CVmapInterpreterPtr(x).batchSize() for x in stack if x.key() == _C.TransformType.Vmap}


def batched_dims(tensor: torch.Tensor) -> dict[int, int]:
    """The dims that ``vmap``s have taken away from a tensor, by their levels."""
    dims: dict[int, int] = {}
    while _C.is_batchedtensor(tensor):
        dim, level = _C.maybe_get_bdim(tensor), _C.maybe_get_level(tensor)
        dims = {x: place + (place >= dim) for x, place in dims.items()} | {level: dim}
        tensor = _C.get_unwrapped(tensor)
    return dims


def remove_dims(tensor: torch.Tensor, sizes: dict[int, Any]) -> torch.Tensor:
    """The tensor with all dims, those first that ``vmap``s have taken away; a trace notes it.

    Args:
        sizes: of these, by the levels of the ``vmap``s.
    """
    for level in sorted(batched_dims(tensor), reverse=True):
        tensor = predispatch._remove_batch_dim(tensor, level, sizes[level], 0)
    return tensor


def take_dims(tensor: torch.Tensor, levels: list[int]) -> torch.Tensor:
    """What a function in ``vmap``s is shown of a tensor with all dims, the first of which are theirs; a trace notes
    it."""
    for level in levels:
        tensor = predispatch._add_batch_dim(tensor, 0, level)
    return tensor


@contextmanager
def left_at_the_end() -> Iterator[None]:
    """Leaves at the end what was entered inside: a graph that has calls of them leaves none where it ends in an
    error."""
    depth = len(_C.get_interpreter_stack() or ())
    try:
        yield
    finally:
        while len(_C.get_interpreter_stack() or ()) > depth:
            _C.pop_dynamic_layer_stack()


untransformed = pyfunctorch.temporarily_clear_interpreter_stack
"""Inside, no transform is running."""
