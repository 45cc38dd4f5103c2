"""A pipeline in one process: the runtime's own schedule, stages and loans, on ranks that are threads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoparallel
from autoparallel import _torch
from autoparallel.comm.simulate import combine, coordinates, simulate
from autoparallel.graph.calls import Call
from autoparallel.hardware import profile_for
from autoparallel.operators import RandomState
from autoparallel.placements import to_dtensor_placements
from autoparallel.placements.redistribution import Redistributor
from autoparallel.planner.draft import call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import build, prepare
from autoparallel.planner.request.request import Request
from autoparallel.program.stages import StagedProgram, find_owners
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.parameters.slices import local_slice
from autoparallel.runtime.programs.compiled import plain_body
from autoparallel.runtime.programs.pipeline import attach_stages

SHAPE, NAMES = (2, 2), ("pp", "dp")


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
    axes, profile = (("dp", 2),), profile_for("cpu")
    request = Request(axes, profile, preset, loss_fn=F.cross_entropy, stages=2, pipeline=pipeline)
    call = call_of((rows, targets), {}, True)
    planner = Planner(model, request)
    captured = planner.capture(call)
    plan = planner.search(captured, call)
    # A program holds the modules that gather its parameters, so every rank has its own.
    programs = []
    for _ in range(4):
        graph = captured.copy()
        prepare(request, graph, plan, call)
        staged = build(request, graph, plan, call, "mesh0")
        assert isinstance(staged, StagedProgram)
        programs.append(staged)
    owners = find_owners(programs[0], plan.parameters)
    redistributor: Redistributor = request.redistributor
    places = coordinates(SHAPE)

    def rank(number: int) -> tuple[float, dict[str, torch.Tensor]]:
        stage, _ = places[number]
        meshes = [
            _torch.dtensor.mesh_without_groups("cpu", ranks, ("dp",), number) for ranks in torch.arange(4).view(SHAPE)
        ]
        mesh, parameters = meshes[stage], {}
        for name, whole in model.named_parameters():
            home = meshes[owners[name]]
            local = local_slice(whole.detach(), plan.at_rest(name), home).clone()
            spec = _torch.dtensor.make_spec(home, to_dtensor_placements(plan.at_rest(name)), whole.shape, whole.dtype)
            parameters[name] = nn.Parameter(_torch.dtensor.wrap_local(local, spec))
        store = GradientStore(mesh, "mesh0", parameters)
        runner = attach_stages(programs[number], store, model, "mesh0", owners, redistributor, plain_body)
        given = Call((rows, targets), call.specs, call.layouts, call.in_spec, call.batch, True, (), ())
        loss = runner.run(given, RandomState(0, 0))[captured.objective or 0]
        loss.backward()
        return loss.item(), {
            name: _torch.dtensor.local_of(p.grad) for name, p in parameters.items() if p.grad is not None
        }

    found = simulate(rank, SHAPE, NAMES)
    expected = F.cross_entropy(plain(rows), targets)
    expected.backward()
    assert [loss for loss, _ in found] == pytest.approx([float(expected)] * 4, rel=1e-12)
    for name, parameter in plain.named_parameters():
        held = [grads[name] for (stage, _), (_, grads) in zip(places, found, strict=True) if stage == owners[name]]
        whole = combine(held, plan.at_rest(name), (2,))
        torch.testing.assert_close(whole, parameter.grad, rtol=1e-10, atol=1e-12)
