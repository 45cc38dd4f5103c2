"""Attention under a setting of the process that permits some kernels only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel


@functools.cache
def limited_to(target: Callable[..., Any], kernels: tuple[str, ...]) -> Callable[..., Any]:
    """An operator that runs on the kernels of these names only, as far as they can, the first ones first."""
    backends = [getattr(SDPBackend, name) for name in kernels]

    def attend(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(backends, set_priority=True):
            return target(*args, **kwargs)

    attend.__name__ = attend.__qualname__ = f"attend_on_{'_'.join(kernels).lower()}"  # which the program shows
    return attend
