"""Hooks of every kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


@program(ranks=True)
class TensorHookScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.1)
        return self.b(h)


@program()
class TensorHookLogs(nn.Module):
    """Keeps the norm of a gradient: Grad-CAM, debuggers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norms: list[float] = []

    def remember(self, grad: Tensor) -> None:
        self.norms.append(grad.norm().item())

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(self.remember)
        return self.b(h)


@program(ranks=True)
def full_backward_hook_changes() -> nn.Module:
    model = two()
    model[0].register_full_backward_hook(lambda m, gi, go: None)
    model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    return model


@program()
def full_backward_pre_hook_changes() -> nn.Module:
    model = two()
    model[2].register_full_backward_pre_hook(lambda m, go: (go[0].clamp(-0.01, 0.01),))
    return model


LOG: list[Any] = []


@program(observe=lambda _: list(LOG))
def backward_hook_logs() -> nn.Module:
    LOG.clear()
    model = two()
    model[0].register_full_backward_hook(lambda m, gi, go: LOG.append(("in", None if gi[0] is None else gi[0].norm())))
    model[2].register_full_backward_hook(lambda m, gi, go: LOG.append(("out", go[0].detach().clone())))
    return model


@program(observe=lambda _: list(LOG), ranks=True)
def forward_hook_logs() -> nn.Module:
    """Activation statistics, kept outside of the model."""
    LOG.clear()
    model = two()
    model[1].register_forward_hook(lambda m, args, out: LOG.append(out.detach().mean()))
    return model


@program(ranks=True)
def forward_hook_changes() -> nn.Module:
    model = two()
    model[0].register_forward_hook(lambda m, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    return model


@program()
def forward_hook_with_kwargs() -> nn.Module:
    model = two()
    model[0].register_forward_hook(lambda m, args, kwargs, out: out + args[0], with_kwargs=True)
    return model


@loop()
def forward_hook_added_later(run: Run) -> None:
    """Added after compile(), after the first step, and removed before the third."""
    plain = two()
    model = run.compile(plain)
    optimizer, handle = sgd(model), None
    for step in range(STEPS):
        if step == 1:
            handle = plain[0].register_forward_hook(lambda m, args, out: out * 3)
        if step == 2:
            handle.remove()
        run.step(model, optimizer, step)


@loop()
def hook_on_the_whole_model(run: Run) -> None:
    """Registered on the compiled model: runs around each call, on real tensors."""
    seen: list[Any] = []
    model = run.compile(two())
    model.register_forward_hook(lambda m, args, out: seen.append(out.sum().item()))
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        run.note("seen", seen)


@loop()
def backward_hook_added_later(run: Run) -> None:
    plain = two()
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == 1:
            plain[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
        run.step(model, optimizer, step)


@loop(ranks=True)
def parameter_hook(run: Run) -> None:
    """A mask on a weight's gradient: pruning, frozen rows."""
    plain = two()
    plain[0].weight.register_hook(lambda grad: grad * torch.eye(8))
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)


@loop(ranks=True)
def parameter_hook_added_after(run: Run) -> None:
    model = run.compile(two())
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 2)
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)


@loop()
def optimizer_in_backward(run: Run) -> None:
    """Post-accumulate hooks that step and clear."""
    model = run.compile(two())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for step in range(STEPS):
        run.backward(run.call(model, step))
        run.note_gradients(model)
        run.note_state(model)


@loop()
def hook_counts_calls(run: Run) -> None:
    """A parameter's hook runs once in each backward."""
    calls: list[str] = []
    plain = two()
    for name, parameter in plain.named_parameters():
        parameter.register_hook(lambda grad, name=name: calls.append(name))
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        run.note("calls", sorted(calls))


def with_another_name(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}again"] = state[f"{prefix}0.bias"]


@program()
def state_dict_hook() -> nn.Module:
    model = two()
    model.register_state_dict_post_hook(
        lambda m, sd, prefix, meta: sd.update({f"{prefix}2.bias": sd[f"{prefix}0.bias"]})
    )
    return model


@program(refused="hook")
class RetainGrad(nn.Module):
    """Asks for an activation's gradient and keeps the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.retain_grad()  # refused
        self.h = h
        return self.b(h)


@loop()
def output_hook(run: Run) -> None:
    """A hook on what the model returned."""
    model = run.compile(two())
    optimizer = sgd(model)
    for step in range(STEPS):
        output = run.call(model, step)
        output.register_hook(lambda grad: grad * 3)
        run.backward(output)
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        run.note_state(model)


@program(ranks=True)
def hook_changes_anothers_buffer() -> nn.Module:
    """By its closure: the copy that is traced is found in its place."""
    model = two()
    model.register_buffer("mean", torch.zeros(8))

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        model.mean.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)

    model[0].register_forward_hook(hook)
    return model


@program(ranks=True)
def hook_changes_its_buffer() -> nn.Module:
    model = two()
    model[0].register_buffer("mean", torch.zeros(8))

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        module.mean.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)

    model[0].register_forward_hook(hook)
    return model


class Kept:
    """What the methods of an object keep, which are hooks; nothing else knows it."""

    def __init__(self, layer: nn.Module) -> None:
        self.output: Tensor | None = None
        self.gradient: Tensor | None = None
        layer.register_forward_hook(self.keep)
        layer.register_full_backward_hook(self.keep_gradient)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.output = output.detach()

    def keep_gradient(self, module: nn.Module, grads: Any, of_output: Any) -> None:
        self.gradient = of_output[0].detach()


@loop()
def hooks_that_have_seen_plain_calls(run: Run) -> None:
    """An object that has tensors of the plain model, and of another kind of call: Grad-CAM and integrated gradients."""
    model = two().double()
    kept = Kept(model[1])
    model(numbers(4, 8, seed=9)).sum().backward()
    compiled = run.compile(model)
    for step in range(STEPS):
        x = numbers(4, 8, seed=step).requires_grad_(step == 1)
        compiled(x).square().sum().backward()
        run.note("kept", [kept.output, kept.gradient])


class KeptInSlots:
    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient = numbers(4, 8, seed=9)

    def keep(self, module: nn.Module, grads: Any, of_output: Any) -> None:
        self.gradient = of_output[0].clone()


@loop()
def backward_hook_of_an_object_with_slots(run: Run) -> None:
    model, kept = two().double(), KeptInSlots()
    model[0].register_full_backward_hook(kept.keep)
    compiled = run.compile(model)
    for step in range(STEPS):
        compiled(numbers(4, 8, seed=step).requires_grad_()).square().sum().backward()
        run.note("kept", kept.gradient)
