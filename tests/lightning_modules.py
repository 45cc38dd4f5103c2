"""Modules as Lightning's users write them; nothing in them says that they are parallel."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn


class Classifier(pl.LightningModule):
    """Losses and metrics that are logged, an optimizer with a schedule.

    Attributes:
        numbers: losses, learning rates, accuracies and counted rows, as they came.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(width)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4)
        self.rows = torchmetrics.SumMetric()
        self.numbers: list[float] = []

    def build(self, width: int) -> None:
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, sync_dist=True)
        self.numbers.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self(x)
        self.accuracy(out, y)
        self.rows(len(y))
        self.log("val_loss", nn.functional.cross_entropy(out, y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.numbers += [self.accuracy.compute().item(), self.rows.compute().item()]
        self.accuracy.reset()
        self.rows.reset()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.numbers.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Pair(Classifier):
    """An encoder and a decoder, which ``training_step`` calls one after the other."""

    def build(self, width: int) -> None:
        self.encoder = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.decoder = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Partly(Classifier):
    """Its optimizer holds some of what is trained."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(list(self.net.parameters())[:2], lr=0.1)


class Bare(Classifier):
    """It has a parameter of its own."""

    def build(self, width: int) -> None:
        super().build(width)
        self.scale = nn.Parameter(torch.ones(()))


class Tied(Pair):
    """Its two modules share a weight."""

    def build(self, width: int) -> None:
        super().build(width)
        self.decoder[0].weight = self.encoder[0].bias


class Averaging(Classifier):
    """It puts other weights into its checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["net.0.weight"] = state["net.0.weight"] * 0.5
