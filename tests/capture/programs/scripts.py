"""Loops of training scripts: freezing, casting, exchanging parts, sums of losses, exceptions, other optimizers."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.capture.programs.loops import finish, net
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, rows, rows_and_targets, sgd
from tests.devices import DEVICE


def whole(value: Any) -> Tensor:
    """What a user of ``DTensor`` parameters writes: a whole tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@loop(ranks=True)
def freezes_and_thaws(run: Run) -> None:
    """A layer is trained in every other step only."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(4):
        model[2].requires_grad_(step % 2 == 0)
        run.step(model, optimizer, step)


@loop()
def frozen_between_forward_and_backward(run: Run) -> None:
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        out = run.call(model, step)
        model[2].weight.requires_grad_(False)
        run.backward(out)
        model[2].weight.requires_grad_(True)
        finish(run, model, optimizer)


@loop(ranks=True)
def discriminator_frozen_for_the_generator(run: Run) -> None:
    """A GAN as most are written."""
    make, judge = run.compile(net()), run.compile(nn.Sequential(nn.Linear(8, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1)))
    first, second = sgd(make), sgd(judge)
    for step in range(STEPS):
        noise, real = rows_and_targets(step)
        judge.requires_grad_(True)
        second.zero_grad()
        fake = make(noise)
        loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
        run.note("loss", loss)
        loss.backward()
        run.note_gradients(judge)
        second.step()
        judge.requires_grad_(False)
        first.zero_grad()
        loss = F.softplus(-judge(fake)).mean()
        run.note("loss", loss)
        loss.backward()
        finish(run, make, first)


@loop(ranks=True)
def two_losses_in_one_backward(run: Run) -> None:
    """torch.autograd.backward of a list, with weights."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        out = run.call(model, step)
        weights = [torch.tensor(1.0), torch.tensor(0.25)]
        torch.autograd.backward([out.square().mean(), out.abs().mean()], weights)
        finish(run, model, optimizer)


@loop(ranks=True)
def backward_with_a_gradient(run: Run) -> None:
    """The output is no scalar: vector-Jacobian products by hand."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        out = run.call(model, step)
        out.backward(numbers(4, 8, seed=step + 20))
        finish(run, model, optimizer)


@loop()
def backward_into_some_parameters(run: Run) -> None:
    """backward(inputs=...) leaves the others alone."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.call(model, step).square().mean().backward(inputs=[model[0].weight, model[2].bias])
        finish(run, model, optimizer)


@loop()
def three_backwards_of_one_graph(run: Run) -> None:
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = run.call(model, step).square().mean()
        for again in range(3):
            (loss * (again + 1)).backward(retain_graph=again < 2)
        finish(run, model, optimizer)


@loop(ranks=True)
def accumulates_past_a_bad_batch(run: Run) -> None:
    """One of the microbatches raises in the user's code between forward and backward, and is skipped."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        for part in range(3):
            try:
                out = model(*rows(10 * step + part))
                if part == 1:
                    raise ValueError("bad batch")
                (out.square().mean() / 2).backward()
            except ValueError:
                continue
        finish(run, model, optimizer)


@loop()
def skips_steps_that_are_not_finite(run: Run) -> None:
    """As gradient scalers do."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(4):
        x = rows(step)[0]
        model(x * float("inf") if step == 1 else x).square().mean().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.note("norm", total)
        if torch.isfinite(total):
            optimizer.step()
        optimizer.zero_grad()
        run.note_state(model)


@loop(ranks=True)
def evaluation_of_a_part(run: Run) -> None:
    """Batch norms stay in evaluation while the rest is trained."""
    model = run.compile(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)))
    optimizer = sgd(model)
    for step in range(4):
        model.train()
        if step % 2:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
        run.step(model, optimizer, step)


@loop()
def averaged_weights(run: Run) -> None:
    """An EMA of the plain model that is kept beside the compiled one, by torch's own helper."""
    plain = net()
    model = run.compile(plain)
    average = AveragedModel(net(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(whole(parameter), 0.1)
        run.note("mean", [p.detach() for p in average.parameters()])


@loop()
def ema_by_copies(run: Run) -> None:
    """The EMA is a deep copy of the compiled model's parameters, swapped in for an evaluation."""
    model = run.compile(net())
    optimizer = sgd(model)
    mean = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(STEPS):
        run.step(model, optimizer, step)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mean[name] = 0.9 * mean[name] + 0.1 * parameter.detach()
            kept = {n: p.detach().clone() for n, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter.copy_(mean[name])
            model.eval()
            run.note("evaluated", model(*rows(step + 40)))
            model.train()
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])


@loop()
def weights_loaded_midway(run: Run) -> None:
    model = run.compile(net())
    optimizer = sgd(model)
    first = copy.deepcopy({n: t.clone() for n, t in model.state_dict().items()})
    for step in range(STEPS):
        run.step(model, optimizer, step)
        if step == 1:
            model.load_state_dict(first)
            run.note_state(model)


@loop(ranks=True)
def penalties_on_parameters(run: Run) -> None:
    """L1 and orthogonality are added to the loss outside of the model."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = run.call(model, step).square().mean()
        loss = loss + 1e-2 * sum(whole(p.abs().sum()) for p in model.parameters())
        weight = whole(model[0].weight)
        loss = loss + 1e-2 * (weight @ weight.t() - torch.eye(8)).square().sum()
        run.note("loss", loss)
        loss.backward()
        finish(run, model, optimizer)


@loop()
def sharpness_aware(run: Run) -> None:
    """SAM: two gradients a step, the second at perturbed weights."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.call(model, step).square().mean().backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        run.call(model, step).square().mean().backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        finish(run, model, optimizer)


@loop()
def groups_of_parameters(run: Run) -> None:
    """Decay for weights only, another rate for the head, a schedule, and AdamW."""
    model = run.compile(net())
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-3], total_steps=10)
    for step in range(STEPS):
        run.backward(run.call(model, step))
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        finish(run, model, optimizer)
        schedule.step()


