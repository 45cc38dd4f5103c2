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


class GAN(pl.LightningModule):
    """As in Lightning's tutorial: two optimizers, stepped by hand, each with its own module toggled.

    Attributes:
        numbers: both losses, and the rates, as they came.
    """

    def __init__(self, clip: float | None = None, accumulate: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.numbers: list[float] = []

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def adversarial_loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        seed = 100 * self.current_epoch + batch_idx  # so that a run that goes on draws the same noise
        z = torch.randn(real.shape[0], 3, generator=torch.Generator().manual_seed(seed)).type_as(real)
        valid, fake = torch.ones(real.size(0), 1).type_as(real), torch.zeros(real.size(0), 1).type_as(real)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        self.finish(optimizer_g, batch_idx)
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(real), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        self.finish(optimizer_d, batch_idx)
        self.untoggle_optimizer(optimizer_d)
        self.numbers += [g_loss.item(), d_loss.item()]

    def finish(self, optimizer: Any, batch_idx: int) -> None:
        """Steps, where enough batches are accumulated, with the optimizer's gradients clipped."""
        if (batch_idx + 1) % self.hparams["accumulate"]:
            return
        if self.hparams["clip"] is not None:
            self.clip_gradients(optimizer, self.hparams["clip"], "norm")
        optimizer.step()
        optimizer.zero_grad()

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()  # type: ignore[call-arg]

    def configure_optimizers(self) -> Any:
        made = [
            torch.optim.Adam(m.parameters(), lr=0.02, betas=(0.5, 0.9)) for m in (self.generator, self.discriminator)
        ]
        return made, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in made]
