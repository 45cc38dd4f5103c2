"""What a script does by hand with parameters and gradients is what it does to those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.init import orthogonal_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autoparallel
from tests.runtime.support import Net, batch, raised, run_on_ranks, weights, weights_off


def _draw(model: nn.Module) -> Tensor:
    """Draws new weights, some of them from a generator of their own; what the next number after them is."""
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(6)
    for name, p in model.named_parameters():
        nn.init.xavier_uniform_(p) if p.dim() > 1 else nn.init.normal_(p, generator=generator)
        if "up" in name:
            p.data += 0.1 * torch.randn_like(p.data) + F.dropout(p.data, 0.5)
        elif p.dim() > 1:
            nn.init.trunc_normal_(p, std=0.7, a=-0.5, b=0.5)  # drawn again until all are within
    return torch.rand(1)


def _by_hand(axis: str, plan: str) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = Net().double()
    mesh, options = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)), {"plan": plan}
    if axis == "pp":
        options["pipeline"] = autoparallel.Pipeline("1f1b", 2)
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=F.mse_loss, **options)
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (model, plain)]
    x, y = batch(0)
    found: dict[str, Any] = {}

    def compare(what: str, mine: nn.Module = model, theirs: nn.Module = plain) -> None:
        pairs = zip(weights(mine).values(), weights(theirs).values(), strict=True)
        found[what] = max(float((p - q).abs().max()) for p, q in pairs)

    model.prepare(x, y)
    found["the next number"] = float((_draw(model) - _draw(plain)).abs())
    compare("draws")
    for average, m in zip(averages, (model, plain), strict=True):
        average.update_parameters(m)
        with torch.no_grad():
            torch._foreach_mul_(list(m.parameters()), 0.5)
        average.update_parameters(m)
    compare("lists")
    compare("averages", *(average.module for average in averages))
    model(x, y).backward()
    for foreach in (None, False):
        found[f"clip {foreach}"] = raised(
            lambda f=foreach: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=f)  # type: ignore[misc]
        )
    found["joined"] = raised(lambda: torch.nn.utils.parameters_to_vector(model.parameters()))
    elsewhere = next((p.norm() for p in model.parameters() if p.device_mesh.get_coordinate() is None), None)  # type: ignore[attr-defined]
    for read in (DTensor.tolist, DTensor.numpy) if elsewhere is not None else ():
        found[f"{read} elsewhere"] = raised(lambda r=read: r(elsewhere.detach()))  # type: ignore[misc]
    alone = DTensor.from_local(torch.ones(4), DeviceMesh("cpu", [dist.get_rank()], mesh_dim_names=("other",)))
    alone.grad = 2 * alone
    found["of another mesh"] = abs(float(torch.nn.utils.clip_grad_norm_([alone], 1.0)) - 4)
    return found


def _load_from_another_mesh() -> float:
    first, second = (
        autoparallel.compile(
            Net().double(),
            init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)),
            plan=plan,
            example_inputs=batch(0)[:1],
        )
        for axis, plan in (("tp", "tensor_parallel"), ("dp", "fsdp"))
    )
    second.load_state_dict(first.state_dict())
    return weights_off(weights(first), weights(second))


def test_a_state_is_loaded_from_another_mesh() -> None:
    assert run_on_ranks(_load_from_another_mesh, world_size=2) == [0.0, 0.0]


@pytest.mark.parametrize(("axis", "plan"), [("dp", "fsdp"), ("pp", "auto")])
def test_draws_averages_and_lists(axis: str, plan: str) -> None:
    for found in run_on_ranks(_by_hand, axis, plan, world_size=2):
        for what in [name for name in found if "clip" in name]:
            assert ("model.clip_grad_norm_" in (found.pop(what) or "")) == (axis == "pp")
        assert ("tensors of several stages" in (found.pop("joined") or "")) == (axis == "pp")
        for what in [name for name in found if "elsewhere" in name]:
            assert axis == "pp" and "model.full_parameters()" in found.pop(what)
        assert found == dict.fromkeys(found, 0.0)


DRAWS: dict[str, Any] = {
    "exponential_": lambda p: p.exponential_(),
    "geometric_": lambda p: p.geometric_(0.5),
    "cauchy_": lambda p: p.cauchy_(),
    "log_normal_": lambda p: p.log_normal_(),
    "random_": lambda p: p.random_(0, 100),
    "poisson": lambda p: p.copy_(torch.poisson(p.abs() * 3)),
    "normal of means": lambda p: p.copy_(torch.normal(p, p.abs())),
    "rrelu": lambda p: p.copy_(F.rrelu(p, training=True)),
    "of a row": lambda p: p[0].exponential_(),
    "of a transpose": lambda p: p.t().normal_(),
    "gumbel_softmax": lambda p: p.copy_(F.gumbel_softmax(p)),
    "multinomial": lambda p: p.copy_(torch.multinomial(p.abs(), 8).double()),
    "eye_": nn.init.eye_,
    "orthogonal_": nn.init.orthogonal_,
    "orthogonal_ from before": orthogonal_,
    "a wide orthogonal_ from before": lambda p: p[:4].copy_(orthogonal_(p[:4].clone())),
}
"""What is drawn, or made, of a weight, of which torch's ``DTensor`` does not know that it is of the whole."""


