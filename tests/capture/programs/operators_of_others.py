"""Operators that are of others than torch, and differentiate themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.capture.programs.inplace import Two
from tests.capture.registry import program


class _Surrogate(torch.autograd.Function):
    """A step with the gradient of a smooth one, as spiking neurons have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / (1 + x.square())


LIBRARY = torch.library.Library("autoparallel_spikes", "DEF")
for _key in ("AutogradCPU", "Autograd"):
    _name = f"fire_{_key.lower()}"
    LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    LIBRARY.impl(_name, lambda x: (x >= 0).to(x) * x, "CPU")
    LIBRARY.impl(_name, lambda x: _Surrogate.apply(x) * x, _key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"autoparallel_spikes::{_name}", torch.empty_like, lib=LIBRARY)


@program(ranks=True)
class OperatorsThatDifferentiateByAFunction(Two):
    """Their kernels for autograd are made of others, among them a function with a backward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.ops.autoparallel_spikes.fire_autogradcpu(self.a(x))
        return self.b(torch.ops.autoparallel_spikes.fire_autograd(h - 0.5))
