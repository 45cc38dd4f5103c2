"""In which ways an operator may run on one mesh axis, and no other.

- *Invariant*: every differentiable operand is Invariant, and so is the result.
- *Replicate*: every differentiable operand is Replicate, and so is the result.
- a factor is *sharded*: operands that bear it are Shard, every other differentiable operand is Replicate (an additive
  operand Partial, where the factor is reduced), a result that bears it is Shard, one that does not is Partial.
- two factors are *exchanged*: what bears either of them is Shard, every other differentiable operand is Replicate, and
  the operator sends rows to the owners of what they need and back.
- *Partial* passes through operands in which the operator is linear; every other differentiable operand is Replicate.

An operator whose backward the user has written is never run Replicate: the backward would get summands of a gradient,
in which it need not be linear.

Operands that carry no gradient have no summands to keep apart: where a differentiable one is Replicate, they are
written Invariant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoparallel.placements import Invariant, Partial, Placement, Replicate, Shard
from autoparallel.placements.modes import INVARIANT_MODE, REPLICATE_MODE, Mode
from autoparallel.rules.core import Rule


@dataclass(frozen=True, slots=True)
class Typed:
    """One way to run an operator on one axis: the mode, and the placements that it needs and gives."""

    mode: Mode
    operands: tuple[Placement, ...]
    result: Placement


def typed_modes(
    rule: Rule | None, differentiable: Sequence[bool], result_differentiable: bool, own_backward: bool
) -> list[Typed]:
    """Every way to run an operator on one mesh axis.

    Args:
        rule: the operator's factors, or None for an operator that can only be replicated.
        differentiable: for each tensor operand, whether a gradient flows to it through this operator.
        result_differentiable: whether a gradient flows into the result.
        own_backward: whether the backward is the user's, which may be given no summand of a gradient.
    """
    whole = tuple(Replicate if d else Invariant for d in differentiable)
    modes = [Typed(INVARIANT_MODE, (Invariant,) * len(differentiable), Invariant)]
    if result_differentiable and not own_backward:
        modes.append(Typed(REPLICATE_MODE, whole, Replicate))
    if rule is not None:
        modes.extend(_sharding_ways(rule, whole))
        modes.extend(_exchange_ways(rule, whole))
        modes.extend(_partial_ways(rule, whole))
    return modes


def _sharding_ways(rule: Rule, whole: tuple[Placement, ...]) -> Iterator[Typed]:
    for factor in rule.factors():
        result_dim = rule.dim_of(rule.result, factor)
        operand_dims = [rule.dim_of(operand, factor) for operand in rule.operands]
        if result_dim == -1 or -1 in operand_dims:
            continue
        reduction = rule.reductions.get(factor)
        if result_dim is None and reduction is None:
            continue
        operands = tuple(
            Shard(dim) if dim is not None else Partial if i in rule.additive and result_dim is None else whole[i]
            for i, dim in enumerate(operand_dims)
        )
        if result_dim is not None:
            result = Shard(result_dim)
        else:
            result = Invariant if reduction == "composite" else Partial
        if reduction == "composite" and any(p == Replicate for p in operands):
            # The composite's own backward gives whole gradients; operands that do not bear the factor stay whole.
            operands = tuple(Invariant if p == Replicate else p for p in operands)
        yield Typed(Mode("shard", factor=factor), operands, result)


def _exchange_ways(rule: Rule, whole: tuple[Placement, ...]) -> Iterator[Typed]:
    if rule.exchange is None:
        return
    rows, owners = rule.exchange
    operands = []
    for placement, factors in zip(whole, rule.operands, strict=True):
        dims = [rule.dim_of(factors, f) for f in (rows, owners)]
        dim = next((d for d in dims if d is not None), None)
        operands.append(placement if dim is None else Shard(dim))
    result = rule.dim_of(rule.result, rows)
    if result is not None and result >= 0:
        yield Typed(Mode("shard", factor=rule.exchanged()), tuple(operands), Shard(result))


def _partial_ways(rule: Rule, whole: tuple[Placement, ...]) -> Iterator[Typed]:
    for i, group in enumerate(rule.linear):
        operands = tuple(Partial if j in group or j in rule.additive else whole[j] for j in range(len(rule.operands)))
        yield Typed(Mode("partial", linear=i), operands, Partial)
