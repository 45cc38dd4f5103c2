"""Gradients: accumulated without communication, reduced once, and equal to one process in every order of events.

Each scenario is a list of events that is played twice, on the compiled model and on the plain one; gradients and
parameters are compared after every event that leaves a whole gradient. Four ranks, mesh (2, 2), and two ranks for
the plans whose parameters change layout with the axis.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel import _torch
from autoparallel.runtime.gradients.backwards import IN_FLIGHT, BackwardPass
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.gradients.travel import Travel
from tests.runtime.support import (
    Net,
    SideBySide,
    batch,
    compiled_pair,
    gradients_off,
    make,
    mesh_of,
    off,
    parameters_off,
    placements,
    raised,
    run_on_ranks,
    whole,
)

PLANS = ("data_parallel", "fsdp", "tensor_parallel")

# One letter is one event: b a backward, n one under no_sync, s a step of the optimizer, c clipping, z zero_grad,
# Z zero_grad(set_to_none=False), r a look at .grad.full_tensor(), e a call in eval mode without a gradient.
SCENARIOS = {
    "one microbatch": "bcsz bcsz",
    "windows of two": "nbcsz nbcsz",
    "windows of three": "nnbcsz nnbcsz",
    "windows of four": "nnnbcsz nnnbcsz",
    "windows of changing length": "nnbsz bsz nbsz",
    "backward twice without zero_grad": "bbcsz",
    "no_sync after a synchronised backward": "bnbcsz",
    "no_sync after a synchronised backward, then nothing": "bncsz bcsz",
    "a window that is never closed, then clipping": "nncsz bcsz",
    "a window that is never closed, then a step": "nnsz nsz",
    "zero_grad in the middle of a window": "nznbcsz",
    "zero_grad in the middle, keeping the tensors": "nZnbcsz",
    "zero_grad keeping the tensors": "bcsZ bcsZ nbcsZ",
    "keeping the tensors, then a window never closed": "bcsZ ncsZ nncsz",
    "a look inside the window": "nrnrbrcsz",
    "a look after a look": "nrrbrr",
    "steps without zero_grad": "bsbsnbs",
    "evaluation inside a window": "nenebcsz",
    "steps of a window left open at zero_grad": "nzbcsz",
    "clipping twice": "bccsz",
}


def _play(scenario: str, plan: str, shape: tuple[int, ...], build: Callable[[], nn.Module] = Net) -> dict[str, float]:
    model, plain = compiled_pair(build, *shape, plan=plan)
    return _played(model, plain, {"": scenario})[""]


def _played(model: Any, plain: nn.Module, scenarios: dict[str, str]) -> dict[str, dict[str, float]]:
    """How far each event of each scenario is from one process."""
    results: dict[str, dict[str, float]] = {}
    for name, scenario in scenarios.items():
        model.zero_grad(), plain.zero_grad()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, plain)]
        found = results[name] = {}
        step = 0
        for i, event in enumerate(scenario.replace(" ", "")):
            worst = _event(model, plain, optimizers, event, step)
            step += event in "bn"
            found[f"{i}{event}"] = max(worst, parameters_off(model, plain))
    return results


def _event(model: Any, plain: nn.Module, optimizers: list[Any], event: str, step: int) -> float:
    x, y = batch(step)
    if event in "bn":
        with model.no_sync() if event == "n" else nullcontext():
            loss = model(x, y)
            loss.backward()
        expected = F.mse_loss(plain(x), y)
        expected.backward()
        return max(off(loss, expected), gradients_off(model, plain) if event == "b" else 0.0)
    if event == "r":
        return gradients_off(model, plain)
    if event == "c":
        norm = model.clip_grad_norm_(0.1)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert expected > 0.0999, "the limit bites"
        return max(off(norm, expected), gradients_off(model, plain))
    if event == "e":
        model.eval(), plain.eval()
        with torch.no_grad():
            worst = off(model(x), plain(x))
        model.train(), plain.train()
        return worst
    if event == "s":
        for optimizer in optimizers:
            optimizer.step()
        return gradients_off(model, plain)
    for m in (model, plain):
        m.zero_grad(set_to_none=event == "z")
    return 0.0


def _all_scenarios(plan: str, shape: tuple[int, ...]) -> dict[str, dict[str, float]]:
    model, plain = compiled_pair(Net, *shape, plan=plan)
    results = _played(model, plain, SCENARIOS)
    results["replicas"] = {"bits": _replicas_differ(model)}
    return results


def _replicas_differ(model: nn.Module) -> float:
    """0.0 when every rank that holds the same part of a parameter holds the same bits."""
    mine = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        coordinate = p.device_mesh.get_coordinate()
        part = tuple(c for c, how in zip(coordinate, p.placements, strict=True) if how.is_shard())
        mine[name, part] = p.to_local().detach().numpy().tobytes()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for key, value in mine.items():
        if any(other.get(key, value) != value for other in everyone):
            return 1.0
    return 0.0


@pytest.fixture(scope="module", params=[*((p, (2,)) for p in PLANS), ("fsdp", (2, 2)), ("auto", (2, 2))], ids=str)
def played(request) -> list[dict[str, dict[str, float]]]:
    plan, shape = request.param
    return run_on_ranks(_all_scenarios, plan, shape, world_size=torch.Size(shape).numel())


@pytest.mark.wide_where(lambda played: played != ("fsdp", (2,)))
@pytest.mark.slow_where(lambda played: played in (("data_parallel", (2,)), ("auto", (2, 2)), ("fsdp", (2, 2))))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_equal_one_process(scenario: str, played) -> None:
    for rank, results in enumerate(played):
        wrong = {event: far for event, far in results[scenario].items() if not far < 1e-9}
        assert not wrong, f"rank {rank}, {SCENARIOS[scenario]}: {wrong}"


@pytest.mark.wide_where(lambda played: played != ("fsdp", (2,)))
@pytest.mark.slow_where(lambda played: played in (("data_parallel", (2,)), ("auto", (2, 2)), ("fsdp", (2, 2))))
def test_replicated_parameters_are_bit_equal(played) -> None:
    assert all(results["replicas"]["bits"] == 0.0 for results in played)


# -------------------------------------------------------------------------------------- parameters that are left out


class Branches(nn.Module):
    """Two heads, of which a call takes one or both; a parameter that no call uses; a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.a = nn.Linear(8, 4)
        self.b = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 4)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, which: str = "ab") -> Tensor:
        x = self.trunk(self.frozen(x))
        return sum((getattr(self, head)(x) for head in which), torch.zeros(()))


