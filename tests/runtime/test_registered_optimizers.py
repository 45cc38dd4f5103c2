"""What is said of optimizers by `register_optimizer` is tried: what it does not hold for is refused, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autoparallel
from tests.runtime.support import Net, batch, compiled_pair, parameters_off, raised, run_on_ranks
from tests.runtime.test_clipping import backward


class Momentum(torch.optim.Optimizer):
    """Moves parameters by an average of their gradients; what it is made of varies."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(group, p, self.state[p]))

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Tensor:
        state["average"] = state.get("average", 0) + p.grad * 0.5  # type: ignore[operator]
        return state["average"] * group["scale"]  # type: ignore[no-any-return]


class Clipped(Momentum):
    """Clips what has become far greater than it was, as StableAdamW does."""

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Tensor:
        update = super().update(group, p, state)
        state["square"] = state.get("square", p.grad.square()).lerp(p.grad.square(), 0.1)  # type: ignore[union-attr]
        return update / (p.grad.square() / state["square"].clamp(min=1e-9)).mean().clamp(min=4)  # type: ignore[union-attr]


class Projected(Momentum):
    """Leaves out what goes along a parameter, where its gradient does not, as AdamP does."""

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Tensor:
        update = super().update(group, p, state)
        along = (p * p.grad).sum() / (p.norm() * p.grad.norm()).clamp(min=1e-9)  # type: ignore[operator, union-attr]
        return update - p * (update * p).sum() / p.square().sum().clamp(min=1e-9) if along.abs() < 1e-6 else update


class Adapting(Momentum):
    """Learns a scale of a group by its gradients, as Prodigy does."""

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Tensor:
        update = super().update(group, p, state)
        group["scale"] += 1e-9 * float(p.grad.square().sum())  # type: ignore[union-attr]
        return update


class Several(Momentum):
    """Keeps several averages in a dict, as AggMo does."""

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Tensor:
        averages = state.setdefault("averages", {0.5: torch.zeros_like(p), 0.9: torch.zeros_like(p)})
        for weight, average in averages.items():
            average.lerp_(p.grad, 1 - weight)
        return averages[0.5] + averages[0.9]  # type: ignore[no-any-return]


class Drawing(Momentum):
    """Adds noise."""

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Tensor:
        return super().update(group, p, state) + torch.randn_like(p)


class Needing(Momentum):
    """Fails where it has nothing to update."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.mean = sum(p.numel() for p in self.param_groups[0]["params"]) / len(self.param_groups[0]["params"])


class Counting(Momentum):
    """Counts steps in its group, under a name and in itself; a parameter has a number, a norm, and nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[operator]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()

    def update(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> Tensor:
        state["product"] = state.get("product", 1.0) * 0.9
        state["norm"], state["nothing"] = p.grad.norm(), None  # type: ignore[union-attr]
        average = super().update(group, p, state) / (1 - state["product"] + state["norm"])
        return average / (self.steps + group["steps"] + self.state["steps"])


class Curved(torch.optim.Optimizer):
    """Moves by gradients over curvatures along signs, which its step differentiates for, as AdaHessian's does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        assert closure is None
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        signs = [g.detach().sign() for g in grads]
        curvatures = torch.autograd.grad(grads, params, grad_outputs=signs)
        with torch.no_grad():
            torch._foreach_addcdiv_(params, grads, [1 + c.abs() for c in curvatures], -0.05)


def _curve() -> list[float]:
    model, plain = compiled_pair(Net, 2, plan="fsdp", loss_fn=None)
    optimizers, losses = [Curved(m.parameters()) for m in (model, plain)], []
    x, y = batch(0)
    for _ in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.mse_loss(m(x), y)
            loss.backward(create_graph=True)
            optimizer.step()
            losses.append(loss.item())
    return [parameters_off(model, plain), *losses]


def test_a_step_may_differentiate_before_it_updates() -> None:
    for far, *losses in run_on_ranks(_curve, world_size=2):
        assert far < 1e-9 and losses[0] > losses[2] > losses[4]


WRONG: list[tuple[type[Momentum], Any, str]] = [
    (Clipped, "element", "has updated elements otherwise together than apart"),
    (Projected, "element", "has updated elements otherwise together than apart"),
    (Adapting, "element", "has updated elements otherwise together than apart"),
    (Several, "element", "(its 'averages')"),
    (Drawing, "element", "has updated elements otherwise together than apart"),
    (Needing, "parameter", "its step fails where there is none to update"),
    (Adapting, "parameter", "has set 'scale'"),
    (Several, "parameter", "the state 'averages' of a parameter is dict"),
    (Drawing, "parameter", "draws random numbers"),
]


def _register() -> dict[str, Any]:
    model, plain = compiled_pair(Net, 2, plan="fsdp")
    seen: dict[str, Any] = {}
    for kind, per, _ in WRONG:
        wrong = type(kind.__name__, (kind,), {"step": lambda self, closure=None, kind=kind: kind.step(self)})
        autoparallel.register_optimizer(wrong, per=per)
        backward(model, plain, 0)
        seen[f"{kind.__name__} {per}"] = raised(wrong(model.parameters()).step)
    for m in (model, plain):
        m.zero_grad()
    autoparallel.register_optimizer(Counting, per="parameter")
    mine, theirs = (Counting(m.parameters()) for m in (model, plain))
    row = model.up.weight.detach()[0]  # type: ignore[union-attr]  # which steps change, so that they are looked through
    for step in range(3):
        backward(model, plain, step)
        mine.step(), theirs.step()
    del row
    told = [[o.steps, o.state["steps"], o.param_groups[0]["steps"]] for o in (mine, theirs)]
    products = [o.state[m.up.weight]["product"] for o, m in ((mine, model), (theirs, plain))]  # type: ignore[union-attr]
    return {**seen, "far": parameters_off(model, plain), "told": told, "products": products}


@pytest.fixture(scope="module")
def registered() -> list[dict[str, Any]]:
    return run_on_ranks(_register, world_size=2)


@pytest.mark.parametrize(("kind", "per", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_what_does_not_hold_is_refused(
    kind: type[Momentum], per: str, words: str, registered: list[dict[str, Any]]
) -> None:
    for seen in registered:
        assert words in seen[f"{kind.__name__} {per}"]


def test_what_an_optimizer_has_for_all_parameters_is_kept(registered: list[dict[str, Any]]) -> None:
    for seen in registered:
        assert seen["far"] < 1e-12 and seen["told"] == [[3, 3, 3]] * 2
        assert seen["products"][0] == seen["products"][1], "a number keeps its bits"
