"""Training for quantisation, as torch prepares a model for it, whose kernels are of single precision."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

import autoparallel
from tests.runtime.support import make, mesh_of, off, raised, run_on_ranks, weights


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


def _trained() -> dict[str, Any]:
    inputs = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0)).unbind()
    plain: Any = make(Layers, torch.float32).train()
    plain.qconfig = get_default_qat_qconfig("fbgemm")
    with warnings.catch_warnings(action="ignore"):
        prepare_qat(plain, inplace=True)
    unseen = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan="fsdp")
    words = raised(lambda: unseen(inputs[0]))
    plain(inputs[0])
    model = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan="fsdp")
    for m in (model, plain):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for x in inputs[1:]:
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(weights(model).values(), weights(plain).values(), strict=True)
    buffers = zip(model.buffers(), plain.buffers(), strict=True)
    return {"words": words, "weights": max(off(p, q) for p, q in pairs), "buffers": max(off(p, q) for p, q in buffers)}


def test_a_model_whose_observers_have_seen_a_batch_trains_and_another_is_told_so() -> None:
    for results in run_on_ranks(_trained, world_size=2):
        assert "call the plain model once before compile()" in results["words"]
        assert max(results["weights"], results["buffers"]) < 1e-5, results
