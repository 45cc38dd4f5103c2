"""The table of rules: every operator that has one, and what makes it.

Operators that torch tags as pointwise are not listed, unless they let sums through (see ``pointwise.is_pointwise``).
What depends on more of a call than its shapes is made by a function of one of the families.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from autoparallel import operators
from autoparallel.operators import draws
from autoparallel.operators.changed_parameters import with_value
from autoparallel.operators.ctc import ctc_losses
from autoparallel.operators.experts import grouped_linear
from autoparallel.operators.flex import flex_operator
from autoparallel.operators.recurrent import recurrent
from autoparallel.rules import convolution, indexing, layers, losses, matmul, random, reductions, shapes
from autoparallel.rules.core import RuleMaker, make_rule
from autoparallel.rules.localize import divide_sizes
from autoparallel.rules.pointwise import masked_fill, pointwise, prelu, quotient

aten = torch.ops.aten

PRODUCTS: dict[Any, str] = {
    aten.mm.default: "m k, k n -> m n",
    aten.mv.default: "m k, k -> m",
    aten.dot.default: "k, k -> ",
    aten.vdot.default: "k, k -> ",
    aten.bmm.default: "b m k, b k n -> b m n",
    aten.outer.default: "m, n -> m n",
    aten.addr.default: "+, m, n -> m n",
    aten.addmm.default: "+, m k, k n -> m n",
    aten.baddbmm.default: "+, b m k, b k n -> b m n",
    aten.addmv.default: "+, m k, k -> m",
    aten.addbmm.default: "+, b m k, b k n -> m n",
    aten.bilinear.default: "... i, ... j, n i j, + -> ... n",
}
"""Products, summed over what the result does not bear; ``+`` is added to them."""

JOINTLY_LINEAR: dict[Any, Sequence[Sequence[int]]] = {
    aten.add.Tensor: [(0, 1)],
    aten.sub.Tensor: [(0, 1)],
    aten.mul.Tensor: [(0,), (1,)],
    aten.addcmul.default: [(0, 1), (0, 2)],
    aten.addcdiv.default: [(0, 1)],
    aten.lerp.Scalar: [(0, 1)],
    aten.lerp.Tensor: [(0, 1)],
    aten.where.self: [(1, 2)],
    aten.masked_fill.Tensor: [(0, 2)],
    aten.conj_physical.default: [(0,)],
    aten.complex.default: [(0, 1)],
    operators.weighted_mean: [(0,)],
    operators.mean_or_sum: [(0,)],
}
"""Pointwise operators that are linear, and in which operands."""

UNTAGGED = [
    aten.full_like.default, aten.ones_like.default, aten.zeros_like.default, aten.fill.Scalar, aten.fill.Tensor,
    aten.hardswish.default, aten.log_sigmoid.default, aten.__and__.Tensor, aten.__or__.Tensor,
    aten.floor_divide.default, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten.polar.default,
    aten.leaky_relu.default, aten.zero.default, with_value,
]  # fmt: skip
"""Pointwise operators that lack torch's tag, in one of the releases that are supported."""

COPIES = [
    aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default, aten._to_copy.default,
    aten.to.dtype, aten.positive.default, aten.neg.default, aten.mul.Scalar, aten.div.Scalar,
]  # fmt: skip
"""Pointwise operators that copy, cast, negate, or multiply by a number."""

PLACES: dict[Any, str] = {
    aten.avg_pool1d.default: "... x -> ... u",
    aten.avg_pool2d.default: "... x y -> ... u v",
    aten.avg_pool3d.default: "... x y z -> ... u v w",
    aten.adaptive_avg_pool1d.default: "... x -> ... u",
    aten.adaptive_avg_pool2d.default: "... x y -> ... u v",
    aten._adaptive_avg_pool2d.default: "... x y -> ... u v",
    aten.adaptive_avg_pool3d.default: "... x y z -> ... u v w",
    aten.upsample_nearest1d.vec: "... x -> ... u",
    aten.upsample_linear1d.vec: "... x -> ... u",
    aten.upsample_nearest2d.vec: "... x y -> ... u v",
    aten.upsample_bilinear2d.vec: "... x y -> ... u v",
    aten.upsample_bicubic2d.vec: "... x y -> ... u v",
    aten.upsample_nearest3d.vec: "... x y z -> ... u v w",
    aten.upsample_trilinear3d.vec: "... x y z -> ... u v w",
    aten.pixel_shuffle.default: "... c x y -> ... d u v",
    aten.pixel_unshuffle.default: "... c x y -> ... d u v",
    aten.im2col.default: "... c x y -> ... k l",
    aten.col2im.default: "... k l -> ... c x y",
    aten._upsample_bilinear2d_aa.vec: "... x y -> ... u v",
    aten._upsample_bicubic2d_aa.vec: "... x y -> ... u v",
    aten.channel_shuffle.default: "... c x y -> ... d x y",
    aten.view_as_real.default: "... -> ... c",
    aten.tril.default: "... x y -> ... u v",
    aten.triu.default: "... x y -> ... u v",
    aten.max_unpool2d.default: "... x y, ... x y -> ... u v",
    aten.max_unpool3d.default: "... x y z, ... x y z -> ... u v w",
}
"""Linear operators that change the last dims, which stay whole."""