def _left_out(plan: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    model, plain = compiled_pair(Branches, plan=plan)

    def both(which: str, step: int, synchronised: bool = True) -> None:
        x, y = batch(step)
        with nullcontext() if synchronised else model.no_sync():
            F.mse_loss(model(x, which=which), y).backward()
        F.mse_loss(plain(x, which=which), y).backward()

    def note(name: str) -> None:
        results[name] = gradients_off(model, plain)
        missing = {n for n, p in model.named_parameters() if p.grad is None}
        assert missing == {n for n, p in plain.named_parameters() if p.grad is None}, missing

    both("ab", 0)
    note("both heads")
    assert model.unused.weight.grad is None and model.frozen.weight.grad is None
    norm = model.clip_grad_norm_(0.1)
    results["norm without the unused"] = off(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    model.zero_grad(), plain.zero_grad()
    both("a", 1)
    note("one head")
    assert model.b.weight.grad is None
    both("b", 2)
    note("then the other")
    model.zero_grad(), plain.zero_grad()
    both("a", 3, synchronised=False)
    both("b", 4)  # synchronises b and the trunk; a waits for the clip
    norm = model.clip_grad_norm_(0.1)
    results["norm of a window with different heads"] = off(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    note("clipped window with different heads")
    model.zero_grad(), plain.zero_grad()
    both("a", 5, synchronised=False)
    both("b", 6)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for optimizer in optimizers:
        optimizer.step()
    results["stepped window with different heads"] = parameters_off(model, plain)
    for m in (model, plain):
        m.zero_grad()
        m.a.requires_grad_(False)
    both("ab", 7)
    note("a head frozen later")
    for m in (model, plain):
        m.zero_grad()
        m.a.requires_grad_(True)
        m.frozen.requires_grad_(True)
    both("ab", 8, synchronised=False)
    both("ab", 9)
    note("a layer thawed later")
    return results


@pytest.mark.slow_where(lambda plan: plan != "tensor_parallel")
@pytest.mark.parametrize("plan", PLANS)
def test_parameters_that_are_left_out(plan: str) -> None:
    for results in run_on_ranks(_left_out, plan, world_size=2):
        wrong = {name: far for name, far in results.items() if not far < 1e-9}
        assert not wrong, wrong


# ---------------------------------------------------------------------------------- what .grad is inside of a window


def _inside(plan: str) -> dict[str, Any]:
    model, plain = compiled_pair(plan=plan)
    for step in range(2):
        x, y = batch(step)
        with model.no_sync():
            model(x, y).backward()
        F.mse_loss(plain(x), y).backward()
    first = model.up.weight.grad
    return {
        "grads": [type(p.grad).__name__ for p in model.parameters()],
        "summands": [str(p.grad.placements) for p in model.parameters()],
        "off": gradients_off(model, plain),
        "again": off(first, plain.up.weight.grad),  # a look changes nothing
        "shapes": all(p.grad.shape == p.shape for p in model.parameters()),
    }


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", ["data_parallel", "fsdp"])
def test_inside_of_a_window_grad_is_the_true_sum(plan: str) -> None:
    for found in run_on_ranks(_inside, plan, world_size=2):
        assert set(found["grads"]) == {"DTensor"} and found["shapes"]
        assert any("Partial" in text for text in found["summands"]), "not reduced yet"
        assert found["off"] < 1e-9 and found["again"] < 1e-9


def _alike(name: str) -> list[Tensor]:
    """Gradients of one backward, and of the same in a window of one that the clip closes."""
    model, _ = compiled_pair(plan="fsdp")
    x, y = batch(0)
    if name == "window":
        with model.no_sync():
            model(x, y).backward()
        model.clip_grad_norm_(1e9)
    else:
        model(x, y).backward()
        model.clip_grad_norm_(1e9)
    assert all(p.grad.placements == p.placements for p in model.parameters())
    return [whole(p.grad) for p in model.parameters()]


def test_a_flushed_window_lies_as_its_parameters() -> None:
    window, plain = (run_on_ranks(_alike, name, world_size=2)[0] for name in ("window", "plain"))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(window, plain, strict=True))


# ------------------------------------------------------------------------- one weight under two layouts, and gathers


class Tied(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.tok(x))))


