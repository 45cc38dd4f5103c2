"""What a loop keeps of parameters and gradients has their values, or says that it has those of then."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoparallel
from tests.runtime.support import mesh_of, off, parameters_off, raised, run_on_ranks

WIDTH = 6


def _pair(plan: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()
    return plain, autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan=plan)


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda p: p,
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "transpose": lambda p: p.detach().t(),
    "row": lambda p: p.detach()[0],
    "element": lambda p: p.detach()[3, 2],
    "flat": lambda p: p.detach().view(-1)[4:30],
    "chunk": lambda p: p.detach().chunk(3)[1],
}
SAME = ("itself", "detach", "data", "transpose")


def _kept(plan: str) -> dict[str, Any]:
    plain, model = _pair(plan)
    both: tuple[Any, ...] = (plain, model)
    x = torch.randn(8, WIDTH, dtype=torch.float64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in both]
    found: dict[str, Any] = {}

    def keep() -> list[dict[str, Tensor]]:
        return [{name: view(m.get_parameter("0.weight")) for name, view in KEPT.items()} for m in both]

    def compare(when: str, plains: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
        for name in KEPT:
            words = raised(lambda name=name: found.__setitem__(f"{name} {when}", off(ours[name], plains[name])))
            if words:
                found[f"{name} {when}"] = words

    def step() -> None:
        for m, optimizer in zip(both, optimizers, strict=True):
            m(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    step()
    kept = keep()
    compare("at once", *kept)
    with torch.no_grad():
        for views in kept:
            views["row"].mul_(2.0)
            views["flat"].add_(1.0)
    compare("after writes to views", *kept)
    step()
    compare("after a step", *kept)
    with torch.no_grad():
        for views in kept:
            views["row"].mul_(2.0)
    compare("after a write to an old view", *kept)
    with torch.no_grad():
        for m in both:
            m.get_parameter("0.weight").mul_(0.5)
            torch._foreach_mul_([m.get_parameter("0.weight")[1]], 3.0)
    found["parameters"] = parameters_off(model, plain)
    for m in both:
        m(x).square().mean().backward()
    rows = [m.get_parameter("0.weight").grad[0] for m in both]
    for m in both:
        m(x).square().mean().backward()
    words = raised(lambda: found.__setitem__("gradient", off(rows[1], rows[0])))
    found["gradient"] = words or found["gradient"]
    return found


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_views_have_the_values_of_now_or_say_that_they_have_not(plan: str) -> None:
    for found in run_on_ranks(_kept, plan, world_size=2):
        refused = {k for k, v in found.items() if isinstance(v, str)}
        assert {k: v for k, v in found.items() if isinstance(v, float) and not v < 1e-12} == {}
        assert all("take it again" in found[k] for k in refused), found
        assert not any(k.startswith(SAME) or k.endswith("at once") for k in refused)
        assert "row after a write to an old view" not in refused
        assert plan != "fsdp" or {"row after a step", "gradient"} <= refused


def test_parameters_of_the_plain_model_say_that_others_are_trained() -> None:
    plain = nn.Linear(WIDTH, 8)
    before = list(plain.parameters())
    graph = before[0].square().sum()
    model = autoparallel.compile(plain)
    model(torch.ones(8, WIDTH)).square().mean().backward()
    for use in (lambda: before[0].detach(), lambda: before[0].sum(), lambda: str(before[0]), lambda: before[0] + 1):
        assert "the plain parameter weight is used" in raised(use)
    assert "a gradient comes to the plain parameter weight" in raised(graph.backward)
    assert before[0].shape == (8, WIDTH) and {p: 1 for p in before}[before[1]] == 1


class Listed(nn.Module):
    """A model that has its weight in a list of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)
        self.weights = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0].T


def test_a_copy_of_a_model_has_its_parameters_in_its_lists() -> None:
    model = autoparallel.compile(Listed())
    x = torch.ones(8, WIDTH)
    model(x).sum().backward()
    twin: Any = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_parameter("layer.weight").mul_(2.0)
    assert off(twin(x), 2 * model(x)) < 1e-6


