"""Clipping: the global norm of the gradients as they lie, and what is done with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from autoparallel import _torch
from autoparallel.passes.reduce_gradient_norm import reduce_gradient_norm
from autoparallel.placements import from_dtensor_placements
from autoparallel.runtime import norm as norms
from autoparallel.runtime.gradients import GradientStore


class Clipper:
    """Measures and clips the gradients of one model.

    Args:
        store: where the gradients are.
    """

    def __init__(self, store: GradientStore) -> None:
        self._store = store
        self._programs: dict[Any, Any] = {}

    def clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """See ``ParallelModule.clip_grad_norm_``."""
        if math.isnan(max_norm) or max_norm < 0:
            raise ValueError(f"max_norm must not be negative, got {max_norm}")
        grads = self._store.whole_gradients("clip_grad_norm_()")
        norm = self._norm(grads, float(norm_type))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the global norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; "
                "pass error_if_nonfinite=False to scale them anyway"
            )
        coefficient = norms.clip_coefficient(norm, float(max_norm))
        locals_ = [_torch.local_of(g) for g in grads.values()]
        for dtype in {g.dtype: None for g in locals_}:
            torch._foreach_mul_([g for g in locals_ if g.dtype == dtype], coefficient.to(dtype))
        wide = {torch.float32, *(g.dtype for g in locals_)}
        return norm if torch.float64 in wide else norm.float()

    def clip_value(self, value: float) -> None:
        """See ``ParallelModule.clip_grad_value_``."""
        if not value >= 0:
            raise ValueError(f"value must not be negative, got {value}")
        locals_ = [_torch.local_of(g) for g in self._store.whole_gradients("clip_grad_value_()").values()]
        torch._foreach_clamp_min_(locals_, -float(value))
        torch._foreach_clamp_max_(locals_, float(value))

    def _norm(self, grads: Mapping[str, torch.Tensor], norm_type: float) -> torch.Tensor:
        key = (tuple(grads), norm_type)
        if key not in self._programs:
            layouts = {n: from_dtensor_placements(g.placements) for n, g in grads.items()}  # type: ignore[attr-defined]
            mesh = self._store.mesh
            self._programs[key] = reduce_gradient_norm(
                layouts, norm_type, self._store.names, tuple(mesh.shape), self._store.prefix
            )
        with torch.no_grad():
            return self._programs[key](*(_torch.local_of(g) for g in grads.values()))
