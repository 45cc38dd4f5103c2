"""What a sharding rule is: the factors of one operator.

A rule names every loop dimension (factor) of an operator, ``"m k, k n -> m n"`` for a matrix product, and says which
factors each dim of each operand and of the result runs over.  How the operator may be sharded, what that does to the
local shapes, and what has to be communicated all follow from the factors (see ``rules.typing``).

Notation: operands are separated by ``,``; dims by spaces; ``(h d)`` is a dim composed of two factors, the outer first;
``1`` is a dim that is not sharded (size one, or broadcast); ``...`` stands for the leading dims that all operands with
``...`` share, aligned from the right and broadcast as torch does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from autoparallel.rules.calls import Shape, operand_shapes, shape_of
from autoparallel.rules.localize import Localize

DimFactors = tuple[str, ...]
"""The factors of one dim, outermost first; empty for a dim that is not sharded."""

TensorFactors = tuple[DimFactors, ...]

Notation = tuple[Sequence[Sequence[str]], Sequence[str]]
"""The dims of each operand and of the result, each dim still text."""


class RuleError(ValueError):
    """A sharding rule that contradicts itself or the operator it is for."""


@dataclass(frozen=True)
class Rule:
    """How one call of an operator may be sharded.

    Attributes:
        operands: the factors of each tensor operand's dims, in the order of the call's tensor arguments.
        result: the factors of the result's dims.
        sizes: the size of every factor (an int or a SymInt).
        reductions: for factors that the result does not bear, how they are reduced: ``"sum"``, ``"mean"`` (the local
            result is divided by the number of shards), or ``"composite"`` (the local operator communicates by itself
            and gives the whole, Invariant result; ``localize`` must write it).
        linear: sets of operands in which the operator is jointly linear: Partial through one set gives Partial.
        additive: operands that are added to the result: Partial wherever the result becomes Partial.
        blocked: factors that are never sharded.
        exchange: ``(rows, owners)``: one axis may shard both of these factors at once, because the local operator
            (which ``localize`` must write) sends each row to the rank that owns what it needs, and the result back.
        localize: rewrites the local call where its arguments speak of global sizes or positions.
        flops: floating-point operations of the forward, as a multiple of the product of all factor sizes; 0 for an
            operator that is bound by memory.
        attention: whether it is a fused attention: that reaches a part of the peak (``Profile.attention``), and its
            backward computes the scores once more.
    """

    operands: tuple[TensorFactors, ...]
    result: TensorFactors
    sizes: Mapping[str, Any]
    reductions: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    blocked: frozenset[str] = frozenset()
    localize: Localize | None = None
    flops: float = 0
    exchange: tuple[str, str] | None = None
    attention: bool = False

    def __post_init__(self) -> None:
        borne = {f for dim in self.result for f in dim}
        for operand in self.operands:
            for dim in operand:
                for factor in dim:
                    if factor not in borne and factor not in self.reductions and factor not in self.blocked:
                        raise RuleError(
                            f"factor {factor!r} is reduced (the result does not bear it) but the rule {self} declares "
                            "no kind for it: give reductions={...: 'sum' | 'mean'} or block it"
                        )
        for factor, kind in self.reductions.items():
            if kind not in ("sum", "mean", "composite"):
                raise RuleError(f"factor {factor!r} has the reduction {kind!r}; expected 'sum', 'mean' or 'composite'")
            if factor in borne:
                raise RuleError(f"factor {factor!r} is declared reduced but the result bears it in {self}")

    def __str__(self) -> str:
        def show(tensor: TensorFactors) -> str:
            return " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in tensor)

        return f"{', '.join(show(o) for o in self.operands)} -> {show(self.result)}"

    @cached_property
    def typed_by(self) -> Hashable:
        """All that ``rules.typing`` reads of it: rules in which that is the same may be sharded in the same ways."""
        reductions = tuple(self.reductions.items())
        return self.operands, self.result, reductions, self.linear, self.additive, self.blocked, self.exchange

    def factors(self) -> list[str]:
        """All factors that may be sharded, in order of appearance."""
        factors: dict[str, None] = {}
        for tensor in (*self.operands, self.result):
            for dim in tensor:
                for factor in dim:
                    factors.setdefault(factor)
        return [f for f in factors if f not in self.blocked]

    def exchanged(self) -> str:
        """The name of the mode in which both factors of ``exchange`` are sharded; empty when there is none."""
        return "@".join(self.exchange) if self.exchange else ""

    def dim_of(self, tensor: TensorFactors, factor: str) -> int | None:
        """The dim of a tensor that is cut when ``factor`` is sharded: the one where it is outermost.

        Returns -1 where the tensor bears the factor in a place that cannot be cut.
        """
        bearing = [dim for dim, factors in enumerate(tensor) if factor in factors]
        if not bearing:
            return None
        return bearing[0] if len(bearing) == 1 and tensor[bearing[0]][0] == factor else -1


_DIM = re.compile(r"\([^)]*\)|\S+")


def parse_factors(text: str) -> tuple[list[list[str]], list[str]]:
    """Splits a line of notation into the dims of each operand and of the result."""
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise RuleError(f"a sharding rule is written 'operands -> result', got {text!r}")
    return [_DIM.findall(part) for part in left.split(",")], _DIM.findall(right)


def make_rule(
    node: fx.Node,
    notation: str | Notation,
    *,
    shapes: Sequence[Shape] | None = None,
    sizes: Mapping[str, Any] | None = None,
    reductions: Mapping[str, str] | None = None,
    linear: Sequence[Sequence[int]] = (),
    additive: Sequence[int] = (),
    blocked: Sequence[str] = (),
    localize: Localize | None = None,
    flops: float = 0,
    exchange: tuple[str, str] | None = None,
) -> Rule:
    """The rule of one call, from its notation and the shapes of its tensors; the options are those of ``Rule``.

    A named factor that the result does not bear is summed, unless ``reductions`` or ``blocked`` say otherwise.
    ``shapes`` are those that the operands count with, where they have others.

    Raises:
        RuleError: when ranks or sizes contradict the notation.
    """
    left, right = parse_factors(notation) if isinstance(notation, str) else notation
    shapes, result_shape = shapes or operand_shapes(node), shape_of(node)
    if len(left) != len(shapes):
        raise RuleError(f"the rule {notation!r} is for {len(left)} tensors, the call has {len(shapes)}")
    factor_sizes: dict[str, Any] = dict(sizes or {})
    lead = max(
        (len(shape) - len(dims) + 1 for dims, shape in zip(left, shapes, strict=True) if "..." in dims), default=0
    )
    if "..." in right:
        lead = max(lead, len(result_shape) - len(right) + 1)
    operands = tuple(_tensor_factors(d, s, lead, factor_sizes, notation) for d, s in zip(left, shapes, strict=True))
    result = _tensor_factors(right, result_shape, lead, factor_sizes, notation)
    summed = _factor_names(*left).difference(_factor_names(right), blocked)
    return Rule(
        operands,
        result,
        factor_sizes,
        {**dict.fromkeys(sorted(summed), "sum"), **(reductions or {})},
        tuple(frozenset(group) for group in linear),
        frozenset(additive),
        frozenset(blocked),
        localize,
        flops,
        exchange,
    )


def dim_names(rank: int, whole: Collection[int] = (), prefix: str = "x") -> list[str]:
    """A name for each dim of a tensor: ``d0``, ``d1`` and so on, with ``x`` for ``d`` where ``dimwise`` blocks it."""
    return [f"{prefix if dim in whole else 'd'}{dim}" for dim in range(rank)]


def dimwise(
    node: fx.Node,
    operands: Sequence[Sequence[str]],
    result: Sequence[str],
    *,
    blocked: Sequence[str] = (),
    **options: Any,
) -> Rule:
    """The rule of a call whose dims are named one by one; names that begin with ``x`` are blocked."""
    whole = sorted(name for name in _factor_names(*operands, result) if name.startswith("x"))
    return make_rule(node, ([*operands], result), blocked=[*whole, *blocked], **options)


def _factor_names(*tensors: Sequence[str]) -> set[str]:
    """The names of the factors in the dims of tensors."""
    return {name for dims in tensors for dim in dims for name in dim.strip("()").split()} - {"1", "..."}


def _tensor_factors(
    dims: Sequence[str], shape: Sequence[Any], lead: int, sizes: dict[str, Any], notation: str | Notation
) -> TensorFactors:
    written = list(dims)
    if "..." in written:
        at = written.index("...")
        count = len(shape) - len(written) + 1
        written[at : at + 1] = [f"...{lead - count + i}" for i in range(count)]
    if len(written) != len(shape):
        raise RuleError(f"{' '.join(dims)!r} in the rule {notation!r} has another rank than the shape {tuple(shape)}")
    out: list[DimFactors] = []
    for text, size in zip(written, shape, strict=True):
        if text == "1" or (isinstance(size, int) and size == 1):
            out.append(())
        elif text.startswith("("):
            names = tuple(text[1:-1].split())
            missing = [n for n in names if n not in sizes]
            if missing:
                raise RuleError(f"the sizes of {missing} in {notation!r} cannot be told from the shapes")
            out.append(names)
        else:
            first = sizes.setdefault(text, size)
            if isinstance(first, int) and isinstance(size, int) and first != size:
                raise RuleError(f"factor {text!r} in {notation!r} has the sizes {first} and {size}")
            out.append((text,))
    return tuple(out)


RuleMaker = Callable[["fx.Node"], "Rule | None"]
"""Makes the rule of a call; None where this call can only be replicated."""
