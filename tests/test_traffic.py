"""`count_traffic()` sees what runs, and nothing else; what was predicted is what it counts."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.comm import groups
from autoparallel.comm.traffic import _NAMESPACES, _OPERATORS, _SILENT, Traffic
from autoparallel.placements import sent_bytes
from tests.distributed import run_distributed
from tests.models import build
from tests.runtime.support import run_on_ranks

Counts = dict[tuple[str, str], tuple[int, float]]


def _counts(traffic: Any) -> Counts:
    sent = traffic.bytes
    return {key: (count, sent[key]) for key, count in traffic.collectives.items()}


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


# ---------------------------------------------------------------------------------------------------------- counting


def _plain_collectives() -> Counts:
    x, pair = torch.ones(6), [torch.empty(6), torch.empty(6)]
    group = dist.new_group([0, 1], group_desc="a group of mine")
    # The pool's earlier calls may have compiled for a mesh, which names the world after its axes.
    unnamed = mock.patch.dict(groups._BOUND, clear=True)
    with unnamed, autoparallel.count_traffic() as traffic:
        dist.all_reduce(x)
        dist.all_reduce(x.double(), group=group)
        dist.all_gather(pair, x)
        dist.all_gather_into_tensor(torch.empty(12), x)
        dist.reduce_scatter_tensor(torch.empty(3), x)
        dist.all_to_all_single(torch.empty(6), x)
        dist.broadcast(x, 0)
        dist.barrier()
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    dist.all_reduce(x)  # after the context: not counted
    return _counts(traffic)


def test_plain_collectives_are_counted_by_kind_and_group() -> None:
    first, second = run_distributed(_plain_collectives, world_size=2)
    shared = {
        ("all_gather", "world"): (2, 2 * 24.0),
        ("all_reduce", "a group of mine"): (1, 48.0),
        ("all_reduce", "world"): (1, 24.0),
        ("all_to_all", "world"): (1, 12.0),
        ("barrier", "world"): (1, 0.0),
        ("broadcast", "world"): (1, 12.0),
        ("reduce_scatter", "world"): (1, 12.0),
    }
    assert first == shared | {("send", "world"): (1, 24.0)}
    assert second == shared | {("recv", "world"): (1, 0.0)}


def _functional_collectives() -> Counts:
    mesh = _mesh((2,))
    x = torch.ones(4, requires_grad=True)
    with autoparallel.count_traffic(mesh) as traffic:
        functional.all_reduce(x.detach(), "sum", (mesh, 0))
        y = functional.all_gather_tensor_autograd(x, 0, (mesh, 0))
        (y * y).sum().backward()  # its transpose is a reduce-scatter
    return _counts(traffic)


def test_functional_collectives_are_counted_also_in_backward() -> None:
    for counts in run_distributed(_functional_collectives, world_size=2):
        assert counts == {
            ("all_gather", "dp"): (1, 16.0),
            ("all_reduce", "dp"): (1, 16.0),
            ("reduce_scatter", "dp"): (1, 16.0),
        }


def _three_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))


def _other_systems() -> dict[str, Counts]:
    mesh = _mesh((2,))
    x = torch.ones(4, 8)
    found = {}
    replicated = DistributedDataParallel(_three_linears())
    with autoparallel.count_traffic(mesh) as traffic:
        replicated(x).sum().backward()
    found["ddp"] = _counts(traffic)
    sharded = _three_linears()
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(sharded, mesh=mesh)
    with autoparallel.count_traffic(mesh) as traffic:
        sharded(x).sum().backward()
    found["fsdp2"] = _counts(traffic)
    tensor = parallelize_module(_three_linears(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with autoparallel.count_traffic(mesh) as traffic:
        tensor(x.requires_grad_()).sum().backward()
    found["dtensor"] = _counts(traffic)
    return found


def test_other_systems_are_counted_so_that_benchmarks_can_compare() -> None:
    for found in run_distributed(_other_systems, world_size=2):
        weight = 8 * 8 * 4
        assert found["ddp"] == {("all_reduce", "dp"): (1, 2 * weight)}
        assert found["fsdp2"] == {
            ("all_gather", "dp"): (4, 4 * weight / 2),
            ("reduce_scatter", "dp"): (2, 2 * weight / 2),
        }
        activation = 4 * 8 * 4
        assert found["dtensor"] == {("all_reduce", "dp"): (2, 2.0 * activation)}


def test_every_collective_of_torch_is_known() -> None:
    """A collective that a new torch brings is not passed over in silence."""
    names = set()
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace in _NAMESPACES and namespace != "autoparallel":
            names.add(name.partition(".")[0])
    assert "allreduce_" in names
    assert names <= {*_OPERATORS, *_SILENT, "batch_p2p_ops"}


def test_counts_can_be_added_subtracted_and_printed() -> None:
    one = Traffic({("all_reduce", "dp", 3): (1, 900)})
    two = Traffic({("all_gather", "tp", 4): (2, 4_000_000)})
    both = one + two
    assert both.bytes == {("all_reduce", "dp"): 1200.0, ("all_gather", "tp"): 3_000_000.0}
    assert both - two == one
    assert both - both == Traffic() == both * 0
    assert (one * 3).collectives == {("all_reduce", "dp"): 3}
    assert both.total_collectives == 3 and both.total_bytes == 3_001_200
    assert [line.split() for line in str(both).splitlines() if "a" in line] == [
        ["collective", "mesh", "axis", "count", "bytes", "sent"],
        ["all_gather", "tp", "2", "3.0", "MB"],
        ["all_reduce", "dp", "1", "1.2", "kB"],
        ["all", "3", "3.0", "MB"],
    ]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_one_rank_sends_nothing(kind: str) -> None:
    assert sent_bytes(kind, 1000, 1) == 0
    assert sent_bytes(kind, 1000, 4) > 0


# -------------------------------------------------------------------------------------------------------- predicting


@dataclasses.dataclass(frozen=True)
class Observed:
    """What one rank predicted, and what it counted."""

    predicted: dict[str, Traffic]
    counted: dict[str, Traffic]
    regathered: int


def _train(name: str, shape: tuple[int, ...], plan: str) -> Observed:
    plain, loss_fn, args, kwargs = _case(name)
    model = autoparallel.compile(plain, _mesh(shape), loss_fn=loss_fn, plan=plan)

    def loss() -> torch.Tensor:
        result = model(*args, **kwargs)
        return result if isinstance(result, torch.Tensor) else result["loss"]

    loss().backward()  # the first call plans, and broadcasts the plan
    model.zero_grad()
    counted = {}
    with autoparallel.count_traffic() as traffic:
        loss().backward()
    counted["step"] = traffic.result()
    assert traffic.control_collectives == (2 if dist.get_world_size() > 1 else 0)  # before the call and the backward
    with autoparallel.count_traffic() as traffic:
        model.clip_grad_norm_(1.0)
    counted["clip"] = traffic.result()
    model.zero_grad()
    with autoparallel.count_traffic() as traffic:
        for micro in range(3):
            with contextlib.nullcontext() if micro == 2 else model.no_sync():
                loss().backward()
    counted["window"] = traffic.result()
    with autoparallel.count_traffic() as traffic, torch.no_grad():
        loss()
    counted["forward"] = traffic.result()
    p = model.plan.prediction
    assert p is not None
    predicted = {"step": p.step(), "clip": p.clip, "window": p.step(3), "forward": p.unshard + p.forward}
    assert p.total_memory > 0 and p.seconds(2) > p.seconds() > 0
    return Observed(predicted, counted, p.regathered)


def _train_all(cases: list[tuple[str, tuple[int, ...], str]]) -> list[Observed]:
    return [_train(*case) for case in cases]


class Wide(nn.Module):
    """Three linears of more than a bucket each, gathered and dropped one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1056, 1056, bias=False) for _ in range(3)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = torch.tanh(self.layers(x))
        return {"loss": (out * y).mean(), "out": out}


