"""Operators on ``DTensor``s and plain tensors, and what Python reads of ``DTensor``s, are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from tests.runtime.support import batch, compiled_pair, gradients_off, off, parameters_off, raised, run_on_ranks


class Classifier(nn.Module):
    """Its logits lie as the plan has them, beside a known loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.up(x)))
        return {"loss": F.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}


def _measured(logits: Any, labels: Tensor) -> dict[str, Any]:
    """What scripts make of logits and of plain labels."""
    found = logits.detach().argmax(-1)
    return {
        "hits": (found == labels).sum().item(),
        "accuracy": (found == labels).double().mean(),
        "hits of a class": ((found == 1) & (labels == 1)).sum(),
        "wrong ones": torch.where(found.eq(labels), 0.0, 1.0).double(),
        "loss of each": F.cross_entropy(logits.detach().flatten(0, -2), labels.flatten(), reduction="none"),
        "the first of the first": logits.argmin(dim=-1)[0],
        "pairs": torch.stack([found, labels]),
        "sums": torch.zeros(4, dtype=torch.float64).add_(logits.detach().flatten(0, -2).sum(0)),
        "a row": _filled(logits.detach().flatten(0, -2)[0]),
        "counts": torch.zeros(4, 4).index_put_((labels.flatten(), found.flatten()), torch.ones(()), accumulate=True),
        "entropy": torch.distributions.Categorical(logits=logits.detach()).entropy(),
        "list": found.tolist(),
        "array": found.cpu().numpy().sum().item(),
        "text": f"{logits.detach().square().mean():.9f} {logits.max():>20.9f}",
        "probabilities": torch.stack([logits.detach().softmax(-1).flatten()]).numpy().round(9).tolist(),
    }


def _filled(row: Tensor) -> Tensor:
    rows = torch.zeros(2, 4, dtype=torch.float64)
    rows[:1] = row
    rows[1].copy_(row)
    return rows


