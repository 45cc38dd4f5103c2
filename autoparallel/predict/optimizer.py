"""What an optimizer keeps between steps, and what its step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from operator import add

import torch
from torch import fx, nn

from autoparallel.graph.captured import Captured
from autoparallel.hardware import ADAMW, OptimizerCost, Profile
from autoparallel.placements import Layout
from autoparallel.placements.redistribution import local_numel
from autoparallel.runtime.steps.twins import BATCH_BYTES

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def optimizer_cost(make: MakeOptimizer) -> OptimizerCost:
    """What is seen of an optimizer when it steps on a small matrix.

    Args:
        make: makes it from a list of parameters, such as ``torch.optim.AdamW``.

    Raises:
        ValueError: where it cannot be made of a matrix, or cannot step on it.
    """
    parameter = nn.Parameter(torch.ones(16, 16))
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = make([parameter])
        optimizer.step()
        states = optimizer.state[parameter].values()
    except Exception as error:
        raise ValueError(
            f"optimizer= makes no optimizer of a list of parameters that steps on a matrix on a CPU ({error}): give "
            "torch.optim.SGD, or lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)"
        ) from error
    state_bytes = sum(x.nbytes for x in states if isinstance(x, torch.Tensor) and x.shape == parameter.shape)
    iterations = optimizer.defaults["ns_steps"] if isinstance(optimizer, torch.optim.Muon) else 0
    return OptimizerCost(type(optimizer).__name__, state_bytes / parameter.nbytes, iterations)


@dataclass(frozen=True)
class ParameterCost:
    """What a rank keeps of a parameter between steps, in bytes, and how long it updates it.

    Attributes:
        parameter, gradient, states: this rank's part of it, of its gradient, and of what the optimizer keeps.
        seconds: of the optimizer's step, ``host_seconds`` among them.
        host: bytes of states that lie in the host's memory instead.
        host_seconds: in which these come to the device and go back.
    """

    parameter: int
    gradient: int = 0
    states: int = 0
    seconds: float = 0.0
    host: int = 0
    host_seconds: float = 0.0

    @property
    def bytes(self) -> int:
        return self.parameter + self.gradient + self.states

    def __add__(self, other: ParameterCost) -> ParameterCost:
        return ParameterCost(*map(add, astuple(self), astuple(other)))


def cost_at_rest(
    profile: Profile,
    axis_sizes: Sequence[int],
    shape: Sequence[int],
    layout: Layout,
    itemsize: int,
    trainable: bool,
    offloaded: bool = False,
) -> ParameterCost:
    """What a parameter of a shape that lies so between steps costs each rank.

    An update reads and writes what is kept.  A matrix that is updated as a whole travels to one rank and back, packed
    with others, and each rank has its share of the matrices (see ``runtime.steps.owned_steps``); what is not a matrix
    is updated by AdamW there, as is usual beside Muon, which takes matrices only.

    Args:
        itemsize: bytes of an element, which its gradient and states take, too.
        offloaded: whether states lie in host memory (see ``runtime.steps.host_steps``); where that is the device's own,
            nothing is saved by it.
    """
    numel = local_numel(shape, layout, axis_sizes)
    part = itemsize * numel
    if not trainable:
        return ParameterCost(part)
    optimizer = profile.optimizer
    if optimizer.iterations and len(shape) != 2:
        optimizer = ADAMW
    at_rest = ParameterCost(part, part, int(optimizer.states * part))
    seconds = 2 * at_rest.bytes / profile.memory_bandwidth
    if optimizer.iterations:
        ranks, parts, (short, long) = math.prod(axis_sizes), math.prod(shape) / max(numel, 1), sorted(shape)
        points = optimizer.iterations * (4.0 * short**2 * long + 2.0 * short**3)
        seconds *= parts / ranks
        seconds += profile.compute_seconds(points / ranks, 0.0, torch.bfloat16)
        # The parameter, its gradient and states come from its parts; each copy of the first and the last goes back.
        there, back = parts * at_rest.bytes * (parts > 1), ranks * (at_rest.bytes - at_rest.gradient)
        time = partial(profile.step_seconds, axis_sizes, "all_to_all", range(len(axis_sizes)))
        seconds += time(int(there + back)) - time(0) if ranks > 1 else 0.0
    if not offloaded:
        return ParameterCost(part, part, at_rest.states, seconds)
    host_seconds = profile.host_seconds(at_rest.states)
    left, host = (0, at_rest.states) if profile.host_bandwidth is not None else (at_rest.states, 0)
    return replace(at_rest, states=left, seconds=seconds + host_seconds, host=host, host_seconds=host_seconds)


def parameter_cost(
    captured: Captured,
    node: fx.Node,
    layout: Layout,
    axis_sizes: Sequence[int],
    profile: Profile,
    *,
    offloaded: bool = False,
) -> ParameterCost:
    """What a parameter of a captured graph costs each rank where it lies so between steps; see :func:`cost_at_rest`."""
    shape, trainable, itemsize = node.meta["val"].shape, node.meta["differentiable"], captured.rest_dtype(node).itemsize
    return cost_at_rest(profile, axis_sizes, shape, layout, itemsize, bool(trainable), offloaded)


def most_brought(resting: Sequence[ParameterCost]) -> int:
    """The bytes of states that are on the device at a time, of those that lie in host memory."""
    ratio = max((x.host / x.parameter for x in resting if x.parameter), default=0.0)
    largest = max((x.host for x in resting), default=0)
    return max(largest, min(sum(x.host for x in resting), int(BATCH_BYTES * ratio)))
