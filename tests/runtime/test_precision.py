"""Mixed precision: what is computed, gathered and reduced in which dtype, against one process that casts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call

import autoparallel
from tests.runtime.support import compiled_pair, off, run_on_ranks

SHAPE, ROWS = (12, 32, 8), 8


class Net(nn.Module):
    """An MLP with a tied scale and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SHAPE[0], SHAPE[1]), nn.Linear(SHAPE[1], SHAPE[2])
        self.scale = nn.Parameter(torch.ones(SHAPE[1]))
        self.register_buffer("offset", torch.full((SHAPE[1],), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x) * self.scale + self.offset.to(x.dtype))
        return self.down(hidden * self.scale)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, SHAPE[0], generator=generator), torch.randint(0, SHAPE[2], (ROWS,), generator=generator)


def pair(rest: torch.dtype, policy: MixedPrecisionPolicy, plan: str, *shape: int) -> tuple[Any, nn.Module]:
    return compiled_pair(Net, *shape, dtype=rest, loss_fn=F.cross_entropy, plan=plan, precision=policy)


def plain_loss(plain: nn.Module, policy: MixedPrecisionPolicy, x: Tensor, y: Tensor) -> Tensor:
    """The loss with parameters cast by hand; their gradients come back in the parameters' dtype."""
    cast = {n: p.to(policy.param_dtype) for n, p in plain.named_parameters()}
    out = functional_call(plain, cast, (x.to(policy.param_dtype),))
    return F.cross_entropy(out.to(policy.output_dtype), y)


def _train(rest: torch.dtype, policy: MixedPrecisionPolicy, plan: str, shape: tuple[int, ...]) -> dict[str, Any]:
    model, plain = pair(rest, policy, plan, *shape)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    worst = {"gradients": 0.0, "norm": 0.0}
    for step in range(3):
        for micro in range(2):
            x, y = (t.to(rest) if t.is_floating_point() else t for t in batch(2 * step + micro))
            with torch.enable_grad() if micro == 1 else model.no_sync():
                model(x, y).backward()
            plain_loss(plain, policy, x, y).backward()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert mine.dtype == rest and mine.grad.dtype == rest, name
            relative = off(mine.grad, theirs.grad) / theirs.grad.abs().max().item()
            worst["gradients"] = max(worst["gradients"], relative)
        norm, expected = model.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert expected > 0.1
        worst["norm"] = max(worst["norm"], abs(norm.item() / expected.item() - 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        out = model(batch(0)[0].to(rest))
    return {"worst": worst, "output": out.dtype}


@pytest.mark.wide
@pytest.mark.slow_where(lambda shape, plan: shape == (2, 2) and plan != "data_parallel")
@pytest.mark.parametrize("plan", ["data_parallel", "fsdp", "tensor_parallel"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_float32_compute_with_float64_parameters(shape: tuple[int, ...], plan: str) -> None:
    """Only reassociation in float32 may differ."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float32)
    for found in run_on_ranks(_train, torch.float64, policy, plan, shape, world_size=torch.Size(shape).numel()):
        assert 0 < max(found["worst"].values()) < 2e-6, found["worst"]
        assert found["output"] == torch.float32


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", ["data_parallel", "fsdp"])
def test_bfloat16_compute_with_float32_parameters(plan: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for found in run_on_ranks(_train, torch.float32, policy, plan, (2,), world_size=2):
        assert 1e-6 < max(found["worst"].values()) < 3e-2, found["worst"]


class Mixed(nn.Module):
    """Layers at rest in different dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SHAPE[0], SHAPE[1]), nn.Linear(SHAPE[1], SHAPE[2])

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.up.bfloat16()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def _reduced_at_the_step() -> tuple[bool, float]:
    """Gradients that are summands until the optimizer steps."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model, plain = compiled_pair(Mixed, 2, loss_fn=F.cross_entropy, plan="data_parallel", precision=policy)
    with model.no_sync():
        model(*batch(0)).backward()
    plain_loss(plain, policy, *batch(0)).backward()
    model.clip_grad_norm_(1e9)
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    return all(p.grad.dtype == p.dtype for p, _ in pairs), max(off(p.grad, q.grad) for p, q in pairs)


def test_gradients_that_are_reduced_late_have_the_dtypes_of_their_parameters() -> None:
    for alike, worst in run_on_ranks(_reduced_at_the_step, world_size=2):
        assert alike and worst < 1e-2


def _bytes(policy: MixedPrecisionPolicy | None) -> tuple[dict[tuple[str, str], float], bool]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = autoparallel.compile(Net(), mesh, loss_fn=F.cross_entropy, plan="fsdp", precision=policy)
    model(*batch(0)).backward()
    model.zero_grad()
    with autoparallel.count_traffic() as traffic:
        model(*batch(0)).backward()
    assert model.plan.prediction is not None
    return dict(traffic.result().bytes), model.plan.prediction.step() == traffic.result()


def test_gathers_and_reductions_travel_in_the_asked_dtypes() -> None:
    policies = (
        None,
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
    )
    sent = []
    for policy in policies:
        ranks = run_on_ranks(_bytes, policy, world_size=2)
        assert all(predicted for _, predicted in ranks)
        sent.append(ranks[0][0])
    whole, half, wide = sent
    gather, reduce = ("all_gather", "dp"), ("reduce_scatter", "dp")
    assert half[gather] == wide[gather] == whole[gather] / 2
    assert half[reduce] == whole[reduce] / 2 and wide[reduce] == whole[reduce]


def _scaled(overflow: bool) -> dict[str, Any]:
    """float16 under a GradScaler: the decision to skip, the unscaled norm, and the scale afterwards."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model, plain = pair(torch.float32, policy, "fsdp", 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40 if overflow else 256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    for micro in range(2):
        with torch.enable_grad() if micro else model.no_sync():
            scaler.scale(model(*batch(micro))).backward()
        plain_loss(plain, MixedPrecisionPolicy(torch.float32, None, torch.float32), *batch(micro)).backward()
    scaler.unscale_(optimizer)
    norm = model.clip_grad_norm_(1e-3)
    scaler.step(optimizer)
    scaler.update()
    moved = max((p.full_tensor() - before[n]).abs().max().item() for n, p in model.named_parameters())
    true = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    return {"norm": norm.item(), "true": true.item(), "moved": moved, "scale": scaler.get_scale()}


def test_a_gradient_scaler_sees_the_same_everywhere() -> None:
    first, second = run_on_ranks(_scaled, False, world_size=2)
    assert first == second and first["moved"] > 0 and first["scale"] == 256.0
    assert first["norm"] == pytest.approx(first["true"], rel=1e-2), "the norm is unscaled"
    first, second = run_on_ranks(_scaled, True, world_size=2)
    assert first["moved"] == second["moved"] == 0 and first["scale"] == second["scale"] == 2.0**39


def test_a_policy_is_torchs_own() -> None:
    with pytest.raises(TypeError, match=r"MixedPrecisionPolicy, such as .*, not torch\.bfloat16"):
        autoparallel.compile(Net(), precision=torch.bfloat16)  # type: ignore[arg-type]
