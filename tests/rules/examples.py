"""Small calls of every operator that has a rule. Sizes are multiples of six where a rule may cut, values uneven."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autoparallel import operators
from autoparallel.operators import draws
from autoparallel.operators.changed_parameters import with_value
from autoparallel.operators.ctc import ctc_losses
from autoparallel.operators.experts import grouped_linear
from autoparallel.operators.flex import flex_operator
from autoparallel.operators.recurrent import recurrent
from autoparallel.rules.pointwise import is_pointwise
from autoparallel.rules.table import RULES
from tests.rules.proof import Example, fill

aten = torch.ops.aten
_GENERATOR = torch.Generator().manual_seed(1)


def real(*shape: int) -> Tensor:
    """Normal numbers whose scale differs from element to element."""
    x = torch.randn(shape, generator=_GENERATOR, dtype=torch.float64)
    return x * (0.5 + torch.rand(shape, generator=_GENERATOR, dtype=torch.float64))


def positive(*shape: int) -> Tensor:
    return real(*shape).abs() + 0.1


def inside(*shape: int) -> Tensor:
    """Numbers strictly between 0 and 1."""
    return torch.rand(shape, generator=_GENERATOR, dtype=torch.float64) * 0.9 + 0.05


def whole(*shape: int, high: int = 6) -> Tensor:
    return torch.randint(0, high, shape, generator=_GENERATOR)


def narrow(*shape: int) -> Tensor:
    return whole(*shape, high=256).to(torch.uint8)


def truth(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_GENERATOR) > 0.4


def _elementwise() -> list[Example]:
    e = Example
    found: list[Example] = []
    plain = [
        "abs", "alias", "asinh", "atan", "ceil", "celu", "clone", "contiguous", "cos", "cosh", "detach", "elu", "erf",
        "erfc", "exp", "exp2", "expm1", "floor", "frac", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
        "isfinite", "isinf", "isnan", "leaky_relu", "log_sigmoid", "logical_not", "mish", "nan_to_num", "neg",
        "ones_like", "positive", "relu", "relu6", "round", "selu", "sigmoid", "sign", "silu", "sin", "sinh", "softplus",
        "softshrink", "square", "tan", "tanh", "trunc", "zero", "zeros_like",
    ]  # fmt: skip
    found += [e(getattr(aten, name).default, (real(6, 6),)) for name in plain]
    found += [e(getattr(aten, n).default, (positive(6, 6),)) for n in
              ("log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sqrt")]  # fmt: skip
    found += [e(getattr(aten, name).default, (inside(6, 6),)) for name in ("acos", "asin", "atanh", "logit")]
    found.append(e(aten.acosh.default, (positive(6, 6) + 1,)))
    scalar = ("add", "sub", "rsub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod")
    found += [e(getattr(aten, name).Scalar, (real(6, 6), 0.7)) for name in scalar]
    found += [
        e(aten.bitwise_and.Scalar, (whole(6, 6), 3)),
        e(aten.bitwise_not.default, (whole(6, 6),)),
        e(aten.clamp.default, (real(6, 6), -0.3, 0.4)),
        e(aten.clamp_min.default, (real(6, 6), 0.1)),
        e(aten.clamp_max.default, (real(6, 6), 0.1)),
        e(aten.threshold.default, (real(6, 6), 0.1, -3.0)),
        e(aten.full_like.default, (real(6, 6), 3.5)),
        e(aten.fill.Scalar, (real(6, 6), 3.5)),
        e(aten.fill.Tensor, (real(6, 6), real())),
        e(aten.pow.Tensor_Scalar, (real(6, 6), 3)),
        e(aten.pow.Scalar, (1.7, real(6, 6))),
        e(aten.gelu.default, (real(6, 6),), {"approximate": "tanh"}, label="tanh"),
        e(aten._to_copy.default, (real(6, 6),), {"dtype": torch.float64}),
        e(aten._to_copy.default, (real(6, 6),), {"dtype": torch.int64}, label="to integers"),
        e(aten._to_copy.default, (whole(6, 6),), {"dtype": torch.float64}, label="from integers"),
        e(aten._to_copy.default, (truth(6, 6),), {"dtype": torch.float64}, label="from truth values"),
        e(aten.to.dtype, (real(6, 6), torch.float64)),
        e(aten.to.dtype, (real(6, 6), torch.int64), label="to integers"),
        e(aten.clone.default, (truth(6, 6),), label="truth values"),
        e(aten.clone.default, (real(6, 6).t(),), label="transposed"),
    ]
    two = ("atan2", "maximum", "minimum", "hypot", "logaddexp", "logical_and", "logical_or", "logical_xor")
    found += [e(getattr(aten, name).default, (real(6, 6), real(6, 1))) for name in two]
    compared = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")
    found += [e(getattr(aten, name).Tensor, (real(2, 6, 6), real(6, 1))) for name in compared]
    found += [e(getattr(aten, n).Tensor, (real(6, 6), positive(6))) for n in ("div", "remainder", "fmod", "xlogy")]
    found += [e(getattr(aten, n).Tensor, (truth(6, 6), truth(6))) for n in
              ("__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_xor")]  # fmt: skip
    found += [
        e(aten.add.Tensor, (real(6, 6), real(6, 6)), {"alpha": 0.3}, label="scaled"),
        e(aten.add.Tensor, (real(6, 6), 2.0), label="number"),
        e(aten.add.Tensor, (real(6, 6), real()), label="scalar"),
        e(aten.add.Tensor, (truth(6, 6), truth(6, 6)), label="truth values"),
        e(aten.add.Tensor, (narrow(6, 6), whole(6, 6)), label="integers of two widths"),
        e(aten.mul.Tensor, (real(6, 6), truth(6, 6)), label="mask"),
        e(aten.mul.Tensor, (real(6, 1), real(1, 6)), label="both broadcast"),
        e(aten.mul.Tensor, (real(6, 6), 0.3), label="number"),
        e(aten.div.Tensor, (real(6, 6), 0.3), label="number"),
        e(aten.div.Tensor, (whole(6, 6), 3), label="integers"),
        e(aten.div.Tensor_mode, (real(6, 6), positive(6)), {"rounding_mode": "floor"}),
        e(aten.floor_divide.default, (real(6, 6), positive(6)), constant=frozenset({0, 1})),
        e(aten.heaviside.default, (real(6, 6), real(6)), constant=frozenset({0, 1})),
        e(aten.pow.Tensor_Tensor, (positive(6, 6), real(6))),
        e(aten.clamp.Tensor, (real(6, 6), real(6) - 1, real(6, 1) + 1)),
        e(aten.clamp_min.Tensor, (real(6, 6), real(6))),
        e(aten.clamp_max.Tensor, (real(6, 6), real(6, 1))),
        e(aten.addcmul.default, (real(6, 6), real(6), real(6, 1)), {"value": 0.7}),
        e(aten.addcdiv.default, (real(6, 6), real(6), positive(6, 1)), {"value": 0.7}),
        e(aten.lerp.Scalar, (real(6, 6), real(6), 0.3)),
        e(aten.lerp.Tensor, (real(6, 6), real(6, 6), real(6))),
        e(aten.where.self, (truth(6, 6), real(6), real(6, 1))),
        e(aten.where.ScalarOther, (truth(6, 6), real(6), 0.5)),
        e(aten.where.ScalarSelf, (truth(6, 6), 0.5, real(6))),
        e(aten.where.Scalar, (truth(6, 6), 0.5, 1.5)),
        e(aten.masked_fill.Scalar, (real(6, 6), truth(6), 0), label="zero"),
        e(aten.masked_fill.Scalar, (real(6, 6), truth(6), -3.0)),
        e(aten.masked_fill.Tensor, (real(6, 6), truth(6, 1), real())),
        e(aten.prelu.default, (real(6, 6, 3), real(6))),
        e(aten.prelu.default, (real(6, 6), real(1)), label="one slope"),
    ]
    return found


def imaginary(*shape: int) -> Tensor:
    """Complex numbers of uneven scale."""
    return torch.complex(real(*shape), real(*shape))


def _complexes() -> list[Example]:
    e, z = Example, imaginary
    along = ("fft", "ifft", "hfft", "irfft")
    over = ("fft2", "ifft2", "irfft2", "fftn", "ifftn", "irfftn")
    found = [e(getattr(aten, f"fft_{name}").default, (z(6, 6, 4), None, 1)) for name in along]
    found += [e(getattr(aten, f"fft_{name}").default, (real(6, 6, 4), 5), label="sized") for name in ("rfft", "ihfft")]
    dims = [-2, -1] if torch.__version__.startswith("2.11.") else [-2, 1]  # where its meta kernel leaves the storage
    found += [e(getattr(aten, f"fft_{name}").default, (z(6, 6, 4, 4), None, dims)) for name in over]
    found += [e(getattr(aten, f"fft_{n}").default, (real(6, 6, 4, 4), [3, 4], [2, 3])) for n in ("rfft2", "rfftn")]
    return [
        *found,
        e(aten.fft_rfftn.default, (real(6, 6, 4, 4), [3, 4]), label="last dims"),
        e(aten.fft_fftshift.default, (z(6, 6, 4), [-1])),
        e(aten.fft_ifftshift.default, (real(6, 6, 4), [1])),
        e(aten._fft_c2c.default, (z(6, 6, 4), [1], 0, True)),
        e(aten._fft_r2c.default, (real(6, 6, 4), [2], 1, True)),
        e(aten._fft_c2r.default, (z(6, 6, 4), [2], 2, 6)),
        e(aten.conj_physical.default, (z(6, 6),)),
        e(aten.complex.default, (real(6, 6), real(6, 1))),
        e(aten.polar.default, (real(6, 6), real(6))),
        e(aten.angle.default, (z(6, 6),)),
        e(aten.sgn.default, (z(6, 6),)),
        e(aten.abs.default, (z(6, 6),), label="complex"),
        e(aten.mul.Tensor, (z(6, 6), real(6, 1)), label="complex and real"),
        e(aten.mul.Tensor, (z(6, 6), z(6)), label="complex"),
        e(aten.add.Tensor, (real(6, 6), z(6)), label="real and complex"),
        e(aten.sum.dim_IntList, (z(6, 6), [0]), label="complex"),
        e(aten.mm.default, (z(6, 6), z(6, 6)), label="complex"),
        e(aten.bmm.default, (z(6, 6, 6), z(6, 6, 6)), label="complex"),
        e(aten.vdot.default, (z(6), z(6)), label="complex"),
    ]


def _matmul() -> list[Example]:
    e, attention = Example, aten.scaled_dot_product_attention.default
    q, k, v = (2, 6, 4, 2), (2, 6, 3, 2), (2, 6, 3, 2)
    found = [
        e(aten.mm.default, (real(6, 6), real(6, 6))),
        e(aten.mv.default, (real(6, 6), real(6))),
        e(aten.dot.default, (real(6), real(6))),
        e(aten.vdot.default, (real(6), real(6))),
        e(aten.bmm.default, (real(6, 6, 6), real(6, 6, 6))),
        e(aten.outer.default, (real(6), real(6))),
        e(aten.matmul.default, (real(6), real(6)), label="1 x 1"),
        e(aten.matmul.default, (real(2, 6, 6), real(6)), label="3 x 1"),
        e(aten.matmul.default, (real(6), real(2, 6, 6)), label="1 x 3"),
        e(aten.matmul.default, (real(6, 2, 6, 6), real(2, 6, 6)), label="4 x 3"),
        e(aten.matmul.default, (real(6, 1, 6, 6), real(6, 6, 6)), label="broadcast"),
        e(aten.linear.default, (real(6, 2, 6), real(6, 6))),
        e(aten.linear.default, (real(6, 2, 6), real(6, 6), real(6)), label="bias"),
        e(aten.linear.default, (real(6), real(6, 6), real(6)), label="vector"),
        e(aten.linear.default, (real(6, 2, 6), real(6)), label="weight of one row"),
        e(aten.addr.default, (real(6, 6), real(6), real(6)), {"beta": 0.5, "alpha": 0.3}),
        e(aten.addmm.default, (real(6), real(6, 6), real(6, 6))),
        e(aten.addmm.default, (real(6, 6), real(6, 6), real(6, 6)), {"beta": 0.5, "alpha": 0.3}, label="scaled"),
        e(aten.addmm.default, (real(6, 1), real(6, 6), real(6, 6)), label="column"),
        e(aten.baddbmm.default, (real(6, 6, 6), real(6, 6, 6), real(6, 6, 6))),
        e(aten.baddbmm.default, (real(6), real(6, 6, 6), real(6, 6, 6)), label="row"),
        e(aten.addbmm.default, (real(6, 6), real(6, 6, 6), real(6, 6, 6))),
        e(aten.addmv.default, (real(6), real(6, 6), real(6))),
        e(aten.einsum.default, ("bij,bkj->bik", [real(6, 2, 6), real(6, 6, 6)])),
        e(aten.einsum.default, ("...ij, jk", [real(6, 2, 6), real(6, 6)]), label="implicit"),
        e(aten.einsum.default, ("ii,i->i", [real(6, 6), real(6)]), label="diagonal"),
        e(aten.einsum.default, ("bi,ij,bj->b", [real(6, 6), real(6, 6), real(6, 6)]), label="three"),
        e(aten.einsum.default, ("...i->i", [real(6, 6)]), label="lost dims"),
        e(grouped_linear, (real(12, 6), real(12, 6, 6), whole(12, high=12))),
        e(grouped_linear, (real(6, 6), real(6, 6, 6), torch.tensor([2, 2, 5, 2, 0, 5])), label="experts unused"),
        e(aten.tensordot.default, (real(6, 6, 3), real(6, 3, 6), [0, 2], [2, 1])),
        e(attention, (real(*q), real(*k), real(*v))),
        e(attention, (real(6, 4, 2), real(6, 3, 2), real(6, 3, 2)), label="three dims"),
        e(attention, (real(2, 6, 6, 2), real(2, 6, 6, 2), real(2, 6, 6, 2)), {"is_causal": True}, label="causal"),
        e(attention, (real(*q), real(*k), real(*v)), {"scale": 0.3}, label="scale"),
        e(attention, (real(6, 12, 4, 2), real(6, 6, 3, 2), real(6, 6, 3, 2)), {"enable_gqa": True}, label="grouped"),
        e(attention, (real(6, 4, 2), real(6, 3, 2), real(6, 3, 2), real(6, 4, 3)), label="three dims, mask"),
    ]
    for shape in ((6, 3), (6, 6, 3), (1, 6, 3), (6, 6, 6, 3), (6, 1, 6, 3), (1, 1, 6, 3), (6, 6, 1, 3), (6, 1, 1, 3)):
        for mask in (real(*shape), truth(*shape[:-1], 1) | truth(*shape)):
            args = (real(6, 6, 6, 2), real(6, 6, 3, 2), real(6, 6, 3, 2), mask)
            found.append(e(attention, args, label=f"{mask.dtype} mask {shape}"))
    for shape in ((4, 3), (12, 4, 3), (1, 4, 3), (6, 12, 4, 3), (6, 1, 4, 3), (1, 12, 4, 3)):
        args = (real(6, 12, 4, 2), real(6, 6, 3, 2), real(6, 6, 3, 2), real(*shape))
        found.append(e(attention, args, {"enable_gqa": True}, label=f"grouped, mask {shape}"))
    return found


def _flex() -> list[Example]:
    """Attention whose score reads a slope of its head, and whose mask documents of its row."""
    place = [torch.tensor(0) for _ in range(4)]
    slopes, documents = real(12), whole(6, 3, high=2)

    def score(x: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor, slopes: Tensor) -> Tensor:
        return x + aten.index.Tensor(slopes, [head]) * (query - key)

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor, documents: Tensor) -> Tensor:
        return (key == 0) | (aten.index.Tensor(documents, [row, key]) == head % 2)

    attend = flex_operator(make_fx(score)(real(), *place, slopes), make_fx(mask)(*place, documents))
    cases = {"alike": (6, 6, 0), "grouped": (12, 6, 0), "one head for all": (6, 1, 0), "logsumexp": (6, 6, 1),
             "largest": (12, 6, 2)}  # fmt: skip
    found = []
    for label, (heads, shared, result) in cases.items():
        q, k, v = real(6, heads, 4, 2), real(6, shared, 3, 2), real(6, shared, 3, 2)
        for sizes in ((1, 1), (6, 1), (1, heads), (6, heads)):
            blocks = (4, 3, whole(*sizes, 1), whole(*sizes, 1, 1), *[None] * 6, 128, 128)
            args = (q, k, v, blocks, (slopes,), (documents,), 0.7, {}, result)
            constant = (frozenset(), frozenset({2}), frozenset(range(8)))[result]
            found.append(Example(attend, args, constant=constant, label=f"{label}, blocks {sizes}"))
    return found


def _convolution() -> list[Example]:
    e = Example
    grouped = ([1, 1], [1, 1], [1, 1], 6)
    found = [
        e(aten.convolution.default, (real(6, 6, 4), real(6, 6, 3), real(6), [1], [1], [1], False, [0], 1)),
        e(aten.convolution.default, (real(6, 6, 4), real(6, 6, 3), real(6), [2], [1], [1], True, [0], 1), label="T"),
        e(aten.convolution.default, (real(6, 12, 4), real(12, 2, 3), None, [1], [1], [1], True, [0], 6), label="TG"),
        e(aten.conv1d.default, (real(6, 6, 5), real(6, 6, 3), real(6), [2], [1])),
        e(aten.conv1d.default, (real(6, 5), real(6, 6, 3), real(6)), label="one sample"),
        e(aten.conv2d.default, (real(6, 6, 4, 4), real(6, 6, 3, 3), real(6), [1, 1], [1, 1])),
        e(aten.conv2d.default, (real(6, 6, 4, 4), real(6, 6, 3, 3)), label="no bias"),
        e(aten.conv2d.default, (real(6, 12, 4, 4), real(12, 2, 3, 3), real(12), *grouped), label="groups"),
        e(aten.conv2d.default, (real(6, 6, 4, 4), real(6, 1, 3, 3), real(6), *grouped), label="depthwise"),
        e(aten.conv3d.default, (real(6, 6, 3, 3, 3), real(6, 6, 2, 2, 2), real(6))),
        e(aten.conv1d.padding, (real(6, 6, 5), real(6, 6, 3), real(6), [1], "same")),
        e(aten.conv2d.padding, (real(6, 6, 4, 4), real(6, 6, 3, 3), real(6), [1, 1], "same")),
        e(aten.conv3d.padding, (real(6, 6, 3, 3, 3), real(6, 6, 2, 2, 2), real(6), [1, 1, 1], "valid")),
        e(aten.conv_transpose1d.default, (real(6, 6, 4), real(6, 6, 3), real(6), [2])),
        e(aten.conv_transpose2d.input, (real(6, 6, 3, 3), real(6, 6, 2, 2), real(6), [2, 2])),
        e(aten.conv_transpose2d.input, (real(6, 12, 3, 3), real(12, 2, 2, 2), real(12), [1, 1], [0, 0], [0, 0], 6),
          label="groups"),
        e(aten.conv_transpose3d.input, (real(6, 6, 2, 2, 2), real(6, 6, 2, 2, 2), real(6))),
        e(aten.avg_pool1d.default, (real(6, 6, 4), [2])),
        e(aten.avg_pool2d.default, (real(6, 6, 4, 4), [2, 2])),
        e(aten.avg_pool3d.default, (real(6, 6, 2, 2, 2), [2, 2, 2])),
        e(aten.adaptive_avg_pool1d.default, (real(6, 6, 5), [3])),
        e(aten.adaptive_avg_pool2d.default, (real(6, 6, 4, 4), [1, 1])),
        e(aten._adaptive_avg_pool2d.default, (real(6, 6, 5, 5), [2, 2])),
        e(aten.adaptive_avg_pool3d.default, (real(6, 6, 3, 3, 3), [2, 2, 2])),
        e(aten.max_pool1d.default, (real(6, 6, 4), [2])),
        e(aten.max_pool2d.default, (real(6, 6, 5, 5), [3, 3], [2, 2], [1, 1])),
        e(aten.max_unpool2d.default, (real(6, 6, 2, 2), whole(6, 6, 2, 2, high=16), [4, 4])),
        e(aten.max_unpool3d.default, (real(6, 6, 2, 2, 2), whole(6, 6, 2, 2, 2, high=64), [4, 4, 4], [2] * 3, [0] * 3)),
        e(aten.max_pool3d.default, (real(6, 6, 2, 2, 2), [2, 2, 2])),
        e(aten.pixel_shuffle.default, (real(6, 4, 3, 3), 2)),
        e(aten.pixel_unshuffle.default, (real(6, 1, 4, 4), 2)),
        e(aten.im2col.default, (real(6, 2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1])),
    ]  # fmt: skip
    for name, rank, corners in (
        ("nearest1d", 1, ()), ("nearest2d", 2, ()), ("nearest3d", 3, ()), ("linear1d", 1, (False,)),
        ("bilinear2d", 2, (False,)), ("bicubic2d", 2, (False,)), ("trilinear3d", 3, (True,)),
    ):  # fmt: skip
        x = real(6, 6, *[3] * rank)
        found.append(e(getattr(aten, f"upsample_{name}").vec, (x, [5] * rank, *corners, None)))
    return found


def _reductions() -> list[Example]:
    e = Example
    found = [
        e(aten.sum.default, (real(6, 6),)),
        e(aten.sum.default, (truth(6, 6),), label="truth values"),
        e(aten.sum.default, (real(),), label="scalar"),
        e(aten.nansum.default, (real(6, 6, 6), [0, -1], True)),
        e(aten.nansum.default, (real(6, 6),), label="all"),
        e(aten.mean.default, (real(6, 6),)),
        e(aten.sum.dim_IntList, (real(6, 6, 6), [0, -1], True)),
        e(aten.sum.dim_IntList, (real(6, 6), [0]), {"dtype": torch.int64}, frozenset({0}), "to integers"),
        e(aten.sum.dim_IntList, (whole(6, 6), [0]), label="integers"),
        e(aten.sum.dim_IntList, (real(6, 6), []), label="all"),
        e(aten.mean.dim, (real(6, 6, 6), [1])),
        e(aten.mean.dim, (real(6, 6, 6), [0, 2], True), label="kept"),
        e(aten.mean.dim, (real(6, 1, 6), [1]), label="size one"),
        e(aten.mean.dim, (real(6, 6), None), label="all"),
        e(aten.amax.default, (real(6, 6), [1])),
        e(aten.amin.default, (real(6, 6), [0])),
        e(aten.amin.default, (real(6, 6), []), label="all"),
        e(aten.argmax.default, (real(6, 6), 1)),
        e(aten.argmax.default, (real(6, 6),), label="all"),
        e(aten.argmin.default, (real(6, 6), 0, True)),
        e(aten.any.dim, (truth(6, 6), 0)),
        e(aten.all.dim, (truth(6, 6), 1, True)),
        e(aten.logsumexp.default, (real(6, 6), [1])),
        e(aten.var.correction, (real(6, 6), [0]), {"correction": 1}),
        e(aten.std.correction, (real(6, 6), [1]), {"correction": 0}),
        e(aten.std.correction, (real(6, 6), None), {"correction": 0}, label="all"),
        e(aten.var.dim, (real(6, 6), [1])),
        e(aten.std.dim, (real(6, 6), [0], False, True)),
        e(aten.prod.dim_int, (real(6, 6), 1)),
        e(aten.linalg_vector_norm.default, (real(6, 6), 2, [1], True)),
        e(aten.linalg_vector_norm.default, (real(6, 6), 3), label="all"),
        e(aten.count_nonzero.default, (whole(6, 6, high=2),)),
        e(aten.count_nonzero.dim_IntList, (whole(6, 6, high=2), [0])),
        e(aten.cosine_similarity.default, (real(6, 6, 2), real(6, 6, 2), -1)),
        e(aten._softmax.default, (real(6, 6), 1, False)),
        e(aten.softmax.int, (real(6, 6, 6), 1)),
        e(aten._log_softmax.default, (real(6, 6), -1, False)),
        e(aten.log_softmax.int, (real(6, 6), 0)),
        e(aten._safe_softmax.default, (real(6, 6).masked_fill(torch.eye(6) > 0, -torch.inf), -1)),
        e(aten.cumprod.default, (real(6, 6), 1)),
        e(aten.logcumsumexp.default, (real(6, 6), 0)),
        e(aten.argsort.default, (real(6, 6), 1)),
        e(aten.argsort.stable, (whole(6, 6),), {"stable": True, "dim": 0, "descending": True}),
        e(operators.topk_indices, (real(6, 6, 4), 2)),
        e(operators.topk_indices, (real(6, 6), 3, 0, False), label="smallest"),
        e(aten.histc.default, (whole(6, 6).double(), 6, 0, 5), constant=frozenset({0})),
        e(aten.histc.default, (real(6, 6), 4, -1, 1), constant=frozenset({0}), label="out of range"),
        e(aten.layer_norm.default, (real(6, 6, 4), [4], real(4), real(4))),
        e(aten.layer_norm.default, (real(6, 3, 4), [3, 4]), label="plain"),
        e(aten.layer_norm.default, (real(6, 6, 4), [4], real(4)), label="weight"),
        e(aten.layer_norm.default, (real(6, 6, 4), [4], None, real(4)), label="bias"),
        e(aten.rms_norm.default, (real(6, 6, 4), [4], real(4), 1e-6)),
        e(aten.rms_norm.default, (real(6, 6, 4), [4], None, 1e-6), label="plain"),
        e(aten.group_norm.default, (real(6, 12, 4), 6, real(12), real(12))),
        e(aten.group_norm.default, (real(6, 12, 2, 2), 6, None, None), label="plain"),
        e(aten.instance_norm.default, (real(6, 6, 4), real(6), real(6), None, None, True, 0.1, 1e-5, False)),
    ]
    return found


def _losses() -> list[Example]:
    e = Example
    target = whole(6, 6, 3)
    ignored = torch.where(truth(6, 6), whole(6, 6, high=12), -100)
    found: list[Example] = []
    for reduction in (0, 1, 2):
        a, b = real(6, 6), real(6, 6)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
            found.append(e(getattr(aten, name).default, (a, b, reduction), label=str(reduction)))
        logits = aten.binary_cross_entropy_with_logits.default
        found += [
            e(aten.soft_margin_loss.default, (a, b.sign(), reduction), constant=frozenset({1}), label=str(reduction)),
            e(aten.poisson_nll_loss.default, (a, positive(6, 6), True, False, 1e-8, reduction),
              constant=frozenset({1}), label=str(reduction)),
            e(aten.kl_div.default, (a, inside(6, 6), reduction), label=str(reduction)),
            e(aten.binary_cross_entropy.default, (inside(6, 6), inside(6, 6), None, reduction), label=str(reduction)),
            e(logits, (a, inside(6, 6), None, None, reduction), label=str(reduction)),
            e(logits, (a, inside(6, 6), positive(6), positive(6), reduction), label=f"weights {reduction}",
              constant=frozenset({2, 3})),
            e(aten.cross_entropy_loss.default, (a, inside(6, 6), None, reduction), label=f"soft {reduction}"),
            e(aten.cross_entropy_loss.default,
              (real(6, 6, 6, 3), inside(6, 6, 6, 3), positive(6), reduction, -100, 0.1),
              constant=frozenset({2}), label=f"soft, weights, dims {reduction}"),
        ]  # fmt: skip
    for reduction in (0, 2, 1):
        args = (real(6, 6, 6, 3).log_softmax(1), target, positive(6), reduction, 2)
        found += [
            e(aten.nll_loss_nd.default, args, constant=frozenset({2}), label=str(reduction)),
            e(aten.nll_loss_nd.default, (real(6, 12), ignored[0], None, reduction, -100), label=f"rows {reduction}"),
            e(aten.cross_entropy_loss.default, args, constant=frozenset({2}), label=str(reduction)),
        ]
    wide = real(6, 6, 12)
    found += [
        e(operators.cross_entropy_sum, (real(6, 12), ignored[0])),
        e(operators.cross_entropy_sum, (wide, ignored), label="dims"),
        e(operators.cross_entropy_sum, (wide, whole(6, 6, high=12), None, 5), label="ignored class"),
        e(operators.cross_entropy_sum, (real(12), whole(high=12)), label="one row"),
        e(operators.cross_entropy_sum, (real(6, 12), ignored[1], None, -100, 0.1), label="smoothing"),
        e(
            operators.cross_entropy_sum,
            (wide, ignored, positive(12), -100, 0.1),
            constant=frozenset({2}),
            label="weights",
        ),
        e(operators.cross_entropy_sum, (_masked_logits(), torch.tensor([0, 1, 7, -100, 11, 3])), label="masked logits"),
        e(operators.cross_entropy_sum, (real(6, 12), ignored[1], None, -100, 0.0, 12), label="told the classes"),
        e(operators.weighted_mean, (real(6), torch.arange(1, 7))),
        e(operators.mean_or_sum, (real(6), torch.arange(6))),
        e(with_value, (real(6, 4), real(6, 4))),
        e(operators.cross_entropy_weight, (ignored, None, -100, torch.float64)),
        e(
            operators.cross_entropy_weight,
            (ignored, positive(12), -100, torch.float64),
            constant=frozenset({1}),
            label="w",
        ),
    ]
    return found


def _masked_logits() -> Tensor:
    """Logits of which every rank's first class is minus infinity in rows where another rank holds the target."""
    x = real(6, 12)
    x[1, 4] = x[2, 0] = x[4, 4] = x[5, 8] = x[3, 0] = -torch.inf
    return x


