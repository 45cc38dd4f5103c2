"""Parts of a tensor that are written to parts of the same tensor which they overlap: ``x[1:, :4] = x[:-1, :4]``.

Eager writes one element after the other, so that what it reads may be what it has just written, as the order of its
memory will have it; a trace reads all that was there before.  Where torch sees it, as it does for parts that are dense,
it raises an error; here, whoever writes so is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoparallel import _torch


def overlaps(written: Tensor, read: Tensor) -> bool:
    """Whether two tensors share some of their elements, but are not one and the same part."""
    if not _torch.tensors.share_storage(written, read):
        return False
    written, read = map(_torch.transforms.below_transforms, (written, read))
    ours, theirs = _terms_of(written), _terms_of(read)
    distance = _number(read.storage_offset()) - _number(written.storage_offset())
    if distance == 0 and ours == theirs:
        return False
    ranges: dict[int, tuple[int, int]] = {}
    for stride, last in ours:
        low, high = ranges.get(stride, (0, 0))
        ranges[stride] = low, high + last
    for stride, last in theirs:
        low, high = ranges.get(stride, (0, 0))
        ranges[stride] = low - last, high
    return _is_sum_of(distance, sorted(((s, *ends) for s, ends in ranges.items()), reverse=True))


def _terms_of(x: Tensor) -> list[tuple[int, int]]:
    """How far apart the elements along each dim are, and the last place along it."""
    sizes = [(_number(stride), _number(size) - 1) for stride, size in zip(x.stride(), x.shape, strict=True)]
    return [(stride, last) for stride, last in sizes if stride and last]


def _number(size: Any) -> int:
    """That of the call; of one that values tell, one."""
    return size.node.hint or 1 if isinstance(size, torch.SymInt) else int(size)


def _is_sum_of(distance: int, terms: list[tuple[int, int, int]]) -> bool:
    """Whether a distance is a sum of strides, each as often as its range says."""
    if not terms:
        return distance == 0
    (stride, low, high), *rest = terms
    least, most = sum(s * first for s, first, _ in rest), sum(s * last for s, _, last in rest)
    first, last = -((most - distance) // stride), (distance - least) // stride
    return any(_is_sum_of(distance - stride * n, rest) for n in range(max(low, first), min(high, last) + 1))
