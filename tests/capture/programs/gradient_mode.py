"""no_grad, set_grad_enabled, inference_mode, detach: where gradients stop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import numbers


@program(ranks=True)
class NoGradBranch(nn.Module):
    """A second path that only looks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            scale = self.b(h).sigmoid()
        return h * scale


@program()
class UnreadWithGradientsEnabled(Two):
    """What nobody reads, in regions that leave the gradient mode as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.a(x)
            (2 * h).isfinite()
            self.seen.add_(h.detach().mean(0))
            h.mul_(2)
        with torch.no_grad(), torch.enable_grad():
            (h + 1).abs()
        return self.b(h)


@program(ranks=True)
class StopGradientTarget(nn.Module):
    """SimSiam: each view predicts the other one's projection, which is a target only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one, other = self.encoder(x), self.encoder(x.flip(1))
        loss = -F.cosine_similarity(self.predictor(one), other.detach(), dim=-1).mean()
        return {"loss": loss - F.cosine_similarity(self.predictor(other), one.detach(), dim=-1).mean()}


@program(ranks=True)
class MomentumEncoder(nn.Module):
    """BYOL, MoCo: the target's weights follow the online ones, inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8)
        for p in self.target.parameters():
            p.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.target(x)
        return (self.online(x) - target).square()


@program()
class DecoratedTarget(nn.Module):
    """``@torch.no_grad()`` on a method."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        return self.b(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) - self.target(x)


@program()
class InferenceModeTarget(nn.Module):
    """``@torch.inference_mode()`` on a method, its result used as a constant factor of nothing differentiable."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            codes = self.b(x).argmax(-1)
        return self.a(x), codes


@program(ranks=True)
class GradModeByFlag(nn.Module):
    """``set_grad_enabled`` with a flag, as backbones that may be frozen do it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.tune = nn.Linear(8, 8), nn.Linear(8, 8), False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.tune):
            h = self.backbone(x).relu()
        return self.head(h)


@program()
class GradModeAsFunction(nn.Module):
    """``torch.set_grad_enabled`` called as a function, and set back by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        torch.set_grad_enabled(False)
        gate = self.b(h).sigmoid()
        torch.set_grad_enabled(True)
        return self.c(h * gate)


@program()
class GradInsideNoGrad(nn.Module):
    """``enable_grad`` inside ``no_grad``: what is made within is differentiable again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x).relu()
            with torch.enable_grad():
                y = self.b(h)
        return y


@program()
class NoGradViewOfLive(nn.Module):
    """A value made before the region is used after it: only what the region makes stops."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            top = h.abs().amax(dim=-1, keepdim=True)
            same = h
        return self.b(same / top)


@program(ranks=True)
class NoGradInPlace(nn.Module):
    """An in-place change under ``no_grad`` of a tensor that is differentiable outside: its gradient is as without."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            h.mul_(0.5)
        return self.b(h)


@program(ranks=True)
class BufferUnderNoGrad(nn.Module):
    """Running statistics by hand."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h - self.mean


@program()
class BufferUsedBeforeAndAfter(nn.Module):
    """The statistics before the update enter the output, the new ones the next step's."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) / self.level.clone()
        with torch.no_grad():
            self.level.copy_(0.5 * self.level + 0.5 * y.abs().mean())
        return y * self.level.clone()


@program(ranks=True)
class LogitsOfDetached(nn.Module):
    """An auxiliary head on detached features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head, self.probe = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x).tanh()
        return self.head(h), self.probe(h.detach())


@program()
class NoGradParameterOnly(nn.Module):
    """A parameter that is used under ``no_grad`` only has no gradient, so that weight decay leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(8, 8), nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            s = self.scale.softmax(0)
        return self.a(x) * s


class VectorQuantizer(nn.Module):
    """VQ-VAE with codebooks that follow by exponential moving averages."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(6, 8))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        nearest = torch.cdist(h, self.codes).argmin(-1)
        q = F.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 6).to(h.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.T @ h, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.clamp(min=1e-2)[:, None])
        commitment = F.mse_loss(h, q.detach())
        q = h + (q - h).detach()
        return self.decoder(q), commitment


program(ranks=True)(VectorQuantizer)


@program()
class PowerIteration(nn.Module):
    """Spectral normalisation by hand: the vectors move under ``no_grad``."""

    u: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("u", F.normalize(torch.randn(8), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.weight.t() @ self.u, dim=0)
            u = F.normalize(self.weight @ v, dim=0)
            self.u.copy_(u)
        sigma = u @ self.weight @ v
        return F.linear(x, self.weight / sigma)


@program()
class RequiresGradInside(nn.Module):
    """Gradients of an input are asked for inside forward: an energy's force."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = self.a(x).tanh().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return force