def _indexing() -> list[Example]:
    e = Example
    return [
        e(
            ctc_losses,
            (
                real(4, 6, 3).log_softmax(-1),
                whole(6, 2, high=2) + 1,
                torch.full((6,), 4),
                whole(6, high=2) + 1,
                0,
                False,
            ),
        ),
        e(aten.embedding.default, (real(12, 6), whole(6, 6, high=12))),
        e(aten.embedding.default, (real(12, 6), whole(6, 6, high=12), 3), label="padding"),
        e(aten.embedding.default, (real(12, 6), whole(6, 6, high=3), -1, True), label="scaled"),
        e(aten.embedding.default, (real(12, 6), whole(high=12)), label="one"),
        e(aten.embedding.default, (truth(12, 6), whole(6, 6, high=12)), label="truth values"),
        e(operators.padded_embedding, (real(12, 6), whole(6, 6, high=12), -1, 12)),
        e(operators.pad_rows, (real(12, 6), 12)),
        e(operators.interleave, (real(24, 6), 0, [0, 12, 18, 24], 6)),
        e(operators.interleave, (real(6, 12), 1, [0, 6, 12], 3), label="columns"),
        e(operators.piece, (real(6, 36), 1, 12, 24, 6)),
        e(operators.piece, (real(6, 36, 6), 1, 0, 24, 6), label="inside"),
        e(operators.piece, (real(6, 12), 1, 3, 6, 1), label="one block"),
        e(aten.one_hot.default, (whole(6, 6, high=5), 5)),
        e(aten.gather.default, (real(6, 6, 4), 2, whole(6, 6, 6, high=4))),
        e(aten.gather.default, (real(6, 6), 0, whole(3, 4)), label="part"),
        e(aten.take_along_dim.default, (real(6, 4), whole(6, 6, high=4), 1)),
        e(aten.index_select.default, (real(6, 4), 1, whole(6, high=4))),
        e(aten.scatter_add.default, (real(6, 4), 1, whole(6, 6, high=4), real(6, 6))),
        e(
            aten.scatter_add.default,
            (real(6, 4), 1, whole(4, 3, high=4), real(6, 6)),
            label="part",
            constant=frozenset({2}),
        ),
        e(aten.scatter.src, (real(6, 4), 1, whole(6, 1, high=4), real(6, 1))),
        e(aten.scatter.src, (real(6, 6), 0, torch.arange(6).flip(0).view(6, 1).expand(6, 6), real(6, 6)), label="all"),
        e(aten.scatter.value, (real(6, 4), 1, whole(6, 2, high=4), 0.5)),
        e(
            aten.scatter.reduce,
            (real(6, 4), 1, whole(6, 3, high=4), real(6, 3)),
            {"reduce": "add"},
            constant=frozenset({0, 2}),
        ),
        e(aten.scatter_reduce.two, (real(6, 4), 1, whole(6, 3, high=4), real(6, 3), "amax")),
        e(aten.scatter_reduce.two, (real(6, 4), 1, whole(6, 3, high=4), real(6, 3), "sum"), label="sum"),
        e(aten.scatter_reduce.two, (real(6, 4), 1, whole(6, 3, high=4), real(6, 3), "mean"), label="mean"),
        e(aten.index_copy.default, (real(6, 4), 1, torch.tensor([2, 0]), real(6, 2))),
        e(aten.index_fill.int_Scalar, (real(6, 4), 1, torch.tensor([2, 0]), 0.5)),
        e(aten.index_add.default, (real(4, 6), 0, whole(6, high=4), real(6, 6)), {"alpha": 0.5}),
        e(aten.index.Tensor, (real(6, 4, 6), [None, whole(6, high=4)])),
        e(aten.index.Tensor, (real(4, 3, 6), [whole(6, 6, high=4), whole(6, high=3)]), label="broadcast"),
        e(aten.index.Tensor, (real(4, 6, 3), [whole(6, high=4), None, whole(6, high=3)]), label="apart"),
        e(aten.index.Tensor, (real(6, 4, 3, 6), [None, whole(6, high=4), whole(6, high=3)]), label="middle"),
        e(aten.index_add.default, (truth(4, 6), 0, whole(6, high=4), truth(6, 6)), label="truth values"),
        e(aten.index_put.default, (real(4, 6), [whole(3, high=4)], real(3, 6), True)),
        e(aten.index_put.default, (real(6, 4), [None, torch.tensor([2, 0])], real(6, 2)), label="columns"),
        e(aten.index_put.default, (real(4, 6), [torch.tensor([2, 0])], real(6)), label="broadcast"),
    ]


