"""Saving: every rank writes its part, the first rank marks the whole."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoparallel import _torch
from autoparallel.checkpoint.folder import (
    MARKER,
    CheckpointError,
    Part,
    is_written,
    new_folder,
    remove_older,
    require_room,
    size_of,
    write_marker,
    write_rank,
)
from autoparallel.checkpoint.tree import encode, optimizer_state
from autoparallel.checkpoint.writers import as_saved, is_writer, layout_of
from autoparallel.placements.regions import own_region

PATIENCE = 600.0
"""Seconds that the first rank waits for the others to have written, after a save that nobody waits for."""


class Together(Protocol):
    """The ranks, as far as saving needs them."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that makes what only one of them makes."""

    def together(self) -> AbstractContextManager[None]:
        """When something inside raises on any rank, every rank raises."""

    def of_first(self, text: str) -> str:
        """What the first rank gives, on all ranks."""


@dataclass(frozen=True)
class World:
    """Who saves and loads.

    Attributes:
        model: whose state it is.
        mesh: all ranks.
        ranks: talk to each other.
    """

    model: nn.Module
    mesh: DeviceMesh
    ranks: Together

    @property
    def number(self) -> int:
        """This rank's place among those of the mesh."""
        return self.mesh.mesh.flatten().tolist().index(dist.get_rank())

    @property
    def names(self) -> dict[int, str]:
        """The parameters' names, by their ids."""
        return {id(p): name for name, p in self.model.named_parameters()}


class Save:
    """A save that may be under way.

    Attributes:
        path: the folder.
        is_done: whether somebody has waited for it, and been told what went wrong.
    """

    def __init__(
        self, world: World, path: Path, step: int, keep: int | None, parts: Mapping[str, Part], tree: Any
    ) -> None:
        self.path = path
        self._world, self._step, self._keep, self._given_up = world, step, keep, False
        self._error: BaseException | None = None
        self._failure: BaseException | None = None
        self._written, self.is_done = threading.Event(), False
        self._thread = threading.Thread(target=self._run, args=(parts, tree), name="autoparallel save")
        self._thread.start()

    def _run(self, parts: Mapping[str, Part], tree: Any) -> None:
        try:
            write_rank(self.path, self._world.number, self._step, parts, tree)
            self._written.set()
            if self._world.ranks.is_first:
                self._mark()
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._error = error
        finally:
            self._written.set()

    def _mark(self) -> None:
        ranks, until = self._world.mesh.size(), time.monotonic() + PATIENCE
        while not all(is_written(self.path, rank) for rank in range(ranks)):
            if self._given_up or time.monotonic() > until:
                raise CheckpointError(f"{self.path} is not complete: a rank has not written its part")
            time.sleep(0.02)
        write_marker(self.path, ranks)
        if self._keep is not None:
            remove_older(self.path.parent, self._keep)

    def wait(self) -> Path:
        """Waits until the checkpoint is complete; all ranks must call it.

        Raises:
            CheckpointError: on every rank, where a rank could not write. The checkpoints before are as they were, and
                nothing of this one is left. Later calls raise it again.
        """
        if self.is_done:
            if self._failure is not None:
                raise CheckpointError(f"{self.path} was not saved: {self._failure}") from self._failure
            return self.path
        self.is_done = True
        self._written.wait()
        try:
            with self._world.ranks.together():
                self._require_written()
            self._thread.join()
            with self._world.ranks.together():
                self._require_written()
        except BaseException as error:
            self._failure, self._given_up = error, True
            self._thread.join()
            if self._world.ranks.is_first and not (self.path / MARKER).exists():
                shutil.rmtree(self.path, ignore_errors=True)  # what may have filled the disk
            raise
        return self.path

    def _require_written(self) -> None:
        if self._error is not None:
            raise CheckpointError(f"{self.path} could not be saved: {self._error}") from self._error


