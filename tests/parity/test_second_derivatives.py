"""Derivatives of gradients with respect to inputs and parameters: penalties, residuals of equations, forces, products
with Hessians; under any plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel.runtime.module import ParallelModule
from tests.distributed import run_distributed


class Perceptron(nn.Module):
    """A critic, or the solution of an equation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 32), nn.LayerNorm(32)
        self.mid, self.down = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.mid(self.norm(torch.tanh(self.up(x))))))


class Images(nn.Module):
    """Convolutions, whose batch norm reads all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.second(F.silu(self.norm(self.first(x))))).mean((2, 3)))


class Attention(nn.Module):
    """A residual block whose sequence and heads can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (layer(x).view(rows, length, 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, 16))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Layers(nn.Module):
    """Layers that are alike, which can run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Choice(Perceptron):
    """Goes one way or the other, by a value."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mid(torch.tanh(self.up(x))))
        return self.down(h.square() if h.sum() > 0 else self.norm(h))


class Scanned(Perceptron):
    """A recurrence over the features: torch's own second derivatives of a scan are wrong (2.13 takes the first ones for
    constants), those of a loop are not."""

    loops = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)).T.contiguous()

        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            return carry * 0.5 + row.sin(), carry * row

        if not self.loops:
            return scan(step, h[0], h)[1].T
        carry, outputs = h[0], []
        for row in h:
            carry, output = step(carry, row)
            outputs.append(output)
        return torch.stack(outputs).T


class Classes(nn.Module):
    """A loss of classes that ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 16384, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.up(x))), (x.detach().sum(1).abs() * 8).long() % 64)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (Perceptron, (8, 8)),
    "images": (Images, (4, 2, 6, 6)),
    "attention": (Attention, (4, 6, 8)),
    "layers": (Layers, (8, 8)),
    "choice": (Choice, (8, 8)),
    "classes": (Classes, (8, 8)),
    "scanned": (Scanned, (8, 8)),
}

Use = Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]
"""From a model and an input to a gradient with respect to it or to a parameter, and a loss of that."""


def gradient_penalty(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gulrajani et al. 2017."""
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return grad, out.pow(2).mean() + (grad.flatten(1).norm(2, 1) - 1).pow(2).mean()


