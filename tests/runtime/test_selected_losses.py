"""Losses of selected rows, which are means over them: each rank adds up what it has, and sends no logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.runtime.support import gradients_off, make, off, run_on_ranks

WIDTH, CLASSES, SMALLEST = 8, 32, 9


class Masked(nn.Module):
    """A model of masked tokens, whose head reads these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("importance", torch.linspace(1, 2, CLASSES))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.embed(tokens) + self.body(self.embed(tokens)).tanh(), labels)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels >= SMALLEST
        return F.cross_entropy(self.head(x[mask]), labels[mask], self.importance)


class Places(Masked):
    """The same at places, of rows that were flattened, where some labels are ignored and all are smoothed."""

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        places = torch.nonzero(labels.view(-1) >= SMALLEST).squeeze(-1)
        logits, labels = self.head(x).view(-1, CLASSES)[places], labels.view(-1)[places]
        return F.cross_entropy(logits, labels, ignore_index=12, label_smoothing=0.1)


class Regresses(Masked):
    """Two means over as many rows."""

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels >= SMALLEST
        rows = x[mask]
        fit = F.mse_loss(rows, self.importance[:WIDTH].expand_as(rows))
        return fit + 0.1 * F.binary_cross_entropy_with_logits(x[mask][:, 0], (labels[mask] % 2).to(x.dtype))


class Counts(Masked):
    """A sum that is divided by how many rows there are, or by one where there are none."""

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = x.masked_select((labels >= SMALLEST).unsqueeze(-1)).pow(2)
        return rows.sum() / max(rows.shape[0], 1)


class Scores(Masked):
    """How many were right, beside the loss."""

    def loss(self, x: Tensor, labels: Tensor) -> Any:
        mask = labels >= SMALLEST
        logits = self.head(x[mask])
        right = (logits.argmax(-1) == labels[mask]).to(x.dtype).mean()
        return {"loss": F.cross_entropy(logits, labels[mask]), "right": right}


class AddsUp(Masked):
    """Means over other numbers of the same rows, both trained."""

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels >= SMALLEST
        logits = self.head(rows := x[mask])
        sharp = logits.logsumexp(-1).square().mean()
        return F.cross_entropy(logits, labels[mask], self.importance) + 0.1 * sharp + rows.abs().mean()


class OneAgainstMany(Masked):
    """The first row against each that is selected; which mask selects one, no trace tells."""

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        first = torch.zeros_like(labels, dtype=torch.bool)
        first[1, 2] = True
        return (x[first] - x[labels >= SMALLEST]).pow(2).mean()


class TwoLosses(Masked):
    """Of which the loop trains one; the other's derivative is not finite."""

    def loss(self, x: Tensor, labels: Tensor) -> Any:
        rows = x[labels >= SMALLEST]
        beside = self.head(rows * 0).sum() * 0 + (rows * 0).pow(2).sum(-1).sqrt().mean()
        return {"loss": rows.square().mean(), "right": beside}


MODELS: dict[str, type[Masked]] = {
    "masked": Masked, "places": Places, "regresses": Regresses, "counts": Counts, "scores": Scores, "adds": AddsUp,
    "one against many": OneAgainstMany, "two losses": TwoLosses,
}  # fmt: skip
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": ("data_parallel", {}),
    "sharded": ("fsdp", {}),
    "microbatches": ("fsdp", {"microbatches": 2}),
    "context parallel": ("context_parallel", {}),
}


def _batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels: of many rows, then of those of one rank alone, then of none."""
    generator = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(0, CLASSES, (8, 6), generator=generator) for _ in range(2))
    if step == 1:
        labels[4:], labels[:, 3:] = 0, 0
    return tokens, labels.clamp(max=SMALLEST - 1) if step == 2 else labels


def _train(name: str, way: str) -> tuple[list[float], list[tuple[str, float]]]:
    plain = make(MODELS[name])
    plan, options = WAYS[way]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp" if way == "context parallel" else "dp",))
    model = autoparallel.compile(copy.deepcopy(plain), mesh, plan=plan, **options)
    optimizers = [torch.optim.AdamW(x.parameters(), 1e-2) for x in (model, plain)]
    differences = []
    for step in range(3):
        batch = _batch(step)
        with autoparallel.count_traffic() as traffic:
            ours = model(*batch)
            (ours["loss"] if isinstance(ours, dict) else ours).backward()
        theirs = plain(*batch)
        (theirs["loss"] if isinstance(theirs, dict) else theirs).backward()
        if isinstance(theirs, dict):
            assert ours["right"].requires_grad == theirs["right"].requires_grad
            differences.append(off(ours["right"].nan_to_num(7), theirs["right"].nan_to_num(7)))
            ours, theirs = ours["loss"], theirs["loss"]
        assert bool(theirs.isnan()) == (step == 2 and name != "counts"), "there is no mean of no rows"
        differences += [off(ours.nan_to_num(7), theirs.nan_to_num(7)), gradients_off(model, plain)]
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    return differences, [(kind, size) for (kind, _), size in traffic.bytes.items()]


_OF_ALL_ROWS = ("one against many", "two losses")
CASES = [
    (way, name)
    for way in WAYS
    for name in MODELS
    if way != "microbatches" or name not in (*_OF_ALL_ROWS, "scores", "adds")
]
"""All but those of microbatches that give something beside a loss, compare rows, or add up means over other numbers."""


@pytest.mark.wide_where(lambda way, name: (way, name) not in (("sharded", "masked"), ("microbatches", "places")))
@pytest.mark.slow_where(lambda way, name: way == "context parallel" and name not in ("masked", "places"))
@pytest.mark.parametrize(("way", "name"), CASES)
def test_the_mean_is_that_of_all_ranks_rows(way: str, name: str) -> None:
    for differences, sent in run_on_ranks(_train, name, way, world_size=2):
        assert max(differences) < 1e-9
        if way == "data parallel" and name not in _OF_ALL_ROWS:
            assert {kind for kind, _ in sent} == {"all_reduce"}, "rows were gathered"


def _accumulate(name: str) -> float:
    plain = make(MODELS[name])
    model = autoparallel.compile(
        copy.deepcopy(plain), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), plan="fsdp"
    )
    batches = [_batch(step) for step in (0, 2, 1)]  # one of them of no rows
    for microbatches in model.accumulate(3, batches):
        for batch in microbatches:
            model(*batch).backward()
    plain(*(torch.cat(parts) for parts in zip(*batches, strict=True))).backward()
    return gradients_off(model, plain)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["masked", "places", "counts"])
def test_a_window_weighs_microbatches_by_their_rows(name: str) -> None:
    assert max(run_on_ranks(_accumulate, name, world_size=2)) < 1e-9
