"""A strategy of Lightning Fabric: what ``fabric.setup`` is given is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.api import compile
from autoparallel.comm.world import MeshShape, axes_of, make_mesh
from autoparallel.integrations.lightning.whole_batch import WholeBatch, require_true_precision
from autoparallel.integrations.optimizers import require_all
from autoparallel.runtime.module import ParallelModule


class _Control(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled and isinstance(module, ParallelModule) else nullcontext()


class AutoparallelStrategy(WholeBatch, DDPStrategy):
    """Compiles what ``fabric.setup`` is given. To the loop the model is one on one device, which is a mesh: every rank
    reads the same batches, so loaders have no distributed sampler, and what is reduced or gathered is whole already.

    Args:
        mesh: the axes by name and size; None is one axis "dp" of all ranks.
        compile_options: for :func:`autoparallel.compile`.
        options: those of Lightning's ``DDPStrategy``, for starting processes.
    """

    def __init__(
        self, mesh: MeshShape | None = None, compile_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.mesh_shape, self.compile_options = mesh, dict(compile_options or {})
        self.mesh: DeviceMesh | None = None
        self._backward_sync_control = _Control()

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """None: every rank reads whole batches."""
        return None

    def setup_environment(self) -> None:
        """Starts what Lightning starts, and makes the mesh.

        Raises:
            ValueError: for a precision that chooses a dtype for each operator, before anything is started.
        """
        require_true_precision(str(self.precision.precision))
        super().setup_environment()
        if self.mesh_shape is not None:
            self.mesh = make_mesh(self.root_device.type, axes_of(self.mesh_shape))

    def setup_module(self, module: nn.Module) -> Any:
        """The compiled model."""
        return compile(module, self.mesh, **self.compile_options)

    # -- gradients --------------------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips by the norm of all of the model's gradients; see :meth:`ParallelModule.clip_grad_norm_`.

        Raises:
            ValueError: for an optimizer of some of the model's parameters.
        """
        require_all(optimizer, module)
        return _compile(module).clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """See :meth:`ParallelModule.clip_grad_value_`; raises ValueError as :meth:`clip_gradients_norm` does."""
        require_all(optimizer, module)
        _compile(module).clip_grad_value_(clip_val)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: Any,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Saves a model and what else there is, to go on with on any mesh; see :meth:`ParallelModule.save`.

        Raises:
            ValueError: for a filter, or where there is not one model.
        """
        if filter or storage_options is not None:
            raise ValueError("save() keeps all of the state, in a folder: leave filter and storage_options out")
        model, others = _split_state(state)
        model.save(Path(path), **others)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads what :meth:`save_checkpoint` has saved.

        Returns:
            The plain values that were saved and are not in ``state``.

        Raises:
            ValueError: where ``state`` does not hold one model.
        """
        model, others = _split_state(state if isinstance(state, dict) else {})
        stateful = {name: x for name, x in others.items() if hasattr(x, "load_state_dict")}
        loaded = model.load(Path(path), **stateful)
        values = {**loaded.values, "step": loaded.step}
        for name in others.keys() - stateful.keys():
            if strict or name in values:
                state[name] = values.pop(name)
        if "step" not in others:
            del values["step"]
        return values


def _compile(module: nn.Module) -> ParallelModule:
    assert isinstance(module, ParallelModule)
    return module


def _split_state(state: Mapping[str, Any]) -> tuple[ParallelModule, dict[str, Any]]:
    """The model of a state, and what else there is."""
    models = [x for x in state.values() if isinstance(x, ParallelModule)]
    if len(models) != 1:
        raise ValueError(
            f"a checkpoint keeps one compiled model with its optimizers, and the state has {len(models)}: save and "
            "load {'model': model, 'optimizer': optimizer}; weights alone by model.load_state_dict()"
        )
    return models[0], {name: x for name, x in state.items() if x is not models[0]}


STRATEGY_REGISTRY.register(
    "autoparallel", AutoparallelStrategy, description="autoparallel.compile on all devices", override=True
)
