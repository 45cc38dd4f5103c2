"""The examples run as a user would start them, and processes do not change their numbers."""

from __future__ import annotations

import csv
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel

EXAMPLES = Path(__file__).parent.parent / "examples"
TIMEOUT = 240


ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(EXAMPLES.parent),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a restart meets the addresses of the start before (torch#135712)
}


def command(script: str, *options: str, processes: int = 0, restarts: int = 0) -> list[str]:
    """What starts an example, under torchrun if it is to have several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", str(restarts)]
    launcher += ["--nproc-per-node", str(processes)]
    return [sys.executable, *(launcher if processes else ()), str(EXAMPLES / script), *options]


def run(script: str, *options: str, processes: int = 0, timeout: float = TIMEOUT) -> str:
    """Start an example; return what it prints."""
    result = subprocess.run(
        command(script, *options, processes=processes),
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
    return result.stdout


def curve(path: Path) -> list[tuple[float, float]]:
    with path.with_suffix(".csv").open() as file:
        return [(float(row["loss"]), float(row["norm"])) for row in csv.DictReader(file)]


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Examples import each other by name, as the scripts that they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.syspath_prepend(str(EXAMPLES / "by_feature"))
        yield


def load(name: str) -> Any:
    return importlib.import_module(name)


class TestTrainGPT:
    @pytest.mark.slow
    def test_four_processes_follow_the_curve_of_one(self, tmp_path: Path) -> None:
        one, four = tmp_path / "one.png", tmp_path / "four.png"
        run("train_gpt.py", "--steps", "3", "--out", str(one))
        text = run("train_gpt.py", "--steps", "3", "--mesh", "2,2", "--out", str(four), processes=4)
        assert "loss 5." in text
        assert one.stat().st_size > 5_000 and four.stat().st_size > 5_000
        expected = curve(one)
        assert len(expected) == 3 and 5.2 < expected[0][0] < 5.8 and expected[2][0] < expected[0][0]
        for ours, theirs in zip(curve(four), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3)

    @pytest.mark.slow
    @pytest.mark.timeout(400)
    def test_the_whole_run_reaches_its_loss(self, tmp_path: Path) -> None:
        run("train_gpt.py", "--mesh", "2,2", "--out", str(tmp_path / "curve.png"), processes=4, timeout=360)
        losses = [loss for loss, _ in curve(tmp_path / "curve.png")]
        assert losses[0] > 5.3 and sum(losses[-5:]) / 5 < 2.6


class TestTrainMoE:
    @pytest.mark.slow
    def test_experts_on_other_processes_follow_the_curve_of_one(self, tmp_path: Path) -> None:
        one, four = tmp_path / "one.png", tmp_path / "four.png"
        run("train_moe.py", "--steps", "3", "--out", str(one))
        text = run("train_moe.py", "--steps", "3", "--mesh", "dp=2,ep=2", "--out", str(four), processes=4)
        assert "all_to_all" in text, "tokens did not travel to their experts"
        expected = curve(one)
        assert len(expected) == 3 and 5.2 < expected[0][0] < 5.9 and expected[2][0] < expected[0][0]
        for ours, theirs in zip(curve(four), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3)

    @pytest.mark.slow
    @pytest.mark.timeout(400)
    def test_the_whole_run_reaches_its_loss(self, tmp_path: Path) -> None:
        path = tmp_path / "curve.png"
        run("train_moe.py", "--mesh", "dp=2,ep=2", "--out", str(path), processes=4, timeout=360)
        losses = [loss for loss, _ in curve(path)]
        assert losses[0] > 5.2 and sum(losses[-5:]) / 5 < 2.7


class TestTrainResNet:
    def test_the_last_window_is_short(self) -> None:
        example = load("train_resnet")
        assert (example.TRAINING_IMAGES // example.ROWS) % example.ACCUMULATION == 2

    @pytest.mark.slow
    def test_two_processes_train(self, tmp_path: Path) -> None:
        text = run("train_resnet.py", "--epochs", "1", "--out", str(tmp_path / "curve.png"), processes=2)
        assert "accuracy" in text and (tmp_path / "curve.png").exists()

    @pytest.mark.slow
    @pytest.mark.timeout(400)
    def test_digits_are_recognised(self, tmp_path: Path) -> None:
        text = run("train_resnet.py", "--mesh", "2,2", "--out", str(tmp_path / "c.png"), processes=4, timeout=360)
        assert float(text.split("accuracy ")[1].split("%")[0]) > 95


def numbers_of(text: str) -> list[float]:
    """The norms of the steps and the losses, as the example prints them before its plan."""
    lines = [line for line in text.splitlines() if line.startswith(("step ", "loss "))]
    return [float(x) for line in lines for x in re.findall(r"(?:norm|loss|,) (\d\.\d+)", line)]


class TestFinetuneLlama:
    @pytest.mark.slow
    @pytest.mark.parametrize("option", ["", "--lora"])
    def test_two_processes_follow_one(self, option: str) -> None:
        if option:
            pytest.importorskip("peft")
        options = ["--steps", "3", "--plan", "fsdp", *option.split()]
        one = run("finetune_llama.py", *options)
        two = run("finetune_llama.py", *options, processes=2)
        expected, found = (numbers_of(text) for text in (one, two))
        assert len(expected) == 6 and expected[4] < expected[3]
        assert found == pytest.approx(expected, rel=2e-2)


def plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: Iterable[list[tuple[Tensor, Tensor]]],
    limit: float = 1e9,
) -> tuple[list[float], list[float]]:
    """What the plain model does in this process: the loss of each batch, the norm of each step."""
    losses, norms = [], []
    for window in windows:
        rows = sum(len(y) for _, y in window)
        for x, y in window:
            loss = F.cross_entropy(model(x), y)
            (loss * len(y) / rows).backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def windows_of(batches: Iterable[Any], size: int) -> list[list[Any]]:
    given = [*batches]
    return [given[i : i + size] for i in range(0, len(given), size)]


@pytest.mark.wide
class TestBooster:
    def digits(self, rows: int) -> tuple[ModuleType, nn.Module, tuple[Tensor, Tensor], torch.Generator]:
        resnet = load("train_resnet")
        torch.manual_seed(0)
        (images, labels), _ = resnet.read_digits()
        return (
            resnet,
            resnet.ResNet18().double(),
            (images[:rows].double(), labels[:rows]),
            torch.Generator().manual_seed(0),
        )

    def test_clipping_on_two_processes_is_the_plain_loop(self) -> None:
        resnet, model, data, order = self.digits(1440)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        losses, norms = plain(model, optimizer, windows_of(resnet.microbatches(data, order), 1), 1.0)
        assert sum(norm > 1 for norm in norms) > 2, "the limit bites"
        for found in autoparallel.launch(load("booster_clipping").train, 1, ranks=2, timeout=TIMEOUT):
            assert found == (pytest.approx(losses, abs=1e-9), pytest.approx(norms, abs=1e-9))

    def test_accumulation_on_two_processes_is_the_plain_loop(self) -> None:
        resnet, model, data, order = self.digits(1200)
        windows = windows_of(resnet.microbatches(data, order), 4)
        assert [len(window) for window in windows] == [4, 4, 2]
        losses, _ = plain(model, torch.optim.Adam(model.parameters(), lr=1e-3), windows)
        for found in autoparallel.launch(load("booster_accumulation").train, 1, ranks=2, timeout=TIMEOUT):
            assert found == pytest.approx(losses, abs=1e-9)


class TestByFeature:
    NAMES = tuple(sorted(path.stem for path in (EXAMPLES / "by_feature").glob("*.py")))

    @pytest.mark.parametrize("name", NAMES)
    def test_lines_that_are_not_in_the_base_are_marked(self, name: str) -> None:
        base, own = (
            (EXAMPLES / "by_feature" / f"{stem}.py").read_text().partition("def train(")[2].splitlines()[1:]
            for stem in ("base", name)
        )
        unmarked = [line for line in own if line not in base and not line.endswith("# new")]
        assert not unmarked
        assert name == "base" or any(line.endswith("# new") for line in own)

    @pytest.mark.wide
    @pytest.mark.parametrize("name", NAMES)
    def test_two_processes_train_what_one_trains(self, name: str, tmp_path: Path) -> None:
        example, base = load(name), load("base")
        torch.manual_seed(0)
        model = example.Experts().double() if name == "experts" else base.Net().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        windows = windows_of(base.batches(14), 4) if name == "accumulate" else windows_of(base.batches(), 1)
        losses, _ = plain(model, optimizer, windows, 0.5 if name == "clip" else 1e9)
        given = (str(tmp_path),) if name == "checkpoint" else ()
        for found in autoparallel.launch(example.train, *given, ranks=2, timeout=TIMEOUT):
            assert found == pytest.approx(losses, abs=5e-2 if name == "mixed_precision" else 1e-9)

    @pytest.mark.slow
    def test_as_a_script(self) -> None:
        assert "in 12 steps" in run("by_feature/clip.py", processes=2)
        assert "steps were clipped" in run("booster_clipping.py")


class Interrupted:
    """A run of resume.py, which is killed and goes on.

    Args:
        path: of the run.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.chance = path, random.Random(11)

    def options(self, steps: int, plan: str, every: int = 3) -> list[str]:
        return ["--path", str(self.path), "--double", "--plan", plan, "--steps", str(steps), "--every", str(every)]

    def losses(self) -> list[tuple[int, float]]:
        """The steps and losses of all starts, one after the other; a kill may have cut a line off."""
        file = self.path / "losses.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [(record["step"], record["loss"]) for record in records]

    def start(self, plan: str, processes: int = 0, restarts: int = 0) -> subprocess.Popen[bytes]:
        whole = command("resume.py", *self.options(400, plan), processes=processes, restarts=restarts)
        quiet = subprocess.DEVNULL
        return subprocess.Popen(whole, env=ENVIRONMENT, stdin=quiet, stdout=quiet, stderr=quiet)

    def wait_for(self, more: int, process: subprocess.Popen[bytes]) -> None:
        """Until so many steps more have been made, and a moment longer."""
        before, until = len(self.losses()), time.monotonic() + TIMEOUT
        while len(self.losses()) < before + more:
            assert process.poll() is None, "the run ended"
            assert time.monotonic() < until, "the run makes no steps"
            time.sleep(0.02)
        time.sleep(self.chance.random() * 0.05)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        for pid in (process.pid, *children(process.pid)):  # workers outlive a torchrun that is killed
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def finish(self, plan: str, processes: int = 0) -> list[tuple[int, float]]:
        run("resume.py", *self.options(400, plan), processes=processes)
        return self.losses()


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_slurm_saves_at_the_signal_and_is_queued_again(tmp_path: Path) -> None:
    run, tools, queue = Interrupted(tmp_path / "run"), tmp_path / "bin", tmp_path / "queue"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    shown = 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$QUEUE"; fi'
    (tools / "scontrol").write_text(f"#!/bin/sh\n{shown}\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = ENVIRONMENT | {
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "RANKS": "2", "QUEUE": str(queue),
        "PORT": "0", "SCRIPT": str(EXAMPLES / "resume.py"),
    }  # fmt: skip

    def start(steps: int) -> subprocess.Popen[bytes]:
        job = ["bash", str(EXAMPLES / "slurm.sh"), *run.options(steps, "fsdp", every=10**6)]
        return subprocess.Popen(job, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    process = start(10**6)
    run.wait_for(30, process)
    process.send_signal(signal.SIGTERM)
    process.wait(TIMEOUT)
    assert queue.read_text() == "requeue 7\n"
    saved = len(run.losses())
    assert start(saved + 5).wait(TIMEOUT) == 0
    assert [step for step, _ in run.losses()] == [*range(1, saved + 6)], "no step is lost, and none made twice"
    assert queue.read_text() == "requeue 7\n", "a run that has come to its end is not queued again"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers of torchrun in /proc")
class TestResume:
    def test_a_run_that_is_killed_is_the_one_that_is_not(self, tmp_path: Path) -> None:
        whole = Interrupted(tmp_path / "whole")
        run("resume.py", *whole.options(400, "auto", every=1000))
        expected = dict(whole.losses())
        assert [*expected] == [*range(1, 401)]

        alone = Interrupted(tmp_path / "alone")
        for _ in range(2):
            process = alone.start("auto")
            alone.wait_for(30, process)
            alone.kill(process)
        found = alone.finish("auto")
        assert {step for step, _ in found} == {*expected}
        assert all(loss == expected[step] for step, loss in found), "bit-equal on the same plan"

        moving = Interrupted(tmp_path / "moving")
        process = moving.start("fsdp", processes=2, restarts=2)
        moving.wait_for(30, process)
        os.kill(children(process.pid)[moving.chance.randrange(2)], signal.SIGKILL)  # torchrun starts both again
        moving.wait_for(60, process)
        moving.kill(process)
        process = moving.start("tensor_parallel", processes=2)
        moving.wait_for(30, process)
        moving.kill(process)
        found = moving.finish("auto")
        assert {step for step, _ in found} == {*expected} and found[-1][0] == 400
        assert max(abs(loss - expected[step]) for step, loss in found) < 1e-9