def _shapes() -> list[Example]:
    e = Example
    views: list[tuple[tuple[int, ...], list[int]]] = [
        ((6, 6), [36]), ((36,), [6, 6]), ((6, 2, 6), [12, 6]), ((12, 6), [6, 2, 6]), ((6, 6, 2), [6, -1]),
        ((1, 6, 1, 6), [6, 1, 6]), ((6, 4), [12, 2]), ((6, 4), [8, 3]), ((6, 6, 2), [6, 2, 6]), ((6,), [6, 1, 1]),
    ]  # fmt: skip
    found = [e(aten.reshape.default, (real(*a), b), label=f"{a} -> {b}") for a, b in views]
    found += [e(t, (real(*a), b)) for t in (aten.view.default, aten._unsafe_view.default) for a, b in views[2:4]]
    found += [
        e(aten.reshape.default, (truth(6, 6), [36]), label="truth values"),
        e(aten.flatten.using_ints, (real(6, 6, 2), 1)),
        e(aten.squeeze.dim, (real(6, 1, 6), 1)),
        e(aten.squeeze.dims, (real(1, 6, 1, 6), [0, 2])),
        e(aten.squeeze.default, (real(1, 6, 1, 6),)),
        e(aten.unsqueeze.default, (real(6, 6), -1)),
        e(aten.unsqueeze.default, (real(6, 6), 0), label="first"),
        e(aten.expand.default, (real(6, 1), [6, 6, -1])),
        e(aten.expand.default, (real(6, 1), [6, 6]), label="broadcast"),
        e(aten.transpose.int, (real(6, 3, 6), 0, -1)),
        e(aten.transpose.int, (real(), 0, -1), label="scalar"),
        e(aten.t.default, (real(6, 6),)),
        e(aten.numpy_T.default, (real(6, 6),)),
        e(aten.permute.default, (real(6, 3, 6), [2, 0, -2])),
        e(aten.select.int, (real(6, 3, 6), 1, -1)),
        e(aten.slice.Tensor, (real(6, 6), 1, 1, 4)),
        e(aten.slice.Tensor, (real(6, 6), -2, 0, 2**62, 2), label="steps"),
        e(aten.narrow.default, (real(6, 6), 1, 2, 3)),
        e(aten.flip.default, (real(6, 6, 2), [1])),
        e(aten.roll.default, (real(6, 6), [2], [0])),
        e(aten.roll.default, (real(6, 6), [2]), label="flat"),
        e(aten.rot90.default, (real(6, 6, 2), 1, [0, 2])),
        e(aten.cumsum.default, (real(6, 6), 1)),
        e(aten.cumsum.default, (real(6, 6), 1), {"dtype": torch.int64}, frozenset({0}), "to integers"),
        e(aten.cumsum.default, (narrow(6, 6), 1), label="narrow integers"),
        e(aten.pad.default, (real(6, 6), [1, 2])),
        e(aten.pad.default, (real(6, 6), [1, 2], "constant", 0.5), label="value"),
        e(aten.pad.default, (real(6, 6, 6), [1, 2], "reflect"), label="reflect"),
        e(aten.constant_pad_nd.default, (real(6, 6), [1, 2, 0, 0])),
        e(aten.constant_pad_nd.default, (real(6, 6), [-1, 2], 0.5), label="value"),
        e(aten.glu.default, (real(6, 6, 4), -1)),
        e(aten.tril.default, (real(6, 3, 3), 1)),
        e(aten.triu.default, (real(6, 3, 4),)),
        e(aten.slice_scatter.default, (real(6, 4), real(6, 2), 1, 1, 3)),
        e(aten.select_scatter.default, (real(6, 4, 6), real(6, 6), 1, 2)),
        e(aten.unfold.default, (real(6, 6, 6), 1, 3, 2)),
        e(aten.diag_embed.default, (real(6, 4), 1)),
        e(aten.diagonal.default, (real(6, 3, 4), 1, 1, 2)),
        e(aten.diagonal_scatter.default, (real(6, 3, 4), real(6, 3), 1, 1, 2)),
        e(aten.view_as_complex.default, (real(6, 6, 2),)),
        e(aten.view_as_real.default, (torch.complex(real(6, 6), real(6, 6)),)),
        e(aten.cat.default, ([real(6, 2), real(6, 3)], 1)),
        e(aten.cat.default, ([real(6, 1), real(6, 1), real(6, 6)], -1), label="size one"),
        e(aten.stack.default, ([real(6, 6), real(6, 6)], -2)),
        e(aten.stack.default, ([real(6), real(6)],), label="first"),
    ]
    return found


