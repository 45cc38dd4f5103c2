"""What a deep model takes, predicted from the same model with fewer layers.

Layers that are alike take the same time and memory each once the first of them has begun, so two short models, of which
one has a layer more, tell about any number.  That is near enough to compare plans.  Memory is a maximum over a step,
and the moment of a short model may not be that of the deep one: what must fit, and what a plan says of itself, is
predicted from the whole program (see ``predict.predict``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx, nn

from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.captured import Captured
from autoparallel.graph.layers import layer_of
from autoparallel.passes.leave_out_layers import leave_out_layers
from autoparallel.plan import Plan

Predict = Callable[[Captured, Plan], Prediction]
"""Predicts the program that a plan makes of a graph, which it uses up."""


@dataclass(frozen=True)
class Forecast:
    """What a step takes.

    Attributes:
        seconds: of a step of one call.
        memory: bytes per device.
        whole: whether the whole program was predicted.
        parts: what takes the memory, where it was.
    """

    seconds: float
    memory: float
    whole: bool
    parts: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(prediction: Prediction) -> Forecast:
        """What a whole program takes."""
        return Forecast(prediction.seconds(), prediction.total_memory, True, prediction.peak)


def extrapolated(captured: Captured, plan: Plan, predict: Predict, known: dict[Hashable, Forecast]) -> Forecast | None:
    """What a step takes; None where the layers hardly repeat, so that the whole program is to be predicted.

    Args:
        known: the short models of this graph that were predicted before; plans that differ only in how many layers
            are recomputed have the same ones.
    """

    def decided(node: fx.Node) -> Hashable:
        key, name = node.meta["key"], captured.parameters.get(node.name, "")
        parameter = plan.parameters.get(name) if node.op == "placeholder" else None
        return plan.operators.get(key), plan.shared.get(key), parameter, layer_of(node) in plan.recompute

    nodes = {node.name: node for node in captured.graph.nodes}
    runs = [part for run in captured.runs for part in run.parts(lambda name: decided(nodes[name]))]
    layers = sum(len(run.members) for run in runs)
    # One model with a layer of each run, and for each run one with a layer more.
    if (len(runs) + 1) * len(runs) + len(runs) >= layers:
        return None
    # A node of a layer is known by its place in the layer, which all layers of a run share.
    places: dict[str, Hashable] = {
        name: (number, place)
        for number, run in enumerate(captured.runs)
        for member in range(len(run.members))
        for place, name in enumerate(run.nodes(member))
    }

    def shortened(kept: Sequence[int]) -> Forecast:
        graph = leave_out_layers(captured.graph, runs, kept)
        left = {node.name for node in graph.nodes if node.op == "placeholder"}
        left_layers = {layer_of(node) for node in graph.nodes}
        short = replace(
            captured,
            module=fx.GraphModule(nn.Module(), graph),
            parameters={node: name for node, name in captured.parameters.items() if node in left},
            buffers={node: name for node, name in captured.buffers.items() if node in left},
            constants={node: value for node, value in captured.constants.items() if node in left},
            runs=(),
        )
        recompute = tuple(layer for layer in plan.recompute if layer in left_layers)
        calls = tuple([(places.get(node.name, node.name), decided(node)) for node in graph.nodes])
        key = plan.loss_chunks, plan.microbatches, calls
        if key not in known:
            known[key] = Forecast.of(predict(short, replace(plan, recompute=recompute)))
        return known[key]

    least = shortened([1] * len(runs))
    seconds, memory = least.seconds, least.memory
    for i, run in enumerate(runs):
        more = shortened([1 + (i == j) for j in range(len(runs))])
        seconds += (len(run.members) - 1) * (more.seconds - least.seconds)
        memory += (len(run.members) - 1) * (more.memory - least.memory)
    return Forecast(seconds, memory, False)
