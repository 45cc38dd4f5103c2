"""What a type checker sees of the public face: mistakes are found, and results have types of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import autoparallel

SCRIPT = """
import torch
from torch import nn
import autoparallel

model = autoparallel.compile(nn.Linear(2, 2), plan="fsdp", methods=("forward_twice",))
model = autoparallel.compile(nn.Linear(2, 2), plan="fspd")  # refused
model = autoparallel.compile(nn.Linear(2, 2), outputs="whole")  # refused
model = autoparallel.compile(nn.Linear(2, 2), precision=torch.bfloat16)  # refused
autoparallel.verify(nn.Linear(2, 2), (2,), plan="ddp")  # refused
norm = model.clip_grad_norm_(1.0)
print(f"{norm.item():.3f}", model.clip_grad_norm_({"*": 1.0})["*"].item(), model.grad_norm(groups="module")["up"])
norm.items()  # refused
model.clip_grad_norm_(1.0, nonfinite="ignore")  # refused
with model.whole() as plain:
    plain.whole_again  # what a module has, no checker knows
for name, tensor in model.full_parameters():
    name.upper(), tensor.cpu()
    tensor.upper()  # refused
rows: list[torch.Tensor] = model.local_rows([torch.zeros(1)])
count: int = model.local_rows([torch.zeros(1)])  # refused
"""


@pytest.mark.wide
def test_a_type_checker_refuses_mistakes(tmp_path: Path) -> None:
    script, root = tmp_path / "script.py", Path(autoparallel.__file__).parent.parent
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", str(script)]
    done = subprocess.run(command, cwd=root, env={"MYPYPATH": str(root)}, capture_output=True, text=True, timeout=280)
    found = {int(line) for line in re.findall(r"script\.py:(\d+): error", done.stdout)}
    expected = {i for i, line in enumerate(SCRIPT.splitlines(), 1) if "# refused" in line}
    assert found == expected, done.stdout + done.stderr
