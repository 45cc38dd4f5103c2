"""Loops of several models, losses and optimizers, and adapters on a frozen base."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import autoparallel
from tests.runtime.support import (
    Net,
    batch,
    compiled_pair,
    gradients_off,
    make,
    mesh_of,
    off,
    parameters_off,
    raised,
    run_on_ranks,
)


class Perceptron(nn.Sequential):
    def __init__(self, outputs: int = 8) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs))


def _adversaries() -> dict[str, float]:
    """A generator and a discriminator that see each other's outputs: two optimizers, three losses in a step."""
    plain = make(Perceptron), make(lambda: Perceptron(1), seed=1)
    compiled = [autoparallel.compile(copy.deepcopy(model), mesh_of(2), plan="fsdp") for model in plain]
    data = torch.Generator().manual_seed(4)
    batches = [torch.randn(2, 8, 8, generator=data, dtype=torch.float64) for _ in range(3)]

    def train(generator: Any, discriminator: Any) -> list[Tensor]:
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (generator, discriminator)]
        losses = []
        for noise, real in batches:
            fake = generator(noise)
            ones = torch.ones(8, 1, dtype=torch.float64)
            told = F.binary_cross_entropy_with_logits(discriminator(real), ones)
            told = told + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), 0 * ones)
            told.backward()
            optimizers[1].step(), optimizers[1].zero_grad()
            fooled = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
            fooled.backward()  # through the discriminator into the generator
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses += [told.detach(), fooled.detach()]
        return losses

    mine, theirs = train(*compiled), train(*plain)
    return {
        "losses": max(map(off, mine, theirs)),
        "generator": parameters_off(compiled[0], plain[0]),
        "discriminator": parameters_off(compiled[1], plain[1]),
        "moved": float(off(plain[0][0].weight, make(Perceptron)[0].weight) < 1e-3),
    }


def test_two_models_that_see_each_others_outputs() -> None:
    for results in run_on_ranks(_adversaries, world_size=2):
        assert all(v < 1e-9 for v in results.values()), results


def _adapted(base: torch.dtype, plan: str) -> dict[str, float]:
    """A frozen base in some dtype, and LoRA's adapters in float32 (or float64, as the base)."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    plain = get_peft_model(Perceptron().to(base), config, autocast_adapter_dtype=True)
    model = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan=plan)
    frozen = {name: p.detach().clone() for name, p in plain.named_parameters() if not p.requires_grad}
    results: dict[str, float] = {"vacuous": float(len(frozen) != 4)}
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, plain)]
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).to(base)
        mine, theirs = model(x).double().square().mean(), plain(x).double().square().mean()
        mine.backward(), theirs.backward()
        results[f"loss {step}"] = off(mine, theirs)
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        results[f"norm {step}"] = off(model.clip_grad_norm_(1e9).double(), norm.double())
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    results["adapters"] = parameters_off(model, plain)
    full = dict(model.full_parameters())
    results["base"] = max(off(full[name], value) for name, value in frozen.items())
    return results


@pytest.mark.wide
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
@pytest.mark.parametrize("base", [torch.float64, torch.bfloat16], ids=str)
def test_adapters_on_a_frozen_base(base: torch.dtype, plan: str) -> None:
    pytest.importorskip("peft")
    for results in run_on_ranks(_adapted, base, plan, world_size=2):
        assert results.pop("base") == 0.0 == results.pop("vacuous"), "the frozen base has moved"
        assert all(v < (1e-9 if base is torch.float64 else 2e-2) for v in results.values()), results


def _penalised(plan: str) -> float:
    """A penalty of parameters beside the loss, in a window whose gradients are still summands."""
    model, plain = compiled_pair(plan=plan)
    for steps in (2, 3):
        for i in range(steps):
            x, y = batch(i)
            with contextlib.nullcontext() if i == steps - 1 else model.no_sync():
                loss = model(x, y) / steps
                (loss + sum(0.1 * p.square().sum() + p.abs().sum() for p in model.parameters())).backward()
            penalty = sum(0.1 * p.square().sum() + p.abs().sum() for p in plain.parameters())
            (F.mse_loss(plain(x), y) / steps + penalty).backward()
        if steps == 2:
            for m in (model, plain):
                m.zero_grad()
    return max(
        gradients_off(model, plain), off(model.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    )


@pytest.mark.parametrize("plan", ["fsdp", pytest.param("tensor_parallel", marks=pytest.mark.wide)])
def test_a_penalty_of_parameters_under_no_sync(plan: str) -> None:
    assert max(run_on_ranks(_penalised, plan, world_size=2)) < 1e-12


class Finetuned(nn.Module):
    """Its body stays frozen and in evaluation, its head in training, whatever the loop asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.requires_grad_(True)

    def train(self, mode: bool = True) -> Finetuned:
        super().train(mode)
        self.norm.eval()
        return self

    def eval(self) -> Finetuned:
        super().eval()
        self.head.train()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Finetuned:
        super().requires_grad_(requires_grad)
        self.body.requires_grad_(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


def _modes_of_its_own() -> dict[str, float]:
    plain = make(Finetuned)
    model = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan="fsdp")
    results: dict[str, float] = {}
    x = batch(0)[0]
    for name in ("train", "eval", "requires_grad_"):
        for m in (plain, model):
            assert getattr(m, name)() is m
            m(x).square().mean().backward()
        flags = [
            [(part.training, [p.requires_grad for p in part.parameters()]) for part in m.modules()]
            for m in (plain, model)
        ]
        results[f"flags after {name}"] = float(flags[0] != flags[1])
        results[f"gradients after {name}"] = gradients_off(model, plain)
        results[f"statistics after {name}"] = off(model.norm.running_mean, plain.norm.running_mean)
    return results


