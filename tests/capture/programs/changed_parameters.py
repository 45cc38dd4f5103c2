"""Parameters that a call changes itself: momentum encoders, masked and normalised weights, weights that the first batch
sets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


class Momentum(nn.Module):
    """As MoCo, ALBEF and BLIP: a second encoder is an average of the first, which forward moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            ours.data.copy_(theirs.data)
            ours.requires_grad = False

    @torch.no_grad()
    def move(self) -> None:
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            ours.data = ours.data * 0.9 + theirs.data * 0.1

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            self.move()
            k = F.normalize(self.key(x.flip(1)), dim=1)
        return (q * k).sum(-1) - (q * q.detach() * 0.1).sum(-1)


@program(ranks=True)
class MomentumByData(Momentum):
    """The data are assigned."""


@program(ranks=True)
class MomentumInPlace(Momentum):
    @torch.no_grad()
    def move(self) -> None:
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            ours.mul_(0.9).add_(theirs, alpha=0.1)


@program(ranks=True)
class MomentumThroughData(Momentum):
    """Without no_grad, through ``data``."""

    def move(self) -> None:
        for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            ours.data.lerp_(theirs.data, 0.1)


@program(ranks=True)
class MomentumBehindItsUse(Momentum):
    """It is moved on at the end of forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            k = F.normalize(self.key(x.flip(1)), dim=1)
        loss = (F.normalize(self.query(x), dim=1) * k).sum(-1)
        self.move()
        return loss


@program(ranks=True, options={"microbatches": 2}, refused="what hinders them", line=False)
class MomentumInMicrobatches(Momentum):
    pass


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(numbers(8, 8, seed=3)), nn.Parameter(numbers(8, seed=4))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))

    def change(self, x: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return torch.tanh(F.linear(x, self.weight, self.bias))


@program(ranks=True)
class MaskedWeights(Weights):
    """As in PixelCNN."""

    def change(self, x: Tensor) -> None:
        self.weight.data *= self.mask


@program(ranks=True)
class MaskedInPart(Weights):
    """As in PixelSNAIL: through views of the data."""

    def change(self, x: Tensor) -> None:
        self.weight.data[:, -2:].zero_()
        self.weight.data[0] = self.bias.data


@program(ranks=True)
class NormalisedWeights(Weights):
    """As in EDM2: only in training, and the forward normalises them once more."""

    def change(self, x: Tensor) -> None:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return F.linear(x, F.normalize(self.weight, dim=1) * 0.7, self.bias)


@program(ranks=True)
class NormalisedAsTheyAreRead(Weights):
    """As in EDM2: what is read before is the parameter itself, which has that dtype."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.to(torch.float64)
        with torch.no_grad():
            self.weight.copy_(F.normalize(w, dim=1))
        return F.linear(x, F.normalize(w, dim=1) * 0.7, self.bias)


@program(ranks=True)
class DividedByTheirNorm(Weights):
    """The attribute is set to the parameter itself; twice, and bounded."""

    @torch.no_grad()
    def change(self, x: Tensor) -> None:
        self.weight /= self.weight.norm()
        self.weight.mul_(3.0)
        nn.init.zeros_(self.bias[:2])
        self.weight.clamp_(-0.5, 0.5)


@program(ranks=True)
class SetByTheFirstBatch(Weights):
    """As ActNorm of Glow does: a buffer tells whether it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("done", torch.tensor(0, dtype=torch.uint8))

    def change(self, x: Tensor) -> None:
        if self.done.item() == 0:
            with torch.no_grad():
                self.bias.data.copy_(-x.mean(0))
                self.weight.data.copy_(torch.diag(1 / (x.std(0) + 1e-6)))
            self.done.fill_(1)


@program(ranks=True)
class SetByTheFirstCall(Weights):
    """An attribute tells whether it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.done = False

    def change(self, x: Tensor) -> None:
        if not self.done:
            with torch.no_grad():
                self.weight.copy_(x.T @ x / 8)
            self.done = True


@program(ranks=True, random=True)
class DrawnAnew(Weights):
    """Their values are random numbers of the call."""

    @torch.no_grad()
    def change(self, x: Tensor) -> None:
        self.weight.add_(torch.randn_like(self.weight) * 0.1)


@program(ranks=True)
class ReadTwice(Weights):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(self.mask)
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.T, self.bias)


@program(ranks=True)
class Returned(Weights):
    """What is returned is the parameter's new value, and differentiated."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x @ self.weight + self.weight.square().sum()


@program(ranks=True)
class ReadWithoutAGradientBefore(Weights):
    """What the backward does not go through may have read what it was: a norm that is detached, a codebook's nearest
    entries."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, 8)
        self.codes.weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        norm = self.weight.norm()
        nearest = torch.cdist(x @ self.weight.detach() + self.bias, self.codes.weight).argmin(1)
        quantised = self.codes(nearest)
        self.codes.weight.data.lerp_(x.mean(0).expand(5, 8), 0.1)
        self.weight.data = self.weight * 0.5
        return F.linear(x, self.weight, self.bias) / norm.detach() - quantised


