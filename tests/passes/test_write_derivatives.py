"""Gradients that a model takes, before and after they are written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import export

from autoparallel.graph.errors import CaptureError
from autoparallel.operators.derivatives import DERIVATIVE
from autoparallel.operators.opaque import HOOK
from autoparallel.passes.write_derivatives import write_derivatives


class _Slope(nn.Module):
    """The gradient of the weighed sum of what a function makes of ``x`` and ``w``, taken ``times`` times."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], times: int = 1) -> None:
        super().__init__()
        self.function, self.times = function, times

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        out = self.function(x, w)
        for _ in range(self.times):
            total = (out * w).sum()
            (out,) = DERIVATIVE([total], [x], [torch.ones_like(total)], True)
        return out


def _traced(slope: nn.Module) -> fx.GraphModule:
    return export(slope, (torch.randn(4, 8).double(), torch.randn(8).double()), strict=False).graph_module


def _calls(module: fx.GraphModule) -> list[str]:
    return [str(x.target) for x in module.graph.nodes if x.op == "call_function"]


def test_what_autograd_would_run_stands_in_the_graph() -> None:
    module = _traced(_Slope(lambda x, w: torch.tanh(x)))
    assert _calls(module)[-2] == "autoparallel.derivative.default"
    write_derivatives(module)
    module.graph.lint()
    assert _calls(module) == [
        "aten.tanh.default", "aten.mul.Tensor", "aten.sum.default", "aten.ones_like.default", "aten.expand.default",
        "aten.mul.Tensor", "aten.mul.Tensor", "aten.rsub.Scalar", "aten.mul.Tensor",
    ]  # fmt: skip


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.tanh(x) * w,
        lambda x, w: F.layer_norm(x, [8], w).tanh(),
        lambda x, w: F.group_norm(x, 2, w).tanh(),
        lambda x, w: F.rms_norm(x, [8], w).tanh(),
        lambda x, w: (x / x.norm(dim=-1, keepdim=True) * w).exp(),  # its backward writes in place
        lambda x, w: F.softmax(x * w, -1).square(),
        lambda x, w: F.logsigmoid(x * w),  # its backward reads what forward keeps for it
        lambda x, w: F.scaled_dot_product_attention(x * w, x, x.tanh()[None])[0],
        lambda x, w: x.detach() * x * w * x.exp(),
    ],
)
def test_it_is_differentiated_as_autograd_does(function: Callable[[Tensor, Tensor], Tensor], times: int) -> None:
    x, w = (torch.randn(n).double().requires_grad_() for n in ([4, 8], [8]))
    module = _traced(_Slope(function, times))
    write_derivatives(module)
    module.recompile()
    want = function(x, w)
    for _ in range(times):
        (want,) = torch.autograd.grad((want * w).sum(), x, create_graph=True)
    (ours,) = module(x, w)
    torch.testing.assert_close(ours, want)
    assert want.abs().max() > 1e-3
    if times == 1:  # the third derivative of a norm lacks a part in torch
        gradients = (torch.autograd.grad(y.square().sum(), (x, w), allow_unused=True) for y in (ours, want))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("norm", [F.layer_norm, lambda *x: torch.native_layer_norm(*x, None, 1e-5)[0]])  # vmap's
def test_third_derivatives_of_a_layer_norm_are_those_of_its_formula(norm: Callable[..., Tensor]) -> None:
    x, w = (torch.randn(n).double().requires_grad_() for n in ([4, 8], [8]))
    module = _traced(_Slope(lambda x, w: norm(x, [8], w).tanh(), 2))
    write_derivatives(module)
    module.recompile()
    centred = x - x.mean(-1, keepdim=True)
    want = (centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w).tanh()
    for _ in range(2):
        (want,) = torch.autograd.grad((want * w).sum(), x, create_graph=True)
    gradients = (torch.autograd.grad(y.square().sum(), (x, w)) for y in (module(x, w)[0], want))
    torch.testing.assert_close(*gradients)


def test_what_a_hook_would_change_is_refused() -> None:
    def hooked(x: Tensor, w: Tensor) -> Tensor:
        h = x * w
        HOOK(h, [], [], "a hook")
        return h.exp()

    with pytest.raises(CaptureError, match="goes through a hook"):
        write_derivatives(_traced(_Slope(hooked)))
