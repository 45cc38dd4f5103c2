"""What is clipped besides: through torch's own functions, gradients that the user has changed, and bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.runtime.support import Net, batch, compiled_pair, gradients_off, mesh_of, off, raised, run_on_ranks, whole
from tests.runtime.test_clipping import MESHES, backward
from tests.runtime.test_norm import NORMS

# ------------------------------------------------------------------------------------------------ torch's own functions


def _torchs_own(shape: tuple[int, ...], plan: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    model, plain = compiled_pair(Net, *shape, plan=plan)
    for p in NORMS:
        backward(model, plain)
        grads = [q.grad for q in model.parameters()]
        results[f"total norm p={p:g}"] = off(nn.utils.get_total_norm(grads, p), model.grad_norm(p))
        theirs = nn.utils.clip_grad_norm_(model.parameters(), 0.05, p)
        results[f"norm p={p:g}"] = off(theirs, nn.utils.clip_grad_norm_(plain.parameters(), 0.05, p))
        results[f"clipped p={p:g}"] = gradients_off(model, plain)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, p), model.clip_grad_norm_(0.005, p)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01, p), nn.utils.clip_grad_norm_(plain.parameters(), 0.005, p)
        results[f"both in turn p={p:g}"] = gradients_off(model, plain)
    backward(model, plain)
    nn.utils.clip_grad_value_(model.parameters(), 0.01), nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    results["value"] = gradients_off(model, plain)
    model.zero_grad(), plain.zero_grad()
    x, y = batch(1)
    with model.no_sync():
        model(x, y).backward()
    F.mse_loss(plain(x), y).backward()
    pending = [q.grad for q in model.parameters()]
    results["pending"] = any(pl.is_partial() for g in pending for pl in g.placements)
    expected = nn.utils.get_total_norm([q.grad for q in plain.parameters()])
    results["norm of pending"] = off(nn.utils.get_total_norm(pending), expected)
    results["ours of pending"] = off(model.grad_norm(), expected)
    return results


@pytest.mark.wide_where(lambda shape: shape != (2,))
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_torchs_own_clipping_works_on_our_parameters(shape: tuple[int, ...]) -> None:
    """Gradients are ``DTensor``s of one mesh, and torch clips those. The norm that it returns is a ``DTensor``."""
    for results in run_on_ranks(_torchs_own, shape, MESHES[shape], world_size=math.prod(shape)):
        assert results.pop("pending"), "gradients under no_sync are summands, which torch reduces for its norm"
        assert all(far < 1e-9 for far in results.values()), results


# ------------------------------------------------------------------------------------------------------------ bad input


def _bad() -> dict[str, str]:
    import autoparallel
    from tests.runtime.support import make

    results: dict[str, str] = {}
    model, plain = compiled_pair(Net, 2, 2, plan="fsdp")
    other, _ = compiled_pair(Net, 2, 2, plan="fsdp")
    results["before any backward"] = raised(lambda: model.grad_norm())
    backward(model, plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixed = torch.optim.SGD([{"params": [*model.parameters(), *other.parameters()], "max_norm": 1.0}], lr=0.1)
    negative = torch.optim.SGD([{"params": list(model.parameters()), "max_norm": -1.0}], lr=0.1)
    actions: dict[str, Callable[[], Any]] = {
        "p of zero": lambda: model.grad_norm(0.0),
        "nan p": lambda: model.grad_norm(math.nan),
        "negative limit": lambda: model.clip_grad_norm_({"*": -1.0}),
        "nan limit": lambda: model.clip_grad_norm_({"up.*": 1.0, "*": math.nan}),
        "empty limits": lambda: model.clip_grad_norm_({}),
        "unknown pattern": lambda: model.clip_grad_norm_({"encoder.*": 1.0}),
        "unknown group": lambda: model.grad_norm(groups={"a": ["up.*", "middle.*"]}),
        "groups of a wrong word": lambda: model.grad_norm(groups="layer"),
        "groups of a wrong type": lambda: model.grad_norm(groups=["up.*"]),
        "pattern of a wrong type": lambda: model.grad_norm(groups={"a": [1]}),
        "policy": lambda: model.clip_grad_norm_(1.0, nonfinite="ignore"),
        "optimizer without limits": lambda: model.clip_grad_norm_(optimizer),
        "optimizer of two models": lambda: model.clip_grad_norm_(mixed),
        "optimizer with a negative limit": lambda: model.clip_grad_norm_(negative),
        "limit of compile": lambda: autoparallel.compile(make(), mesh_of(2, 2), clip_grad_norm=-1.0),
        "limits of compile": lambda: autoparallel.compile(make(), mesh_of(2, 2), clip_grad_norm={"*": math.nan}),
        "optimizer of compile": lambda: autoparallel.compile(make(), mesh_of(2, 2), clip_grad_norm=optimizer),
        "pattern of compile": lambda: autoparallel.compile(make(), mesh_of(2, 2), clip_grad_norm={"x.*": 1.0}),
    }
    with autoparallel.count_traffic() as sent:
        results |= {name: raised(action) for name, action in actions.items() if "compile" not in name}
    results["sent"] = str(sent.total_collectives)
    results |= {name: raised(action) for name, action in actions.items() if "compile" in name}
    with model.no_sync():
        results["inside no_sync"] = raised(lambda: model.grad_norm())
    return results


BAD = {
    "before any backward": r"RuntimeError: grad_norm\(\) before any backward",
    "inside no_sync": r"RuntimeError: grad_norm\(\) inside no_sync",
    "p of zero": "ValueError: norm_type must be positive or inf",
    "nan p": "ValueError: norm_type must be positive or inf",
    "negative limit": "ValueError: max_norm must not be negative",
    "nan limit": "ValueError: max_norm must not be negative, got nan",
    "empty limits": "ValueError: max_norm is an empty mapping",
    "unknown pattern": r"ValueError: no parameter matches 'encoder.\*'; names are such as 'up.weight'",
    "unknown group": r"ValueError: no parameter matches 'middle.\*'",
    "groups of a wrong word": "ValueError: groups must be 'module', 'parameter' or a mapping, got 'layer'",
    "groups of a wrong type": "TypeError: groups must be 'module', 'parameter' or a mapping, not a list",
    "pattern of a wrong type": "TypeError: a pattern of parameter names must be text",
    "policy": "ValueError: nonfinite must be one of propagate, skip, raise, got 'ignore'",
    "optimizer without limits": r'ValueError: no group of the optimizer has a limit: set group\["max_norm"\]',
    "optimizer of two models": r"ValueError: param_groups\[0\] holds a parameter that is not the compiled model's",
    "optimizer with a negative limit": "ValueError: max_norm must not be negative",
    "limit of compile": "ValueError: max_norm must not be negative",
    "limits of compile": "ValueError: max_norm must not be negative, got nan",
    "optimizer of compile": "TypeError: clip_grad_norm must be a number or limits by pattern",
    "pattern of compile": r"ValueError: no parameter matches 'x.\*'",
    "sent": "0",
}


@pytest.fixture(scope="module")
def bad() -> list[dict[str, str]]:
    return run_on_ranks(_bad, world_size=4)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_on_every_rank(case: str, bad: list[dict[str, str]]) -> None:
    import re

    for rank in bad:
        assert re.match(BAD[case], rank[case]), rank[case]


def _replaced() -> dict[str, Any]:
    import autoparallel

    results: dict[str, Any] = {}
    model, plain = compiled_pair(Net, 2, 2, plan="fsdp")
    weight, other = model.up.weight, plain.up.weight

    def attempt(name: str, change: Callable[[], None], action: Callable[[], Any]) -> None:
        backward(model, plain)
        change()
        with autoparallel.count_traffic() as sent:
            results[name] = raised(action), sent.total_collectives

    def replace(make: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        def change() -> None:
            gradient = make(whole(weight.grad))
            weight.grad = None
            weight.grad = gradient

        return change

    def clip() -> Any:
        return model.clip_grad_norm_(0.05)

    def elsewhere(g: Tensor) -> Tensor:
        return distribute_tensor(g, mesh_of(4), [weight.placements[0]])

    placed: dict[str, Callable[[Tensor], Tensor]] = {
        "other placements": lambda g: distribute_tensor(g, weight.device_mesh),
        "another mesh": elsewhere,
        "plain": lambda g: g,
    }
    for name, make in placed.items():
        attempt(name, replace(make), clip)
        attempt(f"{name}, value", replace(make), lambda: model.clip_grad_value_(0.1))

    for name, make in {
        "modified in place": None,
        "replaced alike": lambda g: distribute_tensor(g * 3, weight.device_mesh, weight.placements),
        "replaced by arithmetic": lambda g: weight.grad * 3,
    }.items():
        backward(model, plain)
        if make is None:
            weight.grad.mul_(3)
        else:
            weight.grad = make(whole(weight.grad))
        other.grad.mul_(3)
        norm, expected = model.clip_grad_norm_(0.05), nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        results[name] = max(off(norm, expected), gradients_off(model, plain))

    model.zero_grad(), plain.zero_grad()
    x, y = batch(0)
    with model.no_sync():
        (model(x, y) / 2).backward()
        weight.grad.mul_(3)  # a summand, scaled
    (F.mse_loss(plain(x), y) / 2).backward()
    other.grad.mul_(3)
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    results["modified in a window"] = off(model.grad_norm(), expected)
    model.zero_grad()
    with model.no_sync():
        model(x, y).backward()
    pending: DTensor = weight.grad
    results["is a summand"] = any(p.is_partial() for p in pending.placements)
    weight.grad = pending.redistribute(placements=weight.placements)
    with autoparallel.count_traffic() as sent:
        text = raised(clip)
    results["whole in a window"] = text, sent.total_collectives
    results["rank"] = dist.get_rank()
    return results


def test_gradients_that_the_user_changed_count_or_are_refused() -> None:
    seen = run_on_ranks(_replaced, world_size=4)
    for results in seen:
        results.pop("rank")
        for name in ("modified in place", "replaced alike", "replaced by arithmetic", "modified in a window"):
            assert results[name] < 1e-9, (name, results[name])
        assert results.pop("is a summand")
        for name in ("other placements", "another mesh", "plain", "whole in a window"):
            text, sent = results[name]
            assert text.startswith("RuntimeError: clip_grad_norm_(): the gradient of up.weight was replaced"), text
            assert sent == 0, "before any collective"
        assert results["other placements, value"][0].startswith("RuntimeError: clip_grad_value_(): the gradient of")
        assert "p.grad = None" in results["whole in a window"][0]
        assert "distribute_tensor" in results["plain"][0]
