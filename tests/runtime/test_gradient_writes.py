"""What a loop writes to gradients, whole ones and summands under ``no_sync()``, is what it writes on one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import autoparallel
from tests.runtime.support import mesh_of, off, parameters_off, raised, run_on_ranks

Parameters = Sequence[Any]


def _unit_norm(x: Tensor) -> Tensor:
    return x.norm(2.0) if x.ndim <= 1 else x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)


def _clip_adaptively(parameters: Parameters) -> None:
    """As timm has it."""
    for p in parameters:
        limit = _unit_norm(p.data).clamp_(min=1e-3).mul_(0.01)
        norm = _unit_norm(p.grad.data)
        clipped = p.grad.data * (limit / norm.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(norm < limit, p.grad.data, clipped))


def _each(write: Callable[[Any], object]) -> Callable[[Parameters], None]:
    def writes(parameters: Parameters) -> None:
        for p in parameters:
            write(p)

    return writes


def _laid_whole(p: Any) -> None:
    if isinstance(p.grad, DTensor):
        p.grad = p.grad.redistribute(placements=[Replicate()] * p.device_mesh.ndim)


WRITES: dict[str, Callable[[Parameters], object]] = {
    "adaptive clipping": _clip_adaptively,
    "clip_grad_value_": lambda ps: nn.utils.clip_grad_value_(ps, 0.003),
    "clip_grad_value_, one by one": lambda ps: nn.utils.clip_grad_value_(ps, 0.003, foreach=False),
    "clamp_": _each(lambda p: p.grad.clamp_(-0.003, 0.003)),
    "clamp_ of data": _each(lambda p: p.grad.data.clamp_(-0.003, 0.003)),
    "nan_to_num_": _each(lambda p: p.grad.nan_to_num_()),
    "sign_": _each(lambda p: p.grad.sign_()),
    "mul_": _each(lambda p: p.grad.mul_(0.5)),
    "fill_": _each(lambda p: p.grad.fill_(0.1)),
    "a number added": _each(lambda p: p.grad.add_(0.1)),
    "decay": _each(lambda p: p.grad.add_(p, alpha=0.1)),
    "a row": _each(lambda p: p.grad[0].fill_(0.25)),
    "a mask": _each(lambda p: p.grad.masked_fill_(p.grad.abs() > 0.003, 0.0)),
    "norms changed in place": _each(lambda p: p.grad.div_(p.grad.norm().clamp_(min=1e-3).add_(1e-6))),
    "lists": lambda ps: torch._foreach_clamp_max_([p.grad for p in ps], 0.003),
    "lists made": lambda ps: torch._foreach_copy_(
        [p.grad for p in ps], torch._foreach_clamp_max([p.grad for p in ps], 0.003)
    ),
    "replaced": _each(lambda p: setattr(p, "grad", p.grad.clamp(-0.003, 0.003))),
    "replaced by whole ones": _each(_laid_whole),
}
TIMES = ("after a backward", "in no_sync", "after no_sync and a backward", "between no_sync and the step")


def _apart(shape: tuple[int, ...], plan: str) -> dict[str, float | str]:
    """How far parameters are apart after two steps with each kind of write, at each time."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = autoparallel.compile(copy.deepcopy(plain), mesh_of(*shape), plan=plan)
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    distances: dict[str, float | str] = {}

    @torch.no_grad()
    def write(name: str, m: Any) -> None:
        WRITES[name]([*m.parameters()])

    def train(name: str, time: str, m: Any) -> None:
        if time != "after a backward":
            with m.no_sync() if m is model else contextlib.nullcontext():
                m(batches[0]).square().mean().backward()
                if time == "in no_sync":
                    write(name, m)
        if time == "between no_sync and the step":
            write(name, m)
            return
        m(batches[1]).square().mean().backward()
        if time != "in no_sync":
            write(name, m)

    for time in TIMES:
        for name in WRITES:
            key = f"{name}, {time}"
            for _ in range(2):
                for m, optimizer in zip((plain, model), optimizers, strict=True):
                    optimizer.zero_grad()
                    words = raised(lambda m=m: train(name, time, m))  # noqa: B023
                    if words:
                        return {**distances, key: words}
                    optimizer.step()
            distances[key] = parameters_off(model, plain)
    return distances


@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        ((2,), "fsdp"),
        pytest.param((2,), "tensor_parallel", marks=pytest.mark.wide),
        pytest.param((2, 2), "hybrid", marks=pytest.mark.slow),
        pytest.param((2, 2), "fsdp_tensor_parallel", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_written_as_on_one_process(shape: tuple[int, ...], plan: str) -> None:
    for rank in run_on_ranks(_apart, shape, plan, world_size=4 if len(shape) == 2 else 2):
        assert {k: v for k, v in rank.items() if isinstance(v, str) or not v <= 1e-9} == {}


def _kept(plan: str) -> dict[str, float]:
    """What a script has of a gradient that it keeps while the store adds to it, reduces and clips it, and steps."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan=plan)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model)]
    batches = [torch.randn(8, 6, dtype=torch.float64) for _ in range(3)]
    apart: dict[str, float] = {}
    for synchronised in ((True, False, True), (False, True, False), (False, False, True)):
        kept: list[Tensor] = []
        for m in (plain, model):
            for x, together in zip(batches, synchronised, strict=True):
                with contextlib.nullcontext() if together or m is plain else m.no_sync():
                    m(x).square().mean().backward()
                if x is batches[0]:
                    kept.append(m.get_parameter("0.weight").grad)
        apart[f"{synchronised}, after backwards"] = off(kept[1], kept[0])
        model.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        apart[f"{synchronised}, clipped"] = off(kept[1], kept[0])
        with torch.no_grad():
            for grad in kept:
                grad.mul_(0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        apart[f"{synchronised}, stepped"] = max(off(kept[1], kept[0]), parameters_off(model, plain))
    return apart


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_a_gradient_that_is_kept_is_the_parameters(plan: str) -> None:
    for rank in run_on_ranks(_kept, plan, world_size=2):
        assert {name: apart for name, apart in rank.items() if not apart <= 1e-9} == {}
