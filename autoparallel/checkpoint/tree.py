"""The state of a training run as plain values, with tensors by name.

JSON has no tuples, no keys but texts, no numbers that are not finite and no tensors: each is written as an object with
one key of its own, which begins with two underscores.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

TENSOR = "__tensor__"
Lookup = Callable[[str, bool], Tensor]
"""Gives the tensor of a name; told whether it was a ``DTensor``."""


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON's types.

    Args:
        path: the name of the value, which names what is in it.
        tensors: is given every tensor by its name.

    Raises:
        TypeError: for a value that is none of these; it names the path.
    """
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {TENSOR: path, "sharded": isinstance(value, DTensor)}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"__float__": repr(value)}
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(item, f"{path}/{key}", tensors) for key, item in value.items()}
        items = [[encode(k, path, tensors), encode(v, f"{path}/{k}", tensors)] for k, v in value.items()]
        return {"__items__": items}
    if isinstance(value, list | tuple):
        parts = [encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return parts if isinstance(value, list) else {"__tuple__": parts}
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy
        return encode(value.item(), path, tensors)
    raise TypeError(
        f"{path} is a {type(value).__name__}, which a checkpoint does not keep: only numbers, texts, bytes, dtypes, "
        "tensors, lists, tuples and dicts of them"
    )


def decode(data: Any, lookup: Lookup) -> Any:
    """The inverse of :func:`encode`.

    Raises:
        ValueError: for an object that :func:`encode` does not write.
    """
    if isinstance(data, list):
        return [decode(item, lookup) for item in data]
    if not isinstance(data, dict):
        return data
    marks = [key for key in data if key.startswith("__")]
    if not marks:
        return {key: decode(item, lookup) for key, item in data.items()}
    mark, content = marks[0], data[marks[0]]
    if mark == TENSOR:
        return lookup(content, bool(data["sharded"]))
    if mark == "__tuple__":
        return tuple(decode(content, lookup))
    if mark == "__items__":
        return {decode(key, lookup): decode(item, lookup) for key, item in content}
    if mark == "__float__":
        return float(content)
    if mark == "__dtype__":
        return getattr(torch, content)
    if mark == "__bytes__":
        return base64.b64decode(content)
    raise ValueError(f"{mark!r} is not known")


def merged(parts: list[Any]) -> Any:
    """The trees of several ranks as one: of what several have, the first rank's."""
    first = parts[0]
    if not all(isinstance(part, dict) for part in parts) or TENSOR in first:
        return first
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: merged([part[key] for part in parts if key in part]) for key in keys}


# ----------------------------------------------------------------------------------------------------------- optimizers


def optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's state by the names of parameters, which stay when it is made anew or on another mesh; with what it
    has for no parameter, and what its class adds to its ``state_dict()``.

    Args:
        names: of the model's parameters, by their ids.

    Raises:
        ValueError: for a parameter of another model, and for an optimizer that keeps its state in another.
    """
    listed = _names_of(optimizer, names)
    order = [name for group in listed for name in group]
    state = optimizer.state_dict()
    if not {"state", "param_groups"} <= state.keys():
        raise ValueError(
            f"{type(optimizer).__name__}.state_dict() is not that of a torch.optim.Optimizer: it has "
            f"{', '.join(map(repr, state))}, no 'state' and 'param_groups'\nWhat to change: save the optimizer that it "
            "holds, under a name of its own, and what it adds as plain values."
        )
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "names": listed_names}
        for group, listed_names in zip(state["param_groups"], listed, strict=True)
    ]
    by_name = {order[i]: values for i, values in state["state"].items() if isinstance(i, int)}
    free = {key: values for key, values in state["state"].items() if not isinstance(key, int)}
    more = {key: values for key, values in state.items() if key not in ("state", "param_groups")}
    return {"groups": groups, "state": by_name, "free": free, "more": more}


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Any, names: Mapping[int, str]) -> None:
    """Gives an optimizer a state that :func:`optimizer_state` wrote."""
    numbers = {name: i for i, name in enumerate(n for group in _names_of(optimizer, names) for n in group)}
    groups = [
        {**{k: v for k, v in group.items() if k != "names"}, "params": [numbers[n] for n in group["names"]]}
        for group in saved["groups"]
    ]
    state = {numbers[name]: values for name, values in saved["state"].items()}
    optimizer.load_state_dict({**saved["more"], "state": {**state, **saved["free"]}, "param_groups": groups})


def require_same_groups(optimizer: torch.optim.Optimizer, saved: Any, names: Mapping[int, str], what: str) -> None:
    """Raises ValueError where the groups of parameters are not those that were saved."""
    listed = _names_of(optimizer, names)
    saved_names = [group["names"] for group in saved["groups"]]
    if len(listed) != len(saved_names):
        raise ValueError(f"{what} has {len(listed)} groups of parameters, {len(saved_names)} were saved")
    for i, (here, theirs) in enumerate(zip(listed, saved_names, strict=True)):
        if here != theirs:
            other = sorted({*here} ^ {*theirs})
            odd = f"{other[0]} is in one of them only" if other else "they are in another order"
            raise ValueError(f"group {i} of {what} has other parameters than were saved: {odd}")


def _names_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strangers:
        raise ValueError(
            f"the optimizer has a parameter of shape {list(strangers[0].shape)} that is not the model's: save it with "
            "the model that it belongs to"
        )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
