"""`raise_row_views`: rows are shifted and flattened before the product that makes their logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.support import captured, show


class Shifted(nn.Module):
    """Predicts the next token, as everybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = 2 * self.head(x)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 6), y[:, 1:].reshape(-1), reduction="sum")


class Flattened(Shifted):
    """Is given targets that are flat already."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), y, reduction="sum")


class Returned(Shifted):
    """Returns its logits, too."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 6), y[:, 1:].reshape(-1)), logits


def test_before_and_after() -> None:
    x, y = torch.rand(8, 5, 4), torch.zeros(8, 5, dtype=torch.int64)
    lines = show(captured(Shifted(), x, y).module)
    assert lines[-5:] == [
        "slice_tensor = aten.slice.Tensor(args_0, 1, 0, -1)",
        "linear_default = aten.linear(slice_tensor, p_model_head_weight)",
        "mul_tensor = aten.mul.Tensor(linear_default, 2)",
        "cross_entropy_sum = losses.cross_entropy_sum(mul_tensor, clone_1, None, -100, 0.0)",
        "return [cross_entropy_sum]",
    ]
    flat = show(captured(Flattened(), x, torch.zeros(40, dtype=torch.int64)).module)
    assert flat[-4:-1] == [
        "reshape_default_1 = aten.reshape(args_0, [sym_size_int_4, 4])",
        "linear_default = aten.linear(reshape_default_1, p_model_head_weight)",
        "cross_entropy_sum = losses.cross_entropy_sum(linear_default, args_1, None, -100, 0.0)",
    ]


def test_logits_that_are_returned_stay_as_they_are() -> None:
    x, y = torch.rand(8, 5, 4), torch.zeros(8, 5, dtype=torch.int64)
    lines = show(captured(Returned(), x, y).module)
    assert "linear = aten.linear(args_0, p_model_head_weight)" in lines
