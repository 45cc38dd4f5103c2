"""What a pipeline sends, refuses, saves and survives."""

from __future__ import annotations

import copy
import functools
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.tools.processes import ProcessError
from tests.distributed import failures_of, open_pool, run_in
from tests.runtime.support import gradients_off, off, parameters_off, raised, run_on_ranks


class Layers(nn.Module):
    """As many linears as asked for."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def data(rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 8, generator=generator)


def compiled(
    mesh: DeviceMesh, *, layers: int = 4, schedule: str = "1f1b", microbatches: int = 4, **options: Any
) -> Any:
    import autoparallel

    per_rank = 2 if schedule in ("interleaved_1f1b", "zero_bubble_v") else 1
    torch.manual_seed(options.pop("seed", 0))
    pipeline = autoparallel.Pipeline(schedule, microbatches, per_rank)
    return autoparallel.compile(Layers(layers), mesh, loss_fn=F.mse_loss, pipeline=pipeline, **options)


@functools.cache
def pipeline_mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp")[: len(shape)])


# ------------------------------------------------------------------------------------------------------------ traffic


def _traffic(schedule: str) -> dict[str, Any]:
    import autoparallel

    model = compiled(pipeline_mesh(2, 2), schedule=schedule, plan="data_parallel")
    model.prepare(*data())
    with autoparallel.count_traffic() as schedule_traffic:
        loss = model(*data())
    with autoparallel.count_traffic() as gradients:
        loss.backward()
    with autoparallel.count_traffic() as clip:
        model.clip_grad_norm_(1.0)
    with autoparallel.count_traffic() as waiting, model.no_sync():
        model(*data()).backward()
    return {
        "schedule": schedule_traffic.collectives,
        "bytes": schedule_traffic.bytes,
        "gradients": gradients.collectives,
        "clip": clip.collectives,
        "no_sync": waiting.collectives == schedule_traffic.collectives,
    }


@pytest.mark.wide_where(lambda schedule: schedule != "1f1b")
@pytest.mark.parametrize(("schedule", "borders"), [("1f1b", 1), ("zero_bubble_v", 2)])
def test_each_border_is_crossed_once_a_microbatch_and_gradients_are_reduced_once_a_step(
    schedule: str, borders: int
) -> None:
    for rank, seen in enumerate(run_on_ranks(_traffic, schedule, world_size=4)):
        with_loss = rank < 2 if schedule == "zero_bubble_v" else rank >= 2
        # Of both directions over every border between ranks, each rank sends one; and one sends the loss.
        assert seen["schedule"] == {
            ("recv", "pp"): 4 * borders + (not with_loss),
            ("send", "pp"): 4 * borders + with_loss,
        } | ({("all_reduce", "dp"): 4} if with_loss else {})  # the mean loss of each microbatch, over its rows
        one = 4 * 8 // 4 // 2 * 8  # bytes of the 8 columns of one rank's row of a microbatch of 2
        assert seen["bytes"]["send", "pp"] == 4 * borders * one + with_loss * 4
        assert seen["gradients"] == {("all_reduce", "dp"): 2 if schedule == "zero_bubble_v" else 1}
        assert seen["clip"] == {("all_reduce", "pp+dp"): 1}
        assert seen["no_sync"]


# --------------------------------------------------------------------------------------------- parameters of a schedule


class Viewed(nn.Module):
    """Two parameters that are viewed and added, between linears: autograd gives both of them views of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.one, self.other = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x)))) + (self.one.view(8) + self.other.view(8))
        return self.last(x)