LARGEST_PLACES: dict[Any, str] = {
    aten.max_pool1d.default: "... x -> ... u",
    aten.max_pool2d.default: "... x y -> ... u v",
    aten.max_pool3d.default: "... x y z -> ... u v w",
    aten.one_hot.default: "... -> ... c",
    aten.linalg_inv.default: "... x y -> ... x y",
    aten.linalg_det.default: "... x y -> ...",
    aten.linalg_cholesky.default: "... x y -> ... x y",
    aten.linalg_svdvals.default: "... x y -> ... s",
    aten.linalg_solve_triangular.default: "... x y, ... u v -> ... u v",
    aten.cholesky_solve.default: "... u v, ... x y -> ... u v",
    aten.matrix_exp.default: "... x y -> ... x y",
}
"""Others that are not linear."""

REDUCTIONS = [
    aten.amax.default, aten.amin.default, aten.argmax.default, aten.argmin.default, aten.any.dim, aten.all.dim,
    aten.logsumexp.default, aten.var.correction, aten.std.correction, aten.prod.dim_int, aten.var.dim, aten.std.dim,
    aten.linalg_vector_norm.default, aten.count_nonzero.dim_IntList, aten.cosine_similarity.default,
]  # fmt: skip
"""Reductions of dims that stay whole."""

ALONG = [
    aten._softmax.default, aten.softmax.int, aten._log_softmax.default, aten.log_softmax.int,
    aten._safe_softmax.default, aten.cumprod.default, aten.logcumsumexp.default, aten.argsort.default,
    aten.argsort.stable, aten.glu.default, operators.topk_indices, operators.indices_along,
]  # fmt: skip
"""Operators that work along dims, which stay whole."""

LINEAR_ALONG = [
    aten.slice.Tensor, aten.narrow.default, aten.flip.default, aten.roll.default, aten.rot90.default,
    aten.cumsum.default, operators.interleave,
]  # fmt: skip
"""Those of them that are linear."""

TRANSFORMS = [
    aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default, aten.fft_irfft.default, aten.fft_hfft.default,
    aten.fft_ihfft.default, aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_rfft2.default,
    aten.fft_irfft2.default, aten.fft_fftn.default, aten.fft_ifftn.default, aten.fft_rfftn.default,
    aten.fft_irfftn.default, aten.fft_fftshift.default, aten.fft_ifftshift.default,
    aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default,
]  # fmt: skip
"""Fourier transforms, linear over real numbers as a conjugate and a real part are: forward and backward."""

CONVOLUTIONS = [
    aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding,
    aten.conv2d.padding, aten.conv3d.padding, aten.conv_transpose1d.default, aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
]  # fmt: skip

LOSSES = [
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default, aten.kl_div.default,
    aten.soft_margin_loss.default, aten.poisson_nll_loss.default,
]  # fmt: skip
"""Losses of each element."""

