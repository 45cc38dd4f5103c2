"""What a meter says, where people look for it: Accelerate's trackers, TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autoparallel
from autoparallel.integrations.trackers import TensorBoard
from tests.runtime.support import Net, make
from tests.test_integrations import launched


def test_a_tracker_of_accelerate_writes_the_meters_record_beside_what_is_logged(tmp_path: Path) -> None:
    from autoparallel.integrations.accelerate import Accelerator, MeterTracker

    path = tmp_path / "runs" / "steps.jsonl"
    with launched():
        tracker = MeterTracker(path)
        accelerator = Accelerator(cpu=True, log_with=[tracker])
        with pytest.raises(RuntimeError, match=r"call accelerator.prepare\(model\) before"):
            tracker.log({"loss": 1.0})
        model: Any = accelerator.prepare(make(Net, torch.float32))
        accelerator.init_trackers("a project")
        for step in range(2):
            loss = model(torch.ones(4, 8)).mean()
            accelerator.backward(loss)
            accelerator.log({"loss": loss.item()}, step=step)
        assert accelerator.get_tracker("autoparallel", unwrap=True) is tracker.meter
        with pytest.raises(ValueError, match="extra has 'seconds'"):
            accelerator.log({"seconds": 1.0})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["calls"], r["logged_step"]) for r in records] == [(0, 1, 0), (1, 1, 1)]
    assert all(r["loss"] == loss.item() and r["rows_per_second"] > 0 for r in records)


class _Writer:
    """Keeps what TensorBoard would write."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int | None], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.scalars[tag, global_step] = scalar_value


def test_tensorboard_has_a_scalar_for_every_number() -> None:
    model: Any = autoparallel.compile(make(Net, torch.float32))
    meter, writer = autoparallel.Meter(model), _Writer()
    model(torch.ones(4, 8)).mean().backward()
    record = meter.step(extra={"loss": 0.5, "note": "not a number", "ranks": {"waited_seconds": [1.0, 2.0]}})
    TensorBoard(writer).log(record)
    assert writer.scalars["autoparallel/loss", 0] == 0.5
    assert writer.scalars["autoparallel/seconds", 0] == record["seconds"]
    assert writer.scalars["autoparallel/waited_seconds/rank 1", 0] == 2.0
    assert ("autoparallel/note", 0) not in writer.scalars