@program(ranks=True, random=True)
class InitialisedAnew(Weights):
    """By functions of torch.nn.init, which switch gradients off inside."""

    def change(self, x: Tensor) -> None:
        nn.init.normal_(self.bias, std=0.2)
        nn.init.orthogonal_(self.weight)


class Layer(Weights):
    def change(self, x: Tensor) -> None:
        self.weight.data *= self.mask


@program(ranks=True)
class LayersAlike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@program(ranks=True)
class InCheckpoints(LayersAlike):
    """Layers that change nothing run again in the backward, behind ones that change their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, plain in zip(self.layers, self.plain, strict=True):
            x = layer(x) + checkpoint(plain, x, use_reentrant=False)
        return x


@program(ranks=True)
class Tied(nn.Module):
    """A weight under two names is changed under one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.mul_(0.9)
        return self.b(torch.tanh(self.a(x)))


class _TiedHead(nn.Module):
    """As masked language models of BERT have it: a bias under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.bias = nn.Linear(8, 8, bias=False), nn.Parameter(torch.randn(8))
        self.decoder.bias = self.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(x)
        return out


@program(ranks=True)
class MomentumOfATiedHead(nn.Module):
    """As ALBEF averages its text encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.average = _TiedHead(), _TiedHead().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.head.parameters(), self.average.parameters(), strict=True):
                q.data = q.data * 0.9 + p.data * 0.1
        return (self.head(x) - self.average(x)).square().mean() + (self.average.bias * self.head.bias).sum()


@loop(ranks=True)
def a_momentum_encoder_in_windows(run: Run) -> None:
    """It moves on at every microbatch of a window, and in evaluation; clipped."""
    model = run.compile(Momentum().double())
    optimizer = sgd(model)
    for step in range(STEPS):
        for part in range(3):
            loss = model(numbers(8, 8, seed=10 * step + part)).mean()
            run.note("loss", loss)
            with model.no_sync() if part < 2 and hasattr(model, "no_sync") else torch.enable_grad():
                (loss / 3).backward()
            run.note_state(model)
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            run.note("evaluation", model(numbers(8, 8, seed=99)))
        model.train()
        run.note_state(model)


@loop(ranks=True)
def two_calls_before_one_backward(run: Run) -> None:
    """The second call changes again what the first has changed: two views of images, an evaluation in between."""
    for plain in (Momentum(), MaskedWeights()):
        model = run.compile(plain.double())
        optimizer = sgd(model)
        for step in range(STEPS):
            loss = model(numbers(8, 8, seed=step)).mean() + model(numbers(8, 8, seed=10 + step)).mean()
            with torch.no_grad():
                run.note("evaluation", model(numbers(8, 8, seed=99)))
            run.finish(model, optimizer, loss)
            run.note_state(model)


# -- refused --------------------------------------------------------------------------------------------------------


@program(refused="before it is read")
class ChangedBetweenUses(Weights):
    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(torch.tanh(x * self.bias), self.weight)
        self.weight.data.mul_(0.5)  # refused
        return h + F.linear(x, self.weight)


@program(refused="before it is read")
class FrozenChangedBehindItsUse(Momentum):
    """The backward of what stands before it reads it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.key(torch.cat([self.query(x), x[:, :4]], 1))
        self.move()  # refused
        return h


@program(refused="before it is read")
class ChangedBehindAView(Weights):
    def forward(self, x: Tensor) -> Tensor:
        turned = self.weight.T
        self.weight.data.mul_(0.5)  # refused
        return x @ turned


@program(refused="before the region begins")
class ChangedInACheckpoint(Weights):
    """Eager changes it again in the backward, and differentiates that."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)  # type: ignore[no-any-return] # refused

    def run(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return torch.tanh(F.linear(x, self.weight))


@program(refused="no_grad")
class ChangedByWhatIsDifferentiated(Weights):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(self.bias)  # refused
        return F.linear(x, self.weight)


@program(refused="leave out the precision", options={"precision": MixedPrecisionPolicy(torch.bfloat16)})
class InAnotherDtype(Weights):
    """Each call would round it."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= 1.001  # refused
        return F.linear(x, self.weight, self.bias)


@program(refused="clone")
class MemoryOfAnother(Weights):
    """From then on both are one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(numbers(8, 8, seed=5))

    def change(self, x: Tensor) -> None:
        self.weight.data = self.other.data  # refused


@program(refused="use the new tensor")
class OfAnotherShape(Weights):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(8))

    def change(self, x: Tensor) -> None:
        self.more.data = torch.zeros(16)  # refused


@program(refused="compute a new tensor")
class WrittenLater(Weights):
    """What it was given is written to: the parameter's memory."""

    def change(self, x: Tensor) -> None:
        value: Any = self.weight.data * 0.5
        self.weight.data = value
        value.add_(1.0)  # refused
