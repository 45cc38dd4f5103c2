"""The promise: for the same global batch, every plan on every mesh computes what one device computes.

Losses, outputs, every gradient before and after clipping, the norm, parameters and buffers after five steps of SGD
with momentum. See `harness.py` for what makes an agreement mean something.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from autoparallel.tools.parity.comparison import Record
from tests.parity.harness import Recipe, check, compare, parallel, reference

MODELS = ("mlp", "gpt", "resnet", "llama", "gpt2")
MESHES = ((2,), (4,), (2, 2))
PLANS = ("auto", "data_parallel", "fsdp", "tensor_parallel")
ACCUMULATIONS = (1, 3)

GRID = [
    Recipe(model, mesh, plan, accumulation)
    for model, mesh, plan, accumulation in itertools.product(MODELS, MESHES, PLANS, ACCUMULATIONS)
]


def _sample() -> list[Recipe]:
    """Every pair of model and plan once; meshes and accumulations rotate so that their pairs appear too."""
    return [
        Recipe(model, MESHES[(i + j) % 3], plan, ACCUMULATIONS[(i + j // 2 + (i == 4)) % 2])
        for i, model in enumerate(MODELS)
        for j, plan in enumerate(PLANS)
    ]


SAMPLE = _sample()


def test_the_sample_covers_every_pair() -> None:
    axes = {"model": MODELS, "mesh": MESHES, "plan": PLANS, "accumulation": ACCUMULATIONS}
    for (first, firsts), (second, seconds) in itertools.combinations(axes.items(), 2):
        pairs = {(getattr(recipe, first), getattr(recipe, second)) for recipe in SAMPLE}
        assert pairs == set(itertools.product(firsts, seconds)), (first, second)


@pytest.mark.slow_where(lambda recipe: recipe.model != "mlp" and (recipe.model, recipe.plan) != ("gpt", "fsdp"))
@pytest.mark.wide_where(lambda recipe: recipe.model == "mlp" and recipe.plan != "auto")
@pytest.mark.parametrize("recipe", SAMPLE, ids=str)
def test_parity(recipe: Recipe) -> None:
    check(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [recipe for recipe in GRID if recipe not in SAMPLE], ids=str)
def test_parity_on_the_rest_of_the_grid(recipe: Recipe) -> None:
    check(recipe)


@pytest.mark.wide
@pytest.mark.slow_where(lambda recipe: recipe.model != "regressor")
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("mlp", (2, 2), "auto", 3, dtype=torch.float32),
        Recipe("gpt", (2, 2), "tensor_parallel", 3, dtype=torch.float32),
        Recipe("gpt", (4,), "fsdp", 1, dtype=torch.float32),
        Recipe("regressor", (2,), "data_parallel", 3, dtype=torch.float32),
    ],
    ids=str,
)
def test_parity_in_float32(recipe: Recipe) -> None:
    check(recipe, tolerance=1e-5)


@pytest.mark.wide
@pytest.mark.slow_where(lambda plan: plan == "tensor_parallel")
@pytest.mark.parametrize("plan", PLANS)
def test_mean_squared_error(plan: str) -> None:
    check(Recipe("regressor", (2, 2), plan, accumulation=3))


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", [float("inf"), 1.0, 3.0])
def test_other_norms(norm_type: float) -> None:
    check(Recipe("gpt", (2, 2), "fsdp", norm_type=norm_type, max_norm=0.02, steps=2))


@pytest.fixture(scope="module")
def one_rank() -> list[Record]:
    return parallel(Recipe("gpt_dropout", (1,)))[0].records


class TestDropout:
    """Masks follow the global element index, so a plan cannot change them."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("mesh", "plan"),
        list(itertools.product([(2,), (2, 2)], PLANS)),
        ids=str,
    )
    def test_every_plan_equals_one_rank(self, mesh, plan, one_rank) -> None:
        check(Recipe("gpt_dropout", mesh, plan), expected=one_rank)

    @pytest.mark.wide
    def test_dropout_is_really_on(self, one_rank) -> None:
        """In training, but not in evaluation; and masks differ between calls and between elements."""
        plain = reference(Recipe("gpt"))
        with pytest.raises(AssertionError, match="step 1: loss"):
            compare(one_rank, plain, 1e-4)
        with pytest.raises(AssertionError, match="step 1: loss"):
            compare(one_rank, plain, 1e-9)
