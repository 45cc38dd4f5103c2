"""Models that take gradients in their forward: forces, gradient penalties, inner steps, walks down an energy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

from tests.capture.programs.inplace import Two
from tests.capture.programs.ways import Doubled
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, rows, sgd


class Energy(nn.Module):
    """A scalar for each row, for programs to differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.gate = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1), nn.Linear(8, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.b(self.norm(F.silu(self.a(x))).tanh())


class SmoothEnergy(Energy):
    """Without a norm, of which eager's third derivatives lack a part."""

    def energy(self, x: Tensor) -> Tensor:
        return self.b(F.silu(self.a(x)).tanh())


@program(ranks=True)
class Force(Energy):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        (force,) = grad(self.energy(x).sum(), x, create_graph=True)
        return -force


@program(ranks=True)
class EnergyAndForce(Energy):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            (force,) = grad(energy, x, torch.ones_like(energy), create_graph=self.training)
        return energy, -force


@loop(ranks=True)
def energies_are_evaluated_without_gradients(run: Run) -> None:
    """Under torch.no_grad(), where the model enables them for itself."""
    model = run.compile(EnergyAndForce())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        model.eval()
        with torch.no_grad():
            energy, force = model(*rows(step + 5))
        run.note("evaluation", (energy.detach(), force))
        model.train()


@program(ranks=True)
class PairPotential(Energy):
    """Forces between atoms, of the distances of all pairs, with messages that are added up."""

    def forward(self, x: Tensor) -> Tensor:
        place = x.clone().requires_grad_(True)
        between = place[:, None] - place[None]
        distance = between.square().sum(-1).add(1e-3).sqrt()
        messages = torch.exp(-distance)[..., None] * self.a(between).tanh()
        energy = self.b(self.norm(messages.sum(1)).tanh()).sum()
        return grad(energy, place, create_graph=True)[0]


@program(ranks=True)
class HamiltonianFlow(Energy):
    def forward(self, x: Tensor) -> Tensor:
        q, p = (part.clone().requires_grad_() for part in x.chunk(2, -1))
        dq, dp = grad(self.energy(torch.cat([q, p], -1)).sum(), (q, p), create_graph=True)
        return torch.cat([dp, -dq], -1)


@program(ranks=True)
class Burgers(SmoothEnergy):
    """The residual of a differential equation, with a derivative of a derivative."""

    def forward(self, x: Tensor) -> Tensor:
        t, place = (x[:, i : i + 1].clone().requires_grad_() for i in (0, 1))
        u = self.energy(torch.cat([t, place, x[:, 2:]], 1))
        ones = torch.ones_like(u)
        by_time, by_place = grad(u, (t, place), ones, create_graph=True)
        (twice,) = grad(by_place.sum(), place, create_graph=True)
        return by_time + u * by_place - 0.01 * twice


@program(ranks=True)
class Langevin(Energy):
    """Samples walk down an energy; their way carries no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().clone().requires_grad_(True)
        for _ in range(3):
            (slope,) = grad(self.energy(y).sum(), y)
            y = (y - 0.1 * slope).detach().requires_grad_(True)
        return self.energy(y) - self.energy(x)


@program(ranks=True)
class LangevinInPlace(Energy):
    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().clone().requires_grad_(True)
        for _ in range(3):
            (slope,) = grad(self.energy(y).sum(), y)
            with torch.no_grad():
                y.sub_(0.1 * slope)
        return self.energy(y.detach()) - self.energy(x)


@program(ranks=True)
class InnerSteps(Two):
    """Parameters after three steps of another loss, and the gradient through these."""

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.a.named_parameters())
        for _ in range(3):
            inner = torch.func.functional_call(self.a, weights, (x,)).tanh().square().mean()
            steps = grad(inner, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), steps, strict=True)}
        return self.b(torch.func.functional_call(self.a, weights, (x,)).tanh())


@program(ranks=True)
class InnerStepsOfFirstOrder(Two):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = grad(self.a(x).tanh().square().mean(), tuple(self.a.parameters()))
        return self.b(F.linear(x, self.a.weight - 0.1 * weight, self.a.bias - 0.1 * bias).tanh())


@program(ranks=True)
class StopsInside(Energy):
    """What is computed under no_grad, or detached, is no part of the derivative."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.no_grad():
            weight = torch.sigmoid(self.gate(x))
        h = self.energy(x)
        return grad((weight * h * h.detach()).sum(), x, create_graph=True)[0]


@program(ranks=True)
class UnusedInput(Energy):
    def forward(self, x: Tensor) -> Tensor:
        x, other = x.clone().requires_grad_(), torch.zeros(8).requires_grad_()
        force, none = grad(self.energy(x).sum(), (x, other), create_graph=True, allow_unused=True)
        _, zeros = grad(self.energy(x).sum(), (x, other), create_graph=True, materialize_grads=True)
        assert none is None
        return force + zeros


@program(ranks=True)
class ThroughNorms(nn.Module):
    """Norms, attention, a recurrent cell and writes in place between input and energy."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)
        self.batch, self.group, self.rms = nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)
        self.attention, self.cell = nn.MultiheadAttention(8, 2, batch_first=True), nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        place = x.clone().requires_grad_()
        h = self.rms(self.group(self.batch(self.a(place))))
        h = self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]
        h = self.cell(place, h)
        both = torch.zeros_like(h)
        both[:, :4] = h[:, 4:] * 2
        both[:, 4:] = h[:, :4].square()
        return grad(self.b(both.tanh()).sum(), place, create_graph=True)[0]


@program(random=True, ranks=True)
class ThroughDropout(Energy):
    """The derivative has the mask of what it is taken of."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return grad(self.b(F.dropout(self.a(x).tanh(), 0.5)).square().sum(), x, create_graph=True)[0]


@program()
class ThroughLayers(Energy):
    """Of layers that repeat, none is left out of the trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        x = h = x.clone().requires_grad_()
        for layer in self.layers:
            h = h + layer(h)
        return grad(self.energy(h).sum(), x, create_graph=True)[0]


@program(ranks=True)
class OfFunctional(SmoothEnergy):
    """What ``torch.autograd.functional`` takes."""

    def forward(self, x: Tensor) -> Tensor:
        _, gradient = torch.autograd.functional.vjp(lambda y: self.energy(y).sum(), x, create_graph=True)
        _, tangent = torch.autograd.functional.jvp(self.energy, x, torch.ones_like(x), create_graph=True)
        return gradient * tangent


@program(ranks=True)
class RequiresGradientLate(SmoothEnergy):
    """What was computed of a tensor before it requires a gradient has none, and views of it behind belong to it."""

    def forward(self, x: Tensor) -> Tensor:
        place = x.clone().view(2, 2, 8)
        place[0] *= 2
        before = place * 2
        place.requires_grad_()
        part = place[1]
        energy = (self.energy(place) * before * part.sin()).sum()
        return grad(energy, place, create_graph=True)[0]


@program(ranks=True)
class TakenUnderNoGrad(SmoothEnergy):
    """A gradient that is to be differentiated follows in whatever mode it is taken."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        energy = self.energy(x).sum()
        with torch.no_grad():
            (slope,) = grad(energy, x, create_graph=True)
            other = slope.square()
        assert slope.requires_grad and not other.requires_grad
        (twice,) = grad((slope * other).sum(), x, create_graph=True)
        return slope * other, twice


@program(ranks=True)
class ResultsChangedInPlace(SmoothEnergy):
    """Gradients are tensors like any others, which one clips."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        energy = self.energy(x).sum()
        (first,) = grad(energy, x, retain_graph=True)
        first.clamp_(-0.1, 0.1)
        first[:, 0] = 0
        (second,) = grad(energy, x, create_graph=True)
        second.mul_(2).add_(self.a(x))
        return first * self.a(x), second


@program(ranks=True)
class ThroughStatistics(nn.Module):
    """Batch norms whose running statistics are means, and are read behind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.mean = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        h = self.mean(self.norm(self.a(x)).tanh())
        assert self.norm.running_mean is not None
        return grad((h.square() * self.norm.running_mean).sum(), x, create_graph=True)[0]


@program(ranks=True)
class ThroughSpectra(SmoothEnergy):
    """The backward of a window's view makes indices."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        spectrum = torch.stft(self.a(x), 4, window=torch.ones(4), return_complex=True).abs()
        return grad(F.logsigmoid(spectrum).sum(), x, create_graph=True)[0]


class ForceAtInputs(Energy):
    """The user's own tensor requires a gradient from then on, and has one after the backward."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        assert batch["place"].ndim == 2 and batch["place"].size(1) == 8
        batch["place"].requires_grad_(self.training)
        energy = self.energy(batch["place"] * batch["charge"])
        if not self.training:
            return {"energy": energy}
        return {"energy": energy, "force": -grad(energy.sum(), batch["place"], create_graph=True)[0]}


@loop(ranks=True)
def force_at_inputs(run: Run) -> None:
    model = run.compile(ForceAtInputs())
    optimizer = sgd(model)
    for step in range(STEPS):
        for _ in range(2):
            batch = {"place": numbers(4, 8, seed=step), "charge": numbers(4, 8, seed=step + 9)}
            out = model(batch)
            run.note("force", (out["energy"], out["force"], batch["place"].requires_grad))
            (out["energy"].square().sum() + out["force"].square().sum()).backward()
            run.note("gradient of the input", batch["place"].grad)
            assert not batch["charge"].requires_grad
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        batch = {"place": numbers(4, 8, seed=step), "charge": numbers(4, 8, seed=step + 9)}
        run.note("evaluation", (model(batch)["energy"], batch["place"].requires_grad))
        model.train()


class CriticWithPenalty(nn.Module):
    """A critic whose loss has the norm of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        mixed = (0.3 * real + 0.7 * fake).detach().requires_grad_(True)
        (slope,) = grad(self.net(mixed).sum(), mixed, create_graph=True)
        return self.net(fake).mean() - self.net(real).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()


def _two_inputs(step: int) -> tuple[Any, ...]:
    return numbers(4, 8, seed=step), numbers(4, 8, seed=step + 9)


@program(batch=_two_inputs, ranks=True)
def critic_with_penalty() -> nn.Module:
    return CriticWithPenalty()


@program()
class FunctionBehind(SmoothEnergy):
    """Where Python asks for a value, the second trace has met no Function either."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        force = Doubled.apply(grad(self.energy(x).sum(), x, create_graph=True)[0])
        return force * 2 if force.sum() > 0 else force - 1


class ForceWhereAsked(SmoothEnergy):
    asks = True

    def forward(self, x: Tensor, force: bool) -> tuple[Tensor, ...]:
        if not (force and self.asks):
            return (self.energy(x),)
        x.requires_grad_()
        energy = self.energy(x)
        return energy, grad(energy.sum(), x, create_graph=True)[0]


@loop(ranks=True)
def force_where_an_argument_asks(run: Run) -> None:
    """In other calls, the input requires no gradient."""
    model = run.compile(ForceWhereAsked())
    for step in range(4):
        x = numbers(4, 8, seed=step)
        for output in model(x, step % 2 == 0):
            run.note("output", output, grad=True)
        run.note("input", x.requires_grad)


@loop(refused=r"x\.detach\(\)\.requires_grad_\(\)", line=False)
def force_where_an_attribute_asks(run: Run) -> None:
    model = run.compile(ForceWhereAsked())
    run.note("force", model(numbers(4, 8, seed=1), True), grad=True)
    run.plain.asks = False
    run.changed()
    run.note("energy", model(numbers(4, 8, seed=2), True), grad=True)


class Slope(torch.autograd.Function):
    """A derivative that a Function takes in its forward: the cure where the model may not take it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return grad((x @ weight).tanh().sum(), x)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            (slope,) = grad((x @ weight).tanh().sum(), x, create_graph=True)
        return grad(slope, (x, weight), gradient)


@program(ranks=True)
class InsideAFunction(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Slope.apply(x, self.a.weight))


@loop()
def whole_numbers_require_no_gradient(run: Run) -> None:
    """Torch's own error, as for any tensor of whole numbers."""
    model = run.compile(ForceAtInputs())
    with pytest.raises(RuntimeError, match="floating point"):
        model({"place": torch.ones(4, 8, dtype=torch.long), "charge": numbers(4, 8, seed=1)})


# --------------------------------------------------------------------------------------------------------- refused


class WithHook(SmoothEnergy):
    """A hook on a parameter sees the gradient that forward takes of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = grad(self.energy(x).sum(), self.a.weight, create_graph=True)  # refused
        return F.linear(x, self.a.weight - slope)


@program(refused=r"w\.clone\(\)")
def of_a_parameter_with_a_hook() -> nn.Module:
    return WithHook()


@loop(refused=r"w\.clone\(\)")
def of_an_input_with_a_hook(run: Run) -> None:
    class Model(SmoothEnergy):
        def forward(self, x: Tensor) -> Tensor:
            return grad(self.energy(x).sum(), x, create_graph=True)[0]  # refused

    model = run.compile(Model())
    x = numbers(4, 8, seed=1).requires_grad_()
    x.register_hook(lambda gradient: gradient * 3)
    run.note("force", model(x))


@program(refused=r"x\.detach\(\)\.requires_grad_\(\)")
class OfAnInputThatWasRead(Energy):
    """What was made of it before has no gradient with respect to it."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.square()
        x.requires_grad_(True)  # refused
        return grad(self.energy(x + h).sum(), x, create_graph=True)[0]


@program(refused=r"buffer\.detach\(\)\.requires_grad_\(\)")
class OfABufferThatWasRead(SmoothEnergy):
    """In the second call, it requires a gradient from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((8,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.shift
        self.shift.requires_grad_()  # refused
        return grad((self.energy(x + self.shift) * h).sum(), self.shift, create_graph=True)[0]


@program(refused=r"h\.clone\(\)")
class OfAViewThatIsWritten(SmoothEnergy):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).view(2, 2, 8)
        h[0] *= 2
        part = h[1]
        return grad((self.energy(h) * part.sin()).sum(), h, create_graph=True)[0]  # refused


@program(refused="make a new tensor")
class StepsInPlace(SmoothEnergy):
    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().clone().requires_grad_()
        for _ in range(2):
            (slope,) = grad(self.energy(y).sum(), y)
            with torch.no_grad():
                y -= 0.1 * slope
                y.clamp_(-1, 1)  # refused
        return self.energy(y.detach())


@program(refused="write the derivative out")
class ThroughAFunction(Energy):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return grad(self.energy(Doubled.apply(x)).sum(), x, create_graph=True)[0]  # refused


@program(refused="write the derivative out")
class ThroughAHook(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.b(x)
        h = self.a(x)
        h.register_hook(lambda g: g * 2)
        return grad(h.tanh().sum(), x, create_graph=True)[0]  # refused


@program()
class RequiresOneAfterItsForm(Two):
    """What is made of a tensor's form has nothing of its values."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) and x.dtype is torch.float64
        noise = torch.zeros_like(x) + torch.full_like(x, 0.1) * x.new_ones(x.shape)
        noise = noise + torch.zeros(len(x), 1).to(x).expand_as(x) + torch.ones(8).type_as(x)
        x.requires_grad_()
        energy = self.b(torch.tanh(self.a(x + noise)))
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force
