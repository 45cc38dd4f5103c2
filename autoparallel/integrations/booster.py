"""The ``Booster`` of Colossal-AI for compiled models, as its tutorials on clipping and accumulation use it::

from autoparallel.integrations.booster import Booster, TorchFSDPPlugin, launch_from_torch

launch_from_torch()
plugin = TorchFSDPPlugin()
booster = Booster(plugin=plugin)
loader = plugin.prepare_dataloader(dataset, batch_size=64, shuffle=True)
model, optimizer, criterion, loader, scheduler = booster.boost(model, optimizer, criterion, loader, scheduler)
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from autoparallel.api import compile
from autoparallel.comm.world import MeshShape, axes_of, count_ranks, make_mesh
from autoparallel.integrations.optimizers import require_all
from autoparallel.runtime.module import ParallelModule


def launch_from_torch(seed: int = 1024) -> None:
    """Makes the world of a launcher's ranks, one device each, and seeds all ranks alike."""
    if "RANK" in os.environ and not dist.is_initialized():
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
    torch.manual_seed(seed)


class Plugin:
    """How models are compiled.

    Args:
        mesh: a mesh, or its axes by name and size; None is one axis "dp" of all ranks.
        options: for :func:`autoparallel.compile`.
    """

    def __init__(self, mesh: DeviceMesh | MeshShape | None = None, **options: Any) -> None:
        self.mesh, self.options = mesh, options

    def prepare_dataloader(
        self, dataset: Any, batch_size: int, shuffle: bool = False, seed: int = 1024, drop_last: bool = False,
        **options: Any,
    ) -> DataLoader[Any]:  # fmt: skip
        """A loader of whole batches, the same on every rank.

        Args:
            batch_size: of the batch of all ranks; Colossal-AI's is that of one.
        """
        order = torch.Generator().manual_seed(seed)
        return DataLoader(dataset, batch_size, shuffle, drop_last=drop_last, generator=order, **options)


class TorchDDPPlugin(Plugin):
    """Data parallel; ``Plugin()`` leaves it to the search."""

    def __init__(self, mesh: DeviceMesh | MeshShape | None = None, **options: Any) -> None:
        super().__init__(mesh, **{"plan": "data_parallel", **options})


class TorchFSDPPlugin(Plugin):
    """Parameters, gradients and optimizer states sharded over all ranks."""

    def __init__(self, mesh: DeviceMesh | MeshShape | None = None, **options: Any) -> None:
        super().__init__(mesh, **{"plan": "fsdp", **options})


class HybridParallelPlugin(Plugin):
    """Tensor parallel over some ranks, data parallel over the others.

    Args:
        tp_size: the ranks over which parameters are sharded, also in use.
    """

    def __init__(self, tp_size: int = 1, **options: Any) -> None:
        super().__init__(None, **{"plan": "tensor_parallel", **options})
        self.tp_size = tp_size

    def axes(self, ranks: int) -> dict[str, int]:
        """The mesh over so many ranks. Raises ValueError where they cannot be shared out so."""
        if self.tp_size < 1 or ranks % self.tp_size:
            raise ValueError(f"tp_size={self.tp_size} does not divide the {ranks} ranks there are")
        return {"dp": ranks // self.tp_size, "tp": self.tp_size}


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer of one boosted model; groups, state, hooks and steps are the optimizer's own.

    Attributes:
        optim: the optimizer.
    """

    def __init__(self, optim: torch.optim.Optimizer, model: ParallelModule) -> None:
        self.optim, self._model = optim, model

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # while it is copied
            raise AttributeError(name)
        return getattr(self.optim, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's."""
        return self.optim.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's."""
        self.optim.load_state_dict(state_dict)

    def unwrap(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self.optim

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Differentiates the loss."""
        loss.backward(**options)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, **_: Any
    ) -> Tensor:
        """Clips by the norm of all of the model's gradients, which it returns; see
        :meth:`ParallelModule.clip_grad_norm_`. Raises ValueError where it does not hold all of the parameters."""
        require_all(self.optim, self._model)
        return self._model.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float, **_: Any) -> None:
        """See :meth:`ParallelModule.clip_grad_value_`; raises ValueError as :meth:`clip_grad_by_norm` does."""
        require_all(self.optim, self._model)
        self._model.clip_grad_value_(clip_value)


class Booster:
    """Compiles a model for the loop of Colossal-AI.

    Args:
        plugin: how; ``Plugin()`` leaves it to the search.
        mixed_precision: ``"bf16"`` uses parameters in bfloat16 and reduces gradients in float32; ``"fp16"`` and
            ``"fp8"`` are refused.

    Raises:
        ValueError: for another precision.
    """

    def __init__(self, plugin: Plugin | None = None, mixed_precision: str | None = None) -> None:
        self.plugin = plugin or Plugin()
        self._precision: dict[str, Any] = {}
        if mixed_precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            self._precision = {"precision": policy}
        elif mixed_precision not in (None, "fp32"):
            raise ValueError(
                f"mixed_precision={mixed_precision!r} needs the loss to be scaled or a dtype for each operator: use "
                "'bf16', or Plugin(precision=MixedPrecisionPolicy(...))"
            )

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[ParallelModule, OptimizerWrapper | None, Any, Any, Any]:
        """The compiled model, its optimizer, and the others as they are: a loss is computed outside of the model, on
        outputs of the whole batch, and a scheduler goes on with the optimizer that it was made for."""
        compiled = compile(model.to(_device()), self._mesh(), **{**self._precision, **self.plugin.options})
        if optimizer is None:
            return compiled, None, criterion, dataloader, lr_scheduler
        return compiled, OptimizerWrapper(optimizer, compiled), criterion, dataloader, lr_scheduler

    def _mesh(self) -> DeviceMesh | None:
        shape = self.plugin.mesh
        if isinstance(self.plugin, HybridParallelPlugin):
            shape = self.plugin.axes(count_ranks())
        if shape is None or isinstance(shape, DeviceMesh):
            return shape
        return make_mesh(_device(), axes_of(shape))

    def backward(self, loss: Tensor, optimizer: OptimizerWrapper) -> None:
        """Differentiates the loss."""
        optimizer.backward(loss)

    def no_sync(self, model: ParallelModule, optimizer: Any = None) -> AbstractContextManager[None]:
        """Accumulates gradients without communication."""
        return model.no_sync()

    def save_model(self, model: ParallelModule, checkpoint: str | Path, **_: Any) -> None:
        """Writes a folder of safetensors files; all ranks call it. See :meth:`ParallelModule.export_hf`."""
        model.export_hf(checkpoint)

    def load_model(self, model: ParallelModule, checkpoint: str | Path, **_: Any) -> None:
        """Loads what :meth:`save_model` or ``save_pretrained`` wrote. See :meth:`ParallelModule.load_hf`."""
        model.load_hf(checkpoint)


def _device() -> str:
    """The kind of device that models train on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type
