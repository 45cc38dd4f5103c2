"""The outputs of a call, as the user is given them: the boundary between a program and what is done with them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.graph.captured import Captured
from autoparallel.runtime.gradients.accumulation import Weight
from autoparallel.runtime.gradients.backwards import require_single
from autoparallel.runtime.gradients.store import GradientStore


class Entry:
    """The inputs of one call that are differentiated: what has made them is given the gradients of the loss on which
    ``backward()`` was called, not what a window of ``accumulate()`` multiplies those with that enter the program.

    Attributes:
        factor: that number, where a gradient has entered.
    """

    factor: Any = None

    def take(self, value: Any) -> Any:
        """A value as the program is given it."""
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return _Taken.apply(self, value)
        return value


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, entry: Entry, value: torch.Tensor) -> torch.Tensor:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (grad,), factor = grads, ctx.entry.factor
        if grad is None or factor is None:
            return None, grad
        if isinstance(factor, torch.Tensor):  # of a microbatch that weighs nothing all gradients are zero
            factor = torch.where(factor == 0, 1, factor)
        return None, (grad / (factor or 1.0)).to(grad.dtype)


class Delivery:
    """The outputs of one call, which the user may differentiate together or one by one.

    Args:
        store: where gradients go; the window of ``accumulate()`` that it has now is the call's.
        captured: the graph, whose outputs they are.
        weight: what the call weighs there.
        nonzero: for a loss, by its index, whether it weighs something, where the program leaves a division by zero out.
        used: the names of the parameters that the call used.
        why_once: why they can be differentiated once only; empty where they can be twice.
        entry: the call's inputs, in a window of ``accumulate()``.

    Attributes:
        before: for each output, by its index, the others that it is computed of, with what they are called.
    """

    def __init__(
        self,
        store: GradientStore,
        captured: Captured,
        weight: Weight,
        nonzero: Mapping[int, torch.Tensor],
        used: Sequence[str],
        why_once: str,
        entry: Entry,
    ) -> None:
        self.before: dict[int, list[tuple[str, weakref.ref[torch.Tensor]]]] = {}
        self._store, self._captured, self._window = store, captured, store.window
        self._weight, self._nonzero = weight, nonzero
        self._weighed, self._why_once, self._entry = False, why_once, entry
        self._used, self._versions = used, store.versions(used)

    def require_twice(self) -> None:
        """Raises RuntimeError where a backward whose own derivatives are asked for would give other ones."""
        why = self._why_once
        if self._window is not None:
            why = "accumulate() divides gradients later\nWhat to change: take it outside of the window"
        if why:
            raise RuntimeError(
                f"create_graph=True: a second derivative cannot be taken through this compiled model, because {why}"
            )

    def require_whole(self, output: int) -> None:
        """Raises RuntimeError where somebody waits for the gradient of an output of which this one is computed: what
        comes from here goes through the program, not through what the user has."""
        for name, reference in self.before.get(output, ()):
            if (x := reference()) is not None and (asks := _asks_for_gradient(x)):
                raise RuntimeError(
                    f"{asks} {name} would be given a part of its gradient: another output is computed of it inside "
                    "of the program, by which its gradient does not pass\n"
                    "What to change: give the model a second call that begins with it (z = model(x, encode=True); y = "
                    "model(z)), or compile both halves; a hook inside of forward (z.register_hook(...)) sees all of it"
                )

    def value(self, output: torch.Tensor, number: int) -> torch.Tensor:
        """The value of an output."""
        return output / self._nonzero[number] if number in self._nonzero else output

    def weighted(self, grad: torch.Tensor | None, number: int) -> torch.Tensor | None:
        """The gradient of an output as it enters the program."""
        if self._store.mesh.size() > 1:
            require_single(grad)
        now = self._store.versions(self._used)
        if now != self._versions:
            names = (*self._used, *self._used)
            changed = next(n for n, a, b in zip(names, self._versions, now, strict=True) if a != b)
            raise RuntimeError(
                f"{changed} was modified in place between the forward and the backward that needs it; step the "
                "optimizer after backward()"
            )
        self._store.begin_backward()
        if grad is not None and self._weight.divided is None:  # else the window divides
            grad = self.value(grad, number)
        if self._window is None:
            return grad
        if self._window is not self._store.window or self._window.left:
            raise RuntimeError(
                "backward() of a microbatch after its window of accumulate() has ended: call backward() inside "
                "the loop over the window"
            )
        if grad is not None and self._window.weights == "loss" and number != self._captured.objective:
            raise RuntimeError(
                f"output {number - len(self._captured.mutated)} of the model, which is not taken for its loss, was "
                "differentiated in a window of accumulate(), which weighs each microbatch by what its loss is a mean "
                "over\n"
                "What to change: let the model, or loss_fn, return all of the loss as one scalar, or pass "
                'weights="equal" to accumulate(), which counts every microbatch alike.'
            )
        factor = self._entry.factor = self._window.factor(self._weight, again=self._weighed)
        self._weighed = True
        return None if grad is None else (grad * factor).to(grad.dtype)


def _asks_for_gradient(x: torch.Tensor) -> str:
    """By what somebody waits for the gradient of an output, as the backward comes to one that is computed of it."""
    if x.retains_grad:
        return "retain_grad() on"
    if x._backward_hooks:
        return "a hook on"
    return "torch.autograd.grad() with respect to" if _torch.autograd.is_handed_out(x) else ""


class Outputs(torch.autograd.Function):
    """The boundary between the program and what the user does with one of its outputs.

    Each output has its own, because a backward frees what all operands of a node have saved, also where no gradient
    comes to them.  ``before``, the outputs that it is computed of, get none from it: the engine comes here where it is
    asked for theirs (see ``Delivery.require_whole``).
    """

    @staticmethod
    def forward(
        ctx: Any, delivery: Delivery, output: torch.Tensor, unshared: bool, number: int, *before: torch.Tensor
    ) -> torch.Tensor:
        ctx.delivery, ctx.number, ctx.nothing = delivery, number, (None,) * len(before)
        ctx.set_materialize_grads(False)
        # A loss, and what shares its memory with nothing else that the user has, may be changed in place: torch refuses
        # that of the others, which are views. All but the loss keep the count of changes that autograd looks at.
        output = delivery.value(output, number)
        return output.clone() if output.ndim == 0 else output.detach() if unshared else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            ctx.delivery.require_twice()
        (grad,) = grads
        if grad is not None:
            ctx.delivery.require_whole(ctx.number)
        if isinstance(grad, DTensor):  # something made of the parameters was added to the output
            grad = grad.full_tensor()
        return None, ctx.delivery.weighted(grad, ctx.number), None, None, *ctx.nothing


class Refuse(torch.autograd.Function):
    """An output that cannot be differentiated, though the plain model's can; with respect to what it is made of, too:
    ``torch.autograd.grad(..., allow_unused=True)`` comes nowhere else."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, reason: str, *made_of: torch.Tensor) -> torch.Tensor:
        ctx.reason = reason
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(ctx.reason)


