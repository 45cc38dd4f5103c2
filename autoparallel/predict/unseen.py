"""Calls of the user's own Python in a dry run, which has no data to give it, and of kernels that have none for shapes:
their results have the right shapes, and keep what they read and made for the backward, as most do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.hardware import Profile
from autoparallel.operators.control_flow import inner_graphs, on_device
from autoparallel.operators.flex import is_flex
from autoparallel.operators.opaque import exit_module, function_class, has_own_backward
from autoparallel.predict.attention import attention
from autoparallel.rules.calls import is_tensor, selects_rows

aten = torch.ops.aten
_META = torch.device("meta")


def call_without_data(target: Any, args: Any, kwargs: Any, profile: Profile) -> Any:
    """What an operator makes of tensors without data, as it makes those that it creates; attention as a CPU runs it."""
    if target is aten.scaled_dot_product_attention.default:
        return attention(*args, **kwargs)
    if target is aten.rms_norm.default and _is_one_kernel(profile, *args, **kwargs):
        return _norm_in_one(*args, **kwargs)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": _META}
    return on_device(target, _META)(*args, **kwargs)


def _is_one_kernel(
    profile: Profile, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> bool:
    """Whether a root mean square norm runs as one kernel; a compiler makes it of its operators, and fuses them."""
    return not profile.composes and not profile.fuses and (weight is None or weight.dtype == x.dtype)


def _norm_in_one(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """A root mean square norm as the kernel that reads, makes and keeps as much as its own, which none but GPUs have;
    that keeps one number of each row, this one two."""
    return aten.native_layer_norm(x, shape, weight, None, 0.0 if eps is None else eps)[0]


def is_unseen(node: fx.Node) -> bool:
    """Whether a node calls Python of the user's, FlexAttention, or what runs on as many rows as values select."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return False
    return has_own_backward(node.target) or _is_sized_by_data(node.target)


def stand_in(node: fx.Node, args: Any, kwargs: Any, shape_of: Callable[[Tensor], tuple[int, ...]]) -> Any:
    """What takes the place of the results of an unseen call.

    Args:
        shape_of: the shape on a rank of one of the results that were traced.
    """
    if node.target is exit_module:
        return args[1:]
    if function_class(node.target) is None and not _is_sized_by_data(node.target):
        return args[0] if is_tensor(node) else (*args[1:], None)
    read = _torch.tensors.tensors_in((args, kwargs))
    traced = node.meta["val"]
    values = [traced] if is_tensor(node) else list(traced)
    outputs = [None if v is None else torch.empty(shape_of(v), dtype=v.dtype, device="meta") for v in values]
    remaining = iter(_Unseen.apply(len(read), *read, *(x for x in outputs if x is not None)))
    results = tuple(None if x is None else next(remaining) for x in outputs)
    return results[0] if is_tensor(node) else results


def _is_sized_by_data(target: Any) -> bool:
    return is_flex(target) or any(_selects_rows(node) for graph in inner_graphs(target) for node in graph.graph.nodes)


def _selects_rows(node: fx.Node) -> bool:
    """Whether a call in a graph works on as many rows as values select."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return selects_rows(node) or any(map(_torch.export.free_unbacked_symbols, values)) or _is_sized_by_data(node.target)


class _Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.count = count
        outputs = tuple(x.view_as(x) for x in tensors[count:])
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point() and not x.is_complex()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        read, outputs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        wanted = ctx.needs_input_grad[1:]
        gradients = [torch.empty_like(x) if w else None for x, w in zip(read, wanted, strict=False)]
        return None, *gradients, *(None for _ in outputs)
