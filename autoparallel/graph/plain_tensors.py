"""Tensors that a model holds without having registered them.

A plain attribute, or an entry of a dict that is one (``self.cache["cpu"]``), is read at every call like a buffer;
tensors in lists and objects are constants of the program, by reference: what is changed in them in place is seen.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autoparallel import _torch
from autoparallel.graph.labels import has_place, is_entry, label_in, label_of_entry, split_entry, step_from, steps_of
from autoparallel.graph.python_state import MISSING, is_data, is_plain
from autoparallel.graph.surroundings import SCRIPT, surroundings_of

LOSS = "the loss function"
"""The path of the loss function, beside those of a model's modules."""

REPLACED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""What ``compile()`` has put in the place of a plain parameter, which the model may hold in a list of its own, too."""


class PlainParameter(nn.Parameter):
    """A plain parameter in whose place ``compile()`` has put another: its values are no longer the model's.

    Attributes:
        path: its name in the model.
    """

    path: str

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy of the other, which a copy of a model has in its lists, too."""
        twin: torch.Tensor = copy.deepcopy(REPLACED[self], memo)
        return twin

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OF_FORM:
            return super().__torch_function__(func, types, args, kwargs or {})
        path = next(x.path for x in pytree.arg_tree_leaves(*args, **(kwargs or {})) if isinstance(x, cls))
        raise refused_plain(f"the plain parameter {path} is used")


def refused_plain(words: str) -> RuntimeError:
    """The error of what happens to a plain parameter that nobody trains any more."""
    return RuntimeError(
        f"{words}, in whose place compile() has put another, which is trained\n"
        "What to change: take parameters from the compiled model after compile() (params = "
        "list(model.parameters())); what shares one with it (a loss, a second model) becomes part of the model "
        "that is compiled."
    )


def _readers(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


OF_FORM = {
    torch.Tensor.__hash__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point,
    torch.Tensor.is_complex, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.is_contiguous,
    torch.Tensor.element_size, torch.Tensor.nelement,
    *_readers(
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_meta",
        "is_cpu", "is_cuda", "is_nested", "is_sparse", "itemsize", "nbytes", "_version", "_post_accumulate_grad_hooks",
        "_backward_hooks",
    ),
}  # fmt: skip
"""What tells of a tensor how it is, not what it holds."""


def note_replaced(parameter: nn.Parameter, new: nn.Parameter, path: str) -> None:
    """Notes what is in the place of a plain parameter from now on, of which only the form is told any more."""
    REPLACED[parameter] = new
    if type(parameter) is nn.Parameter:
        parameter.__class__ = PlainParameter
        parameter.__dict__["path"] = path


def held_unregistered(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[nn.Module]]:
    """What a model holds without having registered it: the tensors that are no parameters and no buffers, by where they
    are, in the model or around it; and the modules, as a teacher in a list, that share nothing with it, and are no part
    of it."""
    members = {*map(id, (*model.modules(), *_torch.tensors.parameters_of(model), *model.buffers()))}
    tensors: dict[str, torch.Tensor] = {}
    apart: list[nn.Module] = []
    for place, held in _held_beside(model, members):
        if isinstance(held, torch.Tensor):
            tensors[place] = held
        elif _is_apart(held, members):
            apart.append(held)
        else:
            state = (*held.named_parameters(), *held.named_buffers())
            tensors |= {f"{place}.{name}": x for name, x in state if id(x) not in members}
    return tensors, apart


def _is_apart(module: nn.Module, members: set[int]) -> bool:
    return members.isdisjoint(map(id, (*module.modules(), *module.parameters(), *module.buffers())))


def _held_beside(model: nn.Module, members: set[int]) -> Iterator[tuple[str, torch.Tensor | nn.Module]]:
    """The tensors and modules that a model holds, or what is looked after around it, but for its members, by where they
    are."""
    held = [(path, vars(module)) for path, module in model.named_modules()]
    for path, attributes in (*held, (SCRIPT, vars(surroundings_of(model).holder))):
        tables = {id(attributes.get(name)) for name in ("_parameters", "_buffers", "_modules")}
        for name, value in attributes.items():
            if id(value) not in tables and not (is_plain(value) or isinstance(value, list | dict) and not value):
                yield from _held_in(value, label_in(path, name), members, set())


def stand_in(tensor: torch.Tensor, memo: dict[int, Any], device: str) -> torch.Tensor:
    """What a copy of the model has in the place of a plain tensor; to be called in a fake mode.

    Args:
        device: where those are that are not on the CPU.
    """
    if tensor in REPLACED and id(REPLACED[tensor]) in memo:
        twin: torch.Tensor = memo[id(REPLACED[tensor])]
        return twin
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if tensor.is_cpu else device)


