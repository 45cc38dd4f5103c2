"""The promise, for pipelines: every cut and every schedule computes what one device computes on the whole batch.

Losses, outputs, every gradient before and after clipping, the norm, parameters and buffers after steps of SGD with
momentum, as `harness.py` compares them; each parameter lies with one stage, whatever its number of uses.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.parity.harness import Recipe, check, parallel

MODELS = ("mlp", "gpt", "llama", "gpt2", "t5", "resnet", "unet", "frozen_tail")
MESHES: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
    ((2,), ("pp",)),
    ((4,), ("pp",)),
    ((2, 2), ("pp", "dp")),
    ((2, 2), ("pp", "tp")),
)
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble_v", 2))
ANY_NUMBER = ("gpipe", "1f1b", "zero_bubble_v")
LAYERS = {"mlp": 4, "frozen_tail": 4, "unet": 6}


def recipe(
    model: str, mesh: tuple[tuple[int, ...], tuple[str, ...]], schedule: tuple[str, int], times: int, **options: Any
) -> Recipe:
    """``times``: microbatches as a multiple of the ranks; 0 for three times and one more."""
    shape, axes = mesh
    microbatches = times * shape[0] if times else 3 * shape[0] + 1
    plan = "tensor_parallel" if "tp" in axes and model not in ("resnet", "unet") else "auto"
    return Recipe(
        model,
        shape,
        rows=2 * microbatches,
        axes=axes,
        schedule=schedule[0],
        microbatches=microbatches,
        stages_per_rank=schedule[1],
        **{"plan": plan, "steps": 2, "max_norm": 0.02, **options},
    )


def fits(model: str, mesh: tuple[tuple[int, ...], tuple[str, ...]], schedule: tuple[str, int], times: int) -> bool:
    """Whether the model has layers enough, and the schedule can run so many microbatches."""
    enough = mesh[0][0] * schedule[1] <= LAYERS.get(model, 99)
    return enough and (times > 0 or schedule[0] in ANY_NUMBER)


GRID = [
    recipe(model, mesh, schedule, times, accumulation=3, steps=5, share_captures=True)
    for model, mesh, schedule, times in itertools.product(MODELS, MESHES, SCHEDULES, (1, 2, 0))
    if fits(model, mesh, schedule, times)
]
PP2, PP4, DP, TP = MESHES
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = SCHEDULES
SAMPLE = [
    recipe("mlp", PP2, GPIPE, 1, accumulation=3),
    recipe("gpt", PP2, ONE_F_ONE_B, 0),
    recipe("gpt", DP, ZERO_BUBBLE, 2),
    recipe("unet", PP2, INTERLEAVED, 2),
    recipe("frozen_tail", DP, ONE_F_ONE_B, 2),
]
MORE = [
    recipe("gpt", TP, INTERLEAVED, 2, accumulation=3),
    recipe("gpt", PP4, ONE_F_ONE_B, 1),
    recipe("mlp", TP, ONE_F_ONE_B, 0),
    recipe("resnet", PP2, ONE_F_ONE_B, 2),
    recipe("resnet", DP, INTERLEAVED, 1),
    recipe("unet", PP4, ONE_F_ONE_B, 2),
    recipe("unet", DP, GPIPE, 1),
    recipe("llama", PP2, ZERO_BUBBLE, 2),
    recipe("llama", TP, ONE_F_ONE_B, 1),
    recipe("gpt2", DP, ONE_F_ONE_B, 2),
    recipe("gpt2", PP4, GPIPE, 1),
    recipe("t5", PP2, ONE_F_ONE_B, 2),
    recipe("t5", DP, INTERLEAVED, 1),
    recipe("gpt", PP2, ("dualpipe_v", 2), 2),
    recipe("gpt", DP, ("zero_bubble", 2), 2, accumulation=3),
    recipe("gpt", DP, ONE_F_ONE_B, 2, plan="fsdp"),
    recipe("gpt", DP, ZERO_BUBBLE, 2, plan="fsdp"),
]


@pytest.mark.wide_where(lambda recipe: recipe.model != "unet")
@pytest.mark.slow_where(lambda recipe: (recipe.model, recipe.schedule) == ("gpt", "zero_bubble_v"))
@pytest.mark.parametrize("recipe", [*SAMPLE, *(pytest.param(r, marks=pytest.mark.slow) for r in MORE)], ids=str)
def test_pipelines_compute_what_one_device_computes(recipe: Recipe) -> None:
    check(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", GRID, ids=str)
def test_the_whole_grid(recipe: Recipe) -> None:
    check(recipe)


@pytest.mark.wide
def test_dropout_does_not_depend_on_the_cut_or_the_microbatches() -> None:
    one = parallel(Recipe("gpt_dropout", (1,), steps=2, rows=8, max_norm=0.02))[0].records
    check(recipe("gpt_dropout", PP2, INTERLEAVED, 2), expected=one)
