"""Plans within the memory of the hardware: does one fit, is it the best, what may be left, how long does it take.

    python benchmarks/plan_limits.py --only 8B --keep rows.json

Every row is a process of its own; those that ``--keep`` has already are not measured again, so that the table can be
made in parts.  The limit is what the hardware's profile lets a plan take.  Nothing is computed: all is predicted.
The columns: the preset that "auto" took, or "searched" for layouts of its own; seconds of a step, and of the best
preset, and of the published layout (where it is none of them: FSDP along "dp" with Megatron's tensor parallelism
along "tp", fixed by pins), within the same limit with the same means that save memory; memory; layers that run again;
the gap to what the search proved; and CPU-seconds of the search, the presets and the prediction of the whole program
included.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoparallel.comm.world import PIPELINE_AXIS, Axes
from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured
from autoparallel.graph.garbage import FEW, collected_rarely
from autoparallel.hardware import PROFILES
from autoparallel.plan import Plan
from autoparallel.planner.candidates.candidates import Outcome
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.meshes import MeshSearch
from autoparallel.planner.candidates.proposals import proposals
from autoparallel.planner.draft import call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.pins import parse_pins
from autoparallel.planner.request.presets import possible_presets
from autoparallel.planner.request.request import Request, limit_in_bytes
from autoparallel.report.progress import UNSHOWN
from benchmarks import plan as planning

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def _tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def _llama(hidden: int, inner: int, layers: int, heads: int, keys: int, words: int = 128256) -> Callable[..., Made]:
    def make(rows: int, length: int) -> Made:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=keys, vocab_size=words, max_position_embeddings=131072, use_cache=False,
            tie_word_embeddings=False, attn_implementation="sdpa",
        )  # fmt: skip
        return LlamaForCausalLM(config), _tokens(rows, length)

    return make


def _mixtral(rows: int, length: int) -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(use_cache=False, experts_implementation="grouped_mm")
    return MixtralForCausalLM(config), _tokens(rows, length)


def _t5(rows: int, length: int) -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), _tokens(rows, length)


def _images(rows: int, length: int) -> dict[str, torch.Tensor]:
    labels = torch.empty(rows, dtype=torch.int64, device="meta")
    return {"pixel_values": torch.empty(rows, 3, length, length, device="meta"), "labels": labels}


def _vit(rows: int, length: int) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1664, num_hidden_layers=48, num_attention_heads=16, intermediate_size=8192, num_labels=1000,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, image_size=length, patch_size=14,
        problem_type="single_label_classification",
    )  # fmt: skip
    return ViTForImageClassification(config), _images(rows, length)


def _resnet(rows: int, length: int) -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[3, 8, 36, 3], num_labels=1000, problem_type="single_label_classification")
    return ResNetForImageClassification(config), _images(rows, length)


MODELS: dict[str, Callable[..., Made]] = {
    "8B": _llama(4096, 14336, 32, 32, 8),
    "13B": _llama(5120, 13824, 40, 40, 40, 32000),
    "70B": _llama(8192, 28672, 80, 64, 8),
    "405B": _llama(16384, 53248, 126, 128, 8),
    "Mixtral 8x7B": _mixtral,
    "T5-11B": _t5,
    "ViT 2B": _vit,
    "ResNet-152": _resnet,
}


@dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        mesh: the axes; a number of devices for the search to factor.
        rows, length: of the batch: sequences and their tokens, or images and their pixels along a side.
        chunks: into how many the loss is cut, where the logits of a row alone would not fit.
    """

    model: str
    mesh: Axes | int
    rows: int
    length: int
    hardware: str = "h100"
    chunks: int | None = None

    def __str__(self) -> str:
        on = self.mesh if isinstance(self.mesh, int) else ", ".join(f"{name}={size}" for name, size in self.mesh)
        return f"{self.model}, {on}, {self.rows} x {self.length}, {self.hardware}"


def _dp(*sizes: int, names: tuple[str, ...] = ("dp", "tp")) -> Axes:
    return tuple(zip(names, sizes, strict=False))


def _staged(*sizes: int) -> Axes:
    return ((PIPELINE_AXIS, sizes[0]), *_dp(*sizes[1:]))


ROWS = (
    Row("8B", _dp(8), 8, 8192),
    Row("8B", _dp(8), 16, 4096),
    Row("8B", _dp(8), 8, 8192, "a100"),
    Row("8B", _dp(8), 16, 8192, "h200"),
    Row("8B", 8, 8, 8192),
    Row("8B", _dp(2, 8), 16, 8192),
    Row("8B", _dp(8, 8), 64, 8192),
    Row("8B", _dp(8, 8), 64, 32768, chunks=8),
    Row("13B", _dp(8), 8, 4096),
    Row("13B", _dp(8, 8), 64, 4096),
    Row("13B", _dp(8, 8), 64, 4096, "a100"),
    Row("70B", _dp(4, 8), 32, 8192),
    Row("70B", _dp(64), 64, 8192),
    Row("70B", _dp(8, 8), 64, 8192),
    Row("70B", _dp(8, 8), 64, 8192, "h200"),
    Row("70B", _dp(16, 8), 128, 8192),
    Row("70B", _dp(32, 8), 256, 8192),
    Row("405B", _dp(64, 8), 512, 8192),
    Row("405B", _staged(8, 8, 8), 256, 8192),
    Row("Mixtral 8x7B", _dp(2, 8, names=("dp", "ep")), 16, 4096),
    Row("Mixtral 8x7B", _dp(8, 8, names=("dp", "ep")), 64, 4096),
    Row("T5-11B", _dp(32), 64, 512),
    Row("ViT 2B", _dp(8), 256, 224),
    Row("ResNet-152", _dp(8), 1024, 224),
)

