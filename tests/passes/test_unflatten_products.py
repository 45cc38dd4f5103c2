"""`unflatten_products`: rows that are flattened for a linear layer alone stay in their dims."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from tests.passes.support import captured, show
from tests.runtime.support import gradients_off, make


class Flattened(nn.Module):
    """Times before the batch, as in ``nn.MultiheadAttention``."""

    def __init__(self, read_twice: bool = False) -> None:
        super().__init__()
        self.out, self.read_twice = nn.Linear(4, 6, bias=False), read_twice

    def forward(self, x: Tensor) -> Tensor:
        rows = self.out(x.permute(1, 0, 2, 3).reshape(-1, 4))
        result = rows.view(x.shape[1], x.shape[0], 6)
        return result + rows.sum() if self.read_twice else result


def test_before_and_after() -> None:
    lines = show(captured(Flattened(), torch.rand(8, 3, 2, 2)).module)
    assert lines[-4:] == [
        "clone = aten.clone(permute, memory_format=torch.contiguous_format)",
        "reshape_default_2 = aten.reshape(clone, [3, sym_size_int_2, 4])",
        "linear_default = aten.linear(reshape_default_2, p_model_out_weight)",
        "return [linear_default]",
    ]


def test_rows_that_others_read_stay_flat() -> None:
    lines = show(captured(Flattened(read_twice=True), torch.rand(8, 3, 2, 2)).module)
    assert [line for line in lines if "reshape(clone, [mul_1, 4])" in line], lines


def test_microbatches_of_torchs_attention_add_up() -> None:
    """Which none did whose rows were flattened behind times: ``accumulate()`` could not tell what the loss weighs."""
    plain = make(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True))
    model = autoparallel.compile(copy.deepcopy(plain), loss_fn=F.mse_loss)
    x, y = torch.rand(2, 8, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for window in model.accumulate(2, zip(x.split([6, 2]), y.split([6, 2]), strict=True)):
        for rows, target in window:
            model(rows, target).backward()
    F.mse_loss(plain(x), y).backward()
    assert gradients_off(model, plain) < 1e-12
