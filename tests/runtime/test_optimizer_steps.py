"""Steps run on plain tensors: bit for bit what torch computes there, and nobody but the step itself sees them."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel import _torch
from tests.runtime.support import Net, batch, compiled_pair, parameters_off, raised, run_on_ranks
from tests.runtime.test_clipping import backward


class Lion(torch.optim.Optimizer):
    """Signs of momentum, with a count of steps that is a number."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                p.add_(momentum.lerp(p.grad, 0.1).sign_(), alpha=-group["lr"] / state["count"])
                momentum.lerp_(p.grad, 0.01)


class Lamb(torch.optim.Optimizer):
    """Updates in proportion to the parameter's norm; keeps a matrix, an average as large as it and a number."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["average"] = 0, torch.zeros_like(p)
                    state["rows"] = p.new_zeros(p.shape[0], 3)
                state["count"] += 1
                state["average"].lerp_(p.grad, 0.5)
                state["rows"] += p.grad.reshape(p.shape[0], -1).norm(dim=1, keepdim=True)
                update = state["average"] / (1 + state["rows"].sum()) + p.grad / p.grad.norm()
                p.add_(update, alpha=-group["lr"] * float(p.norm() / update.norm()) / state["count"])


def _shards(model: nn.Module) -> list[nn.Parameter]:
    """This rank's parts as plain parameters, with their gradients."""
    found = []
    for p in model.parameters():
        assert isinstance(p, DTensor)
        new = nn.Parameter(p.to_local().detach().clone())
        new.grad = p.grad.to_local().clone() if isinstance(p.grad, DTensor) else None
        found.append(new)
    return found


def _bits(shape: tuple[int, ...]) -> dict[str, bool]:
    """Against the same optimizer on plain tensors that are this rank's parts."""
    results: dict[str, bool] = {}
    model, _ = compiled_pair(lambda: Net(8, 6), *shape, plan="fsdp", dtype=torch.float32)
    for kind, options in (
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.Rprop, {}),
        (torch.optim.NAdam, {"foreach": True}),
    ):
        optimizer = kind(model.parameters(), lr=0.01, **options)  # type: ignore[operator]
        other: Any = None
        for step in range(3):
            model.zero_grad()
            model(*batch(step, dtype=torch.float32)).backward()
            shards = _shards(model)
            if other is None:
                other = kind(shards, lr=0.01, **options)  # type: ignore[operator]
            for p, new in zip(other.param_groups[0]["params"], shards, strict=True):
                p.grad = new.grad
            optimizer.step(), other.step()
            mine, theirs = optimizer.state_dict(), other.state_dict()
            results[f"{kind.__name__} {step}"] = all(
                torch.equal(a.to_local(), b)
                for a, b in zip(model.parameters(), other.param_groups[0]["params"], strict=True)
            )
            results[f"{kind.__name__} {step} state"] = all(
                torch.equal(a.to_local() if isinstance(a, DTensor) else a, b)
                for i in theirs["state"]
                for a, b in zip(mine["state"][i].values(), theirs["state"][i].values(), strict=True)
            )
            results[f"{kind.__name__} {step} lies"] = all(
                isinstance(v, DTensor) == (k not in ("step", "mu_product")) for s in mine["state"].values()
                for k, v in s.items()
            )  # fmt: skip
            results[f"{kind.__name__} {step} gradients"] = all(
                isinstance(p.grad, DTensor) and p.to_local().grad is None for p in model.parameters()
            )
    return results


@pytest.mark.wide_where(lambda shape: shape != (2,))
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_elements_are_updated_bit_for_bit_as_in_plain_tensors(shape: tuple[int, ...]) -> None:
    for results in run_on_ranks(_bits, shape, world_size=torch.Size(shape).numel()):
        wrong = [name for name, right in results.items() if not right]
        assert not wrong, wrong


def _disturbed() -> dict[str, bool]:
    """Steps between which something changes that decides what a step gathers; whether each was gathered anew."""
    model, _ = compiled_pair(lambda: Net(8, 6), 2, plan="fsdp", dtype=torch.float32)
    model(*batch(0, dtype=torch.float32))
    results: dict[str, bool] = {}
    for kind, options, changed in (
        (torch.optim.AdamW, {"fused": True}, {"lr": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True}, {"fused": True}),
        (torch.optim.SGD, {}, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"momentum": 0.9}, {"momentum": 0.0}),
    ):
        plain = [nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]  # type: ignore[attr-defined]
        optimizers = [kind(some, lr=0.01, **options) for some in (list(model.parameters()), plain)]  # type: ignore[operator]
        for step in range(12):
            model.zero_grad()
            model(*batch(step, dtype=torch.float32)).backward()
            if step in (4, 5):
                model.up.bias.grad = None
            for p, new in zip(model.parameters(), plain, strict=True):
                new.grad = p.grad.to_local().clone() if isinstance(p.grad, DTensor) else None
            for optimizer in optimizers:
                if step == 7:
                    optimizer.param_groups[0].update(changed)
                if step == 10:
                    for state in optimizer.state.values():
                        state |= {k: v.clone() if v.ndim else v + 1 for k, v in state.items()}
            with mock.patch.object(_torch.optim, "refill", wraps=_torch.optim.refill) as kept:
                optimizers[0].step()
            optimizers[1].step()
            results[f"{kind.__name__} {step}"] = all(
                torch.equal(p.to_local(), new)  # type: ignore[attr-defined]
                for p, new in zip(model.parameters(), plain, strict=True)
            )
            if step in (3, 6, 9):  # a gradient that was missing is there again at 6
                results[f"{kind.__name__} {step} is kept"] = kept.called == (step != 6)
        model.up.bias.grad = torch.zeros(6)
        results[f"{kind.__name__} refuses"] = "replaced by a plain tensor" in raised(optimizers[0].step)
    return results


