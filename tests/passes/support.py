"""Small captured graphs for tests of passes, and graphs as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from autoparallel.graph.captured import Captured
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.history import program_lines as show
from autoparallel.passes.insert_collectives import insert_collectives
from autoparallel.passes.specification import Specification, specify_program
from autoparallel.placements import parse_layout
from autoparallel.placements.modes import parse_mode
from autoparallel.placements.redistribution import Redistributor
from tests.captures import captured


class MLP(nn.Module):
    """The pair that Megatron cuts: the first linear by rows, the second by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Linear(4, 4, bias=False)
        self.w1 = nn.Linear(4, 8, bias=False)
        self.w2 = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(self.pre(x)))


class Masked(nn.Module):
    """A mask that follows from the input alone, a skip, a tied weight, and a size of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.c = nn.Linear(4, 4, bias=False)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).to(x.dtype)
        first = self.a(x)
        y = self.b(first) * mask
        return self.c(y.reshape(y.shape[0], 4)) + first


PAIR_MODES = {"w1/aten.linear#0": ["shard:n"], "w2/aten.linear#0": ["shard:k"]}
PAIR_PARAMETERS = {"w1.weight": "S0", "w2.weight": "S1"}


def redistributor(*sizes: int) -> Redistributor:
    """Prices that follow the bytes, with a cost for every collective."""
    return Redistributor(sizes, lambda kind, axes, size: 1e-6 + size * 1e-9)


def placed(
    graph: Captured,
    modes: Mapping[str, Sequence[str]],
    parameters: Mapping[str, str] | None = None,
    *,
    axes: Sequence[tuple[str, int]] = (("tp", 2),),
    outputs: Sequence[str | None] | None = None,
    shared: Mapping[str, str] | None = None,
) -> tuple[fx.GraphModule, Specification]:
    """The program of one rank, and what it must be; operators that ``modes`` does not name run Invariant."""
    whole = ",".join("I" for _ in axes)
    at_rest = parameters or {}
    results = graph.graph.output_node().args[0]
    specification = specify_program(
        graph.module,
        modes={
            n.meta["key"]: tuple(parse_mode(m) for m in modes.get(n.meta["key"], ["I"] * len(axes)))
            for n in graph.graph.nodes
            if n.op == "call_function"
        },
        placeholders={
            placeholder: parse_layout(at_rest.get(name, whole)) for placeholder, name in graph.parameters.items()
        },
        outputs=[None if text is None else parse_layout(text) for text in (outputs or [whole] * len(results))],
        axes=axes,
        prefix="mesh0",
        sizes=Sizes(graph.actual),
        parameters=graph.parameters,
    )
    insert_collectives(
        graph.module,
        specification=specification,
        shared={key: parse_layout(text) for key, text in (shared or {}).items()},
        redistributor=redistributor(*(size for _, size in axes)),
    )
    graph.module.recompile()
    return graph.module, specification


def localized(graph: Captured, modes: Mapping[str, Sequence[str]], *args: Any, **options: Any) -> fx.GraphModule:
    """The program alone (see :func:`placed`)."""
    return placed(graph, modes, *args, **options)[0]


__all__ = ["MLP", "PAIR_MODES", "PAIR_PARAMETERS", "captured", "localized", "placed", "redistributor", "show"]
