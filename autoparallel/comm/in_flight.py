"""Redistributions in two halves: one starts the collective, the other waits for it.

``finish_redistribution(start_redistribution(x, ...), ...)`` is ``redistribute(x, ...)``; what stands between the two
runs beside the collective.  In the backward it is the same the other way round: the transposed collective is started
where the second half stands, and waited for where the first one does, because autograd goes back in the order in which
nodes were made.

[Note: tickets] The halves hand on a tensor without elements that stands for what is on its way; in the backward, so
does its gradient.  It lies on the device of what is sent: so one queue of autograd's runs both halves and all that
computes, and the order of collectives is the same on every rank.  What nobody has waited for is forgotten with its
ticket.  Compilers know nothing of that: programs that are compiled have no halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoparallel.comm import ranges
from autoparallel.comm.collectives import apply, arriving_shape, is_traced, redistribute, start_transfers, transposed
from autoparallel.placements import ACTIONS, COLLECTIVES, parse_placement

Started = tuple[Tensor, Tensor]
"""A redistribution that has been started: its ticket, and what is redistributed."""

_ARRIVAL = "_autoparallel_arrival"
"""The attribute of a ticket that waits for what is on its way."""

_SENDING = frozenset(kinds for kinds, name in ACTIONS.items() if name in COLLECTIVES)


def sends(src: str, dst: str) -> bool:
    """Whether a redistribution between two placements, as text, is a collective."""
    return src != dst and (src[0], dst[0]) in _SENDING


def start_redistribution(x: Tensor, src: str, dst: str, group: str) -> Started:
    """Begins to turn the placement ``src`` of a tensor into ``dst``; the arguments are those of ``redistribute``."""
    started: Started = _Start.apply(x, src, dst, group)
    return started


def finish_redistribution(started: Started, src: str, dst: str, group: str) -> Tensor:
    """What a redistribution that was begun between the same placements has made.

    Where its backward is to be differentiated, that is a redistribution that waits at once.
    """
    finished: Tensor = _Finish.apply(*started, src, dst, group)
    return finished


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: str, dst: str, group: str) -> Started:
        ctx.shape, ctx.group = x.shape, group
        ctx.module = ranges.place()
        ctx.set_materialize_grads(False)
        return start_transfer(x, src, dst, group) if sends(src, dst) else x.new_empty(0), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, ticket: Tensor | None, grad: Tensor | None) -> Any:
        if ticket is None:  # nothing is sent, or nothing is differentiated
            return grad, None, None, None
        return ranges.in_backward(ctx.module, finish_transfer, ticket, ctx.shape, "I", "I", ctx.group), None, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, x: Tensor, src: str, dst: str, group: str) -> Tensor:
        ctx.spec = *transposed(src, dst), group
        ctx.module = ranges.place()
        ctx.set_materialize_grads(False)
        return finish_transfer(ticket, x.shape, src, dst, group) if sends(src, dst) else apply(x, src, dst, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None
        src, dst, group = ctx.spec
        if torch.is_grad_enabled():  # tickets are not differentiable
            return None, ranges.in_backward(ctx.module, redistribute, grad, src, dst, group), None, None, None
        if sends(src, dst):
            return ranges.in_backward(ctx.module, start_transfer, grad, src, dst, group), None, None, None, None
        return None, ranges.in_backward(ctx.module, apply, grad, src, dst, group), None, None, None


def start_transfer(x: Tensor, src: str, dst: str, group: str) -> Tensor:
    """Starts a collective, and returns its ticket; it is not differentiable."""
    if is_traced(x):
        return torch.ops.autoparallel.start_transfer(x, src, dst, group)
    ticket = x.new_empty(0)
    setattr(ticket, _ARRIVAL, start_transfers([x], [parse_placement(src)], [parse_placement(dst)], group))
    return ticket


def finish_transfer(ticket: Tensor, shape: Sequence[int], src: str, dst: str, group: str) -> Tensor:
    """What a collective has made that ``start_transfer`` has started.

    Args:
        shape: of what was redistributed; of the result, where ``src`` is ``dst``.
    """
    if is_traced(ticket):
        return torch.ops.autoparallel.finish_transfer(ticket, list(shape), src, dst, group)
    arrival: Callable[[], list[Tensor]] = ticket.__dict__.pop(_ARRIVAL)
    return arrival()[0]


# What a dry run sees of the halves: operators on tensors without values alone.
torch.library.define("autoparallel::start_transfer", "(Tensor x, str src, str dst, str group) -> Tensor")
torch.library.define(
    "autoparallel::finish_transfer", "(Tensor ticket, SymInt[] shape, str src, str dst, str group) -> Tensor"
)


@torch.library.register_fake("autoparallel::start_transfer")
def _(x: Tensor, src: str, dst: str, group: str) -> Tensor:
    return x.new_empty(0)


@torch.library.register_fake("autoparallel::finish_transfer")
def _(ticket: Tensor, shape: Sequence[int], src: str, dst: str, group: str) -> Tensor:
    return ticket.new_empty(arriving_shape(shape, src, dst, group))
