"""``DTensor``s without the time that their public functions take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils import _pytree as pytree


def make_spec(
    mesh: DeviceMesh, placements: tuple[DTensorPlacement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """The description of a contiguous ``DTensor``, made once and shared by all tensors that fit it."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(strides), dtype))


def wrap_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A ``DTensor`` around a rank's local tensor, without any check or communication.

    ``DTensor.from_local`` costs 50 to 100 us a call, and a step makes one for every parameter.  ``__init__`` does
    nothing, but what Dynamo is told of it takes longer than the rest.  One that begins where its part does in other
    memory, as that of a gradient which is reduced together with others, torch can neither copy deeply nor pickle.
    """
    if not local.storage_offset():
        return DTensor.__new__(DTensor, local, spec, requires_grad=False)
    tensor = DTensor.__new__(DTensor, local.new_empty(0), spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


def from_part(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[DTensorPlacement, ...], shape: Sequence[int]
) -> DTensor:
    """A contiguous ``DTensor`` of a shape, of which this rank has ``local``."""
    return wrap_local(local, make_spec(mesh, placements, torch.Size(shape), local.dtype))


def become_parameter(tensor: DTensor, requires_grad: bool) -> nn.Parameter:
    """A new ``DTensor`` as a parameter.  ``nn.Parameter`` would detach it, and that gives a tensor of the CPU on ranks
    that are not on its mesh."""
    tensor.requires_grad_(requires_grad)
    tensor._is_param = True
    return cast(nn.Parameter, tensor)


def gather(tensor: DTensor) -> torch.Tensor:
    """The whole of a ``DTensor``, without a gradient; ``full_tensor`` is for callers above autograd, as handlers of
    operators are not.  What lies whole is given itself."""
    spec = tensor._spec
    whole = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    gathered = redistribute_local_tensor(tensor._local_tensor, spec, whole)
    return gathered.wait() if isinstance(gathered, AsyncCollectiveTensor) else gathered


def replicated(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A ``DTensor`` of which every rank has all; the inverse of :func:`gather`."""
    return from_part(value.contiguous(), mesh, (Replicate(),) * mesh.ndim, value.shape)


def lies_in_parts(tensor: DTensor) -> bool:
    """Whether every rank has a part of a tensor as it stands there, or all of it: one range of rows, columns and so
    on, not a summand, a norm or a maximum of its own, nor pieces from here and there (of a flattened tensor)."""
    return all(type(p) in (Shard, Replicate) for p in tensor.placements)


@cache
def check_full_tensor(check: Callable[[DTensor], None]) -> None:
    """Has ``check`` see every ``DTensor`` whose ``full_tensor()`` is called, before anything is gathered."""
    full_tensor = DTensor.full_tensor

    @wraps(full_tensor)
    def checked(tensor: DTensor, **options: Any) -> torch.Tensor:
        check(tensor)
        return full_tensor(tensor, **options)

    DTensor.full_tensor = checked  # type: ignore[method-assign, assignment]


@cache
def handle_assignments(assign: Callable[[Callable[..., None], DTensor, torch.Tensor], None]) -> None:
    """Has ``x.data = value`` of every ``DTensor`` carried out by ``assign``, which is given torch's own way first: that
    leaves the local tensor as it is."""
    data = vars(torch._C.TensorBase)["data"]
    DTensor.data = property(data.__get__, partial(assign, data.__set__))  # type: ignore[assignment]


def set_methods(**methods: Callable[..., Any]) -> None:
    """Gives ``DTensor`` methods in the place of those that it inherits from plain tensors."""
    for name, method in methods.items():
        setattr(DTensor, name, method)


def become(tensor: DTensor, other: DTensor) -> None:
    """Has a ``DTensor`` lie as another of its shape does, and share its memory."""
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


