"""A pipeline in one process: the runtime's own schedule, stages and loans, on ranks that are threads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoparallel
from autoparallel.hardware import profile_for
from autoparallel.operators import RandomState
from autoparallel.planner.request.request import Request
from tests.simulated import Rank, Simulation


class Tied(nn.Module):
    """A table that is read first and last, so that one stage borrows it from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.linear(x, self.table.weight)


@pytest.mark.parametrize(("schedule", "preset"), [("1f1b", "fsdp"), ("zero_bubble_v", "data_parallel")])
def test_loss_and_gradients_are_those_of_one_process(schedule: str, preset: str) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    plain = copy.deepcopy(model)
    rows, targets = torch.randint(12, (8,)), torch.randint(12, (8,))
    pipeline = autoparallel.Pipeline(schedule, 4, 2 if schedule == "zero_bubble_v" else 1)
    request = Request((("dp", 2),), profile_for("cpu"), preset, loss_fn=F.cross_entropy, stages=2, pipeline=pipeline)
    simulation = Simulation(model, request, (rows, targets))

    def train(rank: Rank) -> tuple[float, dict[str, torch.Tensor]]:
        loss = rank.loss((rows, targets), RandomState(0, 0))
        loss.backward()
        return loss.item(), rank.gradients()

    found = simulation.run(train)
    expected = F.cross_entropy(plain(rows), targets)
    expected.backward()
    assert [loss for loss, _ in found] == pytest.approx([float(expected)] * 4, rel=1e-12)
    for name, parameter in plain.named_parameters():
        whole = simulation.whole(name, [grads for _, grads in found])
        torch.testing.assert_close(whole, parameter.grad, rtol=1e-10, atol=1e-12)
