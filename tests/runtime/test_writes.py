"""What a script writes to parts of parameters, gradients and optimizers' states is what it writes on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoparallel
from tests.devices import DEVICE
from tests.runtime.support import (
    batch,
    gradients_off,
    make,
    mesh_of,
    off,
    parameters_of,
    parameters_off,
    raised,
    run_on_ranks,
)

ROWS, WIDTH = 7, 6

WRITES: dict[str, Callable[[Tensor], object]] = {
    "a row": lambda p: p[0].zero_(),
    "a row by a number": lambda p: p.__setitem__(-1, 2.0),
    "a row from another": lambda p: p[0].copy_(p[3]),
    "rows": lambda p: p[2:5].mul_(0.5),
    "part of a part": lambda p: p[1:6][2][:3].fill_(4.0),
    "a column": lambda p: p.__setitem__((slice(None), 1), 3.0),
    "an element": lambda p: p.__setitem__((5, 2), 9.0),
    "a transposed row": lambda p: p.t()[:, 6].neg_(),
    "flat": lambda p: p.view(-1)[4:30].add_(1.0),
    "a diagonal": lambda p: p[:WIDTH].diagonal().fill_(1.0),
    "chunks": lambda p: p.chunk(3)[1].zero_(),
    "splits": lambda p: p.split([2, 5])[1].sqrt_().nan_to_num_(),
    "rows one by one": lambda p: [row.div_(i + 1) for i, row in enumerate(p)],
    "where a mask says": lambda p: p.__setitem__(p > 0, 0.0),
    "where positions say": lambda p: p.__setitem__(torch.tensor([0, 5]), 0.0),
    "at indices": lambda p: p.index_fill_(0, torch.tensor([1, 6]), 0.5),
    "limited norms": lambda p: p.renorm_(2, 0, 0.1),
    "plain rows": lambda p: p.__setitem__(slice(1, 3), torch.ones(2, WIDTH, dtype=p.dtype)),
    "a plain whole": lambda p: p.copy_(torch.ones(ROWS, WIDTH, dtype=p.dtype)),
    "drawn rows": lambda p: p[2:4].normal_(generator=torch.Generator().manual_seed(3)),
}


def _apart(shape: tuple[int, ...], plan: str) -> dict[str, float]:
    """How far parameters are apart after each kind of write to a parameter, its data, its gradient and its momentum."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, ROWS), nn.Tanh(), nn.Linear(ROWS, WIDTH)).double()
    model = autoparallel.compile(copy.deepcopy(plain), mesh_of(*shape), plan=plan)
    x, distances = torch.randn(8, WIDTH, dtype=torch.float64), {}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]

    def step() -> None:
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()

    step()
    targets = {
        "parameter": lambda p, _: p,
        "data": lambda p, _: p.data,
        "gradient": lambda p, _: p.grad,
        "momentum": lambda p, optimizer: optimizer.state[p]["momentum_buffer"],
    }
    for kind, target in targets.items():
        for name, write in WRITES.items():
            both = []
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                value = target(m.get_parameter("0.weight"), optimizer)
                with torch.no_grad():
                    write(value)
                both.append((value.full_tensor() if isinstance(value, DTensor) else value).detach())
            distances[f"{kind}: {name}"] = float((both[0] - both[1]).abs().max())
            step()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    distances["in the end"] = max(float((p - q.full_tensor()).detach().abs().max()) for p, q in pairs)
    weight = model.get_parameter("0.weight")
    distances["is sharded"] = weight.to_local().numel() / weight.numel()
    return distances


@pytest.mark.wide_where(lambda shape, plan: (shape, plan) != ((2,), "fsdp"))
@pytest.mark.parametrize(
    ("shape", "plan"),
    [((2,), "fsdp"), ((2,), "tensor_parallel"), ((2, 2), "fsdp")],
    ids=["fsdp", "tensor parallel", "fsdp over two axes"],
)
def test_a_part_is_written_as_on_one_process(shape: tuple[int, ...], plan: str) -> None:
    for rank in run_on_ranks(_apart, shape, plan, world_size=4 if len(shape) == 2 else 2):
        assert rank.pop("is sharded") < 1
        assert {name: apart for name, apart in rank.items() if not apart <= 1e-9} == {}


def _differing() -> dict[str, Any]:
    model = autoparallel.compile(nn.Linear(WIDTH, ROWS), mesh_of(2), plan="fsdp")
    model(torch.ones(4, WIDTH)).sum().backward()
    before = model.weight.full_tensor()
    with torch.no_grad():
        words = raised(lambda: model.weight.__setitem__(slice(0, 2), torch.full((2, WIDTH), float(dist.get_rank()))))
        model.weight[0] = 5.0
        to_plain = raised(lambda: torch.zeros(ROWS, WIDTH).copy_(model.weight))
    after = model.weight.full_tensor()
    return {
        "words": words,
        "to plain": to_plain,
        "kept": bool((after[1:] == before[1:]).all()),
        "written": bool((after[0] == 5).all()),
    }


