"""Loading: every rank reads its part, on whatever mesh; nothing is changed before all of it has been checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.checkpoint.folder import CheckpointError, Entry, find, read_folder
from autoparallel.checkpoint.saving import World
from autoparallel.checkpoint.tree import decode, require_same_groups, restore_optimizer
from autoparallel.checkpoint.writers import layout_of
from autoparallel.placements import to_dtensor_placements
from autoparallel.placements.regions import own_region, whole_region


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded.

    Attributes:
        path: the folder.
        step: as ``save`` was told.
        values: what was saved that has no ``load_state_dict``, by name.
    """

    path: Path
    step: int
    values: Mapping[str, Any] = field(default_factory=dict)


def latest(path: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder; None where there is none."""
    try:
        return find(Path(path))
    except CheckpointError:
        return None


def load(world: World, path: str | Path, states: Mapping[str, Any]) -> Checkpoint:
    """Loads a checkpoint, or the newest of those in a folder.

    Raises:
        CheckpointError: on every rank, before anything is changed: where there is none, where it is damaged, and where
            it is of another model or of other optimizers.
    """
    ranks = world.ranks
    with ranks.together():
        name = str(find(Path(path))) if ranks.is_first else ""
    folder = Path(ranks.of_first(name))
    with ranks.together():
        step, values, actions = _read_states(world, folder, states)
    for act in actions:
        act()
    return Checkpoint(folder, step, values)


def _read_states(
    world: World, folder: Path, states: Mapping[str, Any]
) -> tuple[int, dict[str, Any], list[Callable[[], object]]]:
    """The step, the plain values, and what is still to be done."""
    try:
        entries, tree, step = read_folder(folder)
        saved, whole = tree["states"], _whole(entries)
        absent = [name for name in states if name not in saved]
        if absent:
            raise CheckpointError(f"{folder} holds no state of {absent[0]!r}, only of {', '.join(['model', *saved])}")
        model = _for_module(world, entries, tree["model"], world.model, "model")
        actions: list[Callable[[], object]] = [partial(world.model.load_state_dict, model)]
        for name, state in states.items():
            if isinstance(state, torch.optim.Optimizer):
                actions.append(_for_optimizer(world, entries, saved[name], state, name))
            elif isinstance(state, nn.Module):
                actions.append(partial(state.load_state_dict, _for_module(world, entries, saved[name], state, name)))
            else:
                actions.append(partial(state.load_state_dict, decode(saved[name], whole)))
        values = {name: decode(value, whole) for name, value in tree["values"].items()}
        return step, values, actions
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {type(error).__name__}: {error}") from error


def _for_module(world: World, entries: Mapping[str, Entry], saved: Any, module: nn.Module, what: str) -> dict[str, Any]:
    """The saved tensors, each as the module's own of that name lies."""
    current = module.state_dict()
    odd = sorted(name for name in {*current} ^ {*saved} if not name.endswith("_extra_state"))
    if odd:
        who = "the checkpoint" if odd[0] in saved else "it"
        raise CheckpointError(f"{what} is another than was saved: only {who} has {odd[0]!r}")
    content: dict[str, Any] = {}
    for name in saved:
        value = current.get(name)
        if not isinstance(value, Tensor):
            content[name] = decode(saved[name], _whole(entries))
            continue
        entry = entries[saved[name]["__tensor__"]]
        if entry.shape != tuple(value.shape) or entry.dtype != value.dtype:
            raise CheckpointError(
                f"{name} of {what} was saved as {_form(entry.shape, entry.dtype)}, and is "
                f"{_form(value.shape, value.dtype)} now"
            )
        content[name] = _like(entry, value, world)
    return content


def _for_optimizer(
    world: World, entries: Mapping[str, Entry], saved: Any, optimizer: torch.optim.Optimizer, name: str
) -> Callable[[], object]:
    parameters, whole = dict(world.model.named_parameters()), _whole(entries)
    rest = {part: decode(saved.get(part, {}), whole) for part in ("groups", "free", "more")}
    content: dict[str, Any] = {"state": {}, **rest}
    require_same_groups(optimizer, content, world.names, name)
    for path, values in saved["state"].items():
        parameter = parameters[path]
        if layout_of(parameter, world.mesh)[1].get_coordinate() is None:
            continue  # a stage of other ranks

        def lookup(tensor: str, was_sharded: bool, parameter: nn.Parameter = parameter) -> Tensor:
            entry = entries[tensor]
            if not was_sharded or not isinstance(parameter, DTensor):
                return whole(tensor, was_sharded)
            if entry.shape == tuple(parameter.shape):
                return _like(entry, parameter, world)
            value = whole(tensor, was_sharded).to(_torch.dtensor.local_of(parameter).device)
            return _torch.dtensor.replicated(value, parameter.device_mesh)

        content["state"][path] = decode(values, lookup)
    return partial(restore_optimizer, optimizer, content, world.names)


def _like(entry: Entry, target: Tensor, world: World) -> Tensor:
    """A saved tensor that lies as another does; on a rank that has nothing of that, as it is."""
    layout, mesh = layout_of(target, world.mesh)
    region = own_region(entry.shape, layout, mesh)
    if region is None:
        return target
    local = entry.read(region).to(_torch.dtensor.local_of(target).device)
    if not isinstance(target, DTensor):
        return local
    return _torch.dtensor.from_part(local, mesh, to_dtensor_placements(layout), entry.shape)


def _whole(entries: Mapping[str, Entry]) -> Callable[[str, bool], Tensor]:
    def lookup(name: str, was_sharded: bool) -> Tensor:
        entry = entries[name]
        return entry.read(whole_region(entry.shape))

    return lookup


def _form(shape: Any, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
