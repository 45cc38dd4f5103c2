"""Unusual, but written by many: sorted by hand, weights made of weights, queues, states of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.capture.programs.autograd_tools import truncate
from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish, net
from tests.capture.programs.scripts import whole
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, rows, rows_and_targets, sgd, tokens


class SortedTop(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        values, index = x.sort(dim=-1)
        ctx.save_for_backward(index)
        ctx.mark_non_differentiable(index)
        ctx.shape = x.shape
        return values, index

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Any) -> Tensor:
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, dtype=g.dtype).scatter(-1, index, g) * 1.5


@program(ranks=True)
class SortsItself(Two):
    def forward(self, x: Tensor) -> Tensor:
        v, i = SortedTop.apply(self.a(x))
        return self.b(v) + 0.1 * i.to(x.dtype)


class Swish(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(beta * x)
        return x * s, s

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, beta = inputs
        _, s = output
        ctx.mark_non_differentiable(s)
        ctx.save_for_backward(x, beta, s)

    @staticmethod
    def backward(ctx: Any, g: Tensor, gs: Any) -> Any:
        x, beta, s = ctx.saved_tensors
        gx = gb = None
        if ctx.needs_input_grad[0]:
            gx = g * (s + beta * x * s * (1 - s))
        if ctx.needs_input_grad[1]:
            gb = (g * x * x * s * (1 - s)).sum() * 2
        return gx, gb


@program()
class SwishWithABeta(Two):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        h, s = Swish.apply(self.a(x), self.beta)
        return self.b(h) * s.mean()


@program(ranks=True)
class SwishWithAFrozenBeta(Two):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h, s = Swish.apply(self.a(x), self.beta)
        return self.b(h) + s


@program()
class ReentrantWithoutAGradient(Two):
    """The well-known trap: reentrant, no input requires grad: weights inside get none."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.a, x, use_reentrant=True))


