"""The examples run as a user would start them, and processes do not change their numbers."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
TIMEOUT = 240


def run(script: str, *options: str, processes: int = 0, timeout: float = TIMEOUT) -> str:
    """Start an example, under torchrun if it is to have several processes; return what it prints."""
    command = [sys.executable]
    if processes:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    result = subprocess.run(
        [*command, str(EXAMPLES / script), *options],
        env=environment,
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


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class TestTrainGPT:
    @pytest.mark.wide
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
    @pytest.mark.wide
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
