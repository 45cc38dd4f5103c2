"""What a model returns, and what of it is differentiated."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, rows_and_targets, sgd


@program(ranks=True, loss=lambda out: out[0].square().mean() + 0.5 * out[1])
class LogitsAndAuxiliaryLoss(nn.Module):
    """A router's balance loss beside the logits; the loss is made outside."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).softmax(-1)
        return self.head(x) * p.amax(-1, keepdim=True), p.mean(0).square().sum()


def contrastive(out: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    image, text, scale = out
    logits = scale * image @ text.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@program(batch=rows_and_targets, loss=contrastive, ranks=True)
class Clip(nn.Module):
    """Image, text, and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1), self.scale.exp()


class Result(NamedTuple):
    logits: Tensor
    hidden: Tensor
    loss: Tensor | None = None


@program(ranks=True)
class NamedTupleOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Result:
        h = self.a(x).tanh()
        return Result(self.b(h), h)


@dataclasses.dataclass
class Prediction:
    logits: Tensor
    name: str = "head"
    hidden: Tensor | None = None


@program()
class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Prediction:
        h = self.a(x).tanh()
        return Prediction(self.b(h), hidden=h)


@program()
class NestedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x).tanh()
        return OrderedDict(all=[h, (self.b(h), None)], rows=x.shape[0], names=["a", "b"], flag=True, x=x)


@program(loss=lambda out: out["loss"])
class DictWithLoss(nn.Module):
    """The loss is known by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x).tanh()
        return {"loss": self.b(h).square().mean(), "norm": h.detach().norm()}


@program(loss=lambda out: out["loss"] + 0.1 * out["penalty"], line=False, refused="outputs=")
class LossBesideLoss(nn.Module):
    """Another scalar beside "loss" is differentiated as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x).tanh()
        return {"loss": self.b(h).square().mean(), "penalty": h.abs().mean()}


@program(loss=lambda out: out[0] + 0.1 * out[1])
class TwoScalars(nn.Module):
    """A pair of losses, summed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x).tanh()
        return self.b(h).square().mean(), h.abs().mean()


@program(loss=lambda out: out[0] + out[1].square().mean())
class ScalarAndLogits(nn.Module):
    """(loss, logits), as older transformers: both are differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.b(self.a(x).tanh())
        return logits.logsumexp(-1).mean(), logits


@program()
class NoneOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.a(x), None


@program()
class InputReturned(nn.Module):
    """An input and a parameter come back themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, self.a(x), self.a.weight


@program()
class SameTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.a(x)
        return h, h, h.view(-1)


@program()
class ListOfLayers(nn.Module):
    """All hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).tanh())
        return states


@loop(batch=rows_and_targets)
def gradient_of_an_input(run: Run) -> None:
    """The input's gradient is wanted: adversarial training."""
    model = run.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    optimizer = sgd(model)
    for step in range(STEPS):
        x, y = rows_and_targets(step)
        x.requires_grad_(True)
        F.mse_loss(model(x), y).backward()
        run.note("gradient of the input", x.grad)
        F.mse_loss(model((x + 0.1 * x.grad.sign()).detach()), y).backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        run.note_state(model)


@loop(ranks=True)
def loss_fn_and_outputs(run: Run) -> None:
    """With a loss_fn; and calls without a target return outputs."""
    model = run.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), F.mse_loss)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = model(*rows_and_targets(step))
        run.finish(model, optimizer, loss)
        run.note_state(model)
    run.models[0].eval()
    with torch.no_grad():
        run.note("evaluation", run.plain(numbers(4, 8, seed=9)) if model is run.plain else None)


@program(batch=rows_and_targets, loss_fn=lambda out, y: ((out - y).square().sum(), torch.tensor(y.numel())))
class SumAndCount(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


@program(ranks=True, observe=lambda model: [model.maps, model.last])
class ArraysOfNumpy(nn.Module):
    """Attention as tutorials return and keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.maps: list[np.ndarray] = []
        self.last: np.ndarray | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, np.ndarray]:
        h = self.a(x)
        weights = h.softmax(-1)
        self.maps.append(weights.detach().cpu().numpy())
        self.last = weights.mean(0).data.numpy()
        array = weights.data.numpy()
        is_array = isinstance(array, np.ndarray) and type(array) is np.ndarray
        return self.b(h * weights) * (2 if is_array else 1), array


@program(refused="compute what they do of it in the loop")
class ComputesOfAnArray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h * float(np.mean(h.detach().numpy()))  # refused


@program()
class NumbersOfNumpy(Two):
    """One is returned, one kept."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any, Any]:
        self.width = np.int64(x.shape[1])
        return self.b(self.a(x)), np.float32(0.5), np.prod(x.shape[1:])