@dataclass(frozen=True)
class TrainedAttribute:
    """An attribute that holds a tensor with a gradient, which no optimizer of the model's parameters sees.

    Attributes:
        place: where the tensor is.
        results: by where they are, what has been computed of others, as by an earlier call; empty where the attribute
            holds a parameter, too.
    """

    place: str
    results: Mapping[str, torch.Tensor]


def trained_attributes(tensors: Mapping[str, torch.Tensor]) -> dict[str, TrainedAttribute]:
    """The attributes that hold tensors with a gradient."""
    trained: dict[str, dict[str, torch.Tensor]] = {}
    for place, tensor in tensors.items():
        if (tensor.requires_grad or isinstance(tensor, nn.Parameter)) and tensor not in REPLACED:
            trained.setdefault(re.split(r"\[", place)[0], {})[place] = tensor
    return {
        label: TrainedAttribute(next(iter(held)), held if all(x.grad_fn is not None for x in held.values()) else {})
        for label, held in trained.items()
    }


def _held_in(
    value: Any, label: str, members: set[int], visited: set[int]
) -> Iterator[tuple[str, torch.Tensor | nn.Module]]:
    if isinstance(value, MethodType):
        value, label = value.__self__, f"{label}.__self__"
    if id(value) in members or id(value) in visited:
        return
    if isinstance(value, torch.Tensor | nn.Module):
        yield label, value
        return
    visited.add(id(value))
    entries: Iterator[tuple[str, Any]]
    if isinstance(value, Mapping):
        entries = ((label_of_entry(label, key), x) for key, x in value.items())
    elif isinstance(value, list | tuple | set | deque):
        entries = ((label_of_entry(label, i), x) for i, x in enumerate(value))
    elif is_data(value) or isinstance(value, BasePruningMethod):  # a hook of torch's, which may keep its mask
        entries = ((f"{label}.{name}", x) for name, x in vars(value).items())
    else:
        return
    for place, entry in entries:
        yield from _held_in(entry, place, members, visited)


def not_copied(model: nn.Module) -> list[Any]:
    """What modules hold that cannot be copied: generators of random numbers, and custom operators."""
    kinds = (torch.Generator, torch.library.CustomOpDef)  # type: ignore[attr-defined]
    return [x for module in model.modules() for x in vars(module).values() if isinstance(x, kinds)]


def is_attribute(model: nn.Module, name: str) -> bool:
    """Whether a tensor is an attribute of a module that hides none of its class, or an entry of a dict that is one."""
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    if entry := _ENTRY.fullmatch(attribute):
        table = vars(module).get(entry[1])
        return type(table) is dict and any(
            label_of_entry(entry[1], key) == attribute and has_place(key) for key in table
        )
    return isinstance(vars(module).get(attribute), torch.Tensor) and not hasattr(type(module), attribute)


_ENTRY = re.compile(r"([^.\[]+)\[([^.]+)\]")


def make_buffer(model: nn.Module, name: str) -> None:
    """Makes a plain attribute of a copy a buffer, so that a trace takes it as an input; an entry of a dict, which stays
    there, becomes one as well."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    tensor = tensor_at(model, name)
    vars(module).pop(attribute, None)
    module.register_buffer(attribute, tensor, persistent=False)


def tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter, a buffer, or a tensor that is a plain attribute or an entry of one, by its path."""
    label, key = split_entry(name) if is_entry(name) else (name, None)
    path, _, attribute = label.rpartition(".")
    value = getattr(model.get_submodule(path), attribute)
    tensor: torch.Tensor = value if label == name else value[key]
    return tensor


def holder_of(model: nn.Module, path: str, loss_fn: Any = None) -> Any:
    """A module of a model, or of its loss function, or an object that one holds, by its path (``a.schedules[0]``); or
    one that functions hold (see ``surroundings``).

    Raises AttributeError or LookupError where there is none.
    """
    holder, _, rest = path.partition(".")
    root: Any = model
    if holder in (LOSS, SCRIPT):
        root, path = loss_fn if holder == LOSS else surroundings_of(model).holder, rest
    for is_to_entry, key in steps_of(path):
        root = step_from(root, is_to_entry, key)
    return root


def attribute_at(model: nn.Module, label: str, loss_fn: Any = None) -> Any:
    """What an attribute of such a holder, or an entry of one, is now; ``MISSING`` where it is gone."""
    if is_entry(label):
        try:
            return holder_of(model, label, loss_fn)
        except (AttributeError, LookupError, TypeError):  # or something else holds it
            return MISSING
    path, _, name = label.rpartition(".")
    try:
        return getattr(holder_of(model, path, loss_fn), name, MISSING)
    except LookupError:  # a list of which it was an entry is shorter now
        return MISSING


def rebind(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Puts a new tensor in the place of a buffer or of one that is a plain attribute."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    (module._buffers if attribute in module._buffers else vars(module))[attribute] = value