def test_ranks_that_write_different_tensors_are_told_so_and_nothing_is_written() -> None:
    for rank in run_on_ranks(_differing, world_size=2):
        assert "the ranks call the model differently" in rank["words"] and "plain tensors are written" in rank["words"]
        assert "p.full_tensor()" in rank["to plain"]
        assert rank["kept"] and rank["written"]


def _given_other_memory() -> dict[str, str]:
    """What ``.data`` may not become."""
    model = autoparallel.compile(nn.Linear(WIDTH, ROWS), mesh_of(2), plan="fsdp")
    with torch.device("meta"):
        plain = nn.Linear(WIDTH, ROWS)
    empty = autoparallel.compile(plain, mesh_of(2), plan="fsdp")
    other = copy.deepcopy(model)
    model(torch.ones(4, WIDTH)).sum().backward()
    weight, rank = model.weight, float(dist.get_rank())
    before = weight.full_tensor()
    words = {
        "shape": raised(lambda: setattr(weight, "data", weight.data[0])),
        "dtype": raised(lambda: setattr(weight.grad, "data", weight.grad.data.half())),
        "differs": raised(lambda: setattr(weight, "data", torch.full((ROWS, WIDTH), rank))),
        "meta": raised(lambda: setattr(empty.weight, "data", torch.ones(ROWS, WIDTH))),
        "another": raised(lambda: setattr(weight, "data", other.weight.data)),
        "kept": "" if torch.equal(weight.full_tensor(), before) else "it has changed",
    }
    views = weight[0], weight[:, 0]  # one of them of a gathered copy, the other of what this rank has
    weight.data = weight.data * 2
    read = [raised(lambda view=view: view.full_tensor()) for view in views]  # type: ignore[misc]
    then = (before[0], before[:, 0])[read.index("")]
    return words | {
        "view": "".join(read),
        "itself": raised(lambda: setattr(weight, "data", weight.data)),
        "other view": "" if torch.equal(views[read.index("")].full_tensor(), then) else "it has changed",
    }


def test_data_is_only_given_what_it_can_be() -> None:
    expected = {
        "shape": "ValueError: .data of a tensor of shape [7, 6]",
        "dtype": "torch.float16\nWhat to change: assign one of the same",
        "differs": "the ranks call the model differently",
        "meta": "call model.prepare(*inputs), and assign then",
        "another": "What to change: assign a copy",
        "view": "What to change: take it again",
    }
    for rank in run_on_ranks(_given_other_memory, world_size=2):
        assert rank.pop("kept") == rank.pop("itself") == rank.pop("other view") == ""
        assert [name for name, words in rank.items() if expected[name] not in words] == [], rank


def _in_stages(shape: tuple[int, ...]) -> dict[str, float]:
    """What a pipeline's ranks write and read where they have a gradient, which those of other stages have not."""
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("pp", "dp")[: len(shape)])
    plain = make()
    options: dict[str, Any] = {"plan": "fsdp" if len(shape) == 2 else "auto", "loss_fn": F.mse_loss}
    model = autoparallel.compile(copy.deepcopy(plain), mesh, pipeline=autoparallel.Pipeline("1f1b", 2), **options)
    model(*batch()).backward()
    F.mse_loss(plain(batch()[0]), batch()[1]).backward()
    worst = 0.0
    for p, q in parameters_of(model, plain):
        with torch.no_grad():
            for x, y in ((p, q), (p.grad, q.grad)):
                assert x is not None and y is not None
                worst = max(worst, off(x.norm(), y.norm()), off(x[[1, 0]], y[[1, 0]]))
                for part in (x, y):
                    part[[2, 0]] = 0.5
    with torch.no_grad():
        for m in (model, plain):
            weight = m.get_parameter("up.weight")  # on every rank, with and without a part of it
            weight[weight[[1, 0]].shape[0]] = 0.25
            weight[[3, 1]] = 0.75
    return {
        "numbers and rows": worst,
        "gradients": gradients_off(model, plain),
        "weights": parameters_off(model, plain),
    }


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.wide)], ids=["pp", "pp and dp"])
def test_ranks_of_one_stage_alone_write_to_its_gradients(shape: tuple[int, ...]) -> None:
    for rank in run_on_ranks(_in_stages, shape, world_size=2 * len(shape), timeout=60):
        assert max(rank.values()) < 1e-9, rank
