"""Random numbers are the plain model's under the mode, whatever the plan; they follow torch's seed, and are saved."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from autoparallel.operators import RandomState, plain_randomness
from autoparallel.runtime.ranks.randomness import STREAM
from tests.distributed import run_distributed
from tests.runtime.support import mesh_of


class Noisy(nn.Module):
    """Attention with dropout, dropout between linears, feature dropout, noise, and a sample that carries gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.channels = nn.Dropout(0.3), nn.Dropout1d(0.25)
        self.deviation = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        F.dropout(x, 0.5)  # drawn, and never read
        h = self.drop(F.gelu(self.up(x)))
        h = self.channels(F.rrelu(self.down(h), training=self.training))
        h = h + torch.randn_like(h) * self.deviation.exp() + 0.1 * torch.rand(x.shape[0], 1, 8, dtype=x.dtype)
        keep = torch.bernoulli(torch.sigmoid(h.detach()))
        return (x + h * keep).pow(2).mean()


def noisy() -> nn.Module:
    torch.manual_seed(3)
    return Noisy().double()


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    whole: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        grad = p.grad
        whole[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad  # type: ignore[union-attr]
    return whole


def train(model: nn.Module, states: list[RandomState] | None, steps: int = 3) -> list[dict[str, Any]]:
    """Losses and gradients of some steps; a plain model draws what calls with these states would."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, log = batch(), []
    for step in range(steps):
        if states is None:
            loss = model(x)
            loss.backward()
        else:
            with plain_randomness(states[step]):
                loss = model(x)
                loss.backward()
        log.append({"loss": loss.detach(), **gradients(model)})
        optimizer.step()
        optimizer.zero_grad()
    return log


def require_close(log: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-9) -> None:
    assert len(log) == len(expected)
    for step, wanted in zip(log, expected, strict=True):
        assert step.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (value is None) == (step[name] is None), name
            if value is not None:
                torch.testing.assert_close(step[name], value, rtol=tolerance, atol=tolerance, msg=name)


def reference(seed: int = 11) -> list[dict[str, Any]]:
    return train(noisy(), [RandomState(seed, i) for i in range(3)])


# ----------------------------------------------------------------------------------------------- plans and meshes


def on_mesh(plan: str, shape: tuple[int, ...], options: dict[str, Any]) -> list[dict[str, Any]]:
    model = autoparallel.compile(noisy(), mesh_of(*shape), plan=plan, **options)
    torch.manual_seed(11 + torch.distributed.get_rank())  # the first rank's counts
    return train(model, None)


def test_one_rank_draws_what_the_plain_model_does() -> None:
    (log,) = run_distributed(on_mesh, "auto", (1,), {}, world_size=1)
    require_close(log, reference())
    with pytest.raises(AssertionError):
        require_close(log, reference(12))


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", ["data_parallel", "fsdp", "tensor_parallel", "auto"])
def test_two_ranks_draw_what_the_plain_model_does(plan: str) -> None:
    for log in run_distributed(on_mesh, plan, (2,), {}, world_size=2):
        require_close(log, reference())


# ------------------------------------------------------------------------------------- seeds, positions, state dicts


class Mask(nn.Module):
    """Shows what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=torch.float64))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x * self.weight)


class Still(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _mask(model: nn.Module) -> tuple[bool, ...]:
    return tuple((model(torch.ones(4, 64, dtype=torch.float64)).detach() != 0).flatten().tolist())


def seeds() -> dict[str, Any]:
    """Whether calls drew the same, by what was done between them."""
    model = autoparallel.compile(Mask(), mesh_of(1))
    torch.manual_seed(5)
    first, second = _mask(model), _mask(model)
    results: dict[str, Any] = {"another call": first != second}
    torch.manual_seed(5)
    results["the same seed again"] = (_mask(model), _mask(model)) == (first, second)
    torch.manual_seed(6)
    other = _mask(model)
    results["another seed"] = other not in (first, second)
    torch.manual_seed(5)
    results["draws of others"] = _mask(model) == first and torch.randn(3) is not None and _mask(model) == second
    replays = []
    for _ in range(2):
        torch.manual_seed(5)
        torch.randn(7)
        replays.append((_mask(model), _mask(model)))
    results["the same seed and the same draws of others"] = replays[0] == replays[1]
    torch.manual_seed(5)
    _mask(model)
    with torch.random.fork_rng():
        torch.manual_seed(6)
        results["inside of a fork"] = _mask(model) == other
    results["after a fork"] = _mask(model) == second
    saved = torch.get_rng_state()
    following = _mask(model), _mask(model)
    torch.set_rng_state(saved)
    results["a state set back"] = (_mask(model), _mask(model)) == following
    model.eval()
    model.drop.train()  # type: ignore[union-attr]
    results["Monte Carlo dropout"] = _mask(model) != _mask(model)
    model.eval()
    place = STREAM.place()
    results["nothing is drawn"] = all(_mask(model)) and STREAM.place() == place
    built = []
    for _ in range(2):
        torch.manual_seed(5)
        torch.randn(9)
        fresh = autoparallel.compile(Mask(), mesh_of(1))
        torch.randn(len(built))
        built.append((_mask(fresh), _mask(fresh)))
    results["a model that is seeded, built and compiled again"] = built[0] == built[1] == (first, second)
    state = model.train().state_dict()
    upcoming = _mask(model), _mask(model)
    torch.manual_seed(77)
    again = autoparallel.compile(Mask(), mesh_of(1))
    again.load_state_dict(state)
    results["a resumed run"] = (_mask(again), _mask(again)) == upcoming
    torch.manual_seed(5)
    results["a seed after a resume"] = _mask(again) == first
    results["entries"] = sorted(state), sorted(autoparallel.compile(Still(), mesh_of(1)).state_dict())
    del state["_extra_state"]
    results["without an entry"] = str(again.load_state_dict(state))
    return results


def test_seeds_and_states() -> None:
    (results,) = run_distributed(seeds, world_size=1)
    assert results.pop("entries") == (["_extra_state", "weight"], ["weight"])
    assert results.pop("without an entry") == "<All keys matched successfully>"
    assert {name for name, right in results.items() if not right} == set()


def interrupted(path: str, shape: tuple[int, ...], plan: str, resume: bool) -> list[dict[str, Any]]:
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(4)
    model = autoparallel.compile(noisy(), mesh_of(*shape), plan=plan)
    torch.manual_seed(11 + torch.distributed.get_rank())
    if not resume:
        train(model, None, steps=1)
        dcp.save(model.state_dict(), checkpoint_id=path)
    else:
        model.prepare(batch())
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state)
        torch.rand(7)
    return train(model, None, steps=2)


