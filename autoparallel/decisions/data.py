"""Decisions as plain data, for JSON: dataclasses are read and written by their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

UNSTORED = {"stored": False}
"""The metadata of a field that is not decided but predicted, or made anew: it is not part of the data."""


def to_data(value: Any) -> dict[str, Any]:
    """The stored fields of a dataclass; ``json.dumps`` asks for those of the dataclasses in them (``default=``)."""
    return {name: getattr(value, name) for name in _stored(type(value))}  # type: ignore[arg-type]


def from_data(kind: Any, data: Any) -> Any:
    """A value of an annotated type; the inverse of :func:`to_data`.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: for data of another type.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        types = _stored(kind)  # type: ignore[arg-type]
        return kind(**{name: from_data(types[name], value) for name, value in data.items()})  # type: ignore[operator]
    if origin is UnionType:  # the only one is with None
        return None if data is None else from_data(parts[0], data)
    if origin is Mapping:
        return {str(key): from_data(parts[1], value) for key, value in data.items()}
    if origin is tuple and parts[-1] is ...:
        return tuple(from_data(parts[0], item) for item in data)
    if origin is tuple:
        return tuple(from_data(part, item) for part, item in zip(parts, data, strict=True))
    return kind(data)


@cache
def _stored(kind: Any) -> dict[str, Any]:
    """The stored fields of a dataclass with their types."""
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind) if field.metadata.get("stored", True)}


__all__ = ["UNSTORED", "from_data", "to_data"]
