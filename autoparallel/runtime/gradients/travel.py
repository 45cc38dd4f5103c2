"""Parameters and gradients on their ways over a mesh: many of them take the same steps, packed, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.comm import ranges
from autoparallel.comm.collectives import Extent, extent_of, start_transfers
from autoparallel.comm.groups import group_name
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.placements import COLLECTIVES, Layout, action
from autoparallel.placements.redistribution import Step, steps_by_axis

Tensors = list[torch.Tensor]


class Travel:
    """Tensors on their way through collectives, one after another; a call brings them to the end.

    Args:
        tensors: what it begins with.
        steps: each starts a collective for the tensors, and returns a function that waits for its results. The first
            is started at once.
        local: how many of the last steps send nothing.

    Attributes:
        name: what it brings, in a profile.
    """

    def __init__(
        self, tensors: Tensors, steps: Sequence[Callable[[Tensors], Callable[[], Tensors]]], local: int = 0
    ) -> None:
        self.name: Callable[[], str] | None = None
        self._steps, self._local = list(steps[1:]), local
        self._wait: Callable[[], Tensors] | None = steps[0](tensors) if steps else lambda: tensors

    def __call__(self) -> Tensors:
        """The tensors at the end of the way; asked for once."""
        with self._range():
            values = self._take()
            while self._steps:
                values = self._steps.pop(0)(values)()
            return values

    def advance(self) -> None:
        """Waits for the collective that is under way, where another comes after it, which starts."""
        if len(self._steps) > self._local:
            with self._range():
                self._wait = self._steps.pop(0)(self._take())

    def finish(self) -> None:
        """Brings the tensors to the end, where they stay until they are asked for; what was sent ends now, and so does
        what they are only a part of."""
        values = self()
        storages = [value.untyped_storage() for value in values]
        used: dict[int, int] = {}
        for value, storage in zip(values, storages, strict=True):
            used[id(storage)] = used.get(id(storage), 0) + value.nbytes
        ends = [v.clone() if s.nbytes() > used[id(s)] else v for v, s in zip(values, storages, strict=True)]
        self._wait = lambda: ends

    def abandon(self) -> None:
        """Waits for the collective that is under way, and starts no other."""
        self._steps.clear()
        if self._wait is not None:
            self._take()

    def _range(self) -> AbstractContextManager[None]:
        return ranges.named(self.name) if self.name is not None else nullcontext()

    def _take(self) -> Tensors:
        assert self._wait is not None
        wait, self._wait = self._wait, None  # what was sent ends with the collective, not with this object
        return wait()


class Gather:
    """The parameters of a bucket on their way to their uses; a call waits for them.

    Args:
        count: of the parameters.
        travels: one for each use, of all parameters.
    """

    def __init__(self, count: int, travels: Sequence[Travel]) -> None:
        self._count, self._travels = count, travels

    def __call__(self) -> Tensors:
        """This rank's values, parameter by parameter, for each of its uses; asked for once."""
        columns = [travel() for travel in self._travels]
        return [column[i] for i in range(self._count) for column in columns]

    def abandon(self) -> None:
        """Waits for what is under way, and forgets it."""
        for travel in self._travels:
            travel.abandon()


class Carrier:
    """Takes parameters to their uses, and gradients back, over one mesh.

    Args:
        mesh, prefix: the mesh, and the name under which it is bound.
    """

    def __init__(self, mesh: DeviceMesh, prefix: str) -> None:
        self.move(mesh, prefix)

    def move(self, mesh: DeviceMesh, prefix: str) -> None:
        """Goes to another mesh."""
        self.mesh, self.prefix = mesh, prefix
        self.names = mesh.mesh_dim_names or ()
        self._extents: dict[Step, Extent | None] = {}

    def group(self, axes: Sequence[int]) -> str:
        """How programs name the group over some axes of the mesh."""
        return group_name(self.prefix, self.names, axes)

    def gather(self, chains: Sequence[ParameterChain], values: Tensors) -> Gather:
        """Starts to take the parameters of a bucket from rest to their uses."""
        values = cast(values, chains[0].dtype)
        uses = range(len(chains[0].uses))
        name = partial(_name, "gather" if any(chains[0].paths) else "take", chains)
        with ranges.named(name):
            travels = [
                self.start([v.view_as(v) for v in values] if use else values, [c.paths[use] for c in chains])
                for use in uses  # each has tensors of its own, also where a use is as at rest
            ]
        for travel in travels:
            travel.name = name
        return Gather(len(chains), travels)

    def start(self, tensors: Tensors, paths: Sequence[Sequence[Step]], *, owned: bool = False) -> Travel:
        """Takes each tensor along its path; all paths go the same way, as those of a bucket do.  The first collective
        starts at once, in the tensors' own memory if that is ``owned``."""
        steps = [step for step in zip(*paths, strict=True) if action(step[0].src, step[0].dst) != "nothing"]
        begins = [partial(self._start_step, step, owned and not i) for i, step in enumerate(steps)]
        return Travel(tensors, begins, local_at_end(steps))

    def _start_step(self, steps: Sequence[Step], owned: bool, tensors: Tensors) -> Callable[[], Tensors]:
        extents = [None if s.before is None else self._extent(s) for s in steps]
        group = self.group(steps[0].axes)
        return start_transfers(tensors, [s.src for s in steps], [s.dst for s in steps], group, extents, owned)

    def _extent(self, step: Step) -> Extent | None:
        """What this rank must know of a step between shards that differ in size."""
        if step not in self._extents:
            self._extents[step] = extent_of(step, [self.group((axis,)) for axis in range(len(self.names))])
        return self._extents[step]

    def reduce(
        self, chains: Sequence[ParameterChain], values: Tensors, paths: Sequence[Sequence[Step]], owned: bool = False
    ) -> Travel:
        """Starts to take gradients along their paths, in the dtype in which they travel."""
        name = partial(_name, "reduce gradients of" if paths[0] else "take gradients of", chains)
        with ranges.named(name):
            travel = self.start(cast(values, chains[0].reduce_dtype), paths, owned=owned)
        travel.name = name
        return travel

    def along(self, value: torch.Tensor, shape: tuple[int, ...], src: Layout, dst: Layout) -> torch.Tensor:
        """A parameter's value or gradient of a global shape, taken from one layout to another."""
        return self.start([value], [self.path(shape, src, dst)])()[0]

    def path(self, shape: tuple[int, ...], src: Layout, dst: Layout) -> list[Step]:
        """A way between two layouts of a parameter that no plan has chosen."""
        layout, steps = src, []
        for step in steps_by_axis(src, dst):
            steps.append(step.on(shape, layout, tuple(self.mesh.shape)))
            layout = step.apply(layout)
        return steps


def cast(values: Tensors, dtype: torch.dtype) -> Tensors:
    """The same values in a dtype; a tensor itself where it has that already."""
    return [value if value.dtype == dtype else value.to(dtype) for value in values]


def local_at_end(steps: Sequence[Sequence[Step]]) -> int:
    """How many of the last steps of some paths, which all go the same way, send nothing."""
    sends = [action(step[0].src, step[0].dst) in COLLECTIVES for step in steps]
    return sends[::-1].index(True) if True in sends else len(sends)


def _name(what: str, chains: Sequence[ParameterChain]) -> str:
    """What is done with the parameters of a bucket, as a profile shows it."""
    first, last = chains[0].name, chains[-1].name
    return f"{what} {first}" + (f" to {last} ({len(chains)} parameters)" if len(chains) > 1 else "")
