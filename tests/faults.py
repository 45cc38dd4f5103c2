"""Models with something that an operator graph does not show, which can be left out of the trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autoparallel.capture.tracing import backward_hooks
from autoparallel.capture.tracing.trace import listening


class Switch:
    """Where the models leave out what makes them special."""

    dropped = "nowhere"


@contextlib.contextmanager
def dropping(where: str) -> Iterator[None]:
    """Leaves it out "in the trace" (as a capture does that does not see it), "everywhere" or "nowhere"."""
    Switch.dropped = where
    hooks = (lambda self, values: values) if where == "in the trace" else None  # these run as they are, at every call
    names = ("setup_input_hook", "setup_output_hook")
    with contextlib.ExitStack() as stack:
        for name in names if hooks else ():
            stack.enter_context(mock.patch.object(backward_hooks._ModuleHooks, name, hooks))
        try:
            yield
        finally:
            Switch.dropped = "nowhere"


def present() -> bool:
    """Whether it is here; a model that is traced is told that it is not compiled, so this asks behind its back."""
    return Switch.dropped == "nowhere" or Switch.dropped == "in the trace" and listening() is None


class Net(nn.Module):
    """Two linears with something between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 4)

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.up(x)))  # the fault, where its result has a hook

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))


class NoGrad(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        with torch.no_grad() if present() else contextlib.nullcontext():
            scale = h.square().mean(-1, keepdim=True)  # the fault
        return self.down(h / (1 + scale))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4)  # the fault

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


class Function(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down(_Rounded.apply(h) if present() else torch.round(h * 4))


class Hook(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if present():
            h.register_hook(lambda grad: grad * 2)
        return self.down(h)


class ModuleHook(Net):
    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.down.register_full_backward_hook(lambda module, into, out: (into[0] * 3,) if present() else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))  # the fault


class Attribute(Net):
    """As a call that takes an attribute as it was at the trace."""

    scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        h = h * (2.0 if present() else 3.0)  # the fault
        return self.down(h)


class Averages(nn.Module):
    """A buffer that is updated without a gradient."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(6, 4), nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.up(x))
        self.mean.mul_(0.5).add_(h.detach().mean(0), alpha=0.5 if present() else 0.25)  # the fault
        return h


FAULTS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (NoGrad, Function, Hook, ModuleHook, Attribute, Averages)
}
LINES = {**{name: kind.forward for name, kind in FAULTS.items()}, "Function": _Rounded.forward, "Hook": Net.hidden}
"""The functions with the line that verify() is to name."""
