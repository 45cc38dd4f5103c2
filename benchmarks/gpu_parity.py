"""Parity on the device: models of the tests train on ranks that share a GPU, and the plain ones on the CPU.

One rank has NCCL's group; two and four talk over gloo. It needs no pytest, and is what ``gpu.sh`` runs first:
every recipe is tried, and each that fails says where.

    AUTOPARALLEL_TEST_DEVICE=cuda python -m benchmarks.gpu_parity
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from typing import Any

from tests.parity.harness import Recipe, check

_PIPELINE: dict[str, Any] = {"steps": 2, "max_norm": 0.02, "schedule": "1f1b", "microbatches": 4}

RECIPES = (
    Recipe("gpt"),
    Recipe("mlp", (2,), accumulation=3),
    Recipe("gpt", (2,), "fsdp"),
    Recipe("gpt", (2,), "tensor_parallel"),
    Recipe("resnet", (2,), "data_parallel"),
    Recipe("gpt", (2, 2), accumulation=3),
    Recipe("gpt", (2, 2), "fsdp_tensor_parallel"),
    Recipe("mlp", (2,), axes=("pp",), **_PIPELINE),
    Recipe("gpt", (2, 2), axes=("pp", "dp"), **_PIPELINE),
)


def count_failures(recipes: Sequence[Recipe]) -> int:
    """How many recipes do not train as one process does; says of each how it went."""
    failures = 0
    for recipe in recipes:
        begin, verdict = time.perf_counter(), "equal"
        try:
            check(recipe)
        except Exception:  # noqa: BLE001 - the others are tried, too
            verdict, failures = f"FAILED\n{traceback.format_exc()}", failures + 1
        print(f"{time.perf_counter() - begin:6.1f} s  {recipe}: {verdict}", flush=True)
    return failures


if __name__ == "__main__":
    raise SystemExit(min(1, count_failures(RECIPES)))
