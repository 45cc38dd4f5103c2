"""Numbers that a loop anneals, as attributes or arguments: one trace for the first value, and one for all others."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from autoparallel import operators
from autoparallel.planner import planner

VALUES = (0.1, 0.15, 0.2, 0.25, 0.3)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each trace that is made."""
    made: list[int] = []
    capture = planner.capture
    monkeypatch.setattr(planner, "capture", lambda *a, **k: (made.append(1), capture(*a, **k))[1])
    return made


class Annealed(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.drop, self.function, self.n = nn.Linear(8, 8), nn.Dropout(0.1), function, 0.1

    def forward(self, x: Tensor, n: float | None = None) -> Tensor:
        return self.function(self.drop(self.layer(x)), x, self.n if n is None else n)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "dropout": lambda h, x, n: F.dropout(h, n),
    "dropout of channels": lambda h, x, n: F.dropout1d(h.unsqueeze(0), n),
    "attention": lambda h, x, n: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=n),
    "huber": lambda h, x, n: F.huber_loss(h, x, delta=n),
    "smooth l1": lambda h, x, n: F.smooth_l1_loss(h, x, beta=n),
    "smoothing": lambda h, x, n: F.cross_entropy(h, x.argmax(-1), label_smoothing=n),
    "margin": lambda h, x, n: F.triplet_margin_loss(h, x, 2 * x, margin=n),
    "ranking": lambda h, x, n: F.margin_ranking_loss(h, 2 * h, x.sign(), margin=n),
    "noise": lambda h, x, n: h + torch.empty_like(h).normal_(0, n) + torch.normal(0.0, n, (8,)),
    "range": lambda h, x, n: h * torch.empty_like(h).uniform_(-n, n) * torch.empty_like(h).bernoulli_(n),
    "tensors": lambda h, x, n: h * torch.as_tensor(n) * h.new_tensor(n),
    "quantiles": lambda h, x, n: h * torch.quantile(h, n),
}


NOT_YET = ("quantiles",) if torch.__version__.startswith("2.11.") else ()  # docs/supported.md


@pytest.mark.wide_where(lambda name: name not in [*FUNCTIONS][::6])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NOT_YET])
def test_an_argument_of_a_function_is_open(name: str, traces: list[int]) -> None:
    model: Any = autoparallel.compile(Annealed(FUNCTIONS[name]))
    for value in VALUES:
        model(torch.randn(4, 8), value).sum().backward()
    assert len(traces) == 2


def test_what_a_loop_sets_is_open(traces: list[int], caplog: pytest.LogCaptureFixture) -> None:
    plain = Annealed(FUNCTIONS["dropout"])
    model: Any = autoparallel.compile(plain)
    for value in VALUES:
        plain.n, plain.drop.p = value, value / 2
        model(torch.randn(4, 8)).sum().backward()
    assert len(traces) == 2
    assert "has changed from 0.1 to 0.15 (and 1 more)" in caplog.text


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
def test_numbers_of_numpy_are_open_as_pythons(kind: Callable[..., Any], traces: list[int]) -> None:
    """As of ``np.interp``: in a dict of the model's, and passed in."""
    plain = Annealed(lambda h, x, n: h * n["scale"] if isinstance(n, dict) else h * n).eval()
    plain.n = {"scale": kind(1)}  # type: ignore[assignment]
    model: Any = autoparallel.compile(copy.deepcopy(plain))
    x = torch.randn(4, 8)
    counts = []
    for step in range(5):
        model.n["scale"] = plain.n["scale"] = kind(2 + step)  # type: ignore[index]
        torch.testing.assert_close(model(x), plain(x))
        counts.append(len(traces))
    for step in range(5):
        torch.testing.assert_close(model(x, kind(3 + step)), plain(x, kind(3 + step)))
        counts.append(len(traces))
    assert counts[1:5] == [counts[0] + 1] * 4 and counts[6:] == [counts[5] + 1] * 4


@pytest.mark.wide
def test_what_a_loop_sets_in_lists_and_dicts_is_open(traces: list[int]) -> None:
    """Also where something else changes with them, which has a trace of its own."""
    plain = Annealed(lambda h, x, n: h * n[0]["scale"] if n[1] else h)
    plain.n = [{"scale": 1.0}, True]
    model: Any = autoparallel.compile(plain)
    for step, value in enumerate(VALUES):
        plain.n[0]["scale"], plain.n[1] = value, step % 3 < 2
        model(torch.randn(4, 8)).sum().backward()
    assert len(traces) == 3


@pytest.mark.wide
def test_what_a_model_fixes_of_it_is_read_as_before(traces: list[int]) -> None:
    plain = Annealed(lambda h, x, n: F.layer_norm(h, (8,), eps=n))
    model: Any = autoparallel.compile(plain)
    for value in VALUES:
        plain.n = value
        model(torch.randn(4, 8)).sum().backward()
    assert len(traces) <= len(VALUES) + 1


@pytest.mark.wide
def test_the_ends_of_a_range_have_traces_of_their_own(traces: list[int]) -> None:
    """Nothing is dropped, or everything is; what is no probability is refused as in eager."""
    plain = Annealed(FUNCTIONS["dropout"])
    plain.drop.p = 0.0
    model: Any = autoparallel.compile(plain)
    x = torch.randn(4, 8)
    for value in (0.5, 0.0, 0.4, 1.0, 0.3):
        zeros = (model(x, value) == 0).double().mean().item()
        assert zeros == value if value in (0.0, 1.0) else 0 < zeros < 1
    assert len(traces) == 4
    with pytest.raises(autoparallel.CaptureError, match="dropout probability has to be between 0 and 1"):
        model(x, 1.5)


def test_microbatches_draw_what_the_batch_draws() -> None:
    plain = Annealed(lambda h, x, n: F.dropout(h, n)).double()
    model: Any = autoparallel.compile(copy.deepcopy(plain), loss_fn=F.mse_loss, microbatches=2)
    torch.manual_seed(5)
    for call, value in enumerate(VALUES):
        x = torch.full((4, 8), 0.5 + call, dtype=torch.float64)
        with operators.plain_randomness(operators.RandomState(5, call)):
            expected = F.mse_loss(plain(x, value), x)
        assert torch.allclose(model(x, value, x), expected, rtol=1e-12)


BETA = 1.0


@pytest.mark.wide
def test_numbers_around_the_model_are_open(traces: list[int]) -> None:
    """A global, an entry of a namespace and a variable of this function: one trace more serves all values."""
    global BETA
    options, tau = Namespace(weight=1.0), 1.0
    plain = Annealed(lambda h, x, n: h * BETA / tau + options.weight * x).eval()
    model = autoparallel.compile(copy.deepcopy(plain))
    counts = []
    for value in VALUES:
        BETA, options.weight, tau = value, 2 * value, 3 * value
        x = torch.randn(4, 8)
        torch.testing.assert_close(model(x), plain(x))
        counts.append(len(traces))
    assert counts[1:] == [counts[0] + 1] * 4
