"""The promise, for what saves memory or time and changes no number: the loss and linear layers in chunks of rows,
microbatches inside a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.harness import Recipe, check, parallel, reference


def recipe(
    mesh: tuple[int, ...], plan: str, accumulation: int = 1, pipeline: dict[str, Any] | None = None, **options: Any
) -> Recipe:
    common = {"steps": 2, "max_norm": 0.02, "accumulation": accumulation, "share_captures": True}
    return Recipe("gpt", mesh, plan, options=tuple(options.items()), **common, **(pipeline or {}))


PIPELINE = {"axes": ("pp", "dp"), "schedule": "1f1b", "microbatches": 4}
CHUNKS = [
    recipe((1,), "auto", loss_chunks=5),
    recipe((2,), "data_parallel", 2, loss_chunks=3),
    recipe((2,), "fsdp", loss_chunks=64),
    recipe((2, 2), "tensor_parallel", loss_chunks=4),
    recipe((2,), "context_parallel", pipeline={"axes": ("cp",)}, loss_chunks=2),
    recipe((2, 2), "fsdp", pipeline=PIPELINE, loss_chunks=3),
]
MICROBATCHES = [
    recipe((1,), "auto", microbatches=4),
    recipe((2,), "data_parallel", 2, microbatches=2),
    recipe((2,), "fsdp", microbatches=4, loss_chunks=3),
    recipe((2, 2), "fsdp", 2, microbatches=2),
    recipe((2, 2), "tensor_parallel", microbatches=2),
]
LINEARS = [
    recipe((2,), "tensor_parallel", linear_chunks=2),
    recipe((2, 2), "tensor_parallel", 2, linear_chunks=4, loss_chunks=3),
    recipe((2, 2), "tensor_parallel", linear_chunks=2, microbatches=2),
    recipe((2, 2), "tensor_parallel", pipeline={**PIPELINE, "axes": ("pp", "tp")}, linear_chunks=2),
    replace(recipe((2,), "tensor_parallel", linear_chunks=3), model="llama"),
]


@pytest.mark.wide
@pytest.mark.slow_where(lambda options: len(options) == 1)
@pytest.mark.parametrize("options", [{"loss_chunks": 3}, {"microbatches": 2, "loss_chunks": 3}], ids=str)
def test_models_that_return_logits_beside_their_loss(options: dict[str, int]) -> None:
    recipe = Recipe("llama", (2,), "fsdp", steps=2, max_norm=0.02, options=tuple(options.items()))
    check(recipe, expected=[record for record in reference(recipe) if record[2] != "logits"])


@pytest.mark.wide_where(lambda recipe: recipe.world_size > 1)
@pytest.mark.parametrize("recipe", CHUNKS, ids=str)
def test_a_loss_in_chunks_is_the_same(recipe: Recipe) -> None:
    check(recipe)


@pytest.mark.wide_where(lambda recipe: recipe.world_size > 1)
@pytest.mark.parametrize("recipe", MICROBATCHES, ids=str)
def test_microbatches_inside_a_call_are_the_whole_batch(recipe: Recipe) -> None:
    check(recipe)


@pytest.mark.wide
@pytest.mark.parametrize("recipe", LINEARS, ids=str)
def test_linear_layers_in_chunks_are_the_same(recipe: Recipe) -> None:
    check(recipe)


@pytest.mark.wide
def test_dropout_does_not_depend_on_the_microbatches() -> None:
    one = Recipe("gpt_dropout", (1,), steps=2, rows=8, max_norm=0.02)
    check(replace(one, mesh=(2,), options=(("microbatches", 4),)), expected=parallel(one)[0].records)