def test_modes_are_those_of_the_models_class() -> None:
    for results in run_on_ranks(_modes_of_its_own, world_size=2):
        assert all(v < 1e-9 for v in results.values()), results


def _synchronised_batch_norm() -> dict[str, float]:
    """What a script for DDP has made of its batch norms is computed over the whole batch, as they are themselves."""
    plain = make(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    model = autoparallel.compile(converted, mesh_of(2), plan="fsdp", loss_fn=F.mse_loss)
    x, y = batch(0)
    model(x, y).backward(), F.mse_loss(plain(x), y).backward()
    results = {"gradients": gradients_off(model, plain), "variance": off(model[1].running_var, plain[1].running_var)}
    results["evaluation"] = off(model.eval()(x), plain.eval()(x))
    return results


def test_synchronised_batch_norm_is_batch_norm() -> None:
    for results in run_on_ranks(_synchronised_batch_norm, world_size=2):
        assert all(v < 1e-9 for v in results.values()), results


def _on_the_cpu(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


def _saved_otherwise() -> dict[str, float]:
    """First calls whose saved tensors the loop keeps elsewhere, or has computed again."""
    plain = make(Net)
    results: dict[str, float] = {}
    x = batch(0)[0]
    ways: dict[str, Callable[[nn.Module], Tensor]] = {
        "on the CPU": lambda m: _on_the_cpu(m, x),
        "again": lambda m: checkpoint(m, x, use_reentrant=False),
        "again with the loss": lambda m: checkpoint(lambda x: m(x).exp(), x, use_reentrant=False),
    }
    for name, call in ways.items():
        model = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan="fsdp")
        for m in (model, plain):
            m.zero_grad()
            call(m).square().mean().backward()
        results[name] = gradients_off(model, plain)
    return results


def test_tensors_that_the_loop_saves_otherwise() -> None:
    for results in run_on_ranks(_saved_otherwise, world_size=2):
        assert all(v < 1e-9 for v in results.values()), results


def test_parametrizations_that_the_loop_keeps() -> None:
    """A first call inside of ``parametrize.cached()`` does not keep the weight of its trace for ever."""
    plain = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4, dtype=torch.float64))
    model = autoparallel.compile(copy.deepcopy(plain))
    x = batch(0)[0]
    with parametrize.cached(), torch.no_grad():
        assert off(model(x), plain(x)) < 1e-12
    for step in range(2):
        with parametrize.cached():
            mine, theirs = model(x).square().mean(), plain(x).square().mean()
        mine.backward(), theirs.backward()
        assert gradients_off(model, plain) < 1e-12, step
        with torch.no_grad():
            for p in (*model.parameters(), *plain.parameters()):
                p.mul_(2)
    with parametrize.cached(), torch.no_grad():
        assert off(model(x), plain(x)) < 1e-12