def _other_draws(plan: str) -> dict[str, float]:
    plain = nn.Linear(8, 8).double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = autoparallel.compile(copy.deepcopy(plain), mesh, plan=plan)
    model.prepare(torch.randn(4, 8, dtype=torch.float64))
    found: dict[str, float] = {"cut": float("S" not in str(model.weight.placements))}
    for name, draw in DRAWS.items():
        for m in (model, plain):
            torch.manual_seed(3)
            with torch.no_grad():
                m.weight.copy_(torch.arange(64, dtype=torch.float64).view(8, 8).sin())
                draw(m.weight)
        found[name] = float((model.weight.full_tensor() - plain.weight).detach().abs().max())
        found[f"the number after {name}"] = float(torch.rand(1) - torch.rand(1, generator=_after(draw)))
    with torch.no_grad():
        turned = raised(lambda: model.weight.t_())
    found["turned"] = float("change it in the plain model" not in (turned or ""))
    wide = torch.empty(4, 8, dtype=torch.float64)
    cut = distribute_tensor(wide.clone(), mesh, [Shard(1)])
    for tensor in (wide, cut):
        torch.manual_seed(3)
        nn.init.orthogonal_(tensor, gain=2.0)
    found["a wide orthogonal_"] = float((cut.full_tensor() - wide).abs().max())
    return found


def _after(draw: Any) -> torch.Generator:
    """A generator that stands where one process's does when it has drawn."""
    state = torch.get_rng_state()
    torch.manual_seed(3)
    draw(torch.arange(64, dtype=torch.float64).view(8, 8).sin())
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    torch.set_rng_state(state)
    torch.rand(1)
    return generator


@pytest.mark.parametrize("plan", ["fsdp", pytest.param("tensor_parallel", marks=pytest.mark.wide)])
def test_all_draws_are_of_the_whole(plan: str) -> None:
    for found in run_on_ranks(_other_draws, plan, world_size=2):
        assert found == dict.fromkeys(found, 0.0)


def _references(plan: str, axis: str) -> dict[str, Any]:
    """Tensors that share a parameter's memory, taken before it has its layout."""
    torch.manual_seed(0)
    plain = Net().double()
    options = {"pipeline": autoparallel.Pipeline("1f1b", 2)} if axis == "pp" else {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    model: Any = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=F.mse_loss, plan=plan, **options)
    states = [m.state_dict() for m in (model, plain)]
    turned = [m.up.weight.detach().t() for m in (model, plain)]  # it is square
    lists = [[p.data for p in m.parameters()] for m in (model, plain)]
    x, y = batch(0)
    for m, values in zip((model, plain), lists, strict=True):
        loss = m(x, y) if m is model else F.mse_loss(m(x), y)
        loss.backward()
        torch.optim.SGD(m.parameters(), lr=0.5).step()
        for value in values:
            value.clamp_(-0.2, 0.2)
    largest = [max(float(p.abs().max()) for p in weights(m).values()) for m in (model, plain)]
    here = [n for n, p in model.named_parameters() if p.device_mesh.get_coordinate() is not None]
    return {
        "parameters": weights_off(weights(model), weights(plain)),
        "turned": float(axis == "dp" and "before the model's first call" not in raised(turned[0].sum)),
        "clamped": abs(largest[1] - 0.2),
        "states": max(float((states[0][n].full_tensor() - states[1][n]).abs().max()) for n in here),
    }