def change_form(operator: Any, tensor: DTensor, rest: Sequence[Any], view: DTensor) -> None:
    """Has a ``DTensor`` be as a view of it, by the operator which gives a plain tensor that shape in place."""
    with torch._C._DisableTorchDispatch():
        operator(tensor, *rest)
    become(tensor, view)


class _Unreadable(torch.Tensor):
    """A tensor without memory, all use of which raises."""

    words: str

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(next(x.words for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)))


def make_unreadable(tensor: DTensor, words: str) -> None:
    """Has everything that is computed of a ``DTensor`` raise RuntimeError with these words."""
    local = tensor._local_tensor
    unreadable = torch.Tensor._make_wrapper_subclass(_Unreadable, local.shape, dtype=local.dtype, device=local.device)
    unreadable.words = words
    tensor._local_tensor = unreadable


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A ``DTensor``'s local tensor itself, not a differentiable view of it; a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """The description of a ``DTensor``."""
    return tensor._spec


def locals_of(tensors: Sequence[Any]) -> list[Any]:
    """The local tensors of many ``DTensor``s at once; None where something else stands."""
    return _attributes(tensors, "_local_tensor")


def specs_of(tensors: Sequence[Any]) -> list[Any]:
    """The descriptions of many ``DTensor``s at once; None where something else stands."""
    return _attributes(tensors, "_spec")


def _attributes(tensors: Sequence[Any], name: str) -> list[Any]:
    try:
        return list(map(attrgetter(name), tensors))
    except AttributeError:
        return [getattr(t, name, None) for t in tensors]


def mesh_without_groups(
    device_type: str, ranks: torch.Tensor, names: tuple[str, ...], rank: int | None = None
) -> DeviceMesh:
    """A mesh that nothing is communicated to make, and over which nothing can be sent.

    Args:
        rank: the one that stands here; None for this process's own.  On a mesh of other ranks ``DTensor``s are empty.
    """
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def random_operators() -> list[Any]:
    """The operators that draw random numbers on ``DTensor``s."""
    return list(DTensor._op_dispatcher._random_ops)


def collective_operators() -> list[Any]:
    """The operators by which ``torch.distributed`` sends tensors."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::"))
    operators = [getattr(torch.ops.c10d, name.removeprefix("c10d::").partition(".")[0]).default for name in names]
    return [operator for operator in operators if any("Tensor" in str(x.type) for x in operator._schema.arguments)]


def list_operators() -> list[Any]:
    """The operators on lists of tensors."""
    return operators_of(name for name in _names() if name.startswith("_foreach_"))


def operators_on_several() -> list[Any]:
    """The operators that make a tensor, or tell whether something holds, of several tensors, and write to none, but for
    those on lists."""
    names = [name for name in _names() if not name.startswith("_foreach_") and name not in _OF_FORM_ALONE]
    return [operator for operator in operators_of(names) if _takes_several(operator._schema)]


_OF_FORM_ALONE = ("is_same_size", "is_set_to", "result_type", "can_cast")


def pure_operators() -> list[Any]:
    """The operators that make new tensors of some, and draw none."""
    names = [name for name in _names() if not name.endswith("_") and not name.startswith("_foreach_")]
    return [operator for operator in operators_of(names) if _is_pure(operator)]


def is_unknown(error: Exception) -> bool:
    """Whether an operator of ``DTensor``s raised because torch does not know how its results lie, as on all ranks."""
    return isinstance(error, NotImplementedError) or "Sharding propagation failed" in str(error)


def _is_pure(operator: Any) -> bool:
    """Whether an operator makes new tensors of those that it takes, and draws none."""
    schema = operator._schema
    kinds = {str(result.type) for result in schema.returns}
    return (
        any("Tensor" in str(argument.type) for argument in schema.arguments)
        and all(x.alias_info is None for x in (*schema.arguments, *schema.returns))
        and bool(kinds)
        and kinds <= {"Tensor"}
        and torch.Tag.nondeterministic_seeded not in operator.tags
    )


def _takes_several(schema: torch._C.FunctionSchema) -> bool:
    operands = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
    is_written = any(argument.alias_info is not None for argument in operands)
    results = {str(result.type) for result in schema.returns}
    return len(operands) > 1 and not is_written and bool(results) and results <= {"Tensor", "bool"}


def names_in_place() -> list[str]:
    """The names of the operators that write to their first operand; some write what it is, not what it holds."""
    names = [name for name in _names() if name.endswith("_") and not name.startswith("_")]
    return [name for name in names if name not in _OF_FORM and "sparse" not in name]


@cache
def _names() -> list[str]:
    """The names of torch's operators; ``dir(torch.ops.aten)`` has those that somebody has asked for."""
    names = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    return sorted({name.removeprefix("aten::") for name in names if name.startswith("aten::")})


