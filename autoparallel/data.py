"""Dataclasses as JSON, read and written by their annotations.

A file may come from anywhere: what it holds is compared with the annotations before anything is made of it, and a
number must be finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

UNSTORED = {"stored": False}
"""The metadata of a field that is not decided but predicted, or made anew: it is not part of the data."""


def to_json(value: Any, version: int) -> str:
    """The stored fields of a dataclass as JSON text; those that are None, and may be left out, are."""
    data = {name: part for name, part in to_data(value).items() if part is not None or _fields(value)[name][1]}
    return json.dumps({"format": version, **data}, indent=1, default=to_data)


def from_json(
    kind: Any, text: str, version: int, renew: Callable[[dict[str, Any]], dict[str, Any]] = lambda data: data
) -> Any:
    """The dataclass that a text holds; the inverse of :func:`to_json`.

    Args:
        renew: gives fields as they are written today for those that were written before, of the same format.

    Raises:
        ValueError: for a text that is not JSON, that has another format, or of which some part is not what the
            annotations of ``kind`` say.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(data, dict):
        raise ValueError(f"it is {_shorten(data)}, not an object")
    stated = data.pop("format", None)
    if stated != version:
        raise ValueError(f"it has format {_shorten(stated)}, this version reads {version}")
    return from_data(kind, renew(data))


def to_data(value: Any) -> dict[str, Any]:
    """The stored fields of a dataclass; ``json.dumps`` asks for those of the dataclasses in them (``default=``)."""
    return {name: _with_text_keys(getattr(value, name)) for name in _fields(value)}


def from_data(kind: Any, data: Any, where: str = "") -> Any:
    """A value of an annotated type; the inverse of :func:`to_data`.

    Args:
        where: the path to the value, for errors.

    Raises:
        ValueError: for data of another type; it says where.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, data, where)
    if origin is UnionType:  # the only one is with None
        return None if data is None else from_data(parts[0], data, where)
    if origin is Mapping:
        _require(isinstance(data, Mapping), "an object", data, where)
        return {from_data(parts[0], k, where): from_data(parts[1], v, f"{where}[{k!r}]") for k, v in data.items()}
    if origin is tuple:
        _require(isinstance(data, list | tuple), "a list", data, where)
        kinds = parts[:1] * len(data) if parts[-1] is ... else parts
        _require(len(data) == len(kinds), f"a list of {len(kinds)}", data, where)
        return tuple(from_data(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(data))
    if kind is torch.dtype:
        dtype = getattr(torch, str(data), None)
        _require(isinstance(dtype, torch.dtype), "a dtype", data, where)
        return dtype
    if kind is float:
        is_number = isinstance(data, int | float) and not isinstance(data, bool)
        _require(is_number and math.isfinite(data), "a finite number", data, where)
        return float(data)
    _require(type(data) is kind, {int: "a whole number", str: "a text", bool: "true or false"}[kind], data, where)
    return data


def _dataclass(kind: Any, data: Any, where: str) -> Any:
    stored = _stored_fields(kind)
    _require(isinstance(data, Mapping), "an object", data, where)
    missing = [name for name, (_, needed) in stored.items() if needed and name not in data]
    unknown = [name for name in data if name not in stored]
    if missing or unknown:
        what = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} is not known"
        raise ValueError(f"{what}{f' in {where}' if where else ''}")
    dot = f"{where}." if where else ""
    return kind(**{name: from_data(stored[name][0], value, f"{dot}{name}") for name, value in data.items()})


def _require(is_right: bool, expected: str, data: Any, where: str) -> None:
    if not is_right:
        raise ValueError(f"{where or 'it'} must be {expected}, not {_shorten(data)}")


def _shorten(data: Any) -> str:
    text = json.dumps(data)
    return text if len(text) < 60 else f"{text[:50]} ..."


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k).removeprefix("torch.") if isinstance(k, torch.dtype) else k: v for k, v in value.items()}
    return value


def _fields(value: Any) -> dict[str, tuple[Any, bool]]:
    kind: Any = type(value)
    return _stored_fields(kind)


@cache
def _stored_fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The stored fields of a dataclass with their types, and whether each must be there; those that must come first."""
    types = get_type_hints(kind)
    stored = {
        field.name: (types[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
        if field.init and field.metadata.get("stored", True)
    }
    return dict(sorted(stored.items(), key=lambda item: not item[1][1]))
