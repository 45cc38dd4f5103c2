"""What is said while a model is captured and planned."""

from __future__ import annotations

import logging
import pickle
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import autoparallel
from autoparallel.decisions.prediction import Prediction
from autoparallel.planner import planner
from autoparallel.report.progress import Progress
from autoparallel.text import LOGGER


def test_a_call_that_compiles_logs_its_phases_and_what_was_planned(caplog: pytest.LogCaptureFixture) -> None:
    model = autoparallel.compile(nn.Linear(4, 2), loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    with caplog.at_level(logging.INFO, "autoparallel"):
        model(x, y)
        first = [record.getMessage() for record in caplog.records]
        model(x, y)
    phases = [re.sub(r"took .*", "took", line) for line in first[:-1]]
    assert phases == [f"Linear in training: {name} took" for name in ("capture", "plan", "build")]
    assert "chosen by the search, on the mesh (dp=1); predicted for cpu: a step of" in first[-1]
    assert len(caplog.records) == len(first), "a call of a kind that is known says nothing"


def test_no_step_waits_for_a_prediction_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Prediction] = []

    def predict(*args: Any) -> Prediction:
        made.append(planned(*args))
        return made[-1]

    planned = planner.predict
    monkeypatch.setattr(planner, "predict", predict)
    model = autoparallel.compile(nn.Linear(4, 2), loss_fn=nn.functional.mse_loss, plan="data_parallel")
    model(torch.randn(8, 4), torch.randn(8, 2)).backward()
    assert not made
    travelled = pickle.loads(pickle.dumps(model.plan))
    assert [model.plan.prediction] == made == [travelled.prediction]


def _predicted(around: AbstractContextManager[Any]) -> Prediction | None:
    model = autoparallel.compile(nn.Linear(4, 2), loss_fn=nn.functional.mse_loss, plan="data_parallel")
    model(torch.randn(8, 4), torch.randn(8, 2)).backward()
    with around:
        return model.plan.prediction


@pytest.mark.wide
def test_a_prediction_is_the_same_wherever_it_is_asked_for() -> None:
    expected = _predicted(nullcontext())
    assert expected is not None and expected.backward_seconds
    save_on_cpu: Any = torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(), torch.from_numpy)
    for around in (torch.inference_mode(), torch.no_grad(), save_on_cpu):
        assert _predicted(around) == expected


def test_nothing_is_printed_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("a model")
    with progress.phase("capture"):
        pass
    progress.conclude(lambda: "planned")
    assert capsys.readouterr() == ("", "")


def test_a_phase_that_fails_is_not_said_to_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "autoparallel"), pytest.raises(ValueError), Progress("a model").phase("plan"):
        raise ValueError
    assert not caplog.records


def test_what_every_rank_says_is_a_warning_on_rank_0_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, level in enumerate(("WARNING", "INFO")):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        caplog.clear()
        LOGGER.warning("said by all")
        assert [r.levelname for r in caplog.records] == ["WARNING"] * (rank == 0)
        with caplog.at_level(logging.INFO, "autoparallel"):
            LOGGER.warning("said by all")
        assert caplog.records[-1].levelname == level