def _layers() -> list[Example]:
    e = Example
    weights = [real(12, 2), real(12, 3), real(12), real(12)]
    squares = torch.eye(3, dtype=torch.float64) * 2 + inside(6, 6, 3, 3) / 3
    return [
        e(recurrent, (real(6, 4, 2), [real(1, 6, 3), real(1, 6, 3)], weights, "lstm", True, 1, False, True)),
        e(recurrent, (real(4, 6, 2), [real(1, 6, 4)], [real(12, 2), real(12, 4)], "gru", False, 1, False, False),
          label="steps first"),
        e(aten.grid_sampler.default, (real(6, 6, 4, 4), inside(6, 6, 6, 2) * 2 - 1, 0, 0, False)),
        e(aten.grid_sampler_2d.default, (real(6, 6, 4, 4), inside(6, 6, 3, 2) * 2 - 1, 1, 1, True),
          constant=frozenset({1})),
        e(aten.grid_sampler_3d.default, (real(6, 6, 2, 2, 2), inside(6, 6, 6, 6, 3) * 2 - 1, 0, 0, False)),
        e(aten._weight_norm.default, (real(6, 4), positive(6, 1), 0)),
        e(aten._weight_norm.default, (real(3, 6, 2), positive(1, 6, 1), 1), label="inside"),
        e(aten.cdist.default, (real(6, 6, 3), real(6, 12, 3), 2.0)),
        e(aten.cdist.default, (real(6, 3), real(6, 3), 1.0), label="one"),
        e(aten.pairwise_distance.default, (real(6, 6, 3), real(6, 6, 3))),
        e(aten.pairwise_distance.default, (real(6, 6, 3), real(6, 3), 2.0, 1e-6, True), label="a dim of one"),
        e(aten.affine_grid_generator.default, (real(6, 2, 3), [6, 2, 4, 5], False)),
        e(aten.affine_grid_generator.default, (real(6, 3, 4), [6, 2, 2, 3, 4], True), label="volumes"),
        e(aten.bilinear.default, (real(6, 6), real(6, 12), real(6, 6, 12), real(6))),
        e(aten.col2im.default, (real(6, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])),
        e(aten._upsample_bilinear2d_aa.vec, (real(6, 6, 4, 4), [2, 2], False, None)),
        e(aten._upsample_bicubic2d_aa.vec, (real(6, 6, 6, 6), [3, 3], False, None)),
        e(aten.stft.default, (real(6, 32), 8), {"window": positive(8), "return_complex": True},
          constant=frozenset({1})),
        e(aten.channel_shuffle.default, (real(6, 4, 2, 2), 2)),
        e(aten.linalg_inv.default, (squares,)),
        e(aten.linalg_det.default, (squares,)),
        e(aten.linalg_cholesky.default, (squares @ squares.mT,)),
        e(aten.matrix_exp.default, (squares,)),
        e(aten.linalg_svdvals.default, (squares,)),
        e(aten.linalg_solve_triangular.default, (squares, real(6, 1, 3, 2)), {"upper": True}),
        e(aten.linalg_solve.default, (squares, real(6, 1, 3, 2))),
        e(aten.linalg_solve.default, (squares, real(6, 3, 2)), {"left": True}),
        e(aten.linalg_solve.default, (squares, squares[..., 0])),
        e(aten.cholesky_solve.default, (real(6, 6, 3, 2), squares)),
        e(aten.linalg_cross.default, (real(6, 6, 3), real(6, 1, 3))),
        e(aten.bucketize.Tensor, (real(6, 6), torch.arange(-1.0, 2.0).double()), constant=frozenset({0, 1})),
        e(aten.searchsorted.Tensor, (torch.arange(-1.0, 2.0).double(), real(6, 6)), constant=frozenset({0, 1})),
        e(aten.searchsorted.Tensor, (real(6, 4), real(6, 6)), {"sorter": whole(6, 4, high=4)}, label="rows",
          constant=frozenset({0, 1})),
        e(aten.isin.Tensor_Tensor, (whole(6, 6), whole(2, 2))),
        e(operators.pool_indices, (real(6, 6, 4, 4), "adaptive_max_pool2d", [[2, 2]]), constant=frozenset({0})),
        *(e(operators.indices_along, (real(6, 6, 4), -1, finder, 2 if finder == "kthvalue" else None), label=finder,
            constant=frozenset({0})) for finder in ("cummax", "cummin", "mode", "median", "nanmedian", "kthvalue")),
    ]  # fmt: skip


