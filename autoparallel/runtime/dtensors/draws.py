"""Random numbers on ``DTensor``s.

[Note: draws on DTensors] What ``parameter.normal_()`` or ``torch.randn_like(parameter.grad)`` draws should not depend
on the mesh.  On GPUs torch moves each rank's generator to where its shard would begin, which is not where one process
has it: not even one rank draws the numbers of a plain tensor.  On CPUs it does nothing: every rank fills its shard from
the start of the same stream, so that all shards hold the same numbers, a ``generator=`` is dropped, and a rank of
another stage draws nothing, so that ranks draw apart ever after.  So here every rank draws for the whole tensor, as one
process would, and keeps its part.  Ranks must be seeded alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.runtime.dtensors.stages import is_any_stage
from autoparallel.runtime.parameters.parts import origin_of
from autoparallel.runtime.parameters.slices import as_parameter, is_summed, part_like

_FILLED = ("exponential_", "geometric_", "cauchy_", "log_normal_", "random_")
"""Operators that fill a tensor with random numbers, and of which torch does not know that they do."""

_SAMPLED = (
    "poisson", "multinomial", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise",
    "rrelu_with_noise_", "normal",
)  # fmt: skip
"""Operators that draw as many numbers as the values of their operands say, or of several operands."""


def watch_draws() -> None:
    """Has operators, and functions of ``nn.init``, draw on ``DTensor``s what one process would."""
    drawn = [*_torch.dtensor.random_operators(), *_torch.dtensor.operators_of(_FILLED)]
    _torch.dtensor.handle_operators(drawn, draw_whole)
    _torch.dtensor.handle_operators(_torch.dtensor.operators_of(_SAMPLED), sample_whole)
    setattr(*_torch.nn.TRUNCATED_NORMAL, drawn_whole(getattr(*_torch.nn.TRUNCATED_NORMAL)))
    setattr(*_torch.nn.ORTHOGONAL, drawn_whole(getattr(*_torch.nn.ORTHOGONAL)))


def draw_whole(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a random operator makes of a ``DTensor`` (see [Note: draws on DTensors])."""
    operand, *rest = args
    spec, local = _torch.dtensor.spec_of(operand), _torch.dtensor.local_of(operand)
    if is_summed(operand):
        raise RuntimeError(f"{operator} draws on a sum over the ranks\nWhat to change: draw on x.full_tensor().")
    # One process fills its tensor in the order in which it lies in memory.
    whole = local.new_empty_strided(tuple(spec.shape), tuple(spec.stride)).zero_()
    part = part_like(whole, operand)
    part.copy_(local)
    drawn = operator(whole, *rest, **kwargs)
    if drawn is whole:
        local.copy_(part)
        return operand
    return pytree.tree_map_only(Tensor, lambda x: as_parameter(part_like(x, operand).clone(), operand), drawn)


def sample_whole(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator draws that reads the values of ``DTensor``s (see [Note: draws on DTensors]).

    Raises:
        RuntimeError: on every rank, where they lie on one stage of a pipeline, which the ranks of others do not know.
    """
    tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, DTensor)]
    first = tensors[0]
    if is_any_stage(x.device_mesh for x in tensors):
        raise RuntimeError(
            f"{operator} draws as the values of tensors say that lie on one stage of a pipeline\n"
            "What to change: draw on plain tensors (model.full_parameters() gives each parameter whole)."
        )

    wholes = {id(x): _torch.dtensor.gather(x).clone() for x in tensors}
    operands, options = pytree.tree_map_only(DTensor, lambda x: wholes[id(x)], (tuple(args), dict(kwargs)))
    drawn = operator(*operands, **options)
    for value, argument in zip(args, operator._schema.arguments, strict=False):
        if isinstance(value, DTensor) and argument.alias_info is not None and argument.alias_info.is_write:
            _torch.dtensor.local_of(value).copy_(part_like(wholes[id(value)], value))
    if drawn is operands[0]:
        return first
    alike = drawn.shape == first.shape and not is_summed(first)
    if not alike:
        return _torch.dtensor.replicated(drawn, first.device_mesh)
    return as_parameter(part_like(drawn, first).clone(), first)


def drawn_whole(function: Any) -> Any:
    """A function of ``nn.init`` that fills a ``DTensor`` as one process does.

    ``trunc_normal_`` draws until all values are within bounds: on the ranks of another stage nothing tells it so, and
    it must draw there as often, as must ``orthogonal_``, which factors what it has drawn.
    """

    @wraps(function)
    def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, DTensor):
            filled: Tensor = function(tensor, *args, **kwargs)
            return filled
        with torch.no_grad():
            if origin_of(tensor) is None:
                filled = draw_whole(function, (tensor, *args), kwargs)
                return filled
            return tensor.copy_(draw_whole(function, (tensor.clone(), *args), kwargs))  # a view of a gathered copy

    return initialise
