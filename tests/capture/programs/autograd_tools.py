"""What people use of autograd in a forward: Functions of all kinds, torch.func, checkpoints, custom operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_debug_enabled,
)

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, rows, sgd


class Scale(torch.autograd.Function):
    """A number, a string, a flag and a tensor; asks which gradients are wanted."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, factor: float, mode: str = "plain", flip: bool = False
    ) -> Tensor:
        ctx.factor, ctx.flip, ctx.has_w = factor, flip, w is not None
        ctx.save_for_backward(*([x, w] if w is not None else [x]))
        out = x * factor if mode == "plain" else x * factor * 2
        return out * w if w is not None else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *rest = ctx.saved_tensors
        sign = -1.0 if ctx.flip else 1.0
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grad * ctx.factor * sign * (rest[0] if rest else 1.0)
        if ctx.has_w and ctx.needs_input_grad[1]:
            dw = (grad * x * ctx.factor).sum(0)
        return dx, dw, None, None, None


@program(ranks=True)
class FunctionOfManyKinds(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = Scale.apply(self.a(x), self.b.bias, 0.5, "plain", True)
        h = Scale.apply(h, None, 2.0)
        return self.b(Scale.apply(h, self.a.bias.detach(), 1.5, "double"))


class Outer(torch.autograd.Function):
    """Calls another Function in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return Scale.apply(x @ w.t(), None, 3.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        g = Scale.apply(grad, None, 0.5)
        return g @ w, g.t() @ x


@program(ranks=True)
class FunctionInFunction(Two):
    def forward(self, x: Tensor) -> Tensor:
        return Outer.apply(torch.tanh(self.a(x)), self.b.weight)


class Rematerialized(torch.autograd.Function):
    """Differentiates in its backward what it computed without a graph: a checkpoint by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        with torch.no_grad():
            return F.gelu(x @ w.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = F.gelu(x @ w.t())
        return torch.autograd.grad(out, (x, w), grad)


@program(ranks=True)
class CheckpointByHand(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Rematerialized.apply(self.a(x), self.b.weight))


class NewStyle(torch.autograd.Function):
    """setup_context beside forward, and a backward that is not differentiable."""

    @staticmethod
    def forward(x: Tensor, power: int) -> tuple[Tensor, Tensor]:
        return x**power, (x > 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.power = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * ctx.power * x ** (ctx.power - 1) * 0.9, None


@program()
class FunctionWithSetupContext(Two):
    def forward(self, x: Tensor) -> Tensor:
        value, mask = NewStyle.apply(self.a(x), 3)
        return self.b(torch.where(mask, value, 0.1 * value))


class Unmaterialized(torch.autograd.Function):
    """Is told of outputs that nobody differentiates by None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, other: Tensor | None) -> Any:
        total = 0.0 if one is None else one * 2
        return total + (torch.ones_like(one) * 0.01 if other is None and one is not None else other * 3)  # type: ignore[operator]


@program(ranks=True)
class FunctionToldOfNone(Two):
    def forward(self, x: Tensor) -> Tensor:
        one, _ = Unmaterialized.apply(self.a(x))
        return self.b(one)


class Doubled(torch.autograd.Function):
    """Keeps what no tensor is on its context, and a tensor as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.kept, ctx.shape = x.detach().sign(), x.shape
        return x.reshape(shape).mul(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.reshape(ctx.shape) * ctx.kept, None


@program()
class FunctionWithShapes(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Doubled.apply(self.a(x), (x.shape[0], 2, 4)).flatten(1))


def scaled_gradient(x: Tensor, scale: float) -> Tensor:
    return x * scale + (x - x * scale).detach()


@program(ranks=True)
class ScaledGradient(Two):
    """Without any Function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(scaled_gradient(self.a(x), 0.1))


# ---------------------------------------------------------------------------------------------------- checkpointing


@program(ranks=True)
class CheckpointWithKeywords(Two):
    """Keyword arguments, several outputs, one of them without a gradient."""

    def body(self, x: Tensor, *, gain: float, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.a(x)) * gain
        return h if skip is None else h + skip, (h > 0).sum()

    def forward(self, x: Tensor) -> Tensor:
        h, count = checkpoint(self.body, x, gain=2.0, use_reentrant=False)
        h, _ = checkpoint(self.body, h, gain=0.5, skip=x, use_reentrant=False, preserve_rng_state=False)
        return self.b(h) / (1 + count)


@program()
class CheckpointInCheckpoint(Two):
    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))

    def outer(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.inner, x, use_reentrant=False))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.outer, x, use_reentrant=False)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@program()
class SelectiveCheckpoint(Two):
    def body(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(self.body, x, use_reentrant=False, context_fn=contexts)


@program()
class CheckpointUnderDebug(Two):
    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_debug_enabled(False):
            return self.b(checkpoint(lambda h: torch.tanh(self.a(h)), x, use_reentrant=False))


@program(ranks=True)
class CheckpointOnlyInTraining(nn.Module):
    """As transformers' gradient_checkpointing: a flag, an attribute that holds the function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.checkpointing = functools.partial(checkpoint, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(self.checkpointing(layer.__call__, x) if self.training else layer(x))
        return x


@program(refused="around the call")
class SavedTensorHooksThatChange(Two):
    """Saved activations come back as others: the backward is another."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 0.5):  # refused
            h = torch.tanh(self.a(x)).square()
        return self.b(h)


@program()
class SavedOnCpu(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            h = torch.tanh(self.a(x)).square()
        return self.b(h)


# ------------------------------------------------------------------------------------------------------- torch.func


@program(ranks=True)
class Vmapped(Two):
    def forward(self, x: Tensor) -> Tensor:
        outer = torch.func.vmap(lambda u, v: torch.outer(u, v).sum(0))
        return outer(self.a(x), self.b(x))


@program()
class VmapOfFunctionalCall(nn.Module):
    """An ensemble: one call of stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.base = [nn.Linear(8, 8, device="meta")]
        self.weight, self.bias = nn.Parameter(torch.randn(3, 8, 8)), nn.Parameter(torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        def one(weight: Tensor, bias: Tensor) -> Tensor:
            return torch.func.functional_call(self.base[0], {"weight": weight, "bias": bias}, (x,))

        return torch.func.vmap(one)(self.weight, self.bias).mean(0)


@program()
class HessianVectorProduct(Two):
    def forward(self, x: Tensor) -> Tensor:
        def energy(h: Tensor) -> Tensor:
            return torch.tanh(self.a(h)).square().sum()

        _, out = torch.autograd.functional.vjp(energy, x)
        return self.b(out)


@program()
class GradientPenaltyInside(Two):
    """The norm of an input's gradient as an output."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.a(x).square().sum(), x, create_graph=True)
        return self.b(x) + grad.norm(dim=-1, keepdim=True)


@program()
class ScoreWithEnableGrad(Two):
    """An energy-based model that is written out."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = torch.tanh(self.a(x))
            score = -((1 - h.square()) * h) @ self.a.weight
        return self.b(score)


# ------------------------------------------------------------------------------------------------ custom operators


@torch.library.custom_op("autoparallel_test_programs::warp", mutates_args=())
def warp(x: Tensor, gain: float) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * gain)


@warp.register_fake
def _(x: Tensor, gain: float) -> Tensor:
    return torch.empty_like(x)


def _warp_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.gain = inputs[1]


warp.register_autograd(lambda ctx, grad: (grad * ctx.gain * 0.5, None), setup_context=_warp_context)


@program(ranks=True)
class CustomOperator(Two):
    """Its own backward, and numpy inside."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(warp(torch.tanh(self.a(x)), 3.0))


@torch.library.custom_op("autoparallel_test_programs::blind", mutates_args=())
def blind(x: Tensor) -> Tensor:
    return x * 2


@blind.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@program()
class CustomOperatorWithoutBackward(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(blind(torch.tanh(self.a(x)).detach())) + self.a(x)


@torch.library.custom_op("autoparallel_test_programs::accumulate", mutates_args=("total",))
def accumulate(total: Tensor, x: Tensor) -> None:
    total.add_(x.sum(0))


@program(refused="copy_")
class CustomOperatorThatWrites(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        accumulate(self.total, h.detach())  # refused
        return self.b(h) + self.total


# ------------------------------------------------------------------------------------------------------ global hooks


def _global_hooks(run: Run, register: Any, hook: Any) -> None:
    handle = register(hook)
    try:
        model = run.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
        optimizer = sgd(model)
        for step in range(STEPS):
            run.step(model, optimizer, step)
    finally:
        handle.remove()


@loop()
def global_forward_hook(run: Run) -> None:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return out * 1.5 if isinstance(module, nn.Linear) else None

    _global_hooks(run, nn.modules.module.register_module_forward_hook, hook)


@loop()
def global_full_backward_hook(run: Run) -> None:
    def hook(module: nn.Module, into: Any, out: Any) -> Any:
        return (into[0] * 1.5,) if isinstance(module, nn.Tanh) else None

    _global_hooks(run, nn.modules.module.register_module_full_backward_hook, hook)


@loop()
def hooks_added_and_removed(run: Run) -> None:
    """Gradient noise for one step only."""
    model = run.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    optimizer = sgd(model)
    for step in range(STEPS):
        handle = model[1].register_full_backward_hook(lambda m, i, o: (i[0] * 3,)) if step == 1 else None
        run.step(model, optimizer, step)
        if handle is not None:
            handle.remove()


def _hook_of_all(run: Run, parameters: Any) -> Any:
    """One hook for all parameters' gradients, of which it notes the sum."""
    return torch.autograd.graph.register_multi_grad_hook(
        list(parameters), lambda grads: run.note("seen", sum(g.sum().item() for g in grads if g is not None))
    )


@loop(ranks=True)
def multi_grad_hook(run: Run) -> None:
    model = run.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    optimizer = sgd(model)
    run.step(model, optimizer, 0)
    handle = _hook_of_all(run, model.parameters())
    for step in range(1, STEPS):
        run.step(model, optimizer, step)
    handle.remove()


@loop(ranks=True, line=False, refused="after the model's first call")
def multi_grad_hook_of_the_plain_model(run: Run) -> None:
    """It waits for nodes of the plain parameters, which no backward reaches."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    _hook_of_all(run, plain.parameters())
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)


@program(batch=lambda step: (numbers(4, 8, seed=step), numbers(4, 8, seed=step + 7)))
class StopGradientAlternates(Two):
    """SimSiam: each side is the other's target."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        p, q = self.b(torch.tanh(self.a(x))), self.b(torch.tanh(self.a(y)))
        z, w = self.a(x), self.a(y)
        return -(F.cosine_similarity(p, w.detach()).mean() + F.cosine_similarity(q, z.detach()).mean()) / 2


@loop()
def detach_between_segments(run: Run) -> None:
    """Truncated backpropagation: the state goes on without its history."""
    truncate(run, nn.RNNCell(8, 8), Tensor.detach_)


def truncate(run: Run, cell: nn.Module, detach: Callable[[Tensor], Tensor]) -> None:
    """Trains a cell on two calls at a time, and detaches its state between."""
    model = run.compile(cell)
    optimizer = sgd(model)
    state = torch.zeros(4, 8)
    for step in range(STEPS):
        for part in range(2):
            state = model(rows(10 * step + part)[0], state)
        state.square().mean().backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        state = detach(state)
        run.note("state", state)
