"""Tied and shared tensors, frozen parts, parameters that are unused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two, TwoAndAMean
from tests.capture.registry import loop, program
from tests.capture.runner import Run, numbers, sgd, tokens


@program(batch=tokens, ranks=True)
class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.head = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.a(self.table(ids)).tanh())


@program(ranks=True)
class UsedTwice(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(x).tanh()) + F.linear(x, self.a.weight.t())


@program(ranks=True)
class Unused(Two):
    """A parameter that no call uses keeps its None."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


@program()
class UsedWithZero(Two):
    """Used, with a factor of zero: a gradient of zeros, not None."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + 0 * self.b(x).sum()


@program(ranks=True)
class Frozen(Two):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


@program()
class SharedModule(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.other = self.one
        self.c = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.one(x).relu() + self.other(x * 2))


@program()
class SliceOfWeight(Two):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x[:, :4], self.a.weight[:, :4], self.a.bias) + x @ self.b.weight.diag().diag()


@program()
class WeightAsOutput(Two):
    """A regularisation of weights, computed in forward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(self.a(x)), sum(p.square().sum() for p in self.parameters()) * 0.01


@program()
class ParametersByName(Two):
    def forward(self, x: Tensor) -> Tensor:
        p = dict(self.named_parameters())
        return F.linear(F.linear(x, p["a.weight"]).tanh(), p["b.weight"], p["b.bias"])


@program(refused=".")
class PlainTensorRequiresGrad(nn.Module):
    """A tensor with gradients that is no parameter: its gradient has nowhere to go."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shift = nn.Linear(8, 8), torch.zeros(8, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.shift  # refused


@program()
class ListOfTensors(nn.Module):
    """Constants in a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.shifts, self.masks = [torch.ones(8), torch.arange(8.0)], {"even": torch.arange(8) % 2 == 0}

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.masks["even"], self.a(x) + self.shifts[1], self.a(x) - self.shifts[0])


@program()
class RegisteredAndInContainers(nn.Module):
    """Parameters and a buffer that are read, and changed, where a dict, a list and an attribute hold them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.weights, self.means = {"a": self.a.weight, "b": self.b.weight}, [self.mean]
        object.__setattr__(self, "bias", self.b.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.linear(x, torch.cat([self.weights["a"], self.weights["b"]]), torch.cat([self.a.bias, self.bias]))
        self.means[0].mul_(0.9).add_(h.detach().mean(0)[:8], alpha=0.1)
        return h - self.mean.repeat(2), self.weights["b"]


@program()
class NotPersistent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("ramp", torch.arange(8.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.ramp


@program()
class ModulesInAList(nn.Module):
    """Layers in a plain list: their parameters are not the model's, and are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.hidden = nn.Linear(8, 8), [nn.Linear(8, 8).double().requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.hidden[0](x).tanh())


@program(refused="register it")
class TrainedModulesInAList(ModulesInAList):
    def __init__(self) -> None:
        super().__init__()
        self.hidden[0].requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.hidden[0](x).tanh())  # refused


@program()
class Expanded(Two):
    """expand, repeat, broadcasting, unfold, flip, roll."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)[:, None].expand(-1, 3, -1) * torch.arange(3.0)[:, None]
        h = h.roll(1, dims=-1).flip(1).repeat(1, 1, 2).unfold(2, 4, 4)
        return self.b(h.reshape(x.shape[0], -1, 8))


@program(ranks=True)
class NoElements(nn.Module):
    """A parameter without elements, as of a prompt of length 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.prompt = nn.Linear(8, 8), nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.inner(self.prompt)]) @ self.inner.weight


class AsksWhetherTheSame(Two):
    """Attention in itself, or to another sequence."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.a(x) * self.b(memory).tanh() if memory is x else self.a(x) + self.b(memory)


def train_on_the_same_and_another(run: Run, first: int) -> None:
    """Every other call is given one tensor twice, whose gradient is then that of both; the length changes."""
    model = run.compile(AsksWhetherTheSame().double())
    optimizer = sgd(model)
    for step in range(first, first + 6):
        x = numbers(4, 3 + step % 4 // 2, 8, seed=step).requires_grad_()
        output = model(x, x if step % 2 == 0 else numbers(4, 3 + step % 4 // 2, 8, seed=step + 50))
        run.note("output", output)
        run.backward(output)
        run.note("gradient of the input", x.grad)
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@loop(ranks=True)
def one_input_twice(run: Run) -> None:
    train_on_the_same_and_another(run, 0)


@loop()
def one_input_twice_later(run: Run) -> None:
    train_on_the_same_and_another(run, 1)


class CountsRows(Two):
    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.level.mul_(0.5)
        return self.a(x) * self.level.mean()


@loop(refused="clone", line=False)
def buffer_as_input(run: Run) -> None:
    """The call changes what it is given."""
    plain = CountsRows().double()
    model = run.compile(plain)
    model(plain.level[:2])


@program()
class WritesToWhatIsDetached(Two):
    """Position embeddings that a table lends detached, and a token's kind that is added in place (Kosmos-2.5)."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            positions = torch.arange(8.0).index_select(0, torch.arange(8)).view(1, 8).detach()
        positions += self.b(torch.ones(1, 8))
        return self.a(x) + positions


@program()
class WritesThroughDetach(Two):
    """What is detached carries the gradient that is written to it; what it was detached from does not, nor what was
    detached of it in turn."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        base = torch.zeros(x.shape[0], 8)
        row = base[:, :4]
        between = base.detach()
        last = between.detach()
        between += self.b(h)
        return h * between + base.sin() + last.cos() + F.pad(row, (0, 4))


@program()
class WritesPartsOfWhatIsDetached(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = torch.zeros(x.shape[0], 8)
        between = out.data
        between[:, 1] = self.b(h)[:, 0]
        between[:, 2:4] += h[:, 4:6]
        return h * between + out


@program()
class BufferThatIsWrittenThroughData(TwoAndAMean):
    """The buffer is read afterwards, without the gradient of what was written."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.mean.data.mul_(0.9).add_(0.1 * h.mean(0))
        return self.b(h - self.mean)


@program(refused="make a new tensor")
class WritesBehindAGradient(Two):
    """It is detached while it carries no gradient, and written to when the base does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        base = torch.zeros(x.shape[0], 8)
        between = base.detach()
        base += self.b(h)
        between.mul_(2)  # refused
        return h * base
