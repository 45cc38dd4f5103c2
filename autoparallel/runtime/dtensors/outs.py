"""Operators that are told where to write: ``torch.mul(a, b, out=c)``.

Torch has ``out`` lie on the mesh as the result does, whatever else of it is at hand, and takes no plain tensors beside
it; what some operators give cannot be written so.  Here the result is made first, then copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.runtime.parameters.slices import part_like


def watch_outs() -> None:
    """Has operators write to ``DTensor``s that they are given, and numbers of ``DTensor``s to plain tensors."""
    for operator, functional in _torch.dtensor.writing_operators().items():
        _torch.dtensor.handle_operators([operator], partial(write_result, functional))
    _torch.dtensor.handle_operators(_torch.dtensor.filling_operators(), fill_whole)


def write_result(functional: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Writes what the functional form of an operator gives to the tensors that are to have it.

    Raises:
        RuntimeError: for a ``DTensor`` of another shape, of which torch would make one of that shape.
    """
    names = [argument.name for argument in operator._schema.arguments if argument.is_out]
    outs = [kwargs[name] for name in names]
    results = functional(*args, **{name: value for name, value in kwargs.items() if name not in names})
    for out, result in zip(outs, [results] if isinstance(results, Tensor) else results, strict=True):
        if out.shape != result.shape:
            if isinstance(out, DTensor):
                raise RuntimeError(
                    f"{operator} writes a result of shape {list(result.shape)} to a DTensor of shape "
                    f"{list(out.shape)}\nWhat to change: give one of the result's shape."
                )
            out.resize_(result.shape)
        out.copy_(result)
    return outs[0] if len(outs) == 1 else tuple(outs)


def fill_whole(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator that reads no tensor writes into ``out``: this rank's part of it."""
    out = kwargs["out"]
    local = _torch.dtensor.local_of(out)
    whole = operator(*args, **{**kwargs, "out": local.new_empty(out.shape)})
    local.copy_(part_like(whole, out))
    return out
