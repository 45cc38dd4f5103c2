"""`accumulate()` of sums of means over several numbers: one weight, where their ratio is fixed, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.runtime.support import SideBySide, gradients_off, make, off, run_on_ranks

ROWS = (4, 2, 6, 4, 8, 4, 2)


class Coder(nn.Module):
    """Means over pixels, over latents, and over rows of what is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.decoder = nn.Linear(4, 6)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        mean, log = self.encoder(x).chunk(2, -1)
        y = self.decoder(mean.tanh())
        divergence = -0.5 * (1 + log - mean.square() - log.exp())
        return F.mse_loss(y, x) + 0.1 * divergence.mean() + 0.01 * divergence.sum() / x.shape[0] + 2.0


class Answers(nn.Module):
    """Two labels a row, which may be ignored together, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 6), nn.Linear(16, 6), nn.Linear(16, 1)])

    def forward(self, x: Tensor, first: Tensor, last: Tensor) -> Tensor:
        a, b, c = (head(self.up(x).relu()) for head in self.heads)
        labels = F.cross_entropy(a, first, ignore_index=-1) + F.cross_entropy(b, last, ignore_index=-1)
        return labels / 2 + 0.3 * F.l1_loss(c[:, 0], x.sum(1))


class Tasks(nn.Module):
    """Two tasks with weights that are trained (Kendall et al. 2018), one of them a mean of each column."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 3)])
        self.logs = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        a, b = (head(self.up(x).relu()) for head in self.heads)
        first, second = F.mse_loss(a, x[:, :2]), (b - x[:, 2:5]).abs().mean(0).sum()
        return first * torch.exp(-self.logs[0]) + second / self.logs[1].exp() + self.logs.sum()


class Smoothed(Answers):
    """A count with a number added, of rows that are selected."""

    def forward(self, x: Tensor, first: Tensor, last: Tensor) -> Tensor:
        losses = self.heads[0](self.up(x).relu()).square()
        chosen = x[:, 0] > -0.5
        return losses[chosen].sum() / (chosen.sum() + 0.5)


MODELS: dict[str, type[nn.Module]] = {model.__name__: model for model in (Coder, Answers, Tasks, Smoothed)}
WAYS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "data_parallel": ((2,), {"plan": "data_parallel"}),
    "fsdp": ((2,), {"plan": "fsdp"}),
    "fsdp on (2, 2)": ((2, 2), {"plan": "fsdp"}),
    "tensor_parallel": ((2,), {"plan": "tensor_parallel"}),
    "microbatches": ((2,), {"plan": "fsdp", "microbatches": 2}),
    "a pipeline": ((2,), {"pipeline": autoparallel.Pipeline(microbatches=2)}),
}


def batch_of(rows: int, ignored: tuple[int, int] = (0, 0)) -> tuple[Tensor, Tensor, Tensor]:
    """Rows with two labels each, of which so many of the first rows are ignored."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    first, last = (torch.randint(0, 6, (rows,), generator=generator) for _ in range(2))
    first[: ignored[0]], last[: ignored[1]] = -1, -1
    return x, first, last


def pair(model: type[nn.Module], way: str) -> tuple[Any, nn.Module]:
    shape, options = WAYS[way]
    names = ("dp", "tp") if len(shape) > 1 else ("pp" if "pipeline" in options else "dp",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return autoparallel.compile(make(model), mesh, **options), make(model)


def _train(name: str, way: str) -> dict[str, Any]:
    model, plain = pair(MODELS[name], way)
    both, sizes = SideBySide(model, plain), []
    for window in model.accumulate(3, [batch_of(rows) for rows in ROWS]):
        seen = []
        for batch in window:
            model(*batch).backward()
            seen.append(batch)
        plain(*(torch.cat(parts) for parts in zip(*seen, strict=True))).backward()
        both.step(0.05)
        sizes.append(len(seen))
    return {"worst": both.worst, "sizes": sizes}


CASES = [(way, model) for model in MODELS for way in WAYS if way != "microbatches" or model != "Answers"]
DEFAULT = (("fsdp", "Answers"), ("microbatches", "Coder"), ("data_parallel", "Tasks"), ("a pipeline", "Smoothed"))


@pytest.mark.wide_where(lambda way, model: (way, model) not in DEFAULT)
@pytest.mark.parametrize(("way", "model"), CASES)
def test_a_window_equals_one_batch(way: str, model: str) -> None:
    shape, _ = WAYS[way]
    for found in run_on_ranks(_train, model, way, world_size=torch.Size(shape).numel()):
        assert found["sizes"] == [3, 3, 1] and found["worst"] < 1e-9


def _apart(ignored: tuple[tuple[int, int], ...]) -> tuple[str, float]:
    """The error of a window, and how far the next one is off."""
    model, plain = pair(Answers, "fsdp")

    def go(batches: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        for window in model.accumulate(len(batches), batches):
            for batch in window:
                model(*batch).backward()

    message = ""
    try:
        go([batch_of(4, some) for some in ignored])
    except RuntimeError as error:
        message = str(error)
    model.zero_grad()
    batches = [batch_of(rows) for rows in (4, 6)]
    go(batches)
    plain(*(torch.cat(parts) for parts in zip(*batches, strict=True))).backward()
    return message, gradients_off(model, plain)


@pytest.mark.parametrize(
    ("ignored", "shown"),
    [
        (((0, 0), (2, 1)), "4 and 4 and 4; 2 and 3 and 4"),
        (((2, 2), (0, 0)), "2 and 2 and 4; 4 and 4 and 4"),  # of a mean over all rows
        (((4, 4), (4, 4)), "0 and 0 and 4; 0"),  # nothing that two of the means weigh
    ],
)
def test_means_whose_ratio_differs_are_an_error_that_loses_nothing(
    ignored: tuple[tuple[int, int], ...], shown: str
) -> None:
    messages, off = zip(*run_on_ranks(_apart, ignored, world_size=2), strict=True)
    assert messages[0] == messages[1] and max(off) < 1e-9
    assert "it adds up means over different numbers" in messages[0] and f"between microbatches: {shown}" in messages[0]
    assert "test_several_means.py" in messages[0] and "What to change" in messages[0]


def _apart_in_a_pipeline() -> tuple[str, float, float]:
    """The error of a call, how far the next one is off, and one that is not differentiated."""
    model, plain = pair(Answers, "a pipeline")
    message = ""
    try:
        model(*batch_of(4, (0, 1)))
    except RuntimeError as error:
        message = str(error)
    model.zero_grad()
    with torch.no_grad():
        whole = off(model(*batch_of(4, (0, 1))), plain(*batch_of(4, (0, 1))))
    for m in (model, plain):
        m(*batch_of(8)).backward()
    return message, gradients_off(model, plain), whole


def test_means_whose_ratio_differs_are_an_error_in_a_pipeline() -> None:
    messages, gradients, whole = zip(*run_on_ranks(_apart_in_a_pipeline, world_size=2), strict=True)
    assert messages[0] == messages[1] and max(gradients) < 1e-9 and max(whole) < 1e-9
    assert "it adds up means over different numbers" in messages[0] and "What to change" in messages[0]


def _refused() -> str:
    try:
        pair(Answers, "microbatches")[0](*batch_of(4))
    except autoparallel.PlanError as error:
        return str(error)
    return ""


def test_a_call_is_not_cut_where_it_might_not_be_the_same() -> None:
    for message in run_on_ranks(_refused, world_size=2):
        assert "it adds up means over different numbers" in message and "What to change" in message


class Lengths(nn.Module):
    """Means over tokens, and over rows: their ratio is the length."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).tanh())
        return F.mse_loss(y, x) + 0.1 * y.square().sum((1, 2)).mean()


