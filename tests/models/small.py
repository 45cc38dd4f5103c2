"""Small models: perceptrons, a ResNet-18, a U-Net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import Batch, Case, seeded


class MLP(nn.Module):
    """Linear, GELU, layer norm, linear, and a linear without bias at the end."""

    def __init__(self, features: int = 12, hidden: int = 16, outputs: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.down = nn.Linear(hidden, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.up(x)))
        return self.down(torch.tanh(self.mix(x)))


def build_mlp(dtype: torch.dtype) -> Case:
    model = MLP().to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = seeded(step, seed)
        x = torch.randn(rows, 12, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 8, (rows,), generator=generator)
        return (x.to(dtype), y), {}

    return Case("mlp", model, make_batch, F.cross_entropy)


class Regressor(nn.Module):
    """Two linears for mean squared error; several outputs per row."""

    def __init__(self, features: int = 8, hidden: int = 12, outputs: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build_regressor(dtype: torch.dtype) -> Case:
    model = Regressor().to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = seeded(step, seed)
        x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
        y = 10 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)
        return (x.to(dtype), y.to(dtype)), {}

    return Case("regressor", model, make_batch, F.mse_loss)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet18(nn.Module):
    """ResNet-18 with the stem for small images: one 3x3 convolution and no pooling before the blocks."""

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            for index in range(2):
                blocks.append(BasicBlock(inputs, outputs, stride=2 if stage and not index else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.stem(x)))
        x = self.pool(self.blocks(x))
        return self.fc(torch.flatten(x, 1))


def build_resnet(dtype: torch.dtype) -> Case:
    model = ResNet18(channels=3, width=8).to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = seeded(step, seed)
        # Rows of different brightness and contrast: statistics of a part of the batch are not those of the whole.
        x = torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)
        x = x * torch.linspace(0.5, 2.0, rows).view(-1, 1, 1, 1) + torch.linspace(-1, 1, rows).view(-1, 1, 1, 1)
        y = torch.randint(0, 10, (rows,), generator=generator)
        return (x.to(dtype), y), {}

    buffers = tuple(name for name, _ in model.named_buffers())
    return Case("resnet", model, make_batch, F.cross_entropy, buffers=buffers)


class UNet(nn.Module):
    """Two steps down, two up, each joined with what was there on the way down."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, width, 3, padding=1)
        self.down1 = nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.down2 = nn.Conv2d(2 * width, 4 * width, 3, 2, padding=1)
        self.up2 = nn.Conv2d(4 * width + 2 * width, 2 * width, 3, padding=1)
        self.up1 = nn.Conv2d(2 * width + width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = F.gelu(self.enter(x))
        middle = F.gelu(self.down1(top))
        x = F.gelu(self.down2(middle))
        x = F.gelu(self.up2(torch.cat([x.repeat_interleave(2, 2).repeat_interleave(2, 3), middle], 1)))
        x = F.gelu(self.up1(torch.cat([x.repeat_interleave(2, 2).repeat_interleave(2, 3), top], 1)))
        return self.leave(x)


def build_unet(dtype: torch.dtype) -> Case:
    model = UNet().to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = seeded(step, seed)
        x = torch.randn(rows, 2, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (rows, 8, 8), generator=generator)
        y[::2, :3] = -100  # different numbers of valid targets
        return (x.to(dtype), y), {}

    return Case("unet", model, make_batch, F.cross_entropy)


def build_frozen_tail(dtype: torch.dtype) -> Case:
    """An MLP whose last layers are not trained, but hand gradients on."""
    model = nn.Sequential(
        nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)
    ).to(dtype)
    for layer in (model[4], model[6]):
        layer.requires_grad_(False)
    names = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    return Case("frozen_tail", model, build_mlp(dtype).make_batch, F.cross_entropy, frozen=names)
