"""What the loop makes of the parameters of a pipeline's stages: numbers that the ranks of other stages are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.runtime.support import Net, batch, make, off, raised, run_on_ranks, weights, weights_off


class Gained(Net):
    """A scalar that only one of two stages has."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def _added(model: Any, loss: Tensor) -> Tensor:
    """A penalty that is added up in place."""
    penalty = 0
    for p in model.parameters():
        penalty += p.square().sum()
    return loss + 0.1 * penalty


def _written(model: Any, loss: Tensor) -> Tensor:
    loss = loss.clone()
    for p in model.parameters():
        loss += 0.1 * p.square().sum()
    return loss


def _with_more_than_a_number(model: Any, loss: Tensor) -> Tensor:
    return loss + (model.up.bias * model.gain * model.down.weight.mean()).square().sum() * loss


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "added": lambda model, loss: loss + model.gain,
    "in place": _added,
    "multiplied": lambda model, loss: model.gain * loss / model.up.weight.norm() + model.gain.square(),
    "of all": lambda model, loss: loss + 0.1 * sum(p.square().sum() for p in model.parameters()).sqrt(),
    "shape": _with_more_than_a_number,
    "weighed": lambda model, loss: torch.exp(-model.gain) * loss + model.gain,
    "written": _written,
}


def _pair(*shape: int) -> tuple[Any, nn.Module]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp")[: len(shape)])
    options: Any = {"loss_fn": F.mse_loss, "pipeline": autoparallel.Pipeline("1f1b", 2)}
    return autoparallel.compile(make(Gained), mesh, **options), make(Gained)


def _steps(shape: tuple[int, ...], of: str, accumulates: bool, hooked: bool) -> float:
    model, plain = _pair(*shape)
    worst = 0.0
    for m in (model, plain):
        if hooked:
            m.gain.register_hook(lambda g: g * 0.5)
            m.up.weight.register_hook(lambda g: g * 0.3)
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        seen = []
        for step in range(2):
            for number in range(2):
                x, y = batch(2 * step + number)
                waits = accumulates and not number and m is model
                context = m.no_sync() if waits else torch.enable_grad()  # type: ignore[operator]
                with context:
                    loss = LOSSES[of](m, m(x, y) if m is model else F.mse_loss(m(x), y))
                    loss.backward()
                seen.append(loss.item())
                if not accumulates:
                    break
            norm = m.clip_grad_norm_(0.5) if m is model else nn.utils.clip_grad_norm_(m.parameters(), 0.5)  # type: ignore[operator]
            seen.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        if m is model:
            values = seen
            assert all(p.device_mesh.get_coordinate() is not None for p in optimizer.state), "of another stage"
        worst = max(abs(a - b) for a, b in zip(values, seen, strict=True))
    return max(worst, weights_off(weights(model), weights(plain)))


@pytest.mark.wide_where(lambda of: of not in ("multiplied", "in place"))
@pytest.mark.parametrize("of", LOSSES)
def test_numbers_of_stages_are_joined_to_the_loss(of: str) -> None:
    for accumulates, hooked in ((False, False), (True, False), (False, True)):
        assert max(run_on_ranks(_steps, (2,), of, accumulates, hooked, world_size=2)) < 1e-12


@pytest.mark.wide
@pytest.mark.parametrize("accumulates", [False, True])
def test_numbers_of_stages_of_several_ranks(accumulates: bool) -> None:
    for of in LOSSES:
        assert max(run_on_ranks(_steps, (2, 2), of, accumulates, True, world_size=4)) < 1e-12


def _without_gradients() -> float:
    model, plain = _pair(2)
    x, y = batch()
    model(x, y).backward()
    worst = 0.0
    seen = []
    for m in (model, plain):
        with torch.no_grad():
            total = torch.zeros((), dtype=torch.float64)
            for p in m.parameters():
                total += p.norm()
            m.gain.mul_(m.up.weight.norm())  # type: ignore[operator, union-attr]
            m.up.weight.mul_(m.gain)  # type: ignore[operator, union-attr]
            m.down.weight.add_(m.up.bias.norm() * m.down.bias.norm())  # type: ignore[operator, union-attr]
            seen.append([total, sum(p.norm() for p in m.parameters())])
            read = [p.norm().item() + float(p.max()) + (m.gain if p.sum() > 0 else 0.0) for p in m.parameters()]  # type: ignore[operator]
            seen[-1] += [torch.as_tensor(float(x), dtype=torch.float64) for x in read]
    worst = max(map(off, *seen))
    return max(worst, weights_off(weights(model), weights(plain)))


def test_numbers_of_stages_meet_without_gradients() -> None:
    assert max(run_on_ranks(_without_gradients, world_size=2)) < 1e-12


class Adapting(torch.optim.SGD):
    """Learns a rate of its group from the gradients of all parameters that it finds."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["lr"] += sum(p.grad.square().sum().item() for p in group["params"] if p.grad is not None)
        for p in group["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=group["lr"])


def _adapted() -> str:
    model, _ = _pair(2)
    optimizer = Adapting(model.parameters(), lr=0.1)
    for step in range(2):
        model(*batch(step)).backward()
        optimizer.step()
    return raised(lambda: model(*batch(2)))


def test_an_optimizer_that_learns_something_else_on_each_stage_is_refused() -> None:
    for text in run_on_ranks(_adapted, world_size=2):
        assert "the ranks call the model differently" in text and "Adapting(lr=" in text


def _refused() -> dict[str, str]:
    model, _ = _pair(2)
    model(*batch()).backward()

    def of_gradients() -> None:
        total = torch.zeros((), dtype=torch.float64)
        for p in model.parameters():
            if p.grad is not None:
                total += p.grad.norm()

    def norm_by_hand() -> float:
        return sum(p.grad.norm().item() ** 2 for p in model.parameters() if p.grad is not None)

    up, down = model.up.weight, model.down.weight
    elsewhere = next(p for p in (up, down) if p.device_mesh.get_coordinate() is None)
    return {
        "of gradients": raised(of_gradients),
        "by hand": raised(norm_by_hand),
        "apart": raised(lambda: up + down),
        "in place": raised(lambda: up.detach().mul_(down)),
        "whole": raised(elsewhere.full_tensor),
    }


def test_what_has_no_meaning_across_stages_is_refused() -> None:
    words = {
        "of gradients": "a stage of a pipeline, meets a loss or what lies on others",
        "by hand": "is read, as by p.norm().item(). What to change",
        "apart": "takes tensors of several stages of a pipeline",
        "in place": "takes tensors of several stages of a pipeline",
        "whole": "full_tensor() of a tensor of shape",
    }
    for found in run_on_ranks(_refused, world_size=2):
        for case, text in words.items():
            assert text in found[case], (case, found[case])
