"""An optimizer's step on whole parameters, each of which is updated by one rank, its owner.

What an update depends on (a parameter's value, its gradient and its states) is sent to the owner as it lies, packed;
the owner steps on plain whole tensors; what has changed goes back to where it lies, packed too.  States as large as the
parameter lie as the parameter does, all others are the same on every rank.  Replicas share the work, and no rank is
sent what it does not update.
"""

from __future__ import annotations

import copy
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
from autoparallel.comm.groups import communicator_of, whole_group
from autoparallel.placements import from_dtensor_placements
from autoparallel.placements.regions import Region, region_at, whole_region
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.parameters.slices import as_parameter, lay_like
from autoparallel.runtime.parameters.state import in_batches
from autoparallel.runtime.ranks.messages import Form, pack, unpack
from autoparallel.runtime.steps.cuts import are_same, is_torchs, lies_as, numbers_in
from autoparallel.runtime.steps.host_steps import keep_in_host, lay_in_host, wait_for_host
from autoparallel.runtime.steps.twins import BATCH_BYTES, attributes_of, fill, gradient_of, step_of, step_on


@dataclass(frozen=True)
class _Entry:
    """What a state is, in the eyes of all ranks.

    Attributes:
        name: of the state.
        kind: ``"lies"`` where it lies as the parameter does, ``"tensor"``, ``"number"``, or ``"none"``.
        form: of the whole of it, as it is sent.
        of: its kind of device, where it does not lie as the parameter, or its Python type.
    """

    name: Any
    kind: str
    form: Form
    of: Any

    @staticmethod
    def of_state(name: Any, value: Any, shape: Sequence[int]) -> _Entry:
        """A state of a parameter of a shape. Raises TypeError for one that cannot be sent."""
        if isinstance(value, torch.Tensor):
            kind = "lies" if lies_as(value, name, shape) else "tensor"
            of = "" if kind == "lies" else value.device.type
            return _Entry(name, kind, Form(tuple(value.shape), value.dtype), of)
        if isinstance(value, bool | int | float):
            return _Entry(name, "number", Form((), torch.float64), type(value))
        if value is None:
            return _Entry(name, "none", Form((0,), torch.float64), None)
        raise TypeError(
            f"the state {name!r} of a parameter is {type(value).__name__}; an optimizer that is registered "
            "per='parameter' keeps tensors and numbers\nWhat to change: leave it unregistered."
        )

    def as_sent(self, value: Any, device: torch.device) -> torch.Tensor:
        """The state as a tensor of its form."""
        return torch.as_tensor([] if value is None else value, dtype=self.form.dtype, device=device)

    def put(self, item: _Item, value: torch.Tensor) -> None:
        """Gives the state its new value, in its memory where it has some."""
        before = item.state.get(self.name)
        if self.kind in ("number", "none"):
            item.state[self.name] = self.of and self.of(value.item())
        elif self.kind == "lies" and item.offloaded:
            item.state[self.name] = keep_in_host(value, before, item.parameter)
        elif isinstance(before, torch.Tensor):
            _torch.dtensor.local_of(before).copy_(value)
        elif self.kind == "lies":
            item.state[self.name] = as_parameter(value, item.parameter)
        else:
            item.state[self.name] = value.to(self.of)


