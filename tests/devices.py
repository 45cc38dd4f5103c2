"""Where the tests train: on CPUs, or with AUTOPARALLEL_TEST_DEVICE=cuda on one GPU that the ranks share.

Plain models are compared on the same device in the programs of ``tests/capture``, on the CPU in ``tests/parity``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

DEVICE = os.environ.get("AUTOPARALLEL_TEST_DEVICE", "cpu")


def on_device(value: Any) -> Any:
    """The structure with its tensors on the device of the tests."""
    return value if DEVICE == "cpu" else pytree.tree_map_only(Tensor, lambda x: x.to(DEVICE), value)


@functools.cache
def send_through_host() -> None:
    """Has the collectives of ``DTensor``s on a GPU that ranks share read host memory: gloo's own end the process, and
    NCCL takes no two ranks on one GPU."""
    for name in ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
        _LIBRARY.impl(name, functools.partial(_through_host, getattr(torch.ops._c10d_functional, name)), "CUDA")


def _through_host(operator: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.wait_tensor(operator(x.cpu(), *args))
    return result.to(x.device)


_LIBRARY = torch.library.Library("_c10d_functional", "IMPL")
