"""Gradient accumulation: windows of microbatches, each a step of the optimizer.

With weights w_m, the gradient of a window is sum(w_m * g_m) / sum(w_m), where g_m is the gradient of the microbatch's
mean loss: the gradient of the mean over all of them, as one batch would give it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from autoparallel import _torch
from autoparallel.graph.captured import InputSpec
from autoparallel.graph.losses import explain_apart, have_one_ratio
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.parameters.hooks import show_always
from autoparallel.runtime.ranks.agreement import agree_on, agreement_over

T = TypeVar("T")
WEIGHTS = ("loss", "equal")
_END: Any = object()


@dataclass(frozen=True)
class Weight:
    """What the loss of a microbatch weighs.

    Attributes:
        value: what it is a mean over, a number or a scalar tensor on the device; None for a sum, which is added up.
        expected: about what the value is, known without looking at the device: gradients are divided by about the
            number of microbatches, as a loop by hand does, and neither overflow nor vanish in half precision.
        divided: what the loss is divided by, where that is not its value; None where it is.
        least: what the sum of the window is divided by where all weigh nothing.
        added: what is added to the sum of the window before it divides.
        apart: what its other terms are means over, if not all over as much, which must be the same multiples of the
            value in all microbatches.
        reason: where they are added up.
    """

    value: float | torch.Tensor | None = 1.0
    expected: float = 1.0
    divided: torch.Tensor | None = None
    least: float = 1.0
    added: float = 0.0
    apart: Sequence[float | torch.Tensor] = ()
    reason: str = ""


def expected_count(specs: Sequence[Any], batch: int) -> float:
    """About what the loss of a call of these inputs is a mean over, where that depends on their values."""
    counts = [math.prod(s.shape) for s in specs if isinstance(s, InputSpec) and s.is_integer]
    return float(max(counts, default=batch) or 1)


class Window(Generic[T]):
    """The microbatches of one optimizer step; iterate over it once.

    Attributes:
        steps: how many microbatches it has at most.
        done: how many it has given out.
        last: whether the one given out is the last.
        left: whether the loop over it has ended, at its end or before.
        is_concluded: whether its gradients have been complete, and hooks of the parameters were called.
        names: of the parameters that got a gradient in it.
        beside: a parameter of which the loop has computed something beside the model, a penalty; empty for none.
    """

    def __init__(self, store: GradientStore, source: _Ahead[T], steps: int, weights: str) -> None:
        self.steps, self.done, self.last, self.left, self.is_concluded = steps, 0, False, False, False
        self.weights, self.names, self.beside = weights, dict[str, None](), ""
        self._store, self._source = store, source
        self._total: Any = None
        self._divided_for: Any = None  # the weight that the gradients have been divided by
        self._adds_up = False  # whether the loss of a microbatch was a sum
        self._reference: Any = None
        self._least, self._added = 1.0, 0.0
        self._counts: list[tuple[float | torch.Tensor, ...]] = []  # what the means of each microbatch are over
        self._reason = ""
        self._counted = 0  # the microbatch that was counted last, and the backward that was weighed last
        self._latest: object = None

    def __iter__(self) -> Iterator[T]:
        if self.done:
            raise RuntimeError("a window of accumulate() can be gone through only once")
        store = self._store
        self._begin()
        try:
            while not self.last:
                self._require_kept()
                self.done += 1
                batch = self._source.take()
                self.last = self.done == self.steps or self._source.ended
                store.synchronise = self.last
                yield batch
            self._require_kept()
        finally:
            self.left = True
            if store.window is self:
                store.synchronise = True
                self.divide()  # without a word to other ranks, as an exception may be why the loop is left
        store.settle()

    def _begin(self) -> None:
        store = self._store
        if not store.synchronise:
            raise RuntimeError("accumulate() inside no_sync(): it decides by itself when gradients are reduced")
        name = _left_over(store)
        if name is not None:
            raise RuntimeError(
                f"accumulate() starts a window, but {name} has a gradient already: call optimizer.zero_grad() after "
                "every optimizer.step()"
            )
        store.window = self
        show_always(store.parameters.values(), True)

    def _require_kept(self) -> None:
        """Raises RuntimeError where a gradient of an earlier microbatch is gone."""
        store = self._store
        if store.window is None and self.last:  # clipping or the optimizer has settled it
            return
        lost = next((name for name in self.names if store.parameters[name].grad is None), None)
        if lost is not None or store.window is not self:
            raise RuntimeError(
                f"the gradient of {lost or 'a parameter'} was cleared in the middle of a window of accumulate(), so "
                "that earlier microbatches would be missing: call optimizer.zero_grad() after optimizer.step(), not in "
                "between"
            )

    def require_nothing_beside(self) -> None:
        """Raises RuntimeError where microbatches are weighed, as what the loop computes beside the model is not."""
        if self.beside and self._reference is not None:
            raise RuntimeError(
                f"something that the loop computes of {self.beside}, such as a penalty, was differentiated in a window "
                "of accumulate(), whose microbatches are weighed: it would be added once for each of them\n"
                "What to change: let the model return it within its loss, or accumulate under no_sync()."
            )

    def factor(self, weight: Weight, again: bool = False) -> Any:
        """What the gradient of a call's loss is multiplied by; called for every backward, ``again`` for another one
        through the same call, which is counted once.

        Raises:
            RuntimeError: where the losses of two calls are differentiated together, which are means over their own.
        """
        if weight.value is None:
            self._adds_up = True
            return 1.0
        if self._reference is None:
            self._reference, self._least, self._added = weight.expected * self.steps, weight.least, weight.added
        if self.weights == "equal":  # what is given out counts once, however often the model is called for it
            again, self._counted = self._counted == self.done, self.done
        elif not again:
            running = self._store.passes.running()
            if running is self._latest:
                raise RuntimeError(
                    "losses of several calls are differentiated together in a window of accumulate(), which weighs "
                    "each by what it is a mean over: their sum is not known to be one of means over as much\n"
                    'What to change: accumulate(..., weights="equal") counts every microbatch alike, whatever is '
                    "called for it."
                )
            self._latest = running
        if not again:
            self._total = weight.value if self._total is None else self._total + weight.value
            self._counts.append((weight.value, *weight.apart))
            self._reason = weight.reason or self._reason
        return (weight.value if weight.divided is None else weight.divided) / self._reference

    def require_alike(self) -> None:
        """Raises RuntimeError where a loss adds up means over numbers whose ratio is another in each microbatch: each
        mean would have gradients of its own to divide.  It waits for the device, for such losses alone.  Nor are losses
        put together that are sums in some microbatches, and means in others."""
        if self._adds_up and self._total is not None:
            raise RuntimeError(
                "the losses of microbatches cannot be put together: they are means in some, and sums in others\n"
                "What to change: let all microbatches of a window take the same way through the model."
            )
        length = max((len(row) for row in self._counts), default=1)
        if length == 1:
            return
        rows = [row * length if len(row) == 1 else row for row in self._counts]  # all of its means are over as many
        if len({len(row) for row in rows}) == 1 and have_one_ratio(torch.stack([_row(row) for row in rows])):
            return
        shown = "; ".join(" and ".join(f"{x:g}" for x in row) for row in rows[:3])
        why = explain_apart(self._reason, f": {shown}")
        raise RuntimeError(
            f'{why} Or pass weights="equal" to accumulate(), which takes the mean of the losses. Clear the gradients '
            "before another step."
        )

    def divide(self) -> None:
        """Divides the gradients that it has added up, summands or not, by what has been counted; what is added to them
        later is divided alike."""
        divisor, self._divided_for = self.divisor(), self._total
        if divisor is not None:
            for alike in _torch.tensors.by_dtype(list(map(_torch.dtensor.local_of, self._store.grads.all().values()))):
                torch._foreach_div_(alike, divisor)
            self._reference = self._reference * divisor

    def divisor(self) -> Any:
        """What gradients are still to be divided by; None for nothing, as in a full window of equal weights."""
        total = None if self._total is self._divided_for else self._total
        if total is None or (isinstance(total, float) and total in (0.0, self._reference)):
            return None
        if isinstance(total, torch.Tensor):
            total = torch.where(total == 0, self._least, total) + self._added
        return total / self._reference


def _row(values: Sequence[float | torch.Tensor]) -> torch.Tensor:
    """Some counts as one tensor, on the device of those that are tensors."""
    device = next((x.device for x in values if isinstance(x, torch.Tensor)), None)
    return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in values])


def _left_over(store: GradientStore) -> str | None:
    """A parameter whose gradient is not zero, on any rank; ``zero_grad(set_to_none=False)`` leaves zeros."""
    grads = store.grads.all()
    if not grads:
        return None
    here = next((name for name, grad in grads.items() if bool(_torch.dtensor.local_of(grad).any())), None)
    agreement = agreement_over(store.mesh)
    if agreement is None:
        return here
    agree_on(store.mesh, "a window of accumulate(), with gradients that are there")
    return next((name for name in agreement.gather(here) if name is not None), None)


class _Ahead(Generic[T]):
    """An iterator that knows whether it has ended."""

    def __init__(self, batches: Iterable[T]) -> None:
        self._iterator = iter(batches)
        self._next = next(self._iterator, _END)

    @property
    def ended(self) -> bool:
        return self._next is _END

    def take(self) -> T:
        """The next batch."""
        batch, self._next = self._next, next(self._iterator, _END)
        return batch


def windows(store: GradientStore, steps: int, batches: Iterable[T], weights: str) -> Iterator[Window[T]]:
    """See ``ParallelModule.accumulate``."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        got = repr(steps) if isinstance(steps, int | float) else f"a {type(steps).__name__}"
        raise ValueError(f"steps must be a positive number of microbatches, got {got}: model.accumulate(4, loader)")
    if weights not in WEIGHTS:
        raise ValueError(f"unknown weights {weights!r}: expected one of {', '.join(WEIGHTS)}")
    return _windows(store, steps, _Ahead(batches), weights)


def _windows(store: GradientStore, steps: int, source: _Ahead[T], weights: str) -> Iterator[Window[T]]:
    while not source.ended:
        window = Window(store, source, steps, weights)
        yield window
        if not window.done:
            raise RuntimeError("a window of accumulate() was not gone through: iterate over its microbatches")
