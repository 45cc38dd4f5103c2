"""How the steps of optimizers may be cut, and what their states are: known of torch's, told and tried of others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.optim import Optimizer

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


def lies_as(value: Any, name: Any, shape: Sequence[int], numbers: Numbers = NUMBERS) -> bool:
    """Whether a state is one of elements that belong to those of a parameter (or of its part) of a shape."""
    return isinstance(value, torch.Tensor) and value.shape == shape and (name, value.ndim) not in numbers


def numbers_of(optimizer: Optimizer) -> Numbers:
    """The states of an optimizer that are one number. Raises RuntimeError as :func:`try_elements` does."""
    return NUMBERS if is_torchs(step_of(type(optimizer))) else try_elements(optimizer)


def try_elements(optimizer: Optimizer) -> Numbers:
    """Steps on small tensors, as a whole and in two parts, to see that elements are updated by themselves.

    Returns:
        The states that are one number.

    Raises:
        RuntimeError: where a part is not updated as in the whole.
    """
    numbers: set[tuple[Any, int]] = set()
    for group in optimizer.param_groups:
        if group["params"]:
            like = _torch.dtensor.local_of(group["params"][0])
            value = torch.arange(1, 9, dtype=like.dtype, device=like.device).reshape(4, 2)
            size = torch.tensor([[1.0], [-1.0], [50.0], [100.0]], dtype=like.dtype, device=like.device)
            runs = [(value / 4)[i:j].clone() for i, j in ((0, 4), (0, 2), (2, 4))]
            grads = [(value.flip(0) * size)[i:j] for i, j in ((0, 4), (0, 2), (2, 4))]
            states = [_try(optimizer, group, *run) for run in zip(runs, grads, strict=True)]
            values: dict[Any, list[Any]] = {"parameter": runs, **{n: [s.get(n) for s in states] for n in states[0]}}
            for name, (whole, *parts) in values.items():
                if lies_as(whole, name, (4, 2)) and all(lies_as(x, name, (2, 2)) for x in parts):
                    parts = [torch.cat(parts)]
                elif isinstance(whole, torch.Tensor):
                    numbers.add((name, whole.ndim))
                if not all(_are_close(whole, part) for part in parts):
                    raise RuntimeError(
                        f"{type(optimizer).__name__} is registered per='element', but has updated elements otherwise "
                        f"together than apart (its {name!r}): register it per='parameter', or not at all, where it "
                        "depends on several parameters or on random numbers"
                    )
    return frozenset(numbers)


def _try(optimizer: Optimizer, group: dict[str, Any], value: torch.Tensor, grad: torch.Tensor) -> dict[Any, Any]:
    """The states of a small tensor after two steps that change it."""
    twin = twin_of(optimizer)
    options = copy.deepcopy({name: x for name, x in group.items() if name != "params"})
    if isinstance(options.get("lr"), float):
        options["lr"] = 0.1  # it may start at 0
    twin.param_groups = [{**options, "params": [value]}]
    for _ in range(2):
        value.grad = grad.clone()
        step_of(type(optimizer))(twin)
    states: dict[Any, Any] = twin.state[value]
    return states


def _are_close(a: Any, b: Any) -> bool:
    try:
        torch.testing.assert_close(a, b)
    except AssertionError:
        return False
    return True
