"""Parameters whose sizes do not divide lie in uneven shards; training, clipping, saving and loading do not notice.

The models' sizes are odd: on four ranks a bias of 5 lies as 2, 2, 1 and nothing. On every rank the padding that
travels stays out of gradients, norms, optimizer states and files; each test says which rank has least.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.runtime.support import (
    compiled_pair,
    gradients_off,
    make,
    mesh_of,
    off,
    parameters_off,
    placements,
    raised,
    run_on_ranks,
)

SHAPES = ((2,), (4,), (2, 2))
NORMS = (1.0, 2.0, 3.0, math.inf)
VOCABULARY = 11


class Odd(nn.Module):
    """A tied embedding of 11 tokens, linears of 7 and 5, a convolution of 5 channels; a frozen layer and an unused one.

    ``gate`` has fewer rows than four ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, 7)
        self.up = nn.Linear(7, 5)
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.norm = nn.LayerNorm(5)
        self.gate = nn.Linear(5, 3, bias=False)
        self.frozen = nn.Linear(3, 5)
        self.frozen.requires_grad_(False)
        self.down = nn.Linear(5, 7)
        self.head = nn.Linear(7, VOCABULARY, bias=False)
        self.head.weight = self.tok.weight
        self.unused = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.tok(x))
        x = self.norm(x + torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2)))
        x = x + self.frozen(torch.sigmoid(self.gate(x)))
        return self.head(self.down(x))


def odd_batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    x = torch.randint(0, VOCABULARY, (rows, 6), generator=generator)
    return x, torch.randint(0, VOCABULARY, (rows, 6), generator=generator)


def odd_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), y.reshape(-1))


def _pair(*shape: int, plan: str = "fsdp") -> tuple[Any, nn.Module]:
    return compiled_pair(Odd, *shape, plan=plan, loss_fn=odd_loss, example_inputs=odd_batch(0))


# b is a backward, n one under no_sync, c clips, s steps, z zero_grad, Z zero_grad(set_to_none=False)
SCENARIOS = ("bcszbcsz", "nnbcsznbcsz", "nncsznsz", "bnbcsz", "bnszbcsz", "nZnbcszbcsZnsZbcs")


def _play(model: Any, plain: nn.Module, scenario: str, norm_type: float = 2.0) -> float:
    """The largest difference of gradients, norms and parameters after any event."""
    model.zero_grad(), plain.zero_grad()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, plain)]
    worst, step = 0.0, 0
    for event in scenario:
        if event in "bn":
            step += 1
            with model.no_sync() if event == "n" else nullcontext():
                model(*odd_batch(step)).backward()
            odd_loss(plain(odd_batch(step)[0]), odd_batch(step)[1]).backward()
        elif event == "c":
            norm, expected = model.clip_grad_norm_(0.1, norm_type), nn.utils.clip_grad_norm_(
                [p for p in plain.parameters() if p.grad is not None], 0.1, norm_type
            )  # fmt: skip
            assert expected > 0.11, "the limit bites"
            worst = max(worst, off(norm, expected))
        elif event == "s":
            for optimizer in optimizers:
                optimizer.step()
        else:
            model.zero_grad(event == "z"), plain.zero_grad(event == "z")
        if event in "bcs":
            worst = max(worst, gradients_off(model, plain))
        worst = max(worst, parameters_off(model, plain))
    return worst


def _nan_on_one_rank(model: Any) -> dict[str, Any]:
    """The last element of a bias of 5, which the last rank that has any of it holds."""
    model.zero_grad()
    model(*odd_batch(0)).backward()
    local = model.up.bias.grad.to_local()
    mine = local.numel() > 0 and model.up.bias.to_local().shape[0] < 3 and _last_row_here(model.up.bias)
    if mine:
        local[-1] = math.nan
    found = {f"norm {p}": bool(model.clip_grad_norm_(math.inf, p).isnan()) for p in NORMS}
    return {"here": mine, "raised": raised(lambda: model.clip_grad_norm_(1.0, error_if_nonfinite=True)), **found}


def _last_row_here(parameter: DTensor) -> bool:
    whole = torch.arange(parameter.shape[0], dtype=torch.float64)
    mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    return bool((mine == parameter.shape[0] - 1).any())


