"""How long planning takes: capture and search of Llama-3 shapes, in CPU-seconds, and what memory the process takes.

    python benchmarks/plan.py            # Llama-3-8B on (8, 8) and (4, 4, 4), Llama-3-405B on (64, 8)
    python benchmarks/plan.py --layers 4 # the same shapes with fewer layers

Every row is a process of its own.  "gap" is between the plan's cost and the search's proved lower bound.  Nothing is
computed and no weight exists: the models are on the meta device.  One thread; no process group.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils import _pytree as pytree

from autoparallel.capture.capture import capture
from autoparallel.capture.settings import CaptureSettings
from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.captured import Captured, describe_inputs
from autoparallel.hardware import H100
from autoparallel.plan import Plan
from autoparallel.planner.layouts import cheapest
from autoparallel.planner.request.request import Request
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.space.space import SearchSpace
from autoparallel.planner.space.subject import Subject

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
NAMES = ("a", "b", "c")
CASES = {  # name: layers, hidden, intermediate, heads, key heads, mesh
    "Llama-3-8B (8, 8)": (32, 4096, 14336, 32, 8, (8, 8)),
    "Llama-3-8B (4, 4, 4)": (32, 4096, 14336, 32, 8, (4, 4, 4)),
    "Llama-3-405B (64, 8)": (126, 16384, 53248, 128, 8, (64, 8)),
}
COLUMNS = ("model and mesh", "nodes", "capture s", "search s", "peak GB", "gap %", "predicted ms")


def llama(
    layers: int, hidden: int, inner: int, heads: int, key_heads: int, *, rows: int, length: int
) -> tuple[nn.Module, Inputs]:
    """A Llama of these shapes on the meta device, and a batch for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=128256, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
        model.to(torch.bfloat16)
    tokens = torch.empty(rows, length, dtype=torch.long, device="meta")
    return model, ((tokens,), {"labels": tokens})


def captured(model: nn.Module, inputs: Inputs, loss_fn: Callable[..., Any] | None, ranks: int) -> Captured:
    """The model's graph."""
    leaves, spec = pytree.tree_flatten(inputs)
    specs, batch = describe_inputs(leaves)
    return capture(model, specs, spec, CaptureSettings(2 * ranks, batch, loss_fn=loss_fn))


def planned(graph: Captured, mesh: Sequence[int], preset: str = "auto", memory_limit: float | None = None) -> Plan:
    """The plan of a graph on a mesh of H100s."""
    request = Request(tuple(zip(NAMES, mesh, strict=False)), H100, preset)
    return cheapest(Problem(SearchSpace(Subject(graph, request))), memory_limit)


def peak_gigabytes() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(
    make: Callable[[], tuple[nn.Module, Inputs, Callable[..., Any] | None]], mesh: Sequence[int]
) -> dict[str, Any]:
    """Captures and plans once, counting CPU-seconds."""
    model, inputs, loss_fn = make()
    ranks = int(torch.tensor(mesh).prod())
    start = time.process_time()
    graph = captured(model, inputs, loss_fn, ranks)
    gc.collect()  # what tracing left is not the search's to clear away
    traced = time.process_time()
    row: dict[str, Any] = {"nodes": len(graph.graph.nodes), "capture": traced - start}
    try:
        plan = planned(graph, mesh)
        assert plan.gap is not None and plan.cost is not None
        row |= {"gap": plan.gap, "predicted": plan.cost}
    except PlanError as error:
        row["error"] = str(error)
    return row | {"search": time.process_time() - traced, "peak": peak_gigabytes()}


def apart(script: str, *arguments: str) -> dict[str, Any]:
    """The row that a process of its own measures."""
    done = subprocess.run([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, check=True, env=None)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(title: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """The rows as a table."""
    out = Table(*COLUMNS, title=title)
    for name, row in rows:
        cells = [name, str(row["nodes"]), f"{row['capture']:.1f}", f"{row['search']:.2f}", f"{row['peak']:.2f}"]
        rest = [row["error"], ""] if "error" in row else [f"{100 * row['gap']:.3f}", f"{1e3 * row['predicted']:.1f}"]
        out.add_row(*cells, *rest)
    return out


def main() -> None:
    """Prints the table, or one row as JSON where a case is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), help="measures one case in this process and prints JSON")
    parser.add_argument("--layers", type=int, help="layers instead of the models' own")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case:
        layers, *shapes, mesh = CASES[options.case]
        rows = max(options.rows, mesh[0])
        made = llama(options.layers or layers, *shapes, rows=rows, length=options.length)
        print(json.dumps(measure(lambda: (*made, None), mesh)))
        return
    passed = [f"--{k}={v}" for k, v in vars(options).items() if v is not None]
    rows = [(name, apart(__file__, f"--case={name}", *passed)) for name in CASES]
    Console(width=120).print(table("Planning, CPU-seconds", rows))


if __name__ == "__main__":
    main()
