"""`plan.explain()` says what was decided and what it costs, in words that hold for the real program."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.placements import parse_layout
from autoparallel.plan import Plan
from autoparallel.report.words import describe_layout, fold
from autoparallel.text import duration, units
from tests.distributed import run_distributed
from tests.models import build


@torch.library.custom_op("autoparallel_tests::turn_around", mutates_args=())
def turn_around(x: torch.Tensor) -> torch.Tensor:
    """An operator that no rule covers."""
    return x.flip(-1).clone()


@turn_around.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


turn_around.register_autograd(lambda ctx, grad: turn_around(grad))


class Turning(nn.Module):
    """Has two calls of an operator without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(turn_around(turn_around(self.up(x))))


def _explain(cases: list[tuple[str, tuple[int, ...], str]]) -> list[tuple[str, str]]:
    """What rank by rank is said of each plan, with and without its prediction."""
    found = []
    for name, shape, plan in cases:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        model: nn.Module
        inputs: tuple[Any, ...]
        if name == "turning":
            model, inputs, loss_fn = Turning(), (torch.ones(8, 8), torch.zeros(8, dtype=torch.int64)), F.cross_entropy
        else:
            case = build(name, torch.float32)
            model, loss_fn, (inputs, _) = case.model, case.loss_fn, case.make_batch(0, 8)
        compiled = autoparallel.compile(model, mesh, loss_fn=loss_fn, plan=plan, example_inputs=inputs)
        text = compiled.plan.explain()
        assert str(compiled.plan) == text, "what a plan is printed as"
        assert re.fullmatch(r"<Plan '\w+' on the mesh \(dp=.*\): \d+ parameters, \d+ operators>", repr(compiled.plan))
        found.append((text, Plan.from_json(compiled.plan.to_json()).explain()))
    return found


def _row(text: str, *starts: str) -> list[str]:
    """The cells of the only table row whose first cells are `starts`."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    (found,) = [row for row in rows if tuple(row[: len(starts)]) == starts]
    return found


@pytest.mark.slow
def test_explains_plans_of_real_models() -> None:
    cases = [
        ("gpt", (2, 2), "tensor_parallel"), ("mlp", (4,), "data_parallel"), ("mlp", (4,), "fsdp"),
        ("mlp", (4,), "auto"), ("turning", (4,), "data_parallel"),
    ]  # fmt: skip
    ranks = run_distributed(_explain, cases, world_size=4)
    assert all(found == ranks[0] for found in ranks), "every rank says the same"
    (tensor, tensor_alone), (data, _), (fsdp, fsdp_alone), (auto, _), (turning, turning_alone) = ranks[0]
    for text in (t for pair in ranks[0] for t in pair):
        assert "\x1b" not in text and max(map(len, text.splitlines())) <= 80

    # The mesh, and where the plan is from.
    assert "the preset 'tensor_parallel', on the mesh (dp=2, tp=2)" in tensor
    assert "chosen by the search, on the mesh (dp=4)" in auto

    # Parameters and activations, repeated layers in one row.
    assert _row(tensor, "blocks.0-1.up", "weight [128, 32]")[2:] == ["dim 0 over tp", "dim 0 over tp"]
    assert _row(tensor, "blocks.0-1.up", "[8, 16, 128] dim 0 over dp, dim 2 over tp")
    assert _row(tensor, "blocks.0-1.down", "weight [32, 128]")[2:] == ["dim 1 over tp", "dim 1 over tp"]
    assert _row(tensor_alone, "blocks.0-1.down", "weight")[2] == "dim 1 over tp"
    assert "blocks.0-1.attention.out  aten.linear: ...0 over dp, k over tp" in re.sub(" {3,}", "  ", tensor_alone)
    assert _row(fsdp, "up", "weight [16, 12]")[2:] == ["dim 0 over dp", "whole, per use"]
    assert _row(fsdp, "up", "[8, 16] dim 0 over dp") and _row(data, "up", "[8, 16] dim 0 over dp")
    assert _row(fsdp_alone, "up", "weight")[2:] == ["dim 0 over dp", "per use"]
    assert _row(data, "up", "weight [16, 12]")[2:] == ["whole", "whole"]

    # Collectives and bytes: the gradients of all parameters in one all-reduce, 2 (n - 1) / n of their bytes.
    parameters = sum(p.numel() for p in build("mlp", torch.float32).model.parameters()) * 4
    sent = units(2 * parameters * 3 / 4)
    assert _row(data, "all_reduce dp")[1:] == ["1x 6 B", f"1x {sent}", f"2x {units(1.5 * parameters + 6)}"]
    gathered = f"1x {units(parameters * 3 / 4)}"
    # The backward reads no weight of the layer that comes first, and no bias.
    weights = dict(build("mlp", torch.float32).model.named_parameters())
    read_again = sum(weights[name].numel() for name in ("norm.weight", "mix.weight", "down.weight"))
    assert _row(fsdp, "all_gather dp")[1:3] == [gathered, f"1x {units(4 * read_again * 3 / 4)}"]
    assert _row(fsdp, "reduce_scatter dp")[1:] == [gathered, gathered]
    assert "clip_grad_norm_() adds 1 all_reduce over dp, 24 B" in fsdp

    # Time and memory.
    assert re.search(r"Predicted time of a step on the profile 'cpu': \d.*forward.*backward", fsdp)
    assert _row(fsdp, "parameters") == ["parameters", units(parameters / 4)]
    assert _row(data, "optimizer states") == ["optimizer states", units(2 * parameters)]

    # Operators without a rule.
    assert "autoparallel_tests.turn_around (2 x)" in " ".join(turning.split()) and "register_rule" in turning
    assert "autoparallel_tests.turn_around (2 x)" in " ".join(turning_alone.split())
    assert "without a sharding rule" not in data and "Every operator has a sharding rule." in data
    assert "predicted when the plan is compiled" in " ".join(turning_alone.split()) and "Predicted" not in turning_alone


def test_fold_keeps_what_differs_apart() -> None:
    rows = [("a.0.x", 1), ("a.1.x", 1), ("a.2.x", 2), ("a.3.x", 1), ("b", 1)]
    rows[4:4] = [("a.0.y.0", 3), ("a.0.y.1", 3), ("a.1.y.0", 3)]
    assert fold(rows) == [("a.0-1,3.x", 1), ("a.2.x", 2), ("a.0-1.y.0", 3), ("a.0.y.1", 3), ("b", 1)]
    grid = [(f"a.{i}.y.{j}", 0) for i in range(12) for j in range(3)]
    assert fold(grid) == [("a.0-11.y.0-2", 0)]


def test_words() -> None:
    axes = ("pod", "dp", "tp")
    assert describe_layout(parse_layout("I,R,I"), axes) == "whole"
    assert describe_layout(parse_layout("S0,S0,S1"), axes) == "dim 0 over pod+dp, dim 1 over tp"
    assert describe_layout(parse_layout("S0,P,R"), axes) == "dim 0 over pod, summands over dp"
    sizes = (0, 999, 1000, 1_234_567, 999_960, 5e13)
    assert [units(n) for n in sizes] == ["0 B", "999 B", "1.0 kB", "1.2 MB", "1.0 MB", "50.0 TB"]
    assert [duration(s) for s in (1.5, 0.0125, 2e-5)] == ["1.5 s", "12.5 ms", "20 us"]
