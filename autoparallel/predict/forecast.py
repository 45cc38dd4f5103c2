"""What a deep model takes, predicted from the same model with fewer layers.

Layers that are alike take the same time each, so two short models, of which one has a layer more, tell about any
number.  Memory is a maximum over a step, and the worst moment of a short model is not that of the deep one: the loss
may be, or the first layer's backward, when all gradients are there.  But what is alive at one moment (while one module
runs, forward or backward) grows by as much with every layer, too.  So each moment is told apart, and the worst is
looked for among what they grow to.  Of layers that are alike these are the first and the last two, of which the last
may come before anything is sent: what lies between them grows evenly from one end to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.captured import Captured
from autoparallel.graph.layers import Run, layer_of
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
        parts: what takes the memory; nothing where short models told.
    """

    seconds: float
    memory: float
    parts: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(prediction: Prediction) -> Forecast:
        """What a whole program takes."""
        return Forecast(prediction.seconds(), prediction.total_memory, prediction.peak)


@dataclass(frozen=True)
class Short:
    """What a step of a short model takes.

    Attributes:
        seconds: of a step.
        most: bytes per device, by the moments of the step.
    """

    seconds: float
    most: Mapping[Hashable, float]


def extrapolated(captured: Captured, plan: Plan, predict: Predict, models: dict[Hashable, Short]) -> Forecast | None:
    """What a step takes; None where the layers hardly repeat, so that the whole program is to be predicted.

    Args:
        models: the short models of this graph that were predicted before; plans that differ only in how many layers
            are recomputed have the same ones.
    """

    def decided(node: fx.Node) -> Hashable:
        key, name = node.meta["key"], captured.parameters.get(node.name, "")
        parameter = plan.parameters.get(name) if node.op == "placeholder" else None
        return plan.operators.get(key), plan.shared.get(key), parameter, plan.recompute.get(layer_of(node) or "")

    decisions = {node.name: decided(node) for node in captured.graph.nodes}
    parts = [part for run in captured.runs for part in run.parts(decisions.__getitem__)]
    runs = [part for part in parts if len(part.members) > 2]
    layers = sum(len(run.members) for run in runs)
    # One model with two layers of each run, and for each run one with a layer more.
    if 2 * (len(runs) + 1) * len(runs) + len(runs) >= layers:
        return None
    layers_of_modules = {node.meta["module"]: layer_of(node) for node in captured.graph.nodes}
    # A node of a layer is known by its place in the layer, which all layers of a run share.
    places: dict[str, Hashable] = {
        name: (number, place)
        for number, run in enumerate(captured.runs)
        for member in range(len(run.members))
        for place, name in enumerate(run.nodes(member))
    }

    def shortened(counts: Sequence[int]) -> Short:
        graph = leave_out_layers(captured.graph, runs, counts)
        left_layers = {layer_of(node) for node in graph.nodes}
        short = replace(captured.part(graph), runs=())
        recompute = {layer: much for layer, much in plan.recompute.items() if layer in left_layers}
        calls = tuple([(places.get(node.name, node.name), decisions[node.name]) for node in graph.nodes])
        key = plan.means, tuple(counts), calls
        if key not in models:
            prediction = predict(short, replace(plan, recompute=recompute))
            models[key] = Short(prediction.seconds(), _by_place(prediction, runs, counts, layers_of_modules))
        return models[key]

    least = shortened([2] * len(runs))
    more = [shortened([2 + (i == j) for j in range(len(runs))]) for i in range(len(runs))]
    missing = [len(run.members) - 2 for run in runs]
    seconds = least.seconds + sum(n * (m.seconds - least.seconds) for n, m in zip(missing, more, strict=True))
    memory = max(
        size + sum(n * (m.most.get(moment, size) - size) for n, m in zip(missing, more, strict=True))
        for moment, size in least.most.items()
    )
    return Forecast(seconds, memory)


def _by_place(
    prediction: Prediction, runs: Sequence[Run], counts: Sequence[int], layers: Mapping[str, str | None]
) -> dict[Hashable, float]:
    """The most bytes at each moment; of layers that are alike, at those of the first and of the last two.

    Args:
        layers: by the paths of modules, those that they are of.
    """
    places: dict[str | None, list[Hashable]] = {}
    for number, (run, count) in enumerate(zip(runs, counts, strict=True)):
        for end in (0, -1, -2):
            places.setdefault(run.members[:count][end], []).append((number, end))
    most: dict[Hashable, float] = {}
    for (phase, module), size in prediction.most.items():
        for place in places.get(layers.get(module), [module]):
            most[phase, place] = max(size, most.get((phase, place), 0.0))
    return most
