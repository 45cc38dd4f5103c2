"""The communicator of a dry run: nothing is sent, but every collective is counted and takes its time.

The runtime and the operators talk to it as they do to that of a mesh.  What would arrive is an empty tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from autoparallel.comm.communicator import Wait
from autoparallel.comm.groups import active_axes
from autoparallel.comm.traffic import TrafficCounter
from autoparallel.decisions.prediction import PHASES as PHASE_LINE
from autoparallel.hardware import Profile
from autoparallel.plan import Plan
from autoparallel.predict.meter import Clock

UNSHARD, FORWARD, BACKWARD, GRADIENTS = "unshard", "forward", "backward", "gradients"
PHASES = (UNSHARD, FORWARD, BACKWARD, GRADIENTS)
"""Forward and backward of one microbatch; once a step, what is gathered before them and the gradients' reduction."""


class MeteredCommunicator:
    """Stands at the origin of the mesh, where the pieces of tensors that cannot be cut evenly are the largest.

    Attributes:
        phase: the one that runs.
        counters: of what is sent, by phase.
        seconds: by phase; what overlaps is counted once (see [Note: two clocks] in ``predict.meter``).
        reducing: seconds in which the gradients would be reduced with nothing beside.
    """

    def __init__(self, plan: Plan, profile: Profile, clock: Clock) -> None:
        self.mesh, self.names, self.sizes = dict(plan.mesh), plan.axis_names, plan.axis_sizes
        self.profile, self.clock = profile, clock
        self.phase = FORWARD
        self.counters = {phase: TrafficCounter() for phase in PHASES}
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.reducing = 0.0
        self._begun = 0.0

    # -- what the runtime asks --------------------------------------------------------------------------------------

    def size(self, axis: str) -> int:
        return math.prod(self.mesh[name] for name in axis.split("+"))

    def index(self, axis: str) -> int:
        return 0

    def ranks(self, axis: str) -> list[int]:
        return list(range(self.size(axis)))

    def settle(self) -> None:
        pass

    def send(self, x: torch.Tensor, axis: str, peer: int) -> Wait:
        raise AssertionError("a dry run is of one stage of a pipeline")

    def receive(self, out: torch.Tensor, axis: str, peer: int) -> Wait:
        raise AssertionError("a dry run is of one stage of a pipeline")

    def all_reduce(self, x: torch.Tensor, axis: str, op: str = "sum") -> Wait:
        """Reduces ``x`` in place."""
        return self._send("all_reduce", x, x, x.nbytes, axis)

    def all_gather(self, x: torch.Tensor, axis: str) -> Wait:
        """Gathers ``[...]`` into ``[n, ...]``."""
        out = x.new_empty((self.size(axis), *x.shape))
        return self._send("all_gather", x, out, out.nbytes, axis)

    def reduce_scatter(self, x: torch.Tensor, axis: str) -> Wait:
        """Leaves a row of ``[n, ...]``."""
        if "reduce_scatter" not in self.profile.copies:
            return self._send("reduce_scatter", x, x.new_empty(x.shape[1:]), x.nbytes, axis)
        wait = self._send("reduce_scatter", x, torch.empty_like(x), x.nbytes, axis)

        def add_up() -> torch.Tensor:  # see [Note: gloo's reduce-scatter]: rows arrive, and what was sent is let go of
            rows = wait()
            return rows.new_empty(rows.shape[1:])

        return add_up

    def all_to_all(self, x: torch.Tensor, axis: str) -> Wait:
        """Exchanges the rows of ``[n, ...]``."""
        return self._send("all_to_all", x, torch.empty_like(x), x.nbytes * self.size(axis), axis)

    def all_to_all_rows(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], axis: str
    ) -> torch.Tensor:
        raise AssertionError("how many rows go where is not known without values")

    def _send(self, kind: str, x: torch.Tensor, out: torch.Tensor, full_bytes: int, axis: str) -> Wait:
        end = self.begin(kind, active_axes(axis, self.mesh.__getitem__), full_bytes, self.size(axis))
        arriving, held = [out], [x]
        if kind in self.profile.copies and kind != "reduce_scatter":
            self.clock.hold(x.new_empty(full_bytes // x.element_size()), end)

        def wait() -> torch.Tensor:
            self.clock.wait(end)
            held.clear()  # what was sent ends with its collective
            return arriving.pop()

        return wait

    # -- time -------------------------------------------------------------------------------------------------------

    def begin(self, kind: str, axis: str, full_bytes: int, ranks: int) -> float:
        """Counts one collective in the phase that runs now, and starts it."""
        self.counters[self.phase].add(kind, axis, full_bytes, ranks)
        if ranks == 1:
            return self.clock.now
        axes = [self.names.index(name) for name in axis.split("+")]
        begun, seconds = self.clock.now, self.profile.step_seconds(self.sizes, kind, axes, full_bytes)
        end = self.clock.start(seconds, f"{kind} {axis}")
        if self.phase == GRADIENTS:  # what the backward cannot hide of it
            self.seconds[GRADIENTS] += self.clock.now - begun
            self.reducing += seconds
        return end

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What is sent inside counts in a phase, whichever runs."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def begin_phase(self, phase: str) -> None:
        """Ends the phase that runs: the time since the one before was its."""
        self.seconds[self.phase] += self.clock.now - sum(self.seconds.values())
        if self.clock.now > self._begun:
            self.clock.record(PHASE_LINE, self.phase, self._begun, self.clock.now)
        self.phase = self.clock.phase = phase
        self._begun = self.clock.now
