"""Full parameters for a while: as the plain model on every rank, or as a stream.

Parameters are gathered a bucket at a time, so that no more than one bucket is under way beside what the caller keeps.
In a pipeline the ranks that hold a parameter gather it, and send it to those of the other stages.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.comm.groups import settle
from autoparallel.comm.world import PIPELINE_AXIS
from autoparallel.placements import Layout, Replicate, from_dtensor_placements
from autoparallel.placements.redistribution import BUCKET_BYTES, Step
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.parameters.parts import make_again
from autoparallel.runtime.parameters.slices import lies_elsewhere, part_like
from autoparallel.runtime.parameters.state import broadcast, in_batches, slots


def full_parameters(
    store: GradientStore, mesh: DeviceMesh, owners: Mapping[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, whole, by name; one that lies whole is given as it is, the others as tensors of their own.

    Args:
        mesh: all ranks.
        owners: in a pipeline, the rank on its axis on which each parameter lies.
    """
    names = list(store.parameters)
    for _, same in groupby(names, lambda name: _way(store, name, owners)):
        for bucket in in_batches(same, lambda name: store.parameters[name].nbytes, BUCKET_BYTES):
            values = _gather(store, bucket)
            if owners:
                settle(store.prefix)
                group, ranks = mesh.get_group(PIPELINE_AXIS), mesh[PIPELINE_AXIS].mesh.flatten().tolist()
                broadcast(values, ranks, group, owners[bucket[0]])
            yield from zip(bucket, values, strict=True)


def _way(store: GradientStore, name: str, owners: Mapping[str, int]) -> Any:
    """What parameters must share to travel in one bucket."""
    parameter = store.parameters[name]
    return parameter.dtype, owners.get(name), [step.axes for step in _path(store, parameter)]


def _layout(parameter: torch.Tensor) -> Layout:
    assert isinstance(parameter, DTensor)
    return from_dtensor_placements(parameter.placements)


def _path(store: GradientStore, parameter: torch.Tensor) -> list[Step]:
    """The steps from rest to the whole."""
    layout = _layout(parameter)
    return store.path(tuple(parameter.shape), layout, tuple(Replicate if p.kind == "S" else p for p in layout))


def _gather(store: GradientStore, names: Sequence[str]) -> list[torch.Tensor]:
    """The whole values of parameters that go the same way; room for them where they lie on other stages' ranks."""
    parameters = [store.parameters[name] for name in names]
    if lies_elsewhere(parameters[0]):
        return [torch.empty(p.shape, dtype=p.dtype, device=_torch.dtensor.local_of(p).device) for p in parameters]
    local = [_torch.dtensor.local_of(p).detach() for p in parameters]
    return store.start(local, [_path(store, p) for p in parameters])()


class WholeModel:
    """The plain model with full parameters, while somebody needs it.

    Args:
        plain: the model.
        store: its parameters.

    Attributes:
        entered: whether the parameters are full now.
    """

    def __init__(self, plain: nn.Module, store: GradientStore) -> None:
        self.plain, self.store, self.entered = plain, store, False

    @contextlib.contextmanager
    def __call__(self, parameters: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> Iterator[nn.Module]:
        """See ``ParallelModule.whole``; ``parameters`` makes the stream of full parameters."""
        if self.entered:
            yield self.plain
            return
        full: dict[int, nn.Parameter] = {}
        names = {id(parameter): name for name, parameter in self.store.parameters.items()}
        with torch.no_grad(), torch.inference_mode(False):
            for name, value in parameters():
                parameter = self.store.parameters[name]
                full[id(parameter)] = _lent(value, parameter.requires_grad)
        places, steps = list(slots(self.plain)), self.store.steps
        for module, name, parameter in places:
            module._parameters[name] = full[id(parameter)]
        self.entered = True
        try:
            with _without_graphs(self.plain):
                yield self.plain
        finally:
            self.entered = False
            replaced = [
                names[id(p)]
                for m, n, p in places
                if m._parameters.get(n) is not full[id(p)] or _differs(full[id(p)], p)
            ]
            for module, name, parameter in places:
                module._parameters[name] = parameter
        if replaced or self.store.steps != steps:
            what = f"{replaced[0]} was replaced" if replaced else "an optimizer has made a step"
            raise RuntimeError(
                f"{what} inside of model.whole(), so that its parameters cannot be taken back: change them in place "
                "there, under torch.no_grad(), and train outside; nothing of what was changed inside is kept"
            )
        with torch.no_grad():
            for _, _, parameter in places:
                _take_back(parameter, full[id(parameter)])
                make_again(parameter, full[id(parameter)].detach())  # type: ignore[arg-type]


@contextlib.contextmanager
def _without_graphs(model: nn.Module) -> Iterator[None]:
    """Inside, what calls keep in attributes has no graph, with which nothing is copied or saved."""
    tables = [table for module in model.modules() for table in (vars(module), module._buffers)]
    held = [(table, name, x) for table in tables for name, x in table.items() if isinstance(x, torch.Tensor)]
    tensors = [(table, name, x, x.detach()) for table, name, x in held if x.grad_fn is not None]
    for table, name, _, twin in tensors:
        table[name] = twin
    try:
        yield
    finally:
        for table, name, tensor, twin in tensors:
            if table.get(name) is twin:
                table[name] = tensor


def _lent(value: torch.Tensor, is_trained: bool) -> nn.Parameter:
    """A full parameter, which nobody trains; one that is copied or saved is trained as the model's is."""
    parameter = nn.Parameter(value, requires_grad=False)
    reference = weakref.ref(parameter)  # else it would live until somebody looks for garbage

    def copied(memo: dict[int, Any]) -> nn.Parameter:
        parameter = reference()
        assert parameter is not None
        return memo.setdefault(id(parameter), nn.Parameter(parameter.detach().clone(), is_trained))

    def reduced(_: int) -> tuple[Any, ...]:
        parameter = reference()
        assert parameter is not None
        return nn.Parameter, (parameter.detach(), is_trained)

    parameter.__deepcopy__, parameter.__reduce_ex__ = copied, reduced  # type: ignore[method-assign]
    return parameter


def _differs(full: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a full parameter has become something else than the parameter is."""
    device = _torch.dtensor.local_of(parameter).device
    return (full.dtype, full.shape, full.device) != (parameter.dtype, parameter.shape, device)


def _take_back(parameter: nn.Parameter, full: torch.Tensor) -> None:
    """Gives this rank's part of a parameter the values of the full one."""
    local = _torch.dtensor.local_of(parameter).detach()
    part = part_like(full.detach(), parameter)  # type: ignore[arg-type]
    if part.data_ptr() != local.data_ptr():
        local.copy_(part)