_OF_FORM = (
    "as_strided_", "detach_", "rename_", "requires_grad_", "resize_", "resize_as_", "resize_as_sparse_", "set_",
    "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
)  # fmt: skip


def operators_of(names: Iterable[str]) -> list[Any]:
    """The operators of some names, but for those that are given where to write."""
    return [operator for name in names for operator in _overloads_of(name) if not _is_given_outs(operator)]


def _overloads_of(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, kind) for kind in packet.overloads()]


def _is_given_outs(operator: Any) -> bool:
    return any(argument.is_out for argument in operator._schema.arguments)


@cache
def writing_operators() -> dict[Any, Any]:
    """The operators that are given where to write, each with the one that gives the same results as new tensors."""
    writing: dict[Any, Any] = {}
    for name in _names():
        if not (name.endswith("_") or name.startswith("_foreach_")):
            functional = {_operands(operator): operator for operator in operators_of([name])}
            outs = {operator: functional.get(_operands(operator)) for operator in _outs_of(name)}
            writing |= {operator: form for operator, form in outs.items() if form is not None}
    return writing


def _outs_of(name: str) -> list[Any]:
    """The operators of a name that are given where to write."""
    return [operator for operator in _overloads_of(name) if _is_given_outs(operator)]


def _operands(operator: Any) -> tuple[tuple[str, str], ...]:
    """The names and types of what an operator reads."""
    return tuple((argument.name, str(argument.type)) for argument in operator._schema.arguments if not argument.is_out)


def filling_operators() -> list[Any]:
    """The operators that fill a tensor which they are given, of numbers alone."""
    operators = [
        x for name in ("arange", "eye", "full", "linspace", "logspace", "ones", "zeros") for x in _outs_of(name)
    ]
    return [operator for operator in operators if not any("Tensor" in kind for _, kind in _operands(operator))]


def handle_operators(operators: Iterable[Any], handler: Callable[..., Any]) -> None:
    """Has ``handler(operator, args, kwargs)`` compute what operators make of ``DTensor``s, unless another does."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for operator in operators:
        handlers.setdefault(operator, handler)


def carry_out(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """What ``earlier`` makes of an operator on ``DTensor``s, if there is one (see ``handle_first``), or else torch."""
    if earlier is not None:
        return earlier(operator, args, kwargs)
    with leave_to_torch(operator):
        return operator(*args, **kwargs)


def handle_first(operators: Iterable[Any], handler: Callable[..., Any]) -> None:
    """Has ``handler(earlier, operator, args, kwargs)`` compute what operators make of ``DTensor``s; ``earlier`` is what
    did before, if another has been made to."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for operator in operators:
        handlers[operator] = partial(handler, handlers.get(operator))


_LOCK = threading.RLock()


@contextmanager
def leave_to_torch(operator: Any) -> Iterator[None]:
    """Inside, torch computes what an operator makes of ``DTensor``s, whatever handles it otherwise."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    with _LOCK:  # another thread may be here, too
        handler = handlers.pop(operator)
        try:
            yield
        finally:
            handlers[operator] = handler


__all__ = ["DTensorSpec"]  # torch's own, handed on
