"""A step whose norm is suspicious is computed once more: who did it is told, and the step is as if computed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from autoparallel import Finding
from autoparallel._torch.dtensor import local_of
from tests.runtime.support import batch, make, mesh_of, run_on_ranks


class Net(nn.Module):
    """What a second computation must not find changed: random numbers, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.norm(torch.tanh(self.up(x))), 0.3, self.training))


def _whole(model: Any) -> dict[str, Tensor]:
    return {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in model.state_dict().items()}


def _train(faults: dict[int, Any], reruns: bool) -> tuple[list[Finding], dict[str, Tensor]]:
    """Five steps, of which some have a fault: "poison" and "large" batches, or a rank whose memory errs once."""
    torch.manual_seed(3)
    model = autoparallel.compile(make(Net), mesh_of(2), plan="fsdp", loss_fn=F.mse_loss, example_inputs=batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rerun = autoparallel.Rerun(model, spike=50.0)
    for i in range(5):
        x, y = batch(i)
        fault = faults.get(i)
        y = y * (float("inf") if fault == "poison" else 1e6 if fault == "large" else 1.0)
        errs = [fault == dist.get_rank()]

        def compute(x: Tensor = x, y: Tensor = y, errs: list[bool] = errs) -> Tensor:
            with model.no_sync():
                model(x, y).backward()
            model(x, y).backward()
            if errs.pop() if errs else False:
                local_of(model.down.weight.grad)[0, 0] = float("nan")
            return model.grad_norm()

        if reruns:
            rerun(compute)
        else:
            errs.clear()
            compute()
        model.clip_grad_norm_(1.0, nonfinite="skip")
        optimizer.step(), optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="call zero_grad"):
        model(*batch()).backward()
        rerun(compute)
    return rerun.findings, _whole(model)


def _both(faults: dict[int, Any]) -> tuple[list[Finding], bool]:
    """What was found, and whether all is as in a run that computes each step once."""
    once, (findings, state) = _train(faults, False)[1], _train(faults, True)
    return findings, state.keys() == once.keys() and all(torch.equal(state[name], x) for name, x in once.items())


def test_it_says_whether_the_data_or_the_hardware_did_it_and_goes_on_as_if_nothing_were() -> None:
    for findings, same in run_on_ranks(_both, {1: "poison", 2: 1, 4: "large"}, world_size=2):
        assert [(f.step, f.cause) for f in findings] == [(1, "data"), (2, "hardware"), (4, "data")]
        assert findings[1].differing == {1: ("down.weight",)} and findings[1].norms[1] < 1e3
        assert "rank 1: down.weight" in str(findings[1]) and "the data and the model" in str(findings[2])
        assert same


def test_where_a_program_does_not_repeat_itself_only_the_norm_tells() -> None:
    model = autoparallel.compile(make(Net), loss_fn=F.mse_loss)
    told: list[Finding] = []
    rerun = autoparallel.Rerun(model, on_finding=told.append)
    noise = iter([1.0, 1.5, float("nan"), 1.0, float("inf"), float("nan")])

    def compute() -> Tensor:
        model(*batch()).backward()
        local_of(model.down.bias.grad).mul_(next(noise))
        return model.grad_norm()

    for _ in range(3):
        rerun(compute)
        model.zero_grad()
    assert [(f.step, f.cause, f.differing) for f in told] == [(1, "hardware", {}), (2, "data", {})]
    with pytest.raises(ValueError, match="more than 1, got 1"):
        autoparallel.Rerun(model, spike=1)
