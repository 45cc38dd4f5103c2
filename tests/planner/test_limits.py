"""Limits on memory: which one holds, what saves memory, and that no preset beats "auto" within one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoparallel.comm.world import Axes
from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import CPU, H100, PROFILES, Profile
from autoparallel.plan import Plan
from autoparallel.planner.calls.saved_tensors import saved_tensors_of
from autoparallel.planner.calls.signatures import Signatures
from autoparallel.planner.candidates.candidates import Candidate, Proposals
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.draft import Draft, call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.presets import possible_presets
from autoparallel.planner.request.request import Request, limit_in_bytes
from autoparallel.predict.forecast import Forecast
from tests.captures import draft, shared_captures
from tests.models.gpt import GPT, GPTConfig
from tests.planner.blocks import Blocks

LAYERS, WIDTH, ROWS = 6, 16, 512
MESH: Axes = (("dp", 2), ("tp", 2))


@pytest.fixture(scope="module", autouse=True)
def one_trace_for_all_plans() -> Iterator[None]:
    with shared_captures():
        yield


def _draft(
    limit: float | None, plan: str = "auto", axes: Axes = MESH, profile: Profile = CPU, rows: int = ROWS
) -> Draft:
    request = Request(axes, profile, plan, loss_fn=F.mse_loss, memory_limit=limit)
    x = torch.empty(rows, WIDTH, device="meta")
    return draft(Blocks(LAYERS, WIDTH, 8 * WIDTH), call_of((x, x), with_target=True), request)


def test_what_the_hardware_has_is_the_limit_unless_told() -> None:
    assert H100.memory is not None and limit_in_bytes(None, H100) == pytest.approx(0.9 * H100.memory)
    half = 0.5 * H100.memory
    assert limit_in_bytes(0.5, H100) == half and limit_in_bytes(7e10, H100) == 7e10
    for text, number in (("70GB", 7e10), (" 512 mb", 5.12e8), ("0.5", half), ("7e10", 7e10), ("1.5T", 1.5e12)):
        assert limit_in_bytes(text, H100) == pytest.approx(number)
    for wrong in ("much", "", "-1", "1..2", 0.0, -3, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="is not a limit"):
            limit_in_bytes(wrong, H100)
    with pytest.raises(TypeError, match="not a bool"):
        limit_in_bytes(True, H100)
    assert limit_in_bytes(None, CPU) is None
    assert all(p.usable is None or p.usable < p.memory for p in PROFILES.values() if p.memory is not None)
    again = Profile.from_json(replace(H100, reserve=0.2).to_json())
    assert again.usable == pytest.approx(0.8 * H100.memory)
    with pytest.raises(ValueError, match="reserve"):
        Profile.from_json(replace(H100, reserve=1.0).to_json())


@pytest.mark.wide
@pytest.mark.slow_where(lambda profile: profile is CPU)
@pytest.mark.parametrize("profile", [CPU, replace(CPU, overlap=1.0)], ids=["nothing hides", "all hides"])
def test_no_preset_is_faster_than_auto_within_the_same_limit(profile: Profile) -> None:
    limit = 0.6 * _draft(None, profile=profile).prediction.total_memory
    auto = _draft(limit, profile=profile)
    assert auto.prediction.total_memory <= limit
    assert auto.plan.gap is not None and 0 <= auto.plan.gap < 0.5
    fitting = 0
    for preset in possible_presets(["dp", "tp"])[1:]:
        try:
            found = _draft(limit, preset, profile=profile)
        except PlanError as error:
            assert f"under plan={preset!r}" in str(error) and "layers run again" in str(error)
            continue
        fitting += 1
        assert found.prediction.total_memory <= limit
        assert auto.prediction.seconds() <= found.prediction.seconds() * (1 + 1e-9)
    assert fitting


@pytest.mark.slow
def test_what_fits_by_its_prediction_fits_whatever_the_search_adds_up_to() -> None:
    """Of experts in bfloat16 the search adds up more than a device keeps."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        num_hidden_layers=12, hidden_size=256, intermediate_size=896, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=512, use_cache=False, experts_implementation="grouped_mm",
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = transformers.MixtralForCausalLM(config), torch.empty(16, 512, dtype=torch.int64)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    request = Request((("dp", 2), ("ep", 8)), H100, "fsdp", precision=policy)

    def plan(limit: float | None) -> Draft:
        call = call_of((), {"input_ids": ids, "labels": ids})
        return draft(model, call, replace(request, memory_limit=limit))

    found = plan(0.85 * plan(None).prediction.total_memory)
    limit = 1.001 * found.prediction.total_memory
    assert found.plan.estimate is not None and found.plan.estimate.memory > limit
    assert plan(limit).prediction.total_memory <= limit


