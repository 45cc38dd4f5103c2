"""The ``.grad`` of the parameters at rest, as the objects that scripts see.

[Note: gradients that a script keeps] In one process a backward adds to ``.grad`` in place, so that who keeps it reads
the sum.  Here a gradient changes its layout or dtype on its way from summand to whole.  So a ``DTensor`` that is taken
away until another takes its place becomes that other one, if it is still alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.placements import Layout, to_dtensor_placements
from autoparallel.runtime.parameters.slices import gradient_as


class ParameterGrads:
    """The gradients of the parameters of one model, by name.

    Args:
        parameters: the parameters at rest.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        self._parameters = parameters
        self._absent: dict[str, weakref.ref[torch.Tensor]] = {}
        self.move(mesh)

    def move(self, mesh: DeviceMesh) -> None:
        """Goes to another mesh, before there are gradients."""
        self._mesh = mesh
        self._specs: dict[tuple[str, Layout, torch.dtype], Any] = {}

    def all(self) -> dict[str, torch.Tensor]:
        """The gradients that there are."""
        pairs = zip(self._parameters, _torch.tensors.grads_of(self._parameters.values()), strict=True)
        return {name: grad for name, grad in pairs if grad is not None}

    def local(self, name: str, layout: Layout) -> torch.Tensor | None:
        """This rank's part of a gradient that lies in a layout; None where there is none.

        Raises:
            RuntimeError: where the user has replaced it by a plain tensor.
        """
        grad = self._parameters[name].grad
        return None if grad is None else gradient_as(grad, self._spec(name, layout, grad.dtype))

    def take_away(self, name: str) -> None:
        """Takes a gradient away for another that is to come."""
        parameter = self._parameters[name]
        if parameter.grad is not None:
            self._absent[name] = weakref.ref(parameter.grad)
        parameter.grad = None

    def give(self, name: str, grad: DTensor) -> None:
        """Makes a ``DTensor`` a parameter's gradient, by the object that has been taken away if it is alive."""
        reference = self._absent.pop(name, None)
        earlier = None if reference is None else reference()
        if isinstance(earlier, DTensor) and earlier.dtype == grad.dtype and earlier.device_mesh == grad.device_mesh:
            _torch.dtensor.become(earlier, grad)
            grad = earlier
        parameter = self._parameters[name]
        if grad.dtype != parameter.dtype:  # of an accumulator
            parameter.grad_dtype = None
        parameter.grad = grad

    def give_part(self, name: str, local: torch.Tensor, layout: Layout) -> None:
        """Makes a local tensor, in a layout, a parameter's gradient, where it is not that already."""
        grad = self._parameters[name].grad
        if grad is None or _torch.dtensor.local_of(grad) is not local:
            self.take_away(name)
            self.give(name, _torch.dtensor.wrap_local(local, self._spec(name, layout, local.dtype)))

    def forget_absent(self) -> None:
        """Lets go of the objects that have been taken away: nothing is on its way any more."""
        self._absent = {}

    def _spec(self, name: str, layout: Layout, dtype: torch.dtype) -> Any:
        spec = self._specs.get((name, layout, dtype))
        if spec is None:
            shape = self._parameters[name].shape
            spec = _torch.dtensor.make_spec(self._mesh, to_dtensor_placements(layout), shape, dtype)
            self._specs[name, layout, dtype] = spec
        return spec
