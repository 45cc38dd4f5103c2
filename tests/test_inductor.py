"""``autoparallel.compile(..., backend=...)``: the same program, its regions compiled, gives the same numbers.

AOTAutograd sees all that Inductor sees, and is fast; so the breadth is tested there, and Inductor itself with
``-m slow``.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel import operators
from autoparallel.comm.collectives import redistribute
from autoparallel.comm.groups import COMMUNICATOR
from autoparallel.passes.mark_layers import mark_layers
from autoparallel.passes.name_nodes import name_nodes
from autoparallel.runtime.gradients.travel import Gather
from autoparallel.runtime.programs.compiled import CompiledRegion, RegionCompiler, forms_of, one_at_a_time
from autoparallel.runtime.programs.regions import find_regions
from tests.distributed import run_distributed
from tests.models import GPTConfig, build, build_gpt
from tests.parity.harness import AXES, difference

PLANS = ("data_parallel", "fsdp", "tensor_parallel")
ROWS = (8, 8, 12, 4)
"""Rows of each step: what is compiled takes batch sizes that it has not seen."""


def _case(name: str) -> Any:
    if name == "gpt":  # one layer, tied, with dropout, and a vocabulary that is worth cutting
        torch.manual_seed(0)
        return build_gpt(torch.float64, GPTConfig(4096, context=4, width=8, heads=2, layers=1, dropout=0.2))
    return build(name, torch.float64)


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _forget_graphs() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


def _train(name: str, shape: tuple[int, ...], plan: str, backend: str) -> tuple[dict[str, Tensor], str, list[int]]:
    case = _case(name)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)])
    model = autoparallel.compile(case.model, mesh, loss_fn=case.loss_fn, plan=plan, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: dict[str, Tensor] = {}
    graphs = []
    for step, rows in enumerate(ROWS):
        args, kwargs = case.make_batch(step, rows)
        graphs.append(_graphs())
        if step == 0:  # accumulates, without communication
            with model.no_sync():
                loss = model(*args, **kwargs)
                loss.backward()
            continue
        loss = model(*args, **kwargs)
        loss.backward()
        seen[f"step {step}: loss"] = loss.detach().clone()
        seen |= {f"step {step}: gradient of {n}": p.grad.full_tensor() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    seen |= {f"parameter {n}": p.full_tensor().detach() for n, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        seen["evaluation"] = model(*case.make_batch(100, 8)[0][:-1])
    texts = [kind.runner.program.text() for kind in model._kinds]
    return seen, "\n".join(texts), graphs[1:]


def _compare(
    name: str, shape: tuple[int, ...], plan: str, compiler: str
) -> tuple[dict[str, float], str, list[int], list[str]]:
    """How far each number is off, the programs, the graphs compiled before each step, and torch's warnings."""
    _forget_graphs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual, text, graphs = _train(name, shape, plan, compiler)
    expected, _, _ = _train(name, shape, plan, "eager")
    assert actual.keys() == expected.keys()
    said = [str(w.message) for w in caught if "autoparallel" in str(w.message)]
    return {key: difference(actual[key], value) for key, value in expected.items()}, text, graphs, said


def _check(name: str, shape: tuple[int, ...], plan: str, compiler: str) -> None:
    world = 1
    for n in shape:
        world *= n
    for off, text, graphs, said in run_distributed(
        _compare, name, shape, plan, compiler, world_size=world, timeout=900
    ):
        wrong = {key: value for key, value in off.items() if not value < 1e-9}
        assert len(off) > 4 and not wrong, wrong
        assert graphs[0] > 0 and len(set(graphs)) == 1, "all is compiled in the first step, whatever the batch size"
        assert not said, said
        if name == "gpt" and plan == "tensor_parallel":
            assert "embedding_sharded" in text and "cross_entropy_sum_sharded" in text
        if name == "gpt":
            assert "dropout" in text


@pytest.mark.slow_where(lambda name, plan: (name, plan) != ("mlp", "fsdp"))
@pytest.mark.parametrize(
    ("name", "plan"),
    list(itertools.product(("mlp", "gpt"), PLANS)),
)
def test_traced_regions_equal_the_eager_body(name: str, plan: str) -> None:
    _check(name, (2,), plan, "aot_eager")


