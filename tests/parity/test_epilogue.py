"""The gradient epilogue: accumulation, norm and clipping equal one process on every mesh, for every p and limit.

SGD without momentum, so that a wrong coefficient cannot hide; every row of every batch differs, so that every rank has
other data; some targets are ignored, so that every rank and microbatch counts another number of them.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.distributed import run_distributed
from tests.models import Experts, MoEConfig

MESHES: dict[tuple[str, ...], str] = {
    ("dp",): "fsdp",
    ("tp",): "tensor_parallel",
    ("ep",): "expert_parallel",
    ("dp", "tp"): "tensor_parallel",
    ("dp", "ep"): "fsdp",
    ("ep", "tp"): "expert_parallel",
    ("dp", "ep", "tp"): "expert_parallel",
}
VARIANTS = ("tied", "frozen", "unused", "odd sizes", "groups", "nan on one rank")
NORMS: tuple[float | str, ...] = (1.0, 2.0, 3.0, math.inf, "value")
MICROBATCHES = (1, 2, 3, 5)
BITES = (True, False)
ROWS, LENGTH = 8, 3


@dataclass(frozen=True)
class Case:
    """One cell of the grid, on one mesh and model."""

    norm: float | str
    bites: bool
    microbatches: int

    @property
    def batches(self) -> int:
        """Two full windows, or one and a short one."""
        return 7 if self.microbatches == 5 else 2 * self.microbatches


CASES = [Case(*values) for values in itertools.product(NORMS, BITES, MICROBATCHES)]


class Model(nn.Module):
    """Experts beside dense layers, norms and a bias; what a variant asks for is in it."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        width, vocabulary = (7, 13) if variant == "odd sizes" else (8, 16)
        self.config = config = MoEConfig(experts=4, width=width, hidden=12)
        self.embedding = nn.Embedding(vocabulary, width)
        self.router = nn.Linear(width, config.experts, bias=False)
        self.experts = Experts(config)
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if variant == "tied":
            self.head.weight = self.embedding.weight
        if variant == "frozen":
            self.middle.requires_grad_(False)
        if variant == "unused":
            self.unused = nn.Parameter(torch.ones(8))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.4)
            elif parameter is not self.norm.weight:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).flatten(0, 1)
        share = self.router(x).softmax(-1)
        made = self.experts(x.unsqueeze(0).expand(self.config.experts, -1, -1))
        x = x + torch.einsum("ne,end->nd", share, made)
        return self.head(torch.tanh(self.middle(self.norm(x))))


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target.flatten(), ignore_index=-1)


def batch(index: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    ids, target = torch.randint(0, vocabulary, (2, ROWS, LENGTH), generator=generator)
    keep = torch.rand((ROWS, LENGTH), generator=generator) < (0.9, 0.3, 0.6)[index % 3]
    return ids, torch.where(keep, target, -1)


@functools.cache
def compiled(axes: tuple[str, ...], variant: str) -> tuple[Any, nn.Module, dict[str, Tensor]]:
    """The model on a mesh, the plain one, and the weights to start from; kept by the worker."""
    torch.manual_seed(0)
    plain = Model(variant).double()
    mesh = init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=axes)
    example = batch(0, plain.embedding.num_embeddings)
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=loss_fn, plan=MESHES[axes], example_inputs=example)
    return model, plain, copy.deepcopy(plain.state_dict())


def groups_of(model: nn.Module, limit: float) -> list[dict[str, Any]]:
    """Three parameter groups with limits of their own; the last has none."""
    named = list(model.named_parameters())
    experts = [p for n, p in named if "experts" in n]
    dense = [p for n, p in named if n.startswith(("router", "middle"))]
    rest = [p for n, p in named if "experts" not in n and not n.startswith(("router", "middle"))]
    return [{"params": experts, "max_norm": limit}, {"params": dense, "max_norm": limit / 2}, {"params": rest}]


def off(model: Any, plain: nn.Module, of: Callable[[nn.Parameter], Any]) -> float:
    worst = 0.0
    for (name, mine), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        a, b = of(mine), of(theirs)
        assert (a is None) == (b is None), name
        if a is not None:
            a, b = a.full_tensor().detach(), b.detach()
            assert torch.equal(a.isfinite(), b.isfinite()), name
            worst = max(worst, (a - b).nan_to_num(0).abs().max().item())
    return worst


def clip_plain(groups: list[dict[str, Any]], case: Case, limit: float) -> list[float]:
    """What one process does: torch's own clipping, group by group."""
    norms = []
    for group in groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        bound = group.get("max_norm", limit if len(groups) == 1 else None)
        if case.norm == "value":
            nn.utils.clip_grad_value_(parameters, limit)
        elif bound is None:
            norms.append(nn.utils.get_total_norm([p.grad for p in parameters], float(case.norm)).item())
        else:
            norms.append(nn.utils.clip_grad_norm_(parameters, bound, float(case.norm)).item())
    return norms


