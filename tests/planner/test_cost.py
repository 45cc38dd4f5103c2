"""The arithmetic of convolutions, against a count by hand of the products in a loop over all places."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoparallel.graph.sizes import Sizes
from autoparallel.hardware import H100
from autoparallel.operators.experts import grouped_linear
from autoparallel.placements.modes import parse_mode
from autoparallel.planner.draft import call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from autoparallel.predict.cost import model_flops, operator_seconds, rule_points
from autoparallel.rules import rule_for

ROWS, CHANNELS, OUT = 6, 8, 12

# Arithmetic alone: no operator takes time to be started, or to read and write.
ARITHMETIC = dataclasses.replace(H100, name="arithmetic", launch=0.0, memory_bandwidth=float("inf"), overlap=0.0)

CONVOLUTIONS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "plain": (nn.Conv2d, {"kernel_size": 3}, (9, 7)),
    "padded, in steps": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "stride": 2}, (9, 7)),
    "grouped": (nn.Conv2d, {"kernel_size": 3, "groups": 4, "padding": 1}, (9, 7)),
    "dilated": (nn.Conv2d, {"kernel_size": 3, "dilation": 2}, (9, 7)),
    "grouped and dilated": (nn.Conv2d, {"kernel_size": (3, 2), "groups": 2, "dilation": (2, 3)}, (9, 7)),
    "one dim": (nn.Conv1d, {"kernel_size": 5, "groups": 2, "dilation": 2}, (16,)),
    "transposed": (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2, "groups": 4}, (5, 4)),
}


def _counted(layer: nn.Module, places: tuple[int, ...]) -> int:
    """Multiplications and additions of a forward: one of each wherever an input channel meets a weight at a place.

    A convolution visits every place of its result, a transposed one every place of its input; at each of them every
    channel of one side meets, through every entry of the kernel, the channels of its group on the other side.
    Dilation moves the entries apart and makes no more of them.
    """
    result = layer(torch.empty(ROWS, CHANNELS, *places)).shape[2:]
    visited = places if isinstance(layer, nn.ConvTranspose2d) else result
    count = 0
    for _ in itertools.product(*map(range, visited)):
        for _ in itertools.product(*map(range, layer.kernel_size)):  # type: ignore[arg-type]
            count += CHANNELS * (OUT // int(layer.groups))  # type: ignore[arg-type]
    return 2 * ROWS * count


def _graph(name: str) -> tuple[fx.Graph, fx.Node, Any, int]:
    """A captured convolution behind a trained scale, its node, how sizes are read, and its count."""
    make, options, places = CONVOLUTIONS[name]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(1)), make(CHANNELS, OUT, bias=False, **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.scale)

    model = Scaled()
    captured = Planner(model, Request((("x", 2),), H100)).capture(call_of((torch.empty(ROWS, CHANNELS, *places),)))
    (node,) = (n for n in captured.graph.nodes if n.op == "call_function" and "conv" in str(n.target))
    return captured.graph, node, Sizes(captured.actual), _counted(model.layer, places)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_counted_forward_and_backward(name: str) -> None:
    graph, node, size, count = _graph(name)
    rule = rule_for(node)
    assert rule is not None
    assert rule_points(rule, size) == pytest.approx(count)
    # The gradients of the input and of the weight take as many products as the forward, each.
    assert sum(model_flops(graph, size).values()) == pytest.approx(3 * count)
    forward, backward = operator_seconds(ARITHMETIC, rule, [parse_mode("I")], (2,), size, 1.0, torch.float32)
    assert forward == pytest.approx(count / ARITHMETIC.flops[torch.float32])
    assert backward == pytest.approx(2 * forward)


@pytest.mark.parametrize("name", ["grouped", "grouped and dilated"])
def test_groups_on_two_ranks_are_half_of_it_each(name: str) -> None:
    _, node, size, count = _graph(name)
    rule = rule_for(node)
    assert rule is not None
    forward, backward = operator_seconds(ARITHMETIC, rule, [parse_mode("shard:g")], (2,), size, 1.0, torch.float32)
    assert (forward, backward) == pytest.approx((count / 2 / ARITHMETIC.flops[torch.float32], 2 * forward))


def test_fused_attention_reaches_a_part_of_the_peak_and_makes_its_scores_again() -> None:
    """As the prediction of a program prices the kernels (see ``predict.meter``)."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x * self.scale, x, x, is_causal=True)

    batch, heads, length, width = 2, 4, 64, 16
    call = call_of((torch.empty(batch, heads, length, width),))
    captured = Planner(Attention(), Request((("x", 2),), H100)).capture(call)
    (node,) = (n for n in captured.graph.nodes if "attention" in str(n.target))
    rule = rule_for(node)
    assert rule is not None and H100.attention < 1
    forward, backward = operator_seconds(
        ARITHMETIC, rule, [parse_mode("I")], (2,), Sizes(captured.actual), 1.0, torch.float32
    )
    product = 2 * batch * heads * length * length * width / 2  # half of the scores are masked
    assert forward == pytest.approx(2 * product / ARITHMETIC.flops[torch.float32] / H100.attention)
    assert backward == pytest.approx(forward * 5 / 2)


def test_the_hand_count_is_that_of_the_loop_that_computes() -> None:
    """A convolution written out as its products, which are counted as they are made."""
    layer = nn.Conv1d(4, 6, 3, groups=2, dilation=2, bias=False)
    x, made = torch.randn(1, 4, 9), 0
    out = torch.zeros(1, 6, 5)
    for o, place, i, k in itertools.product(range(6), range(5), range(2), range(3)):
        out[0, o, place] += x[0, 2 * (o // 3) + i, place + 2 * k] * layer.weight[o, i, k].detach()
        made += 2
    torch.testing.assert_close(out, layer(x).detach())
    count = 0
    for _ in itertools.product(range(5), range(3)):
        count += 4 * (6 // 2)
    assert made == 2 * count


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, CHANNELS, OUT))

    def forward(self, x: Tensor) -> Tensor:
        return grouped_linear(x, self.w, x.argmax(-1) % 4)


@pytest.mark.parametrize(("modes", "ranks"), [("shard:s@e,I", 2), ("shard:s@e,shard:s", 8), ("shard:s@e,shard:s@e", 8)])
def test_rows_that_are_exchanged_are_paid_for_once(modes: str, ranks: int) -> None:
    """The rows go to their experts and come back; backward they go once more, with the gradients of what came back."""
    rows, sizes = 64, (2, 4)
    captured = Planner(Experts(), Request((("x", 2), ("y", 4)), H100)).capture(call_of((torch.empty(rows, CHANNELS),)))
    (node,) = (n for n in captured.graph.nodes if n.op == "call_function" and "grouped" in str(n.target))
    node.target = grouped_linear  # as in graphs that are made of torch's own operator
    rule, chosen = rule_for(node), [parse_mode(mode) for mode in modes.split(",")]
    assert rule is not None
    without = dataclasses.replace(rule, exchange=None)
    size, axes = Sizes(captured.actual), [i for i, mode in enumerate(modes.split(",")) if "@" in mode]
    found, alone = (operator_seconds(ARITHMETIC, r, chosen, sizes, size, 1.0, torch.float32) for r in (rule, without))
    group = math.prod(sizes[axis] for axis in axes)
    sent, returned = (
        ARITHMETIC.step_seconds(sizes, "all_to_all", axes, rows * width * 4 // ranks * group)
        for width in (CHANNELS, OUT)
    )
    assert found[0] - alone[0] == pytest.approx(sent + returned)
    assert found[1] - alone[1] == pytest.approx(2 * sent + returned)
