"""What stands for the inputs of a call while it is traced: fakes, some of whose dims are open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from autoparallel.graph.captured import InputSpec, NumberSpec
from autoparallel.graph.records import is_held


def scale_of(least_batch: int, batch: int) -> int:
    """How many times the call's batch is traced, for a batch of at least ``least_batch``."""
    return max(1, -(-least_batch // max(batch, 1)))


def traced_shape(spec: InputSpec, scale: int) -> tuple[int, ...]:
    """The shape that an input is traced with."""
    return (spec.shape[0] * scale, *spec.shape[1:]) if spec.batch else tuple(spec.shape)


class FakeInputs:
    """The fake arguments of a call; to be made in a fake mode.

    Args:
        specs, in_spec: the inputs, flattened from ``(args, kwargs)``, with the dims that are left open.
        scale: how many times the call's batch is traced.
        open_batch: whether the batch's dim is left open.
        device: the kind of device that they are on.

    Attributes:
        arguments: the fake ``(args, kwargs)``.
        shapes: which of their dims are open, as export wants it.
        ids: of the leaves.
        numbers: those of Python's that leaves stand for, by the places of these.
        constants: those that no graph is given (a dtype, a device, a member of an enum), by the places of leaves.
        requiring: the places of the leaves that forward is known to have require gradients.
        twins: the places of the leaves that are the same tensor as an earlier one, with its place.
        alike: the sets of open dims that have the same size, as places of a leaf and a dim.
    """

    def __init__(
        self, specs: Sequence[InputSpec | Any], in_spec: pytree.TreeSpec, scale: int, open_batch: bool, device: str
    ) -> None:
        leaves: list[Any] = []
        dynamic: list[dict[int, Any] | None] = []  # None for a leaf that is no tensor
        self.constants = {i: spec for i, spec in enumerate(specs) if is_held(spec)}
        for i, spec in enumerate(specs):
            if isinstance(spec, InputSpec):
                fake = torch.empty(traced_shape(spec, scale), dtype=spec.dtype, device=device)
                leaves.append(fake.requires_grad_(spec.requires_grad))
                rows = {0: Dim.AUTO} if spec.batch and open_batch else {}
                dynamic.append(rows | {dim: Dim.AUTO for dim, _ in spec.open})
            elif isinstance(spec, NumberSpec):
                leaves.append(torch.empty((), dtype=spec.dtype))
                dynamic.append({})
            else:
                leaves.append(None if i in self.constants else spec)
                dynamic.append(None)
        self.arguments = pytree.tree_unflatten(leaves, in_spec)
        self.shapes = _shapes_of(self.arguments, leaves, dynamic) if leaves else None  # which export goes through
        self.ids = {*map(id, leaves)}
        self.numbers = {i: spec.value for i, spec in enumerate(specs) if isinstance(spec, NumberSpec)}
        self.requiring = [i for i, s in enumerate(specs) if isinstance(s, InputSpec) and s.is_to_require]
        self.twins = [(i, s.twin) for i, s in enumerate(specs) if isinstance(s, InputSpec) and s.twin is not None]
        self.alike = _alike(specs)

    def number_names(self, program: ExportedProgram) -> list[str]:
        """The placeholders of a trace that stand for Python's numbers."""
        names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
        return [names[i] for i in self.numbers]


def _shapes_of(arguments: tuple[Any, ...], leaves: Sequence[Any], dynamic: Sequence[dict[int, Any] | None]) -> Any:
    """Which dims of the inputs are open, nested as export wants it: a class of the user's as the list of its parts."""
    shapes = ShapesCollection()
    for leaf, dims in zip(leaves, dynamic, strict=True):
        if dims is not None:
            shapes[leaf] = dims
    return shapes.dynamic_shapes(lambda args, kwargs: None, arguments)


def _alike(specs: Sequence[InputSpec | Any]) -> list[list[tuple[int, int]]]:
    sets: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for i, spec in enumerate(specs):
        if isinstance(spec, InputSpec):
            for dim, number in spec.open:
                sets.setdefault(("length", number), []).append((i, dim))
            if spec.batch:
                sets.setdefault(("batch", spec.batch), []).append((i, 0))
    return list(sets.values())
