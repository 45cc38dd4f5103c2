"""What a batch is cut into, and what microbatches are put together to: results, and gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import nn

from autoparallel import _torch
from autoparallel.graph.captured import Captured
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.cut_stages import StageGraph
from autoparallel.runtime.gradients.backwards import require_not_handed
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.programs.stages import Stage
from autoparallel.runtime.programs.tied import TiedParameters
from autoparallel.runtime.ranks.messages import Form


def shared_forms(captured: Captured, graph: StageGraph, actual: Mapping[Any, int]) -> tuple[list[int], list[Form]]:
    """What a stage makes that all ranks are told after a call: results and buffers, by number, and their forms.

    Args:
        captured: the whole model's graph.
        graph: of the stage.
        actual: the sizes of the traced symbols in the whole batch.
    """
    numbers = {path: i for i, path in enumerate(captured.mutated)}
    wanted = [*graph.results, *(numbers[path] for path in graph.captured.mutated)]
    nodes, sizes = captured.results, Sizes(actual)
    return wanted, [Form(sizes.shape(nodes[i]), nodes[i].meta["val"].dtype) for i in wanted]


class Gradients:
    """The gradients that a schedule has computed, until they are handed out.

    Args:
        stages, store, tied: this rank's part of the pipeline.
        sums: for each stage, the summed gradients of parameters that it alone uses.
        totals: the summed gradients of the parameters that several stages use and that lie here.
        divisor: what they are to be divided by.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        store: GradientStore,
        tied: TiedParameters,
        sums: Mapping[int, dict[str, torch.Tensor]],
        totals: dict[str, torch.Tensor],
        divisor: torch.Tensor | float,
    ) -> None:
        self._stages, self._store, self._tied = stages, store, tied
        self._divisor = divisor
        self._sums: Mapping[int, dict[str, torch.Tensor]] | None = sums
        self._totals = totals

    def hand_out(self, grad: torch.Tensor, names: Collection[str]) -> None:
        """Gives the gradients of some parameters, times that of the loss, to the store, and forgets the others.

        Raises:
            RuntimeError: when it has been done before.
        """
        if self._sums is None:
            raise RuntimeError(
                "backward() a second time through the loss of a call that ran in microbatches: its gradients were "
                "handed out the first time"
            )
        sums = {stage: {n: grads[n] for n in grads if n in names} for stage, grads in self._sums.items()}
        totals = {n: total for n, total in self._totals.items() if n in names}
        self._sums, self._totals = None, {}
        factor = grad.double() / self._divisor
        values = [*(v for grads in sums.values() for v in grads.values()), *totals.values()]
        _scale(values, factor)
        for index, stage in self._stages.items():
            for bucket in stage.program.buckets:
                chains = [chain for chain in bucket.chains if chain.name in sums[index]]
                if chains:
                    added = [stage.gradients.added(chain) for chain in chains]
                    self._store.receive_sums(added, [sums[index][chain.name] for chain in chains], owned=True)
        for name, total in totals.items():
            self._store.receive_sums([self._tied.chain(name)], [total], owned=True)


def _scale(values: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    if factor.device.type == "cpu" and factor == 1:  # other devices would be waited for
        return
    _torch.tensors.multiply(values, factor)


class HandOut(torch.autograd.Function):
    """The loss of a pipeline, whose backward hands out gradients that are there already: of all parameters, also those
    of other stages, because what backward() is asked for decides what all ranks hand out alike."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradients: Gradients, parameters: dict[str, nn.Parameter], *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients, ctx.parameters = gradients, parameters
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        asked_for = _torch.autograd.asked_for(ctx, len(ctx.parameters))
        require_not_handed(asked_for, "in microbatches or stages, of which each makes a part")
        names = compress(ctx.parameters, asked_for.inputs)
        ctx.gradients.hand_out(grads[0], {n for n in names if ctx.parameters[n].requires_grad})
        return None, None, None, *(None for _ in ctx.parameters)