def _optimizers(model: Any, plain: nn.Module) -> dict[str, float]:
    found = {}
    start = copy.deepcopy(plain.state_dict())
    cases = [("Adam", {"foreach": True}), ("Adam", {"fused": True}), ("AdamW", {"foreach": False, "amsgrad": True})]
    for name, options in [*cases, ("SGD", {"foreach": True, "momentum": 0.9}), ("RMSprop", {"foreach": True})]:
        model.load_state_dict(start), plain.load_state_dict(start)
        pair = [getattr(torch.optim, name)(m.parameters(), lr=0.01, **options) for m in (model, plain)]
        for step in range(2):
            model.zero_grad(), plain.zero_grad()
            model(*odd_batch(step)).backward()
            odd_loss(plain(odd_batch(step)[0]), odd_batch(step)[1]).backward()
            for optimizer in pair:
                optimizer.step()
        found[f"{name} {options}"] = parameters_off(model, plain)
    return found


def _traffic(model: Any) -> dict[str, bool]:
    import autoparallel

    prediction = model.plan.prediction
    model.zero_grad()
    with autoparallel.count_traffic() as traffic:
        model(*odd_batch(0)).backward()
    found = {"step": traffic.result() == prediction.step(), "sends": traffic.total_bytes > 0}
    with autoparallel.count_traffic() as traffic:
        model.clip_grad_norm_(1.0)
    found["clip"] = traffic.result() == prediction.clip
    model.zero_grad()
    with autoparallel.count_traffic() as traffic:
        for micro in range(3):
            with nullcontext() if micro == 2 else model.no_sync():
                model(*odd_batch(micro)).backward()
    found["window"] = traffic.result() == prediction.step(3)
    return found


def _values(model: Any, plain: nn.Module) -> float:
    model.zero_grad(), plain.zero_grad()
    model(*odd_batch(3)).backward()
    odd_loss(plain(odd_batch(3)[0]), odd_batch(3)[1]).backward()
    limit = 0.01
    assert any((p.grad.abs() > limit).any() for p in plain.parameters() if p.grad is not None)
    model.clip_grad_value_(limit), nn.utils.clip_grad_value_(plain.parameters(), limit)
    return gradients_off(model, plain)


def _everything(*shape: int) -> dict[str, Any]:
    model, plain = _pair(*shape)
    results: dict[str, Any] = {"layouts": placements(model)}
    results["local"] = {n: tuple(p.to_local().shape) for n, p in model.named_parameters()}
    results["numbers"] = {scenario: _play(model, plain, scenario) for scenario in SCENARIOS}
    results["numbers"] |= {f"p {p}": _play(model, plain, "nnbcszbcsz", p) for p in NORMS}
    results["numbers"] |= {"value": _values(model, plain)} | _optimizers(model, plain)
    results["nan"] = _nan_on_one_rank(model)
    results["traffic"] = _traffic(model)
    with torch.no_grad():
        model.eval(), plain.eval()
        results["numbers"]["eval"] = off(model(odd_batch(9)[0]), plain(odd_batch(9)[0]))
    return results


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def trained(request) -> tuple[tuple[int, ...], list[dict[str, Any]]]:
    shape = request.param
    return shape, run_on_ranks(_everything, *shape, world_size=math.prod(shape), timeout=240)


@pytest.mark.slow_where(lambda trained: trained != (2,))
class TestFullySharded:
    def test_gradients_norms_and_steps_equal_one_process(self, trained) -> None:
        for rank, results in enumerate(trained[1]):
            assert len(results["numbers"]) > 15
            wrong = {what: far for what, far in results["numbers"].items() if not far < 1e-9}
            assert not wrong, f"rank {rank}: {wrong}"

    def test_parameters_lie_in_shards_of_different_sizes(self, trained) -> None:
        shape, ranks = trained
        layouts = ranks[0]["layouts"]
        whole = {name: tuple(p.shape) for name, p in make(Odd).named_parameters()}
        rows = {name: [r["local"][name] for r in ranks] for name in whole}
        once = {"(2,)": "S0", "(4,)": "S0", "(2, 2)": "S0,S0"}[str(shape)]
        assert layouts["up.bias"] == layouts["tok.weight"] == layouts["frozen.bias"] == once
        pieces = {(2,): [3, 2], (4,): [2, 2, 1, 0], (2, 2): [2, 1, 1, 1]}[shape]
        assert [s[0] for s in rows["up.bias"]] == pieces
        assert {(2,): [6, 5], (4,): [3, 3, 3, 2], (2, 2): [3, 3, 3, 2]}[shape] == [s[0] for s in rows["tok.weight"]]
        for name, shapes in rows.items():
            copies = math.prod(n for n, how in zip(shape, layouts[name].split(","), strict=True) if how == "R")
            assert sum(map(math.prod, shapes)) == copies * math.prod(whole[name]), name
        if shape == (4,):  # three rows on four ranks: the other dim is cut
            assert layouts["gate.weight"] == "S1" and layouts["unused.bias"] == "R"

    def test_a_nan_is_seen_on_every_rank(self, trained) -> None:
        found = [r["nan"] for r in trained[1]]
        assert sum(f["here"] for f in found) == 1
        for f in found:
            assert all(f[f"norm {p}"] for p in NORMS) and "cannot be clipped" in f["raised"]

    def test_padded_bytes_are_predicted_as_they_are_counted(self, trained) -> None:
        for results in trained[1]:
            assert all(results["traffic"].values()), results["traffic"]


