"""Gradients of parameters that can be differentiated themselves, as ``create_graph=True`` asks for.

What takes gradients from uses to parameters at rest is the transpose of what takes parameters to their uses, so each is
the other's backward (see ``docs/why_the_forward.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch

from autoparallel._torch.autograd import AskedFor
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.runtime.gradients.backwards import Grads, Rows
from autoparallel.runtime.gradients.program_parameters import ProgramParameters


def with_graph(
    store: ProgramParameters, chains: Sequence[ParameterChain], grads: Grads, asked_for: AskedFor
) -> list[torch.Tensor | None]:
    """The complete gradients of a bucket's parameters, as those lie, which the engine hands over or adds to ``.grad``.

    Raises:
        RuntimeError: where ``.grad`` holds, or is to hold, what is still to be reduced.
    """
    if not asked_for.handed and (store.has_pending or not store.synchronise):
        raise RuntimeError(
            "backward(create_graph=True) is not possible within no_sync(), nor where that has left sums to reduce, as "
            f"of {chains[0].name}\nWhat to change: grads = torch.autograd.grad(loss, parameters, create_graph=True), "
            "which leaves .grad alone."
        )
    rows = store.trained(chains, grads, asked_for)
    if not rows:
        return [None] * len(chains)
    some = [chain for chain, _ in rows]
    present = [[grad is not None for grad in row] for _, row in rows]
    values = _Collect.apply(store, some, present, *(grad for _, row in rows for grad in row if grad is not None))
    handed = {chain.name: store.lay_out(chain.name, value) for chain, value in zip(some, values, strict=True)}
    return [handed.get(chain.name) for chain in chains]


class _Collect(torch.autograd.Function):
    """Takes gradients of uses to those of parameters at rest; transposes ``_Spread``."""

    @staticmethod
    def forward(
        ctx: Any,
        store: ProgramParameters,
        chains: Sequence[ParameterChain],
        present: Sequence[Sequence[bool]],
        *grads: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Takes, of each parameter, the gradients of those uses that are present."""
        ctx.store, ctx.chains, ctx.present = store, chains, present
        arriving = iter(grads)
        rows: Rows = []
        for chain, row in zip(chains, present, strict=True):
            rows.append((chain, [next(arriving) if there else None for there in row]))
        complete = store.complete(rows)
        values = [complete[chain.name].contiguous() for chain in chains]
        return tuple([value.view_as(value) for value in values])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        there = [each for row in ctx.present for each in row]
        return None, None, None, *compress(_Spread.apply(ctx.store, ctx.chains, *grads), there)


class _Spread(torch.autograd.Function):
    """Takes what lies as parameters at rest to their uses, parameter by parameter; transposes ``_Collect``."""

    @staticmethod
    def forward(
        ctx: Any, store: ProgramParameters, chains: Sequence[ParameterChain], *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.store, ctx.chains = store, chains
        return tuple([value.view_as(value) for value in store.gather(chains, list(values))()])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        present = [[True] * len(chain.uses) for chain in ctx.chains]
        return None, None, *_Collect.apply(ctx.store, ctx.chains, present, *grads)