class Skew(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        u = w.triu(1)
        return u - u.transpose(-1, -2)

    def right_inverse(self, w: Tensor) -> Tensor:
        return w.triu(1)


class Cayley(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("eye", torch.eye(n))

    def forward(self, w: Tensor) -> Tensor:
        return torch.linalg.solve(self.eye + w, self.eye - w)


@program(ranks=True)
def cayley() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    parametrize.register_parametrization(model[0], "weight", Skew())
    parametrize.register_parametrization(model[0], "weight", Cayley(8))
    return model


class Tie(nn.Module):
    """Two weights of one unit sum."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * torch.softmax(y, 0)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return w, torch.zeros_like(w)


@program()
def parametrized_by_two() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    parametrize.register_parametrization(model[2], "weight", Tie())
    return model


@program()
class SharedInLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.one = nn.ModuleList([shared, nn.Linear(8, 8)])
        self.two = nn.ModuleDict({"x": shared, "y": nn.LayerNorm(8)})
        self.raw = [self.one[1], shared]

    def forward(self, x: Tensor) -> Tensor:
        for m in self.one:
            x = torch.tanh(m(x))
        for m in self.two.values():
            x = m(x)
        return x + self.raw[0](x) + self.raw[-1](x)


@program(batch=tokens, ranks=True)
class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(8, 8) * 2), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(F.embedding(ids, self.table, max_norm=1.0))


@program()
class EmaBuffers(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            with torch.no_grad():
                self.steps += 1
                decay = torch.clamp(1 - 1 / self.steps, max=0.99)
                self.mean.lerp_(h.mean(0), 1 - decay)
                self.scratch.copy_(h.detach().amax(0))
        return self.b(h - self.mean) * self.scratch


@loop(ranks=True)
def flips_modes(run: Run) -> None:
    torch.manual_seed(4)
    model = run.compile(nn.Sequential(EmaBuffers(), nn.Dropout(0.0), nn.BatchNorm1d(8)))
    optimizer = sgd(model)
    for step in range(4):
        model.train(step % 2 == 0)
        run.step(model, optimizer, step)
        model[2].eval()
        run.note("half", model(*rows(step + 9)), grad=True)
        model.train()


@program()
class ScatterGather(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        idx = x.argsort(dim=1)
        g = h.gather(1, idx)
        z = torch.zeros_like(h).scatter(1, idx.flip(1), g)
        z = z.scatter_add(0, (idx % 4), h)
        r = torch.take_along_dim(z, idx[:, :3], 1)
        return torch.cat([self.b(z), r], 1)


@loop(line=False, refused="change a plain model")
def tied_after_compile(run: Run) -> None:
    model = run.compile(net())
    model[2].weight = model[0].weight
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)


@loop()
def names_and_their_order(run: Run) -> None:
    model = run.compile(SharedInLists())
    run.note("names", [n for n, _ in model.named_parameters()])
    run.note("all names", [n for n, _ in model.named_parameters(remove_duplicate=False)])
    run.note("modules", [n for n, _ in model.named_modules()][:3])
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        run.note("norms", [p.detach().norm() for p in model.parameters()])
    run.note("counts", sum(p.numel() for p in model.parameters()))


class Counted(Two):
    """Says itself what it keeps beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 3

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "limits": torch.tensor([1.0, 2.0])}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Holder(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.part = Counted()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(super().forward(x))


@loop(ranks=True)
def extra_state(run: Run) -> None:
    """Of the model itself and of a part, from the compiled to a plain model and back."""
    plain, twin = Holder(), Holder()
    model = run.compile(plain)
    optimizer = sgd(model)
    for step, seen in enumerate((4, 5, 6)):
        run.step(model, optimizer, step)
        plain.seen, plain.part.seen, twin.seen = seen, 10 * seen, 99
        state = {name: whole(value) for name, value in model.state_dict().items()}
        run.note("state", state)
        run.note("keys", str(twin.load_state_dict(state, strict=True)))
        run.note("seen", [twin.seen, twin.part.seen])
        twin.seen = twin.part.seen = 7 + step
        run.note("keys", str(model.load_state_dict(twin.state_dict(), strict=True)))
        run.note("seen", [plain.seen, plain.part.seen])
        run.changed()


@loop()
def hooks_of_state_dicts(run: Run) -> None:
    """On the model itself and on a part: what is written, what is read, and what is told afterwards."""
    plain, log = net(), []
    for module in (plain, plain[0]):
        module.register_state_dict_pre_hook(lambda module, prefix, keep: log.append(f"saves {prefix}"))
        module.register_state_dict_post_hook(lambda module, d, prefix, _: d.__setitem__(f"{prefix}note", 7))
        module.register_load_state_dict_pre_hook(lambda module, d, prefix, *_: log.append(d.pop(f"{prefix}note", None)))
        module.register_load_state_dict_post_hook(lambda module, keys: log.append(str(keys)))
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        state = model.state_dict()
        run.note("state", [state["note"], state["0.note"]])
        run.note("keys", str(model.load_state_dict(state)))
        run.note("log", log)


@loop()
def truncated_through_calls(run: Run) -> None:
    """Truncated backpropagation of another cell, whose state is detached in no place of its own."""
    truncate(run, nn.GRUCell(8, 8), Tensor.detach)


@program(ranks=True, loss=lambda o: o)
class InfoNceInside(Two):
    """All pairs of the batch; the diagonal masked; a loss across the batch inside of the model."""

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.b(torch.tanh(self.a(x))), dim=-1)
        sim = z @ z.t() / 0.2
        sim = sim.masked_fill(torch.eye(x.shape[0], dtype=torch.bool), -1e9)
        target = (torch.arange(x.shape[0]) + 2) % x.shape[0]
        vic = (z - z.mean(0)).T @ z / (x.shape[0] - 1)
        return F.cross_entropy(sim, target) + vic.fill_diagonal_(0).square().sum() + F.relu(1 - z.std(0)).mean()


@program(ranks=True)
class QueueBuffer(Two):
    """MoCo's queue: a buffer, a pointer, dequeue and enqueue."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(8, 8))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.a(x), dim=1)
        logits = q @ self.queue.clone().detach().t()
        with torch.no_grad():
            k = F.normalize(self.b(x), dim=1)
            index = (self.ptr + torch.arange(x.shape[0])) % 8
            self.queue[index] = k
            self.ptr[0] = (self.ptr[0] + x.shape[0]) % 8
        return logits


@program(ranks=True)
class HyperNetwork(nn.Module):
    """Weights are made by another layer, per row."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.code = nn.Linear(4, 64), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.make(self.code).view(8, 8)
        per_row = self.make(x[:, :4]).view(-1, 8, 8)
        return x @ shared.t() + torch.bmm(per_row, x.unsqueeze(-1)).squeeze(-1)


@loop(line=False, refused=r"functional_call\(plain")
def functional_call_outside(run: Run) -> None:
    model = run.compile(net())
    params = {n: p * 2 for n, p in model.named_parameters()}
    run.note("out", torch.func.functional_call(model, params, rows(0)))


class Branch(Two):
    use = True

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if self.use else self.b(x)


@loop(ranks=True)
def penalty_as_written(run: Run) -> None:
    """Weight decay in the loss, which the model returns: a plain scalar and what is made of ``DTensor``s."""
    model = run.compile(net(), F.mse_loss)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = model(*rows_and_targets(step)) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
        run.note("loss", loss)
        loss.backward()
        finish(run, model, optimizer)


@loop(ranks=True)
def unused_in_some_steps(run: Run) -> None:
    """Branches by a Python flag: a layer unused in some steps has no gradient, and Adam skips it."""
    plain = Branch()
    model = run.compile(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    for step in range(4):
        plain.use = step % 2 == 0
        run.changed()
        run.step(model, optimizer, step)


@program(refused="the rows of all ranks")
class GathersFeatures(Two):
    """A contrastive loss as it is written for DDP."""

    def forward(self, x: Tensor) -> Tensor:
        mine = self.b(self.a(x))
        every = [torch.empty_like(mine)]
        dist.all_gather(every, mine.detach())  # refused
        return mine @ every[0].T


@program(refused="the rows of all ranks")
class SumsFeatures(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) - dist_nn.all_reduce(self.b.weight.mean())  # refused


@program(line=False, refused="another name")
class NamedAsAMethod(nn.Module):
    """As an N-BEATS has a list of its own: what it reads by that name is the method."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.parameters = nn.ParameterList(self.a.parameters())  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


@program()
class ListOfParameters(nn.Module):
    """As meta-learners write it, to go over them more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:  # type: ignore[override]
        return list(super().parameters(recurse))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)