def tied_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)


def tied_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(0, 16, (8, 6), generator=generator) for _ in range(2))
    y[step % 8, :3] = -100
    return x, y


def _tied(edit: str, at_rest: str) -> dict[str, Any]:
    import autoparallel
    from autoparallel.plan import Plan

    text, modes = _searched_for_tied()
    data = json.loads(text)
    key = next(k for k in data["operators"] if k.startswith({"embedding": "tok/", "head": "head/"}[edit]))
    data["operators"][key] = [modes[key]]
    data["parameters"]["tok.weight"]["at_rest"] = at_rest
    plan = Plan.from_json(json.dumps(data))
    model = make(Tied)
    plain = copy.deepcopy(model)
    compiled: Any = autoparallel.compile(model, mesh_of(2), loss_fn=tied_loss, plan=plan)
    results: dict[str, Any] = {}
    both = SideBySide(compiled, plain, lr=0.2)
    for step in range(3):
        for micro in range(2):
            x, y = tied_batch(2 * step + micro)
            with nullcontext() if micro else compiled.no_sync():
                both.backward(compiled(x, y), tied_loss(plain(x), y))
            results[f"gradient {step}.{micro}"] = gradients_off(compiled, plain)
        both.step()
    results["worst"] = both.worst
    (kind,) = compiled._kinds
    (chain,) = (c for b in kind.runner.program.buckets for c in b.chains if c.name == "tok.weight")
    return {"results": results, "uses": [str(u) for u in chain.uses], "layout": placements(compiled)["tok.weight"]}


