"""Checkpoints: a resumed run is the uninterrupted one on any mesh, and what is damaged is not loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel._torch.dtensor import local_of
from autoparallel.checkpoint import folder as folders
from autoparallel.checkpoint.folder import MARKER, CheckpointError, complete_folders
from autoparallel.checkpoint.tree import decode, encode
from autoparallel.placements.regions import Region
from tests.runtime.support import mesh_of, raised, run_on_ranks


class Tower(nn.Module):
    """A tied table, batch norm, dropout, and an odd number of rows: what a state consists of."""

    def __init__(self, staged: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 8)
        self.up = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8) if staged else nn.BatchNorm1d(8)  # a pipeline takes a microbatch's statistics
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.norm(self.up(self.table(x))))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 13, (16,), generator=generator), torch.randint(0, 13, (16,), generator=generator)


class Run:
    """A training run: everything that a checkpoint must bring back."""

    def __init__(self, *shape: int, plan: str = "fsdp", staged: bool = False) -> None:
        torch.manual_seed(3)
        mesh = mesh_of(*shape) if shape else None
        if plan == "pipeline":
            mesh, plan = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp")), "auto"
        options: Any = {"loss_fn": F.cross_entropy, "example_inputs": batch(0)}
        self.model = autoparallel.compile(Tower(staged).double(), mesh, plan=plan, **options)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.9)}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)

    @property
    def states(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = self.model(*batch(step))
            loss.backward()
            self.optimizer.step(), self.scheduler.step(), self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def _resume(directory: str, shape: tuple[int, ...], plan: str, saves: bool, staged: bool = False) -> list[float]:
    run = Run(*shape, plan=plan, staged=staged)
    if saves:
        losses = run.train(0, 3)
        run.model.save(directory, step=3, epoch={"number": 1, "seen": (4, float("inf"))}, **run.states)
        return losses + run.train(3, 6)
    run.train(7, 8)  # another state, which loading replaces
    loaded = run.model.load(directory, **run.states)
    assert loaded.step == 3 and loaded.values == {"epoch": {"number": 1, "seen": (4, float("inf"))}}
    assert run.optimizer.param_groups[1]["betas"] == (0.8, 0.9) and run.scheduler.last_epoch == 3
    return run.train(3, 6)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = _resume(str(tmp_path), (), "auto", True)
    assert len({*whole}) == 6
    assert _resume(str(tmp_path), (), "auto", False) == whole[3:], "bit-equal on the same plan"


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (((2,), "fsdp"), ((2,), "data_parallel")),
        pytest.param(((2, 2), "fsdp"), ((4,), "fsdp"), marks=pytest.mark.wide),
        pytest.param(((2,), "tensor_parallel"), ((2, 2), "tensor_parallel"), marks=pytest.mark.wide),
        pytest.param(((2, 2), "pipeline"), ((2,), "fsdp"), marks=pytest.mark.wide),
        pytest.param(((2, 2), "tensor_parallel"), ((2, 2), "pipeline"), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_on_another_mesh(saved: Any, resumed: Any, tmp_path: Path) -> None:
    path, staged = str(tmp_path), "pipeline" in (saved[1], resumed[1])
    uninterrupted = run_on_ranks(_resume, path, *saved, True, staged, world_size=torch.Size(saved[0]).numel())
    alone = _resume(path, (), "auto", False, staged)
    others = run_on_ranks(_resume, path, *resumed, False, staged, world_size=torch.Size(resumed[0]).numel())
    for losses in (alone, *others):
        assert max(abs(a - b) for a, b in zip(losses, uninterrupted[0][3:], strict=True)) < 1e-9


class Kept(torch.optim.Optimizer):
    """Keeps what optimizers of others do: norms, states under a name, more in ``state_dict()``, a dtype, nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "dtype": torch.float64})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        self.steps += 1
        scale = self.state["shared"]
        scale["sum"] = scale.get("sum", 0.0) + sum(float(p.grad.square().sum()) for p in self.param_groups[0]["params"])
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["norm"] = p.grad.norm() + state.get("norm", 0)
            state["rows"] = p.grad.sum(0) + state.get("rows", 0)
            state["none"] = torch.zeros_like(p)[:0]
            p.sub_(p.grad * self.param_groups[0]["lr"] / (self.steps + scale["sum"] + state["norm"]))
            p.sub_(state["rows"].to(self.param_groups[0]["dtype"]), alpha=0.01)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.steps = state_dict["steps"]


class Wrapping(Kept):
    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict()}


