"""Tensors: those among nested values, their memory, their versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from autoparallel._torch.transforms import below_transforms

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})


def parameters_of(model: torch.nn.Module) -> Iterable[torch.nn.Parameter]:
    """All parameters of a model, also where its class has a ``parameters()`` that gives an optimizer some of them."""
    return torch.nn.Module.parameters(model)


def named_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a model, those that are tied by each of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def sorted_buffers(model: torch.nn.Module, remove_duplicate: bool = True) -> list[tuple[str, torch.Tensor]]:
    """The buffers of a model by name, in an order that all ranks have: a module may have registered them in that of a
    set of strings, which each process has its own of."""
    return sorted(model.named_buffers(remove_duplicate=remove_duplicate), key=lambda entry: entry[0])


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that hold what a tensor does: itself, or the places and the values of a sparse one."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among nested values, in their order; what operators read and make is looked at very often."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        values = pytree.tree_leaves(values) if type(values) in pytree.SUPPORTED_NODES else ()
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif type(value) not in _PLAIN:
            tensors += tensors_in(value)
    return tensors


def bytes_in(values: Any) -> int:
    """The size of all tensors among nested values."""
    return sum(x.nbytes for x in tensors_in(values))


swap_tensors = FunctionType(
    torch.utils.swap_tensors.__code__,
    vars(torch.utils) | {"weakref": SimpleNamespace(getweakrefs=lambda tensor: [])},
)
"""``torch.utils.swap_tensors``, also where there are weak references to a tensor, as recurrent layers have to their
weights: they refer to the Python object, which stays what it is."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as a flat one of bytes, on its device; a contiguous one's is its memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() == 1:  # torch takes a single one for contiguous whatever its stride, but does not view it then
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors of one dtype together, as operators on lists want them."""
    if len(set(map(attrgetter("dtype"), tensors))) == 1:  # a third of the time
        return [list(tensors)]
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors in place by a scalar, of their own dtype."""
    for alike in by_dtype(tensors):
        torch._foreach_mul_(alike, factor.to(alike[0].dtype))


def memory_span(tensor: torch.Tensor) -> tuple[str, int, int]:
    """The device and the first and the last address (exclusive) of a tensor's elements; no address if it has none."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return str(tensor.device), 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the elements of tensors of one dtype, one behind the other; one call takes half the time of many."""
    if len(tensors) == 1:  # of one, torch makes no copy
        return torch.cat([tensors[0].reshape(-1)])
    return torch._C._nn.flatten_dense_tensors(list(tensors))


def split_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of what is as long as some tensors together, in their shapes."""
    parts = torch._C._nn.unflatten_dense_tensors(flat, list(tensors))
    # Of a tensor without elements some versions of torch leave the shape out.
    return [part if part.numel() else part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each of many tensors has been changed in place."""
    with torch._C.DisableTorchFunctionSubclass():
        return [t._version for t in tensors]


def grads_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """What ``.grad`` is of many tensors at once; looking for an override of it takes longer than reading it."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(attrgetter("grad"), tensors))


def function_modes() -> tuple[object, ...]:
    """The ``TorchFunctionMode``s that are entered, from the outside in, each by its class and what it holds: they see,
    and may change, what a model calls."""
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return tuple([(type(mode).__qualname__, *map(_describe, sorted(vars(mode).items()))) for mode in modes])


def _describe(attribute: tuple[str, Any]) -> tuple[str, str]:
    name, value = attribute
    is_shown = isinstance(value, int | float | str | torch.device | torch.dtype | None)
    return name, repr(value) if is_shown else type(value).__qualname__


storage_mark: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
"""A number of a tensor's storage, which no other has while there is a reference to that, a weak one at least."""


def memory_mark(tensor: torch.Tensor) -> int:
    """A number of the storage in which a tensor lies, below what transforms of ``torch.func`` show; 0 where there is
    none, as for a sparse tensor."""
    tensor = below_transforms(tensor)
    return storage_mark(tensor) if torch._C._has_storage(tensor) else 0


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; 0 of one of inference mode, which does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return memory_mark(one) == memory_mark(other) != 0


def count_references(tensor: torch.Tensor) -> int:
    """How many refer to a tensor's storage: at least the tensors that lie in it, itself among them."""
    return int(torch._C._storage_Use_Count(storage_mark(tensor)))


def storage_marks(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Numbers of the storages of tensors; a ``DTensor``'s own has no memory to compare."""
    return list(map(storage_mark, tensors))


def first_byte(tensor: torch.Tensor) -> int:
    """Where a tensor begins in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize


@dataclass(frozen=True)
class View:
    """How a tensor lies in memory, without where that is."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> View:
        return View(tensor.size(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def at(self, base: torch.Tensor, offset: int) -> torch.Tensor:
        """The tensor that lies so in another's memory, which it shares where that is aligned for it.

        Args:
            offset: from where ``base`` begins, in bytes.
        """
        start = first_byte(base) + offset
        if base.dtype == self.dtype:
            view = base.as_strided(self.size, self.stride, start // self.dtype.itemsize)
        else:
            if start % self.dtype.itemsize:
                base, start = base.clone(), offset
            view = torch.empty(0, dtype=self.dtype, device=base.device)
            view.set_(base.untyped_storage(), start // self.dtype.itemsize, self.size, self.stride)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


__all__ = ["StorageWeakRef"]  # torch's own, handed on
