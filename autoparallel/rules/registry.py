"""Which rule a call has: the user's own, its operator's row in the table, or the one that torch's tag gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autoparallel.operators.control_flow import goes_by_values
from autoparallel.operators.opaque import function_class
from autoparallel.rules.calls import is_tensor, may_have_gradient, tensor_operands
from autoparallel.rules.core import Rule, RuleError, RuleMaker, make_rule, parse_factors
from autoparallel.rules.pointwise import is_pointwise, pointwise
from autoparallel.rules.selections import selection
from autoparallel.rules.table import RULES


@dataclass(frozen=True)
class UserRule:
    """What ``register_rule`` was given, and the operator's name for errors; makes the rule of a call."""

    name: str
    notation: str
    reductions: Mapping[str, str]
    linear: Sequence[Sequence[int]]
    additive: Sequence[int]
    blocked: Sequence[str]
    flops: int

    def __call__(self, node: fx.Node) -> Rule:
        options = {name: value for name, value in vars(self).items() if name not in ("name", "notation")}
        try:
            return make_rule(node, self.notation, **options)
        except RuleError as error:
            raise RuleError(f"the rule registered for {self.name} does not fit a call of it: {error}") from None


USER_RULES: dict[Any, UserRule] = {}
"""What ``register_rule`` was given, by the operator's qualified name or the ``autograd.Function``."""


def operator_name(target: Any) -> str:
    """An operator's name as plans, reports and messages write it: ``aten.linear``, ``autoparallel.dropout``."""
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target.namespace}.{target._schema.name.rpartition('::')[2]}"
        return name if target._overloadname == "default" else f"{name}.{target._overloadname}"
    module = getattr(target, "__module__", "").partition(".")[0].lstrip("_")
    return f"{module}.{getattr(target, '__name__', str(target))}"


def _selection(node: fx.Node) -> Rule | None:
    return selection(node, rule_for)


def _maker_of(target: Any) -> RuleMaker | None:
    if goes_by_values(target):
        return _selection
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        registered = USER_RULES.get(f"{name}.{target._overloadname}") or USER_RULES.get(name)
    else:
        registered = USER_RULES.get(function_class(target))
    return registered or RULES.get(getattr(target, "family", target)) or (pointwise if is_pointwise(target) else None)


def has_rule(target: Any) -> bool:
    """Whether an operator has a rule at all (a call of it may still be one that can only be replicated)."""
    return _maker_of(target) is not None


def rule_for(node: fx.Node) -> Rule | None:
    """The sharding rule of a call, or None when this call can only be replicated.

    It is worked out once for a call and its copies in other graphs, and stays with them, beside what it follows from.
    """
    if node.op != "call_function" or not is_tensor(node):
        return None
    maker = _maker_of(node.target)
    if maker is None:
        return None
    arguments = map_aggregate((node.args, node.kwargs), _describe)
    follows_from = maker, arguments, id(node.meta["val"])
    if node.meta.get("rule", (None,))[0] != follows_from:
        rule = maker(node)
        values = [x.meta.get("val") for x in (node, *node.all_input_nodes)]  # an id is unique while its owner lives
        node.meta["rule"] = follows_from, _without_false_sums(rule, node) if rule is not None else None, values
    return node.meta["rule"][1]


def _describe(argument: Any) -> Any:
    """An argument as a part of a key: nodes by their values, of which copies have the same."""
    if isinstance(argument, fx.Node):
        return "value", id(argument.meta.get("val"))
    if isinstance(argument, torch.SymInt):
        return "size", argument.node.expr
    return type(argument), argument


def _without_false_sums(rule: Rule, node: fx.Node) -> Rule:
    """The rule without sums that the call's dtypes do not keep: truth values do not add up, and sums of integers of
    another dtype than the result's overflow elsewhere, as those of fractions are cut off elsewhere."""
    result = node.meta["val"]
    if result.dtype == torch.bool:
        return replace(rule, linear=(), blocked=rule.blocked.union(rule.reductions))
    inexact = may_have_gradient(result)
    adding_up = {
        i
        for i, x in enumerate(operand.meta["val"] for operand in tensor_operands(node))
        if x.dtype == result.dtype or (inexact and may_have_gradient(x))
    }
    return replace(rule, linear=tuple(group for group in rule.linear if group <= adding_up))


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
    reductions = dict(reductions or {})
    _check_factors(name, notation, reductions, blocked)
    _check_operands(name, notation, linear, additive)
    USER_RULES[operator] = UserRule(name, notation, reductions, linear, additive, blocked, flops)


def _check_factors(operator: str, notation: str, reductions: Mapping[str, str], blocked: Sequence[str]) -> None:
    left, right = parse_factors(notation)
    read = {factor for part in left for factor in part}
    for part in (*left, right):
        for factor in part:
            if factor.startswith("("):
                raise RuleError(f"{factor!r} in {notation!r}: composed dims cannot be used in register_rule")
            if factor != "1" and part.count(factor) > 1 and factor not in blocked:
                raise RuleError(f"factor {factor!r} of {operator} stands twice in one tensor of {notation!r}: block it")
    for factor in (*reductions, *blocked):
        if factor not in {*read, *right} - {"1", "..."}:
            raise RuleError(f"{factor!r} is given for {operator}, but it is not one of its factors in {notation!r}")
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


def _check_operands(operator: str, notation: str, linear: Sequence[Sequence[int]], additive: Sequence[int]) -> None:
    count = len(parse_factors(notation)[0])
    for i in (*(i for group in linear for i in group), *additive):
        if not 0 <= i < count:
            raise RuleError(f"operand {i} is given for {operator}, but {notation!r} has {count} operands (from 0)")
