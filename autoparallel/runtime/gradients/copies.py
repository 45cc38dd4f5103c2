"""What is gathered once for several calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoparallel import _torch
from autoparallel.runtime.gradients.travel import Tensors


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
