"""How long a step of a deep model takes, predicted from the same model with fewer layers.

Layers that are alike take the same time each once the first of them has begun, so two short models, of which one has a
layer more, tell about any number.  That is near enough to compare plans; what a plan says of itself is predicted from
the whole program (see ``report.predict``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from torch import fx, nn

from autoparallel.capture import Captured
from autoparallel.passes.leave_out_layers import find_alike, leave_out_layers
from autoparallel.passes.name_nodes import layer_of
from autoparallel.plan import Plan

Seconds = Callable[[Captured, Plan], float]
"""Predicts the time of a step of the program that a plan makes of a graph, which it uses up."""


def extrapolated_seconds(captured: Captured, plan: Plan, seconds: Seconds) -> float:
    """The predicted time of a step; of a model whose layers hardly repeat, from the whole of it."""

    def decided(node: fx.Node) -> Hashable:
        key, name = node.meta["key"], captured.parameters.get(node.name, "")
        parameter = plan.parameters.get(name) if node.op == "placeholder" else None
        return plan.operators.get(key), plan.shared.get(key), parameter, layer_of(node) in plan.recompute

    runs = find_alike(captured.graph, decided)
    in_runs = sum(map(len, runs))
    # One model with a layer of each run, and for each run one with a layer more.
    if (len(runs) + 1) * len(runs) + len(runs) >= in_runs:
        return seconds(captured.copy(), plan)

    def timed(kept: Sequence[int]) -> float:
        graph = leave_out_layers(captured.graph, runs, kept)
        left = {node.name for node in graph.nodes if node.op == "placeholder"}
        layers = {layer_of(node) for node in graph.nodes}
        short = replace(
            captured,
            module=fx.GraphModule(nn.Module(), graph),
            parameters={node: name for node, name in captured.parameters.items() if node in left},
            buffers={node: name for node, name in captured.buffers.items() if node in left},
            constants={node: value for node, value in captured.constants.items() if node in left},
        )
        return seconds(short, replace(plan, recompute=tuple(layer for layer in plan.recompute if layer in layers)))

    least = timed([1] * len(runs))
    longer = [timed([1 + (i == j) for j in range(len(runs))]) for i in range(len(runs))]
    return least + sum((len(run) - 1) * (more - least) for run, more in zip(runs, longer, strict=True))


__all__ = ["extrapolated_seconds"]
