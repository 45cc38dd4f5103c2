"""Methods beside ``forward`` that are trained (``forward_methods=``): agents with two heads, encoders, critics."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.registry import loop
from tests.capture.runner import STEPS, Run, numbers, sgd

METHODS = ("get_value", "get_action_and_value", "encode")


class Agent(nn.Module):
    """As an agent of PPO: it has no ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.actor = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.calls = 0

    def get_value(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.critic(x)

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None, *, scale: float = 1.0) -> Any:
        policy = torch.distributions.Categorical(logits=self.actor(x) * scale)
        action = policy.probs.argmax(-1) if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.get_value(x)


@loop(ranks=True)
def an_agent_without_forward(run: Run) -> None:
    model = run.compile(Agent().double(), forward_methods=METHODS[:2])
    optimizer = sgd(model)
    for step in range(STEPS):
        x = numbers(8, 8, seed=step)
        with torch.no_grad():
            action, before, _, value = model.get_action_and_value(x)
            run.note("rollout", (action, before, value, model.get_value(x)))
        _, after, entropy, value = model.get_action_and_value(x, action, scale=1.0 + step)
        loss = -(after - before).exp().mean() - 0.1 * entropy.mean() + value.square().mean()
        run.note("loss", loss)
        loss.backward()
        run.note_gradients(model)
        run.note("calls", model.calls)
        optimizer.step()
        optimizer.zero_grad()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))
        self.scale: Tensor

    def encode(self, x: Tensor, normal: bool = False) -> Tensor:
        h = self.encoder(x).tanh()
        if self.training:
            self.mean += 0.1 * (h.detach().mean(0) - self.mean)
        return F.normalize(h, dim=-1) if normal else h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


@loop(ranks=True)
def a_method_beside_forward(run: Run) -> None:
    """Gradients of both are summed in one step; the method is called in evaluation, too."""
    model = run.compile(Encoder().double(), forward_methods=("encode",))
    optimizer = sgd(model)
    for step in range(STEPS):
        x = numbers(8, 8, seed=step)
        model.train()
        first, second = model.encode(x, normal=True), model.encode(x + 0.1, normal=True)
        loss = -(first * second).sum(-1).mean() + F.cross_entropy(model(x), torch.arange(8) % 4)
        run.finish(model, optimizer, loss)
        model.eval()
        with torch.no_grad():
            run.note("evaluation", (model.encode(x), model(x), model.mean))


@loop(refused=r"Its encode\(\) was called with x \[8, 8\]", line=False)
def a_method_that_cannot_be_captured(run: Run) -> None:
    class Decides(Encoder):
        def encode(self, x: Tensor, normal: bool = False) -> Tensor:
            return x * float(x.detach().numpy().sum())

    run.compile(Decides().double(), forward_methods=("encode",)).encode(numbers(8, 8, seed=0))


@loop()
def a_method_that_changes_its_input(run: Run) -> None:
    class Scales(Encoder):
        def encode(self, x: Tensor, normal: bool = False) -> Tensor:
            x.mul_(2.0)
            return self.encoder(x)

    x = numbers(8, 8, seed=0)
    run.note("output", run.compile(Scales().double(), forward_methods=("encode",)).encode(x))
    run.note("input", x)


@loop()
def a_method_tells_its_name_and_signature(run: Run) -> None:
    model = run.compile(Encoder().double(), forward_methods=("encode",))
    run.note("method", (model.encode.__name__, str(inspect.signature(model.encode))))
    run.note("output", model.encode(numbers(8, 8, seed=0), normal=True), grad=True)
