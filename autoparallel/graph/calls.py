"""One call of the model: what it is given, and whether a program fits it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.graph.captured import Captured, InputSpec, NumberSpec
from autoparallel.placements import Layout


@dataclass(frozen=True)
class Call:
    """One call of the model, flattened.

    Attributes:
        leaves: tensors (local ones, for a ``DTensor``) and other values.
        specs: the tensors' global shapes, and the other values themselves.
        layouts: the layouts of ``DTensor`` inputs; None for plain ones.
        in_spec: how the leaves nest in ``(args, kwargs)``.
        batch: the batch size.
        with_target: whether the last positional argument is the target of the loss function.
        training: every submodule's training flag.
        trainable: for every submodule's parameters, whether they are trained.
        gradients: whether it is made with gradients enabled.
        hooks: the hooks that it runs (see ``graph.hooks.hooks_of``).
        structure: the number of the model's set of submodules, of which one may be replaced between calls, and of
            buffers that are one tensor.
        autocast: the dtype of ``torch.autocast`` around it; None outside.
        caches: the caches of generation that are handed in, which become what the call makes of them.
        arguments: the leaves as the user has them, who may have some on another device.
        attributes: how many of its last leaves are attributes of the model (see ``graph.carried_attributes``), or drawn
            for it (see ``graph.drawn_numbers``).
    """

    leaves: tuple[Any, ...]
    specs: tuple[Any, ...]
    layouts: tuple[Layout | None, ...]
    in_spec: pytree.TreeSpec
    batch: int
    with_target: bool
    training: tuple[bool, ...]
    trainable: tuple[bool, ...]
    gradients: bool = True
    hooks: Hashable = ()
    structure: int = 0
    autocast: torch.dtype | None = None
    caches: tuple[Any, ...] = field(default=(), compare=False)
    attributes: int = 0
    arguments: tuple[Any, ...] = field(default=(), compare=False)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The global shapes of its tensors."""
        return tuple([s.shape for s in self.specs if isinstance(s, InputSpec)])

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The same, but for what stands for numbers."""
        return tuple([s.shape for s in self.specs if isinstance(s, InputSpec) and not s.is_number])

    @property
    def values(self) -> tuple[torch.Tensor | None, ...]:
        """The inputs that this rank has whole, with their values; None in the place of others."""
        return tuple([
            leaf if isinstance(leaf, torch.Tensor) and isinstance(s, InputSpec) and _has_values(leaf, s.shape) else None
            for leaf, s in zip(self.leaves, self.specs, strict=False)
        ])  # fmt: skip

    @property
    def is_training(self) -> bool:
        """Whether the model is in training mode, as a graph is that has no modes."""
        return self.training[0] if self.training else True

    @property
    def trains(self) -> bool:
        """Whether it is made in training mode and with gradients."""
        return self.is_training and self.gradients


def _has_values(leaf: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return tuple(leaf.shape) == shape and not leaf.is_meta and not _torch.export.is_fake(leaf)


def fits(captured: Captured, specs: Sequence[Any]) -> bool:
    """Whether a trace serves a call of these sizes and numbers: what it fixed is the call's, and its guards hold."""
    actual = {symbol: sympy.Integer(size) for symbol, size in sizes_of(captured, specs).items()}
    if any(actual[symbol] < 2 for symbol in captured.lengths):
        return False
    nodes = captured.placeholders
    for name, spec in zip(captured.inputs, specs, strict=True):
        node = nodes.get(name) if name is not None else None
        if node is None or not isinstance(spec, InputSpec):
            continue
        for traced, real in zip(node.meta["val"].shape, spec.shape, strict=True):
            # The trace may have fixed a size that was open at first, such as by int(x.shape[0]).
            if (traced if isinstance(traced, int) else traced.node.expr.xreplace(actual)) != real:
                return False
    return all(guard.holds(actual) for guard in captured.guards) and numbers_fit(captured, specs)


def numbers_fit(captured: Captured, specs: Sequence[Any]) -> bool:
    """Whether a trace serves a call of these numbers: what the model asks of those that are left open has the same
    answers."""
    values = values_of(captured, specs) if captured.assumed else {}
    return all(_torch.numbers.evaluator(relation)(values) for relation in captured.assumed)


