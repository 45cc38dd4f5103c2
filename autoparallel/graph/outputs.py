"""Which of a model's outputs is the loss.

The loss is known where ``loss_fn`` has computed the outputs, or where one of them is called "loss": the key of a dict,
the field of a named tuple or a dataclass.  What a user differentiates elsewhere, nobody can know before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from autoparallel.graph.captured import Leaf

NAME = "loss"


def find_loss(
    outputs: Sequence[Leaf], spec: pytree.TreeSpec, scalars: Collection[int], of_loss_fn: bool
) -> int | None:
    """The index (among the graph's outputs) of the loss, where it is known.

    Args:
        outputs, spec: as ``Captured`` holds them.
        scalars: the scalars that are differentiated.
        of_loss_fn: whether ``loss_fn`` computed them: then the first scalar is the loss where none is called so.
    """
    named = _named(pytree.tree_unflatten([o if isinstance(o, int) else None for o in outputs], spec))
    if named in scalars:
        return named
    return next((o for o in outputs if isinstance(o, int) and o in scalars), None) if of_loss_fn else None


def explain_ambiguity(count: int) -> str:
    """Why nobody knows which output is the loss."""
    return f"the model returns {count} outputs that can be differentiated, and none of them is called {NAME!r}"


def _named(output: Any) -> int | None:
    """What is called "loss" at the top of an output."""
    value = output.get(NAME) if isinstance(output, Mapping) else getattr(output, NAME, None)
    return value if isinstance(value, int) else None


__all__ = ["explain_ambiguity", "find_loss"]
