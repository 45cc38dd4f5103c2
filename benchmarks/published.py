"""Our predictions against published runs on GPUs, at the same model, batch and parallelism.

The published figures are those of torchtitan's ``benchmarks/`` (H100 with HBM2e, 2.4 TB/s, 96 GB, limited to 500 W, 400
Gb/s of network per GPU: December 2024, with the memory that was reserved, and June 2025 with and without asynchronous
tensor parallelism; and H200), of its first ``docs/performance.md`` (64 A100), and of NeMo Automodel's
``docs/performance-summary.md`` (DGX H100).

How they are described:

- torchtitan's Llama repeats keys and values for each head before attention, and so does the model here.
- Activations are recomputed.  Wholly: each layer runs again.  Selectively ("op"): of each layer all but attention and
  two thirds of the products, as torchtitan's rule keeps them of a layer of Llama.  For a pipeline a second forward is
  added, and fusion saves the part that it saves without stages.
- Of compiled programs, layers are fused (``predict.fusion``), which torchtitan compiles one by one, and nothing else:
  its loss was compiled later.  Attention stays in bfloat16 where linear layers are in Float8.

Two numbers are fitted, each to one run, which the table marks "(fitted)" and which proves nothing; all others are
predicted with them.  One is the part of the peak that large products reach at 500 W, for that hardware alone: other
profiles are as they are shipped.  The other is how many times faster Float8 makes products.

- Where tensor parallelism is asynchronous, linear layers run in as many chunks of rows as are predicted to be fastest
  (``plan.linear_chunks``), elsewhere whole.  Of a pipeline they save what they save of a step without stages.

What is not alike: chunks of rows go over the whole group, where torchtitan passes pieces from rank to rank, and layers
that are recomputed selectively are priced as if they had chunks; ring attention is not modelled, in whose place is an
all-to-all around attention (Ulysses); nor kernels that are fused by hand (NeMo's of TransformerEngine, which count as
compiled).  A pipeline's number of microbatches is not published; it is torchtitan's default then, that of the
pipeline's ranks.  Parameters at rest, gradients and the optimizer's states are float32, NeMo's are bfloat16, as its
recipes have them.  The model gives its loss alone: both let go of the logits before the backward.

The memory that is predicted is that of the layout and the recomputation that ran; where activations were recomputed
selectively, with all products kept, which is a little more; over a pipeline, with as many layers recomputed as the
profile's limit asks for.  It is what tensors take; what was published is what the allocator had reserved, which is
more, in kernels that are fused, which is less.  With ``--auto`` the table has also the plan that our search chooses
within that limit: what saves memory, microbatches and, over a pipeline, its schedule and cuts are open.

    python benchmarks/published.py [--only 8B] [--fit] [--auto] [--keep rows.json]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.optimize import brentq
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoparallel.comm.world import PIPELINE_AXIS, Axes
from autoparallel.decisions.decisions import FULL, SELECTIVE
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import Pipeline
from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured
from autoparallel.hardware import A100, H100, H200, Profile
from autoparallel.plan import Plan
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.proposals import proposals
from autoparallel.planner.draft import call_of, draft_captured
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.pins import Pins, parse_pins
from autoparallel.planner.request.request import Request, limit_in_bytes

PEAK = (989e12 + 835e12) / 2
"""Its authors put the peak of their H100 between that of the SXM and of the NVL card."""

H100_500W = replace(
    H100,
    name="h100, HBM2e, 500 W",
    peak={**H100.peak, torch.bfloat16: PEAK},
    memory=95.0 * 2**30,
    memory_bandwidth=0.85 * 2.4e12,
)
WANTED = 0.15
SHAPES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
    "Llama 2 13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
                    "num_attention_heads": 40, "num_key_value_heads": 40, "vocab_size": 32000},
    "Llama 2 70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                    "num_attention_heads": 64, "vocab_size": 32000},
}  # fmt: skip
EXPERTS = "Qwen3 30B-A3B"

ASYNC, NEMO = "async TP", "NeMo"
EAGER, COMPILED, FLOAT8 = "eager", "compiled", "compiled, Float8"
WHOLE, KEPT = "whole", "kept"
PRODUCTS_AGAIN = 0.34
"""Of the arithmetic of 8B's linear layers: those of the keys and of the output of attention, and one of the MLP's."""


@dataclass(frozen=True)
class Numbers:
    """What is fitted.

    Attributes:
        products: the part of ``PEAK`` that large products reach at 500 W.
        float8: how many times faster they are in Float8.
    """

    products: float
    float8: float


NUMBERS = Numbers(products=0.544, float8=1.508)
"""As ``--fit`` finds them."""


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        mesh: the axes; parameters are sharded over "dp" and "dp_shard", as FSDP does.
        batch: sequences of a step on all GPUs.
        rate: tokens per second of one GPU.
        how: EAGER, COMPILED or FLOAT8.
        again: WHOLE, SELECTIVE or KEPT, how much of the forward is computed a second time.
        schedule: of the pipeline; empty where there is none.
        more: what else was used.
        microbatches: into how many a step is cut.
        reserved: GiB that were reserved on the fullest GPU; 0 where that was not published.
    """

    size: str
    mesh: Axes
    batch: int
    rate: float
    how: str
    again: str
    schedule: str = ""
    more: str = ""
    sequence: int = 8192
    hardware: Profile = H100_500W
    microbatches: int = 1
    reserved: float = 0.0

    @property
    def tokens(self) -> float:
        """Tokens of a step on each GPU."""
        return self.batch * self.sequence / torch.Size(size for _, size in self.mesh).numel()

    @property
    def plan(self) -> str:
        """The preset that is the published layout."""
        names = [name for name, _ in self.mesh]
        return "tensor_parallel" if "tp" in names else "context_parallel" if "cp" in names else "fsdp"

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters at rest."""
        return torch.bfloat16 if self.more == NEMO else torch.float32

    @property
    def linear_chunks(self) -> int | None:
        """Into how many chunks of rows linear layers are cut; None for as many as are fastest."""
        return None if self.more == ASYNC else 1

    def profile(self, numbers: Numbers) -> Profile:
        """The hardware as the run reaches it."""
        profile = self.hardware
        if profile is H100_500W:
            profile = replace(profile, flops={**profile.flops, torch.bfloat16: numbers.products * PEAK})
        if self.how == FLOAT8:
            rate = numbers.float8 * profile.flops[torch.bfloat16]
            flops = {**profile.flops, torch.bfloat16: rate}
            profile = replace(profile, flops=flops, attention=profile.attention / numbers.float8)
        return replace(profile, fuses=self.how != EAGER)

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh)
        how = ", ".join(filter(None, (self.how, self.again, self.schedule, self.more)))
        return f"{self.size}, {mesh}, {self.batch} x {self.sequence}, {self.hardware.name}, {how}"


NODE, NODES = (("dp", 8),), (("dp", 128),)
STAGED = ((PIPELINE_AXIS, 8), ("dp", 8), ("tp", 8))
FEW, MANY = (("dp_shard", 8), ("tp", 8)), (("dp_shard", 32), ("tp", 8))
RUNS = (
    Run("8B", NODE, 16, 5762, EAGER, SELECTIVE, reserved=82.4),
    Run("8B", NODE, 16, 6667, COMPILED, SELECTIVE, reserved=77.0),
    Run("8B", NODE, 16, 8532, FLOAT8, SELECTIVE, reserved=76.8),
    Run("8B", NODES, 256, 5605, EAGER, SELECTIVE, reserved=67.0),
    Run("8B", NODES, 256, 6514, COMPILED, SELECTIVE, reserved=62.0),
    Run("8B", NODES, 256, 8380, FLOAT8, SELECTIVE, reserved=61.8),
    Run("8B", NODE, 8, 3890, FLOAT8, WHOLE, sequence=32768, reserved=83.9),
    Run("8B", (("dp_shard", 4), ("cp", 2)), 4, 2540, FLOAT8, WHOLE, sequence=65536, reserved=84.2),
    Run("8B", (("dp_shard", 2), ("cp", 4)), 2, 1071, FLOAT8, WHOLE, sequence=131072, reserved=84.0),
    Run("8B", (("cp", 8),), 1, 548, FLOAT8, WHOLE, sequence=262144, reserved=84.5),
    Run("8B", FEW, 96, 4378, COMPILED, SELECTIVE),
    Run("8B", FEW, 96, 4809.4, COMPILED, SELECTIVE, "", ASYNC),
    Run("8B", FEW, 96, 5078.1, FLOAT8, SELECTIVE),
    Run("8B", FEW, 96, 5570.1, FLOAT8, SELECTIVE, "", ASYNC),
    Run("70B", MANY, 512, 597.3, COMPILED, WHOLE),
    Run("70B", MANY, 512, 652.4, COMPILED, WHOLE, "", ASYNC),
    Run("70B", MANY, 512, 809.8, FLOAT8, WHOLE),
    Run("70B", MANY, 512, 942.4, FLOAT8, WHOLE, "", ASYNC),
    Run("70B", MANY, 512, 829, FLOAT8, WHOLE, reserved=71.9),
    Run("405B", STAGED, 256, 100, FLOAT8, WHOLE, "1f1b", ASYNC, reserved=82.5),
    Run("405B", STAGED, 256, 128, FLOAT8, WHOLE, "interleaved_1f1b", ASYNC, reserved=72.7),
    Run("405B", STAGED, 64, 76, FLOAT8, WHOLE, "1f1b", ASYNC, sequence=32768, reserved=75.3),
    Run("8B", (("dp", 32),), 64, 10938, FLOAT8, SELECTIVE, hardware=H200),
    Run("8B", (("dp", 64),), 128, 10753, FLOAT8, SELECTIVE, hardware=H200),
    Run("8B", (("dp", 64),), 64, 2973, EAGER, SELECTIVE, hardware=A100),
    Run("70B", (("dp", 64),), 64, 331, EAGER, WHOLE, hardware=A100),
    Run("Llama 2 13B", (("dp", 64),), 128, 2162, EAGER, KEPT, sequence=4096, hardware=A100),
    Run("Llama 2 13B", (("dp", 64),), 128, 1904, EAGER, SELECTIVE, sequence=4096, hardware=A100),
    Run("Llama 2 70B", (("dp", 64),), 128, 353, EAGER, WHOLE, sequence=4096, hardware=A100),
    Run("70B", (("dp_shard", 32), ("cp", 2)), 128, 866.77, COMPILED, WHOLE, "", NEMO, 8192, H100, 4),
    Run(EXPERTS, (("ep", 8),), 512, 12040, COMPILED, WHOLE, "", NEMO, 4096, H100, 16),
)
FITTED = (RUNS[1], RUNS[2])


def _repeated(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Causal attention as torchtitan's Llama calls it: keys and values are repeated for each head."""
    from transformers.models.llama.modeling_llama import repeat_kv

    key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


