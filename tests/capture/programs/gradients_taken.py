"""Loops that take gradients of parameters by torch.autograd.grad, beside backward() or in its place."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.capture.programs.loops import finish, net
from tests.capture.registry import loop
from tests.capture.runner import STEPS, Run, numbers, rows, rows_and_targets, sgd


@loop(ranks=True)
def gradients_by_autograd_grad(run: Run) -> None:
    """torch.autograd.grad instead of backward."""
    model = run.compile(net())
    for step in range(STEPS):
        loss = run.call(model, step).square().mean()
        parameters = list(model.parameters())
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            run.note("gradient", grad)
            with torch.no_grad():
                parameter.sub_(0.1 * grad)
        assert all(p.grad is None for p in parameters)
        run.note_state(model)


@loop(ranks=True)
def weight_by_gradients_of_the_last_layer(run: Run) -> None:
    """The adaptive weight of VQGAN's discriminator."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        out = run.call(model, step)
        likelihood, adversary = out.square().mean(), out.tanh().mean()
        last = model[-1].weight
        norms = [torch.norm(torch.autograd.grad(x, last, retain_graph=True)[0]) for x in (likelihood, adversary)]
        weight = torch.clamp(norms[0] / (norms[1] + 1e-4), 0.0, 1e4).detach()
        run.note("weight", weight)
        (likelihood + 0.8 * weight * adversary).backward()
        finish(run, model, optimizer)


class TwoHeads(nn.Module):
    """A trunk and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).tanh()
        return self.first(x), self.second(x)


@loop(ranks=True)
def gradients_of_two_tasks(run: Run) -> None:
    """PCGrad: what one task has no gradient of is None, and what two tasks disagree about is projected."""
    model = run.compile(TwoHeads())
    optimizer = sgd(model)
    for step in range(STEPS):
        outs = model(*rows(step))
        parameters = list(model.parameters())
        tasks = [
            torch.autograd.grad(out.square().mean(), parameters, retain_graph=True, allow_unused=True) for out in outs
        ]
        run.note("unused", [[g is None for g in grads] for grads in tasks])
        for parameter, g, h in zip(parameters, *tasks, strict=True):
            if g is not None and h is not None:
                dot = (g * h).sum()
                g = g - h * (dot / h.square().sum()) if float(dot) < 0 else g + h
            parameter.grad = h if g is None else g
        finish(run, model, optimizer)


@loop(ranks=True)
def gradients_taken_beside_accumulated_ones(run: Run) -> None:
    """What .grad holds stays as it is, and comes out whole, whether it was reduced or not."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        with getattr(model, "no_sync", contextlib.nullcontext)():
            model(*rows(step)).square().mean().backward()
            taken = torch.autograd.grad(model(*rows(step + 10)).tanh().mean(), model[2].bias)
        run.note("taken", taken)
        model(*rows(step + 20)).square().mean().backward()
        run.note("after", torch.autograd.grad(model(*rows(step + 30)).mean(), [model[0].weight, model[2].bias]))
        finish(run, model, optimizer)


@loop(ranks=True)
def gradients_of_an_input_and_a_parameter(run: Run) -> None:
    """Both in one call; then the parameter's alone, beside a penalty of it."""
    model = run.compile(net())
    for step in range(STEPS):
        (x,) = rows(step)
        x.requires_grad_()
        weight = model[0].weight
        run.note("both", torch.autograd.grad(model(x).square().mean(), [x, weight]))
        loss = model(x).square().mean() + 0.1 * weight.square().sum()
        run.note("penalty", torch.autograd.grad(loss, weight))


@loop(ranks=True)
def hooks_see_gradients_that_are_taken(run: Run) -> None:
    """A hook on a parameter changes what torch.autograd.grad gives."""
    model = run.compile(net())
    seen: list[Any] = []
    handle = model[0].weight.register_hook(lambda grad: (seen.append(grad), grad * 3)[1])
    for step in range(STEPS):
        loss = run.call(model, step).square().mean()
        run.note("taken", torch.autograd.grad(loss, [model[0].weight, model[0].bias]))
        if step == 1:
            handle.remove()
    run.note("seen", [x.clone() for x in seen])


class Checkpointed(nn.Module):
    """Two uses of one weight, in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.layer(self.layer(x).tanh()), x, use_reentrant=False)


@loop(ranks=True)
def gradients_taken_through_a_checkpoint(run: Run) -> None:
    """What is taken is changed in place, and is nobody else's memory."""
    model = run.compile(Checkpointed())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = run.call(model, step).square().mean()
        weight, bias = torch.autograd.grad(loss, [model.layer.weight, model.layer.bias], retain_graph=True)
        bias.mul_(2)
        weight.clamp_(-0.01, 0.01)
        run.note("taken", [weight, bias])
        loss.backward()
        finish(run, model, optimizer)


