"""The layers of a graph: the items of a model's lists of modules, and which of them repeat."""

from __future__ import annotations

import functools

from torch import fx


def layer_of(node: fx.Node) -> str | None:
    """The item of the outermost list or sequence of modules that a node belongs to, such as ``"blocks.3"``."""
    parts = str(node.meta.get("module", "")).split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else None


def layers_of(node: fx.Node) -> tuple[str, ...]:
    """The modules with a number that a node belongs to, the outermost first: ``"stage1"``, ``"stage1.blocks.3"``."""
    return _numbered(str(node.meta.get("module", "")))


@functools.lru_cache(maxsize=4096)
def _numbered(path: str) -> tuple[str, ...]:
    parts = path.split(".")
    return tuple([".".join(parts[: i + 1]) for i, part in enumerate(parts) if part[-1:].isdigit()])