@functools.cache
def _searched_for_tied() -> tuple[str, dict[str, str]]:
    """A plan's text, and for the embedding and the head the mode that cuts dim 0 of the weight: the vocabulary."""
    from autoparallel.rules.ways import call_modes

    searched, _ = compiled_pair(Tied, plan="data_parallel", loss_fn=tied_loss, example_inputs=tied_batch(0))
    (kind,) = searched._kinds
    modes: dict[str, str] = {}
    for node in kind.runner.program.captured.graph.nodes:
        for prefix, weight in (("tok/", 0), ("head/", 1)):
            if node.op == "call_function" and str(node.meta.get("key")).startswith(prefix):
                cut = [t for t in call_modes(node) if t.mode.kind == "shard" and str(t.operands[weight]) == "S0"]
                modes[node.meta["key"]] = str(cut[0].mode)
    return searched.plan.to_json(), modes


@pytest.mark.wide_where(lambda edit, at_rest: (edit, at_rest) != ("head", "S0"))
@pytest.mark.parametrize("at_rest", ["S0", "S1", "I"])
@pytest.mark.parametrize("edit", ["embedding", "head"])
def test_a_tied_weight_used_in_two_layouts(edit: str, at_rest: str) -> None:
    for found in run_on_ranks(_tied, edit, at_rest, world_size=2):
        assert len(found["uses"]) == 2, found["uses"]
        assert found["layout"] == {"I": "R"}.get(at_rest, at_rest)
        wrong = {name: far for name, far in found["results"].items() if not far < 1e-9}
        assert not wrong, wrong


def gathered_per_use(build: Callable[[], nn.Module] = Net, *shape: int, layouts: Any = None, **options: Any) -> Any:
    """A compiled model whose parameters are all gathered for each use, and a plain one."""
    from autoparallel.plan import Plan

    searched, _ = compiled_pair(build, *shape, plan="fsdp", example_inputs=options.pop("inputs", batch(0)), **options)
    data = json.loads(searched.plan.to_json())
    for name, parameter in data["parameters"].items():
        parameter["gather"] = "per_use"
        parameter["at_rest"] = (layouts or {}).get(name.partition(".")[0], parameter["at_rest"])
    return compiled_pair(build, *shape, plan=Plan.from_json(json.dumps(data)), **options)