COLUMNS = (
    "setting", "chosen", "step s", "best preset", "published", "memory GB", "again", "gap %", "search CPU-s",
)  # fmt: skip


def measure(row: Row) -> dict[str, Any]:
    """Captures a model, plans it within the limit, and looks at the presets."""
    with torch.device("meta"):
        model, inputs = MODELS[row.model](row.rows, row.length)
    profile = PROFILES[row.hardware]
    mesh: Axes = (("dp", row.mesh),) if isinstance(row.mesh, int) else row.mesh
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    limit = limit_in_bytes(None, profile)
    request = Request(mesh, profile, precision=policy, memory_limit=limit, loss_chunks=row.chunks).on(mesh)
    call = call_of((), inputs)
    captured = Planner(model.train(), request).capture(call)
    gc.freeze()
    start = time.process_time()
    try:
        with UNSHOWN.phase("search"), collected_rarely(FEW):  # garbage is looked for as while the command plans
            if isinstance(row.mesh, int):
                search = MeshSearch(request, captured, call, row.mesh)
                mesh = search.choose().mesh
                request, evaluator = request.on(mesh), search.evaluator(mesh)
            else:
                evaluator = Evaluator(request, captured, call)
            outcome = evaluator.best(proposals(evaluator))
        plan = outcome.require()
    except PlanError as error:
        return {"error": str(error), "search": time.process_time() - start}
    found = {"search": time.process_time() - start, "gap": plan.gap, "again": len(plan.recompute)}
    return found | _predicted(evaluator, outcome) | _presets(request, captured, call, evaluator, plan)


def _predicted(evaluator: Evaluator, outcome: Outcome) -> dict[str, Any]:
    """Seconds and memory: of stages as they are compared, with what their parameters cost around the schedule."""
    plan = outcome.require()
    if plan.pipeline is not None:
        return {"seconds": outcome.seconds, "memory": max(plan.pipeline.memory_by_rank())}
    forecast = evaluator.forecast(plan, exactly=True)
    return {"seconds": forecast.seconds, "memory": forecast.memory}


def _presets(request: Request, captured: Captured, call: Call, evaluator: Evaluator, plan: Plan) -> dict[str, Any]:
    """The best preset within the limit, and whether it is what was chosen."""
    known: dict[str, float] = {}
    chosen = "searched"
    for preset in possible_presets([name for name, _ in request.axes])[1:]:
        found, seconds = _within(evaluator.about(preset))
        if found is not None:
            known[preset] = seconds
            if found.operators == plan.operators and found.parameters == plan.parameters:
                chosen = preset
    name = min(known, key=lambda preset: known[preset], default="")
    published = None
    if [axis for axis, _ in request.axes] == ["dp", "tp"]:
        pins = parse_pins({"model.layers.*.weight": "S0,*"}, None)
        asked = replace(request, plan="tensor_parallel", pins=pins)
        found, seconds = _within(Evaluator(asked, captured, call))
        published = seconds if found is not None else None
    return {"chosen": chosen, "preset": name, "preset seconds": known.get(name), "published": published}


def _within(evaluator: Evaluator) -> tuple[Plan | None, float]:
    """The plan that an evaluator's request asks for, if one fits by the prediction of its whole program, and its
    seconds."""
    try:
        outcome = evaluator.best(proposals(evaluator))
        plan = outcome.require()
    except PlanError:
        return None, 0.0
    return plan, _predicted(evaluator, outcome)["seconds"]


def main() -> None:
    """Prints the table, or one row as JSON where its number is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", type=int, help="measures one row in this process and prints JSON")
    parser.add_argument("--only", default="", help="rows that begin so")
    parser.add_argument("--keep", type=Path, help="a JSON file of rows that have been measured, which is added to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.row is not None:
        print(json.dumps(measure(ROWS[options.row])))
        return
    table = Table(title="Plans within the memory of the hardware, predicted")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("setting", "chosen") else "right")
    kept: dict[str, Any] = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    for number, row in enumerate(ROWS):
        if not str(row).startswith(options.only):
            continue
        if str(row) not in kept:
            kept[str(row)] = planning.apart(str(Path(__file__).resolve()), f"--row={number}")
            if options.keep:
                options.keep.write_text(json.dumps(kept, indent=1))
        found = kept[str(row)]
        if "error" in found:
            table.add_row(str(row), "none", "", "", "", "", "", "", f"{found['search']:.1f}")
            Console(width=150).print(f"{row}: {found['error']}")
            continue
        other = f"{found['preset']} {found['preset seconds']:.3f}" if found["preset"] else "none fits"
        others = [seconds for seconds in (found["preset seconds"], found["published"]) if seconds is not None]
        slower = " (slower)" if others and found["seconds"] > 1.001 * min(others) else ""
        published = "" if found["published"] is None else f"{found['published']:.3f}"
        gap = "" if found["gap"] is None else f"{100 * found['gap']:.1f}"
        table.add_row(
            str(row), found["chosen"], f"{found['seconds']:.3f}{slower}", other, published,
            f"{found['memory'] / 1e9:.1f}", str(found["again"]), gap, f"{found['search']:.1f}",
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
