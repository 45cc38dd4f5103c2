"""What a plan is predicted to send, take and keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoparallel.comm.traffic import Traffic
from autoparallel.placements import Layout


@dataclass(frozen=True)
class ParameterRow:
    """How one parameter lies.

    Attributes:
        name: within its module.
        shape: of the whole parameter; None where it is not known.
        at_rest: its layout between steps.
        uses: the layouts it is used in; empty where they are not known.
        gather: when it is gathered; empty where it is used as it lies.
        trainable: whether it gets a gradient.
        rows: with how many rows it is used, where some of them are padding.
    """

    name: str
    shape: tuple[int, ...] | None
    at_rest: Layout
    uses: tuple[Layout, ...]
    gather: str
    trainable: bool
    rows: int | None = None


@dataclass(frozen=True)
class ModuleRow:
    """What one module of the model became.

    Attributes:
        path: its path in the model; empty for the model itself.
        parameters: its own parameters.
        shape, layout: its result's global shape and layout; None where it makes no tensor.
    """

    path: str
    parameters: tuple[ParameterRow, ...]
    shape: tuple[int, ...] | None = None
    layout: Layout | None = None


@dataclass(frozen=True)
class Workload:
    """What a call in training has to do, whatever the plan.

    Attributes:
        count: tokens, or rows of the batch where no input is made of tokens.
        unit: "tokens" or "rows".
        flops: of the model, forward and backward, on all devices together; nothing computed twice counts.
        peak: the floating-point operations per second that a device's maker names, in the dtype of most of them.
    """

    count: int
    unit: str
    flops: float
    peak: float

    def mfu(self, seconds: float, devices: int) -> float:
        """The part of the devices' peak that the model's own arithmetic is, in so many seconds."""
        return self.flops / (seconds * devices * self.peak)


PHASES, COMPUTE, NETWORK = "phases", "computes", "sends"


@dataclass(frozen=True, slots=True)
class PredictedSpan:
    """Something that a rank is predicted to spend time on.

    Attributes:
        line: ``PHASES``, ``COMPUTE`` (with what it waits for) or ``NETWORK``.
        name: of the phase, the module or the collective.
        begin, end: in seconds.
        module: for which something is sent.
    """

    line: str
    name: str
    begin: float
    end: float
    module: str = ""


@dataclass(frozen=True)
class Prediction:
    """What one optimizer step is predicted to cost each rank, for calls of the sizes that were planned for.

    Counts and bytes are exact: ``count_traffic()`` around the same calls counts the same.

    Attributes:
        unshard: traffic of the gathers of parameters once a step.
        forward, backward: traffic of one microbatch; gradients that are reduced once a step are not in it.
        gradients: traffic of that reduction.
        clip: traffic of ``clip_grad_norm_`` with a finite p or inf: one all-reduce; in no other number.
        unshard_seconds: of the gathers once a step.
        forward_seconds, backward_seconds: of one microbatch; a collective that runs beside what computes counts only
            where something waits for it.
        gradient_seconds, update_seconds: of one reduction of gradients, and one step of the optimizer.
        memory: what of, to bytes per device; ``accumulators`` come on top where ``no_sync()`` is used.
        reductions: what each time of reducing gradients would cost, were it that of every parameter.
        regathered: how many buckets of parameters the backward gathers again.
        modules: how the model's modules lie, in the model's order.
        host_memory: bytes of the optimizer's states in host memory, per device.
        host_seconds: the part of ``update_seconds`` in which they come to the device and go back.
        microbatches: how many forwards and backwards a call makes: what is said of one microbatch is of one of these.
        profile: the name of the hardware profile.
        optimizer: the class of the optimizer whose states and step are in these numbers.
        timeline: over one step with one microbatch, seconds since its begin and the bytes that a device holds then.
        spans: what these seconds are spent on, up to the update.
        most: the most bytes that a device holds while each module runs in each phase; the largest is ``total_memory``.
    """

    unshard: Traffic = field(default_factory=Traffic)
    forward: Traffic = field(default_factory=Traffic)
    backward: Traffic = field(default_factory=Traffic)
    gradients: Traffic = field(default_factory=Traffic)
    clip: Traffic = field(default_factory=Traffic)
    unshard_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    gradient_seconds: float = 0.0
    update_seconds: float = 0.0
    memory: Mapping[str, float] = field(default_factory=dict)
    reductions: Mapping[str, ReductionCost] = field(default_factory=dict)
    regathered: int = 0
    modules: tuple[ModuleRow, ...] = ()
    timeline: tuple[tuple[float, float], ...] = ()
    spans: tuple[PredictedSpan, ...] = field(default=(), compare=False, repr=False)
    most: Mapping[tuple[str, str], float] = field(default_factory=dict, compare=False, repr=False)
    profile: str = ""
    optimizer: str = ""
    host_memory: float = 0.0
    host_seconds: float = 0.0
    microbatches: int = 1

    def step(self, microbatches: int = 1) -> Traffic:
        """The traffic of a step of so many calls, all but the last under ``no_sync()``."""
        return self.unshard + (self.forward + self.backward) * (microbatches * self.microbatches) + self.gradients

    def seconds(self, microbatches: int = 1) -> float:
        """The predicted time of a step of so many calls, clipping aside."""
        return (self.forward_seconds + self.backward_seconds) * (microbatches * self.microbatches) + (
            self.unshard_seconds + self.gradient_seconds + self.update_seconds
        )

    @property
    def times(self) -> dict[str, float]:
        """Seconds of each part of a step of one call."""
        return {
            "unshard": self.unshard_seconds,
            "forward": self.forward_seconds * self.microbatches,
            "backward": self.backward_seconds * self.microbatches,
            "gradients": self.gradient_seconds,
            "update": self.update_seconds,
        }

    @property
    def peak(self) -> dict[str, float]:
        """What holds memory at the worst moment of a step of one call, to bytes per device."""
        return {what: size for what, size in self.memory.items() if what != ACCUMULATORS or self.microbatches > 1}

    @property
    def total_memory(self) -> float:
        """Bytes per device at that moment."""
        return sum(self.peak.values())


class LatePrediction:
    """A prediction that is made when it is first asked for, so that no step waits for it.

    Args:
        make: makes it, and is forgotten then.
    """

    def __init__(self, make: Callable[[], Prediction]) -> None:
        self._make: Callable[[], Prediction] | None = make
        self._prediction: Prediction | None = None

    def __call__(self) -> Prediction:
        if self._prediction is None:
            assert self._make is not None
            self._prediction, self._make = self._make(), None
        return self._prediction

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: the prediction, without the program that it is made from."""
        return {"_make": None, "_prediction": self()}


ACCUMULATORS = "accumulators"


@dataclass(frozen=True)
class ReductionCost:
    """What one time of reducing costs each rank, for some parameters.

    Attributes:
        accumulators: bytes beside the gradients at rest.
        seconds: communication of every microbatch but the last.
    """

    accumulators: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: ReductionCost) -> ReductionCost:
        return ReductionCost(self.accumulators + other.accumulators, self.seconds + other.seconds)