def _case(name: str) -> tuple[nn.Module, Any, tuple[Any, ...], dict[str, Any]]:
    if name == "wide":
        return Wide(), None, (torch.ones(8, 1056), torch.ones(8, 1056)), {}
    case = build(name, torch.float32)
    return case.model, case.loss_fn, *case.make_batch(0, 8)


PLANS = ("auto", "data_parallel", "fsdp", "tensor_parallel")
NAMES = ("mlp", "regressor", "gpt", "gpt_dropout", "resnet", "llama", "gpt2")
QUICK = {
    (2,): [*(("mlp", plan) for plan in PLANS), ("wide", "fsdp"), ("gpt", "tensor_parallel")],
    (4,): [("mlp", "auto"), ("regressor", "fsdp")],
    (2, 2): [("mlp", "tensor_parallel"), ("gpt_dropout", "tensor_parallel")],
    (2, 1): [("mlp", "fsdp"), ("mlp", "tensor_parallel")],
}


def _check(shape: tuple[int, ...], cases: list[tuple[str, str]]) -> None:
    work = [(name, shape, plan) for name, plan in cases]
    ranks = run_on_ranks(_train_all, work, world_size=torch.Size(shape).numel(), timeout=280)
    for case, *observations in zip(work, *ranks, strict=True):
        first = observations[0]
        for observed in observations:
            assert observed.counted == first.counted, f"{case}: ranks count differently"
            for what, counted in observed.counted.items():
                predicted = observed.predicted[what]
                assert predicted == counted, f"{case}, {what}: predicted\n{predicted}\ncounted\n{counted}"
                assert predicted.bytes == counted.bytes
        _check_not_vacuous(case, first.counted, first.regathered)


