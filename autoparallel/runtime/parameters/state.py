"""Parameters at rest: made into ``DTensor``s, laid out, materialised, loaded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.comm.communicator import as_bytes
from autoparallel.comm.world import elsewhere
from autoparallel.graph.garbage import FEW, collected_rarely
from autoparallel.graph.plain_tensors import REPLACED, note_replaced, refused_plain
from autoparallel.placements import Layout, to_dtensor_placements
from autoparallel.runtime.parameters.holders import hand_over
from autoparallel.runtime.parameters.hooks import move_hooks, require_own_hooks
from autoparallel.runtime.parameters.initial_values import find_units, set_already
from autoparallel.runtime.parameters.slices import as_parameter, gradient_as, local_slice, place_of

T = TypeVar("T")


def slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every place where a parameter is registered; a tied parameter has several."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def require_on_device(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raises when a parameter or buffer is neither on the mesh's kind of device nor on the meta device, or in a place
    that nothing can take over, or has gradients of another dtype."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} is a DTensor already: give compile() the plain model, before fully_shard, "
                "parallelize_module or another compile(); one that has changed since then is compiled from a copy "
                "(with model.whole() as plain: new = copy.deepcopy(plain)); models that share a module are compiled as "
                "one that holds them all, and says in its forward which of them runs"
            )
        if tensor in REPLACED:
            raise ValueError(
                f"{name} is a parameter of a model that is compiled already, which trains another tensor in its place\n"
                "What to change: compile models that share a parameter as one that holds them all, and says in its "
                "forward which of them runs."
            )
        if not tensor.is_meta and (problem := elsewhere(tensor, mesh, "the model")):
            raise ValueError(f"{name} {problem}")
        require_own_hooks(name, tensor)
        if tensor.is_leaf and tensor.grad_dtype not in (None, tensor.dtype):  # no other tensor has one
            raise ValueError(
                f"{name}.grad_dtype is {tensor.grad_dtype}, but gradients have the dtype of their parameters (what "
                "accumulates is in float32 or wider)\nWhat to change: leave grad_dtype as it is, or keep the parameter "
                "in that dtype and pass precision=MixedPrecisionPolicy(param_dtype=...)."
            )


@collected_rarely(FEW)  # the first of them imports Dynamo, of which nothing is garbage
def make_dtensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces every parameter by a ``DTensor`` that is whole on every rank, for optimizers that hold it, too."""
    plain = dict(model.named_parameters())
    replacements = {id(parameter): _replace(name, parameter, mesh) for name, parameter in plain.items()}
    for module, name, parameter in slots(model):
        module._parameters[name] = replacements[id(parameter)]
        del parameter  # so that nobody counts as one who holds it
    hand_over([plain.popitem()[1] for _ in range(len(plain))])


