"""Operators that a script calls on parameters and gradients, where torch's ``DTensor`` does not as one process does.

[Note: draws on DTensors] What ``parameter.normal_()`` or ``torch.randn_like(parameter.grad)`` draws should not depend
on the mesh.  On GPUs torch moves each rank's generator to where its shard would begin, which is not where one process
has it: not even one rank draws the numbers of a plain tensor.  On CPUs it does nothing: every rank fills its shard from
the start of the same stream, so that all shards hold the same numbers, a ``generator=`` is dropped, and a rank of
another stage draws nothing, so that ranks draw apart ever after.  So here every rank draws for the whole tensor, as one
process would, and keeps its part.  Ranks must be seeded alike.

[Note: lists of DTensors] Torch runs an operator on lists, such as ``torch._foreach_lerp_``, on the mesh of their first
tensor, and takes no list that holds plain tensors, too: buffers, or a parameter beside the model's.  The stages of a
pipeline are several meshes: on the ranks of all others nothing would happen, without a word.  What is made of one
stage's tensors to be the model's, as ``torch.nn.utils.clip_grad_norm_`` makes a norm, is refused; so is a number of a
tensor that lies on another stage, where torch says 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.placements import from_dtensor_placements
from autoparallel.runtime.parameters.hooks import is_compiled
from autoparallel.runtime.parameters.parts import note_changes, origin_of
from autoparallel.runtime.parameters.slices import as_parameter, lies_elsewhere, local_view, part_like
from autoparallel.runtime.parameters.state import copy_parameter
from autoparallel.runtime.ranks.agreement import agree_on, agreement_over, tensor_digest
from autoparallel.runtime.ranks.files import watch_files
from autoparallel.runtime.ranks.mixed import watch_operands
from autoparallel.runtime.ranks.stages import is_any_stage, require_here
from autoparallel.runtime.ranks.values import watch_values
from autoparallel.runtime.ranks.writes import is_summed, keep, keep_kinds, watch_writes

_ATEN = torch.ops.aten
_FILLED = ("exponential_", "geometric_", "cauchy_", "log_normal_", "random_")
"""Operators that fill a tensor with random numbers, and of which torch does not know that they do."""

_SAMPLED = (
    "poisson", "multinomial", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise",
    "rrelu_with_noise_", "normal",
)  # fmt: skip
"""Operators that draw as many numbers as the values of their operands say, or of several operands."""

_TURNED = ("t_", "transpose_", "swapaxes_", "swapdims_")


@cache  # once, for it wraps the functions of nn.init that there are
def handle_operators() -> None:
    """Has operators on ``DTensor``s, and what Python reads of them, be those of one process."""
    drawn = [*_torch.dtensor.random_operators(), *_torch.dtensor.operators_of(_FILLED)]
    _torch.dtensor.handle_operators(drawn, draw_whole)
    _torch.dtensor.handle_operators(_torch.dtensor.operators_of(_SAMPLED), sample_whole)
    setattr(*_torch.nn.TRUNCATED_NORMAL, drawn_whole(getattr(*_torch.nn.TRUNCATED_NORMAL)))
    setattr(*_torch.nn.ORTHOGONAL, drawn_whole(getattr(*_torch.nn.ORTHOGONAL)))
    watch_values()
    watch_writes()
    watch_files()
    _torch.dtensor.set_methods(__deepcopy__=copy_deeply)
    _torch.dtensor.handle_operators((_ATEN.eye.out, _ATEN.eye.m_out), fill_whole)
    _torch.dtensor.handle_operators(_torch.dtensor.operators_of(_TURNED), refuse_turning)
    watch_strides()
    _torch.dtensor.check_full_tensor(require_here)
    _torch.dtensor.handle_operators(_torch.dtensor.list_operators(), on_lists)
    _torch.dtensor.handle_operators([_ATEN.stack.default], on_stack)
    _torch.dtensor.handle_operators([_ATEN.cat.default], on_cat)
    _torch.dtensor.handle_operators([_ATEN._cudnn_rnn_flatten_weight.default], leave_apart)
    _torch.dtensor.handle_first((_ATEN.argmax.default, _ATEN.argmin.default), count_from_first)
    watch_operands()


def copy_deeply(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """What ``copy.deepcopy`` makes of a ``DTensor``: of a parameter, a copy without its gradient, as of a plain one."""
    if id(tensor) in memo or not is_compiled(tensor):
        return Tensor.__deepcopy__(tensor, memo)
    memo[id(tensor)] = copied = copy_parameter(tensor)
    return copied


def leave_apart(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Leaves the weights of a recurrent layer where they are: cuDNN wants them side by side, and copies others."""
    return args[0][0]


