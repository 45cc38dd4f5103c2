"""What a step took: counted by the program, beside the prediction, in lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F

import autoparallel
from autoparallel.comm.traffic import count_traffic
from autoparallel.comm.waiting import RankMismatchError
from tests.runtime.support import Net, batch, compiled_pair, run_on_ranks


def _steps(path: str, over_ranks: bool) -> tuple[list[dict[str, Any]], int]:
    """Two steps, of one call and of two; and how often the meter had the ranks talk."""
    model, _ = compiled_pair(Net, 2, plan="fsdp")
    meter = autoparallel.Meter(model, path, over_ranks=over_ranks)
    with pytest.raises(RuntimeError, match="no plan yet"):
        meter.step()
    model(*batch()).backward()
    records = [meter.step()]
    with model.no_sync():
        model(*batch()).backward()
    model(*batch()).backward()
    with count_traffic() as sent:
        records.append(meter.step(count=6))
    assert abs(records[1]["rows_per_second"] * records[1]["seconds"] - 6) < 1e-9
    work, prediction = model.plan.work, model.plan.prediction
    forward = 2 * 8 * (8 * 8 + 8 * 4)
    assert work.flops == 3 * forward
    assert records[1]["predicted_seconds"] == prediction.seconds(2)
    assert records[1]["mfu"] == pytest.approx(2 * work.flops / (records[1]["seconds"] * 2 * work.peak))
    assert not sent.result().total_collectives
    return records, sent.result().control_collectives


@pytest.mark.wide_where(lambda over_ranks: not over_ranks)
@pytest.mark.parametrize("over_ranks", [False, True])
def test_a_dict_and_a_line_for_each_step(over_ranks: bool, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    results = run_on_ranks(_steps, str(path), over_ranks, world_size=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == results[0][0]
    for records, sent in results:
        assert [(r["step"], r["calls"], r["programs"]) for r in records] == [(0, 1, 1), (1, 2, 0)]
        assert all(r["peak_memory"] > 1e7 and 0 < r["waited_seconds"] < r["seconds"] for r in records)
        assert sent == over_ranks
    if over_ranks:
        for i in range(2):
            rows = [records[i] for records, _ in results]
            for name in ("seconds", "peak_memory", "waited_seconds"):
                assert rows[0]["ranks"][name] == rows[1]["ranks"][name] == [row[name] for row in rows]


def _out_of_step() -> str:
    model, _ = compiled_pair(Net, 2, plan="fsdp")
    meter = autoparallel.Meter(model, over_ranks=True)
    model(*batch()).backward()
    with pytest.raises(RankMismatchError) as raised:
        model(*batch()) if dist.get_rank() else meter.step()
    return str(raised.value)


def test_ranks_of_which_one_makes_no_step_are_told() -> None:
    for message in run_on_ranks(_out_of_step, world_size=2):
        assert "rank 0: Meter.step(); call 1 of model" in message and "call 2 of model" in message


@pytest.mark.wide
def test_a_pipeline_is_beside_its_schedule() -> None:
    for record, seconds in run_on_ranks(_pipeline, world_size=2):
        assert record["predicted_seconds"] == seconds > 0 and record["mfu"] > 0


def _pipeline() -> tuple[dict[str, Any], float]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    model = autoparallel.compile(Net().double(), mesh, loss_fn=F.mse_loss)
    meter = autoparallel.Meter(model)
    model(*batch()).backward()
    record = meter.step()
    assert model.plan.pipeline is not None
    return record, model.plan.pipeline.seconds
