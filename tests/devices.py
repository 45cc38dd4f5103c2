"""Where the tests train: on CPUs, or with AUTOPARALLEL_TEST_DEVICE=cuda on one GPU that the ranks share.

Plain models are compared on the same device in the programs of ``tests/capture``, on the CPU in ``tests/parity``.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

DEVICE = os.environ.get("AUTOPARALLEL_TEST_DEVICE", "cpu")


def on_device(value: Any) -> Any:
    """The structure with its tensors on the device of the tests."""
    return value if DEVICE == "cpu" else pytree.tree_map_only(Tensor, lambda x: x.to(DEVICE), value)