def _check_not_vacuous(case: tuple[str, tuple[int, ...], str], counted: dict[str, Traffic], regathered: int) -> None:
    name, _, plan = case
    step, window = counted["step"], counted["window"]
    assert counted["clip"].total_collectives == 1, f"{case}: the norm is one all-reduce"
    assert step.total_bytes > 0 or plan == "auto", case
    if plan in ("data_parallel", "fsdp"):
        assert (window - step).total_bytes < 2 * step.total_bytes, f"{case}: every microbatch reduces gradients"
    if plan == "fsdp":
        # The first linear's input needs no gradient, so nothing saves its weight: two of three are gathered again.
        assert regathered == 2 if name == "wide" else regathered > 0, f"{case}: {regathered} buckets gathered again"


@pytest.mark.wide_where(lambda shape: shape == (2, 2))
@pytest.mark.slow_where(lambda shape: len(shape) == 1)
@pytest.mark.parametrize("shape", QUICK, ids=str)
def test_predicted_equals_counted(shape: tuple[int, ...]) -> None:
    _check(shape, QUICK[shape])


class BesideLoss(nn.Module):
    """A second head that is returned but not trained: its weight is saved for a backward that never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.beside, self.head = (nn.Linear(1056, 1056, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.tanh(self.trunk(x))
        beside = self.beside(x)
        return {"loss": self.head(x).square().mean(), "beside": beside}


def _gather_ahead() -> tuple[float, bool]:
    model = autoparallel.compile(BesideLoss(), _mesh((2,)), plan="fsdp")
    x = torch.ones(8, 1056)
    with autoparallel.count_traffic() as traffic:
        model(x)["loss"].backward()
    state = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    state["beside.weight"].zero_()
    model.load_state_dict(state)
    with torch.no_grad():
        out = model(x)["beside"].full_tensor()
    assert model.plan.prediction is not None
    return out.abs().max().item(), model.plan.prediction.step() == traffic.result()


def test_a_gather_ahead_that_the_backward_does_not_use_is_dropped() -> None:
    """The next forward uses the parameters of then, not those that were gathered ahead."""
    assert run_distributed(_gather_ahead, world_size=2) == [(0.0, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_predicted_equals_counted_everywhere(shape: tuple[int, ...], name: str) -> None:
    _check(shape, [(name, plan) for plan in PLANS])


class _Watches(TorchDispatchMode):
    """A mode of the user's, which counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def _compiled(chunks: int) -> tuple[list[Traffic], list[float], list[int]]:
    """What is sent in eager and compiled, before and after a mode of the user's has watched; the losses, and what that
    mode saw."""
    counts, losses, products = [], [], []
    for backend in ("eager", "aot_eager"):
        case = build("gpt", torch.float64)
        args, kwargs = case.make_batch(0, 4)
        options: Any = {"plan": "tensor_parallel", "linear_chunks": chunks, "backend": backend}
        model = autoparallel.compile(case.model, _mesh((2,)), loss_fn=case.loss_fn, **options)
        model(*args, **kwargs).backward()
        for watched in (False, True, False):
            watches = _Watches()
            with watches if watched else contextlib.nullcontext(), autoparallel.count_traffic() as traffic:
                loss = model(*args, **kwargs)
                loss.backward()
            losses.append(loss.item())
            if watched:
                products.append(watches.products)
            else:
                counts.append(traffic.result())
    return counts, losses, products


@pytest.mark.wide
@pytest.mark.slow_where(lambda chunks: chunks == 1)
@pytest.mark.parametrize("chunks", [1, 2])
def test_compiled_programs_are_counted_and_may_be_watched(chunks: int) -> None:
    for (first, *others), losses, products in run_distributed(_compiled, chunks, world_size=2, timeout=300.0):
        assert first.total_bytes > 0 and all(each == first for each in others), (first, others)
        assert max(losses) - min(losses) < 1e-9
        assert min(products) > 0
