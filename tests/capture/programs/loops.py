"""What users do around the model."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.registry import loop
from tests.capture.runner import STEPS, Run, numbers, rows, rows_and_targets, sgd


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def finish(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The end of a step, everything noted."""
    run.note_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    run.note_state(model)


@loop(ranks=True)
def two_losses(run: Run) -> None:
    """Two backwards through one forward."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        out = run.call(model, step)
        out.square().mean().backward(retain_graph=True)
        (0.1 * out.abs().mean()).backward()
        finish(run, model, optimizer)


@loop(ranks=True)
def two_calls_one_backward(run: Run) -> None:
    """Siamese: the same weights see two inputs before one backward."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        one, other = model(*rows(step)), model(*rows(step + 50))
        F.mse_loss(one, other).backward()
        finish(run, model, optimizer)


@loop(ranks=True)
def accumulates(run: Run) -> None:
    """Two backwards before a step, without no_sync."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        for part in range(2):
            (model(*rows(10 * step + part)).square().mean() / 2).backward()
        finish(run, model, optimizer)


@loop(ranks=True)
def adversaries(run: Run) -> None:
    """A generator and a discriminator, with two optimizers, detach, and frozen halves."""
    torch.manual_seed(1)
    generator, discriminator = (
        run.compile(net()),
        run.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))),
    )
    first, second = sgd(generator), sgd(discriminator)
    for step in range(STEPS):
        fake = generator(*rows(step))
        loss = F.softplus(-discriminator(*rows(step + 20))).mean() + F.softplus(discriminator(fake.detach())).mean()
        second.zero_grad()
        loss.backward()
        run.note_gradients(discriminator)
        run.note_gradients(generator)
        second.step()
        discriminator.requires_grad_(False)
        first.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        run.note_gradients(generator)
        first.step()
        discriminator.requires_grad_(True)
        run.note_state(generator)
        run.note_state(discriminator)


@loop(ranks=True)
def distillation(run: Run) -> None:
    """A compiled teacher under no_grad, a compiled student."""
    teacher, student = run.compile(net()), run.compile(net())
    teacher.eval()
    optimizer = sgd(student)
    for step in range(STEPS):
        x = rows(step)[0]
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        run.note("target", target, grad=True)
        F.kl_div(student(x).log_softmax(-1), target, reduction="batchmean").backward()
        finish(run, student, optimizer)


@loop(ranks=True)
def evaluation_in_between(run: Run) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        model.eval()
        with torch.no_grad():
            run.note("evaluation", model(*rows(step + 30)), grad=True)
        with torch.inference_mode():
            run.note("inference", model(numbers(2, 8, seed=3)).clone())
        model.train()


@loop(ranks=True)
def freezes_midway(run: Run) -> None:
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        model.get_submodule("0").requires_grad_(step != 1)
        run.step(model, optimizer, step)


@loop()
def unfreezes_gradually(run: Run) -> None:
    """Frozen at compile(), thawed later, with a new param group."""
    plain = net()
    plain[0].requires_grad_(False)
    model = run.compile(plain)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(STEPS):
        if step == 1:
            late = list(model.get_submodule("0").parameters())
            for p in late:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": late, "lr": 0.001})
        run.step(model, optimizer, step)


@loop(ranks=True)
def learning_rates(run: Run) -> None:
    """Groups, a scheduler, decay for weights only."""
    model = run.compile(net())
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 0.02},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (s + 1))
    for step in range(STEPS):
        run.step(model, optimizer, step)
        schedule.step()


@loop(ranks=True)
def state_dict_in_the_middle(run: Run) -> None:
    """Saved after the first step, loaded before the third."""
    model = run.compile(net())
    optimizer, saved = sgd(model), None
    for step in range(STEPS):
        if step == 2:
            model.load_state_dict(saved)
        run.step(model, optimizer, step)
        if step == 0:
            saved = copy.deepcopy(model.state_dict())


@loop()
def copied_before(run: Run) -> None:
    """An average of weights on a deep copy made before compile()."""
    plain = net()
    average = copy.deepcopy(plain).double()
    model = run.compile(plain.double())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        with torch.no_grad():
            for target, source in zip(average.parameters(), model.parameters(), strict=True):
                whole = source.full_tensor() if hasattr(source, "full_tensor") else source
                target.lerp_(whole, 0.1)
        run.note("average", list(average.parameters()))


@loop(ranks=True)
def weights_scaled_by_hand(run: Run) -> None:
    """A constraint on weights after each step, in place under no_grad."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.25, 0.25)


