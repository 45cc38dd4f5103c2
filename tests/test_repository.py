"""What the repository promises about itself: its commands, its examples' arithmetic, what the wheel holds."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def commands_of_readme() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return [block.strip() for block in blocks]


def test_checks_run_the_second_command_of_the_readme() -> None:
    second = commands_of_readme()[1]
    assert second.endswith("-m pytest -n 2")
    assert f"{{ {second}; }}" in (ROOT / ".ci" / "run").read_text()


def test_checks_run_the_wider_tier_of_the_readme() -> None:
    (command,) = re.findall(r"`pytest (-n 2 -m \"wide and not slow\")`", (ROOT / "README.md").read_text())
    assert f".venv/bin/python -m pytest {command}" in (ROOT / ".ci" / "run").read_text()


def test_commands_install_the_same_torch_first() -> None:
    for command in commands_of_readme()[:2]:
        assert "\n" not in command
        assert re.search(r"pip install torch==[\d.]+ && \S*pip install -e", command)


def test_passes_are_importable_under_the_package() -> None:
    link = ROOT / "autoparallel" / "passes"
    assert link.is_symlink() and link.resolve() == ROOT / "passes"


@pytest.mark.slow
def test_wheel_holds_passes_and_typing_marker(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "autoparallel"
    expected = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    expected |= {f"autoparallel/passes/{path.name}" for path in (ROOT / "passes").glob("*.py")}
    assert expected | {"autoparallel/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "passes/", "examples/", "benchmarks/"))]
    entry_points = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("entry_points.txt")))
    assert b"torch_dynamo_backends" in entry_points
