"""After an exception that the user catches, zero_grad() gives a clean state, and what cannot be right is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from tests.runtime.support import (
    Net,
    batch,
    compiled_pair,
    gradients_off,
    make,
    parameters_off,
    raised,
    run_on_ranks,
)

PLANS = ["data_parallel", "fsdp", "tensor_parallel"]
NONE = {"set_to_none": True}
ZERO = {"set_to_none": False}


class Trouble(Exception):
    """What the tests raise."""


def _alone(plan: str, build: Any = Net, **options: Any) -> tuple[Any, nn.Module]:
    plain, model = make(build), make(build)
    return autoparallel.compile(model, loss_fn=options.pop("loss_fn", F.mse_loss), plan=plan, **options), plain


def _steps(model: Any, plain: nn.Module, rows: int = 8) -> float:
    """How far plain steps, with no_sync() and with a window, are from the plain model's; gradients and norms, too."""
    worst = 0.0
    (x, y), (u, v), (s, t) = (batch(n, rows) for n in (1, 2, 3))
    for kind in ("step", "no_sync", "window"):
        model.zero_grad(), plain.zero_grad()
        if kind == "step":
            model(x, y).backward()
            F.mse_loss(plain(x), y).backward()
        elif kind == "no_sync":
            with model.no_sync():
                model(x, y).backward()
            model(u, v).backward()
            (F.mse_loss(plain(x), y) + F.mse_loss(plain(u), v)).backward()
        else:
            for window in model.accumulate(3, [(x, y), (u, v), (s, t)]):
                for a, b in window:
                    model(a, b).backward()
            (sum((F.mse_loss(plain(a), b) for a, b in ((x, y), (u, v), (s, t))), torch.zeros(())) / 3).backward()
        worst = max(worst, gradients_off(model, plain))
        mine, theirs = model.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        worst = max(worst, float((mine - theirs).abs()), gradients_off(model, plain))
    model.zero_grad(), plain.zero_grad()
    return worst


def _backward_that_fails(model: Any) -> None:
    """The gradient of the input fails, which is made when gradients of parameters are on their way already."""
    x, y = batch()
    x = x.clone().requires_grad_()
    x.register_hook(_fail)
    model(x, y).backward()


def _fail(*_: Any) -> None:
    raise Trouble


def _forward_that_fails(model: Any) -> None:
    body = next(iter(model._kinds)).runner
    run, body.body = body.body, _fail
    try:
        model(*batch())
    finally:
        body.body = run


def _hook_that_fails(model: Any) -> None:
    handle = next(model.parameters()).register_hook(_fail)
    try:
        model(*batch()).backward()
    finally:
        handle.remove()


def _step_hook_that_fails(model: Any) -> None:
    handle = next(model.parameters()).register_post_accumulate_grad_hook(_fail)
    try:
        model(*batch()).backward()
    finally:
        handle.remove()


def _clip_that_fails(model: Any) -> None:
    model(*batch()).backward()
    next(model.parameters()).grad.mul_(float("nan"))
    try:
        model.clip_grad_norm_(1.0, nonfinite="raise")
    except RuntimeError:
        raise Trouble from None


def _in_no_sync(model: Any) -> None:
    with model.no_sync():
        model(*batch()).backward()
        _backward_that_fails(model)


def _in_a_window(model: Any, at: int = 1) -> None:
    for window in model.accumulate(3, [batch(n) for n in range(6)]):
        for number, (x, y) in enumerate(window):
            if number == at:
                _backward_that_fails(model)
            model(x, y).backward()


FAILURES: dict[str, Callable[[Any], None]] = {
    "forward": _forward_that_fails,
    "backward": _backward_that_fails,
    "hook": _hook_that_fails,
    "post-accumulate hook": _step_hook_that_fails,
    "clip": _clip_that_fails,
    "no_sync": _in_no_sync,
    "window": _in_a_window,
    "a window's first": lambda model: _in_a_window(model, 0),
    "a window's last": lambda model: _in_a_window(model, 2),
}


def _all_failures(model: Any, plain: nn.Module, clear: dict[str, bool], rows: int = 8) -> dict[str, float]:
    results = {"nothing": _steps(model, plain, rows)}
    for name, fail in FAILURES.items():
        x, y = batch(9)
        x = x.clone().requires_grad_()
        model(x, y)  # this kind of call is known then
        try:
            fail(model)
        except Trouble as error:
            keep = error  # its traceback keeps frames alive
        else:
            keep = None
        assert keep is not None, name
        model.zero_grad(**clear)
        if clear is ZERO:
            model(*batch(1, rows)).backward()
            plain.zero_grad(), F.mse_loss(plain(batch(1, rows)[0]), batch(1, rows)[1]).backward()
            results[f"{name}, zeroed"] = gradients_off(model, plain)
        results[name] = _steps(model, plain, rows)
    return results


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("clear", [NONE, ZERO], ids=["none", "zero"])
@pytest.mark.parametrize("plan", PLANS)
def test_zero_grad_gives_a_clean_state(plan: str, clear: dict[str, bool]) -> None:
    for name, difference in _all_failures(*_alone(plan), clear).items():
        assert difference < 1e-12, (name, difference)