def save(
    world: World, path: str | Path, step: int, keep: int | None, asynchronous: bool, states: Mapping[str, Any]
) -> Save:
    """Begins a save; what is saved is the state of now.

    Raises:
        CheckpointError: on every rank, when nothing can be written there.
        TypeError, ValueError: for a state that a checkpoint cannot hold.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep is how many checkpoints stay, at least 1, got {keep}")
    ranks = world.ranks
    with ranks.together():
        parts, tree = _collect(world, states, asynchronous)
    with ranks.together():
        name = _make_folder(Path(path), step) if ranks.is_first else ""
    folder = Path(ranks.of_first(name))
    with ranks.together():
        _require_room(folder, size_of(parts.values()))
    return Save(world, folder, step, keep, parts, tree)


def _make_folder(path: Path, step: int) -> str:
    try:
        return str(new_folder(path, step))
    except OSError as error:
        raise CheckpointError(f"nothing can be saved to {path}: {error}") from error


def _require_room(folder: Path, needed: int) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not seen by every rank: save to a folder that all of them share")
    require_room(folder, needed, "a rank's part of the checkpoint")


def _collect(world: World, states: Mapping[str, Any], copied: bool) -> tuple[dict[str, Part], Any]:
    """What this rank writes: tensors by name, and the tree."""
    tensors: dict[str, Tensor] = {}
    homes: dict[str, DeviceMesh] = {}
    tree: dict[str, Any] = {"model": _encode_module(world.model, "model", tensors), "states": {}, "values": {}}
    for name, state in states.items():
        if isinstance(state, torch.optim.Optimizer):
            tree["states"][name] = _encode_optimizer(world, state, name, tensors, homes)
        elif isinstance(state, nn.Module):
            tree["states"][name] = _encode_module(state, name, tensors)
        elif hasattr(state, "state_dict"):
            tree["states"][name] = encode(state.state_dict(), name, tensors)
        else:
            tree["values"][name] = encode(state, name, tensors)
    tensors = {name: as_saved(tensor) for name, tensor in tensors.items()}
    parts = {name: p for name, t in tensors.items() if (p := _part(name, t, homes.get(name, world.mesh), copied))}
    return parts, tree


def _encode_module(module: nn.Module, what: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A module's tree; a tensor with several names is written once."""
    first: dict[int, str] = {}
    alias = {name: first.setdefault(id(tensor), name) for name, tensor in _torch.tensors.named_tensors(module)}
    state = module.state_dict()
    tree: dict[str, Any] = {}
    for name, value in state.items():
        branch = tree.get(alias.get(name, name))
        tree[name] = encode(value, f"{what}/{name}", tensors) if branch is None else branch
    return tree


def _encode_optimizer(
    world: World, optimizer: torch.optim.Optimizer, name: str, tensors: dict[str, Tensor], homes: dict[str, DeviceMesh]
) -> Any:
    """An optimizer's tree; what it holds for a parameter is said by the first of the ranks that have the parameter."""
    content = optimizer_state(optimizer, world.names)
    parameters, told = dict(world.model.named_parameters()), {}
    for parameter, state in content["state"].items():
        mesh = layout_of(parameters[parameter], world.mesh)[1]
        state_tensors: dict[str, Tensor] = {}
        data = encode(state, f"{name}/{parameter}", state_tensors)
        tensors.update(state_tensors)
        homes.update(dict.fromkeys(state_tensors, mesh))
        if mesh.get_coordinate() is not None and not any(mesh.get_coordinate() or ()):
            told[parameter] = data
    rest = {part: encode(content[part], f"{name}/{part}", tensors) for part in ("groups", "free", "more")}
    return {"state": told, **rest}


def _part(name: str, tensor: Tensor, mesh: DeviceMesh, copied: bool) -> Part | None:
    """What this rank writes of a tensor, if anything."""
    layout, mesh = layout_of(tensor, mesh)
    region = own_region(tensor.shape, layout, mesh)
    is_empty = 0 in tensor.shape  # all of it: then it is written, too
    if region is None or not (region.numel or is_empty) or not is_writer(name, layout, mesh):
        return None
    local = _torch.dtensor.local_of(tensor).detach()
    return Part(tensor.dtype, tuple(tensor.shape), region, local.to("cpu", copy=copied).contiguous())
