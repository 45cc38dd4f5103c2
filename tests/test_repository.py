"""What the repository promises about itself: its commands, its examples' arithmetic, what the wheel holds."""

from __future__ import annotations

import os
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
@pytest.mark.timeout(600)
def test_wheel_and_sdist_are_whole_and_install(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)], check=True
    )  # by way of the sdist
    (wheel,), (_sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "autoparallel"
    expected = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    expected |= {f"autoparallel/passes/{path.name}" for path in (ROOT / "passes").glob("*.py")}
    assert expected | {"autoparallel/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "passes/", "examples/", "benchmarks/"))]
    entry_points = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("entry_points.txt")))
    assert b"torch_dynamo_backends" in entry_points

    place = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(place), str(wheel)]
    subprocess.run(install, check=True)
    tried = "import autoparallel; print(autoparallel.__file__); print(autoparallel.launch(max, 1, 2, ranks=2))"
    command = [sys.executable, "-c", tried]
    environment = os.environ | {"PYTHONPATH": str(place)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(place / "autoparallel" / "__init__.py"), "[2, 2]"]


@pytest.mark.slow
def test_an_editable_install_is_a_path_so_that_type_checkers_follow_it(tmp_path: Path) -> None:
    make = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    (path,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".pth")]
    assert zipfile.ZipFile(wheel).read(path).decode().strip() == str(ROOT)
