"""Torch's operators that drop elements as a part of what they do, as the plain model runs them: with basic draws.

They stand whole in a traced graph only; in eager their basic draws are what is seen.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from autoparallel.operators import draws
from autoparallel.operators.torch_random import Draw

aten = torch.ops.aten


def _drop(draw: Draw, x: Any, p: float) -> Any:
    """``x`` after dropout with p > 0; where nothing is kept, nothing is drawn."""
    if p == 1:
        return draw.emit(aten.mul.Tensor, x, 0.0)
    return draw.emit(draws.traced_dropout, x, p, draw.take())


def _dropout(draw: Draw) -> Any:
    return _drop(draw, draw["input"] if "input" in draw.arguments else draw["self"], draw["p"])


def _native_dropout(draw: Draw) -> Any:
    dropped = _dropout(draw)
    return dropped, draw.emit(aten.ne.Scalar, dropped, 0)


def _noisy(feature: bool, alpha: bool) -> Callable[[Draw], Any]:
    def make(draw: Draw) -> Any:
        emit, p = draw.emit, draw["p"]
        x = draw["input"] if "input" in draw.arguments else draw["self"]
        if p == 1 or not (feature or alpha):
            return _drop(draw, x, p)
        value = emit.value(x)
        sizes = emit.sizes(x)
        if feature:
            sizes = [*sizes[:2], *([1] * (len(sizes) - 2))]
        noise = draw.draw("bernoulli", 1 - p, sizes=sizes, dtype=value.dtype, device=value.device)
        if not alpha:
            return emit(aten.mul.Tensor, x, emit(aten.div.Tensor, noise, 1 - p))
        a = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
        shift = emit(aten.mul.Tensor, emit(aten.sub.Tensor, noise, 1), _ALPHA * a)
        shift = emit(aten.add.Tensor, shift, _ALPHA * a * p)
        return emit(aten.add.Tensor, emit(aten.mul.Tensor, x, emit(aten.mul.Tensor, noise, a)), shift)

    return make


_ALPHA = 1.7580993408473766  # minus the limit of selu on the left (Klambauer and others 2017)


def _attention(draw: Draw) -> Any:
    """Attention whose weights are dropped out, in elementary operators."""
    emit, v = draw.emit, draw.arguments
    q, k, value, mask = v["query"], v["key"], v["value"], v["attn_mask"]
    if v["enable_gqa"]:
        k, value = (_repeat_heads(draw, t, emit.value(q).shape[-3]) for t in (k, value))
    scale = v["scale"] if v["scale"] is not None else 1.0 / math.sqrt(emit.value(q).shape[-1])
    scores = emit(aten.matmul.default, emit(aten.mul.Tensor, q, scale), emit(aten.transpose.int, k, -2, -1))
    if v["is_causal"]:
        sizes = [emit.sizes(q)[-2], emit.sizes(k)[-2]]
        ones = emit(aten.ones.default, sizes, dtype=torch.bool, device=emit.value(q).device)
        mask = emit(aten.tril.default, ones)
    if mask is not None and emit.value(mask).dtype == torch.bool:
        scores = emit(aten.masked_fill.Scalar, scores, emit(aten.logical_not.default, mask), float("-inf"))
    elif mask is not None:
        scores = emit(aten.add.Tensor, scores, mask)
    weights = _drop(draw, emit(aten._safe_softmax.default, scores, -1), v["dropout_p"])
    return emit(aten.matmul.default, weights, value)


def _repeat_heads(draw: Draw, x: Any, heads: int) -> Any:
    emit, shape = draw.emit, draw.emit.value(x).shape
    ratio = heads // shape[-3]
    if ratio == 1:
        return x
    sizes = emit.sizes(x)
    wide = emit(aten.unsqueeze.default, x, len(shape) - 2)
    wide = emit(aten.expand.default, wide, [*sizes[:-2], ratio, *sizes[-2:]])
    return emit(aten.reshape.default, wide, [*sizes[:-3], heads, *sizes[-2:]])


def _recurrent(draw: Draw) -> Any:
    """Layers of a recurrent network one by one, with dropout between them on [time, batch, features]."""
    emit, v = draw.emit, draw.arguments
    states = v["hx"] if isinstance(v["hx"], list | tuple) else [v["hx"]]
    directions = 1 + v["bidirectional"]
    each = len(v["params"]) // v["num_layers"]
    x = emit(aten.transpose.int, v["input"], 0, 1) if v["batch_first"] else v["input"]
    finals: list[list[Any]] = [[] for _ in states]
    for layer in range(v["num_layers"]):
        first, last = layer * directions, (layer + 1) * directions
        here = [emit(aten.slice.Tensor, state, 0, first, last) for state in states]
        out = emit(
            draw.target, x, here if len(here) > 1 else here[0], v["params"][layer * each : (layer + 1) * each],
            v["has_biases"], 1, 0.0, v["train"], v["bidirectional"], False,
        )  # fmt: skip
        x, *after = [emit(operator.getitem, out, i) for i in range(1 + len(states))]
        for final, state in zip(finals, after, strict=True):
            final.append(state)
        if layer < v["num_layers"] - 1:
            x = _drop(draw, x, v["dropout"])
    x = emit(aten.transpose.int, x, 0, 1) if v["batch_first"] else x
    return (x, *[emit(aten.cat.default, final) for final in finals])


COMPOSITES: dict[Any, Callable[[Draw], Any]] = {
    aten.dropout.default: _dropout,
    aten.dropout_.default: _dropout,
    aten.native_dropout.default: _native_dropout,
    aten.alpha_dropout.default: _noisy(feature=False, alpha=True),
    aten.alpha_dropout_.default: _noisy(feature=False, alpha=True),
    aten.feature_dropout.default: _noisy(feature=True, alpha=False),
    aten.feature_dropout_.default: _noisy(feature=True, alpha=False),
    aten.feature_alpha_dropout.default: _noisy(feature=True, alpha=True),
    aten.feature_alpha_dropout_.default: _noisy(feature=True, alpha=True),
    aten.scaled_dot_product_attention.default: _attention,
    aten.gru.input: _recurrent,
    aten.lstm.input: _recurrent,
    aten.rnn_relu.input: _recurrent,
    aten.rnn_tanh.input: _recurrent,
}
"""What makes a composite operator of basic draws; the result is a tuple where the operator has several."""
