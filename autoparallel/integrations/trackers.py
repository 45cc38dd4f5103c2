"""What a meter says, as the scalars of TensorBoard and what is like it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch.distributed as dist


class ScalarWriter(Protocol):
    """``torch.utils.tensorboard.SummaryWriter``, as far as it is needed."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Writes a number of a step."""


class TensorBoard:
    """Writes the records of a :class:`autoparallel.Meter`; on the first rank, on others it does nothing::

        board = TensorBoard(SummaryWriter("runs/a"))
        board.log(meter.step(extra={"loss": loss.item()}))

    Args:
        writer: TensorBoard's, or one like it.
        prefix: what the names of the scalars begin with.
    """

    def __init__(self, writer: ScalarWriter, prefix: str = "autoparallel/") -> None:
        self._writer, self._prefix = writer, prefix
        self._writes = not dist.is_initialized() or dist.get_rank() == 0

    def log(self, record: Mapping[str, Any]) -> None:
        """Writes every number of a record under its name; of a list of the ranks' numbers, each under its rank."""
        if not self._writes:
            return
        step = record.get("step")
        for name, value in record.items():
            if name == "ranks":
                for kind, numbers in value.items():
                    for rank, number in enumerate(numbers):
                        self._writer.add_scalar(f"{self._prefix}{kind}/rank {rank}", number, step)
            elif name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(self._prefix + name, value, step)
