"""What a dry run sends, phase by phase: as ``runtime.gradients`` and ``runtime.buckets`` send it, on meta tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from autoparallel.comm.collectives import are_adjacent
from autoparallel.comm.groups import active_axes
from autoparallel.comm.traffic import TrafficCounter
from autoparallel.hardware import Profile
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.placements import COLLECTIVES, Layout, action, largest_piece
from autoparallel.placements.redistribution import Step, local_numel, step_bytes
from autoparallel.plan import Plan
from autoparallel.predict.meter import Clock

UNSHARD, FORWARD, BACKWARD, GRADIENTS = "unshard", "forward", "backward", "gradients"
PHASES = (UNSHARD, FORWARD, BACKWARD, GRADIENTS)
"""Forward and backward of one microbatch; once a step, what is gathered before them and the gradients' reduction."""

Finish = Callable[[], list[torch.Tensor]]
"""Waits for what was sent and puts together what arrived."""


class Transfers:
    """What one rank sends, and the time that passes.

    Attributes:
        phase: the one that runs.
        counters: of what is sent, by phase.
        seconds: by phase; what overlaps is counted once (see [Note: two clocks] in ``predict.meter``).
    """

    def __init__(self, plan: Plan, profile: Profile, clock: Clock) -> None:
        self.plan, self.profile, self.clock = plan, profile, clock
        self.phase = FORWARD
        self.counters = {phase: TrafficCounter() for phase in PHASES}
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def add(self, kind: str, axis: str, full_bytes: int, ranks: int) -> None:
        """Counts one collective in the phase that runs now, and waits for it."""
        self.clock.wait(self.begin(kind, axis, full_bytes, ranks))

    def begin(self, kind: str, axis: str, full_bytes: int, ranks: int) -> float:
        """Counts one collective in the phase that runs now, and starts it."""
        self.counters[self.phase].add(kind, axis, full_bytes, ranks)
        if ranks == 1:
            return self.clock.now
        names = self.plan.axis_names
        axes = [names.index(name) for name in axis.split("+")]
        begun = self.clock.now
        done = self.clock.start(self.profile.step_seconds(self.plan.axis_sizes, kind, axes, full_bytes))
        if self.phase == GRADIENTS:  # what the backward cannot hide of it
            self.seconds[GRADIENTS] += self.clock.now - begun
        return done

    def travel(
        self,
        chains: Sequence[ParameterChain],
        paths: Sequence[Sequence[Step]],
        tensors: Sequence[torch.Tensor],
        layouts: Sequence[Layout],
        phases: Sequence[str] = (),
    ) -> Finish:
        """Takes the tensors of many chains along their paths: each step is one collective for all of them.

        The first starts at once; what is returned waits for it and runs the others, one after the other.  As in
        ``runtime.gradients``, what is sent ends with its collective.

        Args:
            layouts: how they lie before.
            phases: of each step; the one that runs now unless told.
        """
        if not paths[0]:
            return lambda: list(tensors)
        begun = [self.step(chains, [p[0] for p in paths], tensors, layouts, phases[0:1])]

        def finish() -> list[torch.Tensor]:
            made, known = begun.pop()(), layouts
            for i in range(1, len(paths[0])):
                known = [p[i - 1].apply(x) for p, x in zip(paths, known, strict=True)]
                made = self.step(chains, [p[i] for p in paths], made, known, phases[i : i + 1])()
            return made

        return finish

    def step(
        self,
        chains: Sequence[ParameterChain],
        steps: Sequence[Step],
        tensors: Sequence[torch.Tensor],
        layouts: Sequence[Layout],
        phase: Sequence[str],
    ) -> Finish:
        """Starts one step outside of the body, in one collective for all."""
        sizes, first, dtype = self.plan.axis_sizes, steps[0], tensors[0].dtype
        kind = action(first.src, first.dst)
        after = [s.apply(x) for s, x in zip(steps, layouts, strict=True)]
        shapes = [largest_piece(c.shape, x, sizes) for c, x in zip(chains, after, strict=True)]
        full = sum(
            step_bytes(s, x, c.shape, dtype.itemsize, sizes) for s, x, c in zip(steps, layouts, chains, strict=True)
        )
        if kind not in COLLECTIVES:
            self.clock.compute(self.profile.step_seconds(sizes, kind, first.axes, full))
            if kind == "slice":
                rows = zip(tensors, steps, shapes, strict=True)
                tensors = [t.narrow(s.dst.dim, 0, shape[s.dst.dim]) for t, s, shape in rows]
            elif kind != "nothing":
                tensors = [_empty(shape, dtype) for shape in shapes]
            return lambda: list(tensors)
        ranks = math.prod(sizes[i] for i in first.axes)
        axis = active_axes("+".join(self.plan.axis_names[i] for i in first.axes), dict(self.plan.mesh).__getitem__)
        # What is sent together is copied together, and what is reduced in place in any case.
        together = len(tensors) == 1 or kind == "all_gather" and are_adjacent(tensors)
        copied = not together or kind == "all_reduce" or any(s.dst.kind == "S" and s.dst.dim for s in steps)
        before = sum(local_numel(c.shape, x, sizes) for c, x in zip(chains, layouts, strict=True))
        sent = [_empty(before, dtype)] if copied else list(tensors)
        self.clock.compute(2 * before * dtype.itemsize * copied / self.profile.memory_bandwidth)
        shrunk = ranks if kind in ("reduce_scatter", "all_to_all") else 1
        arrived = [sent[0] if kind == "all_reduce" else _empty(full // dtype.itemsize // shrunk, dtype)]
        copy = _empty(full // dtype.itemsize, dtype) if kind in self.profile.copies else None
        if copy is not None and kind == "reduce_scatter":
            sent = [copy]
        running, self.phase = self.phase, (*phase, self.phase)[0]
        done = self.begin(kind, axis, full, ranks)
        self.phase = running
        if copy is not None:
            self.clock.hold(copy, done)
        joined = kind not in ("all_reduce", "reduce_scatter") and (len(chains) > 1 or bool(first.src.dim))

        def finish() -> list[torch.Tensor]:
            self.clock.wait(done)
            whole = arrived.pop()
            sent.clear()
            if not joined:
                return _cut(whole, shapes)
            # Pieces of several ranks are put together.
            self.clock.compute(2 * whole.numel() * dtype.itemsize / self.profile.memory_bandwidth)
            return [_empty(shape, dtype) for shape in shapes]

        return finish

    def empty(self, shape: Sequence[int], layout: Layout, dtype: torch.dtype) -> torch.Tensor:
        """A rank's part of a tensor that lies as ``layout`` says."""
        return _empty(largest_piece(shape, layout, self.plan.axis_sizes), dtype)

    def finish_phase(self, phase: str) -> None:
        """Notes the time that has passed since the phase before."""
        spent = sum(self.seconds.values())
        self.seconds[phase] += self.clock.now - spent


def _empty(shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cut(whole: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Tensors that lie one behind the other in a piece of memory."""
    found, offset = [], 0
    for shape in shapes:
        size = math.prod(shape)
        fits = offset + size <= whole.numel()
        found.append(whole[offset : offset + size].view(shape) if fits else whole.new_empty(shape))
        offset += size
    return found
