"""What Python reads of ``DTensor``s: a number, a list, an array, a text.

[Note: numbers of a DTensor] ``p.grad.norm().item()`` is a sum over the ranks, and ``if rank == 0: print(...)`` of it
would wait for the others until the process group gives up.  So the ranks show each other first that they read one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.runtime.dtensors.stages import number_read
from autoparallel.runtime.parameters.slices import lies_elsewhere, lies_whole
from autoparallel.runtime.parameters.state import shares_parameter
from autoparallel.runtime.ranks.agreement import agree_on


def watch_values() -> None:
    """Has Python read of ``DTensor``s what it reads of whole tensors."""
    _torch.dtensor.handle_operators([torch.ops.aten._local_scalar_dense.default], whole_number)
    _torch.dtensor.set_methods(tolist=as_list, numpy=as_array, __format__=as_text)


def plain_values(value: DTensor) -> Tensor:
    """The whole of a ``DTensor`` for Python, on all ranks of its mesh; torch would read this rank's part.

    Raises:
        RankMismatchError: on every rank, where some do something else.
        RuntimeError: where the tensor lies on other ranks.
    """
    if lies_elsewhere(value):
        raise RuntimeError(
            "values of a tensor that lies on other ranks, such as p.tolist() of another stage's parameter\n"
            "What to change: read them where p.device_mesh.get_coordinate() is not None, or on all ranks from "
            "model.full_parameters() and model.grad_norm(groups='parameter')."
        )
    if not all(p.is_replicate() for p in value.placements):
        agree_on(
            value.device_mesh,
            "a number of a sharded tensor, such as p.grad.norm().item(), which is a sum over the ranks. What to "
            "change: read it on every rank, and print it on one",
        )
    return _torch.dtensor.gather(value)


def whole_number(operator: Any, args: Sequence[Any], _: Mapping[str, Any]) -> Any:
    """The number that a ``DTensor`` holds (see [Note: numbers of a DTensor])."""
    return operator(plain_values(number_read(args[0])))


def as_list(tensor: DTensor) -> Any:
    """What ``tensor.tolist()`` gives."""
    return plain_values(tensor).tolist()


def as_array(tensor: DTensor, *, force: bool = False) -> Any:
    """What ``tensor.numpy()`` gives: an array of a copy, where a rank has a part; one of a parameter is not written to,
    since the parameter would not change.

    Raises:
        RuntimeError: for a tensor that requires a gradient, as torch does.
    """
    if tensor.requires_grad and not force:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.\n"
            "What to change: tensor.detach().numpy(), on every rank."
        )
    array = plain_values(tensor).numpy(force=force)
    if not lies_whole(tensor) and shares_parameter(tensor, None):
        array.flags.writeable = False
    return array


def as_text(tensor: DTensor, form: str) -> str:
    """What ``f"{tensor:.3f}"`` gives: that of its number; without a form, a sum over ranks shows itself as one."""
    if tensor.ndim or not (form or lies_whole(tensor)):
        return object.__format__(tensor, form)
    text: str = tensor.item().__format__(form)
    return text
