"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoparallel.tools.cli import main

FACTORIES = """
import torch, torch.nn.functional as F
from torch import nn


def mlp():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, (torch.randn(8, 6), torch.randint(0, 4, (8,))), lambda o, t: F.cross_entropy(o, t)


def no_model():
    return 3


def failing():
    return nn.Linear(6, 8), (torch.randn(8, 5),)


not_a_function = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cli_factories.py"
    path.write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_factories", raising=False)
    return path


def test_verify_of_a_file(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    assert main(["verify", f"{factories}:mlp", "--mesh", "dp=2", "--plan", "fsdp", "--dtype", "own", "--localize"]) == 0
    out = capsys.readouterr().out
    assert "Sequential on the mesh (dp=2), plan fsdp, its own dtypes" in out
    assert "PASSED" in out and "\x1b" not in out
    assert "sharded: 4 of 4 parameters" in out
    torch.set_rng_state(state)


@pytest.mark.wide
def test_explain_of_a_module_as_a_command(factories: Path) -> None:
    command = [sys.executable, "-m", "autoparallel", "explain", "cli_factories:mlp", "--mesh", "2"]
    done = subprocess.run([*command, "--plan", "data_parallel"], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "the preset 'data_parallel', on the mesh (dp=2)" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert any(row[:2] == ["2", "weight"] for row in rows), done.stdout


def test_a_file_that_cannot_be_run_exits_with_one(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, words in (("slip", "def mlp(:", "SyntaxError"), ("name", "absent_name", "NameError: name 'absent")):
        Path(f"{name}.py").write_text(text)
        assert main(["explain", f"{name}.py:mlp", "--mesh", "1"]) == 1
        assert f"running {name}.py failed: {words}" in capsys.readouterr().err


@pytest.mark.wide
def test_failures_exit_with_one(factories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A tolerance below any rounding: what passed above fails, so the status follows the report.
    state = torch.get_rng_state()
    status = main(["verify", "cli_factories:mlp", "--mesh", "2", "--plan", "data_parallel", "--tolerance", "1e-300"])
    assert status == 1 and "FAILED" in capsys.readouterr().out
    assert main(["verify", "cli_factories:failing", "--mesh", "1"]) == 1
    assert "the plain model fails by itself" in capsys.readouterr().err
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cli_factories:mlp", "--mesh", "dp=two"], "is not a mesh"),
        (["cli_factories:mlp", "--mesh", "dp=2,3"], "is not a mesh"),
        (["cli_factories:mlp", "--mesh", "2,2,2,2"], "is not a mesh of one to three axes"),
        (["cli_factories:mlp", "--mesh", "dp=2,dp=2"], "is not a mesh"),
        (["cli_factories:mlp", "--mesh", "0"], "is not a mesh"),
        (["cli_factories:mlp"], "--mesh"),
        (["cli_factories:mlp", "--mesh", "2", "--tolerance", "small"], "--tolerance"),
        (["cli_factories:mlp", "--mesh", "2", "--plan", "best"], "unknown plan 'best'"),
        (["cli_factories:absent", "--mesh", "2"], "has no 'absent'"),
        (["cli_factories:not_a_function", "--mesh", "2"], "is a int"),
        (["cli_factories:no_model", "--mesh", "2"], "must return (model, example_inputs)"),
        (["cli_factories", "--mesh", "2"], "does not name a function"),
        (["absent_module:f", "--mesh", "2"], "no module 'absent_module'"),
        (["absent.py:f", "--mesh", "2"], "there is no file absent.py"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "explain"])
def test_usage_errors_exit_with_two(
    command: str, arguments: list[str], message: str, factories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "explain" and "--tolerance" in arguments:
        message = "unrecognized arguments"
    with pytest.raises(SystemExit) as caught:
        main([command, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_shows_the_factory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", "--help"])
    assert caught.value.code == 0
    assert "returns (model, example_inputs)" in capsys.readouterr().out