@pytest.mark.slow
def test_traced_regions_equal_the_eager_body_on_two_axes() -> None:
    _check("gpt", (2, 2), "tensor_parallel", "aot_eager")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_inductor_equals_the_eager_body() -> None:
    _check("mlp", (2,), "tensor_parallel", "inductor")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_inductor_equals_the_eager_body_under_every_plan(name: str, plan: str) -> None:
    _check(name, (2,), plan, "inductor")


# ---------------------------------------------------------------------------------------------------------- by layer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.read = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.read(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Alive:
    """Follows the gathered memory that is there at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.gathers = self.most = 0
        take = Gather.__call__

        def counted(gather: Gather) -> list[Tensor]:
            values = take(gather)
            self.gathers += 1
            self.storages.update(x.untyped_storage() for x in values)
            self.most = max(self.most, sum(s.nbytes() for s in self.storages))
            return values

        patch.setattr(Gather, "__call__", counted)


Again = tuple[tuple[str, str], ...]
"""The layers that run again, with how much of each."""


def _deep(
    backend: str, layers: int, shape: tuple[int, ...], preset: str, again: Again, options: dict[str, Any]
) -> tuple[dict[str, Tensor], int, tuple[int, int]]:
    """Numbers of three steps, the graphs compiled, and the gathers with the most gathered bytes alive at once."""
    mesh = init_device_mesh(
        "cpu", shape, mesh_dim_names=AXES[len(shape)] if "pipeline" not in options else ("pp", "dp")
    )

    def compiled(plan: Any, backend: str) -> Any:
        torch.manual_seed(0)
        model = Deep(layers).double()
        return autoparallel.compile(model, mesh, loss_fn=F.cross_entropy, plan=plan, backend=backend, **options)

    def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(step)
        return torch.randn(rows, 8, dtype=torch.float64), torch.randint(0, 12, (rows,))

    plan: Any = preset
    if again:
        planned = compiled(preset, "eager")
        planned.prepare(*batch(0, 8))
        plan = replace(planned.plan, recompute=dict(again))
        options = {name: value for name, value in options.items() if name != "pipeline"}
    _forget_graphs()
    seen: dict[str, Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        alive = _Alive(patch)
        model = compiled(plan, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, rows in enumerate((8, 8, 16)):
            loss = model(*batch(step, rows))
            loss.backward()
            seen[f"loss {step}"] = loss.detach().clone()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    seen[f"gradient {step} of {name}"] = p.grad.full_tensor()
            optimizer.step()
            optimizer.zero_grad()
    assert model.plan.recompute == dict(again)
    return seen, _graphs(), (alive.gathers, alive.most)


def _deep_pair(
    layers: int, shape: tuple[int, ...], preset: str, again: Again, options: dict[str, Any]
) -> tuple[float, int, int, tuple[tuple[int, int], tuple[int, int]]]:
    expected, _, plainly = _deep("eager", layers, shape, preset, again, options)
    actual, graphs, compiled = _deep("aot_eager", layers, shape, preset, again, options)
    assert expected.keys() == actual.keys()
    off = max(difference(actual[key], value) for key, value in expected.items())
    return off, len(expected), graphs, (plainly, compiled)


ZERO_BUBBLE: dict[str, Any] = {"pipeline": autoparallel.Pipeline("zero_bubble", microbatches=4)}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("shape", "preset", "again", "options"),
    [
        pytest.param((2,), "fsdp", (), {}, marks=pytest.mark.slow),
        ((2,), "fsdp", (("blocks.0", "full"), ("blocks.1", "selective"), ("blocks.3", "full")), {}),
        pytest.param((2,), "fsdp", (), {"loss_chunks": 3}, marks=pytest.mark.slow),
        ((2,), "tensor_parallel", (("blocks.1", "selective"),), {}),
        pytest.param((2,), "tensor_parallel", (), {"linear_chunks": 2}, marks=pytest.mark.slow),
        pytest.param((2, 1), "data_parallel", (), ZERO_BUBBLE, marks=pytest.mark.slow),
        ((2, 1), "data_parallel", (("blocks.0", "full"), ("blocks.3", "selective")), ZERO_BUBBLE),
    ],
)
def test_compiled_by_layer_equals_eager(
    shape: tuple[int, ...], preset: str, again: Again, options: dict[str, Any]
) -> None:
    for off, numbers, graphs, (plainly, compiled) in run_distributed(
        _deep_pair, 4, shape, preset, again, options, world_size=2, timeout=500
    ):
        assert off < 1e-9 and numbers > 20 and graphs > 0
        assert plainly[0] == compiled[0], "as many gathers as in eager"
        assert preset != "fsdp" or compiled[1] <= plainly[1], "no more gathered parameters at once than in eager"


@pytest.mark.wide
def test_as_many_graphs_are_compiled_for_twelve_layers_as_for_four() -> None:
    for four, twelve in run_distributed(_graphs_by_depth, world_size=2, timeout=500):
        assert four == twelve == 1, "a layer"


def _graphs_by_depth() -> list[int]:
    return [_deep("aot_eager", layers, (2,), "fsdp", (), {})[1] for layers in (4, 12)]


def _two_layers() -> fx.Graph:
    """Two layers that draw numbers; each one's weight is gathered in it."""
    aten, graph = torch.ops.aten, fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4)

    def call(layer: int, target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta.update(nn_module_stack={"": (f"layers.{layer}", nn.Module)}, val=torch.empty(4, 4))
        return node

    for layer in range(2):
        y = call(layer, aten.tanh.default, x)
        gather = graph.create_node("call_module", f"unshard_{layer}", ())
        weight = call(layer, operator.getitem, gather, 0)
        gather.meta["bucket"] = weight.meta["bucket"] = layer
        x = call(layer, operators.dropout, call(layer, aten.mm.default, y, weight), 0.5, 3 + layer)
    graph.output((x,))
    name_nodes(graph)
    mark_layers(graph, {})
    return graph


def test_gathers_stand_before_the_layers_that_they_are_for() -> None:
    graph = _two_layers()
    regions = find_regions(graph)
    assert [[node.name for node in region] for region in regions] == [
        ["tanh_default", "mm_default", "dropout"],
        ["tanh_default_1", "mm_default_1", "dropout_1"],
    ]
    order = [node.name for node in graph.nodes if node.op == "call_module" or node.name.startswith("mm")]
    assert order == ["unshard_0", "mm_default", "unshard_1", "mm_default_1"]
    graph.lint()


class _Annealed(nn.Module):
    """Layers that are weighed by functions of a count and of a length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.step = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        for layer in self.layers:
            x = x + layer(x).tanh() * math.exp(-0.1 * self.step) * math.cos(self.step) / math.sqrt(x.shape[1])
            x = x * (1 + (0.3 * self.step) % 0.7 + (0.1 * self.step) // 0.25 + (self.step / 5 - 1) ** 2)
            x = x * math.floor(3 * math.exp(0.1 * self.step))
        return x.square().mean()


@pytest.mark.wide
def test_functions_of_numbers_are_called_outside_of_regions() -> None:
    """Which no backend has; more steps than Dynamo compiles a function for."""
    torch.manual_seed(0)
    plain = _Annealed().double()
    model = autoparallel.compile(copy.deepcopy(plain), backend="aot_eager")
    _forget_graphs()
    for step in range(12):
        x = torch.randn(4, 5 + step % 4, 8, dtype=torch.float64)
        plain(x).backward()
        model(x).backward()
        assert torch.allclose(model.layers[0].weight.grad.full_tensor(), plain.layers[0].weight.grad, rtol=1e-9)
    assert 0 < _graphs() <= 4  # two traces: the first length, and all others


class _Cutting(nn.Module):
    """A part of a sequence whose length is a function of the whole one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()[:, : math.ceil(math.sqrt(x.shape[1]))]
        return self.last(h + h.new_ones(h.shape[1], 8)).tanh()


@pytest.mark.slow
def test_sizes_that_are_made_of_functions_are_not_compiled() -> None:
    torch.manual_seed(0)
    plain = _Cutting().double()
    model = autoparallel.compile(copy.deepcopy(plain), backend="inductor")
    for length in (9, 10, 16, 20):
        x = torch.randn(4, length, 8, dtype=torch.float64)
        for m in (plain, model):
            m.zero_grad()
            m(x).square().sum().backward()
        assert torch.allclose(model.first.weight.grad.full_tensor(), plain.first.weight.grad, rtol=1e-9)


def test_layers_that_are_alike_share_what_they_were_compiled_to() -> None:
    module = fx.GraphModule({f"unshard_{i}": nn.Identity() for i in range(2)}, _two_layers())
    compiler = RegionCompiler("aot_eager")
    copy = compiler.rewritten(module)
    first, second = (m for m in copy.modules() if isinstance(m, CompiledRegion))
    assert first.function is second.function and (first.first, second.first) == (3, 4)


# ---------------------------------------------------------------------------------------------- one rank compiles


def _enter(name: str, inside: list[str], leave: threading.Event) -> None:
    with one_at_a_time(name):
        inside.append(name)
        assert leave.wait(20)


def test_others_wait_for_the_first_and_go_on_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inside: list[str] = []
    first, others = threading.Event(), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        entered = [pool.submit(_enter, "layer", inside, first)]
        while not inside:
            time.sleep(0.01)
        entered += [pool.submit(_enter, name, inside, others) for name in ("layer", "layer", "another")]
        time.sleep(0.2)
        assert inside == ["layer", "another"], "what differs does not wait"
        first.set()
        for _ in range(100):
            time.sleep(0.05)
            if len(inside) == 4:
                break
        assert len(inside) == 4, "all that waited are inside at once"
        others.set()
        for future in entered:
            future.result()


def test_who_waits_in_vain_compiles_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("autoparallel.runtime.programs.compiled._PATIENCE", 0.1)
    with one_at_a_time("layer"), one_at_a_time("layer"):
        pass


def test_devices_of_other_numbers_are_compiled_for_apart() -> None:
    with FakeTensorMode():
        first, second = (torch.empty(4, 8, device=f"cuda:{number}") for number in range(2))
    assert str(forms_of([first, 3])) != str(forms_of([second, 3]))


class _Copies:
    """Ranks of which each has the same; this is the last."""

    def __init__(self, count: int) -> None:
        self.count = count

    def size(self, axis: str) -> int:
        return self.count

    def index(self, axis: str) -> int:
        return self.count - 1

    def all_reduce(self, x: Tensor, axis: str) -> Callable[[], Tensor]:
        return lambda: x.mul_(self.count)

    def all_gather(self, x: Tensor, axis: str) -> Callable[[], Tensor]:
        return lambda: torch.stack([x] * self.count)


@pytest.mark.parametrize(("src", "dst", "factor"), [("I", "R", 22.0), ("R", "I", 2.0)])
def test_what_shares_memory_with_its_redistribution_keeps_its_gradient_apart(src: str, dst: str, factor: float) -> None:
    """AOTAutograd makes results that share memory from each other, in eager."""
    graph = fx.Graph()
    copied = graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 1.0))
    moved = graph.call_function(redistribute, (copied, src, dst, "mesh0/dp"))
    graph.output((moved, graph.call_function(torch.ops.aten.view.default, (moved, [6])), copied))
    x = torch.ones(2, 3, requires_grad=True)
    with COMMUNICATOR.using(_Copies(2)):  # type: ignore[arg-type]
        results = RegionCompiler("aot_eager")._compile(fx.GraphModule(nn.Module(), graph))(x)
        torch.autograd.backward(results, [torch.full_like(y, g) for y, g in zip(results, (4, 6, 2), strict=True)])
    assert x.grad is not None and x.grad.eq(factor).all(), x.grad


