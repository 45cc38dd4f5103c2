"""What a script writes to a parameter, a gradient or an optimizer's state, or to a part of one: ``weight[0].zero_()``.

A view of a ``DTensor`` that is cut along the dim which the view takes apart is a view of a gathered copy: torch makes
that copy, writes to it and drops it, without a word.  Where a view is made, it is noted here what it is a view of, and
how it came about; what is written to it then is written to the whole tensor, of which every rank keeps its part.  So is
what torch cannot write to parts, ``weight[mask] = 0``, ``weight.copy_(plain)``, or to summands, of which a gradient
consists under ``no_sync()``: ``weight.grad.clamp_(-1, 1)`` (see ``share_of``).  ``weight.data = value`` gives a tensor
other memory, which torch does not pass on to what a rank has of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.runtime.dtensors.boundary import keep_kinds
from autoparallel.runtime.dtensors.stages import everywhere, meet
from autoparallel.runtime.dtensors.values import plain_values
from autoparallel.runtime.dtensors.wholes import can_gather, require_same
from autoparallel.runtime.parameters.parts import (
    Origin,
    forget_origin,
    make_again,
    note_changes,
    note_origin,
    origin_of,
)
from autoparallel.runtime.parameters.slices import is_summed, lies_elsewhere, share_of
from autoparallel.runtime.parameters.state import shares_parameter

_ATEN = torch.ops.aten
_VIEWS = (
    _ATEN.alias.default, _ATEN.detach.default, _ATEN.diagonal.default, _ATEN.expand.default, _ATEN.permute.default,
    _ATEN.select.int, _ATEN.slice.Tensor, _ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.squeeze.default,
    _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.t.default, _ATEN.transpose.int, _ATEN.unbind.int,
    _ATEN.unfold.default, _ATEN.unsqueeze.default, _ATEN.view.default, _ATEN.view.dtype,
)  # fmt: skip
"""The operators that give views of ``DTensor``s; others are composed of them, or torch has no sharding for them."""

_INDEXED = (
    "index_add_", "index_copy_", "index_fill_", "index_put_", "index_reduce_", "masked_scatter_", "put_", "scatter_",
    "scatter_add_", "scatter_reduce_",
)  # fmt: skip
"""The operators that write to places which indices name: those of the whole tensor, which torch takes for a part's."""