@pytest.mark.parametrize(
    ("plan", "axis"), [("fsdp", "dp"), pytest.param("tensor_parallel", "dp", marks=pytest.mark.wide), ("auto", "pp")]
)
def test_references_taken_before_the_first_call_stay_references(plan: str, axis: str) -> None:
    for found in run_on_ranks(_references, plan, axis, world_size=2):
        assert max(found.values()) < 1e-12, found


def _copy_plain(axis: str) -> dict[str, float]:
    options = {"pipeline": autoparallel.Pipeline("1f1b", 2)} if axis == "pp" else {"plan": "fsdp"}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    model = autoparallel.compile(Net(), mesh, loss_fn=F.mse_loss, **options)
    model.prepare(*batch(0, dtype=torch.float32))
    p, value = model.up.weight, torch.arange(64.0).view(8, 8)
    with torch.no_grad():
        p.copy_(5 * value)
    found = {"plain": float((weights(model)["up.weight"] - 5 * value).abs().max())}
    with torch.no_grad():
        p.copy_(distribute_tensor(value, p.device_mesh, p.placements))
    found["copied"] = float((weights(model)["up.weight"] - value).abs().max())
    with torch.no_grad(), implicit_replication():
        p.copy_(3 * value)
    found["replicated"] = float((weights(model)["up.weight"] - 3 * value).abs().max())
    with torch.no_grad():
        p.copy_(torch.tensor(0.5))
    found["a number"] = float((weights(model)["up.weight"] - 0.5).abs().max())
    model.load_state_dict({"up.weight": 2 * value}, strict=False)
    found["loaded"] = float((weights(model)["up.weight"] - 2 * value).abs().max())
    return found


def _lists_with_plain_tensors() -> dict[str, float]:
    """A temperature beside the model is clipped with it, and buffers are averaged with its parameters."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    model = autoparallel.compile(
        copy.deepcopy(plain), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), plan="fsdp"
    )
    x, found = torch.randn(8, 8, dtype=torch.float64), {}
    norms, scales, averages = [], [], []
    for m in (model, plain):
        scale = nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))
        average = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        (m(x).square().mean() * scale.sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([*m.parameters(), scale], 0.1)))
        torch.optim.SGD([*m.parameters(), scale], lr=0.5).step()
        average.update_parameters(m)
        average.update_parameters(m)
        scales.append(scale.detach())
        averages.append(average.module)
    found["norm"] = abs(norms[0] - norms[1])
    found["scale"] = float((scales[0] - scales[1]).abs().max())
    found["weights"] = weights_off(weights(model), weights(plain))
    found["averages"] = weights_off(weights(averages[0]), weights(averages[1]))
    found["buffers"] = max(
        float((a - b).abs().max()) for a, b in zip(averages[0].buffers(), averages[1].buffers(), strict=True)
    )
    return {name: off for name, off in found.items() if off > 1e-9} | {"was clipped": float(norms[1] > 0.1)}


def test_lists_that_hold_plain_tensors_too() -> None:
    assert run_on_ranks(_lists_with_plain_tensors, world_size=2) == [{"was clipped": 1.0}] * 2


@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_a_plain_tensor_is_copied_to_a_parameter(axis: str) -> None:
    for found in run_on_ranks(_copy_plain, axis, world_size=2):
        assert found == dict.fromkeys(("plain", "copied", "replicated", "a number", "loaded"), 0.0)


def _fill_diagonal(axis: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    model = autoparallel.compile(Net().double(), mesh, loss_fn=F.mse_loss, plan="auto" if axis == "pp" else "fsdp")
    model(*batch(1)).backward()
    weight = model.get_parameter("up.weight")
    with torch.no_grad():
        weight.diagonal().fill_(0)
        return raised(lambda: weight.fill_diagonal_(0))


@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_a_diagonal_is_filled_through_its_view_alone(axis: str) -> None:
    for message in run_on_ranks(_fill_diagonal, axis, world_size=2):
        assert "fill_diagonal_" in message and "What to change: p.diagonal().fill_(0)" in message