def _refusals() -> dict[str, str]:
    model, _ = compiled_pair(plan="fsdp")
    x, y = batch(0)
    penalty = sum(p.square().sum() for p in model.parameters())
    results = {"held by a graph": raised(lambda: model(x, y))}
    del penalty
    sums = sum(p.sum() for p in model.parameters())  # of which the graph keeps no parameter
    loss = model(x, y)
    results["a graph that is left"] = raised((loss + sums).backward)
    penalty = sum(p.square().sum() for p in model.parameters())
    (model(x, y) + penalty).backward()
    results["dense gradients"] = raised(torch.optim.SparseAdam([model.up.weight]).step)
    shared = nn.Sequential(model.up, nn.Linear(8, 2))
    results["a shared module"] = raised(lambda: autoparallel.compile(shared, mesh_of(2)))
    return results


def test_what_a_loop_is_told_to_do_otherwise() -> None:
    for results in run_on_ranks(_refusals, world_size=2):
        assert re.search(r"up\.weight.*a graph that was made of it.*\n.*model\.prepare", results["held by a graph"]), (
            results
        )
        assert re.search(r"made of it before.*\nWhat.*model\.prepare", results["a graph that is left"]), results
        assert re.search(r"SparseAdam.*dense.*\nWhat to change", results["dense gradients"]), results
        assert re.search(r"0\.weight is a DTensor already.*share a module", results["a shared module"]), results


def test_a_parameter_that_others_share_is_not_trained_twice() -> None:
    first, second, x = make(Perceptron), make(Perceptron), torch.randn(8, 8, dtype=torch.float64)
    second[0].weight = first[0].weight
    model = autoparallel.compile(first)
    assert "0.weight is a parameter of a model that is compiled already" in raised(lambda: autoparallel.compile(second))
    told = raised(lambda: (model(x) - second(x)).square().mean().backward())
    assert "the plain parameter 0.weight is used" in told


def test_gradients_of_another_dtype_than_the_parameters_are_refused() -> None:
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    model.weight.grad_dtype, model.bias.grad_dtype = None, torch.float32  # None is any
    told = raised(lambda: autoparallel.compile(model))
    assert re.search(r"bias\.grad_dtype is torch\.float32.*\nWhat to change", told), told


def test_operations_are_counted_as_those_of_the_plain_model() -> None:
    plain = make(Perceptron)
    x = torch.randn(8, 8, dtype=torch.float64)
    counts = []
    for model in (plain, autoparallel.compile(copy.deepcopy(plain))):
        for _ in range(2):  # the first call traces and predicts, which counts nothing
            with FlopCounterMode(display=False) as counter:
                model(x).square().mean().backward()
            counts.append(counter.get_total_flops())
    assert counts[0] > 0 and len(set(counts)) == 1, counts


def test_export_is_given_the_plain_model() -> None:
    x = torch.randn(8, 8, dtype=torch.float64)
    model = autoparallel.compile(make(Perceptron))
    expected = model(x)
    with pytest.raises(RuntimeError, match=r"model.whole\(\) as plain: torch.export.export"):
        torch.export.export(model, (x,))
    with pytest.raises(RuntimeError, match=r"model.whole\(\) as plain: torch.export.export"):
        torch.jit._get_trace_graph(model, (x,))  # as torch.onnx.export(dynamo=False) does
    with model.whole() as plain:
        program = torch.export.export(plain, (x,))
    assert off(program.module()(x), expected) == 0


def _look_into() -> tuple[list[str], float]:
    """What is said to those that would look into a compiled model on two ranks, which goes on afterwards."""
    plain = make(Perceptron)
    model = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan="fsdp")
    x = batch()[0].requires_grad_()
    outputs = model(x)
    vectors = torch.eye(8, dtype=torch.float64)
    ways: list[Callable[[], Any]] = [
        lambda: torch.export.export(model, (x,)),
        lambda: torch.jit.trace(lambda x: model(x), x),
        lambda: torch.autograd.grad(outputs[0], list(model.parameters()), vectors, is_grads_batched=True),
        lambda: torch.autograd.grad(outputs[0], x, vectors, is_grads_batched=True),
        lambda: torch.vmap(lambda v: torch.autograd.grad(outputs[0], list(model.parameters()), v))(vectors),
    ]
    return [raised(way) for way in ways], off(model(x), plain(x))


def test_who_cannot_look_into_a_compiled_model_is_told_on_all_ranks() -> None:
    for texts, far in run_on_ranks(_look_into, world_size=2):
        assert all("export the plain one" in text for text in texts[:2]), texts
        assert all("call torch.autograd.grad(..., retain_graph=True) for each" in text for text in texts[2:]), texts
        assert far < 1e-12


