"""An optimizer's step on the tensors that lie on this rank.

[Note: a step on a twin] ``DTensor``s pay dispatch for every operator and parameter, and miss some operators.  So the
step that torch or the user wrote runs with a twin in place of the optimizer: an object of the same class with the same
attributes, whose groups hold this rank's plain tensors and whose states are by these.  It is handed to ``step`` as its
``self`` by a hook, after all other hooks that come before a step, and what it has made is taken back before all hooks
that come after one.  The optimizer itself always holds ``DTensor``s, also where the step raises.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from operator import is_
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoparallel import _torch
from autoparallel._torch.optim import FILLER, STEP_HOOKS
from autoparallel.comm.collectives import settled
from autoparallel.runtime.dtensors.writes import assignments
from autoparallel.runtime.parameters.slices import as_parameter, gradient_as, lay_like

O = TypeVar("O", bound=type[Optimizer])  # noqa: E741
Part = Literal["element", "parameter"]

Numbers = frozenset[tuple[Any, int]]
"""The names and dims of states that are one number whatever their parameter is."""

NUMBERS: Numbers = frozenset({("step", 0), ("eta", 0), ("mu", 0), ("mu_product", 0)})
"""Those of torch's optimizers."""

BATCH_BYTES = 64 << 20
"""Of the parameters, as much as a rank has of them, that are updated at a time, where not all are at once."""

_KNOWN: dict[Any, Part] = {}


def register_optimizer(kind: O, *, per: Part) -> O:
    """Says of an optimizer of your own how its step may be cut; ``torch.optim``'s are known.

    Args:
        kind: the class.  Its ``step`` reads ``self.param_groups``, ``.grad`` and ``self.state[parameter]``, and changes
            parameters in place.
        per: ``"element"`` where an element's update depends on that element's value, gradient and states alone, and
            states are as large as the parameter or one number: each rank updates what it has, in plain tensors.  It
            is tried once for each optimizer, on small tensors as a whole and in parts.
            ``"parameter"`` where it depends on the whole parameter's, but on no other parameter: each parameter is
            updated by one rank, which is sent what it needs.  Its states are tensors and numbers, all of them made by
            its first step on a gradient.

    Returns:
        The class, so that it can be used as a decorator with ``functools.partial``.

    Raises:
        TypeError: for what is not a class of optimizers.
        ValueError: for another ``per``.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"register_optimizer() takes a class of torch.optim.Optimizer, got {kind!r}")
    if per not in ("element", "parameter"):
        raise ValueError(f"per must be 'element' or 'parameter', got {per!r}")
    _KNOWN[step_of(kind)] = per
    return kind


def part_of(optimizer: Optimizer) -> Part | None:
    """What an optimizer's step may be cut into; None where nothing is known, and torch steps on ``DTensor``s."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    return _KNOWN.get(step_of(type(optimizer)))


def step_of(kind: type[Optimizer]) -> Any:
    """The function that a class's ``step`` is, without what torch puts around it; a subclass may share it."""
    return _unwrapped(kind.step)


_unwrapped = lru_cache(inspect.unwrap)


def _is_torchs(function: Any) -> bool:
    """Whether a function is one of ``torch.optim``."""
    return str(getattr(function, "__module__", "")).startswith("torch.optim.")


for _name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop"):
    register_optimizer(getattr(torch.optim, _name), per="element")
for _name in ("Muon", "Adafactor"):
    register_optimizer(getattr(torch.optim, _name), per="parameter")


def twin_of(optimizer: Optimizer) -> Optimizer:
    """See [Note: a step on a twin]; without parameters and states."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    _torch.optim.drop_step_hooks(twin)
    for name in ("grad_scale", "found_inf"):
        value = getattr(twin, name, None)
        if isinstance(value, DTensor):
            setattr(twin, name, value.full_tensor())
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    return twin


def fill(twin: Optimizer, optimizer: Optimizer, state: Any, lists: Iterable[list[torch.Tensor]]) -> None:
    """Gives a twin what it steps on, after the closure that may change a group or lay parameters out; ``lists`` are the
    parameters of each group."""
    twin.state = state
    for group, options, parameters in zip(twin.param_groups, optimizer.param_groups, lists, strict=True):
        group.update(options, params=parameters)


def step_on(optimizer: Optimizer, state: Any, lists: Iterable[list[torch.Tensor]]) -> None:
    """Steps on other tensors than the optimizer's own; the arguments are those of :func:`fill`."""
    twin = twin_of(optimizer)
    fill(twin, optimizer, state, lists)
    step_of(type(optimizer))(twin)


