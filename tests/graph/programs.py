"""Training small models next to their plain selves: everything that three steps change is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.graph.errors import CaptureError

STEPS = 3


@dataclass
class Step:
    """What one training step leaves."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _full(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def train(model: nn.Module, batches: Sequence[Tensor]) -> list[Step]:
    """Steps of SGD with momentum and weight decay; the model returns its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1)
    steps = []
    for x in batches:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        grads = {n: None if p.grad is None else _full(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        parameters = {n: _full(p) for n, p in model.named_parameters()}
        steps.append(Step(_full(loss), grads, parameters, {n: _full(b) for n, b in model.named_buffers()}))
    return steps


def batches(rows: int = 8, features: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, features, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def make_model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def require_equal(expected: Sequence[Step], actual: Sequence[Step]) -> None:
    """Everything is the same to 1e-9, also which gradients are None."""
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(b.loss, a.loss, rtol=1e-9, atol=1e-9)
        for name, grad in a.grads.items():
            other = b.grads[name]
            assert (grad is None) == (other is None), f"{name}.grad: {grad} in eager, {other} here"
            if grad is not None and other is not None:
                torch.testing.assert_close(other, grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}.grad: {m}")
        for there, here in ((a.parameters, b.parameters), (a.buffers, b.buffers)):
            assert there.keys() == here.keys()
            for name in there:
                torch.testing.assert_close(here[name], there[name], rtol=1e-9, atol=1e-9)


def require_as_eager(make: Callable[[], nn.Module]) -> None:
    """The compiled model trains as the plain one, on one rank."""
    plain = make_model(make)
    compiled = autoparallel.compile(copy.deepcopy(plain))
    require_equal(train(plain, batches()), train(compiled, batches()))


def refusal(make: Callable[[], nn.Module]) -> str:
    """The message with which a model is refused."""
    with pytest.raises(CaptureError) as caught:
        autoparallel.compile(make_model(make))(batches()[0])
    message = str(caught.value)
    assert "What to change: " in message
    return message


def train_on_ranks(make: Callable[[], nn.Module], plan: str) -> tuple[list[Step], list[Step], str]:
    """On every rank: the plain model's steps, the compiled one's, and the program."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    plain = make_model(make)
    compiled = autoparallel.compile(copy.deepcopy(plain), mesh, plan=plan)
    actual = train(compiled, batches())
    kind = next(iter(compiled._kinds))
    return train(plain, batches()), actual, kind.runner.program.text()  # type: ignore[attr-defined]
