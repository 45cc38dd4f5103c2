"""Modules: their hooks, casts and parametrizations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import attention, functional
from torch.nn.modules import module as modules
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils import parametrize
from torch.utils.hooks import BackwardHook
from torch.utils.module_tracker import ModuleTracker

REQUIRES_ROWS = vars(functional)["_verify_batch_size"].__code__
"""Where a batch norm raises for one value per channel."""


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` manages a module's parameters."""
    return getattr(module, "_is_fsdp_managed_module", False)


@contextmanager
def parametrizations_made_anew() -> Iterator[None]:
    """Inside, ``torch.nn.utils.parametrize.cached`` that was entered before keeps nothing."""
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


def dtype_of_cast(*args: Any, **kwargs: Any) -> torch.dtype | None:
    """The dtype among the arguments of ``Module.to``."""
    dtype: torch.dtype | None = torch._C._nn._parse_to(*args, **kwargs)[1]
    return dtype


def cast_module(module: nn.Module, cast: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Casts all parameters and buffers of a module in place; ``Module.to`` drops imaginary parts."""
    return module._apply(cast)


def backward_hook_of(module: nn.Module) -> BackwardHook:
    """What runs a module's backward hooks, as they are registered now, in one call of it."""
    full = module._get_backward_hooks()[0] if module._backward_hooks or modules._global_backward_hooks else []
    return BackwardHook(module, full, module._get_backward_pre_hooks())


def is_tracker(hook: Any) -> bool:
    """Whether a hook only follows which module runs, as that of ``torch.utils.flop_counter.FlopCounterMode``."""
    return isinstance(getattr(hook, "__self__", None), ModuleTracker)


@contextmanager
def without_trackers() -> Iterator[None]:
    """Inside, hooks for all modules that only follow which one runs do not."""
    tables = (modules._global_forward_pre_hooks, modules._global_forward_hooks)
    before = [dict(table) for table in tables]
    for table in tables:
        for key in [key for key, hook in table.items() if is_tracker(hook)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


@contextmanager
def laid_out_by_nobody() -> Iterator[None]:
    """Inside, recurrent layers do not move their weights side by side for cuDNN, as they do where they are copied."""
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_enabled(before)


def attention_kernels() -> tuple[str, ...]:
    """The names of the kernels that attention may run on here, the first choice first."""
    return tuple(kernel.name for kernel in attention._cur_sdpa_kernel_backends(with_priority=True))


IS_CAUSAL_MASK = (transformer, "_detect_is_causal_mask")
"""Where ``nn.TransformerEncoder`` and ``Decoder`` look up what compares a mask's values with those of a causal one."""

TRUNCATED_NORMAL = (torch.nn.init, "_no_grad_trunc_normal_")
"""What ``torch.nn.init.trunc_normal_`` calls."""

ORTHOGONAL = (torch.nn.init, "orthogonal_")

__all__ = ["BatchNorm", "modules"]  # torch's own, handed on
