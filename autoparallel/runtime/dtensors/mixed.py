"""Operators that take ``DTensor``s and plain tensors together: ``logits.argmax(-1) == labels``, ``p + noise``.

Torch takes a plain number for one that all ranks have, and refuses more than a number.  A plain tensor means the same
value on every rank here, in what a script computes as in what it gives the model: the ranks compare what they have, and
go on with a ``DTensor`` that lies whole.  Its gradient is plain, as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.runtime.dtensors.boundary import keep_kinds, over_mesh
from autoparallel.runtime.dtensors.stages import meet
from autoparallel.runtime.parameters.slices import lies_elsewhere
from autoparallel.runtime.ranks.agreement import agree_on, agreement_over, tensor_digest

_ATEN = torch.ops.aten
_JOINING = (_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor)


def watch_operands() -> None:
    """Has operators on ``DTensor``s take plain tensors, too, and a plain loss and numbers of ``DTensor``s (``loss +
    0.01 * p.square().sum()``) get gradients of their kind."""
    _torch.dtensor.handle_operators(_torch.dtensor.operators_on_several(), mix)
    _torch.dtensor.handle_first(_JOINING, join)
    _torch.dtensor.set_methods(backward=start_backward)


def start_backward(tensor: DTensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    """What ``tensor.backward(gradient)`` does, also for a plain gradient that all ranks have: a loss becomes a
    ``DTensor`` by what is added to it (``loss + 0.01 * p.square().sum()``).

    Raises:
        RankMismatchError: on every rank, where the plain gradient is not the same on all of them.
    """
    if gradient is not None:
        gradient = over_mesh(gradient, tensor.device_mesh)
    Tensor.backward(tensor, gradient, *args, **kwargs)


def join(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of two operands, of which one may be a plain number; numbers of several stages of a
    pipeline are brought together."""
    if not isinstance(args[1], Tensor):  # torch's cache takes it for a tensor of no dims that lies whole
        return operator.overloadpacket.Scalar(*args, **kwargs)
    if together := meet(operator, args, kwargs):
        keep_kinds(args)
        args, kwargs = together
    elif numbers := [x for x in args if isinstance(x, Tensor) and not isinstance(x, DTensor) and not x.ndim]:
        keep_kinds(numbers)
    return _torch.dtensor.carry_out(earlier, operator, args, kwargs)


def mix(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of ``DTensor``s and plain tensors that all ranks have.

    Raises:
        RankMismatchError: on every rank, where plain tensors are not the same on all of them.
    """
    args, kwargs = lay_operands(operator, args, kwargs)
    return _torch.dtensor.carry_out(None, operator, args, kwargs)


def lay_operands(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The operands of an operator on one mesh, plain tensors among them as ``DTensor``s that lie whole.

    Raises:
        RankMismatchError: on every rank, where plain tensors are not the same on all of them.
    """
    tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
    plain = [x for x in tensors if not isinstance(x, DTensor) and x.ndim]
    if plain and (sharded := [x for x in tensors if isinstance(x, DTensor)]):
        mesh = sharded[0].device_mesh
        if agreement_over(mesh) is not None:
            keep_kinds(plain)
            if not any(map(lies_elsewhere, sharded)):
                what = f"{operator} takes DTensors and plain tensors, which must be the same on all ranks"
                agree_on(mesh, what, *map(tensor_digest, plain))
            args, kwargs = pytree.tree_map_only(
                Tensor,
                lambda x: x if isinstance(x, DTensor) or not x.ndim else _torch.dtensor.replicated(x.detach(), mesh),
                (tuple(args), dict(kwargs)),
            )
    return args, kwargs
