"""Operators that take lists of ``DTensor``s.

[Note: lists of DTensors] Torch runs an operator on lists, such as ``torch._foreach_lerp_``, on the mesh of their first
tensor, and takes no list that holds plain tensors, too: buffers, or a parameter beside the model's.  The stages of a
pipeline are several meshes: on the ranks of all others nothing would happen, without a word.  What is made of one
stage's tensors to be the model's, as ``torch.nn.utils.clip_grad_norm_`` makes a norm, is refused; so is a number of a
tensor that lies on another stage, where torch says 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.runtime.dtensors.boundary import keep_kinds
from autoparallel.runtime.dtensors.mixed import lay_operands
from autoparallel.runtime.dtensors.stages import is_any_stage
from autoparallel.runtime.dtensors.writes import keep
from autoparallel.runtime.parameters.parts import note_changes, origin_of
from autoparallel.runtime.parameters.slices import is_summed, lies_elsewhere
from autoparallel.runtime.ranks.agreement import agree_on, agreement_over, tensor_digest

_ATEN = torch.ops.aten


def watch_lists() -> None:
    """Has operators take lists of ``DTensor``s that lie on several meshes, and plain tensors among them."""
    _torch.dtensor.handle_operators(_torch.dtensor.list_operators(), on_lists)
    _torch.dtensor.handle_operators([_ATEN.stack.default], on_stack)
    _torch.dtensor.handle_operators([_ATEN.cat.default], on_cat)


def on_lists(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of lists of ``DTensor``s, mesh by mesh (see [Note: lists of DTensors]).

    Raises:
        RuntimeError: for norms of one stage's tensors, of which ``torch.nn.utils.clip_grad_norm_`` makes a global norm.
    """
    lists = [i for i, arg in enumerate(args) if isinstance(arg, list | tuple)]
    indices: dict[DeviceMesh | None, list[int]] = {}
    for i, tensor in enumerate(args[lists[0]]):
        indices.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(i)
    if operator.overloadpacket is torch.ops.aten._foreach_norm:
        _require_no_stage(indices)
    results: dict[int, Any] = {}
    with _torch.dtensor.leave_to_torch(operator):
        if len(indices) == 1 and None not in indices:
            return _on_list(operator, args, kwargs)
        for mesh, some in indices.items():
            picked = [[arg[i] for i in some] if at in lists else arg for at, arg in enumerate(args)]
            if mesh is None:  # such as a temperature beside the model's parameters
                picked = pytree.tree_map_only(DTensor, _torch.dtensor.gather, picked)
                results |= zip(some, operator(*picked, **kwargs) or (), strict=False)
            else:
                results |= zip(some, _on_list(operator, picked, kwargs) or (), strict=False)
    return [results[i] for i in sorted(results)] or None


_LINEAR = frozenset({
    _ATEN._foreach_mul_.Scalar, _ATEN._foreach_div_.Scalar, _ATEN._foreach_neg_.default, _ATEN._foreach_zero_.default,
})  # fmt: skip
"""What may be written to each summand of a sum over ranks; of other operators some releases of torch do it, too."""


def _on_list(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of lists of one mesh; of the whole tensors, where torch cannot of parts or of summands, as
    gradients are under ``no_sync()``."""
    args, kwargs = lay_operands(operator, args, kwargs)
    tensors = [x for x in args[0] if isinstance(x, DTensor)]
    is_write = operator.overloadpacket.__name__.endswith("_")
    summed = any(map(is_summed, tensors))
    if not is_write or not summed or operator in _LINEAR or any(map(lies_elsewhere, tensors)):
        try:
            results = operator(*args, **kwargs)
            if is_write:
                note_changes(args[0])
                for part in filter(origin_of, tensors):  # the copy has been written to
                    part.copy_(part.clone())
            return results
        except RuntimeError as error:
            if not (summed or isinstance(error, NotImplementedError)) or any(map(lies_elsewhere, tensors)):
                raise
    wholes, named = pytree.tree_map_only(DTensor, _torch.dtensor.gather, (list(args), dict(kwargs)))
    results = operator(*wholes, **named)
    if is_write:
        for whole, tensor in zip(wholes[0], args[0], strict=True):
            keep(whole, tensor)
        return results
    return [_torch.dtensor.replicated(x, tensors[0].device_mesh) for x in results]


def on_stack(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A stack of ``DTensor``s, beside plain tensors that all ranks have.

    Raises:
        RankMismatchError: on every rank, where plain tensors are not the same on all of them.
        RuntimeError: for one of numbers of one stage's tensors, as of norms.
    """
    _require_no_stage(x.device_mesh for x in args[0] if isinstance(x, DTensor) and not x.ndim)
    return _join(operator, args, kwargs)


def on_cat(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``DTensor``s are joined to, beside plain tensors that all ranks have, as zeros are that LBFGS puts where a
    parameter has no gradient.

    Raises:
        RankMismatchError: on every rank, where plain tensors are not the same on all of them.
        RuntimeError: on every rank, where they lie on several stages of a pipeline.
    """
    meshes = {x.device_mesh if isinstance(x, DTensor) else None for x in args[0]}
    if len(meshes) > 1 and is_any_stage(meshes):
        raise RuntimeError(
            "tensors of several stages of a pipeline are joined to one, as LBFGS and parameters_to_vector do\n"
            "What to change: join what model.full_parameters() gives; step with an optimizer that has a state for each "
            "parameter."
        )
    return _join(operator, args, kwargs)


def _join(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of a list of ``DTensor``s and plain tensors, of which every rank has all."""
    tensors, *rest = args
    meshes, plain = [x.device_mesh for x in tensors if isinstance(x, DTensor)], []
    if len(meshes) < len(tensors) and not is_any_stage(meshes) and agreement_over(meshes[0]) is not None:
        plain = [x for x in tensors if x.ndim and not isinstance(x, DTensor)]
        tensors = [x if isinstance(x, DTensor) else _torch.dtensor.replicated(x.detach(), meshes[0]) for x in tensors]
    if plain:
        keep_kinds(plain)
        agree_on(meshes[0], f"plain tensors are joined to DTensors by {operator}", *map(tensor_digest, plain))
    with _torch.dtensor.leave_to_torch(operator):
        return operator(tensors, *rest, **kwargs)


def _require_no_stage(meshes: Iterable[DeviceMesh | None]) -> None:
    """Raises RuntimeError where numbers that lie on a stage's mesh are to become one."""
    if is_any_stage(meshes):
        raise RuntimeError(
            "norms of the gradients that lie on one stage of a pipeline are not the model's\n"
            "What to change: model.clip_grad_norm_(max_norm) and model.grad_norm(), which know all stages."
        )
