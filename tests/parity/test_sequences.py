"""The preset context_parallel: a sequence sharded over a mesh axis, and attention over heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel import Plan, PlanError
from autoparallel.hardware import CPU, H100, Profile
from autoparallel.planner.draft import call_of
from autoparallel.planner.request.request import Request
from tests.captures import draft
from tests.models.gpt import GPT, GPTConfig
from tests.runtime.support import gradients_off, make, off, run_on_ranks

TOKENS = torch.arange(4 * 16).view(4, 16) * 7 % 64


def _gpt() -> nn.Module:
    return GPT(GPTConfig(layers=1))


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _parity() -> dict[str, Any]:
    plain = make(_gpt)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=_loss, plan="context_parallel")
    loss, expected = model(TOKENS, TOKENS.flip(1)), _loss(plain(TOKENS), TOKENS.flip(1))
    loss.backward(), expected.backward()
    differences = [off(model.get_parameter(n).grad, p.grad) for n, p in plain.named_parameters()]
    assert model.plan is not None
    return {"off": max(off(loss, expected), *differences), "linears": _linears(model.plan)}


def _linears(plan: Plan) -> set[str]:
    """How the linear layers of blocks run on the last axis."""
    return {modes[-1] for key, modes in plan.operators.items() if "blocks" in key and "aten.linear" in key}


def test_a_sharded_sequence_computes_the_same() -> None:
    for results in run_on_ranks(_parity, world_size=2):
        assert results["off"] < 1e-9
        assert results["linears"] == {"shard:...1"}, "the sequence was not sharded"


class Mixer(nn.Module):
    """Parameters lie along the sequence: positions are learned, and a layer mixes them (Tolstikhin et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.positions = nn.Parameter(torch.randn(16, 8))
        self.mix = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        return self.head(x + self.mix(x.transpose(1, 2)).transpose(1, 2))


def _mix() -> dict[str, Any]:
    plain = make(Mixer)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=_loss, plan="context_parallel")
    optimizers = [torch.optim.AdamW(x.parameters(), 1e-2) for x in (plain, model)]
    differences = []
    for step in range(3):
        target = TOKENS.roll(step, 1)
        loss, expected = model(TOKENS, target), _loss(plain(TOKENS), target)
        loss.backward(), expected.backward()
        differences += [off(loss, expected), gradients_off(model, plain)]
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    assert model.plan is not None
    return {"off": max(differences), "runs": {key: modes[-1] for key, modes in model.plan.operators.items()}}


def test_parameters_along_the_sequence_are_read_in_parts() -> None:
    for results in run_on_ranks(_mix, world_size=2):
        assert results["off"] < 1e-9
        runs = results["runs"]
        assert {runs["/aten.add.Tensor#0"], runs["head/aten.linear#0"]} == {"shard:...1"}
        assert runs["mix.0/aten.linear#0"] == "shard:k", "the layer that mixes positions ran on all of them"


def _draft(length: int, plan: str, profile: Profile, width: int = 32, axis: str = "sp", rows: int = 1) -> Plan:
    with torch.device("meta"):
        model = GPT(GPTConfig(context=length, width=width, heads=8, layers=1))
        tokens = torch.empty(2 * rows, length, dtype=torch.long)
    request = Request((("dp", 2), (axis, 4)), profile, plan=plan, loss_fn=_loss)
    return draft(model, call_of((tokens, tokens), {}, True), request).plan


@pytest.mark.wide
def test_attention_of_a_long_sequence_runs_over_heads() -> None:
    plan = _draft(32768, "context_parallel", H100, 1024)
    attention = [modes for key, modes in plan.operators.items() if "scaled_dot_product" in key]
    assert _linears(plan) == {"shard:...1"}
    assert attention and all(data == "shard:b0" and heads == "shard:b1" for data, heads in attention), attention


@pytest.mark.wide
@pytest.mark.parametrize(
    ("length", "axis", "words"),
    [(18, "cp", "a sequence of 18 does not divide by the 4 ranks"), (16, "tp", "'cp' or 'sp'")],
)
def test_what_cannot_be_sharded_says_why(length: int, axis: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        _draft(length, "context_parallel", CPU, axis=axis)


def test_images_have_no_sequence() -> None:
    request = Request((("cp", 2),), CPU, plan="context_parallel")
    with pytest.raises(PlanError, match="no input is one"):
        draft(nn.Flatten(), call_of((torch.randn(4, 3, 4, 4),), {}, False), request)
