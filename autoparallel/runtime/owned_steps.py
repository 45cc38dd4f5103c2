"""An optimizer's step on whole parameters, each of which is updated by one rank, its owner.

What an update depends on (a parameter's value, its gradient and its states) is sent to the owner as it lies, packed;
the owner steps on plain whole tensors; what has changed goes back to where it lies, packed too.  States as large as the
parameter lie as the parameter does, all others are the same on every rank.  Replicas share the work, and no rank is
sent what it does not update.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoparallel import _torch
from autoparallel.comm.groups import communicator_of, group_name, whole_group
from autoparallel.placements import from_dtensor_placements
from autoparallel.placements.regions import Region, region_at, whole_region
from autoparallel.runtime.gradients import GradientStore
from autoparallel.runtime.local_steps import fill, gradient_of, lies_as, step_of, take_back, twin_of
from autoparallel.runtime.state import as_parameter, in_batches, lay_like

BATCH_BYTES = 64 << 20
"""Of the parameters that one rank owns at a time."""

Entry = tuple[Any, str, tuple[int, ...], Any]
"""A state's name; "lies", "tensor" or "number"; its shape; its dtype and kind of device, or its Python type."""


@dataclass
class _Item:
    """A parameter with a gradient.

    Attributes:
        parameter: as it lies.
        group: the number of its group in the optimizer.
        grad: this rank's part of its gradient.
        state: the optimizer's, by name.
        regions: the part of each rank of the mesh.
        sources: the places on the mesh from which an owner is sent all of it, by the owner's place.
        owner: the place of its owner.
        entries: its states, as far as they are known.
    """

    parameter: DTensor
    group: int
    grad: torch.Tensor
    state: dict[Any, Any]
    regions: list[Region]
    sources: list[list[int]]
    owner: int = 0
    entries: tuple[Entry, ...] = ()

    @property
    def work(self) -> int:
        """A measure of the arithmetic of an update, where it multiplies matrices."""
        shape = self.parameter.shape
        return math.prod(shape) * (min(shape) if len(shape) > 1 else 1)


