"""Complex numbers, and Fourier transforms.

Rules say that an operator is linear where it is so over real numbers: a conjugate, a real part, a transform of a sum
is the sum of those of its summands, forward and backward.
"""

from __future__ import annotations

import torch
from torch import fx

from autoparallel.rules.calls import arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.elementwise import elementwise

aten = torch.ops.aten


@rule(aten.angle.default, aten.polar.default, aten.sgn.default)
def _nonlinear(node: fx.Node) -> Rule:
    return elementwise(node)


@rule(aten.conj_physical.default)
def _conjugate(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0,)])


@rule(aten.complex.default)
def _complex(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0, 1)])


_ALONG_DIM = (
    aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default, aten.fft_irfft.default, aten.fft_hfft.default,
    aten.fft_ihfft.default,
)  # fmt: skip
_ALONG_DIMS = (
    aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_rfft2.default, aten.fft_irfft2.default,
    aten.fft_fftn.default, aten.fft_ifftn.default, aten.fft_rfftn.default, aten.fft_irfftn.default,
    aten.fft_fftshift.default, aten.fft_ifftshift.default,
    aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default,
)  # fmt: skip


@rule(*_ALONG_DIM, *_ALONG_DIMS)
def _transform(node: fx.Node) -> Rule:
    """The dims that are transformed stay whole; some of them may change their size."""
    source, v = shape_of(tensor_operands(node)[0]), arguments(node)
    dims = v["dim"]
    if dims is None:  # the last of them where sizes are given
        dims = range(-len(v["s"]), 0) if v.get("s") is not None else range(len(source))
    gone = {d % len(source) for d in ([dims] if isinstance(dims, int) else dims)}
    before = [f"x{d}" if d in gone else f"d{d}" for d in range(len(source))]
    after = [f"k{d}" if d in gone else f"d{d}" for d in range(len(source))]
    blocked = [f"{kind}{d}" for d in sorted(gone) for kind in "xk"]
    notation = f"{' '.join(before)} -> {' '.join(after)}"
    return make_rule(notation, [source], shape_of(node), linear=[(0,)], blocked=blocked)
