"""A step whose norm is suspicious is computed once more, to know whether the hardware or the data did it.

[Note: the same bits] On the same machines the same program makes the same bits of the same numbers, collectives
included: they add in a fixed order.  So where a second computation differs from the first in one bit, a device, memory
or a link has erred; where it does not, the numbers are what the data and the model make.  Not every kernel of a GPU
repeats itself, so the very first step is computed twice, too: where its gradients differ, bits say nothing, and only a
norm that is suspicious once and not twice is taken for the hardware's.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from autoparallel import _torch
from autoparallel.runtime.module import ParallelModule
from autoparallel.text import LOGGER

NAMED = 3
"""So many gradients a finding names on each rank."""


@dataclass(frozen=True)
class Finding:
    """What a second computation of a step has shown.

    Attributes:
        step: how many steps were computed before it.
        cause: ``"data"`` where both computations are the same, ``"hardware"`` where they are not.
        norms: of the gradients, by the first and the second computation.
        differing: by rank, names of gradients whose parts there differ; none where the program does not repeat itself.
    """

    step: int
    cause: Literal["data", "hardware"]
    norms: tuple[float, float]
    differing: Mapping[int, tuple[str, ...]]

    def __str__(self) -> str:
        first, second = self.norms
        if self.cause == "data":
            return (
                f"step {self.step}: the norm of the gradients is {first:g}, and {second:g} when the step is computed "
                "once more: the data and the model make it so (look at this batch and the learning rate)"
            )
        where = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in self.differing.items())
        return (
            f"step {self.step}: the norm of the gradients was {first:g}, and is {second:g} when the step is computed "
            f"once more: the hardware has erred{f' (gradients that differ: {where})' * bool(where)}. The gradients are "
            "those of the second computation; where it comes again, find the machine and go on without it"
        )


class Rerun:
    """Computes a step once more where its norm is not finite, or a spike::

        rerun = autoparallel.Rerun(model, spike=10.0)
        for x, y in loader:
            def compute():
                model(x, y).backward()
                return model.grad_norm()

            rerun(compute)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    The second computation has the first one's random numbers of torch and its buffers, so that the step is the same as
    if it had been computed once. The first step is always computed twice, to see whether the program repeats
    itself bit by bit. All ranks call it together. It waits for the device once a step, for the norm.

    Args:
        model: what :func:`autoparallel.compile` returned.
        spike: a norm of more than so many times the median of the last 100 finite ones is a spike; None: only norms
            that are not finite are suspicious.
        on_finding: is told what was found, on every rank; it may raise, to end the job. None: the log is.

    Attributes:
        findings: what was found so far.

    Raises:
        ValueError: for a ``spike`` that is not more than 1.
    """

    def __init__(
        self,
        model: ParallelModule,
        *,
        spike: float | None = None,
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        if spike is not None and not spike > 1:
            raise ValueError(f"spike is how many times the median a norm may be, more than 1, got {spike}")
        self.findings: list[Finding] = []
        self._model, self._spike = model, spike
        self._on_finding = on_finding or (lambda finding: LOGGER.warning("%s", finding))
        self._norms: deque[float] = deque(maxlen=100)
        self._steps = 0
        self._repeats: bool | None = None

    def __call__(self, compute: Callable[[], Tensor]) -> Tensor:
        """A step's forward and backward passes, all of its microbatches; not the optimizer's step.

        Args:
            compute: makes the gradients, from none, and returns their norm, a scalar; it must do the same when it is
                called again, so batches are read, and numbers of numpy and Python drawn, before. Clip afterwards: that
                brings what is wrong in one gradient into all of them, and the finding would name all.

        Returns:
            The norm, of the computation whose gradients there are.

        Raises:
            RuntimeError: where there are gradients already.
        """
        if any(p.grad is not None for p in _torch.tensors.parameters_of(self._model)):
            raise RuntimeError("Rerun computes a step's gradients from none: call zero_grad() before it")
        state = _State(self._model)
        norm = compute()
        value = float(norm)
        if self._repeats is None or self._is_suspicious(value):
            first = _gradients(self._model)
            self._model.zero_grad()
            state.restore()
            norm = compute()
            self._compare(value, float(norm), first)
            value = float(norm)
        if math.isfinite(value):
            self._norms.append(value)
        self._steps += 1
        return norm

    def _is_suspicious(self, norm: float) -> bool:
        if not math.isfinite(norm):
            return True
        return self._spike is not None and bool(self._norms) and norm > self._spike * statistics.median(self._norms)

    def _compare(self, before: float, after: float, first: Mapping[str, Tensor]) -> None:
        """Says what two computations of a step mean, on every rank alike."""
        second = _gradients(self._model)
        changed = tuple(
            name
            for name in {**first, **second}
            if name not in first or name not in second or not torch.equal(first[name], second[name])
        )
        agreement = self._model._kinds.exchange.agreement
        by_rank = agreement.gather(changed[:NAMED])
        differing = {rank: names for rank, names in zip(agreement.ranks, by_rank, strict=True) if names}
        suspicious = self._is_suspicious(before)
        if self._repeats is None:
            self._repeats = not differing or suspicious  # a fault in the first step is told as one
        if not suspicious:
            return
        errs = bool(differing) if self._repeats else not self._is_suspicious(after)
        self.findings.append(
            Finding(self._steps, "hardware" if errs else "data", (before, after), differing if self._repeats else {})
        )
        self._on_finding(self.findings[-1])


class _State:
    """What a computation changes beside gradients: random numbers and buffers."""

    def __init__(self, model: ParallelModule) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        with torch.no_grad():
            for buffer, version, value in self._buffers:
                if buffer._version != version:
                    buffer.copy_(value)


def _gradients(model: ParallelModule) -> dict[str, Tensor]:
    """This rank's parts of all gradients, as bytes in the host's memory."""
    return {
        name: _torch.tensors.as_bytes(_torch.dtensor.local_of(p.grad).to("cpu", copy=True))
        for name, p in model.named_parameters()
        if p.grad is not None
    }