@dataclass
class _Item:
    """A parameter with a gradient.

    Attributes:
        parameter: as it lies.
        group: the number of its group in the optimizer.
        grad: this rank's part of its gradient.
        state: the optimizer's, by name.
        offloaded: whether states lie in host memory (see ``host_steps``).
        regions: the part of each rank of the mesh.
        sources: the places on the mesh from which an owner is sent all of it, by the owner's place.
        owner: the place of its owner.
        entries: its states, as far as they are known.
    """

    parameter: DTensor
    group: int
    grad: torch.Tensor
    state: dict[Any, Any]
    offloaded: bool
    regions: list[Region]
    sources: list[list[int]]
    owner: int = 0
    entries: tuple[_Entry, ...] = ()

    @property
    def work(self) -> int:
        """A measure of the arithmetic of an update, where it multiplies matrices."""
        shape = self.parameter.shape
        return math.prod(shape) * (min(shape) if len(shape) > 1 else 1)

    def parts(self) -> list[torch.Tensor]:
        """This rank's parts of the parameter, its gradient and the states that lie as it does."""
        device = self.grad.device
        lying = [
            _torch.dtensor.local_of(value).to(device) for value in self.state.values() if isinstance(value, DTensor)
        ]
        return [_torch.dtensor.local_of(self.parameter), self.grad, *lying]

    def forms(self, place: int) -> list[Form]:
        """What the owner sends to a place: its part of the parameter and of the states."""
        shape = self.regions[place].shape
        states = [Form(shape, e.form.dtype) if e.kind == "lies" else e.form for e in self.entries]
        return [Form(shape, self.parameter.dtype), *states]

    def slices(self, place: int) -> tuple[slice, ...]:
        """Where the part of a place is in the whole."""
        return self.regions[place].within(whole_region(self.parameter.shape))


def step_by_owners(optimizer: Optimizer, twin: Optimizer, stores: Iterable[GradientStore]) -> None:
    """Updates every parameter of a compiled model by itself, and leaves the others to the twin.

    Args:
        stores: those that may have some of the optimizer's parameters.

    Raises:
        RuntimeError: on every rank, where a step fails, or does more than update each parameter by itself.
    """
    lists: list[list[Any]] = [group["params"] for group in optimizer.param_groups]
    alone = _step_alone(optimizer)
    for store in stores:
        ids = set(map(id, store.parameters.values()))
        parameters = [(i, p) for i, some in enumerate(lists) for p in some if id(p) in ids]
        if not parameters:
            continue
        lists = [[p for p in some if id(p) not in ids] for some in lists]
        if store.offloads_states:
            lay_in_host(optimizer)
        mesh = _Mesh(store)
        items = [mesh.item(optimizer, i, p) for i, p in parameters if p.grad is not None]
        torch.autograd.graph.increment_version([item.parameter for item in items])
        for batch in in_batches(items, lambda item: item.parameter.nbytes, BATCH_BYTES * mesh.size):
            mesh.step(optimizer, batch, alone)
        if store.offloads_states:
            wait_for_host(optimizer)
    fill(twin, optimizer, optimizer.state, lists)


