"""Arrays of numpy that a call returns or keeps (``return out, attention.data.numpy()``): it gives out their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.graph.errors import note_raised


class Array:
    """Stands for the array of a tensor in a trace; what computes of it is refused.  Whole numbers may be taken out
    of it one by one, as those of the tensor.

    Attributes:
        tensor: without a gradient.
    """

    __array_ufunc__ = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __getitem__(self, key: Any) -> Any:
        return self.tolist()[key] if isinstance(key, int) else _refuse()

    def tolist(self) -> list[Any]:
        """The numbers of an array of one dim."""
        is_row = self.ndim == 1 and not (self.tensor.is_floating_point() or self.tensor.is_complex())
        return self.tensor.tolist() if is_row and self.tensor.dtype != torch.bool else _refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name[:2] == "__":
            raise AttributeError(name)
        _refuse()


def _refuse(*_: object, **__: object) -> NoReturn:
    error = RuntimeError(".numpy() is not supported in a trace, where something is computed of the array")
    note_raised(error)
    raise error


_SIDES = ("", "r", "i")
_OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_METHODS = (
    "array", "array_function", "setitem", "contains", "bool", "int", "float", "complex",
    "index", "neg", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "str", "repr", "format", "copy", "deepcopy",
    *(f"{side}{name}" for side in _SIDES for name in _OPERATIONS),
)  # fmt: skip
for _name in _METHODS:
    setattr(Array, f"__{_name}__", _refuse)


def _array_of(leaves: Iterable[Any], _: None) -> Any:
    """The array of a result; of what is kept of each result otherwise, what stands for it."""
    (value,) = leaves
    if not isinstance(value, torch.Tensor) or _torch.export.is_fake(value):
        return Array(value)
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().cpu().numpy()


pytree.register_pytree_node(Array, lambda array: ([array.tensor], None), _array_of)


def array_of(numpy: Callable[..., Any], tensor: torch.Tensor, force: bool = False) -> Any:
    """What ``Tensor.numpy`` gives in a trace.

    Args:
        numpy: the method, which raises where it cannot.
    """
    if not force and (tensor.requires_grad or tensor.is_conj() or tensor.is_neg()):
        return numpy(tensor)
    return Array(tensor.detach() if force else tensor)