def test_what_a_step_gathers_is_kept_until_something_changes() -> None:
    for results in run_on_ranks(_disturbed, world_size=2):
        wrong = [name for name, right in results.items() if not right]
        assert not wrong, wrong


def _own(shape: tuple[int, ...]) -> dict[str, Any]:
    """Optimizers of users, with scheduler, groups, a state that is saved and loaded, and parameters left out."""
    results: dict[str, Any] = {}
    for kind, per in ((Lion, "element"), (Lamb, "parameter")):
        autoparallel.register_optimizer(kind, per=per)  # type: ignore[arg-type]
        for build in (Net, lambda: Net(8, 7, 4)):  # seven rows lie unevenly
            model, plain = compiled_pair(build, *shape, plan="fsdp")
            optimizers, schedulers = [], []
            for m in (model, plain):
                groups: Any = [{"params": [m.up.weight, m.up.bias], "lr": 0.1}, {"params": list(m.down.parameters())}]
                optimizers.append(kind(groups))
                schedulers.append(torch.optim.lr_scheduler.StepLR(optimizers[-1], 1, 0.5))
            for step in range(4):
                backward(model, plain, step)
                if step == 1:
                    model.up.bias.grad = plain.up.bias.grad = None
                for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                    optimizer.step(), scheduler.step()
                if step == 2:
                    saved = copy.deepcopy(optimizers[0].state_dict())
                    optimizers[0].state.clear()
                    optimizers[0].load_state_dict(saved)
            state = optimizers[0].state[model.up.weight]
            results[f"{kind.__name__} {build} far"] = parameters_off(model, plain)
            results[f"{kind.__name__} {build} count"] = abs(state["count"] - 4) + (type(state["count"]) is not int)
            results[f"{kind.__name__} {build} groups"] = float(
                [g.get("steps") for g in optimizers[0].param_groups]
                != [g.get("steps") for g in optimizers[1].param_groups]
            )
            lie = {k: isinstance(v, DTensor) for k, v in state.items() if isinstance(v, Tensor)}
            results[f"{kind.__name__} {build} lie"] = float(
                lie != ({"momentum": True} if kind is Lion else {"average": True, "rows": False})
            )
    return results


@pytest.mark.wide_where(lambda shape: shape != (2,))
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_registered_optimizers_equal_one_process(shape: tuple[int, ...]) -> None:
    for results in run_on_ranks(_own, shape, world_size=torch.Size(shape).numel()):
        assert all(far < 1e-9 for far in results.values()), results