def _on_ranks(plan: str) -> dict[str, float]:
    return _all_failures(*compiled_pair(plan=plan), NONE)


@pytest.mark.wide
@pytest.mark.parametrize("plan", PLANS)
def test_zero_grad_gives_a_clean_state_on_two_ranks(plan: str) -> None:
    for results in run_on_ranks(_on_ranks, plan, world_size=2):
        assert {name: d for name, d in results.items() if d > 1e-12} == {}


# ------------------------------------------------------------------------------------------------------- parameters


def _change(parameter: nn.Parameter, how: str) -> None:
    if how == "optimizer":
        parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD([parameter], lr=0.1).step()
        parameter.grad = None
    else:
        with torch.no_grad():
            parameter.mul_(2)


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("how", ["optimizer", "in place"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_change_between_forward_and_backward_is_refused(plan: str, how: str) -> None:
    model, plain = _alone(plan)
    for one in (model, plain):
        one.zero_grad()
        x, y = batch()
        loss = one(x, y) if one is model else F.mse_loss(one(x), y)
        _change(one.down.weight, how)
        with pytest.raises(RuntimeError, match=r"down\.weight was modified in place|modified by an inplace operation"):
            loss.backward()
    assert _steps(model, plain) < 1e-12


def _through_data() -> float:
    model, plain = compiled_pair(plan="fsdp")
    (x, y), (u, v) = batch(1), batch(2)
    model(x, y), model(u, v)
    model.zero_grad()
    with model.no_sync():
        model(x, y).backward()
        for one in (model, plain):
            for p in one.parameters():
                p.data.mul_(1.5)
        loss = model(u, v)
        loss.backward()
    expected = F.mse_loss(plain(u), v)
    assert float((loss - make(Net)(u).sub(v).square().mean()).abs()) > 1e-3
    return float((loss - expected).abs())


def test_writing_through_data_is_seen_inside_no_sync() -> None:
    for difference in run_on_ranks(_through_data, world_size=2):
        assert difference < 1e-12


def test_a_part_that_is_cast_after_compile_is_an_error() -> None:
    model, _ = _alone("fsdp")
    model(*batch()).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.up.float()
    message = r"up\.weight was given another dtype or layout.*\nWhat to change: cast or move the plain model"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    with pytest.raises(ValueError, match=message):
        model(*batch())


# ----------------------------------------------------------------------------------------------------------- windows


class Tokens(nn.Module):
    """Logits of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


def _sum_and_count(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits, target, reduction="sum"), (target != -100).sum()


def _targets(valid: int) -> Tensor:
    return torch.where(torch.arange(8) < valid, torch.arange(8) % 5, -100)


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, _sum_and_count], ids=["mean", "sum and count"])
@pytest.mark.parametrize("valid", [(0, 0, 0), (3, 0, 5), (0, 4, 0)], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_microbatches_without_a_valid_target_add_nothing(plan: str, valid: tuple[int, ...], loss_fn: Any) -> None:
    model, plain = _alone(plan, Tokens, loss_fn=loss_fn)
    batches = [(batch(n)[0], _targets(count)) for n, count in enumerate(valid)]
    for window in model.accumulate(3, batches):
        for x, y in window:
            model(x, y).backward()
    total = sum((F.cross_entropy(plain(x), y, reduction="sum") for x, y in batches), torch.zeros(()))
    (total / max(sum(valid), 1)).backward()
    assert gradients_off(model, plain) < 1e-12
    assert parameters_off(model, plain) == 0.0


# ----------------------------------------------------------------------------------------------------------- threads


def test_a_second_thread_is_refused() -> None:
    model, plain = _alone("fsdp")
    model(*batch())
    runner = next(iter(model._kinds)).runner
    body, inside, done = runner.body, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        inside.set()
        done.wait(10)
        return body(*arguments)

    runner.body = slow
    thread = threading.Thread(target=lambda: model(*batch()))
    thread.start()
    inside.wait(10)
    message = raised(lambda: model(*batch()))
    done.set()
    thread.join()
    runner.body = body
    assert "another thread is in a call of it" in message
    assert _steps(model, plain) < 1e-12
