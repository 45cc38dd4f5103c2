"""What backward passes have under way: reductions of gradients, and gathers that were started ahead.

[Note: a backward that dies] The engine calls what was queued for the end of a backward pass only if the pass gets
there.  So whatever is under way belongs to one pass, and a pass whose callback the engine has let go of without
calling it has died of an exception.  Its transfers are waited for, because the other ranks may have sent their part
already, and what they bring is forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch

from autoparallel import _torch
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.runtime.gradients.travel import Tensors, Travel

Grads = Sequence[Sequence[torch.Tensor | None]]
"""The gradients of a bucket's parameters: for each, one for every use; None where none was reached."""

Rows = list[tuple[ParameterChain, Sequence[torch.Tensor | None]]]
"""Parameters that a backward has reached, with the gradients of their uses."""

IN_FLIGHT = 2
"""How many reductions of gradients are under way at once: more would hide nothing, and each holds a whole gradient."""


@dataclass
class BackwardPass:
    """What one backward pass has under way.

    Attributes:
        reductions: gradients on their way, and who gets them at the end of the pass.
        leftovers: what lets go of what the pass may not have used; called however it ends.
        callback: what the engine calls at the end; gone where it never will.
        is_counted: whether the ranks have shown each other that they come to it.
    """

    reductions: list[tuple[Travel, Callable[[Tensors], None]]] = field(default_factory=list)
    leftovers: list[Callable[[], None]] = field(default_factory=list)
    callback: weakref.ref[Callable[[], None]] | None = None
    is_counted: bool = False

    def expect(self, travel: Travel, receive: Callable[[Tensors], None]) -> None:
        """Notes gradients that have set out; those before them go on to their next collective, and those that set out
        long before are waited for."""
        if self.reductions:
            self.reductions[-1][0].advance()
        self.reductions.append((travel, receive))
        if len(self.reductions) > IN_FLIGHT:
            self.reductions[-1 - IN_FLIGHT][0].finish()

    def deliver(self) -> None:
        """Waits for the reductions, and hands out the results of each before the next makes its own."""
        while self.reductions:
            travel, receive = self.reductions.pop(0)
            receive(travel())

    def abandon(self) -> None:
        """Waits for what is under way and forgets it."""
        reductions, self.reductions = self.reductions, []
        leftovers, self.leftovers = self.leftovers, []
        for travel, _ in reductions:
            travel.abandon()
        for let_go in leftovers:
            let_go()


class BackwardPasses:
    """The backward passes of one model, by the engine's number of each (see [Note: a backward that dies]).

    Args:
        finish: what is done with a pass that has come to its end.
        died: is called where one does not.
    """

    def __init__(self, finish: Callable[[BackwardPass], None], died: Callable[[], None]) -> None:
        self._finish, self._died = finish, died
        self._passes: dict[int, BackwardPass] = {}

    def running(self) -> BackwardPass:
        """The pass that calls this."""
        number = _torch.autograd.running_backward()
        if number not in self._passes:
            self.end_dead()
            self._passes[number] = running = BackwardPass()

            def callback() -> None:
                self._end(number)

            running.callback = weakref.ref(callback, lambda _: self._passes.get(number) is running and self._died())
            _torch.autograd.after_backward(callback)
        return self._passes[number]

    def end_dead(self) -> None:
        """Waits for what passes that have died left under way, and forgets it."""
        for number, one in list(self._passes.items()):
            if one.callback is not None and one.callback() is None:
                del self._passes[number]
                one.abandon()

    def _end(self, number: int) -> None:
        ending = self._passes.pop(number)
        try:
            self._finish(ending)
        finally:
            ending.abandon()


def reached(chains: Sequence[ParameterChain], grads: Grads, wanted: Sequence[bool] | None = None) -> Rows:
    """The parameters of a bucket that a backward has reached, with their gradients: all, or those that are wanted."""
    rows = list(zip(chains, grads, strict=True))
    if wanted is not None:
        rows = list(compress(rows, wanted))
    return [(chain, row) for chain, row in rows if row[0] is not None or any(grad is not None for grad in row)]


def require_single(*grads: torch.Tensor | None) -> None:
    """Raises RuntimeError where several gradients at once come through a backward: no collective takes them, and no
    parameter's gradient is several."""
    if any(grad is not None and _torch.transforms.is_batch(grad) for grad in grads):
        raise RuntimeError(
            "several gradients at once, as by torch.autograd.grad(..., is_grads_batched=True), jacobian(..., "
            "vectorize=True) or vmap, cannot go through the backward of a compiled model\nWhat to change: call "
            "torch.autograd.grad(..., retain_graph=True) for each (torchjd: parallel_chunk_size=1)."
        )


def require_not_handed(asked_for: _torch.autograd.AskedFor, where: str) -> None:
    """Raises RuntimeError for ``torch.autograd.grad()`` with respect to parameters, where that is not possible."""
    if asked_for.handed:
        raise RuntimeError(
            f"torch.autograd.grad() with respect to parameters is not possible {where}\n"
            "What to change: call backward() and read .grad."
        )
