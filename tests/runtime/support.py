"""What the runtime's tests share: small models, meshes, and ways to say what happened on a rank.

Functions that run on workers return plain values; the assertions are made in the parent, where their failures name
the case. [Note: the tests' models] are tiny because every compilation is a trace: what they hold is a layer of each
kind that matters (bias, layer norm, two sizes that divide by four).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autoparallel.comm.groups import COMMUNICATOR
from autoparallel.runtime.module import ParallelModule
from autoparallel.tools.parity.training import parameters_here
from tests.captures import Captures, shared_captures
from tests.devices import DEVICE
from tests.distributed import run_distributed

AXES = {1: ("dp",), 2: ("dp", "tp"), 3: ("pod", "dp", "tp")}


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """The mesh of this shape, made once per process."""
    return init_device_mesh(DEVICE, shape, mesh_dim_names=AXES[len(shape)])


class Net(nn.Module):
    """Linear, tanh, layer norm, linear: weights, biases and a norm's vectors."""

    def __init__(self, features: int = 8, hidden: int = 8, outputs: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(torch.tanh(self.up(x))))


def run_on_ranks(function: Callable[..., Any], *args: Any, world_size: int, **options: Any) -> list[Any]:
    """As `run_distributed`, for tests that are not about tracing: the same model is traced once for all of them."""
    return run_distributed(_call_sharing_captures, function, args, world_size=world_size, **options)


def _call_sharing_captures(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with shared_captures(_captured):
        return function(*args)


_captured: Captures = {}


def make(build: Callable[[], nn.Module] = Net, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A model whose weights follow from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().to(dtype)


def compiled_pair(
    build: Callable[[], nn.Module] = Net, *shape: int, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, nn.Module]:
    """The compiled model and a plain one of the same weights."""
    import autoparallel

    model = make(build, dtype)
    plain = copy.deepcopy(model)
    options.setdefault("loss_fn", F.mse_loss)
    return autoparallel.compile(model, mesh_of(*(shape or (2,))), **options), plain


def batch(step: int = 0, rows: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and targets for `Net`, the same on every rank."""
    generator = torch.Generator().manual_seed(step + 1)
    x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    y = 3 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def whole(tensor: Tensor) -> Tensor:
    """The global value, plain."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def off(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; infinite for other shapes or dtypes, or where only one has a NaN."""
    actual, expected = whole(actual), whole(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    difference = (actual - expected).abs()
    worst = difference.max().item() if difference.numel() else 0.0
    return worst if worst == worst else float("inf")


def parameters_of(model: nn.Module, plain: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The parameters of two models side by side: those that do not lie with another rank's stage."""
    mine, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert mine.keys() == theirs.keys(), (list(mine), list(theirs))
    return [(p, theirs[name]) for name, p in parameters_here(model)]


def parameters_off(model: nn.Module, plain: nn.Module) -> float:
    """How far the parameters of two models are apart."""
    return max(off(p, q) for p, q in parameters_of(model, plain))


def gradients_off(model: nn.Module, plain: nn.Module) -> float:
    """How far the gradients of two models are apart; infinite where only one of them has a gradient."""
    pairs = [(p.grad, q.grad) for p, q in parameters_of(model, plain)]
    if any((a is None) != (b is None) for a, b in pairs):
        return float("inf")
    return max((off(a, b) for a, b in pairs if a is not None and b is not None), default=0.0)


class SideBySide:
    """A compiled model and a plain one that train alike, by SGD with momentum.

    Attributes:
        worst: how far anything that was compared was off.
    """

    def __init__(self, model: Any, plain: nn.Module, lr: float = 0.1, momentum: float = 0.9) -> None:
        self.model, self.plain, self.worst = model, plain, 0.0
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=lr, momentum=momentum) for m in (model, plain)]

    def see(self, actual: Tensor, expected: Tensor) -> None:
        """Compares two tensors."""
        self.worst = max(self.worst, off(actual, expected))

    def backward(self, loss: Tensor, expected: Tensor) -> None:
        """Compares two losses, and differentiates both."""
        self.see(loss, expected)
        loss.backward(), expected.backward()

    def step(self, limit: float = 0.1, p: float = 2.0) -> None:
        """Compares gradients, their norms, which are above the limit, and what a step makes of the clipped ones."""
        self.worst = max(self.worst, gradients_off(self.model, self.plain))
        norm, expected = self.model.clip_grad_norm_(limit, p), clip_grad_norm(self.plain, limit, p)
        assert expected > limit, "the limit bites"
        self.see(norm, expected)
        for optimizer in self.optimizers:
            optimizer.step(), optimizer.zero_grad()
        self.worst = max(self.worst, parameters_off(self.model, self.plain))


def clip_grad_norm(model: Any, limit: float, p: float = 2.0) -> Tensor:
    """Clips a compiled model or a plain one, and gives the norm; parameters without a gradient count for nothing."""
    if isinstance(model, ParallelModule):
        return model.clip_grad_norm_(limit, p)
    return nn.utils.clip_grad_norm_([q for q in model.parameters() if q.grad is not None], limit, p)


def weights(model: Any) -> dict[str, Tensor]:
    """Copies of all parameters of a compiled model or a plain one, whole; on every rank, also those of other stages."""
    return {name: whole(x) for name, x in getattr(model, "full_parameters", model.named_parameters)()}


def weights_off(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """How far weights of the same names are apart."""
    assert actual.keys() == expected.keys(), (list(actual), list(expected))
    return max(off(actual[name], x) for name, x in expected.items())


def raised(action: Callable[[], Any]) -> str:
    """The exception's class and message, or nothing."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - it is what the caller asks about
        return f"{type(error).__name__}: {error}"
    return ""


def placements(model: nn.Module) -> dict[str, str]:
    """How each parameter lies, as text."""
    return {
        name: ",".join(f"S{p.dim}" if p.is_shard() else "R" for p in parameter.placements)  # type: ignore[union-attr]
        for name, parameter in model.named_parameters()
    }


class OneRank:
    """A communicator of one rank that pretends to be the first of several: what it sends is what it receives.

    Args:
        size: of every axis.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        self._used = COMMUNICATOR.using(self)  # type: ignore[arg-type]
        self._used.__enter__()

    def __exit__(self, *_: object) -> None:
        self._used.__exit__(None, None, None)

    def size(self, axis: str) -> int:
        return self._size

    def index(self, axis: str) -> int:
        return 0

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Callable[[], Tensor]:
        return lambda: x


@contextlib.contextmanager
def muon_in_the_gradients_dtype() -> Iterator[None]:
    """Muon orthogonalises in bfloat16, which rounds differences of 1e-16 up to 1e-3; in here it does so in the
    gradients' dtype."""
    with mock.patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", _orthogonalised):  # type: ignore[attr-defined]
        yield


def _orthogonalised(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x