@pytest.mark.parametrize("trains", [True, False], ids=["all train", "some train"])
def test_what_parameters_take_alone_is_no_more_than_a_prediction_says(trains: bool) -> None:
    model, x = Blocks(LAYERS, WIDTH, 8 * WIDTH), torch.empty(ROWS, WIDTH, device="meta")
    model.blocks[0].requires_grad_(trains)
    request, call = Request(MESH, H100, loss_fn=F.mse_loss, memory_limit=1e12), call_of((x, x), with_target=True)
    evaluator = Evaluator(request, Planner(model, request).capture(call), call)
    for preset in possible_presets(["dp", "tp"]):
        for offloads in (False, True):

            def propose(candidate: Candidate) -> Proposals:
                return (yield candidate)

            candidate = Candidate(preset, offloads=offloads)
            plan = evaluator.best(propose(candidate)).require()
            for exactly in (False, True):
                forecast = evaluator.forecast(plan, exactly=exactly)
                assert 0 < evaluator.resting(candidate) <= forecast.memory * (1 + 1e-9)


def test_a_preset_whose_parameters_alone_take_too_much_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = (("dp", 8),)
    limit = 1.05 * _draft(None, "fsdp", axes, rows=8).prediction.total_memory
    assert limit < 4 * 4 * sum(p.numel() for p in Blocks(LAYERS, WIDTH, 8 * WIDTH).parameters())
    predicted: set[str] = set()
    forecast = Evaluator.forecast

    def note(self: Evaluator, plan: Plan, *, exactly: bool = False) -> Forecast:
        predicted.add(plan.origin)
        return forecast(self, plan, exactly=exactly)

    monkeypatch.setattr(Evaluator, "forecast", note)
    found = _draft(limit, "auto", axes, rows=8)
    assert found.prediction.total_memory <= limit
    assert "data_parallel" not in predicted and "fsdp" in predicted
    with pytest.raises(PlanError, match=r"no plan fits in .* under plan='data_parallel'"):
        _draft(limit, "data_parallel", axes, rows=8)
    assert "data_parallel" in predicted  # to say what it takes


def test_hybrid_shards_along_the_last_axis_and_repeats_along_the_others() -> None:
    plan = _draft(None, "hybrid").plan
    assert {plan.parameters[f"blocks.{i}.up.weight"].at_rest for i in range(LAYERS)} == {"I,S0"}
    assert {plan.parameters[f"blocks.{i}.up.weight"].gather for i in range(LAYERS)} == {"per_use"}
    with pytest.raises(PlanError, match=r"plan='hybrid' .* use a mesh of two axes or more, or plan='fsdp'"):
        _draft(None, "hybrid", (("dp", 2),))


def test_fsdp_with_tensor_parallel_shards_along_both_axes() -> None:
    plan = _draft(None, "fsdp_tensor_parallel", (("dp", 2), ("tp", 2))).plan
    assert {plan.parameters[f"blocks.{i}.up.weight"].at_rest for i in range(LAYERS)} == {"S1,S0"}
    assert {plan.parameters[f"blocks.{i}.up.weight"].gather for i in range(LAYERS)} == {"per_use"}
    for axes in ((("tp", 2),), (("dp", 2), ("ep", 2))):
        with pytest.raises(PlanError, match=r"needs a mesh axis named 'tp' and another"):
            _draft(None, "fsdp_tensor_parallel", axes)


class Kinds(nn.Module):
    """Calls that save their operand, their result, both, something else, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)  # saves x, which is no call's; gelu saves its result
        x = F.gelu(x)  # a view of it is read by the product below
        x = x.reshape(-1, 2, 8) + 1.0  # saved by the product, once
        x = self.b(x)  # nobody needs it: the sum and the softmax save what they make
        return torch.softmax(x + x.mean(), -1).sum()


def test_autograd_is_asked_what_the_backward_finds() -> None:
    request = Request((("dp", 2),), CPU)
    captured = Planner(Kinds(), request).capture(call_of((torch.empty(4, 8, device="meta"),)), training=True)
    parts = saved_tensors_of(captured.graph, Signatures(captured.actual), CPU).parts
    kept = {node.meta["key"].rpartition("/")[2]: part for node, part in parts.items() if node.op == "call_function"}
    assert kept == {"aten.linear#0": 1.0, "aten.add.Tensor#0": 1.0, "aten.softmax.int#0": 1.0}


def _sparing() -> Proposals:
    """The plan that adds up to the least memory."""
    free = yield Candidate("auto")
    return (yield replace(free.candidate, may_recompute=True, sparing=True))


def test_what_adds_up_to_least_memory_needs_little() -> None:
    """Bytes are taken off where they are counted: of what lies as views do, once."""
    request = Request((("dp", 2), ("tp", 8)), H100, loss_fn=_flat_loss, memory_limit=1e9)
    tokens = torch.empty(64, 512, dtype=torch.int64, device="meta")
    call = call_of((tokens, tokens), with_target=True)
    model = GPT(GPTConfig(context=512, layers=2, width=512, heads=8)).to("meta")
    evaluator = Evaluator(request, Planner(model, request).capture(call, training=True), call)
    plan = evaluator.best(_sparing()).require()
    assert plan.estimate is not None
    at_rest = sum(p.numel() for p in model.parameters()) * 4 * 4 / 16
    assert at_rest <= plan.estimate.memory <= evaluator.forecast(plan).memory < 0.2e9


def _flat_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())