def clip_ours(model: Any, optimizer: torch.optim.Optimizer, case: Case, limit: float, variant: str) -> list[float]:
    if case.norm == "value":
        model.clip_grad_value_(limit)
        return []
    if variant == "groups":
        return [norm.item() for norm in model.clip_grad_norm_(optimizer, float(case.norm))]
    return [model.clip_grad_norm_(limit, float(case.norm)).item()]


def run_case(axes: tuple[str, ...], variant: str, case: Case) -> dict[str, Any]:
    model, plain, start = compiled(axes, variant)
    model.load_state_dict(start)
    plain.load_state_dict(start)
    model.zero_grad(), plain.zero_grad()
    limit = (0.02 if case.norm == "value" else 0.05) if case.bites else 1e3
    if variant == "groups":
        groups, own = groups_of(plain, limit), groups_of(model, limit)
    else:
        groups, own = [{"params": list(plain.parameters())}], [{"params": list(model.parameters())}]
    ours, theirs = torch.optim.SGD(own, lr=0.1), torch.optim.SGD(groups, lr=0.1)
    worst = dict.fromkeys(("gradients", "norms", "clipped", "parameters"), 0.0)
    bit, windows = True, 0
    data = [batch(i, plain.embedding.num_embeddings) for i in range(case.batches)]  # type: ignore[union-attr]
    for window in model.accumulate(case.microbatches, data):
        seen = []
        for ids, target in window:
            model(ids, target).backward()
            seen.append((ids, target))
        ids, target = (torch.cat(parts) for parts in zip(*seen, strict=True))
        loss_fn(plain(ids), target).backward()
        worst["gradients"] = max(worst["gradients"], off(model, plain, lambda p: p.grad))
        before = off_norm(plain)
        if variant == "nan on one rank":
            poison(model, plain)
        found, expected = clip_ours(model, ours, case, limit, variant), clip_plain(groups, case, limit)
        if variant == "nan on one rank":
            assert all(math.isnan(n) for n in (*found, *expected)), (found, expected)
        else:
            worst["norms"] = max([worst["norms"], *(abs(a - b) for a, b in zip(found, expected, strict=True))])
            bit &= (off_norm(plain) < before * (1 - 1e-6)) == case.bites
        worst["clipped"] = max(worst["clipped"], off(model, plain, lambda p: p.grad))
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
        windows += 1
        if variant == "nan on one rank":
            break
    worst["parameters"] = off(model, plain, lambda p: p)
    sharded = {n for n, p in model.named_parameters() if any(q.is_shard() for q in p.placements)}
    return {"worst": worst, "bit": bit, "windows": windows, "sharded": sharded}


def off_norm(plain: nn.Module) -> float:
    return nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]).item()


def poison(model: Any, plain: nn.Module) -> None:
    """One element of one gradient becomes NaN, on the one rank that holds it (and on its replicas)."""
    gradient = model.experts.up.grad
    coordinate = gradient.device_mesh.get_coordinate()
    if all(c == 0 for c, p in zip(coordinate, gradient.placements, strict=True) if p.is_shard()):
        gradient.to_local().view(-1)[0] = math.nan
    theirs = plain.experts.up.grad  # type: ignore[union-attr]
    assert isinstance(theirs, Tensor)
    theirs.view(-1)[0] = math.nan


def check(axes: tuple[str, ...], variant: str, cases: list[Case]) -> None:
    for rank in run_distributed(_run, axes, variant, cases, world_size=2 ** len(axes), timeout=280):
        for case, found in zip(cases, rank, strict=True):
            what = f"{axes} {variant} {case}: {found}"
            assert max(found["worst"].values()) < 1e-9, what
            assert found["bit"], f"vacuous: {what}"
            assert found["windows"] == (1 if variant == "nan on one rank" else 2), what
            assert found["sharded"], what
            if "ep" in axes:
                assert {"experts.up", "experts.down"} <= found["sharded"], what


def _run(axes: tuple[str, ...], variant: str, cases: list[Case]) -> list[dict[str, Any]]:
    return [run_case(axes, variant, case) for case in cases]


@pytest.mark.wide_where(lambda variant: variant == "tied")
@pytest.mark.parametrize("variant", ["tied", "nan on one rank"])
def test_cases_of_the_grid(variant: str) -> None:
    check(("ep",), variant, [Case(2.0, True, 3), Case(math.inf, False, 1)])


@pytest.mark.wide
@settings(max_examples=2, deadline=None, derandomize=True, database=None)
@given(
    axes=st.sampled_from([axes for axes in MESHES if len(axes) < 3]),
    variant=st.sampled_from(VARIANTS),
    cases=st.lists(st.sampled_from(CASES), min_size=4, max_size=4, unique=True),
)
def test_a_sample_of_the_grid(axes: tuple[str, ...], variant: str, cases: list[Case]) -> None:
    check(axes, variant, cases)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("axes", MESHES, ids="-".join)
def test_the_whole_grid(axes: tuple[str, ...], variant: str) -> None:
    """40 cases for each mesh and model; 1680 in all."""
    check(axes, variant, CASES)