@loop(ranks=True)
def data_scaled_by_hand(run: Run) -> None:
    """The same through ``.data``."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        for parameter in model.parameters():
            parameter.data.mul_(0.9)


@loop(ranks=True)
def data_replaced(run: Run) -> None:
    """``p.data = tensor`` between steps."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        for parameter in model.parameters():
            parameter.data = torch.ones(parameter.shape, dtype=torch.float64) / 8


@loop()
def gradients_edited(run: Run) -> None:
    """Gradients are changed between backward and step: noise, centralisation, sign."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.backward(run.call(model, step))
        for parameter in model.parameters():
            parameter.grad.mul_(2)
            parameter.grad.sign_() if parameter.ndim > 1 else None
        finish(run, model, optimizer)


@loop(ranks=True)
def clipped(run: Run) -> None:
    """torch's own clip_grad_norm_ on the compiled parameters."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.backward(run.call(model, step))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        run.note("norm", norm)
        finish(run, model, optimizer)


@loop()
def zero_grad_to_zero(run: Run) -> None:
    """``set_to_none=False``, and gradients that are looked at before the first backward."""
    model = run.compile(net())
    run.note("before", [p.grad for p in model.parameters()])
    optimizer = sgd(model)
    for step in range(STEPS):
        run.backward(run.call(model, step))
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        run.note("cleared", [p.grad for p in model.parameters()])
        run.note_state(model)


@loop()
def closure_for_the_optimizer(run: Run) -> None:
    """LBFGS calls the model several times in a step."""
    model = run.compile(net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(*rows(step)).square().mean()
            loss.backward()
            return loss

        run.note("loss", optimizer.step(closure))
        run.note_state(model)


@loop()
def skipped_backward(run: Run) -> None:
    """A loss that is nan or too large is thrown away after forward."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        model(*rows(step + 70))
        run.step(model, optimizer, step)


@loop()
def exception_in_backward(run: Run) -> None:
    """A hook raises in the first backward; the loop catches it and goes on."""
    model = run.compile(net())
    optimizer = sgd(model)

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("inf in the gradient")

    for step in range(STEPS):
        if step < 2:
            out = model(*rows(step + 5))
            out.register_hook(fail)
            try:
                out.sum().backward()
            except ArithmeticError as error:
                run.note("raised", str(error))
            optimizer.zero_grad()
        run.step(model, optimizer, step)


@loop()
def step_before_backward(run: Run) -> None:
    """The optimizer steps between forward and backward: torch raises."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        out = model(*rows(step))
        model(*rows(step)).mean().backward()
        optimizer.step()
        try:
            out.square().mean().backward()
        except RuntimeError:
            run.note("raised", True)
        optimizer.zero_grad()


@loop()
def backward_twice(run: Run) -> None:
    """The same graph a second time without retain_graph: torch raises."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = model(*rows(step)).square().mean()
        loss.backward()
        try:
            loss.backward()
        except RuntimeError:
            run.note("raised", True)
        finish(run, model, optimizer)


@loop()
def saved_through_a_file(run: Run) -> None:
    """torch.save and torch.load of model and optimizer."""
    model = run.compile(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        state = torch.load(file, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


@loop(ranks=True)
def compiled_with_a_loss(run: Run) -> None:
    model = run.compile(net(), lambda out, y: F.smooth_l1_loss(out, y))
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = model(*rows_and_targets(step))
        run.note("loss", loss)
        (loss * 0.5 + 1).backward()
        finish(run, model, optimizer)


@loop()
def gradients_accumulate_over_none(run: Run) -> None:
    """A parameter without a gradient in one backward, with one in the next."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return self.a(x) + self.b(x) if both else self.a(x)

    model = run.compile(Sometimes())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        model(*rows(step), False).mean().backward()
        run.note_gradients(model)
        model(*rows(step), step > 0).mean().backward()
        finish(run, model, optimizer)


@loop()
def anomaly_detection(run: Run) -> None:
    model = run.compile(net())
    optimizer = sgd(model)
    with torch.autograd.set_detect_anomaly(True):
        for step in range(STEPS):
            run.step(model, optimizer, step)


@loop()
def saved_tensor_hooks(run: Run) -> None:
    """Saved activations go elsewhere and come back."""
    model = run.compile(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            run.step(model, optimizer, step)


@loop()
def meta_learning_penalty(run: Run) -> None:
    """R1: the loss holds the norm of a gradient that autograd.grad gives (create_graph)."""
    model = run.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = sgd(model)
    for step in range(STEPS):
        x = rows(step)[0].requires_grad_(True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        finish(run, model, optimizer)