def _penalty_first(plan: str, accumulates: bool) -> float:
    """A penalty whose backward comes before the model's first call, and before its own in every step."""
    plain, model = _pair(plan)
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    for m in (plain, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            with m.no_sync() if accumulates and m is model else contextlib.nullcontext():
                (0.1 * sum(p.square().sum() for p in m.parameters())).backward()  # type: ignore[union-attr]
                m(x[0]).square().mean().backward()
            m(x[1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters_off(model, plain)


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["synchronising", "no_sync"])
def test_a_penalty_may_come_before_the_model(plan: str, accumulates: bool) -> None:
    assert max(run_on_ranks(_penalty_first, plan, accumulates, world_size=2)) < 1e-12


def _meta(plan: str) -> dict[str, float]:
    """What a loop keeps of a model on the meta device, before it has values."""
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
    model = autoparallel.compile(plain, mesh_of(2), plan=plan)
    kept = {name: KEPT[name](model.get_parameter("0.weight")) for name in ("itself", "detach", "data")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: off(view, model.get_parameter("0.weight")) for name, view in kept.items()}


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_references_to_a_model_on_the_meta_device_get_its_values(plan: str) -> None:
    for found in run_on_ranks(_meta, plan, world_size=2):
        assert max(found.values()) == 0.0, found


ROWS = torch.tensor([[2], [0]])
SELECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows of a list": lambda p: p[[1, 0]],
    "columns": lambda p: p[:, ROWS[:, 0]],
    "index_select": lambda p: p.index_select(0, ROWS[:, 0]),
    "gather": lambda p: p.gather(1, ROWS),
}


def _selected(plan: str) -> dict[str, Any]:
    """What is read at plain indices, and the gradient of it."""
    plain, model = _pair(plan)
    model(torch.ones(8, WIDTH, dtype=torch.float64))
    weights = [m.get_parameter("0.weight") for m in (plain, model)]
    found: dict[str, Any] = {"cut": float(weights[1].to_local().shape == weights[0].shape)}
    for name, select in SELECTED.items():
        values = [select(w) for w in weights]
        for w, value in zip(weights, values, strict=True):
            w.grad = None
            value.square().sum().backward()
        found[name] = max(off(values[1], values[0]), off(weights[1].grad, weights[0].grad))
    with torch.no_grad():
        for w in weights:
            w[[0, 1]] = w[[1, 0]]
    found["exchanged"] = off(weights[1], weights[0])
    ranks_own = torch.tensor([torch.distributed.get_rank()])
    found["other indices"] = float("RankMismatchError" not in raised(lambda: weights[1][ranks_own]))
    return found


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_parameters_are_read_at_plain_indices(plan: str) -> None:
    for found in run_on_ranks(_selected, plan, world_size=2):
        assert max(found.values()) < 1e-12, found


MEASURED: dict[str, Callable[[Tensor], Any]] = {
    "unique": lambda p: torch.unique(p.round(decimals=1), return_counts=True),
    "unique rows": lambda p: torch.unique_consecutive(p.round(), dim=0),
    "where": lambda p: torch.where(p > 0.1),
    "mask": lambda p: (p[p > 0], p.masked_select(p > 0.1)),
    "rows of a mask": lambda p: p[p[:, 0] > 0],
    "histogram": lambda p: (torch.histc(p, 7), *torch.histogram(p, 5)),
    "edges": lambda p: torch.bucketize(p, torch.tensor([-0.1, 0.0, 0.1], dtype=torch.float64)),
    "distances": lambda p: (torch.cdist(p, p), torch.pdist(p)),
    "renorm": lambda p: torch.renorm(p, 2, 0, 0.1),
    "allclose": lambda p: torch.tensor([torch.allclose(p, p + d) for d in (0.0, 1.0)]),
}


def _measured(plan: str) -> dict[str, Any]:
    """What is asked of whole parameters, and of gradients."""
    plain, model = _pair(plan)
    for m in (plain, model):
        m(torch.ones(8, WIDTH, dtype=torch.float64)).square().sum().backward()
    weights = [m.get_parameter("0.weight") for m in (plain, model)]
    found: dict[str, Any] = {}
    for name, measure in MEASURED.items():
        for what, tensors in (("weight", weights), ("gradient", [w.grad for w in weights])):
            expected, values = ([x.double() for x in pytree.tree_leaves(measure(t))] for t in tensors)
            found[f"{name} of a {what}"] = max(off(a, b) for a, b in zip(values, expected, strict=True))
    weights[0].grad = weights[1].grad = None
    for w in weights:
        w[w > 0].square().sum().backward()
    found["gradient of a mask"] = off(weights[1].grad, weights[0].grad)
    with torch.no_grad():
        for w in weights:
            w[w[:, 0] > 0] *= 2
    found["rows of a mask written"] = off(weights[1], weights[0])
    return found


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_what_parts_do_not_tell_is_read_of_the_whole(plan: str) -> None:
    for found in run_on_ranks(_measured, plan, world_size=2):
        assert max(found.values()) < 1e-12, found


FILLED: dict[str, Callable[[Tensor], object]] = {
    "normal_": lambda p: p[0].normal_(),
    "uniform_": lambda p: p[:, 1].uniform_(),
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p[2]),
    "orthogonal_": lambda p: nn.init.orthogonal_(p[1:4]),
    "xavier_uniform_": lambda p: nn.init.xavier_uniform_(p[:3]),
}


def _filled(plan: str) -> dict[str, float]:
    """Parts that are drawn anew, of a second model of the process, too."""
    found: dict[str, float] = {}
    for number in range(2):
        plain, model = _pair(plan)
        model(torch.ones(8, WIDTH, dtype=torch.float64))
        weights = [m.get_parameter("0.weight") for m in (plain, model)]
        for name, fill in FILLED.items():
            for w in weights:
                torch.manual_seed(5)
                with torch.no_grad():
                    fill(w)
            found[f"{name}, model {number}"] = off(weights[1], weights[0])
    return found


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_parts_of_parameters_are_drawn_anew(plan: str) -> None:
    for found in run_on_ranks(_filled, plan, world_size=2):
        assert max(found.values()) < 1e-12, found