# ---------------------------------------------------------------------------------------------------- layouts at rest

LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, str]]] = {
    "rows": ((2,), {"*": "S0"}),
    "columns": ((2,), {"*": "S0", "tok.weight": "S1", "up.weight": "S1", "conv.weight": "S2", "down.weight": "S1"}),
    "rows over four": ((4,), {"*": "S0", "gate.weight": "S1", "unused.weight": "S1", "unused.bias": "I"}),
    "the first axis": ((2, 2), {"*": "S0,I"}),
    "the second axis": ((2, 2), {"*": "I,S0", "tok.weight": "I,S1"}),
    "two axes on one dim": ((2, 2), {"*": "S0,S0", "gate.weight": "S1,S1", "unused.bias": "I,S0"}),
    "two axes on two dims": (
        (2, 2),
        {"*": "S0,I", "tok.weight": "S0,S1", "up.weight": "S1,S0", "conv.weight": "S2,S1", "down.weight": "S0,S1"},
    ),
}


@functools.cache
def _searched(*shape: int) -> str:
    return _pair(*shape, plan="data_parallel")[0].plan.to_json()


def _laid_out(layouts: dict[str, str], *shape: int, reduce: str = "per_step") -> Any:
    import autoparallel
    from autoparallel.plan import Plan

    data = json.loads(_searched(*shape))
    for name, parameter in data["parameters"].items():
        parameter["reduce"] = reduce
        parameter["at_rest"] = layouts.get(name, layouts["*"])
        if parameter["at_rest"].startswith("S0,S0") and make(Odd).get_parameter(name).shape[0] < 4:
            parameter["at_rest"] = "S0,I"
    return autoparallel.compile(
        make(Odd), mesh_of(*shape), plan=Plan.from_json(json.dumps(data)), loss_fn=odd_loss, example_inputs=odd_batch(0)
    )


@functools.cache
def _elsewhere(*shape: int) -> tuple[Any, nn.Module]:
    return _pair(*shape)


def _state(name: str, directory: str) -> dict[str, Any]:
    shape, layouts = LAYOUTS[name]
    model, plain = _laid_out(layouts, *shape), make(Odd)
    results: dict[str, Any] = {"layouts": placements(model)}
    numbers = results["numbers"] = {"made": parameters_off(model, plain)}
    pair = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(2):
        model(*odd_batch(step)).backward()
        odd_loss(plain(odd_batch(step)[0]), odd_batch(step)[1]).backward()
        numbers[f"gradients {step}"] = gradients_off(model, plain)
        for optimizer in pair:
            optimizer.step()
    numbers["trained"] = parameters_off(model, plain)
    moments = {n: (pair[0].state[p], pair[1].state[q]) for (n, p), (_, q) in _both(model, plain) if p in pair[0].state}
    numbers["moments"] = max(off(mine["exp_avg"], theirs["exp_avg"]) for mine, theirs in moments.values())

    path = os.path.join(directory, name.replace(" ", "_"))
    first = {n: mine["exp_avg"] for n, (mine, _) in moments.items()}
    dcp.save({"model": model.state_dict(), "moments": first}, checkpoint_id=path)
    saved = {n: v.full_tensor().clone() for n, v in model.state_dict().items()}
    model.load_state_dict(make(Odd, seed=1).state_dict())
    results["changed"] = parameters_off(model, plain) > 0.1
    state = {"model": model.state_dict(), "moments": {n: torch.zeros_like(v) for n, v in first.items()}}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    numbers["loaded"] = parameters_off(model, plain)
    numbers["moments loaded"] = max(off(state["moments"][n], theirs["exp_avg"]) for n, (_, theirs) in moments.items())

    whole = {n: torch.zeros(v.shape, dtype=v.dtype) for n, v in saved.items()}  # as one process reads it
    dcp.load({"model": whole}, checkpoint_id=path, no_dist=True)
    numbers["read by one process"] = max(off(whole[n], saved[n]) for n in saved)

    for elsewhere in {2: ((2,),), 4: ((4,), (2, 2))}[dist.get_world_size()]:
        target, reference = _elsewhere(*elsewhere)
        state = {"model": target.state_dict()}
        dcp.load(state, checkpoint_id=path)
        target.load_state_dict(state["model"]), reference.load_state_dict(saved)
        numbers[f"loaded on {elsewhere}"] = parameters_off(target, plain)

    mesh = mesh_of(*shape)
    for kind in (Replicate(), Shard(0)):  # DTensors that lie otherwise
        other = [kind] + [Replicate()] * (len(shape) - 1)
        twice = {n: distribute_tensor(2 * v, mesh, other, src_data_rank=None) for n, v in saved.items()}
        model.load_state_dict(twice)
        numbers[f"DTensors as {kind}"] = max(off(v, 2 * saved[n]) for n, v in model.state_dict().items())
        model.load_state_dict(saved)
    results["kept"] = placements(model) == results["layouts"]
    return results


