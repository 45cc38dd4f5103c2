"""Modules and utilities of torch that keep state, hooks or parametrisations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


@program(ranks=True)
def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))


@program()
def spectral_norm_by_hooks() -> nn.Module:
    """The old one: a forward pre-hook sets a plain attribute."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))


@program(ranks=True)
def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))


@program()
def weight_norm_by_hooks() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8))


@program()
def orthogonal_parametrization() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 8))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


@program()
def own_parametrization() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


@program()
class ParametrizationCached(Two):
    """``parametrize.cached()`` around two uses."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.a, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.b(self.a(self.a(x)))


@program()
def pruned() -> nn.Module:
    """A mask as a buffer, applied by a pre-hook."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model


@program(ranks=True)
def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))


@program(ranks=True)
def batch_norm_of_all_batches() -> nn.Module:
    """momentum=None: a cumulative average."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 8))


@program()
def batch_norm_without_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 8))


@program()
class Checkpointed(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda t: self.a(t).tanh(), x, use_reentrant=False))


@program()
class CheckpointReentrant(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda t: self.a(t).tanh(), self.b(x), use_reentrant=True))


@program()
class CheckpointSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


@program(random=True)
class CheckpointWithDropout(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda t: F.dropout(self.a(t), 0.3), x, use_reentrant=False))


def sequences(step: int) -> tuple[Tensor]:
    return (numbers(4, 5, 8, seed=step),)


@program(batch=sequences)
def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


@program(batch=sequences)
class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = self.attention(x, x, x, need_weights=True)
        return out, weights


@program(batch=sequences)
class CausalTransformer(nn.Module):
    """Masks whose values torch compares with a causal one's, as nothing says that they are."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.decoder(x, self.encoder(x, mask=mask), tgt_mask=mask)


@program(batch=sequences, ranks=True)
class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.rnn(x)
        return self.head(out) + last.sum()


@program()
class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for part in x.view(-1, 4, 2).unbind(1):
            state = self.cell(part, state)
        return torch.cat(state, -1)


@program()
def bilinear_and_norms() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.PReLU(8), nn.RMSNorm(8), nn.Softplus(), nn.GLU())


@program()
class AutocastInside(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
        return self.b(h.to(x.dtype))


@program()
class DoubleInside(Two):
    """A softmax in another precision, and back."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).float().softmax(-1).double()
        return self.b(h)


@program()
class GradModeOfCaller(Two):
    """Asks whether gradients are wanted."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if torch.is_grad_enabled() else self.b(x)


@loop()
def grad_mode_of_the_caller(run: Run) -> None:
    model = run.compile(GradModeOfCaller())
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.no_grad():
            run.note("without", model(numbers(4, 8, seed=step + 3)))
        run.step(model, optimizer, step)


@program()
class AsksRequiresGrad(Two):
    """Branches on what of a tensor is differentiable."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) if h.requires_grad and not x.requires_grad else h * 2


@program(between=lambda model, step: model.get_submodule("a").requires_grad_(step != 1))
class AsksParameterRequiresGrad(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if self.a.weight.requires_grad else self.b(x)
        return self.b(h)


@loop()
def called_under_autocast(run: Run) -> None:
    model = run.compile(Two2())
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(numbers(4, 8, seed=step))
        out.float().square().mean().backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


class Two2(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@program()
class CastsRouterToItsDtype(nn.Module):
    """``self.router = self.router.to(dtype)`` in forward, which changes nothing, as mixtures of experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.router = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(self.a.weight.dtype)
        return self.router(x).softmax(-1) * self.a(x)


@program(refused="cast it before compile()")
class CastsRouterToAnotherDtype(nn.Module):
    """The same, which casts the parameters for good."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.router = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)  # refused
        return self.router(x.float()).softmax(-1) * self.a(x)


@program(refused="to_dense")
class SparseBuffer(Two):
    adjacency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.adjacency @ x)  # refused


@program(refused="to_dense")
class SparseOrNot(SparseBuffer):
    """Python asks a buffer how it lies."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.adjacency.is_sparse else self.b(x)  # refused


@program(ranks=True)
class SparseUnread(SparseBuffer):
    """As Whisper holds the heads that align: forward does not read them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heads", torch.eye(3, dtype=torch.bool).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


@program(refused="its indices and values")
class SparseProduct(nn.Module):
    """A product with a sparse matrix that is made of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.a = nn.Parameter(torch.ones(4)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        adjacency = torch.sparse_coo_tensor(torch.arange(4).expand(2, -1), self.weights, (4, 4))  # refused
        return self.a(torch.sparse.mm(adjacency, x))


@program()
class Quantised(nn.Module):
    """Rounding whose gradient torch has no kernel for without data."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(self.a(x), 0.1, 0, -128, 127)


@program(batch=sequences, ranks=True)
class AttentionOnOneKernel(nn.Module):
    """What a model permits is a setting of the process: torch's plainest kernel, which keeps all scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + F.scaled_dot_product_attention(q, k, v)


class _Softmaxes(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "softmax" in str(func)
        return func(*args, **(kwargs or {}))


def _kernels(run: Run) -> None:
    """Notes how many softmaxes a call computes, which only torch's plainest kernel does."""
    model = run.start()
    with _Softmaxes() as softmaxes:
        run.call(model, 0)
    run.note("softmaxes", softmaxes.count)


@program(batch=sequences, loop=_kernels)
class AttentionOfAModuleOnOneKernel(nn.Module):
    """The call of the kernel stands in torch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            h, _ = self.attention(x, x, x, need_weights=False)
        return h + self.attention(x, x, x, need_weights=False)[0]


@program(ranks=True)
class BatchNormUnderTwoNames(nn.Module):
    """One norm for two layers, and in a list beside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.Sequential(nn.Linear(8, 8), self.norm, nn.Tanh(), nn.Linear(8, 8), self.norm)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(self.norm(x))
        return out


class Counter(nn.Module):
    """Shares a buffer with another module."""

    def __init__(self, total: Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", total)


@program(ranks=True, device="cpu")  # to() makes two of it
class BufferUnderTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))
        self.counter = Counter(self.total)

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.detach().mean(0))
        out: Tensor = self.layer(x) + self.counter.seen
        return out


@program(ranks=True)
class FakeQuantised(Two):
    """Weights and activations as they are quantised, of whose operators torch has none for tensors without data."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.fake_quantize_per_tensor_affine(self.a(x), 0.05, 3, -128, 127)
        scale, zero = torch.full((8,), 0.02, dtype=torch.float32), torch.zeros(8, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(self.b.weight, scale, zero, 0, -8, 7)
        h = F.linear(h, weight, self.b.bias)
        return torch.fake_quantize_per_tensor_affine(h, scale[0], zero[0], -20, 20)


@program(refused="FusedMovingAvgObsFakeQuantize")
class FakeQuantizeModule(Two):
    """Its Python asks for the values of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.quantise = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.quantise(self.a(x)))  # refused


@program(ranks=True)
class PrunedGlobally(Two):
    """The hook that prunes keeps its mask."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(self.a, "weight"), (self.b, "weight")]
        prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@program(batch=lambda step: (numbers(8, seed=step), torch.tensor(step)))
class WeighsOneTarget(Two):
    """A loss of one sample, by the weights of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, 9.0).double())

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.b(torch.tanh(self.a(x))), target)
        return loss