def _seen() -> dict[str, Any]:
    """What hooks, closures and exceptions see of a step: DTensors, and its results."""
    results: dict[str, Any] = {}
    model, _ = compiled_pair(Net, 2, plan="fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[Any] = []

    def look(o: Any, args: Any, kwargs: Any) -> None:
        p = o.param_groups[0]["params"][0]
        seen.append((o is optimizer, isinstance(p, DTensor), isinstance(o.state.get(p, {}).get("exp_avg"), DTensor)))

    optimizer.register_step_pre_hook(look), optimizer.register_step_post_hook(look)
    x, y = batch(0)

    def closure() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(x, y)
        loss.backward()
        seen.append(isinstance(optimizer.param_groups[0]["params"][0], DTensor))
        return loss

    results["loss"] = float(optimizer.step(closure))  # type: ignore[arg-type]
    results["seen"] = seen == [(True, True, False), True, (True, True, True)]
    results["hooks"] = len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1

    before = copy.deepcopy(model.state_dict())
    broken = optimizer.param_groups[0]
    broken["betas"] = ("a", 0.9)
    results["raised"] = raised(optimizer.step)
    broken["betas"] = (0.9, 0.999)
    results["still"] = all(isinstance(p, DTensor) and p.grad is not None for p in broken["params"])
    model.load_state_dict(before)
    optimizer.step()

    return results


def test_only_the_step_sees_plain_tensors() -> None:
    for results in run_on_ranks(_seen, world_size=2):
        assert results["seen"] and results["hooks"] and results["still"], results
        assert results["raised"] and results["loss"] > 0, results


def _in_a_closure(has_closure: bool) -> tuple[dict[Any, int], list[Tensor]]:
    """What a window of two microbatches sends, the last of them in the optimizer's step or before it."""
    model, _ = compiled_pair(Net, 2, plan="data_parallel")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*batch(0)).backward()
    optimizer.step(), optimizer.zero_grad()
    with autoparallel.count_traffic() as traffic:
        with model.no_sync():
            model(*batch(1)).backward()

        def closure() -> Tensor:
            loss: Tensor = model(*batch(2))
            loss.backward()
            return loss

        if has_closure:
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            optimizer.step()
    return traffic.collectives, [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def _with_and_without_a_closure() -> bool:
    (sent, parameters), (expected, theirs) = _in_a_closure(True), _in_a_closure(False)
    return sent == expected and sum(sent.values()) > 0 and all(map(torch.equal, parameters, theirs))


def test_a_step_with_a_closure_reduces_what_was_accumulated_before_it_once() -> None:
    assert all(run_on_ranks(_with_and_without_a_closure, world_size=2))


def test_what_is_registered_is_checked() -> None:
    with pytest.raises(TypeError, match="takes a class"):
        autoparallel.register_optimizer(torch.optim.Optimizer([nn.Parameter(torch.ones(1))], {}), per="element")  # type: ignore[type-var]
    with pytest.raises(ValueError, match="per must be"):
        autoparallel.register_optimizer(Lion, per="row")  # type: ignore[arg-type]


class Failing(Lamb):
    """Fails at the parameter of a shape, or gives it another state, as it is told."""

    fails: tuple[int, ...] | None = None
    grows: tuple[int, ...] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and self.fails == tuple(p.shape):
                    raise ValueError("no update")
                if p.grad is not None and self.grows == tuple(p.shape):
                    self.state[p]["late"] = 1
        super().step()


def _failing() -> dict[str, Any]:
    autoparallel.register_optimizer(Failing, per="parameter")
    model, plain = compiled_pair(Net, 2, plan="fsdp")
    mine, theirs = (Failing(m.parameters()) for m in (model, plain))
    seen: dict[str, Any] = {"raised": []}
    for step, (fails, grows) in enumerate([((8, 8), None), (None, None), ((8, 8), None), (None, (4, 8)), (None, None)]):
        backward(model, plain, step)
        before = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
        mine.fails, mine.grows = fails, grows
        if fails or grows:
            seen["raised"].append(raised(mine.step))
            seen[f"still {step}"] = all(map(torch.equal, before, [p.to_local() for p in model.parameters()]))
        else:
            mine.step(), theirs.step()
    return {**seen, "far": parameters_off(model, plain)}


def test_an_owner_that_fails_is_an_error_on_all_ranks_and_changes_nothing() -> None:
    results = run_on_ranks(_failing, world_size=2)
    assert results[0] == results[1]
    for text, said in zip(results[0]["raised"], ("no update", "no update", "late"), strict=True):
        assert "failed on the rank that updates a parameter" in text and said in text
    assert results[0]["far"] < 1e-9 and all(results[0][f"still {i}"] for i in (0, 2, 3)), results[0]


class Counted(torch.optim.Optimizer):
    """Momentum over a count that is a tensor of one element."""

    def __init__(self, params: Any, scaled: bool = False) -> None:
        super().__init__(params, {"lr": 0.1, "scaled": scaled})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state.setdefault("count", torch.zeros(1, dtype=p.dtype)).add_(1)
                state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                update = state["momentum"] / state["count"]
                p.sub_(group["lr"] * update * (p.norm() if group["scaled"] else 1))


class Small(nn.Module):
    """Vectors of two elements and of one."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.two, self.one = nn.Linear(8, 4), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x) * self.two.sum() + self.one


def _counted() -> dict[str, Any]:
    autoparallel.register_optimizer(Counted, per="element")
    model, plain = compiled_pair(Small, 2, plan="fsdp")
    mine, theirs = (Counted(m.parameters()) for m in (model, plain))
    for step in range(3):
        backward(model, plain, step)
        mine.step(), theirs.step()
    lie = {name: {type(s[name]) for s in mine.state.values()} for name in ("count", "momentum")}
    wrong = raised(Counted(model.parameters(), scaled=True).step)
    return {"far": parameters_off(model, plain), "lie": lie, "wrong": wrong}


def test_what_is_registered_of_elements_is_tried_once() -> None:
    """It also says which states are one number, where a part has one element, too."""
    for results in run_on_ranks(_counted, world_size=2):
        assert results["far"] < 1e-9
        assert results["lie"] == {"count": {Tensor}, "momentum": {DTensor}}
        assert "Counted is registered per='element', but" in results["wrong"]
