"""What people bring: dataclasses, ``BatchEncoding``, numpy, autocast, wrappers of others, second derivatives."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.runtime.support import make, off, raised, run_on_ranks


@dataclasses.dataclass
class Inner:
    scale: Tensor


@dataclasses.dataclass
class Batch:
    x: Tensor
    inner: Inner
    mask: Tensor | None = None


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding is made."""


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, batch: Any) -> Tensor:
        if isinstance(batch, Batch):
            x = batch.x * batch.inner.scale
            return self.up(x if batch.mask is None else x * batch.mask)
        return self.up(batch["x"] if isinstance(batch, dict | UserDict) else batch)


def _pair() -> tuple[Any, Any]:
    import autoparallel

    model = make(Reader)
    plain = copy.deepcopy(model)
    return autoparallel.compile(model, loss_fn=F.mse_loss, plan="fsdp"), plain


def _inputs() -> dict[str, Any]:
    model, plain = _pair()
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    scale = torch.tensor(2.0, dtype=torch.float64)
    results: dict[str, Any] = {}
    inputs = {
        "dataclass": Batch(x, Inner(scale)),
        "with a mask": Batch(x, Inner(scale), x > 0),
        "encoding": Encoding(x=x),
    }
    for name, value in inputs.items():
        loss, expected = model(value, y), F.mse_loss(plain(value), y)
        loss.backward(), expected.backward()
        results[name] = max(off(loss, expected), off(model.up.weight.grad, plain.up.weight.grad))
    kinds = len(model._kinds)
    model(Batch(2 * x, Inner(scale)), y)
    results["kinds"] = len(model._kinds) - kinds
    results["array"] = raised(lambda: model(x.numpy(), y))
    results["deep"] = raised(lambda: model({"x": [np.zeros(3)]}, y))
    results["target"] = raised(lambda: model(x, y.numpy()))

    def under_autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(x, y)

    results["autocast"] = raised(under_autocast)
    results["second derivative"] = raised(lambda: model(inputs["encoding"], y).backward(create_graph=True))
    results["wrapped"] = raised(lambda: DistributedDataParallel(model))
    return results


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (results,) = run_on_ranks(_inputs, world_size=1)
    return results


def test_structures_of_tensors(found: dict[str, Any]) -> None:
    assert all(found[name] < 1e-12 for name in ("dataclass", "with a mask", "encoding")), found
    assert found["kinds"] == 0, "a batch of a known kind was captured again"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("array", "the argument batch is a numpy array: give torch.from_numpy"),
        ("deep", "the argument batch['x'][0] is a numpy array"),
        ("target", "(the target) is a numpy array"),
        ("autocast", "precision=MixedPrecisionPolicy"),
        ("second derivative", "create_graph=True"),
        ("wrapped", "cannot be wrapped in DistributedDataParallel"),
    ],
)
def test_what_is_refused_says_why(found: dict[str, Any], name: str, words: str) -> None:
    assert words in found[name]