def form_of(specs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of a call but for the sizes that may change from call to call."""
    return tuple([
        (s.batch, len(s.shape), s.dtype, s.requires_grad) if isinstance(s, InputSpec)
        else type(s) if type(s) in NUMBERS else repr(s)
        for s in specs
    ])  # fmt: skip


def changing_of(specs: Sequence[Any]) -> tuple[int | float, ...]:
    """What may change between calls of a form: the sizes of the dims that are not the batch, and numbers."""
    changing: list[int | float] = []
    for s in specs:
        changing += s.shape[bool(s.batch) :] if isinstance(s, InputSpec) else [s] * (type(s) in NUMBERS)
    return tuple(changing)


def opened(specs: Sequence[Any], changing: Sequence[tuple[int | float, ...]]) -> tuple[Any, ...]:
    """The inputs of a call, with those dims open that have had several sizes, and numbers that have had several values.

    Dims that have always had the same size share a length, but for those that stand for numbers.  A size of 0 or 1 is
    never open: what it does to the shapes around it, no other does.

    Args:
        changing: what may change (see :func:`changing_of`) in calls of the same form, those of this one among them.
    """
    columns = iter(zip(*changing, strict=True))
    numbers: dict[tuple[int | float, ...], int] = {}
    described: list[Any] = []
    for spec in specs:
        if isinstance(spec, InputSpec):
            dims = [(dim, next(columns)) for dim in range(bool(spec.batch), len(spec.shape))]
            several = [(dim, sizes) for dim, sizes in dims if spec.shape[dim] > 1 and len({*sizes} - {0, 1}) > 1]
            alone = (len(described),) * spec.is_number
            opened = [(dim, numbers.setdefault((*alone, *sizes), len(numbers))) for dim, sizes in several]
            spec = replace(spec, open=tuple(opened))
        elif type(spec) in NUMBERS and len({*next(columns)}) > 1:
            spec = NumberSpec(type(spec), spec)
        described.append(spec)
    return tuple(described)


def without_numbers(specs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of a call with all numbers fixed, but for those that are drawn for it."""
    return tuple([s.value if isinstance(s, NumberSpec) and not s.is_drawn else s for s in specs])


def closed(specs: Sequence[Any], batch: bool = True) -> tuple[Any, ...]:
    """The inputs of a call with all sizes fixed, or all but the batch's; what stands for a number that calls change
    stays open, and so do other numbers."""
    return tuple([
        replace(s, open=(), batch=s.batch if batch else 0) if isinstance(s, InputSpec) and not s.is_number else s
        for s in specs
    ])  # fmt: skip


NUMBERS = (int, float)
"""The types of arguments that become inputs of the graph when they change."""


class UnevenSizeError(ValueError):
    """A plan cuts a size into parts that a call's does not divide into: another plan may run it."""


def require_divisible(
    divisors: Sequence[tuple[sympy.Expr, int]], actual: Mapping[Any, int], batch: int, lengths: Collection[Any]
) -> None:
    """Raises when one of some sizes, as expressions of traced symbols, cannot be cut into its pieces.

    Args:
        lengths: the symbols that are no sizes of the batch.

    Raises:
        UnevenSizeError: saying how the plan cuts it.
    """
    for expression, pieces in divisors:
        if expression.free_symbols.issubset(lengths) and int(expression.subs(actual)) % pieces:
            raise UnevenSizeError(f"the plan cuts a length into {pieces} parts")
    for expression, pieces in divisors:
        size = int(expression.subs(actual))
        if size % pieces:
            raise UnevenSizeError(
                f"a batch of {batch} rows does not divide over the mesh: the plan cuts {size} rows into "
                f"{pieces} parts. Use a batch that divides by {pieces} (drop_last=True in the data loader), or "
                "compile for batches of this size"
            )


def sizes_of(captured: Captured, specs: Sequence[Any]) -> dict[Any, int]:
    """The traced symbols' sizes in a call."""
    nodes = captured.placeholders
    actual: dict[Any, int] = dict(captured.actual)
    for name, spec in zip(captured.inputs, specs, strict=True):
        if name in nodes and isinstance(spec, InputSpec):
            for size, real in zip(nodes[name].meta["val"].shape, spec.shape, strict=True):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    actual[size.node.expr] = real
    return actual


def values_of(captured: Captured, specs: Sequence[Any]) -> dict[Any, int | float]:
    """The values in a call of the symbols of sizes and of numbers."""
    arguments = dict(zip(captured.inputs, specs, strict=True))
    numbers = {symbol: arguments[name] for symbol, name in captured.number_symbols.items()}
    return sizes_of(captured, specs) | {
        symbol: number.value if isinstance(number, NumberSpec) else number for symbol, number in numbers.items()
    }


def count_microbatches(most: int, rows: int, fits: Callable[[int], bool]) -> int:
    """Into how many microbatches a call is cut that is not differentiated: as many as divide its rows and fit.

    Args:
        most: how many a call has that is differentiated; the count divides it.
        rows: of the whole batch.
        fits: whether one of so many microbatches divides over the mesh; where none does, rows only have to divide.
    """
    counts = [m for m in range(most, 0, -1) if most % m == 0 and rows % m == 0]
    return next(filter(fits, counts), counts[0])


def micro_specs(specs: Sequence[Any], count: int) -> list[Any]:
    """The inputs of one of ``count`` microbatches."""
    return [
        replace(s, shape=(s.shape[0] // count, *s.shape[1:])) if isinstance(s, InputSpec) and s.batch else s
        for s in specs
    ]


def microbatch(call: Call, number: int, count: int) -> list[Any]:
    """The inputs of a microbatch: its rows, of those that have the batch as their first dim."""
    leaves = []
    for leaf, spec in zip(call.leaves, call.specs, strict=True):
        if isinstance(spec, InputSpec) and spec.batch and count > 1:
            rows = leaf.shape[0] // count
            leaf = leaf.narrow(0, number * rows, rows)
        leaves.append(leaf)
    return leaves


def batch_dim(captured: Captured, result: int) -> int:
    """The dim of a result that is the batch, or a multiple of it; -1 where there is none."""
    shape = captured.results[result].meta["val"].shape
    return next((dim for dim, size in enumerate(shape) if captured.is_batch(size)), -1)
