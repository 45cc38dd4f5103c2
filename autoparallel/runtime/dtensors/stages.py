"""Tensors that lie on one stage of a pipeline, and numbers of them, which the ranks of the others are sent.

The stages of a pipeline are several meshes, and torch computes nothing on the ranks that are not on a tensor's.  So a
number of one stage's tensors (a penalty, a weight that is trained) that meets a loss, or a number of another stage, is
sent to all ranks of the pipeline, and what comes of it lies on all of them; one that meets more than a number is sent
to where that lies.  Its gradient goes back the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.checkpoint.folder import bytes_of
from autoparallel.runtime.parameters.slices import lies_elsewhere
from autoparallel.runtime.ranks.agreement import agree_on, agreement_of, digest

_STAGES: dict[DeviceMesh, set[DeviceMesh]] = {}
"""The meshes of the stages of pipelines, and those of the pipelines that they are of."""


def note_stages(pipeline: DeviceMesh, stages: Iterable[DeviceMesh]) -> None:
    """Notes the meshes of a pipeline's stages, on which the tensors of lists lie apart; the ranks of a stage agree
    among themselves on what they do with its tensors, because others may have none (``if p.grad is not None``)."""
    for stage in stages:
        _STAGES.setdefault(stage, set()).add(pipeline)
        if stage.get_coordinate() is not None:
            agreement_of(stage)


def is_any_stage(meshes: Iterable[DeviceMesh | None]) -> bool:
    """Whether one of some meshes is that of a stage."""
    return not _STAGES.keys().isdisjoint(meshes)


def require_here(tensor: DTensor) -> None:
    """Raises RuntimeError for the whole of a tensor that lies on another stage, where torch gives an empty one."""
    if lies_elsewhere(tensor) and tensor.device_mesh in _STAGES:
        raise RuntimeError(
            f"full_tensor() of a tensor of shape {list(tensor.shape)} that lies on another stage of the pipeline, of "
            "which this rank has nothing\nWhat to change: take parameters whole from model.full_parameters(), on all "
            "ranks; what is to be differentiated is made of the DTensor, and a number of it is added to the loss."
        )


_MET = "meets a loss or what lies on others. What to change: compute it on every rank, also where p.grad is None"
_READ = (
    "is read, as by p.norm().item(). What to change: read it on every rank, and print it on one; of gradients, which "
    "are None where another stage lies, model.grad_norm(groups='parameter') knows all"
)


def number_read(number: DTensor) -> DTensor:
    """A number that Python reads, as one that all ranks have, which come here for it: a loop's own norm, added up of
    what it finds on a rank, would be another on each stage. Inside of :func:`stepping` it stays as it is.

    Raises:
        RankMismatchError: on every rank, where some do something else.
    """
    is_of_one = len(_STAGES.get(number.device_mesh, ())) == 1
    return everywhere(number, _READ) if is_of_one and not _STEPPING else number


@contextmanager
def stepping() -> Iterator[None]:
    """Inside, an optimizer steps, whose numbers are of a parameter: it leaves those out that have no gradient here."""
    _STEPPING.append(None)
    try:
        yield
    finally:
        _STEPPING.pop()


_STEPPING: list[None] = []


def everywhere(number: DTensor, use: str = _MET) -> DTensor:
    """A number as one that all ranks have: of a stage's tensor, all ranks of the pipeline come here for it.

    Args:
        use: what becomes of it, in the words of an error, with what to change.

    Raises:
        RankMismatchError: on every rank, where some do something else.
        RuntimeError: where a stage is one of several pipelines of different ranks.
    """
    stage = number.device_mesh
    if stage not in _STAGES:
        return number
    if len(_STAGES[stage]) > 1:
        raise RuntimeError(
            "a number of a tensor that lies on a stage of several pipelines meets what lies elsewhere\nWhat to change: "
            "compile models over one mesh, or compute it of what model.full_parameters() gives."
        )
    (pipeline,) = _STAGES[stage]
    agreement, ranks = agreement_of(pipeline), stage.mesh.flatten().tolist()
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    what = f"a number of a tensor on {who}, a stage of a pipeline, {use}"
    if not all(p.is_replicate() for p in number.placements):
        agree_on(pipeline, what)  # before the ranks of the stage add it up
    value = _torch.dtensor.local_of(number) if lies_elsewhere(number) else _torch.dtensor.gather(number)
    host = value.detach().resolve_conj().cpu().contiguous()
    if not host.numel():  # a vector of one element
        host = host.new_zeros(1)
    table = agreement.ask(digest(what) + bytes(bytes_of(host)), what)()
    agreement.require_same(table[:, :32], "the ranks call the model differently:", lambda: what)
    shown = table[agreement.ranks.index(ranks[0]), 32 : 32 + host.dtype.itemsize]
    return _torch.dtensor.replicated(shown.clone().view(host.dtype).view(()).to(pipeline.device_type), pipeline)


def brought(value: DTensor, mesh: DeviceMesh) -> DTensor:
    """A number as it lies on a mesh, of whose ranks each has it; more than a number as it is."""
    if value.device_mesh == mesh or value.ndim:
        return value
    value = everywhere(value)
    return value if value.device_mesh == mesh else _torch.dtensor.replicated(_torch.dtensor.gather(value), mesh)


def as_gradient(gradient: Tensor, mesh: DeviceMesh) -> DTensor:
    """The gradient of a number that lies on a mesh, where what it has met lies elsewhere, or is plain."""
    if isinstance(gradient, DTensor):
        return brought(gradient, mesh)
    if mesh.get_coordinate() is None:
        return _torch.dtensor.replicated(gradient, mesh)
    return DTensor.from_local(gradient, mesh, (Replicate(),) * mesh.ndim, run_check=False)


def meet(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], home: DeviceMesh | None = None
) -> tuple[Any, Any] | None:
    """The operands of an operator with those numbers brought together that lie on different meshes, or are to be added
    to a loss that is plain; None where nothing lies apart.

    Args:
        home: the mesh where the result lies; None for that of what is more than a number, or else that of all ranks.

    Raises:
        RuntimeError: for what is more than a number on several meshes.
    """
    if not _STAGES:
        return None
    tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
    sharded = [x for x in tensors if isinstance(x, DTensor)]
    meshes = {x.device_mesh for x in sharded}
    is_loss = torch.is_grad_enabled() and any(x.requires_grad for x in tensors if not isinstance(x, DTensor))
    if not is_any_stage(meshes) or len(meshes) == 1 and (home is not None or not is_loss):
        return None
    homes = {x.device_mesh for x in sharded if x.ndim} | ({home} if home is not None else set())
    if len(homes) > 1:
        raise RuntimeError(
            f"{operator} takes tensors of several stages of a pipeline, which no rank has all of\nWhat to change: add "
            "up a number of each, such as p.pow(2).sum(); copy a parameter after the model's first call or "
            "model.prepare(...), so that the copy lies as it does."
        )
    if len(meshes) == len(homes) or any(x.ndim for x in tensors if not isinstance(x, DTensor)):
        return None
    place = next(iter(homes), None)
    together: tuple[Any, Any] = pytree.tree_map_only(
        DTensor, lambda x: everywhere(x) if place is None else brought(x, place), (tuple(args), dict(kwargs))
    )
    return together
