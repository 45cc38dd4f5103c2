"""Architectures in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.inputs import CLASSES, ROWS, VOCABULARY, Made, classes, images, tokens


class Recurrent(nn.Module):
    """A recurrent layer of torch between an embedding and a head; the target is the next token."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.body = kind(16, 16, batch_first=True, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.table(ids))[0])
        return logits


class Cell(nn.Module):
    """An LSTM cell in a Python loop."""

    def __init__(self, kind: type[nn.Module] = nn.LSTMCell) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(VOCABULARY, 16), kind(16, 16), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        state = None
        for x in self.table(ids).unbind(1):
            state = self.cell(x, state)
        logits: Tensor = self.head(state[0] if isinstance(state, tuple) else state)
        return logits


class Bag(nn.Module):
    """Sums of embeddings before two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 16, mode="mean")
        self.up, self.head = nn.Linear(16, 32), nn.Linear(32, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.up(self.bag(ids))))
        return logits


class Spectral(nn.Module):
    """A Fourier neural operator: complex weights on the lowest frequencies."""

    def __init__(self, width: int = 8, modes: int = 4) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(2, width, 1), nn.Conv1d(width, 1, 1)
        self.pointwise = nn.Conv1d(width, width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        spectrum = torch.fft.rfft(h)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum("bik,iok->bok", spectrum[..., : self.modes], self.weight)
        y: Tensor = self.project(F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.pointwise(h)))
        return y


class ConvNet(nn.Module):
    """Convolutions with a normalisation and a pooling of choice."""

    def __init__(self, norm: Callable[[int], nn.Module], pool: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), norm(16), nn.ReLU(), pool,
        )  # fmt: skip
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).flatten(2).mean(-1))
        return logits


class SpatialTransformer(nn.Module):
    """Images are sampled at an affine grid that is learned (Jaderberg et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.locate, self.body, self.head = nn.Linear(3 * 16, 6), nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.eye(2, 3, dtype=x.dtype)
        theta = self.locate(F.adaptive_avg_pool2d(x, 4).flatten(1)).view(-1, 2, 3) * 0.1 + near
        seen = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
        logits: Tensor = self.head(F.relu(self.body(seen)).amax((2, 3)))
        return logits


class Vocoder(nn.Module):
    """Weight-normalised convolutions, and the distance of spectra as the loss."""

    def __init__(self) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.weight_norm
        self.up = norm(nn.ConvTranspose1d(4, 8, 4, 2, 1))
        self.body = norm(nn.Conv1d(8, 8, 3, padding=1))
        self.out = norm(nn.Conv1d(8, 1, 3, padding=1))

    def forward(self, mel: Tensor, wave: Tensor) -> dict[str, Tensor]:
        made = self.out(F.leaky_relu(self.body(F.leaky_relu(self.up(mel))))).squeeze(1)
        window = torch.hann_window(8, dtype=made.dtype)
        a, b = (torch.stft(x, 8, window=window, return_complex=True).abs() for x in (made, wave))
        return {"loss": F.l1_loss(a, b) + F.mse_loss(made, wave), "made": made}


class Prototypes(nn.Module):
    """Classes are the nearest of learned points."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.points = nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.body(x), self.points)


class GraphConvolution(nn.Module):
    """Messages along edges, which are added, and of which the largest is taken (nodes are columns of each row)."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(4, 16), nn.Linear(32, 16), nn.Linear(16, CLASSES)
        self.register_buffer("edges", torch.randint(6, (2, 14)))

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges
        sent = self.message(x)[:, source]
        index = target.view(1, -1, 1).expand_as(sent)
        empty = sent.new_zeros(x.shape[0], 6, 16)
        largest = empty.scatter_reduce(1, index, sent, "amax", include_self=False)
        both = torch.cat([empty.scatter_add(1, index, sent), largest], -1)
        logits: Tensor = self.head(F.relu(self.update(both)).mean(1))
        return logits


class Translator(nn.Module):
    """Torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.body = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        logits: Tensor = self.head(self.body(x, x, tgt_mask=mask, tgt_is_causal=True))
        return logits


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.up = nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        across = F.silu(self.first(x))
        up = self.up(F.silu(self.norm(self.down(across))))
        out: Tensor = self.last(torch.cat([across, up], 1))
        return out


class Mixer(nn.Module):
    """Linear layers over places and over channels (Tolstikhin et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 16, 4, 4)
        self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(x).flatten(2)
        h = (h + self.places(h)).mT
        logits: Tensor = self.head((h + self.channels(h)).mean(1))
        return logits


class Ranker(nn.Module):
    """Embeddings, and the products of all pairs of them (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, 8) for _ in range(5))
        self.head = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        rows, columns = torch.triu_indices(5, 5, 1)
        logits: Tensor = self.head((x @ x.mT)[:, rows, columns])
        return logits


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sequence(model: nn.Module) -> Made:
    """Trained to the next token."""
    ids = tokens()
    return Made(model, (ids, ids.roll(-1, 1)), loss_fn=_token_loss)


def classifier(model: nn.Module, inputs: Tensor) -> Made:
    """Trained to classes."""
    return Made(model, (inputs, classes()), loss_fn=F.cross_entropy)


PLAIN: dict[str, Callable[[], Made]] = {
    "LSTM": lambda: sequence(Recurrent(nn.LSTM)),
    "LSTM, bidirectional": lambda: sequence(Recurrent(nn.LSTM, bidirectional=True)),
    "GRU": lambda: sequence(Recurrent(nn.GRU)),
    "RNN": lambda: sequence(Recurrent(nn.RNN)),
    "LSTMCell": lambda: classifier(Cell(), tokens()),
    "GRUCell": lambda: classifier(Cell(nn.GRUCell), tokens()),
    "EmbeddingBag": lambda: classifier(Bag(), tokens()),
    "CNN, batch norm, max": lambda: classifier(ConvNet(nn.BatchNorm2d, nn.AdaptiveMaxPool2d(2)), images(16)),
    "CNN, instance norm": lambda: classifier(
        ConvNet(lambda n: nn.InstanceNorm2d(n, affine=True), nn.AdaptiveAvgPool2d(2)), images(16)
    ),
    "CNN, group norm": lambda: classifier(ConvNet(lambda n: nn.GroupNorm(4, n), nn.AvgPool2d(2)), images(16)),
    "Spatial transformer": lambda: classifier(SpatialTransformer(), images(16)),
    "Vocoder, spectral loss": lambda: Made(Vocoder(), (torch.randn(ROWS, 4, 16), torch.randn(ROWS, 32))),
    "Prototypes": lambda: classifier(Prototypes(), torch.randn(ROWS, 16)),
    "Graph convolution": lambda: classifier(GraphConvolution(), torch.randn(ROWS, 6, 4)),
    "nn.Transformer": lambda: sequence(Translator()),
    "U-Net": lambda: Made(UNet(), (images(16), images(16)), loss_fn=F.mse_loss),
    "MLP-Mixer": lambda: classifier(Mixer(), images(16)),
    "DLRM": lambda: classifier(Ranker(), torch.randint(VOCABULARY, (ROWS, 5))),
    "FNO": lambda: Made(Spectral(), (torch.randn(ROWS, 2, 16), torch.randn(ROWS, 1, 16)), loss_fn=F.mse_loss),
}
