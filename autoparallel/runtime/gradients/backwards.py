"""What backward passes have under way: reductions of gradients, and gathers that were started ahead.

[Note: a backward that dies] The engine calls what was queued for the end of a backward pass only if the pass gets
there.  So whatever is under way belongs to one pass, and a pass whose callback the engine has let go of without
calling it has died of an exception.  Its transfers are waited for, because the other ranks may have sent their part
already, and what they bring is forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import compress
from typing import TypeVar

import torch

from autoparallel import _torch
from autoparallel.comm import ranges
from autoparallel.passes.hoist_parameter_chains import ParameterChain

T = TypeVar("T")
Tensors = list[torch.Tensor]

Grads = Sequence[Sequence[torch.Tensor | None]]
"""The gradients of a bucket's parameters: for each, one for every use; None where none was reached."""

Rows = list[tuple[ParameterChain, Sequence[torch.Tensor | None]]]
"""Parameters that a backward has reached, with the gradients of their uses."""

IN_FLIGHT = 2
"""How many reductions of gradients are under way at once: more would hide nothing, and each holds a whole gradient."""


class Travel:
    """Tensors on their way through collectives, one after another; a call brings them to the end.

    Args:
        tensors: what it begins with.
        steps: each starts a collective for the tensors, and returns a function that waits for its results. The first
            is started at once.
        local: how many of the last steps send nothing.

    Attributes:
        name: what it brings, in a profile.
    """

    def __init__(
        self, tensors: Tensors, steps: Sequence[Callable[[Tensors], Callable[[], Tensors]]], local: int = 0
    ) -> None:
        self.name: Callable[[], str] | None = None
        self._steps, self._local = list(steps[1:]), local
        self._wait: Callable[[], Tensors] | None = steps[0](tensors) if steps else lambda: tensors

    def __call__(self) -> Tensors:
        """The tensors at the end of the way; asked for once."""
        with self._range():
            values = self._take()
            while self._steps:
                values = self._steps.pop(0)(values)()
            return values

    def advance(self) -> None:
        """Waits for the collective that is under way, where another comes after it, which starts."""
        if len(self._steps) > self._local:
            with self._range():
                self._wait = self._steps.pop(0)(self._take())

    def finish(self) -> None:
        """Brings the tensors to the end, where they stay until they are asked for; what was sent ends now, and so does
        what they are only a part of."""
        values = self()
        storages = [value.untyped_storage() for value in values]
        used: dict[int, int] = {}
        for value, storage in zip(values, storages, strict=True):
            used[id(storage)] = used.get(id(storage), 0) + value.nbytes
        ends = [v.clone() if s.nbytes() > used[id(s)] else v for v, s in zip(values, storages, strict=True)]
        self._wait = lambda: ends

    def abandon(self) -> None:
        """Waits for the collective that is under way, and starts no other."""
        self._steps.clear()
        if self._wait is not None:
            self._take()

    def _range(self) -> AbstractContextManager[None]:
        return ranges.named(self.name) if self.name is not None else nullcontext()

    def _take(self) -> Tensors:
        assert self._wait is not None
        wait, self._wait = self._wait, None  # what was sent ends with the collective, not with this object
        return wait()


class Gather:
    """The parameters of a bucket on their way to their uses; a call waits for them.

    Args:
        count: of the parameters.
        travels: one for each use, of all parameters.
    """

    def __init__(self, count: int, travels: Sequence[Travel]) -> None:
        self._count, self._travels = count, travels

    def __call__(self) -> Tensors:
        """This rank's values, parameter by parameter, for each of its uses; asked for once."""
        columns = [travel() for travel in self._travels]
        return [column[i] for i in range(self._count) for column in columns]

    def abandon(self) -> None:
        """Waits for what is under way, and forgets it."""
        for travel in self._travels:
            travel.abandon()


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


def reached(chains: Sequence[ParameterChain], grads: Grads, accumulated: Sequence[bool] | None = None) -> Rows:
    """The parameters of a bucket that a backward has reached, with their gradients.

    Args:
        accumulated: where ``.grad`` is added to, for which of them; None where gradients are handed on.

    Raises:
        RuntimeError: where ``.grad`` of none is added to.
    """
    rows = list(zip(chains, grads, strict=True))
    if accumulated is not None:
        rows = require_accumulated(rows, accumulated)
    return [(chain, row) for chain, row in rows if row[0] is not None or any(grad is not None for grad in row)]


def require_accumulated(items: Iterable[T], accumulated: Sequence[bool]) -> list[T]:
    """What belongs to parameters whose ``.grad`` is added to. Raises RuntimeError where that of none is."""
    if not any(accumulated):
        raise RuntimeError(
            "torch.autograd.grad() with respect to parameters is not supported on a model compiled by "
            "autoparallel\nWhat to change: call backward() and read .grad."
        )
    return list(compress(items, accumulated))
