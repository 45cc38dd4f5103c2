"""What speaks of memory becomes what speaks of values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.graph.errors import CaptureError
from tests.passes.support import captured, show


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(6, 6))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.w)


def lines(function: Any) -> list[str]:
    names = [n for n in show(captured(Function(function), torch.rand(8, 6)).module) if " = " in n]
    return [line.partition(" = ")[2] for line in names]


def part_is_copied(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros(4, 6)
    out[:2] = w[0]
    return out


def test_a_copy_is_an_expansion() -> None:
    text = lines(part_is_copied)
    assert text == [
        "aten.zeros([4, 6], device=device(type='cpu'), pin_memory=False)",
        "aten.select.int(p_model_w, 0, 0)",
        "aten.reshape(select, [6])",
        "aten.expand(reshape_default, [2, 6])",
        "aten.slice_scatter(zeros, expand, 0, 0, 2)",
    ], text


def test_what_is_overwritten_gets_a_gradient_of_zero() -> None:
    text = lines(lambda x, w: (x @ w).clone().copy_(x))
    assert text[-2:] == ["aten.fill.Scalar(clone, 0)", "aten.add.Tensor(fill_scalar, args_0)"], text


def test_conjugations_are_done_where_they_stand() -> None:
    text = lines(lambda x, w: torch.complex(w, w).conj().imag)
    assert text == [
        "aten.complex(p_model_w, p_model_w)",
        "aten.conj_physical(complex_1)",
        "aten.conj_physical(conj_physical_default)",
        "aten.view_as_real(conj_physical_default_1)",
        "aten.neg(view_as_real)",
        "aten.select.int(neg_default, 2, 1)",
    ], text


def test_strides_become_positions() -> None:
    text = lines(lambda x, w: (w * 2).as_strided((2, 3), (6, 2), 1))
    assert text[0] == "aten.mul.Tensor(p_model_w, 2)"
    assert not any("as_strided" in line for line in text)
    assert text[-2:] == [
        "aten.index_select(reshape_default, 0, reshape_default_1)",
        "aten.reshape(index_select_default, [2, 3])",
    ], text


def test_strides_are_those_of_the_dims_as_they_lie_in_memory() -> None:
    text = lines(lambda x, w: (w * 2).t().as_strided((2, 3), (6, 2)))
    assert text[1:4] == [
        "aten.t(mul)",
        "aten.permute(t, [1, 0])",
        "aten.reshape(permute_default, [-1])",
    ], text


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (w * 2)[:, ::2].as_strided((2, 3), (6, 2)),
        lambda x, w: (w * 2)[1:].as_strided((6,), (1,), 0),
        lambda x, w: (w * 2)[:2].as_strided((12,), (2,)),
    ],
    ids=["every second", "before its beginning", "behind its end"],
)
def test_positions_that_nobody_can_tell_are_refused(function: Any) -> None:
    with pytest.raises(CaptureError, match=r"does not lie in one piece in memory, at .*line(.|\n)*What to change"):
        lines(function)
