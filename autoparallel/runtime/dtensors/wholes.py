"""Operators that torch cannot carry out on the parts of ``DTensor``s, or carries out wrongly: on whole tensors.

What they give lies whole, on every rank.  Plain tensors that they take, too, must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.runtime.dtensors.boundary import keep_kinds
from autoparallel.runtime.parameters.slices import lies_elsewhere
from autoparallel.runtime.ranks.agreement import agree_on, agreement_over, tensor_digest

_ATEN = torch.ops.aten

_SELECTING = (
    _ATEN.index.Tensor, _ATEN.index_select.default, _ATEN.gather.default, _ATEN.index_put.default,
    _ATEN.index_add.default, _ATEN.scatter_add.default,
)  # fmt: skip
"""What reads at places which indices name, and the backwards of it."""

_MEASURING = (
    "_cdist_forward", "_histogramdd_from_bin_cts", "_is_all_true", "_pdist_forward", "_unique2", "allclose", "bincount",
    "bucketize", "histc", "histogram", "masked_select", "nonzero", "renorm", "searchsorted", "unique_consecutive",
    "unique_dim", "unique_dim_consecutive",
)  # fmt: skip
"""What scripts measure of a whole tensor, and torch cannot of its parts."""

_CONVOLVING = (_ATEN.convolution.default, _ATEN.convolution_backward.default)


def watch_reads() -> None:
    """Has operators read whole ``DTensor``s that torch cannot read of their parts."""
    _torch.dtensor.handle_first((*_SELECTING, *_torch.dtensor.operators_of(_MEASURING)), read_whole)


def watch_unknown() -> None:
    """Has operators compute on whole tensors where torch has no sharding for them, and those whose sharding is wrong;
    what else handles one comes first."""
    _torch.dtensor.handle_first(_CONVOLVING, convolve)
    _torch.dtensor.handle_first(_torch.dtensor.pure_operators(), try_parts)


def read_whole(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator reads of ``DTensor``s that torch cannot read of their parts, as what stands at plain indices
    (``weight[[1, 0]]``), or how many values there are (``weight.unique()``): every rank has all of them.

    Raises:
        RankMismatchError: on every rank, where plain tensors that it reads are not the same on all of them.
    """
    sources, plain = _tensors_of(args, kwargs)
    if not all(map(can_gather, sources)):
        return _torch.dtensor.carry_out(earlier, operator, args, kwargs)
    if any(map(lies_elsewhere, sources)):  # what comes of it lies there, too
        mesh = sources[0].device_mesh
        args, kwargs = pytree.tree_map_only(
            Tensor,
            lambda x: x if isinstance(x, DTensor) else _torch.dtensor.replicated(x, mesh),
            (tuple(args), dict(kwargs)),
        )
        return _torch.dtensor.carry_out(earlier, operator, args, kwargs)
    if not plain:
        try:
            return _torch.dtensor.carry_out(earlier, operator, args, kwargs)
        except (RuntimeError, NotImplementedError):
            pass
    return _of_wholes(operator, args, kwargs)


def try_parts(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of ``DTensor``s, where torch may not know how they lie then: of whole ones, if so."""
    try:
        return _torch.dtensor.carry_out(earlier, operator, args, kwargs)
    except RuntimeError as error:
        sources, _ = _tensors_of(args, kwargs)
        if not (_torch.dtensor.is_unknown(error) and _are_here(sources)):
            raise
        return _of_wholes(operator, args, kwargs)


def convolve(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a convolution makes of whole tensors; torch's of parts is that of one part after the other, in silence,
    where a batch, a kernel or a length is cut."""
    sources, plain = _tensors_of(args, kwargs)
    if not _are_here(sources):
        return _torch.dtensor.carry_out(earlier, operator, args, kwargs)
    keep_kinds(plain)
    return _of_wholes(operator, args, kwargs)


def _of_wholes(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of whole tensors, which all ranks have then."""
    sources, plain = _tensors_of(args, kwargs)
    mesh = sources[0].device_mesh
    require_same(mesh, f"{operator} reads a DTensor and plain tensors", plain)
    wholes, named = pytree.tree_map_only(DTensor, _torch.dtensor.gather, (tuple(args), dict(kwargs)))
    return pytree.tree_map_only(Tensor, lambda x: _torch.dtensor.replicated(x, mesh), operator(*wholes, **named))


def _tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[DTensor], list[Tensor]]:
    """The ``DTensor``s among operands, and the plain tensors."""
    tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
    return [x for x in tensors if isinstance(x, DTensor)], [x for x in tensors if not isinstance(x, DTensor)]


def _are_here(sources: Sequence[DTensor]) -> bool:
    """Whether this rank can have the whole of each."""
    return all(map(can_gather, sources)) and not any(map(lies_elsewhere, sources))


def can_gather(tensor: Tensor) -> bool:
    """Whether a tensor lies on a mesh that models are compiled for."""
    return isinstance(tensor, DTensor) and agreement_over(tensor.device_mesh) is not None


def require_same(mesh: DeviceMesh, what: str, operands: Any) -> None:
    """Raises RankMismatchError on every rank where plain tensors among operands are not the same on all of them."""
    plain = [x for x in pytree.tree_leaves(operands) if isinstance(x, Tensor) and not isinstance(x, DTensor)]
    if plain:
        agree_on(mesh, what, *map(tensor_digest, plain))