@pytest.mark.wide
def test_a_run_that_is_resumed_on_another_mesh_draws_on(tmp_path: Any) -> None:
    path = str(tmp_path / "checkpoint")
    for log in run_distributed(interrupted, path, (2,), "fsdp", False, world_size=2):
        require_close(log, reference()[1:])
    (log,) = run_distributed(interrupted, path, (1,), "auto", True, world_size=1)
    require_close(log, reference()[1:])


# -------------------------------------------------------------------------------------- recomputation and pipelines


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) + 0.1 * torch.randn_like(x)
        return x


def stack() -> nn.Module:
    torch.manual_seed(3)
    return Stack().double()


def both_backwards_late(recompute: list[str] | None) -> list[dict[str, Any]]:
    """Two forwards, then their backwards, the first one last; the regions run again with their own numbers."""
    model = autoparallel.compile(stack(), mesh_of(1))
    if recompute is not None:
        import dataclasses

        model.prepare(batch()[:, 0])
        plan = dataclasses.replace(model.plan, recompute=dict.fromkeys(recompute, "full"))
        model = autoparallel.compile(stack(), mesh_of(1), plan=plan)
    torch.manual_seed(11)
    first, second = model(batch()[:, 0]).pow(2).mean(), model(batch()[:, 0]).pow(2).mean()
    second.backward()
    later = gradients(model)
    model.zero_grad()
    first.backward()
    return [gradients(model), later]


def plain_backwards() -> list[dict[str, Any]]:
    log = []
    for position in range(2):
        model, x = stack(), batch()[:, 0]
        with plain_randomness(RandomState(11, position)):
            model(x).pow(2).mean().backward()
        log.append(gradients(model))
    return log


@pytest.mark.parametrize("recompute", [None, ["layers.1", "layers.2"]])
def test_a_backward_sees_the_numbers_of_its_own_forward(recompute: list[str] | None) -> None:
    (log,) = run_distributed(both_backwards_late, recompute, world_size=1)
    require_close(log, plain_backwards())


def pipelined() -> list[dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    options = autoparallel.Pipeline(microbatches=4)
    model = autoparallel.compile(stack(), mesh, loss_fn=F.mse_loss, pipeline=options)
    torch.manual_seed(11)
    log = []
    for _ in range(2):
        loss = model(batch()[:, 0], torch.zeros(8, 8, dtype=torch.float64))
        loss.backward()
        log.append({"loss": loss.detach(), **gradients(model)})
        model.zero_grad()
    return log


@pytest.mark.wide
def test_microbatches_draw_what_the_whole_batch_does() -> None:
    expected = []
    for position in range(2):
        model, x = stack(), batch()[:, 0]
        with plain_randomness(RandomState(11, position)):
            loss = model(x).pow(2).mean()
            loss.backward()
        expected.append({"loss": loss.detach(), **gradients(model)})
    logs = run_distributed(pipelined, world_size=2)
    for step in range(2):
        made = [{name: value for name, value in log[step].items() if value is not None} for log in logs]
        assert made[0].keys() | made[1].keys() == expected[step].keys()
        for part in made:
            require_close([part], [{name: expected[step][name] for name in part}])


# ---------------------------------------------------------------------------------------- numbers drawn one by one


class Skipping(nn.Module):
    """Layers that are skipped at random: by Python, by numpy, by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        draws = (random.random(), np.random.uniform(-1, 1), torch.rand([]))
        for layer, number, rate in zip(self.layers, draws, (0.5, 0.0, 0.5), strict=True):
            if number < rate:
                x = F.dropout(layer(x).tanh(), 0.1)
        return self.last(x * random.uniform(1, 2)).pow(2).mean()


def skipping(plan: str, world: int) -> tuple[list[dict[str, Any]], int]:
    """Losses and gradients, of ranks that have seeded Python's generators each on its own; and how many programs."""
    torch.manual_seed(3)
    model = autoparallel.compile(Skipping().double(), mesh_of(world), plan=plan)
    torch.manual_seed(5)
    rank = torch.distributed.get_rank()
    random.seed(11 + rank)
    np.random.seed(11 + rank)
    return train(model, None, 6), len(model._kinds)


@pytest.mark.wide
def test_layers_are_skipped_by_what_the_first_rank_draws() -> None:
    """Ranks that are seeded differently go one way; the layers that it skips have no gradients."""
    torch.manual_seed(3)
    plain = Skipping().double()
    random.seed(11)
    np.random.seed(11)
    expected = train(plain, [RandomState(5, step) for step in range(6)], 6)
    skipped = [tuple(name for name, gradient in row.items() if gradient is None) for row in expected]
    assert len(set(skipped)) > 2 and any(skipped)
    for log, kinds in run_distributed(skipping, "fsdp", 2, world_size=2):
        require_close(log, expected)
        assert kinds == len(set(skipped))