class _Mesh:
    """The ranks among which parameters are shared out."""

    def __init__(self, store: GradientStore) -> None:
        self.store, self.shape = store, tuple(store.mesh.shape)
        self.places = list(product(*map(range, self.shape)))
        self.communicator, self.axis = communicator_of(store.group(range(len(self.shape))))
        self.size, self.here = len(self.places), self.communicator.index(self.axis)

    def item(self, optimizer: Optimizer, group: int, parameter: DTensor) -> _Item:
        """A parameter with what its update depends on."""
        grad = gradient_of(parameter)
        assert grad is not None
        layout, shape = from_dtensor_placements(parameter.placements), tuple(parameter.shape)
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
        offloaded = self.store.offloads_states
        return _Item(parameter, group, grad, state, offloaded, regions, sources, entries=_entries(state, shape))

    def step(self, optimizer: Optimizer, items: Sequence[_Item], alone: Optimizer | None) -> None:
        """Updates some parameters; ``alone`` is what a step on none has made of the optimizer."""
        load = [0] * self.size
        for item in sorted(items, key=lambda item: -item.work):
            item.owner = load.index(min(load))
            load[item.owner] += item.work
        wholes = self._gather(items)
        owned = [item for item in items if item.owner == self.here]
        error: Exception | None = None
        states: list[dict[Any, Any]] = []
        entries: list[tuple[_Entry, ...]] = []
        try:
            states = _update(optimizer, owned, wholes, alone)
            entries = [_entries(state, item.parameter.shape) for state, item in zip(states, owned, strict=True)]
            for item, changed in zip(owned, entries, strict=True):
                _require_same(optimizer, item, changed)
        except Exception as caught:  # noqa: BLE001 - raised on every rank, where they speak with each other next
            error = caught
        if not all(item.entries for item in items):  # a first step makes states; their owner says which
            self._agree(items, error, entries)
        parts = self._scatter(items, wholes, states, error is not None)
        if parts is None:
            self._agree(items, error, entries)
        for item, (value, *values) in zip(items, parts or (), strict=True):
            _torch.dtensor.local_of(item.parameter).copy_(value)
            for entry, state in zip(item.entries, values, strict=True):
                entry.put(item, state)

    def _agree(self, items: Sequence[_Item], error: Exception | None, entries: list[tuple[_Entry, ...]]) -> None:
        """Tells all ranks which states each parameter has now; raises on all of them where one could not step."""
        told: list[Any] = [(error and f"{type(error).__name__}: {error}", entries)] * self.size
        if self.size > 1:
            dist.all_gather_object(told, told[0], group=whole_group(self.store.prefix))
        failed = next((text for text, _ in told if text is not None), None)
        if failed is not None:
            raise RuntimeError(f"optimizer.step() failed on the rank that updates a parameter: {failed}") from error
        rest = [iter(some) for _, some in told]
        for item in items:
            entries_of_owner = next(rest[item.owner])
            item.entries = item.entries or entries_of_owner

    def _gather(self, items: Sequence[_Item]) -> list[list[torch.Tensor]]:
        """For each parameter that this rank owns: the parameter, its gradient and what lies like it, whole."""
        outgoing: list[list[torch.Tensor]] = [[] for _ in self.places]
        forms: list[list[Form]] = [[] for _ in self.places]
        wholes: list[list[torch.Tensor]] = []
        places: list[tuple[torch.Tensor, int]] = []  # where what comes goes, and from which place it comes
        for item in items:
            parts = item.parts()
            if self.here in item.sources[item.owner]:
                outgoing[item.owner] += parts
            if item.owner == self.here:
                wholes.append([part.new_empty(item.parameter.shape) for part in parts])
                for i in item.sources[self.here]:
                    forms[i] += [Form(item.regions[i].shape, part.dtype) for part in parts]
                    places += [(whole[item.slices(i)], i) for whole in wholes[-1]]
        pieces = [iter(some) for some in self._exchange(outgoing, forms)]
        for place, source in places:
            place.copy_(next(pieces[source]))
        return wholes

    def _scatter(
        self, items: Sequence[_Item], wholes: list[list[torch.Tensor]], states: list[dict[Any, Any]], failed: bool
    ) -> list[list[torch.Tensor]] | None:
        """Sends what owners have made to where it lies; returns each item's part and states, or None where a rank
        says, in front of what it sends, that it has failed."""
        device = self.store.mesh.device_type
        outgoing = [[torch.full((1,), failed, dtype=torch.uint8, device=device)] for _ in self.places]
        forms = [[Form((1,), torch.uint8)] for _ in self.places]
        results = iter(zip(wholes, states, strict=not failed))
        for item in items:
            forms[item.owner] += item.forms(self.here)
            if item.owner != self.here:
                continue
            if failed:  # what is sent is not read
                for i, some in enumerate(outgoing):
                    size = sum(form.bytes for form in item.forms(i))
                    some.append(torch.zeros(size, dtype=torch.uint8, device=device))
                continue
            (whole, *_), state = next(results)
            values = [(entry.kind, entry.as_sent(state[entry.name], whole.device)) for entry in item.entries]
            for i, some in enumerate(outgoing):
                cut = item.slices(i)
                some += [value[cut] if kind == "lies" else value for kind, value in [("lies", whole), *values]]
        came = self._exchange(outgoing, forms)
        if torch.cat([flag for flag, *_ in came]).any():
            return None
        rest = [iter(some) for _, *some in came]
        return [[next(rest[item.owner]) for _ in item.forms(self.here)] for item in items]

    def _exchange(
        self, outgoing: Sequence[Sequence[torch.Tensor]], forms: Sequence[Sequence[Form]]
    ) -> list[list[torch.Tensor]]:
        """Sends some tensors to each rank, as one message; returns those that came from each, in these forms."""
        counts = [sum(t.nbytes for t in some) for some in outgoing]
        sizes = [sum(form.bytes for form in some) for some in forms]
        empty = torch.empty(0, dtype=torch.uint8, device=self.store.mesh.device_type)
        packed = pack([empty, *(t for some in outgoing for t in some)])
        came = self.communicator.all_to_all_rows(packed, counts, sizes, self.axis).split(sizes)
        return [unpack(part, some) for part, some in zip(came, forms, strict=True)]


