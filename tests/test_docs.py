"""What people read: links lead somewhere, the site builds, and code is code that runs."""

from __future__ import annotations

import ast
import inspect
import operator
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoparallel

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors_of(other), f"{page.name}: {target}"


def calls_in(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Calls of our functions, by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("autoparallel."):
            yield ast.unparse(node.func).partition(".")[2], node


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_and_calls_in_text_are_ours(page: Path) -> None:
    text = page.read_text()
    parsed = [ast.parse(block) for block in blocks_of(str(page.relative_to(ROOT)))]
    for tree in parsed:
        for name, call in calls_in(tree):
            known = inspect.signature(operator.attrgetter(name)(autoparallel)).parameters
            free = any(p.kind is p.VAR_KEYWORD for p in known.values())
            assert free or {k.arg for k in call.keywords if k.arg} <= known.keys(), f"{page.name}: {ast.unparse(call)}"
    known = inspect.signature(autoparallel.compile).parameters.keys()
    for option in re.findall(r"`(?:autoparallel\.)?compile\((?:[^`]*?, )?(\w+)=", text):
        assert option in known, f"{page.name}: compile({option}=...)"
    for name in re.findall(r"`model\.(\w+)\(", text):
        assert hasattr(autoparallel.ParallelModule, name) or name in ("generate", "state_dict"), f"{page.name}: {name}"


@pytest.mark.wide
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and not done.stderr, done.stderr
    reference = (tmp_path / "api" / "index.html").read_text()
    missing = [name for name in autoparallel.__all__ if f'id="autoparallel.{name}"' not in reference]
    assert not missing, "public names that the reference leaves out"


# --------------------------------------------------------------------------------------------------- code that is run

GIVEN = """
import os, torch, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset
import autoparallel

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
    def forward(self, x):
        return self.head(F.gelu(self.encoder(x)))

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128, 16), torch.randint(0, 4, (128,)))
loader = DataLoader(dataset, batch_size=16)
x, y = next(iter(loader))
loss_fn = F.cross_entropy
"""
COMPILED = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = autoparallel.compile(MyModel(), mesh, loss_fn=loss_fn, plan="fsdp")
optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "max_norm": 1.0}])
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
model(x, y).backward()
"""
AGENT = """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(16, 4), nn.Linear(16, 1)
    def get_value(self, x):
        return self.critic(x)
    def get_action_and_value(self, x, action):
        chosen = torch.distributions.Categorical(logits=self.actor(x))
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(x)
observations, actions = x, y
"""
RUN = {
    "README.md": (GIVEN, "assert norm > 0 and 'chosen by the search' in model.plan.explain()"),
    "docs/start.md": ("", "assert len(train()) == 20"),
    "docs/batches.md": (GIVEN + COMPILED, "assert x.shape[0] <= 64 and model.encoder.weight.grad is not None"),
    "docs/clipping.md": (GIVEN + COMPILED, "assert norms and norm > 0"),
    "docs/checkpoints.md": (GIVEN + COMPILED + "step = 3; optimizer.step()", "assert start == 3"),
    "docs/watching.md": (
        GIVEN + COMPILED + "optimizer.zero_grad()",
        "assert not rerun.findings and os.path.exists('runs/steps.jsonl')",
    ),
    "docs/loops.md": (
        GIVEN + AGENT + COMPILED,
        "assert features['encoder'].shape[1] == 32 and logprob.shape == entropy.shape == value.shape[:1] == (16,)",
    ),
    "docs/accumulation.md": (GIVEN + COMPILED + "model = MyModel()", "model(x, y).backward()"),
}
"""Pages, what their readers have already, and what holds in the end."""
LEFT_OUT = (
    "autoparallel.launch(", '"llama-3-8b', '"measured.json"', "plain.generate(", "engine.update(", "(Lion, per=",
)  # fmt: skip
"""Every rank runs all of a page; nobody has the weights of a model of 8 billion, has measured a step, or has an engine
or optimizers of others."""


def _run(page: str, folder: str) -> None:
    os.chdir(folder)
    given, check = RUN[page]
    names: dict[str, object] = {"__name__": page}
    blocks = [block for block in blocks_of(page) if not any(text in block for text in LEFT_OUT)]
    for i, text in enumerate([given, *blocks, check]):
        exec(compile(text, f"{page}, block {i}", "exec"), names)


@pytest.mark.wide
@pytest.mark.parametrize("page", RUN)
def test_code_of_a_page_runs_on_four_ranks(page: str, tmp_path: Path) -> None:
    autoparallel.launch(_run, page, str(tmp_path), ranks=4, timeout=280)


@pytest.mark.wide
def test_getting_started_in_a_notebook() -> None:
    names: dict[str, list[float]] = {"__name__": "notebook"}
    first, launched, _ = blocks_of("docs/start.md")
    exec(first, names)
    exec(launched, names)
    assert len(names["losses"]) == 20 and names["losses"][-1] < names["losses"][0]