def _lengths(way: str) -> tuple[float, str]:
    model, plain = pair(Lengths, way)
    torch.manual_seed(0)
    batches = {length: [torch.rand(rows, length, 6, dtype=torch.float64) for rows in (4, 8)] for length in (4, 6, 8)}
    worst, message = 0.0, ""
    for length in (4, 6, 8):
        for window in model.accumulate(2, batches[length]):
            for x in window:
                model(x).backward()
        plain(torch.cat(batches[length])).backward()
        worst = max(worst, gradients_off(model, plain))
        model.zero_grad(), plain.zero_grad()
    try:
        for window in model.accumulate(2, [batches[4][0], batches[6][1]]):
            for x in window:
                model(x).backward()
    except RuntimeError as error:
        message = str(error)
    return worst, message


@pytest.mark.parametrize("way", ["fsdp", "microbatches", "a pipeline"])
def test_a_length_is_the_ratio_of_a_mean_over_tokens_to_one_over_rows(way: str) -> None:
    for worst, message in run_on_ranks(_lengths, way, world_size=2):
        assert worst < 1e-9
        assert "whose ratio differs between microbatches: 96 and 4; 288 and 8;" in message


class Turning(Lengths):
    """A mean for short sequences, and a sum for long ones."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).tanh()).square()
        return y.mean() if x.shape[1] < 5 else y.sum()


def _turning() -> str:
    model, _ = pair(Turning, "fsdp")
    try:
        for window in model.accumulate(2, [torch.rand(4, length, 6, dtype=torch.float64) for length in (4, 6)]):
            for x in window:
                model(x).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_means_and_sums_are_not_put_together() -> None:
    for message in run_on_ranks(_turning, world_size=2):
        assert "they are means in some, and sums in others" in message and "What to change" in message


class Counted(Answers):
    """As the error advises: sums over counts that the call brings, beside one over what the model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 4.0]))

    def forward(self, x: Tensor, first: Tensor, last: Tensor, counts: Tensor | None = None) -> Tensor:
        a, b, c = (head(self.up(x).relu()) for head in self.heads)
        assert counts is not None
        labels = zip((a, b), (first, last), counts, strict=True)
        means = [F.cross_entropy(p, q, ignore_index=-1, reduction="sum") / n for p, q, n in labels]
        return means[0] + means[1] + c.square().sum() / self.weights.sum()


def _counted(way: str) -> float:
    model, plain = pair(Counted, way)
    batches = [batch_of(4, some) for some in ((0, 0), (2, 1))]
    counts = torch.tensor([6, 7])
    for window in model.accumulate(2, batches):
        for batch in window:
            model(*batch, counts=counts).backward()
    plain(*(torch.cat(parts) for parts in zip(*batches, strict=True)), counts=counts).backward()
    return gradients_off(model, plain)


@pytest.mark.parametrize("way", ["fsdp", "a pipeline"])
def test_sums_over_the_same_number_in_all_microbatches_add_up(way: str) -> None:
    assert max(run_on_ranks(_counted, way, world_size=2)) < 1e-9
