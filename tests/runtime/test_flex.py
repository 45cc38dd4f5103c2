"""FlexAttention: sharded over rows and heads it scores and masks as in one process, sees what functions read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import autoparallel
from autoparallel.operators.flex import _dense, _from, _kernel, flex_operator
from autoparallel.passes.set_device import set_device
from tests.distributed import run_distributed
from tests.runtime.support import mesh_of, raised

LENGTH = 16


class Attention(nn.Module):
    """Two key heads for four, each with a window of its own, a slope that is trained, and documents in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 64), nn.Linear(32, 8)
        self.slopes = nn.Parameter(torch.tensor([0.1, -0.2, 0.3, 0.05]))
        windows = torch.tensor([16, 3, 7, 2])
        self.mask = create_block_mask(
            lambda row, head, query, key: (query >= key) & (query - key < windows[head]),
            None, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4,
        )  # fmt: skip
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        self.register_buffer("distance", distance)
        self.register_buffer("seen", (distance >= 0) & (distance < windows[:, None, None]))
        self.plain = False

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (8, 8)).transpose(1, 2)
        q, k, v = heads.split([4, 2, 2], 1)
        slopes = self.slopes
        if self.plain:
            seen = self.seen & (documents[:, None, :, None] == documents[:, None, None, :])
            bias = (slopes[:, None, None] * self.distance).expand(len(x), -1, -1, -1).masked_fill(~seen, -torch.inf)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        else:

            def score(s: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                same = documents[row, query] == documents[row, key]
                return torch.where(same, s + slopes[head] * (query - key), -torch.inf)

            out = flex_attention(q, k, v, score_mod=score, block_mask=self.mask, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


def _compare(shape: tuple[int, ...], plans: list[str]) -> list[float]:
    """How far outputs, in training and evaluation, and gradients are from those of ``scaled_dot_product_attention``."""
    torch.manual_seed(0)
    first = Attention().double()
    x, documents = torch.randn(4, LENGTH, 8).double(), torch.randint(0, 3, (4, LENGTH)).sort(-1)[0]
    far: list[float] = []
    for plan in plans:
        model, plain = copy.deepcopy(first), copy.deepcopy(first)
        plain.plain = True
        compiled = autoparallel.compile(model, mesh_of(*shape), plan=plan)
        results = []
        for one in (compiled, plain):
            out = one(x, documents)
            out.square().mean().backward()
            one.eval()
            with torch.no_grad():
                results.append([out, one(x, documents), *(p.grad for p in one.parameters())])
        far += [
            (getattr(a, "full_tensor", lambda a=a: a)() - b).abs().max().item() for a, b in zip(*results, strict=True)
        ]
    return far


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_a_rank_scores_its_rows_and_heads_by_their_places_in_the_whole(shape: tuple[int, ...]) -> None:
    plans = ["tensor_parallel"] if len(shape) == 1 else ["auto", "fsdp", "tensor_parallel"]
    for far in run_distributed(_compare, shape, plans, world_size=2 ** len(shape)):
        assert max(far) < 1e-12


class Layers(nn.Module):
    """Two layers of attention to documents, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, documents: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x, documents)
        return {"loss": x.square().mean()}


def _compare_microbatches(stages: int, microbatches: int) -> list[float]:
    """How far losses, in training and evaluation, and gradients are from those of one process."""
    torch.manual_seed(0)
    model = Layers().double()
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.plain = True  # type: ignore[assignment]
    options: dict[str, Any] = {"microbatches": microbatches}
    if stages > 1:
        options = {"pipeline": autoparallel.Pipeline("1f1b", microbatches, 1)}
    mesh = init_device_mesh("cpu", (stages,), mesh_dim_names=("pp" if stages > 1 else "dp",))
    compiled = autoparallel.compile(model, mesh, plan="fsdp", **options)
    x, documents = torch.randn(4, LENGTH, 8).double(), torch.randint(0, 3, (4, LENGTH)).sort(-1)[0]
    assert not torch.equal(documents[:2], documents[2:])
    results = []
    for one in (compiled, plain):
        loss = one(x, documents)["loss"]
        loss.backward()
        one.eval()
        with torch.no_grad():
            evaluated = one(x, documents)["loss"]
        results.append({"loss": loss, "evaluated": evaluated, **{n: p.grad for n, p in one.named_parameters()}})
    ours, theirs = results
    here = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in ours.items() if x is not None}
    return [(x - theirs[name]).abs().max().item() for name, x in here.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 2), (2, 4)])
def test_functions_are_told_where_rows_of_a_microbatch_stand_and_read_theirs(stages: int, microbatches: int) -> None:
    for far in run_distributed(_compare_microbatches, stages, microbatches, world_size=stages):
        assert len(far) > 2 and max(far) < 1e-12


class Windowed(nn.Module):
    """Scores by a window that is kept in a list or in a global."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.project, self.box = nn.Linear(8, 24), [3]
        box = self.box
        width = (lambda: box[0]) if kind == "cell" else (lambda: WINDOW)
        self.score = lambda s, row, head, query, key: torch.where(query - key < width(), s, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)[:, None].split(8, -1)
        return flex_attention(q, k, v, score_mod=self.score)


WINDOW = 3


def _with_window(window: int, model: Any, x: Tensor) -> Tensor:
    global WINDOW
    WINDOW = model.box[0] = window
    return model(x)


def _outputs_as_a_window_changes(kind: str) -> list[tuple[Tensor, Tensor]]:
    model = Windowed(kind).double().requires_grad_(False)
    x = torch.randn(2, LENGTH, 8).double()
    plain = [_with_window(window, model, x) for window in (3, 7)]
    compiled = autoparallel.compile(model, mesh_of(1), plan="fsdp")
    return [(out, _with_window(window, compiled, x)) for window, out in zip((3, 7), plain, strict=True)]


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["cell", "global"])
def test_what_a_function_reads_belongs_to_the_kind_of_call(kind: str) -> None:
    (pairs,) = run_distributed(_outputs_as_a_window_changes, kind, world_size=1)
    assert all(torch.equal(theirs, ours) for theirs, ours in pairs)
    assert not torch.equal(pairs[0][0], pairs[1][0])


def _operands() -> tuple[Any, ...]:
    place = [torch.tensor(0) for _ in range(4)]
    score = make_fx(lambda s, row, head, query, key: s + head * (query - key) * 0.1)(torch.tensor(0.0), *place)

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) | (row == 1)

    mask = make_fx(seen)(*place)
    q, k, v = torch.randn(2, 4, LENGTH, 8), torch.randn(2, 2, LENGTH, 8), torch.randn(2, 2, LENGTH, 8)
    blocks: BlockMask = create_block_mask(seen, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    return score, mask, q, k, v, blocks.as_tuple()[:-1], 0.4, {"BACKEND": "AUTO", "OUTPUT_LOGSUMEXP": False}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("result", [0, 1])  # CPUs have no largest score
def test_torch_s_kernel_is_given_what_all_scores_are_made_of(result: int) -> None:
    score, mask, *operands = _operands()
    first = [torch.tensor(0), torch.tensor(1)]
    functions = _from(score, first, 1, ()), _from(mask, first, 0, ())
    torch.testing.assert_close(_kernel(*functions, *operands, result), _dense(*functions, *operands, result))


def _number_as_a_tensor() -> str | None:
    model = Windowed("cell")
    model.score = lambda s, *_: s * torch.tensor(0.5)
    return raised(lambda: autoparallel.compile(model, mesh_of(1))(torch.randn(2, LENGTH, 8)))


@pytest.mark.wide
def test_a_function_that_makes_a_tensor_of_a_number_is_told_to_use_the_number() -> None:
    (message,) = run_distributed(_number_as_a_tensor, world_size=1)
    assert message is not None and "write the number itself" in message


def test_a_program_on_another_device_leaves_the_functions_of_all_others_as_they_are() -> None:
    places = [torch.tensor(0) for _ in range(4)]

    def operator() -> Any:
        score = make_fx(lambda s, *_: s + torch.arange(3, device="cpu").sum())(torch.tensor(0.0), *places)
        return flex_operator(score, make_fx(lambda row, head, query, key: query >= key)(*places))

    target, graph = operator(), fx.Graph()
    graph.output(graph.call_function(target))
    module = fx.GraphModule({}, graph)
    set_device(module, torch.device("meta"))
    (moved,) = [node.target for node in graph.nodes if node.op == "call_function"]
    assert "'meta'" in moved.graphs[0].code and "'cpu'" not in moved.graphs[0].code
    assert operator() is target and "'cpu'" in target.graphs[0].code


@pytest.mark.slow
def test_verify_differentiates_the_plain_model_on_a_cpu() -> None:
    inputs = torch.randn(4, LENGTH, 8), torch.zeros(4, LENGTH).long()
    report = autoparallel.verify(Attention(), (2,), inputs)
    assert report.ok and any(d.kind == "gradient" for d in report.differences)