def _replace(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """What takes a plain parameter's place, with its gradient and its hooks."""
    new = _remade(parameter, _torch.dtensor.replicated(parameter.detach(), mesh))
    if parameter.grad is not None:
        new.grad = as_parameter(parameter.grad.detach().to_dense(), new)
    move_hooks(parameter, new)
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(partial(_refuse_gradient, name))
    note_replaced(parameter, new, name)
    return new


def _refuse_gradient(name: str, parameter: torch.Tensor) -> None:
    """Raises for a gradient of a plain parameter: nobody trains it any more."""
    raise refused_plain(f"a gradient comes to the plain parameter {name}")


def _remade(parameter: nn.Parameter, value: DTensor) -> nn.Parameter:
    """A parameter with a value, in all else as another is, but for its gradient and its hooks."""
    new = _torch.dtensor.become_parameter(value, parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def copy_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter at rest that lies as another does and has its values, without its gradient and its hooks."""
    new = _remade(parameter, as_parameter(_torch.dtensor.local_of(parameter).detach().clone(), parameter))
    move_hooks(new, new)
    return new


def broadcast(tensors: Sequence[torch.Tensor], ranks: Sequence[int], group: Any, source: int = 0) -> None:
    """Gives every rank the values of one of them, a few large messages for many tensors.

    Args:
        ranks: the group's, in the order of the mesh.
        source: which of them has the values, as an index.
    """
    if len(ranks) == 1:
        return
    with torch.no_grad():
        for alike in _torch.tensors.by_dtype(tensors):
            for batch in in_batches(alike, torch.Tensor.numel, 1 << 24):
                flat = torch.cat([t.reshape(-1) for t in batch])
                dist.broadcast(as_bytes(flat), src=ranks[source], group=group)
                for t, part in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                    t.copy_(part.view_as(t))


def in_batches(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in their order, as many together as do not exceed a size; one that exceeds it alone stands alone."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and total + size > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def lay_out(parameter: nn.Parameter, layout: Layout, mesh: DeviceMesh) -> None:
    """Changes a whole parameter's layout in place, so that optimizers that hold it stay valid."""
    placements = to_dtensor_placements(layout)
    before = _torch.dtensor.spec_of(parameter)  # type: ignore[arg-type]
    if before.placements == placements and before.mesh == mesh:
        return
    grad, parameter.grad = parameter.grad, None  # of a penalty that came before
    with torch.no_grad():
        local = local_slice(_torch.dtensor.local_of(parameter).detach(), layout, mesh)
    _swap(parameter, _remade(parameter, _torch.dtensor.from_part(local, mesh, placements, parameter.shape)))
    if grad is not None:
        local = gradient_as(grad, _torch.dtensor.spec_of(parameter))  # type: ignore[arg-type]
        parameter.grad = as_parameter(local, parameter)


_OLD = (
    "a view of %s was made before the model's first call and has the values of then: the plan has given the parameter "
    "other memory\nWhat to change: make it after the first call, or after model.prepare(...)."
)


@contextmanager
def aliases_kept(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside, parameters are laid out; what shares the memory of one, as ``state_dict()`` and ``p.data`` do, shares it
    afterwards, too; what shares a part of it, as ``p[0]`` does, raises RuntimeError when it is read."""
    names: dict[int, list[str]] = {}  # by storage: parameters may lie in one
    places = {name: place_of(p) for name, p in parameters.items()}
    for name, (storage, *_) in places.items():
        names.setdefault(storage, []).append(name)
    references = (_torch.tensors.count_references(_torch.dtensor.local_of(parameters[of[0]])) for of in names.values())
    if all(number <= len(of) for number, of in zip(references, names.values(), strict=True)):
        yield  # nothing else lies there; looking through all that Python holds takes a tenth of a second
        return
    others = (x for x in gc.get_objects() if type(x) is DTensor and not isinstance(x, nn.Parameter))
    aliases = [(place, x) for x in others if (place := place_of(x))[0] in names]
    yield
    for place, alias in aliases:
        same = next((name for name in names[place[0]] if places[name] == place), None)
        if same is not None:
            _torch.dtensor.become(alias, parameters[same].detach())  # type: ignore[arg-type]
        elif any(place_of(parameters[name])[0] != place[0] for name in names[place[0]]):
            _torch.dtensor.make_unreadable(alias, _OLD % names[place[0]][0])


_TRAINED: weakref.WeakKeyDictionary[object, Mapping[str, nn.Parameter]] = weakref.WeakKeyDictionary()
"""The parameters of all compiled models, by who has them."""


def note_parameters(owner: object, parameters: Mapping[str, nn.Parameter]) -> None:
    """Notes the parameters of a compiled model, as long as their owner lives."""
    _TRAINED[owner] = parameters


def shares_parameter(tensor: torch.Tensor, target: torch.Tensor | None) -> bool:
    """Whether a ``DTensor`` is, or lies in the memory of, a parameter of a compiled model other than ``target``."""
    local = _torch.dtensor.local_of(tensor)
    if not isinstance(tensor, nn.Parameter) and _torch.tensors.count_references(local) == 1:
        return False  # nothing else lies there
    others = (x for parameters in _TRAINED.values() for x in parameters.values() if x is not target)
    return any(_overlap(local, _torch.dtensor.local_of(x)) for x in others)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, which are contiguous, have memory in common."""
    if _torch.tensors.storage_mark(a) != _torch.tensors.storage_mark(b):
        return False
    starts = a.storage_offset(), b.storage_offset()
    return starts[0] < starts[1] + b.numel() and starts[1] < starts[0] + a.numel()


def _swap(parameter: nn.Parameter, new: nn.Parameter) -> None:
    """Makes a parameter what ``new`` is; it keeps its hooks, and what it says to the engine about them."""
    require_own_hooks("it", parameter)
    is_in_a_graph = _torch.autograd.is_in_a_graph(parameter)  # which nobody may go through any more
    handle = _torch.autograd.refuse_backward(parameter, _refuse_earlier) if is_in_a_graph else None
    try:
        _torch.tensors.swap_tensors(parameter, new)
    except RuntimeError as error:  # of torch, which counts who else refers to it
        if handle is not None:
            handle.remove()
        raise RuntimeError(_EARLIER) from error
    move_hooks(parameter, parameter)


_EARLIER = (
    "a graph that was made of it before has not had its backward\n"
    "What to change: compute what the loop makes of parameters (a penalty) after the model's first call, or plan "
    "before with model.prepare(...)."
)


def _refuse_earlier(_: Any) -> None:
    raise RuntimeError(f"a parameter has been given its layout by the model's first call, and {_EARLIER}")


def materialize(
    model: nn.Module, layouts: Mapping[str, Layout], mesh: DeviceMesh, group: Any, homes: Mapping[str, DeviceMesh]
) -> None:
    """Gives meta parameters and buffers values, one unit at a time, and keeps this rank's part of each.

    Args:
        mesh, group: all ranks.
        homes: the mesh that each parameter lies on; a rank outside of it keeps nothing.

    The first rank's random numbers are used, and drawn as when the modules are made; no rank ever holds more whole
    parameters than those of one unit (see ``initial_values``).  A tied weight keeps the values of the module that comes
    first.

    Raises:
        RuntimeError: naming a module that has meta tensors but nothing that sets them.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    units = find_units(model)
    for unit in units:
        with set_already(model):
            values, buffers = unit.values(torch.device(mesh.device_type))
        broadcast([*values.values(), *buffers], mesh.mesh.flatten().tolist(), group)
        for p, value in values.items():
            if not _torch.dtensor.local_of(p).is_meta:
                continue  # tied, and done already
            layout, home = layouts[names[id(p)]], homes[names[id(p)]]
            local = local_slice(value, layout, home)
            _swap(p, _remade(p, _torch.dtensor.from_part(local, home, to_dtensor_placements(layout), p.shape)))
