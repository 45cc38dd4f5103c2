"""What both strategies say: of the ranks, that each has the whole batch; and of precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.tensor import DTensor


class WholeBatch:
    """Mixed into a strategy: what a loop reduces or gathers is whole already; only decisions are voted on."""

    root_device: Any

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """What it is given: it is of the whole batch already."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    reduce = all_reduce  # the Trainer's name for it

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """What it is given, whole."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, have decided so."""
        vote = torch.tensor(int(decision), device=self.root_device)
        all_reduce(vote, ReduceOp.MIN if all else ReduceOp.MAX)
        return bool(vote)


def require_true_precision(precision: str) -> None:
    """Raises ValueError for a precision that chooses a dtype for each operator, which is the program's to choose."""
    if not precision.endswith("-true"):
        raise ValueError(
            f"precision={precision!r} chooses a dtype for each operator: give the strategy "
            "compile_options={'precision': MixedPrecisionPolicy(...)} instead"
        )