def view(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator gives a view of a ``DTensor`` by; that of a gathered copy knows what it is of."""
    source, *rest = args
    with _torch.dtensor.leave_to_torch(operator):
        if not isinstance(source, DTensor) or lies_elsewhere(source):
            return operator(*args, **kwargs)
        try:
            result, is_gathered = operator(*args, **kwargs), False
        except RuntimeError as error:  # such as to take apart the dim that is cut
            if all(p.is_replicate() for p in source.placements) and not _torch.dtensor.is_unknown(error):
                raise
            result, is_gathered = operator(_torch.dtensor.gather(source), *rest, **kwargs), True
    if is_gathered:
        result = pytree.tree_map_only(Tensor, lambda x: _torch.dtensor.replicated(x, source.device_mesh), result)
    origin = origin_of(source)
    for number, part in enumerate([result] if isinstance(result, Tensor) else result):
        if origin is None and not is_gathered and _is_cut_alike(part, source):
            continue

        def step(x: Tensor, number: int = number) -> Tensor:
            again = operator(x, *rest, **kwargs)
            return again if isinstance(again, Tensor) else again[number]

        before = origin or Origin(source)
        note_origin(part, Origin(before.base, (*before.steps, step)))
    return result


def write(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator does that writes to its first operand; on whole tensors, where torch cannot on their parts.

    Args:
        earlier: what else has been made to carry it out, if anything.

    Raises:
        RankMismatchError: on every rank, where plain tensors that it reads are not the same on all of them.
        RuntimeError: where the first operand is a plain tensor, and what is written to it a parameter, or requires a
            gradient.
    """
    target = args[0]
    if not isinstance(target, DTensor):
        return _write_plain(operator, args, kwargs)
    if together := meet(operator, args, kwargs, target.device_mesh):
        keep_kinds(args[1:])
        args, kwargs = together
    origin = origin_of(target)
    if origin is None and not (_is_lost(operator.overloadpacket.__name__, target) and can_gather(target)):
        try:
            result = _torch.dtensor.carry_out(earlier, operator, args, kwargs)
            note_changes([target])
            return result
        except (RuntimeError, NotImplementedError):
            if not can_gather(target):
                raise
    if lies_elsewhere(target):
        return target
    origin = origin or Origin(target)
    require_same(target.device_mesh, f"plain tensors are written to a DTensor by {operator}", (args[1:], kwargs))
    rest, named = pytree.tree_map_only(DTensor, _torch.dtensor.gather, (args[1:], dict(kwargs)))
    whole = _torch.dtensor.gather(origin.base)
    part = origin.follow(whole)
    operator(part, *rest, **named)
    keep(whole, origin.base)
    make_again(origin.base, whole)
    return target


OF_COPIES = (
    "a copy or an average of the model is made of the compiled one, after compile() (copy.deepcopy(model)), and lies "
    "as it does."
)
"""What to change where the plain tensors are copies of parameters."""


def _write_plain(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator writes to a plain tensor: numbers of ``DTensor``s, as ``total += p.grad.norm()`` has them, and
    whole values of what is no parameter (``sums += logits.detach().sum(0)``)."""
    rest = args[1:], dict(kwargs)
    tensors = [x for x in pytree.tree_leaves(rest) if isinstance(x, DTensor) and x.ndim]
    if any(shares_parameter(x, None) for x in tensors):
        raise RuntimeError(
            f"{operator} writes a parameter that lies on a mesh, a DTensor, to a plain tensor\nWhat to change: "
            f"p.full_tensor(), on every rank, gives a plain one; {OF_COPIES}"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{operator} writes a DTensor that requires a gradient to a plain tensor\nWhat to change: x.detach(), or, "
            "where the gradient is wanted, x.full_tensor(), on every rank."
        )
    keep_kinds((args, kwargs))
    rest, named = pytree.tree_map_only(DTensor, lambda x: plain_values(everywhere(x)), rest)
    return operator(args[0], *rest, **named)


def _is_lost(name: str, target: Tensor) -> bool:
    """Whether torch writes something else than meant, without a word: by indices to a part, a number to a summand."""
    return name in _INDEXED or name == "fill_" and isinstance(target, DTensor) and is_summed(target)


def keep(whole: Tensor, target: DTensor) -> None:
    """Gives a ``DTensor`` the values of a whole tensor; what ranks have norms or maxima of, or pieces from here and
    there (of a flattened tensor), lies whole from now on."""
    if not all(type(p) in (Shard, Replicate) or p.is_partial("sum") for p in target.placements):
        _torch.dtensor.become(target, _torch.dtensor.replicated(whole, target.device_mesh))
    else:
        _torch.dtensor.local_of(target).copy_(share_of(whole, target.device_mesh, target.placements))


def assign(earlier: Any, target: DTensor, value: Any) -> None:
    """What ``target.data = value`` does: it takes the memory of a ``DTensor`` that lies alike, as on one process, and
    else memory of its own, of the same values.

    Raises:
        ValueError: for a value that is of another kind, and for a tensor that has no memory yet.
        RankMismatchError: on every rank, where they assign plain tensors that are not the same.
    """
    if not (isinstance(value, Tensor) and can_gather(target)):
        earlier(target, value)
        return
    spec, local = _torch.dtensor.spec_of(target), _torch.dtensor.local_of(target)
    if (value.shape, value.dtype) != (target.shape, target.dtype):
        raise ValueError(
            f".data of a tensor of shape {list(target.shape)} and {target.dtype} on a mesh cannot become a tensor of "
            f"shape {list(value.shape)} and {value.dtype}\nWhat to change: assign one of the same shape and dtype; "
            "change the shape or dtype of a parameter in the plain model, then compile it."
        )
    if local.is_meta:
        raise ValueError(
            ".data of a tensor is assigned that is on the meta device, without memory until the first call is planned\n"
            "What to change: pass example_inputs to compile(), or call model.prepare(*inputs), and assign then."
        )
    if shares_parameter(value, target):
        raise ValueError(
            ".data is assigned a tensor that is, or shares the memory of, another parameter, which on a mesh has its "
            "own\nWhat to change: assign a copy (p.data = q.data.clone()); to tie two weights, do it in the plain "
            "model (head.weight = embedding.weight), then compile it."
        )
    with torch.no_grad():
        if isinstance(value, DTensor) and _lies_alike(value, target):
            memory = _torch.dtensor.local_of(value).detach()  # an object of its own: an optimizer sets its gradient
        else:
            memory = torch.empty_like(local)
            _torch.dtensor.wrap_local(memory, spec).copy_(value)
        note_changes([target])
        _torch.dtensor.become(target, _torch.dtensor.wrap_local(memory, spec))
    forget_origin(target)
    torch.autograd.graph.increment_version(target)
    _COUNTS["assigned"] += 1


_COUNTS: Counter[str] = Counter()


def assignments() -> int:
    """How often ``x.data = value`` has given a tensor other memory, which shows in no object."""
    return _COUNTS["assigned"]


def _lies_alike(value: DTensor, target: DTensor) -> bool:
    """Whether what a rank has of two tensors can stand for each other."""
    specs = [_torch.dtensor.spec_of(x) for x in (value, target)]
    a, b = (_torch.dtensor.local_of(x) for x in (value, target))
    return (
        specs[0].mesh == specs[1].mesh
        and specs[0].placements == specs[1].placements
        and (type(a), a.shape, a.stride(), a.device) == (type(b), b.shape, b.stride(), b.device)
    )


def _is_cut_alike(part: DTensor, source: DTensor) -> bool:
    """Whether what is written to a view of a rank's part is written to that of the view."""
    a, b = (_torch.tensors.storage_mark(_torch.dtensor.local_of(x)) for x in (part, source))
    return a == b and _torch.dtensor.lies_in_parts(part)


def watch_writes() -> None:
    """Has views followed, and writes carried out that torch cannot make on parts or summands."""
    _torch.dtensor.handle_assignments(assign)
    _torch.dtensor.handle_operators(_VIEWS, view)
    _torch.dtensor.handle_first(_torch.dtensor.operators_of(_torch.dtensor.names_in_place()), write)
