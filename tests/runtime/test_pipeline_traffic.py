"""What a pipeline is predicted to send is what it sends: every rank, every kind of message, to the byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.models import build
from tests.runtime.test_pipelines import pipeline_mesh


def _count(name: str, schedule: str, per_rank: int, plan: str) -> dict[str, Any]:
    import autoparallel

    case = build(name, torch.float32)
    mesh = pipeline_mesh(2, 2)
    pipeline = autoparallel.Pipeline(schedule, 4, per_rank)
    model = autoparallel.compile(case.model, mesh, loss_fn=case.loss_fn, plan=plan, pipeline=pipeline)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args, kwargs = case.make_batch(0, 8)
    for _ in range(2):
        with autoparallel.count_traffic() as call:
            loss = model(*args, **kwargs)
            loss = loss if isinstance(loss, torch.Tensor) else loss["loss"]
        with autoparallel.count_traffic() as gradients:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    traffic = model.plan.pipeline.traffic
    mine = mesh.get_local_rank("pp")
    return {
        "call": call.result() == traffic.calls[mine],
        "gradients": gradients.result() == traffic.gradients[mine],
        "difference": f"{call.result() - traffic.calls[mine]}\n{gradients.result() - traffic.gradients[mine]}",
        "borders": [dataclasses.asdict(border) for border in traffic.borders],
        "loans": [dataclasses.asdict(loan) for loan in traffic.loans],
        "sent": call.bytes["send", "pp"],
        "text": model.plan.explain() if dist.get_rank() == 0 else "",
    }


CASES = [
    ("gpt", "1f1b", 1, "fsdp"),
    pytest.param("gpt", "zero_bubble_v", 2, "data_parallel", marks=pytest.mark.slow),
    pytest.param("unet", "interleaved_1f1b", 2, "data_parallel", marks=pytest.mark.slow),
    pytest.param("t5", "interleaved_1f1b", 2, "data_parallel", marks=pytest.mark.slow),
    pytest.param("llama", "1f1b", 1, "tensor_parallel", marks=pytest.mark.slow),
]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "schedule", "per_rank", "plan"), CASES)
def test_predicted_traffic_is_counted_traffic(name: str, schedule: str, per_rank: int, plan: str) -> None:
    ranks = run_distributed(_count, name, schedule, per_rank, plan, world_size=4)
    for rank in ranks:
        assert rank["call"] and rank["gradients"], rank["difference"]
    text = ranks[0]["text"]
    assert "Between stages, sent by each rank of them:" in text
    assert "A rank's step, which reduces gradients once:" in text
    if name == "gpt":  # the embedding is the head: the last stage borrows it, unless it lies on the same rank
        assert ("Parameters that stages share:" in text) == bool(ranks[0]["loans"]) == (schedule == "1f1b")
        assert {loan["name"] for loan in ranks[0]["loans"]} <= {"tok.weight"}
        moving = [border for border in ranks[0]["borders"] if border["moves"]]
        assert len(moving) == (1 if schedule == "1f1b" else 2)
        assert all(border["forward"] == border["backward"] > 0 for border in moving)
    if name == "llama":  # masks and rotary tables are computed where they are read
        (border,) = ranks[0]["borders"]
        assert border["forward"] == border["backward"] and "mul" not in border["key"]
    if name == "t5":  # what the encoder has made goes to each rank once, whatever the number of its stages there
        moved = [border["key"] for border in ranks[0]["borders"] if border["moves"]]
        kept = [border["key"] for border in ranks[0]["borders"] if not border["moves"]]
        assert set(moved) & set(kept)
