"""How each operator may be sharded: one rule per operator, in factor notation.

May import ``operators`` and ``placements``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoparallel.operators.opaque import function_class
from autoparallel.rules import (
    complexes,
    convolution,
    elementwise,
    indexing,
    losses,
    matmul,
    random,
    reductions,
    shapes,
)
from autoparallel.rules.calls import is_tensor, shape_of, tensor_operands
from autoparallel.rules.core import _RULES, _USER_RULES, Rule, RuleError, make_rule, parse_factors, ruled_targets

FAMILIES = (elementwise, complexes, matmul, convolution, reductions, losses, indexing, shapes, random)
"""The modules of rules."""


def operator_name(target: Any) -> str:
    """An operator's name as plans, reports and messages write it: ``aten.linear``, ``autoparallel.dropout``."""
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target.namespace}.{target._schema.name.rpartition('::')[2]}"
        return name if target._overloadname == "default" else f"{name}.{target._overloadname}"
    module = getattr(target, "__module__", "").partition(".")[0].lstrip("_")
    return f"{module}.{getattr(target, '__name__', str(target))}"


def rule_for(node: fx.Node) -> Rule | None:
    """The sharding rule of a call, or None when this call can only be replicated."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    target = node.target
    maker = _RULES.get(target)
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        maker = _USER_RULES.get(f"{name}.{target._overloadname}") or _USER_RULES.get(name) or maker
    elif (cls := function_class(target)) is not None:
        maker = _USER_RULES.get(cls)
    found = maker(node) if maker is not None else None
    return _without_partial_bools(found, node) if found is not None else None


def _without_partial_bools(found: Rule, node: fx.Node) -> Rule:
    """Truth values do not add up: no operator is linear in them."""
    bools = {i for i, o in enumerate(tensor_operands(node)) if o.meta["val"].dtype == torch.bool}
    if node.meta["val"].dtype == torch.bool:
        return replace(found, linear=())
    return replace(found, linear=tuple(g for g in found.linear if not g & bools)) if bools else found


def has_rule(target: Any) -> bool:
    """Whether an operator has a rule at all (a call of it may still be one that can only be replicated)."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        if name in _USER_RULES or f"{name}.{target._overloadname}" in _USER_RULES:
            return True
    return target in _RULES or function_class(target) in _USER_RULES


def _check_registration(
    operator: str,
    notation: str,
    reductions: Mapping[str, str],
    linear: Sequence[Sequence[int]],
    additive: Sequence[int],
    blocked: Sequence[str],
) -> None:
    left, right = parse_factors(notation)
    named = {f for part in (*left, right) for f in part} - {"1", "..."}
    read = {f for part in left for f in part}
    for part in (*left, right):
        for factor in part:
            if factor.startswith("("):
                raise RuleError(f"{factor!r} in {notation!r}: composed dims cannot be used in register_rule")
            if factor != "1" and part.count(factor) > 1 and factor not in blocked:
                raise RuleError(f"factor {factor!r} of {operator} stands twice in one tensor of {notation!r}: block it")
    for factor in (*reductions, *blocked):
        if factor not in named:
            raise RuleError(f"{factor!r} is given for {operator}, but it is not one of its factors in {notation!r}")
    for i in (*(i for group in linear for i in group), *additive):
        if not 0 <= i < len(left):
            raise RuleError(f"operand {i} is given for {operator}, but {notation!r} has {len(left)} operands (from 0)")
    for factor, kind in reductions.items():
        if kind not in ("sum", "mean"):
            raise RuleError(f"reductions of {operator} are 'sum' or 'mean', got {kind!r} for {factor!r}")
        if factor in right:
            raise RuleError(f"factor {factor!r} of {operator} is declared reduced, but the result bears it")
    for factor in (f for part in left for f in part if f not in ("1", "...")):
        if factor not in right and factor not in blocked and factor not in reductions:
            raise RuleError(
                f"factor {factor!r} of {operator} is reduced (the result of {notation!r} does not bear it): "
                f"pass reductions={{{factor!r}: 'sum'}} or 'mean', or blocked=[{factor!r}]"
            )
    for factor in right:
        if factor not in read and factor not in blocked and factor != "1":
            raise RuleError(
                f"factor {factor!r} of {operator} is made by the operator (no operand of {notation!r} bears it), so a "
                f"rank cannot make its part alone: pass blocked=[{factor!r}]"
            )


def register_rule(
    operator: str | type[torch.autograd.Function],
    notation: str,
    *,
    reductions: Mapping[str, str] | None = None,
    linear: Sequence[Sequence[int]] = (),
    additive: Sequence[int] = (),
    blocked: Sequence[str] = (),
    flops: int = 0,
) -> None:
    """Teaches autoparallel how your own operator may be sharded.

    An ``autograd.Function`` with a rule is called on shards, forward and backward; its backward sees the whole gradient
    of its shard, and hands out summands for operands that do not bear the sharded factor.  Sizes among its arguments
    are the global ones.  Without a rule, or with several results, it is called on whole tensors.

    Args:
        operator: the operator's qualified name, ``"mylib::rope"`` or ``"mylib::rope.overload"``, or an
            ``autograd.Function`` that returns one tensor.
        notation: its factors, one name for each loop dimension: ``"b s h d, s d -> b s h d"``.  ``(h d)`` is not
            accepted here, since the sizes of its parts cannot be told from the shapes.
        reductions: for each factor that the result does not bear, ``"sum"`` or ``"mean"``.
        linear: sets of operands (by position among the tensor operands) in which the operator is jointly linear.
        additive: operands that are added to the result.
        blocked: factors that must stay whole, such as the head dim of a rotary embedding.
        flops: floating-point operations per point of the iteration space, for the cost model.

    Raises:
        RuleError: when a factor is reduced without a declared kind, or the notation cannot be read.
    """
    if isinstance(operator, type) and issubclass(operator, torch.autograd.Function):
        name = f"{operator.__module__}.{operator.__qualname__}"
    elif isinstance(operator, str) and "::" in operator:
        name = operator
    else:
        raise RuleError(f"an operator is named 'library::name' or is an autograd.Function, got {operator!r}")
    _check_registration(name, notation, dict(reductions or {}), linear, additive, blocked)

    def maker(node: fx.Node) -> Rule:
        try:
            return make_rule(
                notation,
                [shape_of(o) for o in tensor_operands(node)],
                shape_of(node),
                reductions=reductions,
                linear=linear,
                additive=additive,
                blocked=blocked,
                flops=flops,
            )
        except RuleError as error:
            raise RuleError(f"the rule registered for {name} does not fit a call of it: {error}") from None

    _USER_RULES[operator] = maker


__all__ = ["Rule", "RuleError", "has_rule", "operator_name", "register_rule", "rule_for", "ruled_targets"]
