"""Mixtures of experts: sharded over an axis "ep" and fed by all-to-all, they compute what one device computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoparallel.tools.parity.comparison import RankSeen
from tests.distributed import run_distributed
from tests.models import build
from tests.parity.harness import Recipe, check, reference

EP: dict[str, Any] = {"mesh": (2,), "axes": ("ep",)}
DP_EP: dict[str, Any] = {"mesh": (2, 2), "axes": ("dp", "ep")}
EP_TP: dict[str, Any] = {"mesh": (2, 2), "axes": ("ep", "tp")}
DP_EP_TP: dict[str, Any] = {"mesh": (2, 2, 2), "axes": ("dp", "ep", "tp")}

TIMEOUT = 280.0  # these graphs are long, and every rank captures its own

STACKS = (".experts.up", ".experts.down", ".experts.up_bias", ".experts.down_bias")


def _check_experts_are_sharded(recipe: Recipe, ranks: list[RankSeen]) -> None:
    """Every stack of experts is cut over "ep" along its experts; the router, and all else, is not cut over it."""
    axis = recipe.axes.index("ep")
    stacks = 0
    for name, layout in ranks[0].layouts.items():
        if name.endswith(STACKS):
            stacks += 1
            assert layout[axis] in ("S(0)", "Shard(dim=0)"), (name, layout)
        elif recipe.plan != "fsdp":
            assert "S" not in layout[axis], (name, layout)
    assert stacks >= 4
    shards, digests = zip(*(rank.shards["blocks.0.moe.experts.up"] for rank in ranks), strict=True)
    assert len(set(digests)) == len(set(shards)) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("moe", plan="expert_parallel", steps=3, **EP),
        Recipe("moe", plan="expert_parallel", accumulation=3, steps=3, **DP_EP),
        Recipe("moe_switch", plan="fsdp", steps=3, **DP_EP),
        Recipe("moe", plan="fsdp", accumulation=2, steps=3, norm_type=1.0, **EP),
        pytest.param(
            Recipe("moe_switch", plan="expert_parallel", steps=3, norm_type=float("inf"), max_norm=0.02, **DP_EP),
            marks=pytest.mark.slow,
        ),
        Recipe("moe", plan="expert_parallel", steps=3, **EP_TP),
        Recipe("moe", plan="tensor_parallel", steps=3, **EP_TP),
        Recipe("moe_switch", plan="expert_parallel", mesh=(4,), axes=("ep",)),
        Recipe("moe_switch", plan="expert_parallel", mesh=(2, 2), axes=("ep", "dp")),
        Recipe("moe", plan="expert_parallel", accumulation=2, steps=3, rows=16, **DP_EP_TP),
        Recipe("moe_switch", plan="fsdp", mesh=(2, 4), axes=("dp", "ep")),
    ],
    ids=str,
)
def test_experts_sharded_over_an_axis(recipe: Recipe) -> None:
    _check_experts_are_sharded(recipe, check(recipe, timeout=TIMEOUT))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("moe", (2,), "data_parallel", steps=3),
        Recipe("moe", (2, 2), "auto", steps=3, axes=("dp", "ep")),
        Recipe("moe_switch", (4,), "fsdp", steps=3),
        Recipe("moe", (2, 2), "tensor_parallel", steps=3),
    ],
    ids=str,
)
def test_experts_on_other_axes(recipe: Recipe) -> None:
    check(recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        (Recipe("moe_dropless", plan="expert_parallel", steps=3, **DP_EP), ""),
        (Recipe("moe_dropless", plan="data_parallel", mesh=(2,), steps=3), ""),
        (Recipe("moe_dropless", plan="auto", steps=3, **DP_EP), ""),
        (Recipe("mixtral_grouped", plan="expert_parallel", steps=3, **EP), "mixtral"),
        (Recipe("mixtral_grouped", plan="expert_parallel", steps=3, **DP_EP), "mixtral"),
        (Recipe("mixtral", plan="expert_parallel", steps=3, **EP), ""),
        (Recipe("mixtral", plan="data_parallel", mesh=(2,), steps=3), ""),
        (Recipe("mixtral", plan="fsdp", steps=3, **DP_EP), ""),
        (Recipe("mixtral_grouped", plan="auto", steps=3, **EP), "mixtral"),
        (Recipe("moe_dropless", plan="fsdp", mesh=(4,), axes=("ep",)), ""),
        (Recipe("moe_dropless", plan="expert_parallel", steps=3, **EP_TP), ""),
        (Recipe("moe_dropless", plan="expert_parallel", steps=3, rows=16, **DP_EP_TP), ""),
    ],
    ids=str,
)
def test_experts_without_a_capacity(recipe: Recipe, model: str) -> None:
    """``model`` is the plain model to compare with, where that of the recipe cannot run plainly."""
    expected = reference(dataclasses.replace(recipe, model=model)) if model else None
    ranks = check(recipe, expected=expected, timeout=TIMEOUT)
    if recipe.plan == "expert_parallel":
        axis = recipe.axes.index("ep")
        stacks = [x for name, x in ranks[0].layouts.items() if ".experts." in name]
        assert len(stacks) == 4
        for layout in stacks:
            assert layout[axis] in ("S(0)", "Shard(dim=0)"), layout


def test_the_models_exercise_what_they_are_for() -> None:
    """Some tokens find no place, every expert is used, and the balancing loss changes the router's gradient."""
    for name in ("moe", "moe_switch"):
        case = build(name)
        args, kwargs = case.make_batch(0, 8)
        places: list[torch.Tensor] = []
        router: Any = case.model.blocks[0].moe  # type: ignore[union-attr, index]
        router.experts.register_forward_pre_hook(lambda module, given, kept=places: kept.append(given[0]))
        case.model(*args, **kwargs)["loss"].backward()
        (sent,) = places
        filled = (sent.abs().sum(-1) > 0).sum(1)
        config = router.config
        assert (filled > 0).all()
        tokens = 8 * config.context * config.choices
        assert filled.sum() < tokens, "no token was passed over"
        gradient = router.router.weight.grad.clone()
        case.model.zero_grad()
        case.model.config = dataclasses.replace(config, balance=0.0)  # type: ignore[assignment]
        case.model(*args, **kwargs)["loss"].backward()
        assert (gradient - router.router.weight.grad).abs().max() > 1e-3 * gradient.abs().max()


