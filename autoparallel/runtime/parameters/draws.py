"""Random numbers that a script draws on parameters: an initialisation by hand, noise on weights or on gradients.

[Note: draws on DTensors] What ``parameter.normal_()`` or ``torch.randn_like(parameter.grad)`` draws should not depend
on the mesh.  On GPUs torch moves each rank's generator to where its shard begins.  On CPUs it does nothing: every rank
fills its shard from the start of the same stream, so that all shards hold the same numbers, and a ``generator=`` is
dropped.  A CPU's generator cannot be moved to a place, so here every rank draws for the whole tensor, as one process
would, and keeps its part.  Ranks must be seeded alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.placements import from_dtensor_placements
from autoparallel.runtime.parameters.slices import local_view


class WholeDraws:
    """What torch asks around each random operator on a ``DTensor`` of a CPU."""

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        with _DrawWhole(spec, generator):
            yield


class _DrawWhole(TorchDispatchMode):
    """Calls the operator on whole tensors, of which this rank's part holds the operand's values.

    Args:
        spec: how the operand lies, as its ``DTensor`` says.
        generator: that the operator was given.
    """

    def __init__(self, spec: Any, generator: torch.Generator | None) -> None:
        super().__init__()
        self._spec, self._generator = spec, generator
        self._layout = from_dtensor_placements(tuple(spec.placements))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        local, *rest = args
        whole = local.new_zeros(self._spec.shape)
        self._part(whole).copy_(local)
        kwargs = dict(kwargs or {})
        if self._generator is not None:
            kwargs["generator"] = self._generator
        drawn = func(whole, *rest, **kwargs)
        if drawn is whole:
            return local.copy_(self._part(whole))
        return pytree.tree_map_only(Tensor, lambda x: self._part(x).clone(), drawn)

    def _part(self, whole: Tensor) -> Tensor:
        return local_view(whole, self._layout, self._spec.mesh)