def _per_use() -> dict[str, Any]:
    model, plain = gathered_per_use()
    names = ("windows of three", "backward twice without zero_grad")
    results = _played(model, plain, {name: SCENARIOS[name] for name in names})
    (kind,) = (k for k in model._kinds if k.runner.per_use)
    loss = model(*batch(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return {"results": results, "regathered": kind.runner.regathered, "changed": raised(loss.backward)}


def test_gathered_per_use() -> None:
    for found in run_on_ranks(_per_use, world_size=2):
        assert found["regathered"], "something is gathered again in the backward"
        for name, events in found["results"].items():
            assert all(far < 1e-9 for far in events.values()), (name, events)
        assert "modified in place between the forward and the backward" in found["changed"], found["changed"]


# --------------------------------------------------------------------------------------------- other ways of backward


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return torch.tanh(self.a(h)), torch.tanh(self.b(h))


def _one_output() -> dict[str, Any]:
    """Only the second output is differentiated: the first head, whose gather the backward starts ahead, is not
    reached, and what was gathered ahead must not be there at the next step."""
    x, _ = batch(0)
    layouts = {"trunk": "S0,I", "a": "I,S0", "b": "S0,S0"}  # three buckets, used in this order
    model, plain = gathered_per_use(Heads, 2, 2, layouts=layouts, loss_fn=None, inputs=(x,))
    results: dict[str, Any] = {}
    for step in range(3):
        for m in (model, plain):
            m.zero_grad()
            (m(x)[1] ** 2).sum().backward()
        results[f"gradients {step}"] = gradients_off(model, plain)
        results[f"not reached {step}"] = 0.0 if model.a.weight.grad is None else 1.0
        with torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(1.25)
            results[f"outputs {step}"] = max(off(a, b) for a, b in zip(model(x), plain(x), strict=True))
    kind, _ = model._kinds  # with gradients, and without
    results["buckets"] = [[c.name for c in b.bucket.chains] for b in kind.runner.per_use]
    return results


@pytest.mark.slow
def test_an_output_that_is_not_differentiated() -> None:
    for results in run_on_ranks(_one_output, world_size=4):
        assert len(results.pop("buckets")) == 3
        assert all(far < 1e-9 for far in results.values()), results


def _ways(per_use: bool) -> dict[str, Any]:
    model, plain = gathered_per_use() if per_use else compiled_pair(plan="fsdp")
    x, y = batch(0)
    u, v = batch(1)
    results: dict[str, Any] = {}

    def note(name: str) -> None:
        results[name] = gradients_off(model, plain)
        model.zero_grad(), plain.zero_grad()

    def plain_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(plain(x), y)

    for loss in (model(x, y), plain_loss(x, y)):
        loss.backward(retain_graph=True)
        loss.backward()
    note("the same graph twice")
    (model(x, y) + 2 * model(u, v)).backward(), (plain_loss(x, y) + 2 * plain_loss(u, v)).backward()
    note("two calls, one backward")
    first, second = model(x, y), model(u, v)
    second.backward()
    with model.no_sync():
        first.backward()
    (plain_loss(x, y) + plain_loss(u, v)).backward()
    model.clip_grad_norm_(1e9)
    note("two calls, then backwards in the other order")
    model(x, y).backward(inputs=[model.up.weight, model.down.bias])
    plain_loss(x, y).backward(inputs=[plain.up.weight, plain.down.bias])
    note("chosen parameters")
    model(x, y), model(u, v).backward(), plain_loss(u, v).backward()
    note("a call without a backward")
    gradients = []
    for m, loss_of in ((model, model), (plain, plain_loss)):
        z = x.clone().requires_grad_()
        loss_of(z, y).backward()
        gradients.append(z.grad)
        del m
    results["of the input"] = off(*gradients)
    note("beside an input's")
    (got,) = torch.autograd.grad(model(z, y), [z])
    (expected,) = torch.autograd.grad(plain_loss(z, y), [z])
    results["autograd.grad of an input"] = off(got, expected)
    results["and no other"] = 0.0 if all(p.grad is None for p in model.parameters()) else 1.0
    shards = DTensor.from_local(x.chunk(2)[dist.get_rank()], mesh_of(2), [Shard(0)], run_check=False).requires_grad_()
    model(shards, y).backward(), plain_loss(x, y).backward()
    results["of a DTensor input"] = off(shards.grad, gradients[1])
    note("beside a DTensor's")
    taken = torch.autograd.grad(model(x, y), list(model.parameters()))
    expected = torch.autograd.grad(plain_loss(x, y), list(plain.parameters()))
    results["autograd.grad of parameters"] = max(off(whole(g), e) for g, e in zip(taken, expected, strict=True))
    alike = all(p.grad is None and g.placements == p.placements for p, g in zip(model.parameters(), taken, strict=True))
    results["as the parameters lie"] = 0.0 if alike else 1.0
    for window in model.accumulate(2, [(x, y)] * 2):
        for rows in window:
            loss = model(*rows)
            message = raised(lambda loss=loss: torch.autograd.grad(loss, [model.up.weight], retain_graph=True))
            results["refused in a window"] = 0.0 if "in a window of accumulate()" in message else 1.0
            loss.backward()
        plain_loss(x, y).backward()
        note("a window")
    return results


@pytest.mark.wide_where(lambda per_use: not per_use)
@pytest.mark.parametrize("per_use", [False, True], ids=["per microbatch", "per use"])
def test_other_ways_of_backward(per_use: bool) -> None:
    for results in run_on_ranks(_ways, per_use, world_size=2):
        wrong = {name: far for name, far in results.items() if not far < 1e-9}
        assert not wrong and len(results) > 12, wrong


class Viewed(nn.Module):
    """Adds two parameters: one gradient is the output's own, one is a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.square = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.flat + self.square.view(4)


class _Keeps(TorchDispatchMode):
    """Keeps all that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kept.append(func(*args, **(kwargs or {})))
        return self.kept[-1]


def test_no_gradient_is_memory_that_somebody_else_reads() -> None:
    model = autoparallel.compile(make(Viewed))
    seed, seen = torch.linspace(-1, 1, 4, dtype=torch.float64), list[Tensor]()
    for number in range(1, 3):
        x = seed.clone().requires_grad_()
        inner = model(x)
        inner.register_hook(seen.append)
        model(inner).backward(seed)  # both calls' gradients of a parameter are this one
        for grad in (whole(model.flat.grad), whole(model.square.grad).flatten()):
            assert off(grad, 2 * number * torch.linspace(-1, 1, 4, dtype=torch.float64)) == 0.0
        assert x.grad is not None
        for kept in (seed, x.grad, *seen):
            assert off(kept, torch.linspace(-1, 1, 4, dtype=torch.float64)) == 0.0


def test_the_first_backward_may_run_where_all_that_is_computed_is_kept() -> None:
    with mock.patch.dict(_torch.autograd._OF_ONE, clear=True):
        with _Keeps():
            first = make(Viewed)
            autoparallel.compile(first)(torch.ones(4, dtype=torch.float64)).sum().backward()
        under_a_mode = dict(_torch.autograd._OF_ONE)
        _torch.autograd._OF_ONE.clear()
        autoparallel.compile(make(Viewed))(torch.ones(4, dtype=torch.float64)).sum().backward()
        assert under_a_mode == _torch.autograd._OF_ONE


def test_no_more_than_two_reductions_are_under_way_and_what_is_through_keeps_no_whole_gradient() -> None:
    ended: list[int] = []

    def travel(number: int) -> Travel:
        def start(tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
            def wait() -> list[Tensor]:
                ended.append(number)
                return [tensors[0][:2]]

            return wait

        return Travel([torch.full((8,), float(number))], [start])

    running = BackwardPass()
    for number in range(5):
        running.expect(travel(number), lambda values: None)
        assert number + 1 - len(ended) <= IN_FLIGHT
    assert ended == [0, 1, 2]
    sizes = []
    for number, (reduced, _) in enumerate(running.reductions):
        (value,) = reduced()
        assert value.tolist() == [number, number]
        sizes.append(value.untyped_storage().nbytes())
    assert sizes == [8, 8, 8, 32, 32] and ended == [0, 1, 2, 3, 4]


def test_a_second_collective_starts_behind_the_next_gradients_and_nothing_local_is_waited_for_so_early() -> None:
    happened: list[str] = []

    def step(name: str) -> Callable[[list[Tensor]], Callable[[], list[Tensor]]]:
        def start(tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
            happened.append(f"{name} starts")

            def wait() -> list[Tensor]:
                happened.append(f"{name} ends")
                return tensors

            return wait

        return start

    running = BackwardPass()
    for number in range(3):
        steps = [step(f"{number} scatter"), step(f"{number} reduce"), step(f"{number} slice")]
        running.expect(Travel([torch.zeros(2)], steps, local=1), lambda values: None)
    assert happened == [
        "0 scatter starts", "1 scatter starts",
        "0 scatter ends", "0 reduce starts", "2 scatter starts",
        "1 scatter ends", "1 reduce starts",
        "0 reduce ends", "0 slice starts", "0 slice ends",
    ]  # fmt: skip
    running.abandon()
    assert happened[10:] == ["1 reduce ends", "2 scatter ends"]


def _products_before_each_bucket() -> list[tuple[str, int]]:
    model, _ = compiled_pair(
        lambda: nn.Sequential(*[nn.Linear(768, 768, bias=False) for _ in range(3)]), 2, plan="data_parallel"
    )
    x = torch.linspace(-1, 1, 4 * 768, dtype=torch.float64).view(4, 768)
    loss = model(x, x.flip(0))
    happened: list[tuple[str, int]] = []

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    def receive(store: GradientStore, chains: Any, values: Any, shared: Any) -> None:
        happened.append((chains[0].name, products.count))
        real(store, chains, values, shared)

    real = GradientStore.receive_sums
    with mock.patch.object(GradientStore, "receive_sums", receive), Products() as products:
        loss.backward()
    return happened


def test_a_bucket_is_reduced_as_soon_as_its_gradients_are_there() -> None:
    for happened in run_on_ranks(_products_before_each_bucket, world_size=2):
        names, products = zip(*happened, strict=True)
        assert [name.partition(".")[0] for name in names] == ["2", "1", "0"]
        assert products[0] <= 2 and products[1] <= 4 and products[2] == 5
