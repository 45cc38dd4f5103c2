"""The steps of torch's optimizers, and their hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where an optimizer keeps what is called before and after its steps."""

FILLER = "_init_group"
"""What gathers a group's tensors in the steps of torch's optimizers."""


def drop_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Leaves an object that shares another optimizer's hooks without any."""
    for name in STEP_HOOKS:
        setattr(optimizer, name, OrderedDict())


def call_innermost(optimizer: torch.optim.Optimizer, before: Any, after: Any) -> Callable[[], None]:
    """Has hooks called right before and right after an optimizer's step, all others outside of them; returns what
    removes them, when no hook is being called."""
    first: Any = optimizer._optimizer_step_pre_hooks
    last: Any = optimizer._optimizer_step_post_hooks
    first[_INNERMOST], last[_INNERMOST] = before, after
    last.move_to_end(_INNERMOST, last=False)

    def remove() -> None:
        first.pop(_INNERMOST, None)
        last.pop(_INNERMOST, None)

    return remove


Overflows = Mapping[torch.device, torch.Tensor]
"""Whether some of an optimizer's gradients are not finite, by device; no device where it has no gradient."""


def on_unscaling(scaler: torch.amp.GradScaler, change: Callable[[Overflows], Overflows]) -> None:
    """Has what a gradient scaler finds in an optimizer's gradients go through a function."""
    unscale: Any = scaler._unscale_grads_

    def unscale_and_change(_: torch.amp.GradScaler, *arguments: Any) -> Overflows:
        return change(unscale(*arguments))

    unscale_and_change.__name__ = "_unscale_grads_"  # which a pickled scaler has of its class
    scaler._unscale_grads_ = MethodType(unscale_and_change, scaler)  # type: ignore[method-assign]


_INNERMOST = -1
"""Among an optimizer's hooks, which torch numbers from 0."""


class Filled(NamedTuple):
    """What the step of one of torch's optimizers has gathered from a group before it updates.

    Attributes:
        params: the parameters that have gradients.
        rest: what belongs to them, beside the gradients.
        result: what else it has found out.
    """

    params: list[Any]
    rest: list[list[Any]]
    result: Any


def filler_of(kind: type[torch.optim.Optimizer]) -> Any:
    """See ``FILLER``; None where a class of optimizers has no such thing."""
    return getattr(kind, FILLER, None)


def note_filled(optimizer: torch.optim.Optimizer, into: list[Filled]) -> None:
    """Has an optimizer's next step note what it gathers from each group."""
    itself, filler = ref(optimizer), filler_of(type(optimizer))

    def fill(group: dict[str, Any], params: list[Any], grads: list[Any], *rest: list[Any]) -> Any:
        result = filler(itself(), group, params, grads, *rest)
        into.append(Filled(list(params), [list(some) for some in rest], result))
        return result

    setattr(optimizer, FILLER, fill)


def refill(optimizer: torch.optim.Optimizer, filled: Sequence[Filled], grads: Sequence[list[Any]]) -> None:
    """Hands an optimizer's next step what was noted, with other gradients, instead of having it gathered."""
    groups = zip(filled, grads, strict=True)

    def fill(_: dict[str, Any], params: list[Any], into: list[Any], *rest: list[Any]) -> Any:
        noted, new = next(groups)
        params += noted.params
        into += new
        for some, values in zip(rest, noted.rest, strict=True):
            some += values
        return noted.result

    setattr(optimizer, FILLER, fill)