@pytest.mark.slow
def test_what_is_compiled_for_some_ranks_is_not_loaded_for_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for count in (2, 4):
        graph = fx.Graph()
        gathered = graph.call_function(redistribute, (graph.placeholder("x"), "S0", "R", "mesh0/dp"))
        graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (gathered, 2.0)),))
        _forget_graphs()
        with COMMUNICATOR.using(_Copies(count)):  # type: ignore[arg-type]
            (doubled,) = RegionCompiler("inductor")._compile(fx.GraphModule(nn.Module(), graph))(torch.ones(3, 8))
        assert torch.equal(doubled, torch.full((count * 3, 8), 2.0))


def _found_in_caches(folder: str) -> tuple[int, int, float]:
    from torch._dynamo.utils import counters

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        compiled, _, _ = _deep("inductor", 2, (2,), "tensor_parallel", (), {})
        caches = counters["aot_autograd"]
        found = caches["autograd_cache_hit"], caches["autograd_cache_miss"]
    expected, _, _ = _deep("eager", 2, (2,), "tensor_parallel", (), {})
    return *found, max(difference(compiled[key], value) for key, value in expected.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_rank_compiles_and_the_other_loads(tmp_path: Path) -> None:
    seen = run_distributed(_found_in_caches, str(tmp_path), world_size=2, timeout=800)
    assert sorted((hits, misses) for hits, misses, _ in seen) == [(0, 1), (1, 0)]
    assert all(off < 1e-9 for _, _, off in seen)