class OwnedStep:
    """One step of an optimizer each of whose parameters is updated by itself.

    Args:
        optimizer: the optimizer.
        stores: those that may have some of its parameters; the others are left to the optimizer as they are.
    """

    def __init__(self, optimizer: Optimizer, stores: Iterable[GradientStore]) -> None:
        store_of = {id(p): store for store in stores for p in store.parameters.values()}
        self._own: dict[int, tuple[GradientStore, list[tuple[int, DTensor]]]] = {}
        self._others: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for i, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                store = store_of.get(id(parameter))
                if store is None or not isinstance(parameter, DTensor):
                    self._others[i].append(parameter)
                else:
                    self._own.setdefault(id(store), (store, []))[1].append((i, parameter))

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether it can be used again: a step is looked at anew each time."""
        return False

    def begin(self, optimizer: Optimizer, twin: Optimizer) -> None:
        """Updates every parameter of a compiled model, and leaves the others to the twin."""
        for store, parameters in self._own.values():
            mesh = _Mesh(store)
            items = [mesh.item(optimizer, i, p) for i, p in parameters if p.grad is not None]
            torch.autograd.graph.increment_version([item.parameter for item in items])
            for batch in in_batches(items, lambda i: _bytes(i.parameter), BATCH_BYTES * mesh.size):
                mesh.step(optimizer, batch)
        fill(twin, optimizer, optimizer.state, self._others)

    def end(self, optimizer: Optimizer, twin: Optimizer) -> None:
        """Takes back what the step has set beside parameters and states."""
        take_back(optimizer, twin)


class _Mesh:
    """The ranks among which parameters are shared out."""

    def __init__(self, store: GradientStore) -> None:
        self.store, self.shape = store, tuple(store.mesh.shape)
        self.places = list(product(*map(range, self.shape)))
        self.communicator, self.axis = communicator_of(group_name(store.prefix, store.names, range(len(self.shape))))
        self.size, self.here = len(self.places), self.communicator.index(self.axis)

    def item(self, optimizer: Optimizer, group: int, parameter: DTensor) -> _Item:
        """A parameter with what its update depends on."""
        grad = gradient_of(parameter)
        assert grad is not None
        layout, shape = from_dtensor_placements(tuple(parameter.placements)), tuple(parameter.shape)
        state = optimizer.state.setdefault(parameter, {})
        for name, value in state.items():
            if lies_as(value, name, shape):
                state[name] = lay_like(value, parameter)
        whole = [axis for axis, placement in enumerate(layout) if placement.kind != "S"]
        sources = [
            [i for i, other in enumerate(self.places) if all(other[axis] == place[axis] for axis in whole)]
            for place in self.places
        ]
        regions = [region_at(shape, layout, self.shape, place) for place in self.places]
        return _Item(parameter, group, grad, state, regions, sources, entries=_entries(state, shape))

    def step(self, optimizer: Optimizer, items: Sequence[_Item]) -> None:
        """Updates some parameters."""
        load = [0] * self.size
        for item in sorted(items, key=lambda item: -item.work):
            item.owner = load.index(min(load))
            load[item.owner] += item.work
        wholes = self._gather(items)
        mine = [item for item in items if item.owner == self.here]
        error: Exception | None = None
        states: list[dict[Any, Any]] = []
        found: list[tuple[Entry, ...]] = []
        try:
            states = _update(optimizer, mine, wholes)
            found = [_entries(s, i.parameter.shape) for s, i in zip(states, mine, strict=True)]
            for item, entries in zip(mine, found, strict=True):
                _require_same(optimizer, item, entries)
        except Exception as caught:  # noqa: BLE001 - raised on every rank, where they speak with each other next
            error = caught
        if not all(item.entries for item in items):  # a first step makes states; their owner says which
            self._agree(items, error, found)
        came = self._scatter(items, wholes, states, error is not None)
        if came is None:
            self._agree(items, error, found)
        for item, values in zip(items, came or (), strict=True):
            _torch.local_of(item.parameter).copy_(values[0])
            for (name, kind, _, of), value in zip(item.entries, values[1:], strict=True):
                _put(item, name, kind, of, value)

    def _agree(self, items: Sequence[_Item], error: Exception | None, found: list[tuple[Entry, ...]]) -> None:
        """Tells all ranks which states each parameter has now; raises on all of them where one could not step."""
        mine = error and f"{type(error).__name__}: {error}", found
        told: list[Any] = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(told, mine, group=whole_group(self.store.prefix))
        failed = next((text for text, _ in told if text is not None), None)
        if failed is not None:
            raise RuntimeError(f"optimizer.step() failed on the rank that updates a parameter: {failed}") from error
        rest = [iter(entries) for _, entries in told]
        for item in items:
            entries = next(rest[item.owner])
            item.entries = item.entries or entries

    def _gather(self, items: Sequence[_Item]) -> list[list[torch.Tensor]]:
        """For each parameter that this rank owns: the parameter, its gradient and what lies like it, whole."""
        sent: list[list[torch.Tensor]] = [[] for _ in self.places]
        wanted: list[list[tuple[tuple[int, ...], torch.dtype]]] = [[] for _ in self.places]
        dtypes: dict[torch.dtype, None] = {}
        for item in items:
            lying = [_torch.local_of(item.parameter), item.grad, *map(_torch.local_of, _lying(item))]
            dtypes |= dict.fromkeys(t.dtype for t in lying)
            if self.here in item.sources[item.owner]:
                sent[item.owner] += lying
            if item.owner == self.here:
                for i in item.sources[self.here]:
                    wanted[i] += [(item.regions[i].shape, t.dtype) for t in lying]
        pieces = [iter(some) for some in self._exchange(sent, wanted, dtypes)]
        wholes = []
        for item in items:
            if item.owner != self.here:
                continue
            kinds = [item.parameter.dtype, item.grad.dtype, *(v.dtype for v in _lying(item))]
            device = item.grad.device
            whole = [torch.empty(item.parameter.shape, dtype=kind, device=device) for kind in kinds]
            for i in item.sources[self.here]:
                for tensor in whole:
                    tensor[_slices(item, i)].copy_(next(pieces[i]))
            wholes.append(whole)
        return wholes

    def _scatter(
        self, items: Sequence[_Item], wholes: list[list[torch.Tensor]], states: list[dict[Any, Any]], failed: bool
    ) -> list[list[torch.Tensor]] | None:
        """Sends what owners have made to where it lies; returns each item's part and states, or None where a rank
        says, in front of what it sends, that it has failed."""
        flag = items[0].parameter.dtype
        device = self.store.mesh.device_type
        sent = [[torch.full((1,), failed, dtype=flag, device=device)] for _ in self.places]
        wanted: list[list[tuple[tuple[int, ...], torch.dtype]]] = [[((1,), flag)] for _ in self.places]
        dtypes = {flag: None}
        made = iter(zip(wholes, states or [{}] * len(wholes), strict=True))
        for item in items:
            forms: list[tuple[str, tuple[int, ...], torch.dtype]] = [("lies", (), item.parameter.dtype)]
            forms += [(e[1], e[2], e[3][0] if e[1] != "number" else torch.float64) for e in item.entries]
            dtypes |= dict.fromkeys(dtype for *_, dtype in forms)
            shapes = [[r.shape if kind == "lies" else shape for kind, shape, _ in forms] for r in item.regions]
            wanted[item.owner] += [(s, f[2]) for s, f in zip(shapes[self.here], forms, strict=True)]
            if item.owner != self.here:
                continue
            whole, state = next(made)
            if failed:  # what is sent is not read
                for i, some in enumerate(shapes):
                    sent[i] += [torch.zeros(s, dtype=f[2], device=device) for s, f in zip(some, forms, strict=True)]
                continue
            values = [whole[0], *(torch.as_tensor(state[e[0]]) for e in item.entries)]
            values = [v.to(item.grad.device, f[2]) for v, f in zip(values, forms, strict=True)]
            for i in range(self.size):
                sent[i] += [v[_slices(item, i)] if f[0] == "lies" else v for v, f in zip(values, forms, strict=True)]
        came = self._exchange(sent, wanted, dtypes)
        if torch.cat([some[0] for some in came]).any():
            return None
        rest = [iter(some[1:]) for some in came]
        return [[next(rest[item.owner]) for _ in range(1 + len(item.entries))] for item in items]

    def _exchange(
        self,
        sent: Sequence[Sequence[torch.Tensor]],
        wanted: Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]],
        dtypes: Iterable[torch.dtype],
    ) -> list[list[torch.Tensor]]:
        """Sends some tensors to each rank, one message for each dtype; returns those that came from each.

        Args:
            wanted: the shapes and dtypes of what comes from each rank.
            dtypes: of all that any rank sends, the same on every rank.
        """
        came: list[list[Any]] = [[None] * len(some) for some in wanted]
        for dtype in dtypes:
            flat = [t.reshape(-1) for some in sent for t in some if t.dtype == dtype]
            counts = [sum(t.numel() for t in some if t.dtype == dtype) for some in sent]
            sizes = [[math.prod(shape) for shape, kind in some if kind == dtype] for some in wanted]
            empty = torch.empty(0, dtype=dtype, device=self.store.mesh.device_type)
            packed = self.communicator.all_to_all_rows(
                torch.cat(flat or [empty]), counts, list(map(sum, sizes)), self.axis
            )
            parts = iter(packed.split([size for some in sizes for size in some]))
            for some, found in zip(wanted, came, strict=True):
                for i, (shape, kind) in enumerate(some):
                    if kind == dtype:
                        found[i] = next(parts).view(shape)
        return came


def _update(optimizer: Optimizer, items: Sequence[_Item], wholes: list[list[torch.Tensor]]) -> list[dict[Any, Any]]:
    """Runs the optimizer's step on whole parameters; returns their states."""
    state: defaultdict[Any, Any] = defaultdict(dict)
    lists: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
    for item, (whole, grad, *lying) in zip(items, wholes, strict=True):
        whole.grad_dtype = item.parameter.grad_dtype
        whole.grad = grad
        lists[item.group].append(whole)
        rest = iter(lying)
        state[whole] = {
            k: next(rest) if isinstance(v, DTensor) else v.clone() if isinstance(v, torch.Tensor) else v
            for k, v in item.state.items()
        }
    if items:
        twin = twin_of(optimizer)
        fill(twin, optimizer, state, lists)
        step_of(type(optimizer))(twin)
    return [state[whole] for whole, *_ in wholes]


