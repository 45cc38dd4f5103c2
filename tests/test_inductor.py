"""``autoparallel.compile(..., backend="inductor")``: the same program, compiled, gives the same numbers.

AOTAutograd sees all that Inductor sees, and is fast; so the breadth is tested there, and Inductor itself on one model
by default, on all of them with ``-m slow``.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.distributed import run_distributed
from tests.models import GPTConfig, build, build_gpt
from tests.parity.harness import AXES, difference

PLANS = ("data_parallel", "fsdp", "tensor_parallel")
ROWS = (8, 8, 12, 4)
"""Rows of each step: the compiled body takes batch sizes that it has not seen."""


def _case(name: str) -> Any:
    if name == "gpt":  # one layer, tied, with dropout
        torch.manual_seed(0)
        return build_gpt(torch.float64, GPTConfig(16, context=4, width=8, heads=2, layers=1, dropout=0.2))
    return build(name, torch.float64)


def _train(name: str, shape: tuple[int, ...], plan: str, backend: str) -> tuple[dict[str, Tensor], str]:
    case = _case(name)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)])
    model = autoparallel.compile(case.model, mesh, loss_fn=case.loss_fn, plan=plan, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: dict[str, Tensor] = {}
    for step, rows in enumerate(ROWS):
        args, kwargs = case.make_batch(step, rows)
        if step == 0:  # accumulates, without communication
            with model.no_sync():
                loss = model(*args, **kwargs)
                loss.backward()
            continue
        loss = model(*args, **kwargs)
        loss.backward()
        seen[f"step {step}: loss"] = loss.detach().clone()
        seen |= {f"step {step}: gradient of {n}": p.grad.full_tensor() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    seen |= {f"parameter {n}": p.full_tensor().detach() for n, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        seen["evaluation"] = model(*case.make_batch(100, 8)[0][:-1])
    texts = [kind.runner.program.text() for kind in model._kinds]
    return seen, "\n".join(texts)


def _compare(
    name: str, shape: tuple[int, ...], plan: str, compiler: str
) -> tuple[dict[str, float], str, int, list[str]]:
    """How far each number is off, the programs, the number of graphs compiled, and torch's warnings."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = functools.partial(torch.compile, backend=compiler)
    with warnings.catch_warnings(record=True) as caught, mock.patch("torch.compile", compiled):
        warnings.simplefilter("always")
        actual, text = _train(name, shape, plan, "inductor")
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    expected, _ = _train(name, shape, plan, "eager")
    assert actual.keys() == expected.keys()
    said = [str(w.message) for w in caught if "autoparallel" in str(w.message)]
    return {key: difference(actual[key], value) for key, value in expected.items()}, text, graphs, said


def _check(name: str, shape: tuple[int, ...], plan: str, compiler: str) -> None:
    world = 1
    for n in shape:
        world *= n
    for off, text, graphs, said in run_distributed(
        _compare, name, shape, plan, compiler, world_size=world, timeout=900
    ):
        wrong = {key: value for key, value in off.items() if not value < 1e-9}
        assert len(off) > 4 and not wrong, wrong
        assert graphs == 2, "one graph for training and one for evaluation, whatever the batch size"
        assert not said, said
        if name == "gpt" and plan == "tensor_parallel":
            assert "embedding_sharded" in text and "cross_entropy_sum_sharded" in text
        if name == "gpt":
            assert "dropout" in text


@pytest.mark.slow_where(lambda name, plan: (name, plan) != ("mlp", "fsdp"))
@pytest.mark.parametrize(
    ("name", "plan"),
    list(itertools.product(("mlp", "gpt"), PLANS)),
)
def test_a_traced_body_equals_the_eager_one(name: str, plan: str) -> None:
    _check(name, (2,), plan, "aot_eager")


@pytest.mark.slow
def test_a_traced_body_equals_the_eager_one_on_two_axes() -> None:
    _check("gpt", (2, 2), "tensor_parallel", "aot_eager")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_inductor_equals_the_eager_body() -> None:
    _check("mlp", (2,), "tensor_parallel", "inductor")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_inductor_equals_the_eager_body_under_every_plan(name: str, plan: str) -> None:
    _check(name, (2,), plan, "inductor")