def residual(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of an equation of second order (Raissi et al. 2019), whose training takes third derivatives."""
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
    return second, (second - u.mean()).pow(2).mean() + first.pow(3).mean()


def forces(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A loss of nothing but the gradient: the model's output is reached through it alone."""
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    return grad, grad.pow(2).mean()


def curvature(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of all parameters is penalised, and then its derivative along itself."""
    loss, parameters = model(x.detach()).pow(2).mean(), list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    used = [(p, grad) for p, grad in zip(parameters, grads, strict=True) if grad is not None]
    along = torch.autograd.grad(
        [grad for _, grad in used], [p for p, _ in used], [p.detach() for p, _ in used], create_graph=True
    )
    penalty = sum(h.pow(2).sum() for h in along) + sum(grad.pow(2).sum() for _, grad in used)  # type: ignore[misc]
    return along[0], loss + 0.1 * penalty


USES: dict[str, Use] = {use.__name__: use for use in (gradient_penalty, residual, forces, curvature)}


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _off(ours: Tensor, plain: Tensor) -> float:
    assert plain.abs().max() > 0
    return float((_whole(ours) - plain).abs().max() / plain.abs().max().clamp_min(1e-2))


def _pair(name: str, shape: tuple[int, ...], plan: Any, options: dict[str, Any]) -> tuple[nn.Module, ParallelModule]:
    torch.manual_seed(0)
    plain = MODELS[name][0]().double()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    model = autoparallel.compile(copy.deepcopy(plain), mesh, plan=plan, **options)
    plain.loops = True
    return plain, model


def _train(name: str, use: str, shape: tuple[int, ...], plan: str, options: dict[str, Any]) -> dict[str, Any]:
    """Three steps beside the plain model, and how far they part."""
    plain, model = _pair(name, shape, plan, options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=2e-3) for m in (plain, model)]
    worst = 0.0
    for step in range(3):
        x = torch.randn(MODELS[name][1], generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        grads, inputs = [], []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            inputs.append(x.clone().requires_grad_())
            grad, loss = USES[use](each, inputs[-1])
            loss.backward()
            grads.append(grad.detach())
        worst = max(worst, _off(grads[1], grads[0]))
        if use != "curvature":
            worst = max(worst, _off(inputs[1].grad, inputs[0].grad))  # type: ignore[arg-type]
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if theirs.grad is not None and theirs.grad.abs().max() > 1e-9:
                worst = max(worst, _off(ours.grad, theirs.grad))  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
    sharded = sum("S" in str(p.at_rest) for p in model.plan.parameters.values())
    text = "".join(kind.runner.program.text() for kind in model._kinds)
    gathers = {p.gather for p in model.plan.parameters.values()}
    return {"worst": worst, "sharded": sharded, "gathers": gathers, "again": len(model.plan.recompute), "text": text}


def _all_uses(name: str, shape: tuple[int, ...], plan: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    # Torch's third derivatives of a batch norm take its statistics for constants: its bias before one has a gradient.
    uses = [use for use in USES if not (name == "images" and use in ("residual", "curvature"))]
    return {use: _train(name, use, shape, plan, options) for use in uses}


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.slow_where(lambda name, plan: name == "attention" and plan != "tensor_parallel")
@pytest.mark.parametrize("plan", ["data_parallel", "fsdp", "tensor_parallel"])
@pytest.mark.parametrize(
    "name", ["perceptron", *(pytest.param(n, marks=pytest.mark.wide) for n in ("images", "attention"))]
)
def test_gradients_of_inputs_are_differentiated_on_two_ranks(name: str, plan: str) -> None:
    for found in run_distributed(_all_uses, name, (2,), plan, {}, world_size=2):
        assert max(each["worst"] for each in found.values()) < 1e-9, found
        assert all(each["sharded"] or plan == "data_parallel" for each in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["auto", "fsdp_tensor_parallel"])
def test_gradients_of_inputs_are_differentiated_on_two_axes(plan: str) -> None:
    for found in run_distributed(_all_uses, "attention", (2, 2), plan, {}, world_size=4):
        assert max(each["worst"] for each in found.values()) < 1e-9, found


@pytest.mark.wide
@pytest.mark.parametrize("name", ["choice", pytest.param("scanned", marks=pytest.mark.slow)])
def test_the_way_that_a_value_chooses_has_second_derivatives(name: str) -> None:
    for found in run_distributed(_all_uses, name, (2,), "tensor_parallel", {}, world_size=2):
        assert max(each["worst"] for each in found.values()) < 1e-9, found


@pytest.mark.wide
def test_parameters_gathered_for_each_use_and_layers_that_run_again_have_second_derivatives() -> None:
    for found in run_distributed(_all_uses, "layers", (2,), "fsdp", {"memory_limit": 36_000}, world_size=2):
        assert max(each["worst"] for each in found.values()) < 1e-9, found
        assert all("per_use" in each["gathers"] and each["again"] for each in found.values())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "options"), [("classes", {"pins": {"head.weight": ("S0",)}}), ("attention", {"linear_chunks": 2})]
)
def test_classes_that_ranks_share_and_layers_in_chunks_have_second_derivatives(
    name: str, options: dict[str, Any]
) -> None:
    for found in run_distributed(_all_uses, name, (2,), "tensor_parallel", options, world_size=2):
        assert max(each["worst"] for each in found.values()) < 1e-9, found
        assert all(each["sharded"] for each in found.values())
        assert name != "classes" or all("cross_entropy_sum_sharded" in each["text"] for each in found.values())


def _reason(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def _refused() -> dict[str, str]:
    """Why a second derivative is refused; what is trained afterwards is as if it had not been asked for."""
    reasons: dict[str, str] = {}

    def penalised(model: nn.Module, shape: tuple[int, ...] = (8, 8)) -> None:
        x = torch.ones(shape, dtype=torch.float64, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x, create_graph=True)

    _, model = _pair("perceptron", (2,), "fsdp", {"backend": "aot_eager"})
    reasons["compiled"] = _reason(lambda: penalised(model))

    plain, model = _pair("perceptron", (2,), "fsdp", {})
    x = torch.ones(8, 8, dtype=torch.float64)
    with model.no_sync():
        reasons["no_sync"] = _reason(lambda: model(x).sum().backward(create_graph=True))
        model(x).sum().backward()
    reasons["pending"] = _reason(lambda: model(x).sum().backward(create_graph=True))
    model.zero_grad()
    for window in model.accumulate(1, [None], weights="equal"):
        for _ in window:
            reasons["window"] = _reason(lambda: penalised(model))
    model.zero_grad()
    model(x).sum().backward()
    plain(x).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert float((_whole(ours.grad) - theirs.grad).abs().max()) < 1e-9
    return reasons


@pytest.mark.wide
def test_what_cannot_be_differentiated_twice_says_so_on_every_rank() -> None:
    first, second = run_distributed(_refused, world_size=2)
    assert first == second
    expected = {
        "compiled": 'backend="eager"',
        "no_sync": "which leaves .grad alone",
        "pending": "which leaves .grad alone",
        "window": "outside of the window",
    }
    for case, words in expected.items():
        assert "create_graph=True" in first[case] and words in first[case], (case, first[case])