def _entries(state: dict[Any, Any], shape: Sequence[int]) -> tuple[Entry, ...]:
    found: list[Entry] = []
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            kind = "lies" if lies_as(value, name, shape) else "tensor"
            found.append((name, kind, tuple(value.shape), (value.dtype, value.device.type)))
        elif isinstance(value, bool | int | float):
            found.append((name, "number", (), type(value)))
        else:
            raise TypeError(
                f"the state {name!r} of a parameter is {type(value).__name__}; an optimizer that is registered "
                "per='parameter' keeps tensors and numbers"
            )
    return tuple(found)


def _require_same(optimizer: Optimizer, item: _Item, entries: tuple[Entry, ...]) -> None:
    """Raises RuntimeError where a step after the first makes other states."""
    if item.entries and entries != item.entries:
        raise RuntimeError(
            f"{type(optimizer).__name__}, which is registered per='parameter', has changed which states a "
            f"parameter of shape {list(item.parameter.shape)} has after its first step, from "
            f"{_names(item.entries)} to {_names(entries)}: make all of them in the first step"
        )


def _names(entries: Iterable[Entry]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, _, shape, _ in entries) or "none"


def _lying(item: _Item) -> list[DTensor]:
    return [value for value in item.state.values() if isinstance(value, DTensor)]


def _slices(item: _Item, place: int) -> tuple[slice, ...]:
    return item.regions[place].within(whole_region(item.parameter.shape))


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.dtype.itemsize


def _put(item: _Item, name: Any, kind: str, of: Any, value: torch.Tensor) -> None:
    """Gives a state its new value, in its memory where it has some."""
    known = item.state.get(name)
    if kind == "number":
        item.state[name] = of(value.item())
    elif isinstance(known, torch.Tensor):
        _torch.local_of(known).copy_(value)
    elif kind == "lies":
        item.state[name] = as_parameter(value.clone(), item.parameter)
    else:
        item.state[name] = value.to(of[1], copy=True)