def _step_alone(optimizer: Optimizer) -> Optimizer | None:
    """What a step makes of an optimizer that has no parameters; None for torch's, which do nothing then.

    Such a step is what a rank runs that updates no parameter, and what counts the steps in a group's options, or in
    states that belong to no parameter.
    """
    if is_torchs(step_of(type(optimizer))):
        return None
    try:
        return step_on(optimizer, _free_states(optimizer), [[] for _ in optimizer.param_groups])
    except Exception as error:
        raise RuntimeError(
            f"{type(optimizer).__name__} is registered per='parameter', but its step fails where there is none to "
            f"update ({type(error).__name__}: {error})\nWhat to change: leave it unregistered."
        ) from error


def _free_states(optimizer: Optimizer) -> defaultdict[Any, Any]:
    """A copy of the states that belong to no parameter, as a step's number under a name may."""
    _, free, *_ = _values_of_all(optimizer)
    return defaultdict(dict, copy.deepcopy(free))


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators that a step on a device may draw from."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _require_undrawn(optimizer: Optimizer, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    """Raises RuntimeError where a step has drawn random numbers: in one process, parameter after parameter does."""
    if not all(map(torch.equal, before, after)):
        raise RuntimeError(
            f"{type(optimizer).__name__} is registered per='parameter', but draws random numbers, which then depend on "
            "the rank that updates a parameter\nWhat to change: leave it unregistered."
        )


def _require_alone(optimizer: Optimizer, alone: Optimizer) -> None:
    """Raises RuntimeError where a step on some parameters has set something else than one on none."""
    for some, others in zip(_values_of_all(optimizer), _values_of_all(alone), strict=True):
        for name, value in some.items():
            if name not in others or not are_same(value, others[name], _is_equal):
                raise RuntimeError(
                    f"{type(optimizer).__name__} is registered per='parameter', but has set {name!r}, which it has for "
                    "several parameters, by those that it updated\nWhat to change: leave it unregistered."
                )


def _is_equal(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return a is b or bool(torch.equal(a, b) if both else a == b)


def _values_of_all(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """What an optimizer has for several parameters: attributes, states that belong to none, options of groups."""
    free = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return [attributes_of(optimizer), free, *map(numbers_in, optimizer.param_groups)]


def _update(
    optimizer: Optimizer, items: Sequence[_Item], wholes: list[list[torch.Tensor]], alone: Optimizer | None
) -> list[dict[Any, Any]]:
    """Runs the optimizer's step on whole parameters; returns their states."""
    state = _free_states(optimizer)
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
        drawn = _random_states(wholes[0][0].device)
        stepped = step_on(optimizer, state, lists)
        if alone is not None:
            _require_alone(stepped, alone)
            _require_undrawn(optimizer, drawn, _random_states(wholes[0][0].device))
    return [state[whole] for whole, *_ in wholes]


def _entries(state: dict[Any, Any], shape: Sequence[int]) -> tuple[_Entry, ...]:
    return tuple(_Entry.of_state(name, value, shape) for name, value in state.items())


def _require_same(optimizer: Optimizer, item: _Item, entries: tuple[_Entry, ...]) -> None:
    """Raises RuntimeError where a step after the first makes other states."""
    if item.entries and entries != item.entries:
        raise RuntimeError(
            f"{type(optimizer).__name__}, which is registered per='parameter', has changed which states a "
            f"parameter of shape {list(item.parameter.shape)} has after its first step, from "
            f"{_names(item.entries)} to {_names(entries)}: make all of them in the first step"
        )


def _names(entries: Iterable[_Entry]) -> str:
    kinds = {"number": " number", "none": " None"}
    return ", ".join(f"{e.name}{kinds.get(e.kind, '')} {list(e.form.shape)}" for e in entries) or "none"
