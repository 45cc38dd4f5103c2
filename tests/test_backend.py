"""``torch.compile(model, backend="autoparallel")`` against the plain model, and its errors."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoparallel
from autoparallel.backend import Options
from autoparallel.collectives import redistribute  # noqa: F401 - programs call it
from tests.distributed import WorkerError, run_distributed
from tests.models import build
from tests.parity.harness import AXES, difference

STEPS = 3
ROOT = Path(__file__).parent.parent


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)])


def _backend() -> Any:
    """The backend by name where the project is installed, and as a function where it only lies on the path."""
    from torch._dynamo import list_backends

    from autoparallel.backend import autoparallel as function

    return "autoparallel" if "autoparallel" in list_backends() else function


def _compile(model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> Any:
    torch._dynamo.reset()
    dynamic = options.pop("dynamic", None)
    fullgraph = options.pop("fullgraph", False)
    chosen = {"mesh": mesh, **options} if mesh is not None else options
    return torch.compile(model, backend=_backend(), dynamic=dynamic, fullgraph=fullgraph, options=chosen)


# ------------------------------------------------------------------------------------------------------------- parity


def _train(model: Any, case: Any, rows: tuple[int, ...]) -> dict[str, Tensor]:
    """Everything that a short training shows, by name."""
    seen: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, count in enumerate(rows):
        args, kwargs = case.make_batch(step, count)
        if case.loss_fn is None:
            output = model(*args, **kwargs)
            loss = output["loss"] + 0.01 * output["logits"].pow(2).mean()  # the other output is differentiated, too
        else:
            loss = case.loss_fn(model(*args[:-1], **kwargs), args[-1])
        loss.backward()
        seen[f"step {step}: loss"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            assert type(parameter.grad) is Tensor
            seen[f"step {step}: gradient of {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    seen |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    model.eval()
    args, kwargs = case.make_batch(100, rows[-1])
    with torch.no_grad():
        output = model(*args, **kwargs)["logits"] if case.loss_fn is None else model(*args[:-1], **kwargs)
    assert not output.requires_grad
    seen["evaluation"] = output.clone()
    return seen


def _train_on_rank(name: str, shape: tuple[int, ...], plan: str, rows: tuple[int, ...], backend: str) -> Any:
    case = build(name, torch.float64)
    compiled = _compile(case.model, _mesh(shape), plan=plan, backend=backend)
    seen = _train(compiled, case, rows)
    return {name.replace("_orig_mod.", ""): value for name, value in seen.items()}


def _check(
    name: str, shape: tuple[int, ...], plan: str, rows: tuple[int, ...] = (8, 8, 12), backend: str = "eager"
) -> None:
    case = build(name, torch.float64)
    expected = _train(case.model, case, rows)
    world = 1
    for n in shape:
        world *= n
    ranks = run_distributed(_train_on_rank, name, shape, plan, rows, backend, world_size=world, timeout=280)
    assert ranks[0].keys() == expected.keys()
    wrong = {k: difference(ranks[0][k], v) for k, v in expected.items()}
    wrong = {k: off for k, off in wrong.items() if off > case.tolerance}
    assert not wrong, wrong
    for rank in ranks[1:]:
        for key, value in ranks[0].items():
            assert torch.equal(value, rank[key]), f"{key} differs between ranks"


@pytest.mark.parametrize("plan", ["data_parallel", "tensor_parallel", "auto"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_training_equals_the_plain_model(name: str, shape: tuple[int, ...], plan: str) -> None:
    # The third step has another number of rows: Dynamo compiles again, with the number of rows left open.
    _check(name, shape, plan)
