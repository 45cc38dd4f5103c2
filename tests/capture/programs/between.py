"""What users do between the forward, the backward and the step: to inputs, to buffers, and with random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.loops import finish, net
from tests.capture.registry import loop
from tests.capture.runner import STEPS, Run, numbers, rows, sgd


class Scaled(nn.Module):
    """A buffer is read by the backward, too."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.scale)


def change_before_backward(run: Run, plain: nn.Module, change: Callable[[Any, Tensor], Any]) -> None:
    """Torch raises where the backward reads what was changed; then the same step without a change."""
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        x = rows(step)[0].clone()
        output = model(x)
        change(model, x)
        try:
            output.square().mean().backward()
        except RuntimeError:
            run.note("raised", True)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        finish(run, model, optimizer)


@loop(ranks=True)
def input_refilled_before_backward(run: Run) -> None:
    """One buffer for all batches."""
    change_before_backward(run, net(), lambda model, x: x.copy_(numbers(4, 8, seed=99)))


@loop(ranks=True)
def buffer_changed_before_backward(run: Run) -> None:
    change_before_backward(run, Scaled(), lambda model, x: model.get_buffer("scale").mul_(0.5))


@loop(ranks=True)
def initialised_midway(run: Run) -> None:
    """A head starts again, and a layer is drawn by hand."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        torch.manual_seed(step)
        model.get_submodule("2").reset_parameters()
        with torch.no_grad():
            model.get_parameter("0.weight").normal_(0, 0.1, generator=torch.Generator().manual_seed(step))
            model.get_parameter("0.bias").bernoulli_(0.5)
        run.note_state(model)


@loop(ranks=True)
def noise_on_weights_and_gradients(run: Run) -> None:
    """The gradient of disturbed weights, and noise on it."""
    model = run.compile(net())
    optimizer = sgd(model)
    torch.manual_seed(7)
    for step in range(STEPS):
        noise = [torch.randn_like(p) * 0.01 for p in model.parameters()]
        with torch.no_grad():
            for parameter, drawn in zip(model.parameters(), noise, strict=True):
                parameter.add_(drawn)
        model(*rows(step)).square().mean().backward()
        with torch.no_grad():
            for parameter, drawn in zip(model.parameters(), noise, strict=True):
                parameter.sub_(drawn)
                parameter.grad.add_(torch.rand_like(parameter.grad), alpha=0.01)
        finish(run, model, optimizer)


@loop(ranks=True)
def average_swapped_through_data(run: Run) -> None:
    """Shadows take the place of parameters for an evaluation, and what was there comes back."""
    model = run.compile(net())
    optimizer = sgd(model)
    shadows = {name: p.data.clone() for name, p in model.named_parameters()}
    for step in range(STEPS):
        run.step(model, optimizer, step)
        for name, parameter in model.named_parameters():
            shadows[name] = 0.9 * shadows[name] + 0.1 * parameter.data
        kept = {name: p.data for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.data = shadows[name]
        with torch.no_grad():
            run.note("evaluation", model(*rows(step)))
        for name, parameter in model.named_parameters():
            parameter.data = kept[name]
        run.note_state(model)


@loop(ranks=True)
def sharpness_aware_through_data(run: Run) -> None:
    """The second gradient is that of moved weights, for which gradients of both are added up; weights come back."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        with getattr(model, "no_sync", contextlib.nullcontext)():
            run.backward(run.call(model, step))
        kept = [p.data for p in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.05 * parameter.data.sign()
        run.backward(run.call(model, step))
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.data = before
        finish(run, model, optimizer)


@loop(ranks=True)
def gradients_and_states_given_through_data(run: Run) -> None:
    """Also of gradients that are still summands; the last assignment is followed by no call."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        with getattr(model, "no_sync", contextlib.nullcontext)():
            run.backward(run.call(model, step))
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)
        run.backward(run.call(model, step))
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data / parameter.grad.data.norm()
        run.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        finish(run, model, optimizer)
        for parameter in model.parameters():
            state = optimizer.state[parameter]["momentum_buffer"]
            state.data = state.data * 0.5
        nn.utils.vector_to_parameters(0.9 * nn.utils.parameters_to_vector(model.parameters()), model.parameters())
        run.note_state(model)


@loop(line=False, refused="a copy")
def parameter_given_the_memory_of_another(run: Run) -> None:
    """A target that would follow its source in every step."""
    model, target = run.compile(net()), run.compile(net())
    for parameter, source in zip(target.parameters(), model.parameters(), strict=True):
        parameter.data = source.data


@loop(line=False, refused="call the transform inside of forward")
def vmap_over_the_model(run: Run) -> None:
    model = run.compile(net())
    run.note("outputs", torch.vmap(model)(numbers(3, 4, 8, seed=1)))


@loop(line=False, refused="torch.autograd.grad")
def gradient_by_torch_func(run: Run) -> None:
    model = run.compile(net())
    run.note("gradient", torch.func.grad(lambda x: model(x).square().sum())(rows(1)[0]))