def _random() -> list[Example]:
    e = Example
    form = {"dtype": torch.float64, "device": torch.device("cpu")}
    whole_numbers = {"dtype": torch.int64, "device": torch.device("cpu")}
    return [
        e(operators.dropout, (real(6, 6, 2), 0.4, 3)),
        e(draws.draw, ([6, 12, 1], "normal", [0.0, 1.0], 3), form),
        e(draws.draw, ([6, 12], "bernoulli", [0.3], 3), form, label="bernoulli"),
        e(draws.draw_integers, ([12, 6], 2, 90, 3), whole_numbers),
        e(draws.draw_poisson, (positive(6, 6), 3), constant=frozenset({0})),
        e(draws.draw_gamma, (positive(6, 6), 3)),
        e(draws.draw_classes, (positive(6, 5), 3, False, 4)),
        e(draws.draw_classes, (positive(6, 5), 7, True, 4), label="with replacement"),
        e(draws.draw_classes, (positive(6), 3, False, 4), label="one row"),
    ]


FAMILIES: dict[str, list[Example]] = {
    "elementwise": _elementwise(),
    "complexes": _complexes(),
    "matmul": _matmul(),
    "flex": _flex(),
    "convolution": _convolution(),
    "layers": _layers(),
    "random": _random(),
    "reductions": _reductions(),
    "losses": _losses(),
    "indexing": _indexing(),
    "shapes": _shapes(),
}


