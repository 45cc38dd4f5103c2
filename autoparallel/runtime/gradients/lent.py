"""Parameters that their owner lends for each call: whole on every rank, their gradients handed back by autograd."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from autoparallel._torch.autograd import AskedFor
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.runtime.gradients.backwards import Grads, reached
from autoparallel.runtime.gradients.store import GradientStore


class LentParameters(GradientStore):
    """The parameters of one call, of which nothing is kept when it is over: then there are stand-ins."""

    @contextmanager
    def holding(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Inside, the parameters of a call are there."""
        before, self.parameters = self.parameters, parameters
        try:
            yield
        finally:
            self.parameters = before

    def versions(self, names: Sequence[str]) -> Sequence[int]:
        """Nothing: autograd itself looks at changes in place of the owner's tensors."""
        return ()

    def receive(
        self, chains: Sequence[ParameterChain], grads: Grads, asked_for: AskedFor, shared: Collection[int]
    ) -> list[torch.Tensor | None]:
        """Hands autograd the complete gradients of a bucket's parameters; None for those that were not reached."""
        complete = self.complete(reached(chains, grads))
        return [complete.get(chain.name) for chain in chains]

    def lay_out(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's part itself, as its owner has lent it."""
        return value
