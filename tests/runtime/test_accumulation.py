"""`accumulate()`: windows give the gradient of one big batch, whatever the microbatches weigh; strategies; traffic."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.decisions.parameters import GATHERS, REDUCTIONS
from autoparallel.plan import Plan
from autoparallel.planner.request.presets import Preset
from autoparallel.tools.processes import ProcessError
from tests.distributed import failures_of
from tests.runtime.support import (
    SideBySide,
    clip_grad_norm,
    compiled_pair,
    gradients_off,
    make,
    off,
    parameters_off,
    run_on_ranks,
)

Batch = tuple[Tensor, Tensor]


class Tagger(nn.Module):
    """A token classifier with a frozen layer, a part that only some batches use, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.up = nn.Linear(16, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Linear(24, 32)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.embedding(x)
        return self.head(torch.tanh(self.frozen(self.up(x if not skip else x.detach()))))


def token_mean(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=-1)


def sum_and_count(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum")
    return losses, (target != -1).sum()


def squared(out: Tensor, target: Tensor) -> Tensor:
    """Two means over as many, and what is the same for all rows."""
    return 0.5 * F.mse_loss(out, F.one_hot(target.clamp(min=0), 32).to(out.dtype)) + 0.1 * out.square().mean() - 1.0


def summed(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum") / 4


def regularised(out: Tensor, target: Tensor) -> Tensor:
    return token_mean(out, target) + 0.1 * out.square().mean()


def contrasted(out: Tensor, target: Tensor) -> Tensor:
    return token_mean(out, target) + out.square().sum()


def clamped(out: Tensor, target: Tensor) -> Tensor:
    """As loops write it by hand, for batches in which no target is valid."""

    def mean(logits: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="none")
        valid = (target.flatten() != -1).to(losses.dtype)
        return (losses * valid).sum() / valid.sum().clamp(min=1)

    return mean(out) + 0.3 * mean(out.tanh())


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    f.__name__: f for f in (token_mean, sum_and_count, squared, summed, regularised, contrasted, clamped)
}
KEPT = (0.9, 0.1, 0.5, 0.0, 0.7, 0.3, 0.05)  # of each microbatch's targets; the fourth has none at all


def batches(rows: tuple[int, ...] = (4,) * 7) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for count, kept in zip(rows, KEPT, strict=True):
        x, target = (torch.randint(0, 32, (count, 5), generator=generator) for _ in range(2))
        keep = torch.rand((count, 5), generator=generator) < kept
        made.append((x, torch.where(keep, target, -1)))
    return made


def pair(plan: Any, shape: tuple[int, ...], loss: str = "token_mean", **options: Any) -> tuple[Any, nn.Module]:
    return compiled_pair(Tagger, *shape, loss_fn=LOSSES[loss], plan=plan, **options)


def reference(plain: nn.Module, loss: str, window: list[Batch]) -> None:
    x, target = (torch.cat(parts) for parts in zip(*window, strict=True))
    value = LOSSES[loss](plain(x), target)
    (value[0] / value[1] if isinstance(value, tuple) else value).backward()


def _train(plan: str, shape: tuple[int, ...], loss: str, rows: tuple[int, ...]) -> dict[str, Any]:
    model, plain = pair(plan, shape, loss)
    both, sizes = SideBySide(model, plain), []
    for window in model.accumulate(3, batches(rows)):
        seen = []
        for x, target in window:
            model(x, target).backward()
            seen.append((x, target))
        reference(plain, loss, seen)
        both.step(0.05)
        sizes.append(len(seen))
    return {"worst": both.worst, "sizes": sizes}


CASES = [
    ((2,), "data_parallel", "token_mean"),
    ((2,), "fsdp", "sum_and_count"),
    ((2, 2), "fsdp", "token_mean"),
    ((2, 2), "tensor_parallel", "sum_and_count"),
    ((2,), "data_parallel", "squared"),
    ((2,), "fsdp", "summed"),
    ((2,), "data_parallel", "clamped"),
]


@pytest.mark.wide_where(lambda shape, plan, loss: shape != (2,) or loss not in ("sum_and_count", "clamped"))
@pytest.mark.parametrize(("shape", "plan", "loss"), CASES, ids=str)
def test_a_window_equals_one_batch(shape: tuple[int, ...], plan: str, loss: str) -> None:
    """The pitfall "mean of means", with a window that ends early and a microbatch that counts nothing."""
    for found in run_on_ranks(_train, plan, shape, loss, (4,) * 7, world_size=torch.Size(shape).numel()):
        assert found["sizes"] == [3, 3, 1] and found["worst"] < 1e-9


@pytest.mark.wide
def test_microbatches_of_different_sizes() -> None:
    for found in run_on_ranks(_train, "fsdp", (2,), "squared", (4, 2, 6, 4, 8, 4, 2), world_size=2):
        assert found["worst"] < 1e-9


def absolute(out: Tensor, target: dict[str, Any]) -> Tensor:
    return (out[..., :1] - target["y"][..., None]).abs().sum()


COUNTS: dict[str, Callable[[Tensor, dict[str, Any]], tuple[Tensor, Any]]] = {
    "a constant": lambda out, target: (absolute(out, target), 4),
    "a tensor that is one": lambda out, target: (absolute(out, target), torch.tensor(4)),
    "given": lambda out, target: (absolute(out, target), target["n"]),
    "a size": lambda out, target: (absolute(out, target), target["y"].numel()),
    "a length": lambda out, target: (absolute(out, target), target["y"].shape[1]),
    "read": lambda out, target: (absolute(out, target), (target["y"] > 0).sum().item()),
    "at least one": lambda out, target: (absolute(out, target), max(1, (target["y"] > 0).sum().item())),
}
"""What a ``loss_fn`` may return as a count, of sums that are alike."""


def _count(name: str, options: dict[str, Any]) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp" if "pipeline" in options else "dp",))
    plain = make(Tagger)
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=COUNTS[name], **options)
    both = SideBySide(model, plain)
    data = [(x, {"y": (x.double() - 9).roll(i, 1), "n": 3 + i * i % 5}) for i, (x, _) in enumerate(batches())]
    for window in model.accumulate(3, data):
        pairs = []
        for x, target in window:
            model(x, target).backward()
            pairs.append(COUNTS[name](plain(x), target))
        (sum(total for total, _ in pairs) / sum(count for _, count in pairs)).backward()  # type: ignore[misc]
        both.step(0.05)
    return both.worst


MICROBATCHES: dict[str, dict[str, Any]] = {
    "fsdp": {"plan": "fsdp"},
    "microbatches": {"plan": "fsdp", "microbatches": 2},
    "a pipeline": {"pipeline": autoparallel.Pipeline(microbatches=2)},
}


@pytest.mark.wide_where(lambda ways, name: ([*MICROBATCHES].index(ways) + [*COUNTS].index(name)) % 9 > 0)
@pytest.mark.slow_where(lambda ways, name: ([*MICROBATCHES].index(ways) + [*COUNTS].index(name)) % 3 > 1)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("ways", MICROBATCHES)
def test_a_count_weighs_what_it_is_whatever_holds_it(ways: str, name: str) -> None:
    assert max(run_on_ranks(_count, name, MICROBATCHES[ways], world_size=2)) < 1e-9


def _equal(loss: str) -> float:
    model, plain = pair("fsdp", (2,), loss)
    data = batches()[:3]
    for window in model.accumulate(3, data, weights="equal"):
        for x, target in window:
            model(x, target).backward()
    for x, target in data:
        (LOSSES[loss](plain(x), target) / 3).backward()
    return gradients_off(model, plain)


def test_equal_weights_take_the_mean_of_the_losses() -> None:
    assert max(run_on_ranks(_equal, "regularised", world_size=2)) < 1e-9


def _twice(together: bool) -> float:
    """A microbatch for which the model is called twice, as for pairs."""
    model, plain = pair("fsdp", (2,), "token_mean")
    data = batches()[:3]

    def backward(losses: list[Any]) -> None:
        for loss in [sum(losses)] if together else losses:
            loss.backward()

    for window in model.accumulate(3, data, weights="equal"):
        for x, target in window:
            backward([model(x, target), model(x.roll(1, 0), target)])
    for x, target in data:
        backward([LOSSES["token_mean"](plain(inputs), target) / 3 for inputs in (x, x.roll(1, 0))])
    return gradients_off(model, plain)


@pytest.mark.parametrize("together", [True, False])
def test_a_microbatch_counts_once_however_often_the_model_is_called_for_it(together: bool) -> None:
    assert max(run_on_ranks(_twice, together, world_size=2)) < 1e-9


# ------------------------------------------------------------------------------------------------------- strategies


def _edited(plan: Plan, **changes: str) -> Plan:
    data = json.loads(plan.to_json())
    for parameter in data["parameters"].values():
        parameter.update(changes)
    return Plan.from_json(json.dumps(data))


def _searched(shape: tuple[int, ...], at_rest: str | None) -> Plan:
    model, _ = pair("fsdp", shape, example_inputs=batches()[0])
    plan: Plan = model.plan
    return plan if at_rest is None else _edited(plan, at_rest=at_rest)


def _strategies(shape: tuple[int, ...], at_rest: str | None) -> dict[str, Any]:
    """Three microbatches and a step under every strategy: what differs from one process, and what was sent."""
    base, found = _searched(shape, at_rest), {}
    gathers = GATHERS if len(shape) == 1 else GATHERS[-1:]
    for reduce, gather in itertools.product(REDUCTIONS, gathers):
        model, plain = pair(_edited(base, reduce=reduce, gather=gather), shape)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worst, counts = 0.0, None
        for step in range(2):
            data = batches()[:3]
            with autoparallel.count_traffic() as traffic:
                for i, (x, target) in enumerate(data):
                    with torch.enable_grad() if i == 2 else model.no_sync():
                        model(x, target).backward()
                        token_mean(plain(x), target).backward()
            model._store.flush()  # synchronising twice changes nothing
            worst = max(worst, gradients_off(model, plain))
            counts = traffic.result()
            assert step == 0 or counts == model.plan.prediction.step(3), "predicted, not counted"
            optimizer.step()
            with torch.no_grad():
                for p in plain.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
            model.zero_grad(), plain.zero_grad()
        assert counts is not None
        sent = {kind: 0.0 for kind in ("all_gather", "reduce_scatter", "all_reduce")}
        for (kind, _), size in counts.bytes.items():
            sent[kind] += size
        found[reduce, gather] = {"worst": worst, "sent": sent}
    return found


def _parameters(trained: bool) -> int:
    return 8 * sum(p.numel() for p in Tagger().parameters() if p.requires_grad or not trained)


def _deferred(microbatches: int) -> float:
    model, _ = pair("data_parallel", (2,), example_inputs=batches()[0])
    data = (batches() * 2)[:microbatches]
    with autoparallel.count_traffic() as traffic:
        for window in model.accumulate(microbatches, data):
            for x, target in window:
                model(x, target).backward()
    sent: float = traffic.total_bytes
    return sent


def test_deferred_reductions_send_nothing_in_a_microbatch() -> None:
    """2 P (n-1)/n bytes a step, whatever the number of microbatches; beside it the sum of the losses, 8 bytes."""
    n = 2
    for microbatches in (1, 2, 8):
        for sent in run_on_ranks(_deferred, microbatches, world_size=n):
            loss = microbatches * 2 * 8 * (n - 1) / n
            assert sent == 2 * _parameters(trained=True) * (n - 1) / n + loss


def test_sharded_parameters_reduce_and_gather_as_planned() -> None:
    """In units of P (n-1)/n bytes, P of the parameters: gathers once a step, once or twice a microbatch; reductions
    once a step or once a microbatch."""
    n = 2
    share = (n - 1) / n
    for found in run_on_ranks(_strategies, (n,), "S0", world_size=n):
        for (reduce, gather), case in found.items():
            assert case["worst"] < 1e-9, (reduce, gather)
            gathers = case["sent"]["all_gather"] / (_parameters(trained=False) * share)
            reductions = case["sent"]["reduce_scatter"] / (_parameters(trained=True) * share)
            assert reductions == pytest.approx(1 if reduce == "per_step" else 3), (reduce, gather)
            if gather == "per_use":
                assert 3 < gathers <= 6
            else:
                assert gathers == pytest.approx(1 if gather == "per_step" else 3), (reduce, gather)


@pytest.mark.wide
def test_hybrid_sharding_scatters_within_and_reduces_across_once() -> None:
    """HSDP: sharded over the second axis, replicated over the first."""
    whole = _parameters(trained=True)
    for found in run_on_ranks(_strategies, (2, 2), "I,S0", world_size=4):
        for (reduce, gather), case in found.items():
            assert case["worst"] < 1e-9, (reduce, gather)
            scattered = case["sent"]["reduce_scatter"] / (whole / 2)
            across = case["sent"]["all_reduce"] / (whole / 2)  # 2 (n-1)/n of a half
            times = {"per_step": (1, 1), "across_replicas_per_step": (3, 1), "per_microbatch": (3, 3)}[reduce]
            assert (scattered, across) == (pytest.approx(times[0]), pytest.approx(times[1], rel=0.05)), (reduce, gather)


def _limited(factor: float) -> tuple[str, float, set[str], str]:
    free, _ = pair("fsdp", (2,), example_inputs=batches()[0])
    prediction = free.plan.prediction
    limit = prediction.total_memory + factor * prediction.memory["accumulators"]
    model, _ = pair("fsdp", (2,), example_inputs=batches()[0], memory_limit=limit)
    reductions = {p.reduce for p in model.plan.parameters.values()}
    return model.plan.explain(), limit, reductions, str(model.plan.prediction.memory["accumulators"])


def test_a_memory_limit_moves_reductions_into_the_microbatches() -> None:
    roomy, tight = (run_on_ranks(_limited, factor, world_size=2)[0] for factor in (1.5, 0.1))
    assert roomy[2] == {"per_step"} and float(roomy[3]) > 0
    assert "per_microbatch" in tight[2] and float(tight[3]) < float(roomy[3])
    assert "reduced once a step" in roomy[0] and "all (chosen)" in roomy[0]
    assert "reduced each microbatch" in tight[0]


def _half(plan: Preset, frozen: bool) -> dict[str, Any]:
    """64 microbatches of a bfloat16 model, frozen at first or not: the accumulated gradient against that of float64."""
    torch.manual_seed(0)
    plain = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    given = copy.deepcopy(plain).requires_grad_(not frozen)
    model = autoparallel.compile(given, mesh, loss_fn=F.mse_loss, plan=plan).requires_grad_(True)
    exact, naive = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(0)
    dtypes = set()
    for i in range(64):
        x, y = (torch.randn(8, 16, generator=generator).bfloat16() for _ in range(2))
        with torch.enable_grad() if i == 63 else model.no_sync():
            model(x, y).backward()
            dtypes.add(model.weight.grad.dtype)
        F.mse_loss(exact(x.double()), y.double()).backward()
        F.mse_loss(naive(x), y).backward()
    true = exact.weight.grad
    assert true is not None and naive.weight.grad is not None
    found = (model.weight.grad.full_tensor(), naive.weight.grad)
    off = [((g.double() - true).norm() / true.norm()).item() for g in found]
    torch.optim.AdamW(model.parameters()).step()
    return {"ours": off[0], "naive": off[1], "dtypes": dtypes, "at the end": model.weight.grad.dtype}


@pytest.mark.parametrize(("plan", "frozen"), [("data_parallel", False), ("data_parallel", True), ("fsdp", False)])
def test_accumulators_are_float32_or_wider(plan: Preset, frozen: bool) -> None:
    """The pitfall "accumulating in the parameter's dtype"."""
    for found in run_on_ranks(_half, plan, frozen, world_size=2):
        assert found["dtypes"] == {torch.float32, torch.bfloat16} and found["at the end"] == torch.bfloat16
        assert found["ours"] < 0.5 * found["naive"], found


def _some_microbatches() -> float:
    model, plain = pair("fsdp", (2,))
    for window in model.accumulate(3, batches()[:3]):
        for i, (x, target) in enumerate(window):
            model(x, i > 0, target).backward() if i else model(x, False, target).backward()
    data = batches()[:3]
    total = sum(int((t != -1).sum()) for _, t in data)
    for i, (x, target) in enumerate(data):
        (token_mean(plain(x, i > 0), target) * int((target != -1).sum()) / total).backward()
    return gradients_off(model, plain)


def test_a_parameter_used_in_the_first_microbatch_only_is_reduced() -> None:
    assert max(run_on_ranks(_some_microbatches, world_size=2)) < 1e-9


def _from_zeros() -> float:
    """Windows that start at gradients of zeros, with a layer that only the first of them uses."""
    model, plain = pair("fsdp", (2,))
    both = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for number, window in enumerate(model.accumulate(3, batches()[:6])):
        seen = []
        for x, target in window:
            model(x, number > 0, target).backward()
            seen.append((x, target))
        x, target = (torch.cat(parts) for parts in zip(*seen, strict=True))
        token_mean(plain(x, number > 0), target).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return parameters_off(model, plain)


def test_a_window_may_start_at_zeros() -> None:
    assert max(run_on_ranks(_from_zeros, world_size=2)) < 1e-9


# ----------------------------------------------------------------------------------------------------------- misuse


def _misuse(case: str) -> None:
    model, _ = pair("fsdp", (2,), {"unknown loss": "contrasted", "means": "regularised"}.get(case, "token_mean"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = batches()[:3]
    if case == "steps":
        model.accumulate(0, data)
    if case == "weights":
        model.accumulate(2, data, weights="rows")
    if case == "left over":
        model(*data[0]).backward()
    for window in model.accumulate(3, data):
        if case == "skipped":
            continue
        for i, (x, target) in enumerate(window):
            loss = model(x, target)
            if case == "penalty":
                loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
            if case == "two calls":
                loss = loss + model(x.roll(1, 0), target)
            loss.backward()
            if i == 1 and case == "clip":
                model.clip_grad_norm_(1.0)
            if i == 1 and case == "step":
                optimizer.step()
            if i == 1 and case == "zero_grad":
                optimizer.zero_grad()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("steps", "steps must be a positive number of microbatches, got 0"),
        ("weights", "unknown weights 'rows': expected one of loss, equal"),
        ("left over", "has a gradient already: call optimizer.zero_grad"),
        ("skipped", "was not gone through"),
        ("clip", "clip_grad_norm_() inside no_sync()"),
        ("step", "optimizer.step() inside no_sync()"),
        ("zero_grad", "was cleared in the middle of a window of accumulate()"),
        ("penalty", "such as a penalty, was differentiated in a window of accumulate()"),
        ("two calls", "losses of several calls are differentiated together in a window of accumulate()"),
        ("unknown loss", "cannot tell what the loss is a mean over: it adds up means and sums"),
        ("means", "it adds up means over different numbers"),
    ],
)
def test_misuse_is_an_error_on_every_rank(case: str, message: str) -> None:
    with pytest.raises(ProcessError) as raised:
        run_on_ranks(_misuse, case, world_size=2, keep_after_error=True)
    failures = failures_of(raised.value)
    assert failures.keys() == {0, 1}
    assert all(message in failure.message for failure in failures.values())


def _unfinished() -> tuple[float, list[str]]:
    model, plain = pair("fsdp", (2,))
    for x, target in batches()[:2]:
        with model.no_sync():
            model(x, target).backward()
        token_mean(plain(x), target).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.eval()
        model.train()
    model.clip_grad_norm_(1e9)
    return gradients_off(model, plain), [str(w.message) for w in caught]


def test_an_unfinished_step_is_said_and_kept() -> None:
    for far, messages in run_on_ranks(_unfinished, world_size=2):
        assert far < 1e-9 and len(messages) == 1 and "no step has used" in messages[0]


def _left_open() -> float:
    """A window that the loop leaves early: what it accumulated is reduced and divided when it is clipped."""
    model, plain = pair("fsdp", (2,))
    data = batches()[:2]
    for window in model.accumulate(4, data + batches()[:1]):
        for i, (x, target) in enumerate(window):
            model(x, target).backward()
            if i == 1:
                break
        reference(plain, "token_mean", data)
        norm, expected = model.clip_grad_norm_(0.05), clip_grad_norm(plain, 0.05)
        assert expected > 0.05
        return max(off(norm, expected), gradients_off(model, plain))
    raise AssertionError


def test_a_window_left_open_loses_nothing() -> None:
    assert max(run_on_ranks(_left_open, world_size=2)) < 1e-9


def _read(plan: str, weights: str, left: bool) -> dict[str, float]:
    """What a script reads of gradients, and writes to them, before the library has clipped or stepped: where it has
    left a window, or inside of it behind the last microbatch, of which it differentiates a part by itself; there,
    hooks have seen them."""
    data = batches()[:3]
    results = {}
    for way in ("clip_grad_norm_", "clip_grad_value_", "norm", "added"):
        model, plain = pair(plan, (2,))
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
        norms: list[Any] = [0.0, 0.0]
        for m in (model, plain):
            if not left:  # which hooks see in the step
                m.up.weight.register_hook(lambda grad: 3 * grad)

        def use(m: Any, optimizer: Any, place: int, way: str = way, norms: list[Any] = norms) -> None:
            if way == "clip_grad_norm_":
                norms[place] = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05)
            elif way == "clip_grad_value_":
                torch.nn.utils.clip_grad_value_(m.parameters(), 0.001)
            elif way == "norm":
                norms[place] = m.up.weight.grad.norm()
            else:
                m.up.weight.grad.add_(m.up.weight.detach())
            optimizer.step()

        for window in model.accumulate(4 if left else 3, data if not left else [*data, data[0]], weights=weights):
            for i, (x, target) in enumerate(window):
                loss = model(x, target)
                (0.25 * loss).backward(retain_graph=True)
                (0.75 * loss).backward()
                if i == 2:
                    if left:
                        break
                    use(model, optimizers[0], 0)
            if left:
                use(model, optimizers[0], 0)
            break
        if weights == "loss":
            reference(plain, "token_mean", data)
        else:
            for x, target in data:
                (token_mean(plain(x), target) / 3).backward()
        use(plain, optimizers[1], 1)
        results[way] = max(parameters_off(model, plain), off(*norms) if norms[1] else 0.0)
    return results


@pytest.mark.parametrize("left", [True, False], ids=["left", "inside"])
@pytest.mark.parametrize("weights", ["loss", "equal"])
@pytest.mark.parametrize("plan", ["fsdp", "data_parallel"])
def test_gradients_are_those_of_the_window_behind_its_last_microbatch(plan: str, weights: str, left: bool) -> None:
    for results in run_on_ranks(_read, plan, weights, left, world_size=2):
        assert max(results.values()) < 1e-9, results
