"""Layers and models as they are written today: adapters, packed sequences, averages inside, odd arguments."""

from __future__ import annotations

import dataclasses
import typing
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Keywords, Run, numbers, rows, sgd, tokens


class Lora(nn.Module):
    """A frozen weight with two factors beside it, which may be merged into it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(rank, 8)), nn.Parameter(torch.randn(8, rank) * 0.1)
        self.merged, self.scaling, self.active = False, 0.5, "default"

    def merge(self, on: bool) -> None:
        if on != self.merged:
            with torch.no_grad():
                self.base.weight += (1 if on else -1) * self.scaling * self.up @ self.down
            self.merged = on

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if self.merged or self.active != "default":
            return out
        return out + F.linear(F.linear(x, self.down), self.up) * self.scaling


@program(ranks=True)
def lora() -> nn.Module:
    return nn.Sequential(Lora(nn.Linear(8, 8)), nn.Tanh(), Lora(nn.Linear(8, 8)))


@loop()
def lora_merged_for_evaluation(run: Run) -> None:
    """Parameters' values are changed between calls, by the modules' own methods."""
    model = run.compile(nn.Sequential(Lora(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)))
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        model[0].merge(True)
        with torch.no_grad():
            run.note("merged", model(*rows(step + 30)))
        model[0].merge(False)


@program(between=lambda model, step: setattr(model.get_submodule("0"), "active", ("default", "none", "default")[step]))
def lora_switched() -> nn.Module:
    return nn.Sequential(Lora(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 2) * 0.1), nn.Parameter(torch.randn(2, 8))

    def forward(self, w: Tensor) -> Tensor:
        return w + self.a @ self.b


@program(ranks=True)
def lora_as_parametrization() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    parametrize.register_parametrization(model[0], "weight", LowRank())
    model[0].parametrizations.weight.original.requires_grad_(False)
    return model


class Positive(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return F.softplus(w)


@program()
def two_parametrizations() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    parametrize.register_parametrization(model[0], "weight", LowRank())
    parametrize.register_parametrization(model[0], "weight", Positive())
    return model


@loop(line=False, refused="whole")
def parametrization_removed_midway(run: Run) -> None:
    model = run.compile(two_parametrizations())
    for step in range(STEPS):
        if step == 2:
            parametrize.remove_parametrizations(model[0], "weight")
            run.changed()
        optimizer = sgd(model, momentum=0.0)
        run.step(model, optimizer, step)


@program(ranks=True)
class AverageInside(nn.Module):
    """BYOL: a target network that follows in forward, under no_grad, in its parameters' data."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("target", self.online.weight.detach().clone())

    @torch.no_grad()
    def follow(self) -> None:
        self.target.mul_(0.9).add_(self.online.weight, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.follow()
        with torch.no_grad():
            goal = F.linear(x, self.target)
        return F.mse_loss(self.head(self.online(x)), goal)


@program(ranks=True)
class AverageOfParametersInside(nn.Module):
    """The same with frozen parameters instead of buffers, as most repositories do."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
        return self.online(x) - self.target(x)


@program(ranks=True)
class AverageByData(nn.Module):
    """And by .data, as MoCo did."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
            q.data = q.data * 0.9 + p.data * 0.1
        return self.online(x) - self.target(x)


def packed(step: int) -> tuple[Any, ...]:
    documents = torch.tensor([0, 0, 0, 1, 1, 2]).roll(step)
    return numbers(4, 6, 8, seed=step), documents.expand(4, 6).contiguous()


@program(batch=packed, ranks=True)
class PackedDocuments(nn.Module):
    """Several documents in a row: attention stays inside of one, positions start anew."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.position = nn.Embedding(6, 8)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        index = torch.arange(x.shape[1]).expand_as(documents)
        first = torch.where(starts, index, 0).cummax(dim=1).values
        x = x + self.position(index - first)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        same = documents[:, None, :, None] == documents[:, None, None, :]
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=same & causal)
        return self.out(h.transpose(1, 2).flatten(-2))


@dataclasses.dataclass
class Batch:
    x: Tensor
    mask: Tensor | None = None
    name: str = "train"
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def batches(step: int) -> tuple[Any, ...]:
    mask = torch.arange(8).remainder(2 + step) > 0
    return (Batch(rows(step)[0], mask if step else None, ("train", "val", "train")[step], {"gain": 1.0 + step}),)


@program(batch=batches)
class DataclassInput(Two):
    def forward(self, batch: Batch) -> Tensor:
        h = self.a(batch.x) * batch.extra["gain"]
        if batch.mask is not None:
            h = h * batch.mask
        return self.b(h) if batch.name == "train" else h


class Pair(typing.NamedTuple):
    one: Tensor
    other: list[Tensor]


@program(batch=lambda step: (Pair(rows(step)[0], [*rows(step + 3), *rows(step + 4)]),), ranks=True)
class NamedTupleInput(Two):
    def forward(self, pair: Pair) -> dict[str, Any]:
        out = self.a(pair.one) + sum(self.b(x) for x in pair.other)
        return {"out": out, "parts": Pair(out * 2, [out, pair.one]), "name": "pair", "none": None, "n": out.shape[-1]}


@program(
    batch=lambda step: (
        OrderedDict(x=rows(step)[0], y=(rows(step + 2)[0], None, "text", 3, True)),
        Keywords(mode=None if step else "sum", weights=(1.0, 2.0 + step), flags={"skip": step == 2}),
    )
)
class NestedArguments(Two):
    def forward(self, data: dict[str, Any], mode: str | None = None, *, weights: Any, flags: Any) -> Tensor:
        h = self.a(data["x"]) * weights[0] + self.b(data["y"][0]) * weights[1]
        if flags["skip"]:
            return h
        return h.sum(-1) if mode == "sum" else torch.tanh(h) * data["y"][3]


class Blocks(Two):
    def parts(self, x: Tensor) -> Iterator[Tensor]:
        for layer in (self.a, self.b):
            x = torch.tanh(layer(x))
            yield x


@program(ranks=True)
class GeneratorOfParts(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.parts(x))).mean(0)


@program(refused="return tensors", loss=lambda out: sum(out).mean(), line=False)  # type: ignore[arg-type,return-value]
class GeneratorReturned(Blocks):
    """A generator as the output: nobody has run it yet."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        return self.parts(x)


@program(refused=".")
class LoopUntilItConverges(Two):
    """A fixed point by .item()."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(10):
            new = torch.tanh(self.b(h))
            if (new - h).abs().max().item() < 0.1:  # refused
                break
            h = new
        return h


@program(batch=tokens)
class LoopOverLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        lengths = (ids > 2).sum(-1)
        return torch.stack([self.out(h[i, : int(n)].sum(0)) for i, n in enumerate(lengths)])


@program(batch=tokens)
class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids))


@program(batch=tokens, ranks=True)
class SparseEmbeddingBag(nn.Module):
    """As recommenders write it: bags that begin where offsets say."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(8, 8, mode="sum", sparse=True), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.bag(ids.flatten(), torch.tensor([0, 3, 5])))


@program(batch=tokens, ranks=True)
class EmbeddingBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(8, 8, mode="mean", padding_idx=0), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.bag(ids))


