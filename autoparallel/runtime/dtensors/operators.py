"""Operators that a script calls on parameters and gradients, where torch's ``DTensor`` does not as one process does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.runtime.dtensors.draws import watch_draws
from autoparallel.runtime.dtensors.forms import watch_forms
from autoparallel.runtime.dtensors.lists import watch_lists
from autoparallel.runtime.dtensors.losses import watch_losses
from autoparallel.runtime.dtensors.mixed import watch_operands
from autoparallel.runtime.dtensors.outs import watch_outs
from autoparallel.runtime.dtensors.stages import require_here
from autoparallel.runtime.dtensors.values import watch_values
from autoparallel.runtime.dtensors.wholes import watch_reads, watch_unknown
from autoparallel.runtime.dtensors.writes import watch_writes
from autoparallel.runtime.parameters.hooks import is_compiled
from autoparallel.runtime.parameters.state import copy_parameter
from autoparallel.runtime.ranks.agreement import agreement_over
from autoparallel.runtime.ranks.files import watch_files

_ATEN = torch.ops.aten


@cache  # once, for it wraps the functions of nn.init that there are
def handle_operators() -> None:
    """Has operators on ``DTensor``s, and what Python reads of them, be those of one process."""
    watch_draws()
    watch_values()
    watch_writes()
    watch_reads()
    watch_files()
    _torch.dtensor.set_methods(__deepcopy__=copy_deeply)
    watch_outs()
    watch_forms()
    _torch.dtensor.handle_first([_ATEN.as_strided.default], take_strides)
    _torch.dtensor.check_full_tensor(require_here)
    watch_lists()
    _torch.dtensor.handle_operators([_ATEN._cudnn_rnn_flatten_weight.default], leave_apart)
    _torch.dtensor.handle_first((_ATEN.argmax.default, _ATEN.argmin.default), count_from_first)
    watch_operands()
    watch_losses()
    _torch.dtensor.handle_operators(_torch.dtensor.collective_operators(), refuse_sending)
    _torch.dtensor.handle_first([_ATEN.gather.default], pick_wholly)
    watch_unknown()


def copy_deeply(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """What ``copy.deepcopy`` makes of a ``DTensor``: of a parameter, a copy without its gradient, as of a plain one.
    Torch would copy memory that others share, as gradients do which are reduced together."""
    if id(tensor) in memo or not tensor.is_leaf or isinstance(tensor, nn.Parameter) and not is_compiled(tensor):
        return Tensor.__deepcopy__(tensor, memo)
    if is_compiled(tensor):
        copied: Tensor = copy_parameter(tensor)
    else:
        spec = _torch.dtensor.spec_of(tensor)  # type: ignore[arg-type]
        copied = _torch.dtensor.wrap_local(_torch.dtensor.local_of(tensor).clone(), spec)
    memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None and not is_compiled(tensor):
        copied.grad = copy_deeply(tensor.grad, memo)
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


def pick_wholly(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``x.gather(dim, index)`` picks, on whole tensors where the index has fewer rows: torch has each rank pick
    from its part of both, which are not the same rows."""
    tensor, dim, index, *_ = args
    sizes = enumerate(zip(tensor.shape, index.shape, strict=False))
    if any(i != dim % tensor.ndim and size != fewer for i, (size, fewer) in sizes):
        args = [
            _torch.dtensor.replicated(_torch.dtensor.gather(x), x.device_mesh) if isinstance(x, DTensor) else x
            for x in args
        ]
    return _torch.dtensor.carry_out(earlier, operator, args, kwargs)


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


def refuse_sending(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Raises RuntimeError for a tensor on the mesh of a model: a rank's part of it is no other rank's."""
    dtensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, DTensor)]
    if not any(agreement_over(x.device_mesh) for x in dtensors):
        return _torch.dtensor.carry_out(None, operator, args, kwargs)
    raise RuntimeError(
        f"{operator} sends a DTensor, which lies across the ranks, as dist.all_reduce(p.grad) and dist.broadcast(p, 0) "
        "do\nWhat to change: leave it out: gradients are those of the whole batch, and parameters are one model's on "
        "all ranks; x.full_tensor(), on every rank, gives a plain tensor."
    )