class _SameValues(TorchDispatchMode):
    """Counts calls that make another tensor of the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.detach, torch.ops.aten.view, torch.ops.aten.alias)
        return func(*args, **(kwargs or {}))


def _hand_out() -> dict[str, Any]:
    import autoparallel

    found: dict[str, Any] = {}
    for schedule, per_rank in (("1f1b", 1), ("zero_bubble", 1)):
        torch.manual_seed(0)
        plain = Viewed().double()
        x, y = (t.double() for t in data())
        pipeline = autoparallel.Pipeline(schedule, 4, per_rank, ("middle/aten.linear#0",))
        model = autoparallel.compile(copy.deepcopy(plain), pipeline_mesh(2), loss_fn=F.mse_loss, pipeline=pipeline)
        model(x, y).backward()
        F.mse_loss(plain(x), y).backward()
        expected = {name: p.grad for name, p in plain.named_parameters()}
        mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found[schedule] = max(off(grad, expected[name]) for name, grad in mine.items())
    for microbatches in (2, 4):
        model = compiled(pipeline_mesh(2), layers=8, microbatches=microbatches)
        model(*data()).backward()
        with _SameValues() as same:
            model(*data()).backward()
        found[f"{microbatches} microbatches"] = same.count
    return found


@pytest.mark.wide
def test_parameters_are_handed_to_a_stage_once_and_every_microbatch_adds_to_their_gradients() -> None:
    for seen in run_on_ranks(_hand_out, world_size=2):
        assert seen["1f1b"] < 1e-12 and seen["zero_bubble"] < 1e-12
        # Two microbatches more: handing a stage's 8 parameters out anew would make 16 tensors more in each of them.
        assert seen["4 microbatches"] - seen["2 microbatches"] < 2 * 20


def _chosen(axis: str) -> dict[str, Any]:
    """Backwards for some parameters only, of a model two of whose layers, on both stages, are one."""
    import autoparallel

    torch.manual_seed(0)
    plain = Layers(5).double()
    plain.layers[4] = plain.layers[0]
    x, y = (t.double() for t in data())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    cut: dict[str, Any] = {"microbatches": 2, "plan": "fsdp"}
    if axis == "pp":
        cut = {"pipeline": autoparallel.Pipeline("1f1b", 2, 1, ("layers.2/aten.linear#0",))}
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=F.mse_loss, **cut)
    ways = {
        "first stage": lambda m, loss: loss.backward(inputs=[m.layers[1].weight]),
        "second stage": lambda m, loss: loss.backward(inputs=[m.layers[3].bias]),
        "both": lambda m, loss: loss.backward(inputs=[m.layers[0].weight, m.layers[2].weight]),
        "frozen since": lambda m, loss: (m.layers[3].requires_grad_(False), loss.backward()),
    }
    found: dict[str, Any] = {}
    for what, way in ways.items():
        for m, loss in ((model, model(x, y)), (plain, F.mse_loss(plain(x), y))):
            m.zero_grad()
            way(m, loss)
        found[what] = gradients_off(model, plain)
    loss = model(x, y)
    found["refused"] = raised(lambda: torch.autograd.grad(loss, list(model.parameters())[:1]))
    return found


@pytest.mark.parametrize("axis", ["pp", "dp"])
def test_backward_of_chosen_parameters_gives_gradients_to_these_alone(axis: str) -> None:
    for found in run_on_ranks(_chosen, axis, world_size=2):
        assert "call backward()" in found.pop("refused")
        assert all(value < 1e-12 for value in found.values()), found


# ----------------------------------------------------------------------------------------------------------- autocast


def _gradients_under_autocast() -> dict[str, float]:
    """How far gradients are from those of the plain model, called for each microbatch under the same autocast; and from
    those without it."""
    model = compiled(pipeline_mesh(2))
    torch.manual_seed(0)
    plain = Layers()
    x, y = data()
    model(x, y).backward()
    without = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, y)
        for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
            (F.mse_loss(plain(part), goal) / 4).backward()
    loss.backward()
    theirs = dict(plain.named_parameters())
    mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        "eager": max(off(grad, theirs[name].grad) for name, grad in mine.items()),
        "no autocast": min(off(grad, without[name]) for name, grad in mine.items()),
    }


@pytest.mark.wide
def test_gradients_under_autocast_are_those_of_eager_autocast() -> None:
    for found in run_on_ranks(_gradients_under_autocast, world_size=2):
        assert found["eager"] < 1e-6 < 1e-5 < found["no autocast"], found


# ------------------------------------------------------------------------------------------------------------- errors


def _refuse() -> dict[str, str | None]:
    mesh, x_y = pipeline_mesh(2), data()
    model = compiled(mesh)
    model(*x_y).backward()
    x, y = x_y
    loss = model(x, y)
    loss.backward(retain_graph=True)
    calls = {
        "more stages than layers": lambda: compiled(mesh, layers=1)(*x_y),
        "fewer microbatches than ranks": lambda: compiled(mesh, microbatches=1)(*x_y),
        "microbatches that the schedule cannot run": lambda: compiled(
            mesh, schedule="interleaved_1f1b", microbatches=7
        )(*data(14)),
        "too little memory": lambda: compiled(mesh, memory_limit=100.0)(*x_y),
        "a DTensor": lambda: model(DTensor.from_local(x, mesh, [Replicate()]), y),
        "another backward": lambda: loss.backward(),
        "differentiating outputs": lambda: model(x).sum().backward(),
        "sharded outputs": lambda: compiled(mesh, outputs="sharded"),
        "half precision": lambda: __import__("autoparallel").compile(Layers().half(), mesh),
        "differentiating the inputs": lambda: model(x.clone().requires_grad_(), y),
    }
    found = {name: raised(call) for name, call in calls.items()}
    found["afterwards"] = str(bool(torch.isfinite(model(*x_y))))
    return found


REFUSED = {
    "more stages than layers": ("2 stages", "1 operators with parameters"),
    "fewer microbatches than ranks": ("1 microbatches", "2 ranks"),
    "microbatches that the schedule cannot run": ("interleaved_1f1b", "7"),
    "too little memory": ("stage 0", "100 B", "memory_limit"),
    "a DTensor": ("another mesh|plain tensors",),
    "another backward": ("second time",),
    "differentiating outputs": ("loss_fn",),
    "sharded outputs": ("sharded", "gather"),
    "half precision": ("float16", "bfloat16"),
    "differentiating the inputs": ("inputs", "detach"),
}


@pytest.mark.wide
def test_what_cannot_be_run_is_refused_on_every_rank_before_anything_is_sent() -> None:
    import re

    for found in run_on_ranks(_refuse, world_size=2):
        assert found.pop("afterwards") == "True"
        assert found.keys() == REFUSED.keys()
        for name, words in REFUSED.items():
            assert found[name] is not None, f"{name}: nothing was raised"
            for word in words:
                assert re.search(word, found[name]), f"{name}: {found[name]}"


def _die_in_the_middle(rank: int) -> None:
    from autoparallel.runtime.programs.stages import Stage

    model = compiled(pipeline_mesh(2))
    model(*data()).backward()
    whole = Stage.forward

    def forward(self: Stage, microbatch: int, *args: Any) -> Any:
        if dist.get_rank() == rank and microbatch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, microbatch, *args)

    Stage.forward = forward  # type: ignore[method-assign]
    model(*data()).backward()


def test_a_rank_killed_in_a_schedule_stops_the_others_with_an_error_that_names_the_stage() -> None:
    with open_pool(2) as pool, pytest.raises(ProcessError) as caught:
        run_in(pool, _die_in_the_middle, 1, timeout=60)
    errors = failures_of(caught.value)
    assert errors[1].type == "Died"
    assert errors[0].type == "PipelineError"
    assert "stage 0 (layers.0 to " in errors[0].message
    assert "from stage 1 on rank 1" in errors[0].message


# ------------------------------------------------------------------------------------------------ what goes together


def _compose() -> dict[str, float]:
    """How far a pipeline is off from the plain model, in windows of `accumulate`, with a saved plan, in evaluation."""
    import autoparallel

    mesh = pipeline_mesh(2)
    batches = [tuple(t.double() for t in data(rows, seed)) for seed, rows in enumerate((8, 4, 8))]
    pipeline = autoparallel.Pipeline("1f1b", 4)
    planned = autoparallel.compile(
        Layers().double(), mesh, loss_fn=F.mse_loss, example_inputs=batches[0], pipeline=pipeline
    )
    plan = autoparallel.Plan.from_json(planned.plan.to_json())
    torch.manual_seed(0)
    plain = Layers().double()
    torch.manual_seed(0)
    model = autoparallel.compile(Layers().double(), mesh, loss_fn=F.mse_loss, plan=plan, clip_grad_norm=0.01)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    first = next(model.accumulate(3, batches))
    for x, y in first:
        model(x, y).backward()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.mse_loss(plain(x), y).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    for optimizer in optimizers:
        optimizer.step()
    found = {"norm": abs(float(model.last_grad_norm) - float(norm))}
    found["plan"] = float(model.plan.pipeline != plan.pipeline)
    model.eval()
    odd = data(3, 9)[0].double()
    with torch.no_grad():
        found["evaluation"] = float((model(odd) - plain(odd)).abs().max())
    assert norm > 0.011  # the limit bites
    found["stepped"] = parameters_off(model, plain)
    return found


class Normed(nn.Module):
    """Batch norm in both of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))


