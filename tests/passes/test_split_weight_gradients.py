"""`split_weight_gradients`: which calls leave the gradients of parameters for later, and that these are right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.graph.captured import Captured
from autoparallel.passes.recompute_layers import recompute_layers
from autoparallel.passes.split_weight_gradients import Deferred, Deferring, collect_deferred, split_weight_gradients
from tests.passes.support import Masked, captured, show


def split(graph: Captured) -> int:
    """Splits a graph, and counts the calls that leave gradients for later."""
    split_weight_gradients(graph.module, list(graph.parameters))
    graph.module.recompile()
    return sum(isinstance(node.target, Deferring) for node in graph.graph.nodes)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


class Biased(nn.Module):
    """A matrix product, of a weight that is given, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight).pow(2) + self.bias


class Sharing(nn.Module):
    """Two layers that read one computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 1))
        self.layers = nn.ModuleList(Biased() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.tanh(self.weight * self.scale)
        for layer in self.layers:
            x = layer(x, weight)
        return x


class TestTheExample:
    def test_before_and_after(self) -> None:
        graph = captured(nn.Linear(4, 4, bias=False), torch.randn(8, 4))
        assert show(graph.module)[2] == "linear = aten.linear(args_0, p_model_weight)"
        assert split(graph) == 1
        (call,) = (node for node in graph.graph.nodes if isinstance(node.target, Deferring))
        assert call.target.target is torch.ops.aten.linear.default and call.target.weights == (1,) and not call.kwargs
        assert [x.name for x in call.args] == ["args_0", "p_model_weight"]


class TestWhatIsLeftForLater:
    def test_of_functions_that_are_no_operators(self) -> None:
        graph = captured(nn.Linear(4, 4, bias=False), torch.randn(8, 4))
        (node,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.linear.default)
        node.target = _linear
        assert split(graph) == 1, "and the graph is valid Python"

    def test_nothing_of_a_frozen_parameter(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].requires_grad_(False)
        graph = captured(model, torch.randn(8, 4))
        assert split(graph) == 1
        (call,) = (node for node in graph.graph.nodes if isinstance(node.target, Deferring))
        assert call.args[1].name == "p_model_0_weight"  # type: ignore[index, union-attr]

    def test_nothing_of_an_operator_whose_backward_is_the_users(self) -> None:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: Tensor, w: Tensor) -> Tensor:
                return x * w

            @staticmethod
            def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, Tensor]:
                return 2 * grads[0], 2 * grads[0].sum(0)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(4))

            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = Twice.apply(x, self.w)
                return result

        graph = captured(Model(), torch.randn(8, 4))
        assert split(graph) == 0

    def test_the_first_layer_leaves_its_gradient_though_its_input_has_none(self) -> None:
        graph = captured(nn.Linear(4, 4, bias=False).double(), torch.randn(8, 4, dtype=torch.float64))
        assert split(graph) == 1
        weight, x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), torch.randn(8, 4, dtype=torch.float64)
        deferred: list[Deferred] = []
        with collect_deferred(deferred):
            (result,) = graph.module(weight, x)
        result.sum().backward()
        assert weight.grad is None
        ((outer, grad),) = deferred[0].run()
        assert outer is weight and deferred[0].run() == []
        torch.testing.assert_close(grad, x.sum(0).expand(4, 4))


class TestTheGradients:
    def test_gradients_of_parameters_come_when_they_are_run(self) -> None:
        torch.manual_seed(0)
        model, x = Masked().double(), torch.randn(6, 4, dtype=torch.float64)
        F.mse_loss(model(x), x).backward()
        graph = captured(Masked().double(), torch.randn(8, 4, dtype=torch.float64))
        assert split(graph) == 3
        weights = {n: model.get_parameter(p).detach().requires_grad_() for n, p in graph.parameters.items()}
        inner = x.clone().requires_grad_()
        inputs = [weights.get(n.name, inner) for n in graph.graph.nodes if n.op == "placeholder"]
        deferred: list[Deferred] = []
        with collect_deferred(deferred):
            (result,) = graph.module(*inputs)
        F.mse_loss(result, x).backward()
        assert inner.grad is not None and inner.grad.abs().sum() > 0
        assert all(w.grad is None for w in weights.values())
        sums: dict[int, Tensor] = {}
        for left in deferred:
            for weight, grad in left.run():
                sums[id(weight)] = sums.get(id(weight), torch.zeros_like(grad)) + grad
        for name, parameter in graph.parameters.items():
            torch.testing.assert_close(sums[id(weights[name])], model.get_parameter(parameter).grad)

    def test_without_anything_to_collect_it_is_the_call_itself(self) -> None:
        graph = captured(Masked(), torch.randn(8, 4))
        split(graph)
        model = Masked()
        weights = {n: model.get_parameter(p) for n, p in graph.parameters.items()}
        x = torch.randn(6, 4)
        inputs = [weights.get(n.name, x) for n in graph.graph.nodes if n.op == "placeholder"]
        (result,) = graph.module(*inputs)
        result.sum().backward()
        assert all(w.grad is not None for w in weights.values())

    def test_what_a_layer_that_runs_again_reads_is_differentiated_once(self) -> None:
        """Both layers read one value that follows from parameters alone; the first one runs again."""
        torch.manual_seed(0)
        model, x = Sharing().double(), torch.randn(6, 4, dtype=torch.float64)
        F.mse_loss(model(x), x).backward()
        graph = captured(Sharing().double(), torch.randn(8, 4, dtype=torch.float64))
        recompute_layers(graph.module, {"layers.0": False})
        assert split(graph) == 1, "the bias of the other layer"
        weights = {n: model.get_parameter(p).detach().requires_grad_() for n, p in graph.parameters.items()}
        inputs = [weights.get(n.name, x) for n in graph.graph.nodes if n.op == "placeholder"]
        deferred: list[Deferred] = []
        with collect_deferred(deferred):
            (result,) = graph.module(*inputs)
        F.mse_loss(result, x).backward()
        for weight, grad in [found for left in deferred for found in left.run()]:
            torch.autograd.backward([weight], [grad])
        for name, parameter in graph.parameters.items():
            torch.testing.assert_close(weights[name].grad, model.get_parameter(parameter).grad)
