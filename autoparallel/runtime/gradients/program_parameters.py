"""The parameters that programs gather, and that their gradients come back to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoparallel import _torch
from autoparallel._torch.autograd import AskedFor
from autoparallel.comm.waiting import note_raised
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.runtime.dtensors.boundary import OverMesh
from autoparallel.runtime.gradients.backwards import BackwardPass, BackwardPasses, Grads, Rows, reached
from autoparallel.runtime.gradients.travel import Carrier, Tensors, cast


class KeptCopy:
    """What a bucket has gathered, kept for the calls that follow under ``no_sync()``.

    Args:
        values: the gathered parameters.
        parameters: those at rest, which may be given other memory.
    """

    def __init__(self, values: Tensors, parameters: Sequence[torch.Tensor]) -> None:
        self.values, self._parameters = values, parameters
        self._before = [_torch.dtensor.local_of(x).detach().clone() for x in parameters]

    def has_changed(self) -> bool:
        """Whether this rank's part of a parameter is no longer the one that was gathered.

        Values are compared, because writing through ``p.data`` or by an operator over lists of tensors, as optimizers
        use them, changes no version of a ``DTensor``.
        """
        present = _torch.dtensor.locals_of(self._parameters)
        return any(not torch.equal(before, now) for before, now in zip(self._before, present, strict=True))


class ProgramParameters(Carrier):
    """The parameters of programs on one mesh; what becomes of their gradients, a subclass says by :meth:`receive`.

    Args:
        mesh, prefix: the mesh, and the name under which it is bound.
        parameters: those at rest, by name.

    Attributes:
        synchronise: whether a backward reduces what it makes, and does not only add it up.
        copies: what has been gathered for several calls, by bucket.
        passes: the backward passes that have something under way.
    """

    def __init__(self, mesh: DeviceMesh, prefix: str, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(mesh, prefix)
        self.parameters = parameters
        self.synchronise = True
        self.copies: dict[object, KeptCopy] = {}
        self.passes = BackwardPasses(self._finish_backward, note_raised)

    @property
    def has_pending(self) -> bool:
        """Whether some gradient is still a summand."""
        return False

    def begin_backward(self) -> None:
        """Notes that a backward has come to a program, and ends those that have died."""
        self.passes.running()

    def receive(
        self, chains: Sequence[ParameterChain], grads: Grads, asked_for: AskedFor, shared: Collection[int]
    ) -> list[torch.Tensor | None]:
        """Takes the gradients of a bucket's parameters.

        Args:
            asked_for: which of them the backward is asked for.
            shared: the ids of gradients whose memory others may read.

        Returns:
            What autograd is handed for each.
        """
        raise NotImplementedError

    def _finish_backward(self, ended: BackwardPass) -> None:
        """Hands out what a backward has reduced."""
        ended.deliver()

    def trained(self, chains: Sequence[ParameterChain], grads: Grads, asked_for: AskedFor) -> Rows:
        """Those of a bucket's parameters that are asked for, reached, and not frozen since the forward."""
        rows = reached(chains, grads, asked_for.inputs)
        return [row for row in rows if self.parameters[row[0].name].requires_grad]

    def complete(self, rows: Rows) -> dict[str, torch.Tensor]:
        """The complete gradients of those of a bucket's parameters that a backward has reached, by name."""
        if not rows:
            return {}
        chains = [chain for chain, _ in rows]
        reduced = self.reduce(chains, self.sum_uses(rows), [chain.way_back for chain in chains])()
        return dict(zip([chain.name for chain in chains], cast(reduced, chains[0].rest_dtype), strict=True))

    def sum_uses(self, rows: Rows) -> Tensors:
        """One gradient for each parameter, in the layout in which those of its uses add up."""
        return [row[0] if len(row) == 1 else self._sum(chain, row) for chain, row in rows]  # type: ignore[misc]

    def _sum(self, chain: ParameterChain, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        first, *others = [
            self.along(value, chain.shape, layout, chain.gradient_layout)
            for value, layout in zip(values, chain.comes_back, strict=True)
            if value is not None
        ]
        return sum(others, first)

    def lay_out(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient as autograd is given it, with its graph."""
        parameter = self.parameters[name]
        spec, shape, stride = _torch.dtensor.spec_of(parameter), parameter.shape, parameter.stride()  # type: ignore[arg-type]
        laid_out: torch.Tensor = OverMesh.apply(value, spec.mesh, spec.placements, shape, stride)
        return laid_out
