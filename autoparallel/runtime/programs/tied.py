"""Parameters that several stages use: one of them, the owner, holds it; the others borrow it for a call.

At the beginning of a call the owner sends its part of the parameter, as it lies, to the ranks of the others; at the end
they send back the gradients they have made, summands all, which the owner adds to its own before anything is reduced.
So the parameter is counted once in the norm and stepped once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autoparallel import _torch
from autoparallel.comm.communicator import Wait
from autoparallel.comm.groups import communicator_of
from autoparallel.passes.hoist_parameter_chains import ParameterChain, join_layouts
from autoparallel.placements import largest_piece, to_dtensor_placements
from autoparallel.placements.redistribution import Redistributor
from autoparallel.placements.regions import own_region
from autoparallel.program.stages import StagedProgram
from autoparallel.runtime.gradients.store import GradientStore


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages use.

    Attributes:
        chains: stage to its way there.
        chain: the way of the gradients' sum back, in the layout in which those of all stages can be added.
        owner: the rank on the pipeline's axis that holds it.
        users: for each rank that uses it, its stages.
    """

    chains: Mapping[int, ParameterChain]
    chain: ParameterChain
    owner: int
    users: Mapping[int, tuple[int, ...]]

    @property
    def borrowers(self) -> tuple[int, ...]:
        """The ranks that use it and do not hold it."""
        return tuple(rank for rank in self.users if rank != self.owner)


def find_ties(staged: StagedProgram, owners: Mapping[str, int], redistributor: Redistributor) -> list[Tie]:
    """The parameters that several stages use, or one that lies elsewhere.

    Args:
        owners: the rank on the pipeline's axis that holds each parameter.
    """
    ties, rank_of = [], staged.plan.rank_of
    chains = [program.chains for program in staged.programs]
    for name in sorted({name for stage in chains for name in stage}):
        used = {i: stage[name] for i, stage in enumerate(chains) if name in stage}
        users: dict[int, tuple[int, ...]] = {}
        for stage in used:
            users[rank_of(stage)] = (*users.get(rank_of(stage), ()), stage)
        if len(used) > 1 or owners[name] not in users:
            first = next(iter(used.values()))
            layouts = join_layouts([chain.gradient_layout for chain in used.values()])
            ties.append(Tie(used, first.with_gradient_layout(layouts, redistributor), owners[name], users))
    return ties


class TiedParameters:
    """The ties of a pipeline, as one rank sees them.

    Args:
        store: the gradients of the parameters that lie on this rank.
        group: the name of the group of all ranks of the pipeline; None where this rank runs all stages.

    Attributes:
        rank: this rank's place in the pipeline.
    """

    def __init__(self, ties: Sequence[Tie], store: GradientStore, group: str | None) -> None:
        self.ties, self.store = ties, store
        self.communicator, self.axis = communicator_of(group or store.group([0]))
        self.rank = rank = self.communicator.index(self.axis) if group is not None else 0
        self.borrowed: dict[str, nn.Parameter] = {}
        for tie in ties:
            if rank in tie.borrowers:
                chain, mesh = tie.chain, store.mesh
                part = own_region(chain.shape, chain.at_rest, mesh)
                assert part is not None
                local = torch.empty(part.shape, dtype=chain.rest_dtype, device=mesh.device_type)
                value = _torch.dtensor.from_part(local, mesh, to_dtensor_placements(chain.at_rest), chain.shape)
                self.borrowed[chain.name] = nn.Parameter(value, requires_grad=chain.trainable)

    def chain(self, name: str) -> ParameterChain:
        """The way of a parameter's summed gradient back."""
        return next(tie.chain for tie in self.ties if tie.chain.name == name)

    def lend(self) -> Callable[[], None]:
        """Sends parameters to those who borrow them; returns what waits for the sends."""
        sends: list[Wait] = []
        for tie in self.ties:
            name = tie.chain.name
            if self.rank == tie.owner:
                local = _torch.dtensor.local_of(self.store.parameters[name]).detach().contiguous()
                sends += [self.communicator.send(local, self.axis, borrower) for borrower in tie.borrowers]
            elif self.rank in tie.borrowers:
                local = _torch.dtensor.local_of(self.borrowed[name]).detach()
                local.copy_(self.communicator.receive(torch.empty_like(local), self.axis, tie.owner)())

        def wait() -> None:
            for wait_for in sends:
                wait_for()

        return wait

    def merge(self, sums: Mapping[int, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Takes the gradients of tied parameters out of the stages' sums; the owner's gets all of them.

        Returns:
            The totals of the parameters that lie on this rank, as their ``chain`` makes them.
        """
        totals: dict[str, torch.Tensor] = {}
        sends: list[Wait] = []
        for tie in self.ties:
            if not tie.chain.trainable or self.rank not in tie.users and self.rank != tie.owner:
                continue
            total = self._local_sum(tie, sums)
            if self.rank != tie.owner:
                sends.append(self.communicator.send(total, self.axis, tie.owner))
                continue
            for borrower in tie.borrowers:
                total = total + self.communicator.receive(torch.empty_like(total), self.axis, borrower)()
            totals[tie.chain.name] = total
        for wait in sends:
            wait()
        return totals

    def _local_sum(self, tie: Tie, sums: Mapping[int, dict[str, torch.Tensor]]) -> torch.Tensor:
        """The sum of this rank's stages."""
        chain, sizes = tie.chain, tuple(self.store.mesh.shape)
        total: torch.Tensor | None = None
        for stage in tie.users.get(self.rank, ()):
            value = sums[stage].pop(chain.name, None)
            if value is not None:
                value = self.store.along(value, chain.shape, tie.chains[stage].gradient_layout, chain.gradient_layout)
                total = value if total is None else total + value
        if total is None:
            shape = largest_piece(chain.shape, chain.gradient_layout, sizes)
            return torch.zeros(shape, dtype=chain.accumulator_dtype, device=self.store.mesh.device_type)
        return total.contiguous()