@loop()
def parameters_added_to_the_optimizer(run: Run) -> None:
    """Gradual unfreezing by add_param_group."""
    model = run.compile(net())
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-2)
    for step in range(STEPS):
        if step == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})
        run.backward(run.call(model, step))
        finish(run, model, optimizer)


class Loss(nn.Module):
    """Learned uncertainty weights live in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.zeros(2))

    def forward(self, out: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        one, other = F.mse_loss(out, y), F.l1_loss(out, y)
        loss = (torch.exp(-self.s) * torch.stack([one, other]) + self.s).sum()
        return loss, {"one": one, "other": other}


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = net(), Loss()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(self.net(x), y)


@program(batch=rows_and_targets, loss=lambda out: out[0], ranks=True)
def loss_with_parameters() -> nn.Module:
    return WithLoss()


@loop(ranks=True)
def loss_outside_with_parameters(run: Run) -> None:
    model, loss = run.compile(net()), Loss()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    for step in range(STEPS):
        x, y = rows_and_targets(step)
        value, parts = loss(model(x), y)
        run.note("loss", [value, *parts.values()])
        value.backward()
        run.note("gradient of the loss", loss.s.grad)
        finish(run, model, optimizer)


@loop()
def embedding_then_head_compiled_apart(run: Run) -> None:
    """Two compiled models in a row: gradients go from one into the other."""
    body, head = run.compile(net()), run.compile(nn.Linear(8, 3))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for step in range(STEPS):
        loss = head(torch.tanh(body(*rows(step)))).square().mean()
        run.note("loss", loss)
        loss.backward()
        run.note_gradients(head)
        finish(run, body, optimizer)


class Outer(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)))


@loop()
def compiled_part_of_a_plain_model(run: Run) -> None:
    model = Outer(run.compile(net()))
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = model(*rows(step)).square().mean()
        run.note("loss", loss)
        loss.backward()
        finish(run, model, optimizer)


@loop()
def raises_in_forward_and_goes_on(run: Run) -> None:
    """A call with a wrong shape is caught; the next step is as if nothing had been."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        with contextlib.suppress(RuntimeError, ValueError):
            model(numbers(4, 7, seed=step))
        run.step(model, optimizer, step)


@loop()
def interrupted_in_accumulation(run: Run) -> None:
    """An exception between two backwards; zero_grad gives a clean state."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        with contextlib.suppress(KeyError):
            for part in range(3):
                (model(*rows(10 * step + part)).square().mean() / 3).backward()
                if part == 1 and step == 1:
                    raise KeyError
        if step == 1:
            optimizer.zero_grad()
            model(*rows(step)).square().mean().backward()
        finish(run, model, optimizer)


@loop(ranks=True)
def numbers_of_gradients(run: Run) -> None:
    """What is logged, and what is decided by it."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.backward(run.call(model, step))
        for parameter in model.parameters():
            grad = parameter.grad
            run.note("of the gradient", [grad.norm().item(), float(grad.sum()), grad.abs().max().item()])
            run.note("of the parameter", [parameter.detach().mean().item(), int((parameter > 0).sum())])
        if float(model[0].weight.grad.sum()) > 0:
            model[0].weight.grad.mul_(0.5)
        finish(run, model, optimizer)


@loop(ranks=True)
def gradient_taken_and_given_back(run: Run) -> None:
    """PCGrad: gradients of two tasks are taken out, projected, and written back."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        tasks = []
        for task in range(2):
            model.zero_grad(set_to_none=True)
            out = model(*rows(step))
            (out[:, :4] if task == 0 else out[:, 4:].abs()).mean().backward()
            tasks.append([p.grad.clone() for p in model.parameters()])
        dot = sum((g * h).sum() for g, h in zip(*tasks, strict=True))
        for parameter, g, h in zip(model.parameters(), *tasks, strict=True):
            parameter.grad = g + h if float(dot) > 0 else g - h
        finish(run, model, optimizer)


@loop(ranks=True)
def logits_changed_in_place(run: Run) -> None:
    """What the model returns is masked, scaled and detached in place."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        logits = run.call(model, step)
        logits[:, 3] = -10.0
        logits.masked_fill_(torch.arange(8) == 5, -5.0).div_(0.7)
        kept = logits.detach().clone()
        loss = F.cross_entropy(logits, torch.arange(4))
        run.note("loss", [loss, kept])
        loss.backward()
        run.note("detached", logits.detach_().requires_grad)
        finish(run, model, optimizer)


class Heads(nn.Module):
    """An output, a view of it, and a view of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.net(x)
        return h, h[:, :2], x[:, 0]


@loop()
def view_of_an_output_changed_in_place(run: Run) -> None:
    """In eager both change: torch refuses it of outputs that share their memory, or the gradients are eager's."""
    plain = Heads().to(DEVICE)
    twin = copy.deepcopy(plain)
    model = run.compile(plain)

    def gradient(of: Any) -> Tensor:
        one, other, _ = of(*rows(0))
        one.mul_(2)
        (one.sum() + other.square().sum()).backward()
        return next(iter(of.parameters())).grad

    try:
        right = torch.allclose(gradient(model), gradient(twin), rtol=1e-12)
    except RuntimeError as error:
        right = "is a view and is being modified inplace" in str(error)
    run.note("right or refused", right)


@loop()
def default_device_and_dtype(run: Run) -> None:
    """Contexts of torch around the call."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.device("cpu"):
            run.step(model, optimizer, step)