@program()
class LeafOfForward(nn.Module):
    """What forward makes requires a gradient, which nobody reads: Wav2Vec2 does so for its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        h.requires_grad = True
        return self.b(self.a(h).tanh()) * (2 if h.requires_grad else 1)


@program()
class InputMadeToRequireGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        return self.a(x)


class Commits(nn.Module):
    """A loss that begins with a buffer, which it makes require a gradient, as a vector quantiser's does."""

    def __init__(self, gradient: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("zero", torch.zeros((), dtype=torch.float64, requires_grad=gradient))

    def forward(self, x: Tensor) -> Tensor:
        loss = self.zero
        if self.training:
            loss.requires_grad_()
        return loss + self.a(x).square().mean()


@program(ranks=True)
class BufferMadeToRequireGrad(Commits):
    pass


@program()
class BufferThatRequiresGrad(Commits):
    """On one rank; each of several would have a gradient of its own rows (see ``test_capture``)."""

    def __init__(self) -> None:
        super().__init__(gradient=True)


@program(
    observe=lambda model: model.rows.grad, batch=lambda step: (numbers(4, 8, seed=step), torch.tensor([3, 1, 3, step]))
)
class RowsInABufferThatRequiresGrad(nn.Module):
    """As sparse embeddings of puzzles are: the optimizer of the rows reads the gradient that the buffer has."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("table", numbers(5, 8, seed=3))
        self.register_buffer("rows", torch.zeros(4, 8, dtype=torch.float64, requires_grad=True), persistent=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.rows.copy_(self.table[ids])
        return self.a(x + self.rows).square()


@program(ranks=True)
class DataThatStaysWhereItIs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.proxies = nn.Linear(8, 8), nn.Parameter(numbers(8, 4, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        self.proxies.data = self.proxies.data.to(device=x.device, dtype=x.dtype)
        return self.a(x) @ self.proxies


@program(refused="leave out requires_grad_")
class HookBesideALeafOfForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = (x * 2).requires_grad_().square()
        h.register_hook(lambda grad: grad * 2)  # refused
        return self.a(h)


@program()
class CastsUnderNoGradToWhatItIs(Two):
    """A sparse attention's indexer casts what it reads, which has that dtype: from there on the trace reads the tensor
    by the name of the cast (Dots 3)."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).sin()
        with torch.no_grad():
            mask = (h.to(self.b.weight.dtype) > 0).to(h.dtype)
        return self.b(h) * mask


@program(ranks=True)
class CastsASelectionUnderNoGrad(Two):
    """Of a size that no trace has."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        selected = h[h > 0]
        with torch.no_grad():
            gain = selected.to(h.dtype)
        return self.b(h) + (selected * gain).sum()


@program()
class KeepsWhatNoGradReturnsAsItIs(Two):
    """What an operator returns itself carries its gradient, whatever the mode; copies and views do not."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).sin()
        with torch.no_grad():
            same = F.dropout(h.type_as(x).contiguous(), 0.5, False)
            pair = torch.broadcast_tensors(h, h)
            copied, turned = h.double(), h.t().contiguous()
            with torch.enable_grad():
                inside = same.exp()
        return self.b(same) + pair[1] * inside + copied.float() * turned.t()


@program(ranks=True)
class AConstantThatRequiresOne(Two):
    """The time of a flow, whose value torch follows through the trace."""

    def forward(self, x: Tensor) -> Tensor:
        time = torch.tensor(0.5).type_as(x)
        x.requires_grad_()
        time.requires_grad_()
        flow = torch.tanh(self.a(x)) * time
        (slope,) = torch.autograd.grad(flow.sum(), x, create_graph=True)
        return self.b(flow) + slope


@program(ranks=True)
class NoGradInsideOfACond(Two):
    """A way that torch.cond takes, and one inside of it."""

    def forward(self, x: Tensor) -> Tensor:
        def scaled(h: Tensor) -> Tensor:
            y = h.sin()
            with torch.no_grad():
                top = y.abs().amax(-1, keepdim=True)
                first = y.view(-1)[0]
            return y / top + y * first

        h = self.a(x)
        return self.b(torch.cond(x.sum() > -1e9, scaled, lambda h: h * 2, (h.sin(),)))
