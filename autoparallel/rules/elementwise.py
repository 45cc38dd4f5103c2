"""Operators that work on each element alone, broadcasting as torch does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autoparallel.rules.calls import arguments, may_have_gradient, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule

aten = torch.ops.aten


def elementwise(node: fx.Node, linear: Sequence[Sequence[int]] = ()) -> Rule:
    """The rule of a broadcasting operator: every dim of the result is a factor."""
    operands = tensor_operands(node)
    return make_rule(
        f"{', '.join('...' for _ in operands)} -> ...",
        [shape_of(o) for o in operands],
        shape_of(node),
        linear=linear,
    )


def keeps_sums(node: fx.Node) -> bool:
    """Whether the call's dtypes let it be linear: a cast to integers is not."""
    source, result = tensor_operands(node)[0].meta["val"], node.meta["val"]
    return source.dtype == result.dtype or (may_have_gradient(source) and may_have_gradient(result))


_UNARY = [
    aten.abs.default, aten.acos.default, aten.acosh.default, aten.asin.default, aten.asinh.default, aten.atan.default,
    aten.atanh.default, aten.bitwise_and.Scalar, aten.bitwise_not.default, aten.ceil.default, aten.celu.default,
    aten.clamp.default, aten.clamp_max.default, aten.clamp_min.default, aten.cos.default, aten.cosh.default,
    aten.elu.default, aten.eq.Scalar, aten.erf.default, aten.erfc.default, aten.exp.default, aten.exp2.default,
    aten.expm1.default, aten.floor.default, aten.fmod.Scalar, aten.frac.default, aten.full_like.default,
    aten.ge.Scalar, aten.gelu.default, aten.gt.Scalar, aten.hardshrink.default, aten.hardsigmoid.default,
    aten.hardswish.default, aten.hardtanh.default, aten.isfinite.default, aten.isinf.default, aten.isnan.default,
    aten.le.Scalar, aten.leaky_relu.default, aten.log.default, aten.log10.default, aten.log1p.default,
    aten.log2.default, aten.log_sigmoid.default, aten.logical_not.default, aten.logit.default, aten.lt.Scalar,
    aten.mish.default, aten.nan_to_num.default, aten.ne.Scalar, aten.ones_like.default, aten.pow.Scalar,
    aten.pow.Tensor_Scalar, aten.reciprocal.default, aten.relu.default, aten.relu6.default, aten.remainder.Scalar,
    aten.round.default, aten.rsqrt.default, aten.selu.default, aten.sigmoid.default, aten.sign.default,
    aten.silu.default, aten.sin.default, aten.sinh.default, aten.softplus.default, aten.softshrink.default,
    aten.sqrt.default, aten.square.default, aten.tan.default, aten.tanh.default, aten.threshold.default,
    aten.trunc.default, aten.zeros_like.default, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.fill.Scalar,
]  # fmt: skip
_BINARY = [
    aten.__and__.Tensor, aten.__or__.Tensor, aten.atan2.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor, aten.clamp.Tensor, aten.clamp_max.Tensor, aten.clamp_min.Tensor,
    aten.div.Tensor_mode, aten.eq.Tensor, aten.floor_divide.default, aten.fmod.Tensor, aten.ge.Tensor, aten.gt.Tensor,
    aten.heaviside.default, aten.hypot.default, aten.le.Tensor, aten.logaddexp.default, aten.logical_and.default,
    aten.logical_or.default, aten.logical_xor.default, aten.lt.Tensor, aten.maximum.default, aten.minimum.default,
    aten.fill.Tensor, aten.ne.Tensor, aten.pow.Tensor_Tensor, aten.remainder.Tensor, aten.xlogy.Tensor,
    aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar,
]  # fmt: skip


@rule(*_UNARY, *_BINARY)
def _pointwise(node: fx.Node) -> Rule:
    return elementwise(node)


@rule(
    aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.contiguous.default, aten.positive.default, aten._to_copy.default, aten.to.dtype,
)  # fmt: skip
def _homogeneous(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0,)] if keeps_sums(node) else [])


@rule(aten.add.Tensor, aten.sub.Tensor)
def _sum(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0, 1)] if len(tensor_operands(node)) == 2 else [])


@rule(aten.mul.Tensor)
def _product(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(i,) for i in range(len(tensor_operands(node)))])


@rule(aten.div.Tensor)
def _quotient(node: fx.Node) -> Rule:
    first = isinstance(node.args[0], fx.Node) and tensor_operands(node)[0] is node.args[0]
    return elementwise(node, linear=[(0,)] if first and keeps_sums(node) else [])


@rule(aten.addcmul.default)
def _addcmul(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0, 1), (0, 2)])


@rule(aten.addcdiv.default)
def _addcdiv(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0, 1)])


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0, 1)])


@rule(aten.where.self)
def _where(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(1, 2)])


@rule(aten.masked_fill.Scalar)
def _masked_fill(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0,)] if arguments(node)["value"] == 0 else [])


@rule(aten.masked_fill.Tensor)
def _masked_fill_tensor(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0, 2)])


@rule(aten.prelu.default)
def _prelu(node: fx.Node) -> Rule:
    x, weight = (shape_of(o) for o in tensor_operands(node))
    names = [f"d{i}" for i in range(len(x))]
    channel = names[min(1, len(x) - 1)] if names else "1"
    return make_rule(
        f"{' '.join(names)}, {channel if len(weight) else ''} -> {' '.join(names)}", [x, weight], x
    )
