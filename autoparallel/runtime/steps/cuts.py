"""How the steps of optimizers may be cut, and what their states are: known of torch's, told and tried of others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.runtime.steps.twins import step_of, twin_of

O = TypeVar("O", bound=type[Optimizer])  # noqa: E741
Part = Literal["element", "parameter"]

Numbers = frozenset[tuple[Any, int]]
"""The names and dims of states that are one number whatever their parameter is."""

NUMBERS: Numbers = frozenset({("step", 0), ("eta", 0), ("mu", 0), ("mu_product", 0)})
"""Those of torch's optimizers."""

_KNOWN: dict[Any, Part] = {}


def register_optimizer(kind: O, *, per: Part) -> O:
    """Says of an optimizer of your own how its step may be cut; ``torch.optim``'s are known.

    Args:
        kind: the class.  Its ``step`` reads ``self.param_groups``, ``.grad`` and ``self.state[parameter]``, and changes
            parameters in place.
        per: ``"element"`` where an element's update depends on that element's value, gradient and states alone, and
            states are as large as the parameter or one number: each rank updates what it has, in plain tensors.  It
            is tried once for each optimizer, on small tensors as a whole and in parts.
            ``"parameter"`` where it depends on the whole parameter's, but on no other parameter: each parameter is
            updated by one rank, which is sent what it needs.  Its states are tensors and numbers, all of them made by
            its first step on a gradient.

    Returns:
        The class, so that it can be used as a decorator with ``functools.partial``.

    Raises:
        TypeError: for what is not a class of optimizers.
        ValueError: for another ``per``.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"register_optimizer() takes a class of torch.optim.Optimizer, got {kind!r}")
    if per not in ("element", "parameter"):
        raise ValueError(f"per must be 'element' or 'parameter', got {per!r}")
    _KNOWN[step_of(kind)] = per
    return kind


def part_of(optimizer: Optimizer) -> Part | None:
    """What an optimizer's step may be cut into; None where nothing is known, and torch steps on ``DTensor``s."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    return _KNOWN.get(step_of(type(optimizer)))


def is_torchs(function: Any) -> bool:
    """Whether a function is one of ``torch.optim``."""
    return str(getattr(function, "__module__", "")).startswith("torch.optim.")


for _name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop"):
    register_optimizer(getattr(torch.optim, _name), per="element")
for _name in ("Muon", "Adafactor"):
    register_optimizer(getattr(torch.optim, _name), per="parameter")


_OF_ELEMENTS = frozenset(step for step, per in _KNOWN.items() if per == "element")
"""Of torch's, whose states are known."""


def lies_as(value: Any, name: Any, shape: Sequence[int], numbers: Numbers = NUMBERS) -> bool:
    """Whether a state is one of elements that belong to those of a parameter (or of its part) of a shape."""
    return isinstance(value, torch.Tensor) and value.shape == shape and (name, value.ndim) not in numbers


def numbers_of(optimizer: Optimizer) -> Numbers:
    """The states of an optimizer that are one number. Raises RuntimeError as :func:`try_elements` does."""
    return NUMBERS if step_of(type(optimizer)) in _OF_ELEMENTS else try_elements(optimizer)


def try_elements(optimizer: Optimizer) -> Numbers:
    """Steps on small tensors, as a whole and in two parts, to see that elements are updated by themselves.

    Returns:
        The states that are one number.

    Raises:
        RuntimeError: where a part is not updated as in the whole, or cannot be.
    """
    numbers: set[tuple[Any, int]] = set()
    for group in optimizer.param_groups:
        if group["params"]:
            like = _torch.dtensor.local_of(group["params"][0])
            value = torch.arange(1, 9, dtype=like.dtype, device=like.device).reshape(4, 2) / 4
            grads: list[torch.Tensor] = []
            try:
                runs = [_try(optimizer, group, value[part].clone(), part, grads) for part in _PARTS]
            except Exception as error:
                raise RuntimeError(
                    f"{type(optimizer).__name__} is registered per='element', but its step fails on small plain "
                    f"tensors ({type(error).__name__}: {error})\nWhat to change: register it per='parameter', or not "
                    "at all"
                ) from error
            for name, whole in runs[0].items():
                parts: list[Any] = [run.get(name) for run in runs[1:]]
                if lies_as(whole, name, (4, 2)) and all(lies_as(x, name, (2, 2)) for x in parts):
                    parts = [torch.cat(parts)]
                elif isinstance(whole, torch.Tensor):
                    numbers.add((name, whole.ndim))
                if not all(are_same(whole, part, _is_close) for part in parts):
                    raise RuntimeError(
                        f"{type(optimizer).__name__} is registered per='element', but has updated elements otherwise "
                        f"together than apart (its {name!r}): register it per='parameter', or not at all, where it "
                        "depends on several parameters or on random numbers"
                    )
    return frozenset(numbers)


_PARTS = (slice(0, 4), slice(0, 2), slice(2, 4))


def _try(
    optimizer: Optimizer, group: dict[str, Any], value: torch.Tensor, part: slice, grads: list[torch.Tensor]
) -> dict[Any, Any]:
    """What a few steps make of a small tensor: the states, the tensor itself, and the options of its group.

    Args:
        grads: those of all elements, step by step; filled by the run on all of them.
    """
    twin = twin_of(optimizer)
    options = copy.deepcopy({name: x for name, x in group.items() if name != "params"})
    if isinstance(options.get("lr"), float):
        options["lr"] = 0.1  # it may start at 0
    twin.param_groups = [{**options, "params": [value]}]
    for step in range(_STEPS):
        if len(grads) == step:
            grads.append(_gradient(step, value))
        value.grad = grads[step][part].clone()
        step_of(type(optimizer))(twin)
    changed = {f"{name} of its group": x for name, x in numbers_in(twin.param_groups[0]).items()}
    return {"parameter": value, **twin.state[value], **changed}


_STEPS = 5


def _gradient(step: int, value: torch.Tensor) -> torch.Tensor:
    """Gradients that show what a step reads beyond an element: of several sizes and directions, in one step at a right
    angle to the parameter where its parts are not (as AdamP looks for), in another far greater than those before (as
    clipping does)."""
    size = torch.tensor([[1.0], [-1.0], [50.0], [100.0]], dtype=value.dtype, device=value.device)
    if step == 2:
        squares = value.square()
        return torch.cat([value[:2], value[2:] * -(squares[:2].sum() / squares[2:].sum())])
    return value.flip(0) * size * (1, 1, 0, 30, -0.1)[step]


def numbers_in(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that are numbers, or hold some."""
    options = {name: x for name, x in group.items() if name != "params"}
    return {
        name: x
        for name, x in options.items()
        if any(isinstance(leaf, torch.Tensor | int | float) for leaf in pytree.tree_leaves(x))
    }


def are_same(a: Any, b: Any, is_same: Callable[[Any, Any], bool]) -> bool:
    """Whether two values of an optimizer, which may be lists or dicts of others, consist of the same."""
    leaves, form = pytree.tree_flatten(a)
    others, other_form = pytree.tree_flatten(b)
    return form == other_form and all(map(is_same, leaves, others))


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6) or a != a and b != b
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return bool(a == b)
    try:
        torch.testing.assert_close(a, b)
    except AssertionError:
        return False
    return True
