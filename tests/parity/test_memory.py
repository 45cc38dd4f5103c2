"""The promise, for what saves memory and changes no number: the loss in chunks of rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.harness import Recipe, check


def recipe(mesh: tuple[int, ...], plan: str, accumulation: int = 1, **options: Any) -> Recipe:
    named = {name: options.pop(name) for name in ("axes", "schedule", "microbatches", "rows") if name in options}
    common = {"steps": 2, "max_norm": 0.02, "accumulation": accumulation, "share_captures": True, **named}
    return Recipe("gpt", mesh, plan, options=tuple(options.items()), **common)


CHUNKS = [
    recipe((1,), "auto", loss_chunks=5),
    recipe((2,), "data_parallel", 2, loss_chunks=3),
    recipe((2,), "fsdp", loss_chunks=64),
    recipe((2, 2), "tensor_parallel", loss_chunks=4),
    recipe((2, 2), "fsdp", axes=("pp", "dp"), schedule="1f1b", microbatches=4, loss_chunks=3),
]


@pytest.mark.wide_where(lambda recipe: recipe.world_size > 1)
@pytest.mark.parametrize("recipe", CHUNKS, ids=str)
def test_a_loss_in_chunks_is_the_same(recipe: Recipe) -> None:
    check(recipe)
