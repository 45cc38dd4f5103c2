"""`mark_layers`: layers are the items of lists, or of those of a stage."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from autoparallel.graph.layers import layer_of
from tests.captures import captured


class Block(nn.Module):
    """A block of its own list: what it adds, it computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    def forward(self, x: Tensor, around: bool = True) -> Tensor:
        return x + self.parts(x) if around else self.parts(x)


class Plain(Block):
    """A block of which only the second instance adds what enters it."""

    def forward(self, x: Tensor, around: bool = True) -> Tensor:
        return super().forward(x, around and hasattr(self, "adds"))


class Sublayers(nn.Module):
    """Calls modules of different classes one after another, as a block of T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Block(), Gate()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(x)


class Mixture(nn.Module):
    """Adds up its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x) + self.experts[1](x)


class Stage(nn.Module):
    def __init__(self, blocks: list[nn.Module], shrink: nn.Module) -> None:
        super().__init__()
        self.blocks, self.shrink = nn.ModuleList(blocks), shrink

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.shrink(x)


def _stage() -> Stage:
    return Stage([Block(), Block()], nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))


def _plain() -> nn.Module:
    blocks = [Plain(), Plain()]
    blocks[1].adds = True
    return nn.Sequential(*blocks)


CASES = {
    "a list": (nn.Sequential(Block(), Block()), ["0", "1"]),
    "names": (nn.Sequential(OrderedDict(first=Block(), second=Block())), ["first", "second"]),
    "stages": (
        nn.Sequential(_stage(), _stage()),
        ["0.blocks.0", "0.blocks.1", "0.shrink", "1.blocks.0", "1.blocks.1", "1.shrink"],
    ),
    "stages that are lists": (nn.Sequential(nn.Sequential(Block(), Block()), Gate()), ["0.0", "0.1", "1"]),
    "a stage of one block": (nn.Sequential(Stage([Block()], Gate())), ["0"]),
    "a block in parts": (nn.Sequential(Sublayers(), Sublayers()), ["0", "1"]),
    "told by class": (_plain(), ["0", "1"]),
    "experts": (nn.Sequential(Mixture(), Mixture()), ["0", "1"]),
    "products alone": (nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Tanh()), ["0", "1"]),
    "no list": (Gate(), [None]),
}


@pytest.mark.parametrize("case", CASES)
def test_layers(case: str) -> None:
    model, expected = CASES[case]
    graph = captured(model, torch.randn(2, 4)).graph
    assert list(dict.fromkeys(layer_of(n) for n in graph.nodes if n.op == "call_function")) == expected
