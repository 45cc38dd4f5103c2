"""Which tensors the files of a pretrained model hold, and where the model's own lie in them.

What a model keeps in one tensor its files may hold as many: a stack of experts is a matrix for each.  ``transformers``
knows how; it is shown tensors without values that note how they are cut, so that each rank writes and reads its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.checkpoint.folder import CheckpointError
from autoparallel.placements.regions import Region, whole_region


@dataclass(frozen=True)
class Piece:
    """A block of a tensor of the model, as it lies in a tensor of the files.

    Attributes:
        name: the model's tensor.
        region: the block, in the model's tensor.
        start: its first index in the file's.
        dims: for each dim of the file's tensor, that of the model's; in the others the block has size 1.
    """

    name: str
    region: Region
    start: tuple[int, ...]
    dims: tuple[int, ...]

    def within(self, part: Region) -> tuple[Region, Region] | None:
        """What of it lies in a part of the model's tensor: that block in the model's tensor, and in the file's."""
        common = self.region.overlap(part)
        if common is None:
            return None
        moved = [a - b for a, b in zip(common.start, self.region.start, strict=True)]
        start = tuple(first + moved[dim] for first, dim in zip(self.start, self.dims, strict=True))
        return common, Region(start, tuple(common.shape[dim] for dim in self.dims))

    def as_stored(self, block: Tensor) -> Tensor:
        """A block of the model's tensor as the file has it."""
        others = [dim for dim in range(block.dim()) if dim not in self.dims]
        return block.permute((*others, *self.dims)).reshape([block.shape[dim] for dim in self.dims])

    def as_own(self, block: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of :meth:`as_stored`."""
        others = [dim for dim in range(len(shape)) if dim not in self.dims]
        order = [*others, *self.dims]
        return block.reshape([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


@dataclass(frozen=True)
class Stored:
    """A tensor of the files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return whole_region(self.shape).numel * self.dtype.itemsize


def stored_tensors(plain: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """The tensors of a model's files as ``save_pretrained`` writes them, by name, in the order of the model.

    Args:
        tensors: the model's, each once.

    Raises:
        CheckpointError: where the files hold what is computed from the model's tensors, not cut out of them.
    """
    marks: dict[str, Any] = {name: _Mark.of(name, tensor) for name, tensor in tensors.items()}
    convert = _conversion_of(plain)
    if convert is not None:
        marks = convert(plain, marks)
    order = {name: i for i, name in enumerate(tensors)}
    marks = dict(sorted(marks.items(), key=lambda item: order[item[1].pieces[0].name]))
    return {name: Stored(mark.dtype, tuple(mark.shape), mark.pieces) for name, mark in marks.items()}


def _conversion_of(plain: nn.Module) -> Callable[..., dict[str, Any]] | None:
    """What makes the tensors of the files from those of a model of ``transformers``; None before its version 5."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    return revert_weight_conversion if isinstance(plain, PreTrainedModel) else None


class _Mark(Tensor):
    """A tensor without values that knows the blocks of the model's tensors that it consists of."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def of(name: str, tensor: Tensor) -> _Mark:
        whole = whole_region(tensor.shape)
        return _Mark.of_pieces(
            whole.shape, tensor.dtype, [Piece(name, whole, whole.start, tuple(range(len(whole.shape))))]
        )

    @staticmethod
    def of_pieces(shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece]) -> _Mark:
        mark: _Mark = Tensor._make_subclass(_Mark, torch.empty(tuple(shape), dtype=dtype, device="meta"))
        mark.pieces = tuple(pieces)
        return mark

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _NOTED:
            return _NOTED[name](*args, **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs or {})
        if any(isinstance(x, Tensor) for x in (result if isinstance(result, tuple | list) else (result,))):
            parameter = args[0].pieces[0].name if args and isinstance(args[0], _Mark) else "a parameter"
            raise CheckpointError(
                f"the files of this model hold {parameter} after a {name}, of which no rank can do its part alone: "
                "save with 'with model.whole() as plain: plain.save_pretrained(path)', load with from_pretrained "
                "before compile()"
            )
        return result


def _split(x: _Mark, sizes: int | Sequence[int], dim: int = 0) -> tuple[_Mark, ...]:
    dim, total = dim % x.dim(), x.shape[dim]
    lengths = [min(sizes, total - i) for i in range(0, total, sizes)] if isinstance(sizes, int) else list(sizes)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(_narrow(x, dim, start, length) for start, length in zip(starts, lengths, strict=True))


def _chunk(x: _Mark, chunks: int, dim: int = 0) -> tuple[_Mark, ...]:
    return _split(x, -(-x.shape[dim] // chunks), dim)


def _narrow(x: _Mark, dim: int, start: int, length: int) -> _Mark:
    pieces = []
    for piece in x.pieces:
        tensor_dim = piece.dims[dim]
        first = max(start, piece.start[dim])
        count = min(start + length, piece.start[dim] + piece.region.shape[tensor_dim]) - first
        if count > 0:
            begin = piece.region.start[tensor_dim] + first - piece.start[dim]
            region = Region(_set(piece.region.start, tensor_dim, begin), _set(piece.region.shape, tensor_dim, count))
            pieces.append(replace(piece, region=region, start=_set(piece.start, dim, first - start)))
    return _Mark.of_pieces(_set(x.shape, dim, length), x.dtype, pieces)


def _squeeze(x: _Mark, dim: int | None = None) -> _Mark:
    if dim is None:
        return reduce(_squeeze, reversed(range(x.dim())), x)
    dim %= x.dim()
    if x.shape[dim] != 1:
        return x
    pieces = [replace(p, start=_remove(p.start, dim), dims=_remove(p.dims, dim)) for p in x.pieces]
    return _Mark.of_pieces(_remove(x.shape, dim), x.dtype, pieces)


def _transpose(x: _Mark, dim0: int, dim1: int) -> _Mark:
    order = list(range(x.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    pieces = [
        replace(p, start=tuple(p.start[i] for i in order), dims=tuple(p.dims[i] for i in order)) for p in x.pieces
    ]
    return _Mark.of_pieces([x.shape[i] for i in order], x.dtype, pieces)


def _cat(parts: Sequence[_Mark], dim: int = 0) -> _Mark:
    dim %= parts[0].dim()
    pieces: list[Piece] = []
    end = 0
    for part in parts:
        pieces += [replace(p, start=_set(p.start, dim, p.start[dim] + end)) for p in part.pieces]
        end += part.shape[dim]
    return _Mark.of_pieces(_set(parts[0].shape, dim, end), parts[0].dtype, pieces)


def _identity(x: _Mark) -> _Mark:
    return x


_NOTED: dict[str, Callable[..., Any]] = {
    "split": _split,
    "chunk": _chunk,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "cat": _cat,
    "contiguous": _identity,
    "detach": _identity,
}
"""What transformers does to tensors where the parts of the ranks stay parts, by the names of torch."""


def _set(values: Sequence[int], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _remove(values: Sequence[int], place: int) -> tuple[int, ...]:
    return (*values[:place], *values[place + 1 :])
