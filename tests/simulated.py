"""A plan carried out by the runtime's own runners in one process, on ranks that are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel import _torch
from autoparallel.comm.simulate import combine, coordinates, simulate
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured
from autoparallel.placements import to_dtensor_placements
from autoparallel.plan import Plan
from autoparallel.planner.draft import call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import build, prepare
from autoparallel.planner.request.request import Request
from autoparallel.program.program import LocalProgram
from autoparallel.program.stages import StagedProgram, find_owners
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.parameters.slices import local_slice
from autoparallel.runtime.programs.compiled import plain_body
from autoparallel.runtime.programs.pipeline import attach_stages
from autoparallel.runtime.programs.runner import Runner

PREFIX = "mesh0"


class Simulation:
    """One model's program on every rank of a mesh, whose first axis is "pp" where the request has stages.

    Args:
        model: on every rank a copy of it is trained.
        inputs: of one call; the last is the target where the request has a loss function.

    Attributes:
        plan: what was found.
    """

    def __init__(self, model: nn.Module, request: Request, inputs: tuple[Tensor, ...]) -> None:
        self.model, self.request = model, request
        self.call: Call = call_of(inputs, {}, with_target=request.loss_fn is not None)
        planner = Planner(model, request)
        self.captured: Captured = planner.capture(self.call)
        self.plan: Plan = planner.search(self.captured, self.call)
        axes = [*([("pp", request.stages)] if request.stages else []), *request.axes]
        self.names, self.shape = [name for name, _ in axes], tuple(size for _, size in axes)
        self.places = coordinates(self.shape)
        # A program holds the modules that gather its parameters, so every rank has its own.
        self.programs = [self._program() for _ in self.places]
        program = self.programs[0]
        self.owners = find_owners(program, self.plan.parameters) if isinstance(program, StagedProgram) else {}

    def _program(self) -> LocalProgram | StagedProgram:
        graph = self.captured.copy()
        prepare(self.request, graph, self.plan, self.call)
        return build(self.request, graph, self.plan, self.call, PREFIX)

    def run(self, function: Callable[[Rank], Any]) -> list[Any]:
        """What a function gives for each of the ranks."""
        return simulate(lambda number: function(Rank(self, number)), self.shape, self.names)

    def whole(self, name: str, parts: list[dict[str, Tensor]]) -> Tensor | None:
        """A parameter, or its gradient, from the parts that the ranks of its stage hold; None where none has any."""
        at_home = [part for part, place in zip(parts, self.places, strict=True) if self._is_home(name, place)]
        held = [part[name] for part in at_home if name in part]
        assert len(held) in (0, len(at_home)), f"only some ranks have {name}"
        return combine(held, self.plan.at_rest(name), self.request.sizes) if held else None

    def _is_home(self, name: str, place: tuple[int, ...]) -> bool:
        return not self.request.stages or self.owners.get(name, 0) == place[0]


class Rank:
    """One rank: its copy of the model, whose parameters lie as the plan says, and what runs its program.

    Attributes:
        store: has the parameters, by name.
    """

    def __init__(self, of: Simulation, number: int) -> None:
        self.of, self.model = of, copy.deepcopy(of.model)
        request, everyone = of.request, torch.arange(len(of.places)).view(max(1, of.request.stages), -1)
        names = [name for name, _ in request.axes]
        meshes = [
            _torch.dtensor.mesh_without_groups("cpu", ranks.view(request.sizes), names, number) for ranks in everyone
        ]
        here, parameters = of.places[number][0] if of.request.stages else 0, {}
        for name, whole in self.model.named_parameters():
            home, layout = meshes[of.owners.get(name, 0)], of.plan.at_rest(name)
            local = local_slice(whole.detach(), layout, home).clone()
            value = _torch.dtensor.from_part(local, home, to_dtensor_placements(layout), whole.shape)
            parameters[name] = nn.Parameter(value, whole.requires_grad)
        groups = f"{PREFIX}/{'+'.join(of.names)}" if of.request.stages else None
        self.store = GradientStore(meshes[here], PREFIX, parameters, groups)
        program = of.programs[number]
        if isinstance(program, StagedProgram):
            self.runner: Any = attach_stages(
                program, self.store, self.model, PREFIX, of.owners, request.redistributor, plain_body
            )
        else:
            self.runner = Runner(program, self.store, self.model, plain_body)

    def loss(self, inputs: tuple[Tensor, ...], random: Any) -> Tensor:
        """What a call gives as its loss."""
        call = self.of.call
        given = Call(inputs, call.specs, call.layouts, call.in_spec, call.batch, call.with_target, (), ())
        results = self.runner.run(given, random)
        loss: Tensor = results[self.of.captured.objective or 0]
        return loss

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parts of the parameters of its stage."""
        here = {n: p for n, p in self.store.parameters.items() if p.device_mesh.get_coordinate() is not None}
        return {name: _torch.dtensor.local_of(p).detach().clone() for name, p in here.items()}

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of their gradients, where there are any."""
        grads = {name: p.grad for name, p in self.store.parameters.items() if p.grad is not None}
        return {name: _torch.dtensor.local_of(grad).clone() for name, grad in grads.items()}