class _Loss(nn.Module):
    """A language model that gives its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def _model(size: str, dtype: torch.dtype) -> nn.Module:
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    AttentionInterface.register("repeated", _repeated)
    with torch.device("meta"):
        if size == EXPERTS:
            experts = Qwen3MoeConfig(
                vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
                num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
                norm_topk_prob=True, max_position_embeddings=40960, use_cache=False, tie_word_embeddings=False,
                experts_implementation="grouped_mm",
            )  # fmt: skip
            return _Loss(Qwen3MoeForCausalLM(experts).train().to(dtype))
        options: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128256, **SHAPES[size]}
        config = LlamaConfig(
            **options, max_position_embeddings=131072, use_cache=False, tie_word_embeddings=False,
            attn_implementation="repeated",
        )  # fmt: skip
        return _Loss(LlamaForCausalLM(config).train().to(dtype))


@cache
def _captured(size: str, batch: int, sequence: int, axes: Axes, dtype: torch.dtype) -> tuple[nn.Module, Call, Captured]:
    model = _model(size, dtype)
    tokens = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    call = call_of((), {"input_ids": tokens, "labels": tokens})
    return model, call, Planner(model, _request(axes, H100, "auto")).capture(call)


def _request(
    axes: Any, profile: Profile, plan: str | Plan, limit: float | None = None, microbatches: int | None = None
) -> Request:
    return Request(
        axes=axes, profile=profile, plan=plan, memory_limit=limit, microbatches=microbatches,
        precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )  # fmt: skip


def predict(run: Run, numbers: Numbers) -> tuple[float, float]:
    """Seconds of a step, and bytes per device, of the published layout."""
    profile = run.profile(numbers)
    if run.schedule:
        found = _drafted(run, profile, run.plan)
        within = _drafted(run, profile, run.plan, limit_in_bytes(None, profile))
        return _fusion(run, profile) * (found.seconds() + found.forward_seconds), within.total_memory
    asked = _evaluator(run, profile, run.plan)
    made = asked.best(proposals(asked)).require()
    parameters = {n: replace(p, gather="per_use") if "S" in p.at_rest else p for n, p in made.parameters.items()}
    made = replace(made, parameters=parameters)  # as FSDP2 lets go of what it has gathered, over "cp", too
    kept = asked.forecast(made)
    if run.again == KEPT:
        return kept.seconds, kept.memory
    again = replace(made, recompute=dict.fromkeys(asked.layers, FULL))
    if run.again == WHOLE:
        forecast = asked.forecast(again)
        return forecast.seconds, forecast.memory
    flops = {dtype: rate / PRODUCTS_AGAIN for dtype, rate in profile.flops.items()}
    faster = _evaluator(run, replace(profile, flops=flops, attention=1e6), run.plan)
    more = faster.forecast(again).seconds - faster.forecast(made).seconds
    return kept.seconds + more, asked.forecast(replace(made, recompute=dict.fromkeys(asked.layers, SELECTIVE))).memory


def predict_auto(run: Run, numbers: Numbers, published: float) -> float:
    """Seconds of a step as our search plans it, within what the published layout takes, where that ran in more than our
    limit on the hardware."""
    profile = run.profile(numbers)
    limit = max(limit_in_bytes(None, profile) or 0.0, min(published, profile.memory or math.inf))
    if run.schedule:
        return _fusion(run, profile) * _drafted(run, profile, "auto", limit).seconds()
    asked = _evaluator(run, profile, "auto", limit)
    return asked.forecast(asked.best(proposals(asked)).require()).seconds


def _evaluator(run: Run, profile: Profile, plan: str, limit: float | None = None) -> Evaluator:
    _, call, captured = _captured(run.size, run.batch, run.sequence, run.mesh, run.dtype)
    count = run.microbatches if run.microbatches > 1 and limit is None else None
    request = _request(run.mesh, profile, plan, limit, count)
    chunks = None if plan == "auto" else run.linear_chunks
    return Evaluator(replace(request, linear_chunks=chunks), captured, call)


def _drafted(run: Run, profile: Profile, plan: str, limit: float | None = None) -> Prediction:
    """What a pipeline is predicted to take."""
    axes, ranks = run.mesh[1:], run.mesh[0][1]
    model, call, captured = _captured(run.size, run.batch, run.sequence, axes, run.dtype)
    per_rank = 2 if run.schedule == "interleaved_1f1b" else 1
    request = replace(
        _request(axes, profile, plan, limit),
        stages=ranks,
        pins=Pins() if plan == "auto" else parse_pins({"*.layers.*.weight": "S0,*"}, None),
        pipeline=Pipeline() if plan == "auto" else Pipeline(run.schedule, microbatches=ranks, stages_per_rank=per_rank),
    )
    return draft_captured(Planner(model, request), captured.copy(), call).prediction


def _fusion(run: Run, profile: Profile) -> float:
    """The part that fusion, and what overlaps in chunks of rows, leave of a step without the pipeline, whose stages are
    priced operator by operator."""
    axes = run.mesh[1:]
    _, call, captured = _captured(run.size, run.batch, run.sequence, axes, run.dtype)
    fused = Evaluator(replace(_request(axes, profile, run.plan), linear_chunks=run.linear_chunks), captured, call)
    plan = fused.best(proposals(fused)).require()
    eager = Evaluator(_request(axes, replace(profile, fuses=False), run.plan), captured, call)
    return fused.forecast(plan).seconds / eager.forecast(replace(plan, linear_chunks=1)).seconds


def _fitted() -> Numbers:
    """The numbers with which two runs are predicted as they were published."""

    def found(run: Run, numbers: Callable[[float], Numbers], least: float, most: float) -> float:
        def off(number: float) -> float:
            return run.tokens / predict(run, numbers(number))[0] - run.rate

        return float(brentq(off, least, most, xtol=0.002))

    products = found(FITTED[0], lambda number: Numbers(number, 1.0), 0.3, 1.0)
    return Numbers(products, found(FITTED[1], lambda number: Numbers(products, number), 1.0, 4.0))


def measure(run: Run, auto: bool) -> dict[str, Any]:
    """What a run is predicted to reach, in tokens per second and GPU, and what ours would."""
    seconds, memory = predict(run, NUMBERS)
    found: dict[str, Any] = {"rate": run.tokens / seconds, "memory": memory}
    if auto:
        try:
            found["auto"] = run.tokens / predict_auto(run, NUMBERS, memory)
        except PlanError as error:
            found["error"] = str(error)
    return found


def main() -> None:
    """Predicts every run and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs that begin so")
    parser.add_argument("--fit", action="store_true", help="finds the numbers that are fitted, and ends")
    parser.add_argument("--auto", action="store_true", help="searches, too")
    parser.add_argument("--keep", type=Path, help="a JSON file of runs that have been predicted, which is added to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.fit:
        print(asdict(_fitted()))
        return
    kept: dict[str, Any] = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    table = Table(title="Tokens per second and GPU")
    for column in ("run", "published", "predicted", f"within {WANTED:.0%}", "memory GB", "reserved GB", "auto"):
        table.add_column(column, justify="left" if column == "run" else "right")
    offs = []
    for run in RUNS:
        name = f"{run}, {run.rate}"
        if not name.startswith(options.only):
            continue
        if name not in kept or options.auto and not {"auto", "error"} & kept[name].keys():
            kept[name] = measure(run, options.auto)
            if options.keep:
                options.keep.write_text(json.dumps(kept, indent=1))
        found = kept[name]
        off = found["rate"] / run.rate - 1
        verdict = " (fitted)" if run in FITTED else "" if abs(off) <= WANTED else " (missed)"
        offs += [] if run in FITTED else [abs(off)]
        auto = f"none: {found['error'][:40]}" if "error" in found else ""
        if "auto" in found:
            auto = f"{found['auto']:,.0f}" + ("" if found["auto"] >= 0.999 * found["rate"] else " (slower)")
        held = f"{found['memory'] / 1e9:.1f}" + (" (too much)" if found["memory"] > run.hardware.memory else "")
        published = f"{run.reserved * 2**30 / 1e9:.1f}" if run.reserved else ""
        table.add_row(
            str(run), f"{run.rate:,.0f}", f"{found['rate']:,.0f}", f"{off:+.0%}{verdict}", held, published, auto
        )
    console = Console(width=170)
    console.print(table)
    within = [sum(off <= limit for off in offs) for limit in (0.08, WANTED)]
    console.print(
        f"Of {len(offs)} runs that nothing was fitted to, {within[0]} are within 8%, {within[1]} within {WANTED:.0%}. "
        f"Fitted: products reach {NUMBERS.products:.3f} of the peak at 500 W, in Float8 {NUMBERS.float8:.3f} times it."
    )


if __name__ == "__main__":
    main()