class Empty(Tower):
    """A tower with tensors of no elements."""

    def __init__(self) -> None:
        super().__init__(staged=False)
        self.more = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("seen", torch.zeros(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.more.sum()


def _keep(directory: str, plan: str, resumed: str) -> list[Any]:
    """The losses of a run that goes on on another plan after three steps, and of one process's; what is refused."""
    losses: list[Any] = []
    for mesh in (mesh_of(2), None):
        torch.manual_seed(3)
        plain = Empty().double().eval()
        model: Any = plain
        if mesh is not None:
            model = autoparallel.compile(plain, mesh, plan=plan, example_inputs=batch(0)[:1])
        optimizer = Kept(model.parameters())
        for step in range(6):
            if step == 3 and mesh is not None:
                model.save(directory, optimizer=optimizer)
                torch.manual_seed(4)
                model = autoparallel.compile(Empty().double().eval(), mesh, plan=resumed, example_inputs=batch(0)[:1])
                optimizer = Kept(model.parameters())
                model.load(directory, optimizer=optimizer)
            x, y = batch(step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step(), optimizer.zero_grad()
            losses.append(F.cross_entropy(model(x), y).item())
    wrapping = autoparallel.compile(Empty().double(), mesh_of(2), plan=plan)
    return [*losses, raised(lambda: wrapping.save(directory, optimizer=Wrapping(wrapping.parameters())))]


@pytest.mark.parametrize(
    ("plan", "resumed"),
    [("fsdp", "tensor_parallel"), pytest.param("tensor_parallel", "fsdp", marks=pytest.mark.wide)],
)
def test_what_optimizers_of_others_keep(plan: str, resumed: str, tmp_path: Path) -> None:
    for *losses, refused in run_on_ranks(_keep, str(tmp_path), plan, resumed, world_size=2):
        assert losses[:6] == pytest.approx(losses[6:], rel=1e-9) and len({*losses[:6]}) == 6
        assert "save the optimizer that it holds" in refused


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def two() -> Callable[[Path], tuple[Run, list[Path]]]:
    run = Run()
    run.train(0, 1)

    def make(path: Path) -> tuple[Run, list[Path]]:
        return run, [run.model.save(path, step=step, **run.states).path for step in (1, 2)]

    return make


def _flip(file: Path, at: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _of_the_other(file: Path) -> None:
    (other,) = (f for f in file.parent.parent.glob(f"*/{file.name}") if f != file)
    file.write_bytes(other.read_bytes())


FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a bit in the file": ("rank-00000.bin", _flip, "rank-00000.bin is damaged: .* is not what was saved"),
    "a bit in the index": ("rank-00000.json", _flip, "rank-00000.json is damaged"),
    "the marker": (MARKER, lambda f: f.write_text("{"), "checkpoint.json is damaged"),
    "the marker's format": (MARKER, lambda f: f.write_text('{"format": 7}'), "format 7, this version reads 2"),
    "a shorter file": ("rank-00000.bin", _truncate, "is damaged"),
    "a shorter index": ("rank-00000.json", _truncate, "is damaged"),
    "no file": ("rank-00000.bin", os.unlink, "rank-00000.bin is missing"),
    "no index": ("rank-00000.json", os.unlink, "rank-00000.json is missing"),
    "another's index": ("rank-00000.json", _of_the_other, "or of another checkpoint"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_damaged_is_refused_and_nothing_is_changed(fault: str, two: Any, tmp_path: Path) -> None:
    run, (first, second) = two(tmp_path)
    if fault == "another's index":
        data = json.loads((second / "rank-00000.json").read_text())
        (first / "rank-00000.json").write_text(json.dumps({**data, "tree": {}}))
    name, spoil, message = FAULTS[fault]
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    spoil(second / name)
    with pytest.raises(CheckpointError, match=message):
        run.model.load(second, **run.states)
    after = run.model.state_dict()
    assert all(torch.equal(local_of(tensor), local_of(before[name])) for name, tensor in after.items())


def test_a_folder_without_a_marker_is_no_checkpoint(two: Any, tmp_path: Path) -> None:
    run, (first, second) = two(tmp_path)
    (second / MARKER).unlink()
    assert autoparallel.latest(tmp_path) == first
    assert run.model.load(tmp_path, **run.states).path == first
    with pytest.raises(CheckpointError, match="is not complete"):
        run.model.load(second)
    (first / MARKER).unlink()
    assert autoparallel.latest(tmp_path) is None and autoparallel.latest(tmp_path / "nothing") is None
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        run.model.load(tmp_path)


def test_another_model_or_optimizer_is_refused(two: Any, tmp_path: Path) -> None:
    run, _ = two(tmp_path)
    x = torch.randn(4, 8)
    other = autoparallel.compile(nn.Linear(8, 8), loss_fn=F.mse_loss, example_inputs=(x, x))
    with pytest.raises(CheckpointError, match=r"only it has .bias.|only the checkpoint has"):
        other.load(tmp_path)
    fewer = torch.optim.AdamW(list(run.model.parameters())[:2])
    with pytest.raises(CheckpointError, match="1 groups of parameters, 2 were saved"):
        run.model.load(tmp_path, optimizer=fewer)
    with pytest.raises(CheckpointError, match="holds no state of 'scaler'"):
        run.model.load(tmp_path, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="not the model's"):
        run.model.save(tmp_path, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(TypeError, match="what is a object"):
        run.model.save(tmp_path, what=object())
    assert len(complete_folders(tmp_path)) == 2


def test_only_the_newest_are_kept(two: Any, tmp_path: Path) -> None:
    run, _ = two(tmp_path)
    for step in (3, 4):
        run.model.save(tmp_path, step=step, keep=2, **run.states)
    assert [folder.name.partition("-step-")[2] for folder in complete_folders(tmp_path)] == ["3", "4"]


def test_an_asynchronous_save_holds_the_state_of_its_begin(two: Any, tmp_path: Path) -> None:
    run, _ = two(tmp_path)
    expected = run.model.up.bias.full_tensor().clone()
    saving = run.model.save(tmp_path, asynchronous=True, **run.states)
    with torch.no_grad():
        run.model.up.bias.add_(1)
    assert saving.wait() == autoparallel.latest(tmp_path)
    run.model.load(tmp_path)
    assert torch.equal(run.model.up.bias.full_tensor(), expected)


def test_a_disk_that_cannot_be_written(two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, (_, second) = two(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("autoparallel.checkpoint.saving.write_rank", lambda *args: (tmp_path / "no" / "folder").touch())
        saving = run.model.save(tmp_path, asynchronous=True, **run.states)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="No such file"):
                saving.wait()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="nothing can be saved to"):
        run.model.save(tmp_path / "file", **run.states)
    usage = type("Usage", (), {"free": 10})
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="has 10 bytes left"):
        patch.setattr("shutil.disk_usage", lambda path: usage)
        run.model.save(tmp_path, **run.states)

    def full(file: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr(folders, "_flush", full)
        run.model.save(tmp_path, **run.states)
    assert autoparallel.latest(tmp_path) == second


def _fails_on_one(directory: str) -> str:
    run = Run(2)
    run.model.save(directory, **run.states)

    def full(file: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr(folders, "_flush", full)
        try:
            run.model.save(directory, **run.states)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.wide
def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    for message in run_on_ranks(_fails_on_one, str(tmp_path), world_size=2):
        assert "No space left on device" in message
    assert len(complete_folders(tmp_path)) == 1


KILLED = """
import sys, torch
from tests.test_checkpoints import Run
run = Run()
run.train(0, 1)
for step in range(1, 10_000):
    with torch.no_grad():
        for p in run.model.parameters():
            p.fill_(step)
    run.model.save(sys.argv[1], step=step, keep=3, **run.states)
    print(step, flush=True)
"""


@pytest.mark.wide
def test_a_save_that_is_killed_leaves_the_ones_before(two: Any, tmp_path: Path) -> None:
    run, _ = two(tmp_path / "own")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(3)]
    for moment in range(20):  # the files as they are at twenty moments of saves that go on
        time.sleep(0.003 * (moment % 7))
        process.send_signal(signal.SIGSTOP)
        newest = autoparallel.latest(tmp_path)
        assert newest is not None
        loaded = run.model.load(newest)
        assert all(bool((p.to_local() == loaded.step).all()) for p in run.model.parameters())
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    last = run.model.load(tmp_path)
    assert last.step >= int(told[-1])


# ------------------------------------------------------------------------------------------------------------- values


def test_values_survive() -> None:
    value = {
        "a": [1, 2.5, None, True, "x", float("-inf")], 3: (b"\x00", {"__b": torch.arange(3)}), (1, 2): {},
        "scalar": torch.tensor(2.0), "dtype": torch.bfloat16,
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, "v", tensors), allow_nan=False)
    again = decode(json.loads(text), lambda name, sharded: tensors[name])
    assert again.keys() == value.keys() and again["a"] == value["a"] and again[(1, 2)] == {}
    assert again[3][0] == b"\x00" and torch.equal(again[3][1]["__b"], torch.arange(3)) and again["scalar"] == 2.0
    assert again["dtype"] is torch.bfloat16


def test_regions() -> None:
    whole, part = Region((2, 0), (5, 4)), Region((4, 3), (9, 9))
    assert whole.overlap(part) == Region((4, 3), (3, 1)) == part.overlap(whole)
    assert whole.overlap(Region((7, 0), (1, 4))) is None
    assert [b.shape for b in whole.blocks(2)] == [(2, 4), (2, 4), (1, 4)]
    assert Region((4, 3), (3, 1)).within(whole) == (slice(2, 5), slice(3, 4))
    assert list(Region((), ()).blocks(1)) == [Region((), ())] and Region((), ()).numel == 1