def examples_of() -> dict[Any, list[Example]]:
    """The examples by operator."""
    table: dict[Any, list[Example]] = {}
    for family in FAMILIES.values():
        for example in family:
            table.setdefault(example.target, []).append(example)
    return table


def tagged_examples() -> list[Example]:
    """A call of every operator that has its rule by torch's tag alone, and no example above."""
    examples, shown = [], examples_of()
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        library, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        target = getattr(getattr(aten, packet, None), overload or "default", None) if library == "aten" else None
        if not is_pointwise(target) or target in RULES or target in shown:
            continue
        if [str(result.type) for result in target._schema.returns] == ["Tensor"]:
            examples.append(_example_of(target))
    return examples


def _example_of(target: Any) -> Example:
    """Of uneven numbers, or of whole ones; what torch does not differentiate is constant."""
    integers = any(word in str(target) for word in ("bitwise", "gcd", "lcm", "shift", "xor"))
    values = {
        "Tensor": lambda: whole(6, 6) + 1 if integers else inside(6, 6),
        "Optional[Tensor]": lambda: inside(6, 6),
        "number": lambda: 2 if integers else 0.7,
        "Optional[number]": lambda: 0.7,
        "float": lambda: 0.7,
        "int": lambda: 1,
    }
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in target._schema.arguments:
        make = values.get(str(argument.type))
        value = make() if make is not None else argument.default_value
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    example = Example(target, tuple(args), kwargs)
    constant = frozenset(i for i in range(len(example.tensors)) if not _is_differentiable(example, i))
    return Example(target, tuple(args), kwargs, constant)


def _is_differentiable(example: Example, operand: int) -> bool:
    if not example.tensors[operand].is_floating_point():
        return False
    inputs = [x.detach().clone().requires_grad_(i == operand) for i, x in enumerate(example.tensors)]
    args, kwargs = fill((example.args, example.kwargs), inputs)
    try:
        example.target(*args, **kwargs).sum().backward()
    except (RuntimeError, NotImplementedError):
        return False
    return True