@loop(ranks=True)
def first_order_meta_learning(run: Run) -> None:
    """Reptile's cousin: a step on one task by gradients that are taken, the loss of another, and back."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        (support, labels), (query, wanted) = rows_and_targets(step), rows_and_targets(step + 50)
        parameters = list(model.parameters())
        before = [p.detach().clone() for p in parameters]
        grads = torch.autograd.grad(F.mse_loss(model(support), labels), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                p.sub_(0.1 * g)
        F.mse_loss(model(query), wanted).backward()
        with torch.no_grad():
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)
        finish(run, model, optimizer)


@loop()
def squared_gradients_of_single_rows(run: Run) -> None:
    """A diagonal of Fisher's information."""
    model = run.compile(net())
    parameters = list(model.parameters())
    fisher = [torch.zeros_like(p) for p in parameters]
    for row in numbers(3, 1, 8, seed=0):
        grads = torch.autograd.grad(model(row).square().mean(), parameters)
        for total, grad in zip(fisher, grads, strict=True):
            total.add_(grad.square())
    run.note("fisher", [f.full_tensor() if isinstance(f, DTensor) else f for f in fisher])


@loop(ranks=True)
def norm_of_the_gradient_is_penalised(run: Run) -> None:
    """A flat minimum: the norm of the gradient of all parameters is part of the loss."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = run.call(model, step).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        norm = sum(g.square().sum() for g in grads).sqrt()
        run.note("norm", norm)
        (loss + 0.1 * norm).backward()
        finish(run, model, optimizer)


@loop(ranks=True)
def diagonal_of_the_hessian(run: Run) -> None:
    """AdaHessian: backward(create_graph=True), then Hutchinson's products of .grad with signs."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = run.call(model, step).square().mean()
        loss.backward(create_graph=True)
        parameters = list(model.parameters())
        signs = [torch.ones_like(p).mul_(-1 if i % 2 else 1) for i, p in enumerate(parameters)]
        products = torch.autograd.grad([p.grad for p in parameters], parameters, grad_outputs=signs, retain_graph=True)
        run.note("products", products)
        run.note("norm", nn.utils.clip_grad_norm_(parameters, 0.01))
        for p, product in zip(parameters, products, strict=True):
            p.grad = p.grad.detach() / (1 + (product * product).abs())
        finish(run, model, optimizer)


@loop(ranks=True)
def third_derivatives(run: Run) -> None:
    model = run.compile(TwoHeads())
    for step in range(STEPS):
        first, second = model(*rows(step))
        parameters = [model.trunk.weight, model.trunk.bias]
        value = first.exp().mean() + second.square().sum()
        for _ in range(3):
            grads = torch.autograd.grad(value, parameters, create_graph=True)
            run.note("gradients", grads)
            value = sum(g.pow(3).sum() for g in grads)


@loop(ranks=True)
def graphs_added_up_in_grad(run: Run) -> None:
    """Two backwards with create_graph=True add up, as in eager, and a plain one after them."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        for part in range(2):
            run.call(model, step + 10 * part).square().mean().backward(create_graph=True)
        run.call(model, step + 20).square().mean().backward()
        finish(run, model, optimizer)


@loop(line=False, refused="remove it")
def graph_through_a_hook(run: Run) -> None:
    """A hook on a parameter would be left out of the second derivative."""
    model = run.compile(net())
    model[0].weight.register_hook(lambda grad: grad.pow(2))
    (grad,) = torch.autograd.grad(run.call(model, 0).square().mean(), model[0].weight, create_graph=True)
    grad.sum().backward()
    run.note_gradients(model)


@loop(ranks=True)
def scaled_gradients_are_penalised(run: Run) -> None:
    """The gradient penalty of torch's notes on automatic mixed precision."""
    model = run.compile(net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run.call(model, step).square().mean()
        scaled = torch.autograd.grad(outputs=scaler.scale(loss), inputs=list(model.parameters()), create_graph=True)
        grads = [grad * (1.0 / scaler.get_scale()) for grad in scaled]
        norm: Any = 0
        for grad in grads:
            norm += grad.pow(2).sum()
        loss = loss + norm.sqrt()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        run.note("norm", nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1))
        scaler.step(optimizer)
        scaler.update()
        run.note_state(model)
