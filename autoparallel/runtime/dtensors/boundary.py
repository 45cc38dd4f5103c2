"""Where local tensors become ``DTensor``s that a script is given, with a graph: their gradients may be plain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autoparallel.runtime.dtensors.stages import as_gradient, everywhere
from autoparallel.runtime.ranks.agreement import agree_on, agreement_over, tensor_digest


class OverMesh(torch.autograd.Function):
    """A local tensor as a ``DTensor``; ``DTensor.from_local``, but that no gradient may come to it (before torch 2.13
    that raises), or a plain one that all ranks have (``torch.autograd.grad(..., grad_outputs=vectors)``)."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: torch.Size | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> DTensor:
        ctx.mesh, ctx.placements = mesh, [Replicate() if p.is_partial() else p for p in placements]
        ctx.set_materialize_grads(False)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad,) = grads
        local = None
        if grad is not None:
            local = over_mesh(grad, ctx.mesh).redistribute(ctx.mesh, ctx.placements).to_local()
        return local, None, None, None, None


def over_mesh(gradient: Tensor, mesh: DeviceMesh) -> DTensor:
    """The gradient of a ``DTensor``, also where a script gives a plain one.

    Raises:
        RankMismatchError: on every rank, where the plain gradient is not the same on all of them.
    """
    if isinstance(gradient, DTensor):
        return gradient
    if agreement_over(mesh) is not None:
        agree_on(mesh, "the backward of a DTensor takes a plain gradient", tensor_digest(gradient.detach()))
    return as_gradient(gradient, mesh)


def keep_kinds(operands: Any) -> None:
    """Has gradients of plain tensors be plain, and those of ``DTensor``s ``DTensor``s, where an operator takes both: a
    plain loss and a penalty of parameters, which are numbers."""
    if torch.is_grad_enabled():
        for x in pytree.tree_leaves(operands):
            if isinstance(x, Tensor) and x.requires_grad and x not in _KEPT and not (isinstance(x, DTensor) and x.ndim):
                x.register_hook(partial(as_gradient, mesh=x.device_mesh) if isinstance(x, DTensor) else _as_plain)
                if x.is_leaf:  # which every step meets again
                    _KEPT[x] = None


_KEPT: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _as_plain(gradient: Tensor) -> Tensor:
    return everywhere(gradient).full_tensor() if isinstance(gradient, DTensor) else gradient