def count_from_first(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Where the largest values of a ``DTensor`` are; torch fails at a dim that is counted from the last one, where all
    others before it are of size 1."""
    tensor, *rest = args
    if rest and rest[0] is not None and rest[0] < 0:
        rest[0] += tensor.ndim
    return _torch.dtensor.carry_out(earlier, operator, (tensor, *rest), kwargs)


def draw_whole(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a random operator makes of a ``DTensor`` (see [Note: draws on DTensors])."""
    operand, *rest = args
    spec, local = _torch.dtensor.spec_of(operand), _torch.dtensor.local_of(operand)
    if any(p.is_partial() for p in spec.placements):
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
    alike = drawn.shape == first.shape and not any(p.is_partial() for p in first.placements)
    if not alike:
        return _torch.dtensor.replicated(drawn, first.device_mesh)
    return as_parameter(part_like(drawn, first).clone(), first)


def fill_whole(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator writes into ``out``: this rank's part of it."""
    out = kwargs["out"]
    local = _torch.dtensor.local_of(out)
    whole = operator(*args, **{**kwargs, "out": local.new_empty(out.shape)})
    local.copy_(part_like(whole, out))
    return out


def drawn_whole(function: Any) -> Any:
    """A function of ``nn.init`` that fills a ``DTensor`` as one process does.

    ``trunc_normal_`` draws until all values are within bounds: on the ranks of another stage nothing tells it so, and
    it must draw there as often. ``orthogonal_`` exchanges dims in place where a weight is wide, as no ``DTensor`` can.
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


@cache
def watch_strides() -> None:
    """Has the refusal of strides say what to write instead."""
    _torch.dtensor.handle_first([_ATEN.as_strided.default], take_strides)


def take_strides(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What torch makes of strides that are the tensor's own.

    Raises:
        RuntimeError: for others, which are those of a rank's part.
    """
    try:
        return _torch.dtensor.carry_out(earlier, operator, args, kwargs)
    except (RuntimeError, NotImplementedError) as error:
        raise RuntimeError(
            f"{operator} reads or writes a DTensor through strides, as p.fill_diagonal_(0) does\n"
            "What to change: p.diagonal().fill_(0) for a diagonal, slices and views for other strides, or do it whole "
            "(with model.whole() as plain: plain.layer.weight.fill_diagonal_(0))."
        ) from error


def refuse_turning(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    """Raises RuntimeError: the shape of a ``DTensor`` is that which it was made with."""
    raise RuntimeError(
        f"{operator} exchanges dims in place, as orthogonal_ imported from nn.init does of a wide weight, which a "
        "DTensor cannot\nWhat to change: use x.transpose(...); write nn.init.orthogonal_(weight), or initialise such a "
        "weight whole (with model.whole() as plain: orthogonal_(plain.layer.weight))."
    )


@cache
def watch_summands() -> None:
    """Has autograd add the gradient of a term beside the model (``0.01 * p.square().sum()``), which lies as ``p``, to
    what is still a summand: from the first one on that is kept."""
    _torch.dtensor.handle_first([_ATEN.add.Tensor, _ATEN.add_.Tensor], add_to_summand)


def add_to_summand(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A sum of ``DTensor``s, of which one may be a sum over the ranks and the other no part of one; torch has no way
    from the latter to the former."""
    first, *rest = args
    if rest and isinstance(first, DTensor) and isinstance(rest[0], DTensor):
        args = (first, _as_summand(rest[0], first), *rest[1:])
    return _torch.dtensor.carry_out(earlier, operator, args, kwargs)


def _as_summand(value: DTensor, summand: DTensor) -> DTensor:
    """A ``DTensor`` as another lies, where that is a sum over ranks and this one is not; else as it is."""
    mesh = value.device_mesh
    if mesh != summand.device_mesh:
        return value
    pairs = [*zip(value.placements, summand.placements, strict=True)]
    fits = all(q.is_partial() or p.is_replicate() or p == q for p, q in pairs)
    if not fits or not any(p.is_shard() and q.is_partial() for p, q in pairs):
        return value
    whole = _torch.dtensor.local_of(value).new_zeros(value.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is not None and not any(
        at and p.is_replicate() and q.is_partial() for at, (p, q) in zip(coordinate, pairs, strict=True)
    ):
        part_like(whole, value).copy_(_torch.dtensor.local_of(value))
    layout = from_dtensor_placements(tuple(Replicate() if q.is_partial() else q for _, q in pairs))
    part = local_view(whole, layout, mesh)
    return _torch.dtensor.from_part(part.contiguous(), mesh, tuple(summand.placements), value.shape)


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