def refuse_detached(captured: Captured, values: list[Any], parameters: Iterable[torch.Tensor]) -> None:
    """Lets the outputs that were detached beside the loss raise when they are differentiated; in place."""
    if not captured.detached:
        return
    anchor = anchor_of(parameters)
    first = len(captured.mutated)
    for i in captured.detached:
        if isinstance(values[i], torch.Tensor) and not values[i].requires_grad:
            reason = (
                f"output {i - first} of the model is not the loss and was detached from what computed it, because the "
                'loss is known (loss_fn returned it, or it is called "loss")\nWhat to change: pass outputs="gather" to '
                'compile() for outputs that are whole and can be differentiated, or outputs="sharded" for such as lie '
                "over the mesh"
            )
            values[i] = refuse_gradient(values[i], reason, anchor)


def refuse_gradient(value: torch.Tensor, reason: str, anchor: torch.Tensor) -> Any:
    """A tensor that raises when it is differentiated, with respect to some of what an anchor is made of or at all."""
    return Refuse.apply(value, reason, anchor)


def anchor_of(parameters: Iterable[torch.Tensor]) -> Any:
    """A scalar that is made of parameters, as autograd sees it, and requires a gradient; one serves many outputs."""
    return Refuse.apply(torch.zeros(()), "", torch.zeros((), requires_grad=True), *parameters)


class NotKept:
    """Stands for an output that a call does not keep, and says why."""

    def __init__(self, name: str, reason: str) -> None:
        self.__dict__["_name"], self.__dict__["_reason"] = name, reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"{self._name} is not kept: {self._reason}")

    def __repr__(self) -> str:
        return f"<{self._name}, not kept>"
