"""Optimizer states in host memory: every bit is that of a step without, and the device holds a batch of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

import autoparallel
from autoparallel.plan import Plan
from autoparallel.runtime.steps import host_steps
from tests.runtime.support import Net, batch, compiled_pair, raised, run_on_ranks
from tests.runtime.test_memory import Alive
from tests.runtime.test_optimizer_steps import Lion


def _run(model: Any, kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What a model, its optimizer's state and what a hook saw of it are after four steps, the last with a new state."""
    if kind is torch.optim.Muon:
        parameters = [p for p in model.parameters() if p.ndim == 2]
    else:
        parameters = list(model.parameters())
    optimizer = kind([{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}], lr=0.01, **options)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda o, *_: seen.append(list(map(id, o.param_groups[1]["params"]))))
    for step in range(4):
        optimizer.zero_grad()
        model(*batch(step, dtype=torch.float32)).backward()
        if step == 2:
            parameters[1].grad = None
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    state = optimizer.state_dict()
    return {
        "parameters": [p.full_tensor().detach() for p in model.parameters()],
        "state": {
            (i, name): value.full_tensor() if isinstance(value, DTensor) else value
            for i, values in state["state"].items()
            for name, value in values.items()
        },
        "groups": [group | {"params": []} for group in state["param_groups"]],
        "seen": seen == [list(map(id, parameters[1:]))] * 4,
        "lies": {(i, n): isinstance(v, DTensor) for i, values in state["state"].items() for n, v in values.items()},
    }


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _bits() -> dict[str, bool]:
    autoparallel.register_optimizer(Lion, per="element")
    results: dict[str, bool] = {}
    given: dict[str, Any] = {"plan": "fsdp", "dtype": torch.float32, "clip_grad_norm": 0.5}
    models = [compiled_pair(Net, 2, offload_optimizer=offloaded, **given)[0] for offloaded in (True, False)]
    with mock.patch.object(host_steps, "BATCH_BYTES", 100):  # a step is made in several batches
        for kind, options in (
            (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
            (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
            (torch.optim.Muon, {}),
            (Lion, {}),
        ):
            found, expected = (_run(model, kind, options) for model in models)
            for what, value in expected.items():
                if what == "parameters":
                    same = all(map(_same, found[what], value))
                elif what == "state":
                    same = list(found[what]) == list(value) and all(map(_same, found[what].values(), value.values()))
                else:
                    same = found[what] == value
                results[f"{kind.__name__} {options} {what}"] = same and bool(found["seen"])
    return results


def test_every_bit_is_that_of_a_step_with_states_on_the_device() -> None:
    for results in run_on_ranks(_bits, world_size=2):
        wrong = [name for name, right in results.items() if not right]
        assert not wrong, wrong


def _resumed(folder: str) -> dict[str, Any]:
    """A checkpoint of states in host memory goes on without, and the other way round."""
    results: dict[str, Any] = {}
    models = [compiled_pair(Net, 2, plan="fsdp", offload_optimizer=offloads)[0] for offloads in (True, False)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]

    def step(number: int) -> list[bool]:
        for model, optimizer in zip(models, optimizers, strict=True):
            model.zero_grad()
            model(*batch(number)).backward()
            optimizer.step()
        both = zip(models[0].parameters(), models[1].parameters(), strict=True)
        return [torch.equal(a.to_local(), b.to_local()) for a, b in both]

    results["first"] = all(step(0))
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        model.save(f"{folder}/{i}", optimizer=optimizer)
    results["second"] = all(step(1))
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        model.load(f"{folder}/{1 - i}", optimizer=optimizer)
    results["again"] = all(step(1))
    results["watched"] = [o in host_steps._WATCHED for o in optimizers] == [True, False]
    results["plan"] = Plan.from_json(models[0].plan.to_json()).offload_optimizer
    results["refused"] = raised(torch.optim.LBFGS(models[0].parameters()).step)
    return results


def test_checkpoints_are_those_of_any_run_and_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    for results in run_on_ranks(_resumed, str(tmp_path), world_size=2):
        refused = results.pop("refused")
        assert all(results.values()), results
        assert "LBFGS's step may be cut is not known" in refused and "offload_optimizer=False" in refused


def _peak(offloaded: bool) -> tuple[int, int]:
    """The most bytes that the tensors take that a first step makes, but for those in host memory, and of a layer."""
    plain = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    model = autoparallel.compile(plain, loss_fn=nn.functional.mse_loss, offload_optimizer=offloaded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.ones(2, 64)
    keep = host_steps.keep_in_host

    def uncounted(*args: Any) -> DTensor:
        with _disable_current_modes():
            return keep(*args)

    size = 64 * 64 * 4
    with (
        mock.patch.object(host_steps, "keep_in_host", uncounted),
        mock.patch.object(host_steps, "BATCH_BYTES", 2 * size),
    ):
        model(x, x).backward()
        alive = Alive([(p.to_local(), p.grad.to_local()) for p in model.parameters()])  # type: ignore[attr-defined, union-attr]
        with alive:
            optimizer.step()
    return int(sum(alive.ledger.peak.values())), size


def test_the_device_holds_the_states_of_a_batch() -> None:
    (whole, size), (peak, _) = _peak(False), _peak(True)
    assert whole >= 16 * size  # two states of eight layers, made in the step
    assert 2 * 2 * size <= peak < 8 * size