def _count(name: str, shape: tuple[int, ...], axes: tuple[str, ...], plan: str) -> dict[str, Any]:
    import autoparallel

    case = build(name)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    model = autoparallel.compile(case.model, mesh, plan=plan)
    for step in range(2):
        args, kwargs = case.make_batch(step, 8)
        with autoparallel.count_traffic() as forward:
            loss = model(*args, **kwargs)["loss"]
        with autoparallel.count_traffic() as backward:
            loss.backward()
        with autoparallel.count_traffic() as clip:
            model.clip_grad_norm_(1.0)
        model.zero_grad()
    weights = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    assert model.plan is not None
    return {
        "unruled": model.plan.unruled,
        "forward": forward.collectives,
        "bytes": forward.bytes,
        "backward": backward.collectives,
        "clip": clip.collectives,
        "local": {n: tuple(p.to_local().shape) for n, p in weights.items()},
        "rank": dist.get_rank(),
    }


@pytest.mark.wide
def test_tokens_go_to_their_experts_and_back_by_all_to_all() -> None:
    found = run_distributed(_count, "moe", (2, 2), ("dp", "ep"), "expert_parallel", world_size=4)
    config: Any = build("moe").model.config
    layers = config.layers
    for rank in found:
        assert rank["unruled"] == {}
        assert rank["local"]["blocks.0.moe.experts.up"] == (2, config.width, config.hidden)
        assert rank["local"]["blocks.0.moe.router.weight"] == (config.experts, config.width)
        assert rank["forward"]["all_to_all", "ep"] == 2 * layers
        assert rank["backward"]["all_to_all", "ep"] == 2 * layers
        assert not any(kind == "all_gather" for kind, _ in rank["forward"])
        # There and back, float64, one of two ranks' tokens on each of 2 x 2 ranks: half of a rank's places travel.
        places = config.experts * int(config.capacity * config.choices * config.context / config.experts)
        sent = 2 * layers * 8 * config.width * places * 2 / 2
        assert rank["bytes"]["all_to_all", "ep"] == sent
        assert sum(rank["clip"].values()) == 1


def test_without_a_capacity_rows_travel_and_are_not_gathered() -> None:
    found = run_distributed(_count, "moe_dropless", (2,), ("ep",), "expert_parallel", world_size=2)
    config: Any = build("moe_dropless").model.config
    calls = 2 * config.layers
    for rank in found:
        assert rank["unruled"] == {}
        # How many rows, the rows, the results; of two products in each layer.
        assert rank["forward"]["all_to_all", "ep"] == rank["backward"]["all_to_all", "ep"] == 3 * calls
        # The numbers of the experts may be gathered, to see how they are used; rows are not.
        gathered = sum(size for (kind, _), size in rank["bytes"].items() if kind == "all_gather")
        assert gathered < rank["bytes"]["all_to_all", "ep"] / 50
        rows = 4 * config.context * config.choices  # of this rank; half of them travel, if experts are used alike
        sent = 8 * calls * (rows * (config.width + config.hidden) + 2 * config.experts // 2) / 2
        assert rank["bytes"]["all_to_all", "ep"] == sent