def _normed() -> dict[str, float]:
    """How far a pipeline with batch norm is off from one device that accumulates over the same microbatches."""
    import autoparallel

    mesh, (x, y) = pipeline_mesh(2), (t.double() for t in data(16))
    torch.manual_seed(0)
    plain = Normed().double()
    torch.manual_seed(0)
    model = autoparallel.compile(Normed().double(), mesh, loss_fn=F.mse_loss, pipeline=autoparallel.Pipeline("1f1b", 4))
    whole = Normed().double()
    whole.load_state_dict(plain.state_dict())
    losses = [F.mse_loss(plain(a), b) / 4 for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    sum(losses).backward()  # type: ignore[union-attr]
    loss = model(x, y)
    loss.backward()
    buffers = zip(model.buffers(), plain.buffers(), strict=True)
    return {
        "loss": abs(float(loss) - float(sum(losses))),
        "gradients": gradients_off(model, plain),
        "buffers": max(float((b - c).abs().max()) for b, c in buffers),
        "of the whole batch": abs(float(F.mse_loss(whole(x), y)) - float(loss)),
    }


def test_batch_norm_takes_the_statistics_of_a_microbatch_and_updates_its_buffers_by_each() -> None:
    for found in run_on_ranks(_normed, world_size=2):
        assert found.pop("of the whole batch") > 1e-3, "the statistics of the whole batch would be others"
        assert max(found.values()) < 1e-12, found


def _scaled() -> dict[str, Any]:
    """A step with a scaler, then one in which only the first stage's gradients overflow."""
    import autoparallel

    mesh, (x, y) = pipeline_mesh(2), data()
    torch.manual_seed(0)
    plain = Layers()
    F.mse_loss(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model = compiled(mesh, grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> None:
        scaler.scale(model(x, y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def here() -> list[tuple[Tensor, Tensor]]:
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return [(p.to_local().detach(), q.detach()) for p, q in pairs if p.device_mesh.get_coordinate() is not None]

    step(x, y)
    found: dict[str, Any] = {"off": max(float((p - q).abs().max()) for p, q in here())}
    before = [p.clone() for p, _ in here()]
    bad = torch.zeros_like(x)
    bad[:, 0] = torch.inf  # saturates: the outputs are finite, and all gradients but those of the first layer
    step(bad, y)
    found["moved"] = any(not torch.equal(p, q) for p, (q, _) in zip(before, here(), strict=True))
    found["scale"] = scaler.get_scale()
    half = autoparallel.compile(
        Layers().half(), mesh, loss_fn=_half_loss, pipeline=autoparallel.Pipeline("1f1b", 4), grad_scaler=scaler
    )
    loss = half(x.half(), y.half())
    scaler.scale(loss).backward()
    grads = [p.grad.to_local() for p in half.parameters() if p.grad is not None]
    found["half"] = bool(loss.isfinite()) and all(bool(g.isfinite().all()) for g in grads)
    return found


def _half_loss(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x.float(), y.float())


@pytest.mark.wide
def test_a_scaler_decides_alike_on_all_stages() -> None:
    for found in run_on_ranks(_scaled, world_size=2):
        assert found.pop("off") < 1e-6
        assert found == {"moved": False, "scale": 128.0, "half": True}


def test_windows_saved_plans_clipping_in_the_step_and_evaluation_of_odd_batches() -> None:
    for found in run_on_ranks(_compose, world_size=2):
        assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-9)


def _uneven_evaluations() -> dict[int, float]:
    """How far outputs of a preset are off, of batches whose microbatches do not all divide over the data axis."""
    model = compiled(pipeline_mesh(2, 2), plan="fsdp")
    torch.manual_seed(0)
    plain = Layers()
    model(*data()).backward()
    model.eval()
    with torch.no_grad():
        return {rows: off(model(x), plain(x)) for rows in (6, 8, 2, 5) for x in data(rows)[:1]}


def test_evaluation_has_as_many_microbatches_as_divide_over_the_data_axis() -> None:
    for found in run_on_ranks(_uneven_evaluations, world_size=4):
        assert max(found.values()) < 1e-6, found


# -------------------------------------------------------------------------------------------------------------- state


def _initialise() -> dict[str, float]:
    """How far parameters are from a plain model's: of a model on the meta device, and after loading a whole state."""
    import autoparallel

    torch.manual_seed(0)
    plain = Layers()
    with torch.device("meta"):
        model = Layers()
    torch.manual_seed(0 if dist.get_rank() == 0 else 5)
    pipeline = autoparallel.Pipeline("1f1b", 4)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "example_inputs": data(), "pipeline": pipeline}
    model = autoparallel.compile(model, pipeline_mesh(2), **options)

    found = {"initial": parameters_off(model, plain)}
    torch.manual_seed(1)
    plain = Layers()
    model.load_state_dict(plain.state_dict())
    found["loaded"] = parameters_off(model, plain)
    found["loss"] = abs(float(model(*data())) - float(F.mse_loss(plain(data()[0]), data()[1])))
    return found


def test_meta_models_are_initialised_and_whole_states_loaded_whatever_the_cut() -> None:
    for found in run_on_ranks(_initialise, world_size=2):
        assert found.pop("loss") < 1e-6
        assert found == {"initial": 0.0, "loaded": 0.0}


def _save_and_load(directory: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    x, y = data()
    first = compiled(pipeline_mesh(4), seed=dist.get_rank())
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    second = compiled(pipeline_mesh(2, 2), seed=7, schedule="interleaved_1f1b")
    other = torch.optim.AdamW(second.parameters(), lr=0.1)
    losses = []
    for model, steps in ((first, optimizer), (second, other)):
        losses.append(model(x, y).item())
        model(x, y).backward()
        steps.step()
        steps.zero_grad()
    names = list(first.state_dict())
    held = [n for n, p in first.named_parameters() if p.to_local().numel()]
    model_state, optimizer_state = get_state_dict(first, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    model_state, optimizer_state = get_state_dict(second, other)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    options = StateDictOptions(strict=False)  # a rank has optimizer states of its own parameters only
    set_state_dict(second, other, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    for model, steps in ((first, optimizer), (second, other)):
        model(x, y).backward()
        steps.step()
    return {"names": names, "held": held, "losses": losses, "after": [first(x, y).item(), second(x, y).item()]}


@pytest.mark.slow
def test_a_checkpoint_of_four_stages_goes_on_in_other_stages(tmp_path: Any) -> None:
    ranks = run_on_ranks(_save_and_load, str(tmp_path), world_size=4)
    assert ranks[0]["names"] == list(Layers().state_dict())
    assert sorted(n for rank in ranks for n in rank["held"]) == sorted(Layers().state_dict())  # each on one rank
    assert ranks[0]["losses"][0] != pytest.approx(ranks[0]["losses"][1], rel=1e-3)  # they began differently
    for rank in ranks:
        assert rank["after"][0] == pytest.approx(rank["after"][1], rel=1e-5)