def _classified(plan: str, shape: tuple[int, ...]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    model, plain = compiled_pair(Classifier, *shape, plan=plan, loss_fn=None)
    for rows in (8, 1):  # an evaluation goes through single rows
        x = batch(rows=rows)[0].unsqueeze(-2)
        labels = torch.arange(rows).unsqueeze(-1) % 4
        mine, theirs = (_measured(m(x, labels)["logits"], labels) for m in (model, plain))
        for name, value in theirs.items():
            same = off(mine[name], value) < 1e-12 if isinstance(value, Tensor) else mine[name] == value
            results[f"{name} of {rows}"] = same or (mine[name], value)
    return results


@pytest.mark.wide
@pytest.mark.wide_where(lambda plan: plan != "fsdp_tensor_parallel")
@pytest.mark.parametrize(
    ("plan", "shape"), [("fsdp", (2,)), ("data_parallel", (2,)), ("fsdp_tensor_parallel", (2, 2)), ("hybrid", (2, 2))]
)
def test_metrics_of_logits_and_labels_are_those_of_one_process(plan: str, shape: tuple[int, ...]) -> None:
    ranks = run_on_ranks(_classified, plan, shape, world_size=2 * len(shape))
    for results in ranks:
        assert {name: value for name, value in results.items() if value is not True} == {}


def _by_hand() -> dict[str, Any]:
    model, plain = compiled_pair(plan="fsdp")
    results: dict[str, Any] = {}
    scales = [torch.linspace(0.5, 1.5, 8, dtype=torch.float64).requires_grad_() for _ in range(2)]
    for m, scale in zip((model, plain), scales, strict=True):
        x, y = batch()
        loss = m(x, y) if m is model else F.mse_loss(m(x), y)
        weight = m.up.weight
        penalty = (weight.T @ weight - torch.eye(8, dtype=torch.float64)).square().sum()
        share = penalty / (penalty.detach() + 1e-9)
        (loss + 0.01 * penalty + 0.1 * (scale * weight).square().sum() + 0.1 * share).backward()
        results[f"kind of gradient {m is model}"] = type(scale.grad).__name__
    results["gradients"], results["of the plain one"] = gradients_off(model, plain), off(scales[0].grad, scales[1].grad)
    for m in (model, plain):
        generator = torch.Generator().manual_seed(3)
        for p in m.parameters():  # stochastic gradient Langevin dynamics
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.grad = p.grad + 0.1 * noise
            p.data = p.data - 0.1 * (p.grad + noise)
            p.data += 0.01 * noise
    results["parameters"] = parameters_off(model, plain)
    results["averages"] = off(0.9 * plain.up.weight.detach() + 0.1 * model.up.weight.detach(), plain.up.weight.detach())
    for m in (model, plain):
        with torch.no_grad():
            m.up.weight.mul_(m.up.weight.abs() > torch.quantile(m.up.weight.abs().flatten(), 0.3))  # of a stride of 0
    results["pruned"] = parameters_off(model, plain)
    results["list"] = off(torch.tensor(model.up.weight.tolist(), dtype=torch.float64), plain.up.weight)
    return results


def _of_sums_and_numbers() -> dict[str, Any]:
    """A sum over the ranks meets a number, then a ``DTensor`` that lies whole, then a number again."""
    results: dict[str, Any] = {}
    model, plain = compiled_pair(plan="tensor_parallel")
    model(*batch())
    for name in ("add", "sub", "mul", "div"):
        operator = getattr(torch, name)
        mine, theirs = (m.up.weight.detach().square().sum() for m in (model, plain))
        assert mine.placements[0].is_partial()
        whole = model.up.weight.detach().full_tensor().sum()
        there = distribute_tensor(whole, model.up.weight.device_mesh)
        results[f"{name} of a number"] = off(operator(mine, 1e-9), operator(theirs, 1e-9))
        results[f"{name} of what lies whole"] = off(operator(mine, there), operator(theirs, whole))
        results[f"{name} of an integer"] = off(operator(mine, 2), operator(theirs, 2))
    return results


def test_sums_over_ranks_meet_numbers_and_what_lies_whole() -> None:
    for results in run_on_ranks(_of_sums_and_numbers, world_size=2):
        assert max(results.values()) < 1e-12, results


def test_noise_penalties_and_scales_that_are_plain_are_those_of_one_process() -> None:
    for results in run_on_ranks(_by_hand, world_size=2):
        kinds = [results.pop(f"kind of gradient {kind}") for kind in (True, False)]
        assert kinds == ["Tensor", "Tensor"]
        assert max(results.values()) < 1e-12, results


def _begun_with_plain_gradients() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for plan in ("fsdp", "tensor_parallel"):
        model, plain = compiled_pair(plan=plan)
        x, y = batch()
        for m, loss in ((model, model(x, y)), (plain, F.mse_loss(plain(x), y))):
            (loss + 0.1 * m.up.weight.square().sum()).backward(torch.tensor(2.0, dtype=torch.float64))
            m.up.weight.square().backward(torch.arange(64.0, dtype=torch.float64).view(8, 8))
        results[plan] = gradients_off(model, plain)
        products = []
        for m, loss in ((model, model(x, y)), (plain, F.mse_loss(plain(x), y))):  # of the Hessian and vectors
            parameters = list(m.parameters())
            grads = torch.autograd.grad(loss, parameters, create_graph=True)
            vectors = [torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape) for p in parameters]
            products.append(torch.autograd.grad(grads, parameters, grad_outputs=vectors))
        results[f"{plan}: products"] = max(map(off, *products))
        assert max(float(p.abs().max()) for p in products[1]) > 1e-3
        model, plain = compiled_pair(plan=plan, loss_fn=None, outputs="sharded")
        for m in (model, plain):
            m(x).backward(y)
            torch.autograd.backward([m(x)], [y])
        results[f"{plan}: outputs"] = gradients_off(model, plain)
    return results


def test_a_backward_of_a_dtensor_takes_a_plain_gradient() -> None:
    for results in run_on_ranks(_begun_with_plain_gradients, world_size=2):
        assert max(results.values()) < 1e-12, results


def _refused() -> list[str | None]:
    model, _ = compiled_pair(plan="fsdp")
    model(*batch()).backward()
    weight, rank = model.up.weight.detach(), torch.distributed.get_rank()
    array = weight.numpy()
    assert array.shape == (8, 8)

    def write() -> None:
        array[0] = 0

    return [
        raised(lambda: weight + torch.full((8, 8), float(rank), dtype=torch.float64)),
        raised(lambda: model.up.weight.numpy()),
        raised(write),
    ]


def test_plain_tensors_of_each_rank_and_writes_past_a_parameter_are_refused() -> None:
    for apart, graded, past in run_on_ranks(_refused, world_size=2):
        assert "takes DTensors and plain tensors, which must be the same on all ranks" in apart
        assert "tensor.detach().numpy()" in graded
        assert "read-only" in past
