"""Loops of several models, losses and optimizers, and adapters on a frozen base."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from tests.runtime.support import make, mesh_of, off, parameters_off, run_on_ranks


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
