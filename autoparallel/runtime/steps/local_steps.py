"""An optimizer's step on the tensors that lie on this rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoparallel import _torch
from autoparallel._torch.optim import FILLER
from autoparallel.runtime.dtensors.writes import assignments
from autoparallel.runtime.parameters.slices import as_parameter, lay_like
from autoparallel.runtime.steps.cuts import is_torchs, lies_as, numbers_of
from autoparallel.runtime.steps.twins import fill, gradient_of, step_of

_UNKNOWN = object()


class LocalStep:
    """The steps of an optimizer each of whose elements is updated by itself.

    Args:
        optimizer: the optimizer, whose parameters stay the same.

    States are kept twice, as ``DTensor``s and as the plain tensors inside of them; only where the objects in the
    optimizer's dictionaries are others than after its last step are they looked at one by one.

    [Note: lists that are kept] The step of each of torch's optimizers first goes through a group's parameters and puts
    them, their gradients and their states into lists (``_init_group``), which one function then updates.  As long as
    all objects and the group's options are those of the step before, so are the lists, but for the gradients: the twin
    is handed them as they were, and gradients need not be set on the plain tensors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._lists = [list(group["params"]) for group in optimizer.param_groups]
        self._parameters: list[torch.Tensor] = list(chain.from_iterable(self._lists))
        self._locals = list(map(_torch.dtensor.local_of, self._parameters))
        self._slices = [slice(i, j) for i, j in pairwise(accumulate(map(len, self._lists), initial=0))]
        sharded = [(p, x) for p, x in zip(self._parameters, self._locals, strict=True) if p is not x]
        for parameter, local in sharded:
            local.grad_dtype = parameter.grad_dtype
        self._sharded = [p for p, _ in sharded]
        self._shards = [x for _, x in sharded]
        self._by_parameter = {id(p): x for p, x in zip(self._parameters, self._locals, strict=True)}
        self._specs: list[Any] = [_UNKNOWN] * len(sharded)  # of gradients that have been found to lie as they should
        self._without: list[int] = []  # places of those that had none
        self._changed = self._sharded
        kind = type(optimizer)
        self._numbers = numbers_of(optimizer)
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._outer: list[Any] = []  # the objects in the optimizer's state after its last step, and in the plain one
        self._inner: list[Any] = []
        self._keeps_lists = (
            is_torchs(step_of(kind)) and len(sharded) == len(self._locals) and is_torchs(_torch.optim.filler_of(kind))
        )
        self._options: list[Any] = []
        self._assignments = assignments()  # when the states were looked at
        self._filled: list[_torch.optim.Filled] = []  # by each group, in the last step, if they hold for the next
        self._filling: list[_torch.optim.Filled] = []

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's parameters are still these, where they were."""
        groups = [group["params"] for group in optimizer.param_groups]
        return (
            list(map(len, groups)) == list(map(len, self._lists))
            and all(map(is_, chain.from_iterable(groups), self._parameters))
            and all(map(is_, _torch.dtensor.locals_of(self._sharded), self._shards))
        )

    def begin(self, optimizer: Optimizer, twin: Optimizer) -> None:
        """Gives the plain tensors their gradients and states, and the twin these tensors."""
        grads = _torch.tensors.grads_of(self._sharded)
        parts, specs = _torch.dtensor.locals_of(grads), _torch.dtensor.specs_of(grads)
        same = all(map(is_, specs, self._specs)) and all(grads[i] is None for i in self._without)
        if not same:
            laid = list(map(gradient_of, self._sharded))
            self._specs = [s if a is b else _UNKNOWN for s, a, b in zip(specs, parts, laid, strict=True)]
            self._without = [i for i, grad in enumerate(grads) if grad is None]
            self._changed = [p for p, grad in zip(self._sharded, grads, strict=True) if grad is not None]
            parts = laid
        # Writing to a local tensor does not let it show in the version of its ``DTensor``.
        torch.autograd.graph.increment_version(self._changed)
        if not _are_same(_objects(optimizer.state), self._outer) or self._assignments != assignments():
            same, self._assignments = False, assignments()
            self._read_groups(optimizer)
        fill(twin, optimizer, self._state, [self._locals[part] for part in self._slices])
        filled, self._filled, self._filling = self._filled, [], []
        if self._keeps_lists and FILLER not in vars(optimizer):
            options = list(map(_options, twin.param_groups))
            if same and filled and options == self._options:
                present = [[p for p in parts[part] if p is not None] for part in self._slices]
                _torch.optim.refill(twin, filled, present)
                self._filled = filled
                return
            self._options = options
            _torch.optim.note_filled(twin, self._filling)
        for local, part in zip(self._shards, parts, strict=True):
            local.grad = part

    def _read_groups(self, optimizer: Optimizer) -> None:
        self._state.clear()
        for parameter, values in optimizer.state.items():
            local = self._by_parameter.get(id(parameter))
            if local is None or not isinstance(parameter, DTensor):
                self._state[parameter] = values
                continue
            for name, value in values.items():
                if lies_as(value, name, parameter.shape, self._numbers):
                    values[name] = value = lay_like(value, parameter)
                self._state[local][name] = _torch.dtensor.local_of(value) if isinstance(value, torch.Tensor) else value
        self._outer, self._inner = _objects(optimizer.state), _objects(self._state)

    def end(self, optimizer: Optimizer) -> None:
        """Gives the optimizer the states that a step has made."""
        if self._filled:
            return
        for local in self._shards:
            local.grad = None
        if _are_same(_objects(self._state), self._inner):
            self._filled = self._filling
        else:
            self._write(optimizer)

    def _write(self, optimizer: Optimizer) -> None:
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            if local not in self._state:
                continue
            if local is parameter or not isinstance(parameter, DTensor):
                optimizer.state[parameter] = self._state[local]
                continue
            before, values = optimizer.state.setdefault(parameter, {}), self._state[local]
            for name in [n for n in before if n not in values]:
                del before[name]
            for name, value in values.items():
                if lies_as(value, name, local.shape, self._numbers):
                    previous = before.get(name)
                    if not (isinstance(previous, DTensor) and _torch.dtensor.local_of(previous) is value):
                        before[name] = as_parameter(value, parameter)
                else:
                    before[name] = value
        for key in self._state.keys() - {*self._locals}:
            optimizer.state[key] = self._state[key]
        self._outer, self._inner = _objects(optimizer.state), _objects(self._state)


def _options(group: dict[str, Any]) -> list[Any]:
    """What may decide which tensors of a group are gathered: options, of numbers only whether they are 0."""
    return [(key, type(x), bool(x) if isinstance(x, _SCALARS) else None) for key, x in group.items() if key != "params"]


_SCALARS = (bool, int, float, str, type(None))


def _objects(state: Mapping[Any, Any]) -> list[Any]:
    """The values in an optimizer's state."""
    parts = list(state.values())
    if list(map(type, parts)).count(dict) == len(parts):
        return list(chain.from_iterable(map(dict.values, parts)))
    return [value for part in parts for value in (part.values() if isinstance(part, dict) else (part,))]


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
