"""The twin of an optimizer, on which its step runs.

[Note: a step on a twin] ``DTensor``s pay dispatch for every operator and parameter, and miss some operators.  So the
step that torch or the user wrote runs with a twin in place of the optimizer: an object of the same class with the same
attributes, whose groups hold this rank's plain tensors and whose states are by these.  It is handed to ``step`` as its
``self`` by a hook, after all other hooks that come before a step, and what it has made is taken back before all hooks
that come after one.  The optimizer itself always holds ``DTensor``s, also where the step raises.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoparallel import _torch
from autoparallel._torch.optim import FILLER, STEP_HOOKS
from autoparallel.comm.collectives import settled
from autoparallel.runtime.parameters.slices import gradient_as

BATCH_BYTES = 64 << 20
"""Of the parameters, as much as a rank has of them, that are updated at a time, where not all are at once."""


def step_of(kind: type[Optimizer]) -> Any:
    """The function that a class's ``step`` is, without what torch puts around it; a subclass may share it."""
    return _unwrapped(kind.step)


_unwrapped = lru_cache(inspect.unwrap)


def twin_of(optimizer: Optimizer) -> Optimizer:
    """See [Note: a step on a twin]; without parameters and states."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    _torch.optim.drop_step_hooks(twin)
    for name in ("grad_scale", "found_inf"):
        value = getattr(twin, name, None)
        if isinstance(value, DTensor):
            setattr(twin, name, value.full_tensor())
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return twin


def fill(twin: Optimizer, optimizer: Optimizer, state: Any, lists: Iterable[list[torch.Tensor]]) -> None:
    """Gives a twin what it steps on, after the closure that may change a group or lay parameters out; ``lists`` are the
    parameters of each group."""
    twin.state = state
    for group, options, parameters in zip(twin.param_groups, optimizer.param_groups, lists, strict=True):
        group.update(options, params=parameters)


def step_on(optimizer: Optimizer, state: Any, lists: Iterable[list[torch.Tensor]]) -> Optimizer:
    """Steps on other tensors than the optimizer's own; the arguments are those of :func:`fill`. Returns the twin."""
    twin = twin_of(optimizer)
    fill(twin, optimizer, state, lists)
    step_of(type(optimizer))(twin)
    return twin


def take_back(optimizer: Optimizer, twin: Optimizer) -> None:
    """Gives the optimizer what a step has set on its twin, beside states and parameters."""
    attributes = optimizer.__dict__
    for name, value in attributes_of(twin).items():
        if attributes.get(name, _OF_TWINS) is not value:
            attributes[name] = value
    for group, stepped in zip(optimizer.param_groups, twin.param_groups, strict=True):
        group.update((key, value) for key, value in stepped.items() if key != "params")


def attributes_of(twin: Optimizer) -> dict[str, Any]:
    """What a step may have set on a twin, beside states and groups."""
    return {name: value for name, value in twin.__dict__.items() if name not in _OF_TWINS}


_OF_TWINS = frozenset({"state", "param_groups", "grad_scale", "found_inf", FILLER, *STEP_HOOKS})


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient as the parameter lies, this rank's part of it (see ``gradient_as``)."""
    grad = parameter.grad
    if grad is None or not isinstance(parameter, DTensor):
        return grad
    return settled(gradient_as(grad, _torch.dtensor.spec_of(parameter)))
