"""Linear layers in chunks of rows: the same numbers, the bytes and collectives that are predicted."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import autoparallel
from autoparallel import Plan
from autoparallel.comm.traffic import count_traffic
from autoparallel.hardware import H100, Profile
from autoparallel.planner.draft import call_of
from autoparallel.planner.request.request import Request
from tests.captures import draft
from tests.models.gpt import GPT, GPTConfig
from tests.runtime.support import make, off, run_on_ranks

TOKENS = torch.arange(8 * 16).view(8, 16) * 7 % 64


def _gpt() -> nn.Module:
    return GPT(GPTConfig(context=16, layers=2))


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _step(shape: tuple[int, ...], chunks: int, options: dict[str, Any]) -> dict[str, Any]:
    """How far a step is from that of one process, and what it sends."""
    plain = make(_gpt)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    model = autoparallel.compile(
        copy.deepcopy(plain), mesh, loss_fn=_loss, plan="tensor_parallel", linear_chunks=chunks, **options
    )
    target = TOKENS.flip(1)
    model.prepare(TOKENS, target)
    with count_traffic() as sent:
        loss = model(TOKENS, target)
        loss.backward()
    expected = _loss(plain(TOKENS), target)
    expected.backward()
    assert model.plan is not None and model.plan.prediction is not None
    prediction = model.plan.prediction
    predicted = prediction.unshard + prediction.forward + prediction.backward + prediction.gradients
    gradients = [off(model.get_parameter(name).grad, p.grad) for name, p in plain.named_parameters()]
    assert f"in {chunks} chunks of rows" in model.plan.explain() or chunks == 1
    assert Plan.from_json(model.plan.to_json()).linear_chunks == chunks
    return {"off": max(off(loss, expected), *gradients), "sent": sent.result(), "predicted": predicted}


@pytest.mark.wide
@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.wide)], ids=str)
def test_as_many_bytes_travel_in_more_collectives(shape: tuple[int, ...]) -> None:
    parts = [*[None] * (len(shape) - 1), Shard(1)]  # of the sequence
    options = {"pins": {f"blocks.*.norm{i}": parts for i in (1, 2)}}
    whole, chunked = (run_on_ranks(_step, shape, chunks, options, world_size=2 ** len(shape)) for chunks in (1, 2))
    for one, other in zip(whole, chunked, strict=True):
        assert max(one["off"], other["off"]) < 1e-9
        assert other["sent"] == other["predicted"]
        assert other["sent"].bytes == one["sent"].bytes
        more = {key: n - one["sent"].collectives[key] for key, n in other["sent"].collectives.items()}
        # Each of two layers gathers before two layers and reduces behind two, forward and backward; but the last sum
        # is left to what comes behind the layers.
        assert (more["all_gather", "tp"], more["reduce_scatter", "tp"]) == (7, 7)


def _without_gradients(backend: str) -> list[float]:
    plain, mesh = make(_gpt), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    pins = {f"blocks.*.norm{i}": [Shard(1)] for i in (1, 2)}
    model = autoparallel.compile(
        copy.deepcopy(plain),
        mesh,
        loss_fn=_loss,
        plan="tensor_parallel",
        linear_chunks=2,
        backend=backend,
        pins=pins,
    )
    with torch.no_grad():
        losses = [off(model(TOKENS, TOKENS), _loss(plain(TOKENS), TOKENS))]
        model.eval(), plain.eval()
        losses.append(off(model(TOKENS), plain(TOKENS)))
    assert all("in 2 chunks of rows" in kind.plan.explain() for kind in model._kinds)
    return losses


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_call_without_gradients(backend: str) -> None:
    assert max(x for losses in run_on_ranks(_without_gradients, backend, world_size=2) for x in losses) < 1e-9


def _draft(hardware: Profile, chunks: int | None = None, limit: float | None = None) -> Plan:
    with torch.device("meta"):
        model = GPT(GPTConfig(width=4096, heads=32, context=4096, layers=2))
        tokens = torch.empty(8, 4096, dtype=torch.int64)
    request = Request(
        (("tp", 8),), hardware, "tensor_parallel", loss_fn=_loss, linear_chunks=chunks, memory_limit=limit
    )
    return draft(model, call_of((tokens, tokens), {}, True), request).plan


@pytest.mark.wide
def test_the_search_cuts_linear_layers_where_that_is_faster() -> None:
    hidden, seen = H100, replace(H100, overlap=0.0)
    found, whole = _draft(hidden), _draft(hidden, 1)
    assert found.linear_chunks == 4 and whole.linear_chunks == 1
    assert found.prediction is not None and whole.prediction is not None
    assert found.prediction.seconds() < 0.97 * whole.prediction.seconds()
    assert _draft(seen).linear_chunks == 1
    assert _draft(replace(hidden, latency=1e-2)).linear_chunks == 1, "each collective has its latency"


@pytest.mark.wide
@pytest.mark.parametrize("chunks", [2, 4])
def test_the_search_adds_up_what_chunks_hide(chunks: int) -> None:
    whole, cut = _draft(H100, 1), _draft(H100, chunks)
    assert whole.cost is not None and cut.cost is not None and cut.lower_bound == cut.cost
    assert whole.prediction is not None and cut.prediction is not None
    hidden = whole.prediction.seconds() - cut.prediction.seconds()
    # Sums do not know what halves of collectives hide without chunks.
    assert 0.8 * hidden < whole.cost - cut.cost < 1.6 * hidden