def _both(model: nn.Module, plain: nn.Module) -> Any:
    return zip(model.named_parameters(), plain.named_parameters(), strict=True)


@pytest.mark.slow_where(lambda name: name != "rows")
@pytest.mark.parametrize("name", LAYOUTS)
def test_state_of_every_uneven_layout(name: str, tmp_path) -> None:
    shape, layouts = LAYOUTS[name]
    for results in run_on_ranks(_state, name, str(tmp_path), world_size=math.prod(shape)):
        assert results["kept"] and results["changed"]
        for parameter, layout in layouts.items():
            assert parameter == "*" or results["layouts"][parameter] == layout.replace("I", "R")
        assert layouts["*"].replace("I", "R") == results["layouts"]["up.bias"]
        wrong = {k: v for k, v in results["numbers"].items() if not v < 1e-9}
        assert len(results["numbers"]) >= 10 and not wrong, wrong


def _reduced(reduce: str) -> dict[str, Any]:
    model, plain = _laid_out(LAYOUTS["two axes on two dims"][1], 2, 2, reduce=reduce), make(Odd)
    found = {scenario: _play(model, plain, scenario) for scenario in ("nnbcsz", "nncsznsz", "bnbcsz")}
    model.zero_grad(), plain.zero_grad()
    pair = [torch.optim.Adam(m.parameters(), lr=0.01, fused=True) for m in (model, plain)]
    for step in range(3):
        with model.no_sync():
            model(*odd_batch(step)).backward()
        odd_loss(plain(odd_batch(step)[0]), odd_batch(step)[1]).backward()
    for optimizer in pair:
        optimizer.step()
    found["a fused step"] = parameters_off(model, plain)
    return {"numbers": found, "strides": all(g.is_contiguous() for g in _local_gradients(model))}


def _local_gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]


@pytest.mark.wide
@pytest.mark.slow_where(lambda reduce: reduce != "per_microbatch")
@pytest.mark.parametrize("reduce", ["per_step", "per_microbatch", "across_replicas_per_step"])
def test_uneven_gradients_reduced_at_any_time(reduce: str) -> None:
    """Fused optimizers read a gradient's memory with its parameter's strides, so these must agree."""
    for results in run_on_ranks(_reduced, reduce, world_size=4):
        wrong = {k: v for k, v in results["numbers"].items() if not v < 1e-9}
        assert not wrong and results["strides"], wrong


def _meta() -> dict[str, Any]:
    import autoparallel

    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    model = autoparallel.compile(meta, mesh_of(4), plan="fsdp", example_inputs=(x,))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    return {"off": parameters_off(model, plain), "local": [tuple(p.to_local().shape) for p in model.parameters()][:2]}


def test_a_meta_model_is_materialised_in_uneven_shards() -> None:
    found = run_on_ranks(_meta, world_size=4)
    assert all(f["off"] == 0.0 for f in found), found
    # 5 rows of 7 over four ranks: cutting the columns pads one of them, cutting the rows would pad three rows
    assert [f["local"] for f in found] == [[(5, 2), (2,)], [(5, 2), (2,)], [(5, 2), (1,)], [(5, 1), (0,)]]


def _refused() -> list[str]:
    return [raised(lambda: _laid_out({"*": "S0"}, 4)), raised(lambda: _laid_out({"*": "I", "up.bias": "S1"}, 4))]


@pytest.mark.wide
def test_more_ranks_than_rows_are_refused_by_name() -> None:
    for few, missing in run_on_ranks(_refused, world_size=4):
        assert "PlanError" in few and "shape [3" in few and "cannot lie as S0 on (dp=4)" in few, few
        assert "PlanError" in missing and "up.bias" in missing and "S1" in missing, missing
