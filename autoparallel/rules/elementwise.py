"""Operators that work on each element alone, broadcasting as torch does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autoparallel import ops
from autoparallel.rules.calls import arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.localize import LocalCall

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


_UNARY = [
    aten.abs.default, aten.relu.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default,
    aten.tanh.default, aten.exp.default, aten.log.default, aten.log1p.default, aten.expm1.default, aten.sqrt.default,
    aten.rsqrt.default, aten.reciprocal.default, aten.sin.default, aten.cos.default, aten.erf.default,
    aten.sign.default, aten.square.default, aten.leaky_relu.default, aten.elu.default, aten.hardtanh.default,
    aten.hardswish.default, aten.hardsigmoid.default, aten.softplus.default, aten.mish.default, aten.floor.default,
    aten.ceil.default, aten.round.default, aten.isnan.default, aten.isinf.default, aten.logical_not.default,
    aten.bitwise_not.default, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
    aten.pow.Tensor_Scalar, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.ones_like.default,
    aten.zeros_like.default, aten.full_like.default, aten.log_sigmoid.default, aten.relu6.default,
    aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
    aten.remainder.Scalar, aten.fmod.Scalar, aten.logical_not.default, aten.bitwise_and.Scalar, aten.trunc.default,
    aten.selu.default, aten.celu.default, aten.tan.default, aten.atan.default, aten.log2.default,
]  # fmt: skip
_BINARY = [
    aten.maximum.default, aten.minimum.default, aten.pow.Tensor_Tensor, aten.eq.Tensor, aten.ne.Tensor,
    aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.logical_and.default,
    aten.logical_or.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.__and__.Tensor,
    aten.__or__.Tensor, aten.remainder.Tensor, aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor,
    aten.xlogy.Tensor, aten.atan2.default, aten.lerp.Scalar, aten.floor_divide.default, aten.pow.Scalar,
]  # fmt: skip


@rule(*dict.fromkeys(_UNARY + _BINARY))
def _pointwise(node: fx.Node) -> Rule:
    return elementwise(node)


@rule(
    aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.contiguous.default, aten.positive.default, aten._to_copy.default, aten.to.dtype,
)  # fmt: skip
def _homogeneous(node: fx.Node) -> Rule:
    source, result = tensor_operands(node)[0].meta["val"].dtype, node.meta["val"].dtype
    keeps_sums = source == result or (source.is_floating_point and result.is_floating_point)
    return elementwise(node, linear=[(0,)] if keeps_sums else [])


@rule(aten.add.Tensor, aten.sub.Tensor)
def _sum(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0, 1)] if len(tensor_operands(node)) == 2 else [])


@rule(aten.mul.Tensor)
def _product(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(i,) for i in range(len(tensor_operands(node)))])


@rule(aten.div.Tensor)
def _quotient(node: fx.Node) -> Rule:
    first = isinstance(node.args[0], fx.Node) and tensor_operands(node)[0] is node.args[0]
    return elementwise(node, linear=[(0,)] if first else [])


@rule(aten.addcmul.default)
def _addcmul(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0, 1), (0, 2)])


@rule(aten.lerp.Tensor)
def _lerp(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0, 1)])


@rule(aten.where.self)
def _where(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(1, 2)])


@rule(aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where_scalar(node: fx.Node) -> Rule:
    return elementwise(node)


@rule(aten.masked_fill.Scalar)
def _masked_fill(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0,)] if arguments(node)["value"] == 0 else [])


@rule(aten.masked_fill.Tensor)
def _masked_fill_tensor(node: fx.Node) -> Rule:
    return elementwise(node)


def _localize_dropout(call: LocalCall) -> None:
    call.set_argument("shards", ";".join(call.dim_groups()))


@rule(ops.dropout)
def _dropout(node: fx.Node) -> Rule:
    shape = shape_of(node)
    return make_rule("... -> ...", [shape], shape, linear=[(0,)], localize=_localize_dropout)