@pytest.mark.wide
def test_torch_compile_around_a_compiled_model_leaves_it_as_it_is() -> None:
    """Also around the loop's step; the model itself says how it is compiled (``backend=``)."""
    plain = make(Perceptron)
    model = autoparallel.compile(copy.deepcopy(plain))
    x = torch.randn(8, 8, dtype=torch.float64)

    @torch.compile(backend="eager")
    def step(model: nn.Module) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return 2 * loss

    for around in (model, torch.compile(model, backend="eager")):
        model.zero_grad(), plain.zero_grad()
        assert off(step(around), step(plain)) < 1e-12
        assert parameters_off(model, plain) < 1e-12
        assert off(model[0].weight.grad, plain[0].weight.grad) < 1e-12
    with pytest.raises(Exception, match=r"runs as it is: compile\(backend=\.\.\.\) compiles it"):
        torch.compile(lambda x: model(x), backend="eager", fullgraph=True)(x)


class _Weighed(Perceptron):
    """With a number that the loop weighs the loss by."""

    def __init__(self) -> None:
        super().__init__(4)
        self.log_variance = nn.Parameter(torch.tensor(0.3))


def _added(loss: Tensor, model: Any) -> Tensor:
    return loss + 0.01 * sum(p.square().sum() for p in model.parameters()) - 0.1 * model[0].weight.sum()


def _added_in_place(loss: Tensor, model: Any) -> Tensor:
    total = torch.zeros((), dtype=loss.dtype)
    for p in model.parameters():
        loss += 0.01 * p.square().sum()
        total += p.abs().sum()
    loss += 0.01 * total
    loss += model.log_variance
    loss *= 1 + 0.01 * model[0].weight.sum()
    return loss


def _weighed(loss: Tensor, model: Any) -> Tensor:
    return torch.exp(-model.log_variance) * loss + model.log_variance + loss / (1 + model.log_variance**2)


PENALTIES: list[Callable[[Tensor, Any], Tensor]] = [_added, _added_in_place, _weighed]


def _loss_of_loop(plan: str) -> dict[str, float]:
    """How far training is off by losses that the loop makes, of outputs and of parameters."""
    results = {}
    for penalise in PENALTIES:
        model, plain = compiled_pair(_Weighed, plan=plan, loss_fn=None)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        worst = 0.0
        for number in range(2):
            x, y = batch(number)
            losses = [penalise(F.mse_loss(m(x), y), m) for m in (model, plain)]
            worst = max(worst, abs(losses[0].item() - losses[1].item()))
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad(), loss.backward()
            worst = max(worst, gradients_off(model, plain))
            [optimizer.step() for optimizer in optimizers]
        hooks = len(model.log_variance._backward_hooks or ())
        results[penalise.__name__] = max(worst, parameters_off(model, plain), hooks - 1)  # none more in every step
    return results


@pytest.mark.parametrize("plan", ["fsdp", pytest.param("tensor_parallel", marks=pytest.mark.wide)])
def test_a_loss_of_the_loop_and_numbers_of_parameters(plan: str) -> None:
    for results in run_on_ranks(_loss_of_loop, plan, world_size=2):
        assert results == dict.fromkeys((f.__name__ for f in PENALTIES), pytest.approx(0.0, abs=1e-9)), results


def _written_to_plain() -> tuple[list[float], list[str]]:
    model, plain = compiled_pair(plan="fsdp")
    model(*batch()).backward(), F.mse_loss(plain(batch()[0]), batch()[1]).backward()
    totals = []
    for m in (model, plain):
        total, norms = torch.zeros(1, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        for i, p in enumerate(m.parameters()):
            total += p.grad.square().sum()
            norms[i] = p.norm()
        totals.append(torch.cat([total, norms]))
    weight, average = model.up.weight, plain.up.weight.detach()
    words = [raised(lambda: average.mul_(0.9).add_(weight.detach()))]
    return (totals[0] - totals[1]).tolist(), words


def test_numbers_of_parameters_are_written_to_plain_tensors() -> None:
    """More than a number is refused, and told what to write."""
    for differences, words in run_on_ranks(_written_to_plain, world_size=2):
        assert max(map(abs, differences)) < 1e-12
        for text in words:
            assert "p.full_tensor()" in text
            assert "copy.deepcopy(model)" in text
