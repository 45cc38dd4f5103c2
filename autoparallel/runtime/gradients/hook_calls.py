"""When hooks on parameters are called, and on which gradients.

[Note: when hooks on parameters are called] Once, where a gradient becomes complete: at the end of a synchronising
backward, on the sum of all that it and the backwards under ``no_sync()`` before it have made; or where a window of
``accumulate()`` has been divided.  So a hook sees what it would see in one process, where one backward makes it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.runtime.gradients.travel import Tensors
from autoparallel.runtime.parameters.hooks import (
    are_registered,
    call_accumulated_hooks,
    call_gradient_hooks,
    has_accumulated_hooks,
    has_gradient_hooks,
)
from autoparallel.runtime.parameters.slices import as_parameter, lay_like


class HookCalls:
    """The calls of hooks that are outstanding in a backward.

    Args:
        parameters: the parameters at rest, by name.
        add: adds what hooks have made of a gradient to ``.grad``.

    Attributes:
        before: gradients that were whole before summands were added to them, by name: hooks do not see them again.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], add: Callable[[ParameterChain, torch.Tensor], None]
    ) -> None:
        self._parameters, self._add = parameters, add
        # The gradients that hooks are to see, of those who see one; no chain where the model has made no part of it.
        self._complete: dict[str, tuple[ParameterChain | None, torch.Tensor | None]] = {}
        self.before: dict[str, torch.Tensor] = {}

    def keep_back(self, chains: Sequence[ParameterChain], values: Tensors) -> tuple[Sequence[ParameterChain], Tensors]:
        """Keeps the reduced gradients that hooks are to see, until all of them are there; returns the others."""
        if not are_registered():
            return chains, values
        rest: list[ParameterChain] = []
        rest_values: Tensors = []
        for chain, value in zip(chains, values, strict=True):
            if has_gradient_hooks(self._parameters[chain.name]):
                before = self._complete.get(chain.name, (chain, None))[1]
                self._complete[chain.name] = chain, value if before is None else before + value
                continue
            if has_accumulated_hooks(self._parameters[chain.name]):
                self._complete[chain.name] = chain, None
            rest.append(chain)
            rest_values.append(value)
        return rest, rest_values

    def take_beside(self, name: str, grad: torch.Tensor, adds: bool) -> torch.Tensor | None:
        """Takes a gradient of what the loop has computed beside the model, which hooks see together with the model's.

        Args:
            adds: whether it is on its way to ``.grad``.

        Returns:
            What takes its place; None for itself.
        """
        parameter = self._parameters[name]
        chain, before = self._complete.get(name, (None, None))
        if not has_gradient_hooks(parameter):
            if adds:
                self._complete[name] = chain, None
            return None
        value = _torch.dtensor.local_of(lay_like(grad, parameter))  # type: ignore[arg-type]
        if not adds:
            return as_parameter(call_gradient_hooks(name, parameter, as_parameter(value, parameter)), parameter)
        self._complete[name] = chain, value.clone() if before is None else before + value
        return torch.zeros_like(parameter)

    def call(self) -> None:
        """Calls all that are outstanding."""
        complete, self._complete = self._complete, {}
        before, self.before = self.before, {}
        if not complete:
            return
        with torch.no_grad():
            for name, (chain, value) in complete.items():
                if value is not None:
                    parameter = self._parameters[name]
                    whole = before.get(name)
                    value = value if whole is None else value - whole
                    grad = as_parameter(value.to(parameter.dtype).contiguous(), parameter)
                    value = call_gradient_hooks(name, parameter, grad).clone()  # hooks may keep theirs
                    value = value if whole is None else value.add_(whole)
                    if chain is not None:
                        self._add(chain, value)
                    elif parameter.grad is not None:  # the engine has added zeros
                        parameter.grad.add_(as_parameter(value, parameter))
            call_accumulated_hooks(self._parameters[name] for name in complete)

    def call_after_window(self, names: Iterable[str]) -> None:
        """Calls those of the parameters that have a gradient after a window of ``accumulate()``."""
        with torch.no_grad():
            complete = {name: self._parameters[name] for name in names if self._parameters[name].grad is not None}
            for name, parameter in complete.items():
                grad = parameter.grad
                if has_gradient_hooks(parameter) and isinstance(grad, DTensor):
                    local = _torch.dtensor.local_of(grad)
                    twin = _torch.dtensor.wrap_local(local.clone(), _torch.dtensor.spec_of(grad))  # hooks may keep it
                    local.copy_(call_gradient_hooks(name, parameter, twin))
            call_accumulated_hooks(complete.values())

    def forget(self) -> None:
        """Forgets what is outstanding, of a backward that has raised."""
        self._complete = {}
