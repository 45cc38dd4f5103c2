"""Where gradients flow, and which outputs are detached."""

from __future__ import annotations

import torch
from torch import fx

from autoparallel.graph.losses import is_loss
from autoparallel.passes.mark_gradients import (
    Detached,
    detach_outputs,
    differentiable_outputs,
    mark_backward,
    mark_differentiable,
)

aten = torch.ops.aten


def _graph() -> fx.Graph:
    """The outputs are the new value of a buffer, the loss, what lies beside it, and a number without a gradient."""
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    product = graph.call_function(aten.mul.Tensor, (x, w))
    loss = graph.call_function(aten.sum.default, (product,))
    copy = graph.call_function(aten.detach.default, (product,))
    count = graph.call_function(aten.sum.default, (copy,))
    graph.output((product, loss, product, count))
    for node in graph.nodes:
        scalar = node in (loss, count)
        node.meta.update(val=torch.zeros(() if scalar else (3,)), key=node.name)
    return graph


def _text(graph: fx.Graph) -> list[str]:
    return [f"{n.name}({', '.join(map(str, n.args))})" for n in graph.nodes if n.op == "call_function"] + [
        str(graph.output_node().args[0])
    ]


def test_gradients_flow_from_what_is_trained_to_what_is_differentiated() -> None:
    graph = _graph()
    mark_differentiable(graph, {"w"})
    mark_backward(graph)
    marks = {n.name: (n.meta["differentiable"], n.meta["backward"]) for n in graph.nodes if n.op != "output"}
    assert marks == {
        "w": (True, True),
        "x": (False, False),
        "mul_tensor": (True, True),
        "sum_default": (True, True),
        "detach_default": (False, False),
        "sum_default_1": (False, False),
    }
    results = graph.output_node().args[0]
    assert differentiable_outputs(results, 1) == [1, 2]
    assert [is_loss(results[i]) for i in (1, 2)] == [True, False]  # type: ignore[index]


def test_new_values_of_buffers_and_what_lies_beside_a_loss_are_detached() -> None:
    graph = _graph()
    before = [
        "mul_tensor(x, w)",
        "sum_default(mul_tensor)",
        "detach_default(mul_tensor)",
        "sum_default_1(detach_default)",
    ]
    assert _text(graph) == [*before, "(mul_tensor, sum_default, mul_tensor, sum_default_1)"]
    mark_differentiable(graph, {"w"})
    assert detach_outputs(graph, 1, loss=1) == Detached((2,))
    assert _text(graph) == [
        *before,
        "detach_default_1(mul_tensor)",
        "(detach_default_1, sum_default, detach_default_1, sum_default_1)",
    ]


def test_gradients_flow_through_complex_numbers() -> None:
    graph = fx.Graph()
    w = graph.placeholder("w")
    complex_ = graph.call_function(aten.fft_rfft.default, (w,))
    angle = graph.call_function(aten.angle.default, (complex_,))
    sign = graph.call_function(aten.gt.Scalar, (angle, 0))
    graph.output((angle, sign, complex_))
    values = (torch.zeros(4), torch.zeros(3, dtype=torch.complex64), torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    for node, value in zip((w, complex_, angle, sign), values, strict=True):
        node.meta.update(val=value, key=node.name)
    mark_differentiable(graph, {"w"})
    mark_backward(graph)
    assert [n.meta["backward"] for n in (w, complex_, angle, sign)] == [True, True, True, False]
    results = graph.output_node().args[0]
    assert differentiable_outputs(results, 0) == [0, 2]


def test_a_complex_scalar_is_no_loss() -> None:
    graph = fx.Graph()
    node = graph.placeholder("z")
    for dtype, expected in ((torch.complex64, False), (torch.float64, True)):
        node.meta["val"] = torch.zeros((), dtype=dtype)
        assert is_loss(node) == expected


def test_without_a_loss_outputs_stay_differentiable() -> None:
    graph = _graph()
    mark_differentiable(graph, {"w"})
    product, _, _, count = graph.output_node().args[0]  # type: ignore[misc]
    graph.output_node().args = ((product, product, count),)
    assert detach_outputs(graph, 1) == Detached(())
    assert str(graph.output_node().args[0]) == "(detach_default_1, mul_tensor, sum_default_1)"


def test_a_value_that_is_several_outputs_is_detached_once() -> None:
    """Two nodes with one key would be one value of the global graph: transformers' Llava gives its image's features
    twice."""
    graph = _graph()
    mark_differentiable(graph, {"w"})
    product, total, _, _ = graph.output_node().args[0]  # type: ignore[misc]
    graph.output_node().args = ((total, product, product),)
    assert detach_outputs(graph, 0, loss=0) == Detached((1, 2))
    assert str(graph.output_node().args[0]) == "(sum_default, detach_default_1, detach_default_1)"
