"""What models of all kinds are captured as: rules for every operator, and the same numbers as the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoparallel.capture.capture import capture
from autoparallel.capture.settings import CaptureSettings
from autoparallel.graph.captured import Captured, describe_inputs
from autoparallel.rules import operator_name, rule_for
from autoparallel.rules.calls import is_tensor, tensor_operands
from tests.models import NAMES, build

ROWS = 4


def _capture(model: nn.Module, args: Any, kwargs: Any, *, loss_fn: Any = None, training: bool = True) -> Captured:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    specs, batch = describe_inputs(leaves)
    return capture(model, specs, spec, CaptureSettings(batch, batch, loss_fn=loss_fn, training=training))


def _without_rule(captured: Captured) -> list[str]:
    """The operators without a rule among those that descend from parameters."""
    found = {n for n in captured.graph.nodes if n.name in captured.parameters}
    names: dict[str, None] = {}
    for node in captured.graph.nodes:
        if node.op == "call_function" and any(n in found for n in node.all_input_nodes):
            found.add(node)
            several = tensor_operands(node) and isinstance(node.meta["val"], (tuple, list))
            if (is_tensor(node) or several) and rule_for(node) is None:
                names.setdefault(operator_name(node.target))
    return list(names)


LARGE = {True: ("mixtral", "moe_switch", "moe_dropless"), False: ("mixtral", "moe_switch", "moe", "llama", "gpt2")}
"""Models whose traces take longest, by whether they are traced in training."""


@pytest.mark.wide_where(lambda name, training: not training or name not in ("gpt", "resnet"))
@pytest.mark.slow_where(lambda name, training: name in LARGE[training])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NAMES)
def test_every_operator_of_the_models_has_a_rule(name: str, training: bool) -> None:
    case = build(name)
    args, kwargs = case.make_batch(0, ROWS)
    captured = _capture(case.model, args, kwargs, loss_fn=case.loss_fn, training=training)
    assert _without_rule(captured) == []


class _Case(nn.Module):
    """``f(x * w, y, b)`` for a parameter ``w`` like one row of x, and a vector ``b`` of positive numbers."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.function = function
        self.w = nn.Parameter(torch.randn(6, 4, generator=generator, dtype=torch.float64))
        self.b = nn.Parameter(torch.rand(4, generator=generator, dtype=torch.float64) + 0.1)
        self.register_buffer("weights", torch.rand(6, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x * self.w, y, self.b)


def _classes(y: Tensor, count: int = 4) -> Tensor:
    return (y.abs() * 10).long() % count


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mse_loss": lambda x, y, b: F.mse_loss(x, y),
    "mse_loss_broadcast": lambda x, y, b: F.mse_loss(x, b),
    "mse_loss_none": lambda x, y, b: F.mse_loss(x, y, reduction="none"),
    "smooth_l1_loss": lambda x, y, b: F.smooth_l1_loss(x, y),
    "kl_div": lambda x, y, b: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "binary_cross_entropy": lambda x, y, b: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "cross_entropy": lambda x, y, b: F.cross_entropy(x, _classes(y[:, 0], 6)),
    "cross_entropy_none": lambda x, y, b: F.cross_entropy(x, _classes(y[:, 0], 6), reduction="none"),
    "cross_entropy_sum": lambda x, y, b: F.cross_entropy(x, _classes(y[:, 0], 6), ignore_index=2, reduction="sum"),
    "cross_entropy_smooth": lambda x, y, b: F.cross_entropy(x, _classes(y[:, 0], 6), label_smoothing=0.1),
    "cross_entropy_weights": lambda x, y, b: F.cross_entropy(
        x.flatten(0, 1), _classes(y[..., 0]).flatten(), b.detach(), ignore_index=1, label_smoothing=0.2
    ),
    "cross_entropy_soft": lambda x, y, b: F.cross_entropy(x.flatten(0, 1), y.softmax(-1).flatten(0, 1)),
    "nll_loss": lambda x, y, b: F.nll_loss(x.log_softmax(1), _classes(y[:, 0], 6), ignore_index=3),
    "nll_loss_none": lambda x, y, b: F.nll_loss(x.log_softmax(1), _classes(y[:, 0], 6), reduction="none"),
    "group_norm": lambda x, y, b: F.group_norm(x, 3),
    "rms_norm": lambda x, y, b: F.rms_norm(x, (4,), b),
    "instance_norm": lambda x, y, b: F.instance_norm(x),
    "batch_norm": lambda x, y, b: F.batch_norm(x.transpose(1, 2), None, None, b, b, training=True),
    "normalize": lambda x, y, b: F.normalize(x, dim=-1),
    "glu": lambda x, y, b: F.glu(x),
    "chunk": lambda x, y, b: x.chunk(2, -1)[0] * x.split([2, 2], -1)[1] + x.unbind(1)[2][:, None, :2],
    "einsum": lambda x, y, b: torch.einsum("bij,bkj,j->bik", x, y, b),
    "gather": lambda x, y, b: x.gather(2, _classes(y)) + x.take_along_dim(_classes(y), 2),
    "scatter": lambda x, y, b: x.scatter(2, _classes(y[..., :1]), y) + x.scatter_add(2, _classes(y), y),
    "index_select": lambda x, y, b: x.index_select(1, torch.arange(3)) + x[:, torch.tensor([0, 2, 4])],
    "where": lambda x, y, b: torch.where(y > 0, x, 0.0) + torch.where(y > 0, x, b),
    "masked_fill": lambda x, y, b: x.masked_fill(y > 0, 0) + x.masked_fill(y > 0, -3.0),
    "triangles": lambda x, y, b: x.tril() + x.triu(1),
    "scans": lambda x, y, b: x.cumsum(1) + x.cumprod(2) + x.logcumsumexp(1),
    "argmax": lambda x, y, b: x.argmax(-1) * x.sum(-1) + x.amax(-1),
    "max_dim": lambda x, y, b: x.max(-1)[0] + x.min(-1)[0] + x.max(2)[1],
    "max_keepdim": lambda x, y, b: x.max(1, keepdim=True)[0],
    "topk": lambda x, y, b: x.topk(2, -1)[0] * b[x.topk(2, -1)[1]] + x.topk(2, 1, largest=False)[0].sum(1)[:, None, :2],
    "sort": lambda x, y, b: x.sort(1)[0] + x.sort(dim=-1, descending=True, stable=True)[0] * y.sort(-1)[1],
    "histogram": lambda x, y, b: torch.histc(x.detach(), 4, -1, 1) * x,
    "one_hot": lambda x, y, b: F.one_hot(_classes(y), 5) * x.unsqueeze(-1),
    "interpolate": lambda x, y, b: F.interpolate(x.unsqueeze(1), size=(9, 9), mode="bilinear"),
    "interpolate_nearest": lambda x, y, b: F.interpolate(x.unsqueeze(1), scale_factor=2),
    "max_pool2d": lambda x, y, b: F.max_pool2d(x.unsqueeze(1), 3, 2, 1),
    "pools": lambda x, y, b: F.avg_pool1d(x, 2) + F.max_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 2),
    "repeat": lambda x, y, b: x.repeat(1, 2, 1) * b.repeat(x.shape[0], 12, 1),
    "repeat_interleave": lambda x, y, b: x.repeat_interleave(2, 1) + x[..., :1].repeat_interleave(4, 2).repeat(1, 2, 1),
    "expand_as": lambda x, y, b: b.expand_as(x) * x,
    "unflatten": lambda x, y, b: x.unflatten(-1, (2, 2)).movedim(2, 1).flatten(2),
    "statistics": lambda x, y, b: torch.var_mean(x, -1)[0] + x.std(-1) + torch.var_mean(x, 2, correction=0)[1],
    "pad": lambda x, y, b: F.pad(x, (1, 1)) + F.pad(x, (1, 1), value=2.0) + F.pad(x, (1, 1), mode="reflect"),
    "activations": lambda x, y, b: F.softplus(x) + F.leaky_relu(x) + F.softsign(x) + F.prelu(x, b[:1]) + F.gelu(x),
    "convolution_same": lambda x, y, b: F.conv1d(x, y[:2, :, :3], padding="same"),
    "convolution_groups": lambda x, y, b: F.conv1d(x, y[0, :, None, :2], b[:1].expand(6), groups=6),
    # Every row has a kernel of its own, so the groups are the rows: dynamic and modulated convolutions.
    "convolution_rows": lambda x, y, b: F.conv1d(
        x.reshape(1, -1, 4), y.mT.reshape(-1, 6, 1), b.repeat(x.shape[0]), groups=x.shape[0]
    ).view_as(x[:, :4]),
    "convolution_transposed": lambda x, y, b: F.conv_transpose1d(x, y[0, :, None, :2].expand(6, 3, 2), stride=2),
    "roll": lambda x, y, b: x.roll(1, 1) + x.flip(1),
    "joins": lambda x, y, b: torch.stack([x, y], 1).flatten(1, 2) + torch.cat([x, y], 1),
    "new": lambda x, y, b: x.new_zeros(x.shape[0], 1, 4) + x.new_ones(4) + x.new_full((4,), 2.0) + x,
    "casts": lambda x, y, b: x.float().type_as(y) + y.type_as(x) * x,
    "addcmul": lambda x, y, b: torch.addcmul(x, x, y) + torch.addcdiv(x, x, y.exp()) + x.lerp(y, 0.3) + x.lerp(y, b),
    "attention": lambda x, y, b: F.scaled_dot_product_attention(x, y, y, attn_mask=x @ y.mT),
    # Dropout with a vanishing probability: the expanded form must be attention.
    "attention_dropout": lambda x, y, b: F.scaled_dot_product_attention(x, y, y, x @ y.mT, dropout_p=1e-12),
    "attention_dropout_mask": lambda x, y, b: F.scaled_dot_product_attention(x, y, y, (y @ y.mT) > 0, dropout_p=1e-12),
    "attention_dropout_causal": lambda x, y, b: F.scaled_dot_product_attention(
        x[:, None], y[:, None, :3], y[:, None, :3], dropout_p=1e-12, is_causal=True, scale=0.3
    ),
    "attention_dropout_grouped": lambda x, y, b: F.scaled_dot_product_attention(
        x.unsqueeze(2), y[:, :2].unsqueeze(2), x[:, :2].unsqueeze(2), dropout_p=1e-12, enable_gqa=True
    ),
    "squeeze": lambda x, y, b: x[:, :1].squeeze() + x[:, 0].unsqueeze(1).squeeze(1),
    # Operators that torch composes of others:
    "synonyms": lambda x, y, b: (
        torch.concat([x.absolute().negative(), torch.concatenate([x, y])])
        .multiply(2)
        .subtract(b)
        .divide(b)
        .true_divide(3)
    ),
    "synonyms_of_comparisons": lambda x, y, b: (
        x * (x.greater(y) & x.less_equal(b)) + x * torch.not_equal(x, 0) * torch.isclose(x, x)
    ),
    "synonyms_of_functions": lambda x, y, b: (
        torch.special.expit(x) + torch.special.softmax(x, -1) + torch.special.logsumexp(x, -1, keepdim=True)
        + x.arctan() + x.arctan2(y) + torch.special.xlogy(x, b) + torch.special.erf(x) + x.fix()
    ),
    "stacks": lambda x, y, b: (
        torch.hstack([x, y]).sum() + torch.vstack([x, y]).amax() + torch.dstack([x, y])
        + torch.column_stack([x, y]).sum()
    ),
    "tile": lambda x, y, b: x.tile(2, 1) * b.tile(2)[:4],
    "flips": lambda x, y, b: x.fliplr() * y.flipud() + x.msort(),
    "differences": lambda x, y, b: (
        x.diff(dim=1).sum(1, keepdim=True) + torch.trapezoid(x, dim=1)[:, None] + torch.cumulative_trapezoid(x, dim=1)
    ),
    "norms": lambda x, y, b: (
        torch.linalg.norm(x, dim=-1) + torch.linalg.vecdot(x, y) + torch.linalg.norm(x)
        + torch.linalg.matrix_norm(x)[:, None]
        + torch.std_mean(x)[0] + x.var() + torch.var_mean(x)[0] + x.std() + x.nanmean(-1)
    ),
    "products": lambda x, y, b: (
        torch.inner(x, b) + torch.cross(x[..., :3], y[..., 1:], -1).sum(-1)
        + torch.linalg.matmul(x, b) + x.kron(b)[..., 0]
    ),
    "grids": lambda x, y, b: (
        torch.meshgrid(b, b, indexing="ij")[0].sum(-1) * torch.broadcast_tensors(x, b)[1]
        + x * torch.cartesian_prod(b, b)[:4, 0]
    ),
    "embedding_losses": lambda x, y, b: (
        F.cosine_embedding_loss(x[:, 0], y[:, 0], x.new_ones(len(x))) + F.margin_ranking_loss(x, y, torch.ones_like(x))
        + F.triplet_margin_loss(x, y, b + y) + F.hinge_embedding_loss(x, torch.ones_like(x))
        + F.multilabel_soft_margin_loss(x[:, 0], y[:, 0].sigmoid())
    ),
    "quantile": lambda x, y, b: x.quantile(0.3, dim=1) + x.nanquantile(0.5, dim=1),
    "chained": lambda x, y, b: torch.linalg.multi_dot([b, y[0].T, y[0], b]),
    "pad_circular": lambda x, y, b: F.pad(x, (1, 1), mode="circular") + F.channel_shuffle(x, 2).sum(),
    "rotary": lambda x, y, b: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2)))).flatten(2),
}  # fmt: skip


@pytest.mark.wide_where(lambda name: name not in list(FUNCTIONS)[::14])
@pytest.mark.slow_where(lambda name: name in list(FUNCTIONS)[1::2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_captured_functions_have_rules_and_the_same_numbers(name: str) -> None:
    model = _Case(FUNCTIONS[name])
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(ROWS, 6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    captured = _capture(model, (x, y), {})
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    given = dict(zip([n for n in captured.inputs if n is not None], (x, y), strict=True))
    tables = {**captured.parameters, **captured.buffers}
    leaves = []
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            leaf = given.get(node.name, captured.constants.get(node.name))
            leaves.append(values[tables[node.name]] if leaf is None else leaf)
    (result,) = captured.outputs
    assert isinstance(result, int)
    found = captured.module(*leaves)[result]
    expected = model(x, y)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    cotangent = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = list(model.parameters())
    for ours, plain in zip(
        torch.autograd.grad(found, wanted, cotangent, allow_unused=True),
        torch.autograd.grad(expected, wanted, cotangent, allow_unused=True),
        strict=True,
    ):
        if ours is None or plain is None:
            assert (ours is None or not ours.any()) and (plain is None or not plain.any())
        else:
            torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    assert _without_rule(captured) == []
