"""What is gathered once for several calls."""

from __future__ import annotations

import torch

from autoparallel.runtime.gradients.travel import Tensors


class KeptCopy:
    """What a bucket has gathered, kept for the calls that follow under ``no_sync()``.

    Args:
        values: the gathered parameters.
        local: this rank's parts of them at rest.
    """

    def __init__(self, values: Tensors, local: Tensors) -> None:
        self.values, self._now = values, local
        self._before = [x.clone() for x in local]

    def has_changed(self) -> bool:
        """Whether this rank's part of a parameter is no longer the one that was gathered.

        Values are compared, because writing through ``p.data`` or by an operator over lists of tensors, as optimizers
        use them, changes no version of a ``DTensor``.
        """
        return any(not torch.equal(before, now) for before, now in zip(self._before, self._now, strict=True))