@program(batch=tokens)
class HashedEmbedding(nn.Module):
    """Indices computed from indices, padding that is not trained, a table that is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 8, padding_idx=0, scale_grad_by_freq=True), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out((self.table((ids * 7 + 3) % 5) + self.table((ids * 11 + 1) % 5)) * 8**0.5)


def scripted(model: nn.Module) -> nn.Module:
    return torch.jit.script(model)


@program(refused="torch.jit.script", line=False)
def part_in_torchscript() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), scripted(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 8))


@torch.jit.script
def fused_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@program(ranks=True)
class FunctionInTorchscript(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(fused_gelu(self.a(x)))


def twice_in_torchscript(x: Tensor) -> Tensor:
    return x * 2 if torch.jit.is_scripting() else x


@torch.jit.script
def asks_where_it_runs(x: Tensor) -> Tensor:
    return twice_in_torchscript(x) + 1


@program()
class FunctionThatKnowsOfTorchscript(Two):
    """The function is told that it runs in TorchScript, its caller is not."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(asks_where_it_runs(self.a(x)) + twice_in_torchscript(x))


@program()
class CompiledFunctionInside(Two):
    """torch.compile as a decorator of a function that the model calls."""

    @torch.compile(backend="eager")
    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


@program()
def compiled_part() -> nn.Module:
    part: Any = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="eager")
    return nn.Sequential(nn.Linear(8, 8), part, nn.Linear(8, 8))


@program()
def part_compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))
    model[1].compile(backend="eager")
    return model


@program()
def lazy_layers() -> nn.Module:
    """Parameters that get their shapes in the first call, made before compile() by a dry run."""
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(4))
    model(torch.randn(2, 8))
    return model


@program(refused="call the plain model once", line=False)
def lazy_layers_without_a_dry_run() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(4))


class Teacher(nn.Linear):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@program(ranks=True)
class DecoratedPart(nn.Module):
    """``@torch.no_grad()`` on a submodule's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), Teacher(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.student(x))
        return F.mse_loss(h, self.teacher(h)) + self.student(self.teacher(x)).square().mean()


@program(ranks=True)
class AutocastOfAPart(Two):
    """A norm that leaves autocast, in a region of it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
            with torch.autocast("cpu", enabled=False):
                h = F.layer_norm(h.double(), (8,))
        return self.b(h)


@program()
class DtypeContext(Two):
    """The default dtype is another while tables are made."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            table = torch.tensor([0.1 * i for i in range(8)])
        finally:
            torch.set_default_dtype(before)
        return self.b(self.a(x) * table)


@program()
class DeviceContext(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            mask = torch.ones(8, 8).tril()
        return self.b(self.a(x) @ mask.to(x.device))


@program()
class MemoryOfTheLastCall(Two):
    """The hidden state of the last batch, detached, is the next one's: kept in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.state is not None:
            h = h + self.state
        self.state = h.detach()
        return self.b(h)


@program(ranks=True)
class MixtureOfExperts(nn.Module):
    """Dense routing with a balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) * 0.2), nn.Parameter(torch.randn(4, 16, 8) * 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        values, chosen = scores.topk(2, -1)
        gates = torch.zeros_like(scores).scatter(-1, chosen, values / values.sum(-1, keepdim=True))
        h = torch.einsum("bd,edf->bef", x, self.up).relu()
        out = torch.einsum("bef,efd,be->bd", h, self.down, gates)
        load = F.one_hot(chosen, 4).to(x.dtype).sum(1).mean(0)
        return out, 4 * (load * scores.mean(0)).sum()


@program(batch=tokens, ranks=True)
class StateSpace(nn.Module):
    """A scan over time, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.decay, self.out = nn.Embedding(8, 8), nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x, state, outs = self.table(ids), 0.0, []
        for t in range(x.shape[1]):
            state = state * torch.sigmoid(self.decay) + x[:, t]
            outs.append(state)
        return self.out(torch.stack(outs, 1))
