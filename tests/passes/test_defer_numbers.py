"""`defer_numbers`: a number that Python reads of a tensor stays a tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoparallel.graph.leaves import Number
from tests.passes.support import captured, show


class Scaled(nn.Module):
    """Divides by a number, and returns others."""

    def forward(self, x: Tensor) -> tuple[Tensor, float, int]:
        norm = x.norm().item()
        return x / norm, 2 * norm, (x > 0).sum().item()


class Filled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(max=x.mean().item()) + torch.full((4,), x.sum().item())


def test_before_and_after() -> None:
    assert show(captured(Scaled(), torch.rand(8, 4)).module) == [
        "args_0",
        "linalg_vector_norm = aten.linalg_vector_norm(args_0)",
        "detach_default = aten.detach(linalg_vector_norm)",
        "_to_copy_default = aten._to_copy(detach_default, dtype=torch.float64)",
        "_to_copy_default_1 = aten._to_copy(_to_copy_default, dtype=torch.float32)",
        "div_tensor = aten.div.Tensor(args_0, _to_copy_default_1)",
        "full_default = aten.full([], 2.0, dtype=torch.float64, device=device(type='cpu'))",
        "mul_tensor = aten.mul.Tensor(full_default, _to_copy_default)",
        "gt = aten.gt.Scalar(args_0, 0)",
        "sum_1 = aten.sum(gt)",
        "detach_default_1 = aten.detach(sum_1)",
        "return [div_tensor, mul_tensor, detach_default_1]",
    ]


def test_operators_take_tensors_for_numbers() -> None:
    text = show(captured(Filled(), torch.rand(8, 4)).module)
    assert "clamp_tensor = aten.clamp.Tensor(args_0, None, _to_copy_default_1)" in text
    assert "expand_default = aten.expand(_to_copy_default_3, [4])" in text


def test_what_is_returned_is_a_number_again() -> None:
    outputs = captured(Scaled(), torch.rand(8, 4)).outputs
    assert outputs == [0, Number(1, float), Number(2, int)]
