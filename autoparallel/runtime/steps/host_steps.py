"""An optimizer's step whose states lie in host memory between steps.

[Note: states in host memory] A plan may leave the optimizer's states no place on the device.  Then a step goes through
the parameters in batches: the states of one are copied to the device, the optimizer steps on these parameters alone,
and the states are copied back.  As each element is updated by itself, every bit is that of one step on all of them.
The optimizer itself always holds ``DTensor``s, whose local tensors are in (pinned) host memory.  On CPUs, where both
are one memory, the same copies are made.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoparallel import _torch
from autoparallel.runtime.parameters.slices import as_parameter, lay_like
from autoparallel.runtime.parameters.state import in_batches
from autoparallel.runtime.steps.cuts import NUMBERS, lies_as, numbers_of, part_of
from autoparallel.runtime.steps.twins import BATCH_BYTES, fill, gradient_of, step_on

_WATCHED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def keep_in_host(value: torch.Tensor, before: Any, parameter: torch.Tensor) -> DTensor:
    """A state in host memory, where it is when :func:`wait_for_host` returns.

    Args:
        value: this rank's part of it, on the device.
        before: the state as it was before the step, whose memory is used again.
    """
    host = _torch.dtensor.local_of(before) if isinstance(before, DTensor) else None
    if host is not None and host.device.type == "cpu" and (host.shape, host.dtype) == (value.shape, value.dtype):
        host.copy_(value, non_blocking=True)
        return before
    host = torch.empty_like(value, device="cpu", pin_memory=value.device.type != "cpu")
    return as_parameter(host.copy_(value, non_blocking=True), parameter)


def lay_in_host(optimizer: Optimizer) -> None:
    """Brings all states of parameters that lie as a plan says to host memory, and those that are loaded from now on."""
    if optimizer not in _WATCHED:
        _WATCHED.add(optimizer)
        optimizer.register_load_state_dict_post_hook(lay_in_host)
    numbers = numbers_of(optimizer) if part_of(optimizer) == "element" else NUMBERS
    held = [(p, state) for p, state in optimizer.state.items() if isinstance(p, DTensor)]
    for parameter, state in held:
        for name, value in state.items():
            if lies_as(value, name, parameter.shape, numbers):
                laid = lay_like(value, parameter)
                on_device = _torch.dtensor.local_of(laid).device.type != "cpu"
                state[name] = keep_in_host(_torch.dtensor.local_of(laid), None, parameter) if on_device else laid
    wait_for_host(optimizer)


def wait_for_host(optimizer: Optimizer) -> None:
    """Waits until what devices copy is in host memory, where anybody may read it."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"] if p.device.type != "cpu"}
    for device in sorted(devices, key=str):
        torch.accelerator.current_stream(device).synchronize()


class HostStep:
    """The steps of an optimizer each of whose elements is updated by itself, and whose states lie in host memory.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._numbers = numbers_of(optimizer)
        lay_in_host(optimizer)

    def begin(self, optimizer: Optimizer, twin: Optimizer) -> None:
        """Updates every parameter that lies as a plan says, and leaves the others to the twin."""
        groups = [group["params"] for group in optimizer.param_groups]
        items = [(i, p) for i, some in enumerate(groups) for p in some if isinstance(p, DTensor) and p.grad is not None]
        torch.autograd.graph.increment_version([p for _, p in items])
        for batch in in_batches(items, lambda item: _torch.dtensor.local_of(item[1]).nbytes, BATCH_BYTES):
            self._step(optimizer, batch)
        wait_for_host(optimizer)
        fill(twin, optimizer, optimizer.state, [[p for p in some if not isinstance(p, DTensor)] for some in groups])

    def _step(self, optimizer: Optimizer, batch: Sequence[tuple[int, DTensor]]) -> None:
        """Updates some parameters, each of which is given with the number of its group."""
        states: defaultdict[Any, dict[Any, Any]] = defaultdict(dict)
        lists: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for i, parameter in batch:
            local = _torch.dtensor.local_of(parameter)
            local.grad_dtype = parameter.grad_dtype
            local.grad = gradient_of(parameter)
            lists[i].append(local)
            for name, value in optimizer.state.get(parameter, {}).items():
                if lies_as(value, name, parameter.shape, self._numbers):
                    laid = _torch.dtensor.local_of(lay_like(value, parameter))
                    value = laid.to(local.device, non_blocking=True, copy=True)
                states[local][name] = value
        try:
            step_on(optimizer, states, lists)
        finally:
            for _, parameter in batch:
                _torch.dtensor.local_of(parameter).grad = None
        for _, parameter in batch:
            local, before = _torch.dtensor.local_of(parameter), optimizer.state.get(parameter, {})
            after = dict(states.get(local, {}))
            for name, value in after.items():
                if lies_as(value, name, local.shape, self._numbers):
                    after[name] = keep_in_host(value, before.get(name), parameter)
            if before or after:
                optimizer.state[parameter] = after