BY_ARGUMENTS: dict[Any, RuleMaker] = {
    aten.view_as_complex.default: partial(
        make_rule, notation="... c -> ...", linear=[(0,)], blocked=["c"], localize=shapes.join_pairs
    ),
    aten.div.Tensor: quotient,
    aten.masked_fill.Scalar: masked_fill,
    aten.prelu.default: prelu,
    aten.matmul.default: matmul.matmul,
    aten.linear.default: matmul.linear,
    aten.einsum.default: matmul.einsum,
    aten.tensordot.default: matmul.tensordot,
    aten.scaled_dot_product_attention.default: matmul.attention,
    aten.linalg_solve.default: matmul.solve,
    flex_operator: matmul.flex_attention,
    grouped_linear: matmul.grouped,
    recurrent: layers.recurrent,
    ctc_losses: losses.ctc_losses,
    aten.grid_sampler.default: layers.grid_sample,
    aten.grid_sampler_2d.default: layers.grid_sample,
    aten.grid_sampler_3d.default: layers.grid_sample,
    aten._weight_norm.default: layers.weight_norm,
    aten.stft.default: layers.stft,
    aten.cdist.default: partial(make_rule, notation="... p m, ... r m -> ... p r", blocked=["m"]),
    aten.pairwise_distance.default: reductions.distance,
    aten.bucketize.Tensor: partial(make_rule, notation="..., x -> ...", blocked=["x"]),
    aten.searchsorted.Tensor: indexing.search,
    aten.isin.Tensor_Tensor: indexing.membership,
    aten.affine_grid_generator.default: layers.affine_grid,
    aten.linalg_cross.default: reductions.cross,
    operators.pool_indices: reductions.pooled_indices,
    aten.sum.default: partial(reductions.reduction, kind="sum"),
    aten.sum.dim_IntList: partial(reductions.reduction, kind="sum"),
    aten.nansum.default: partial(reductions.reduction, kind="sum", linear=False),
    aten.mean.default: partial(reductions.reduction, kind="mean"),
    aten.mean.dim: partial(reductions.reduction, kind="mean"),
    aten.count_nonzero.default: partial(reductions.reduction, kind="sum", linear=False),
    aten.histc.default: reductions.histogram,
    aten.layer_norm.default: reductions.layer_norm,
    aten.rms_norm.default: reductions.layer_norm,
    aten.group_norm.default: reductions.group_norm,
    aten.instance_norm.default: reductions.instance_norm,
    aten.nll_loss_nd.default: losses.class_loss,
    aten.cross_entropy_loss.default: losses.class_loss,
    operators.cross_entropy_sum: losses.cross_entropy_sum,
    operators.cross_entropy_weight: losses.cross_entropy_weight,
    aten.embedding.default: indexing.embedding,
    operators.padded_embedding: indexing.embedding,
    operators.pad_rows: indexing.padding,
    aten.gather.default: indexing.gather,
    aten.take_along_dim.default: indexing.gather,
    aten.index_select.default: indexing.index_select,
    aten.scatter_add.default: indexing.scatter_add,
    aten.scatter.src: indexing.scatter,
    aten.scatter.value: indexing.scatter,
    aten.scatter.reduce: indexing.scatter,
    aten.scatter_reduce.two: indexing.scatter,
    aten.index_copy.default: indexing.index_copy,
    aten.index_fill.int_Scalar: indexing.index_copy,
    aten.index_add.default: indexing.index_add,
    aten.index.Tensor: indexing.index,
    aten.index_put.default: indexing.index_put,
    aten.view.default: partial(shapes.reshape, localize=divide_sizes("size")),
    aten._unsafe_view.default: partial(shapes.reshape, localize=divide_sizes("size")),
    aten.reshape.default: partial(shapes.reshape, localize=divide_sizes("shape")),
    aten.flatten.using_ints: shapes.reshape,
    aten.unsqueeze.default: shapes.reshape,
    aten.squeeze.dim: shapes.squeeze,
    aten.squeeze.dims: shapes.squeeze,
    aten.squeeze.default: shapes.squeeze,
    aten.expand.default: partial(
        make_rule, notation="... -> ...", linear=[(0,)], localize=divide_sizes("size")
    ),
    aten.transpose.int: shapes.permutation,
    aten.t.default: shapes.permutation,
    aten.numpy_T.default: shapes.permutation,
    aten.permute.default: shapes.permutation,
    aten.select.int: shapes.select,
    aten.diagonal.default: shapes.diagonal,
    aten.diagonal_scatter.default: shapes.diagonal_scatter,
    aten.pad.default: shapes.pad,
    aten.constant_pad_nd.default: shapes.pad,
    aten.slice_scatter.default: shapes.slice_scatter,
    aten.select_scatter.default: shapes.select_scatter,
    aten.unfold.default: shapes.unfold,
    aten.diag_embed.default: shapes.diagonal_matrices,
    aten.cat.default: shapes.cat,
    aten.stack.default: shapes.stack,
    operators.piece: shapes.piece,
    operators.dropout: partial(make_rule, notation="... -> ...", linear=[(0,)], localize=random.localize_draw),
    draws.draw_poisson: partial(make_rule, notation="... -> ...", localize=random.localize_draw),
    draws.draw_gamma: partial(make_rule, notation="... -> ...", localize=random.localize_draw),
    draws.draw: random.sized,
    draws.draw_integers: random.sized,
    draws.draw_classes: random.classes,
}  # fmt: skip
"""Operators whose factors depend on arguments, or whose local calls do."""


def _places(notation: str, linear: bool) -> RuleMaker:
    blocked = [letter for letter in notation if letter.isalpha()]
    return partial(make_rule, notation=notation, linear=[(0,)] if linear else [], blocked=blocked)


SECTIONS: tuple[dict[Any, RuleMaker], ...] = (
    {target: partial(matmul.product, notation=notation) for target, notation in PRODUCTS.items()},
    {target: partial(pointwise, linear=linear) for target, linear in JOINTLY_LINEAR.items()},
    dict.fromkeys(UNTAGGED, pointwise),
    dict.fromkeys(COPIES, partial(pointwise, linear=[(0,)])),
    {target: _places(notation, linear=True) for target, notation in PLACES.items()},
    {target: _places(notation, linear=False) for target, notation in LARGEST_PLACES.items()},
    dict.fromkeys(REDUCTIONS, reductions.reduction),
    dict.fromkeys(ALONG, reductions.along),
    dict.fromkeys(LINEAR_ALONG, partial(reductions.along, linear=True)),
    dict.fromkeys(TRANSFORMS, reductions.fourier),
    dict.fromkeys(CONVOLUTIONS, convolution.convolution),
    dict.fromkeys(LOSSES, losses.elementwise_loss),
    BY_ARGUMENTS,
)
"""The parts of the table; no operator stands in two of them."""

RULES: dict[Any, RuleMaker] = {target: maker for section in SECTIONS for target, maker in section.items()}
"""What makes the rule of a call, by its operator."""
