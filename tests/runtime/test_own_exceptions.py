"""What a model itself raises comes back as its own exception, on every rank, and what cannot be traced as a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from autoparallel import CaptureError
from tests.distributed import run_distributed
from tests.runtime.support import mesh_of


class WrongRows(Exception):
    """As a library has it."""


class Checked(nn.Module):
    """Checks what it is given, as strangers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, kind: str = "") -> Tensor:
        if x.dim() != 2:
            raise ValueError(f"expected [batch, features], got {list(x.shape)}")
        assert x.shape[1] == 4, "four features"
        if x.shape[0] > 8:
            raise WrongRows(x.shape[0])
        if kind == "training" and not self.training:
            raise NotImplementedError("only in training")
        if kind == "wrapped":
            try:
                return F.linear(x, self.layer.weight[:, :3])
            except RuntimeError as error:
                raise ValueError("wrapped") from error
        if kind == "looked up":
            try:
                return x * {"one": 1}[kind]
            except KeyError:
                raise WrongRows(kind) from None
        if kind == "traced":
            try:
                return x * int(self.layer(x).sum())
            except RuntimeError as error:
                raise ValueError("traced") from error
        if kind == "values":
            x = x[: int(self.layer(x).sum())]
        out: Tensor = self.layer(x)
        return out


def _calls(plan: str) -> list[tuple[str, str, str]]:
    """What each call raises of the plain model and of the compiled one, and whether the latter still trains."""
    plain, found = Checked(), []
    model = autoparallel.compile(Checked(), mesh_of(torch.distributed.get_world_size()), plan=plan)
    calls: list[Any] = [(torch.rand(2, 3, 4),), (torch.rand(4, 5),), (torch.rand(10, 4),)]
    for args in (*calls, (torch.rand(4, 4), "wrapped"), (torch.rand(4, 4), "looked up")):
        errors: list[Exception] = []
        for each in (plain, model):
            with pytest.raises(Exception) as caught:
                each(*args)
            errors.append(caught.value)
        expected, error = errors
        found.append((repr(expected), repr(error)[:80], "".join(getattr(error, "__notes__", []))))
        model(torch.rand(8, 4)).sum().backward()
    return found


def test_what_the_model_raises_is_what_comes_back() -> None:
    for results in run_distributed(_calls, "fsdp", world_size=2, timeout=120.0):
        for expected, error, notes in results:
            assert expected == error
            assert "raise " in notes or "assert " in notes


def test_an_error_that_is_made_of_one_of_a_trace_is_a_refusal() -> None:
    model = autoparallel.compile(Checked())
    with pytest.raises(CaptureError, match="What to change"):
        model(torch.rand(4, 4), "traced")


@pytest.mark.wide
def test_a_mode_that_was_not_called_raises_nothing_of_its_own() -> None:
    model = autoparallel.compile(Checked().eval())
    with pytest.raises(NotImplementedError, match="only in training"):
        model(torch.rand(4, 4), "training")
    with pytest.raises(CaptureError, match="What to change"):
        model(torch.rand(4, 4), "values")