def take_back(optimizer: Optimizer, twin: Optimizer) -> None:
    """Gives the optimizer what a step has set on its twin, beside states and parameters."""
    attributes = optimizer.__dict__
    for name, value in twin.__dict__.items():
        if name not in _OF_TWINS and attributes.get(name, _OF_TWINS) is not value:
            attributes[name] = value
    for group, stepped in zip(optimizer.param_groups, twin.param_groups, strict=True):
        group.update((key, value) for key, value in stepped.items() if key != "params")


_OF_TWINS = frozenset({"state", "param_groups", "grad_scale", "found_inf", FILLER, *STEP_HOOKS})


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient as the parameter lies, this rank's part of it (see ``gradient_as``)."""
    grad = parameter.grad
    if grad is None or not isinstance(parameter, DTensor):
        return grad
    return settled(gradient_as(grad, _torch.dtensor.spec_of(parameter)))


def lies_as(value: Any, name: Any, shape: Sequence[int], numbers: Numbers = NUMBERS) -> bool:
    """Whether a state is one of elements that belong to those of a parameter (or of its part) of a shape."""
    return isinstance(value, torch.Tensor) and value.shape == shape and (name, value.ndim) not in numbers


def numbers_of(optimizer: Optimizer) -> Numbers:
    """The states of an optimizer that are one number. Raises RuntimeError as :func:`try_elements` does."""
    return NUMBERS if _is_torchs(step_of(type(optimizer))) else try_elements(optimizer)


def try_elements(optimizer: Optimizer) -> Numbers:
    """Steps on small tensors, as a whole and in two parts, to see that elements are updated by themselves.

    Returns:
        The states that are one number.

    Raises:
        RuntimeError: where a part is not updated as in the whole.
    """
    numbers: set[tuple[Any, int]] = set()
    for group in optimizer.param_groups:
        if group["params"]:
            like = _torch.dtensor.local_of(group["params"][0])
            value = torch.arange(1, 9, dtype=like.dtype, device=like.device).reshape(4, 2)
            size = torch.tensor([[1.0], [-1.0], [50.0], [100.0]], dtype=like.dtype, device=like.device)
            runs = [(value / 4)[i:j].clone() for i, j in ((0, 4), (0, 2), (2, 4))]
            grads = [(value.flip(0) * size)[i:j] for i, j in ((0, 4), (0, 2), (2, 4))]
            states = [_try(optimizer, group, *run) for run in zip(runs, grads, strict=True)]
            values: dict[Any, list[Any]] = {"parameter": runs, **{n: [s.get(n) for s in states] for n in states[0]}}
            for name, (whole, *parts) in values.items():
                if lies_as(whole, name, (4, 2)) and all(lies_as(x, name, (2, 2)) for x in parts):
                    parts = [torch.cat(parts)]
                elif isinstance(whole, torch.Tensor):
                    numbers.add((name, whole.ndim))
                if not all(_are_close(whole, part) for part in parts):
                    raise RuntimeError(
                        f"{type(optimizer).__name__} is registered per='element', but has updated elements otherwise "
                        f"together than apart (its {name!r}): register it per='parameter', or not at all, where it "
                        "depends on several parameters or on random numbers"
                    )
    return frozenset(numbers)


def _try(optimizer: Optimizer, group: dict[str, Any], value: torch.Tensor, grad: torch.Tensor) -> dict[Any, Any]:
    """The states of a small tensor after two steps that change it."""
    twin = twin_of(optimizer)
    options = copy.deepcopy({name: x for name, x in group.items() if name != "params"})
    if isinstance(options.get("lr"), float):
        options["lr"] = 0.1  # it may start at 0
    twin.param_groups = [{**options, "params": [value]}]
    for _ in range(2):
        value.grad = grad.clone()
        step_of(type(optimizer))(twin)
    states: dict[Any, Any] = twin.state[value]
    return states


def _are_close(a: Any, b: Any) -> bool:
    try:
        torch.testing.assert_close(a, b)
    except AssertionError:
        return False
    return True


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
        is_torchs = _is_torchs(step_of(kind))
        self._numbers = numbers_of(optimizer)
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._outer: list[Any] = []  # the objects in the optimizer's state after its last step, and in the plain one
        self._inner: list[Any] = []
        self._keeps_lists = is_torchs and len(sharded) == len(self._locals) and _is_torchs(_torch.optim.filler_of(kind))
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
