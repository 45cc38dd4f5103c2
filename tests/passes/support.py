"""Small captured graphs for tests of passes, and graphs as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autoparallel.capture.capture import capture
from autoparallel.graph.captured import Captured, describe_inputs
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.insert_collectives import insert_collectives
from autoparallel.placements import Layout, format_layout, parse_layout
from autoparallel.placements.modes import parse_mode
from autoparallel.placements.redistribution import Redistributor
from autoparallel.rules import operator_name


class MLP(nn.Module):
    """The pair that Megatron cuts: the first linear by rows, the second by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Linear(4, 4, bias=False)
        self.w1 = nn.Linear(4, 8, bias=False)
        self.w2 = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(self.pre(x)))


PAIR_MODES = {"w1/aten.linear#0": ["shard:n"], "w2/aten.linear#0": ["shard:k"]}
PAIR_PARAMETERS = {"w1.weight": "S0", "w2.weight": "S1"}


def captured(model: nn.Module, *args: Any, loss_fn: Any = None) -> Captured:
    leaves, spec = pytree.tree_flatten((args, {}))
    specs, rows = describe_inputs(leaves)
    return capture(model, specs, spec, loss_fn=loss_fn, least_batch=8, batch=rows)


def redistributor(*sizes: int) -> Redistributor:
    """Prices that follow the bytes, with a cost for every collective."""
    return Redistributor(sizes, lambda kind, axes, size: 1e-6 + size * 1e-9)


def localized(
    graph: Captured,
    modes: Mapping[str, Sequence[str]],
    parameters: Mapping[str, str] | None = None,
    *,
    axes: Sequence[tuple[str, int]] = (("tp", 2),),
    outputs: Sequence[str | None] | None = None,
    shared: Mapping[str, str] | None = None,
) -> fx.GraphModule:
    """The program of one rank; operators that ``modes`` does not name run Invariant."""
    whole = ",".join("I" for _ in axes)
    by_key = {
        n.meta["key"]: tuple(parse_mode(m) for m in modes.get(n.meta["key"], ["I"] * len(axes)))
        for n in graph.graph.nodes
        if n.op == "call_function"
    }
    at_rest = parameters or {}
    results = graph.graph.output_node().args[0]
    wanted: list[Layout | None] = [
        None if text is None else parse_layout(text) for text in (outputs or [whole] * len(results))
    ]
    return insert_collectives(
        graph.module,
        modes=by_key,
        placeholders={
            placeholder: parse_layout(at_rest.get(name, whole)) for placeholder, name in graph.parameters.items()
        },
        shared={key: parse_layout(text) for key, text in (shared or {}).items()},
        outputs=wanted,
        axis_names=[name for name, _ in axes],
        prefix="mesh0",
        redistributor=redistributor(*(size for _, size in axes)),
        sizes=Sizes(graph.actual),
    )


def show(module: fx.GraphModule) -> list[str]:
    """One line a node: ``name = operator(arguments)  layout``."""
    lines = []
    for node in module.graph.nodes:
        layout = node.meta.get("placements")
        end = f"  {format_layout(layout)}" if layout else ""
        if node.op == "placeholder":
            lines.append(f"{node.name}{end}")
        elif node.op == "output":
            lines.append(f"return {_argument(node.args[0])}")
        else:
            called = node.target if isinstance(node.target, str) else _name(node.target)
            arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
            lines.append(f"{node.name} = {called}({', '.join(arguments)}){end}")
    return lines


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return operator_name(target)
    return f"{target.__module__.rpartition('.')[2]}.{target.__name__}"


def _argument(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_argument, value))}]"
    return value.name if isinstance(value, fx.Node) else repr(value)
