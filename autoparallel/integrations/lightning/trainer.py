"""A strategy of Lightning's Trainer: the modules that a ``LightningModule`` holds are compiled, each on its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.api import compile
from autoparallel.checkpoint.loading import load
from autoparallel.checkpoint.saving import World, save
from autoparallel.comm.world import MeshShape, axes_of, make_mesh
from autoparallel.integrations.lightning.whole_batch import WholeBatch, require_true_precision
from autoparallel.integrations.optimizers import clip_together, holders
from autoparallel.runtime.module import ParallelModule

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class _Clipping(Precision):
    """Mixed into the Trainer's precision plugin, which is what clips there."""

    compiled: list[ParallelModule]

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_together(holders(self.main_params(optimizer), self.compiled), clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        for model in holders(self.main_params(optimizer), self.compiled):
            model.clip_grad_value_(clip_val)


class TrainerStrategy(WholeBatch, DDPStrategy):
    """Compiles the modules that a ``LightningModule`` holds; all else of it stays plain Python.

    ``training_step`` must call these modules themselves (``self.net(x)``), not parts of them. Every rank reads the same
    batches, so loaders get no distributed sampler, and what is logged is of the whole batch already. Metrics of
    ``torchmetrics`` that the ``LightningModule`` holds do not add up what the ranks have, for the same reason.
    A checkpoint is a folder, from which a run goes on with any mesh.

    Args:
        mesh: the axes by name and size; None is one axis "dp" of all ranks, or, with one module and ``plan="auto"``,
            what the search makes of them.
        compile_options: for :func:`autoparallel.compile`, of every module.
        options: those of Lightning's ``DDPStrategy``, for starting processes.
    """

    strategy_name = "autoparallel"

    def __init__(
        self, mesh: MeshShape | None = None, compile_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.mesh_shape, self.compile_options = mesh, dict(compile_options or {})
        self._compiled: list[ParallelModule] = []
        self._state: dict[str, Any] = {}

    # -- before the first step --------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Starts what Lightning starts; from then on all ranks draw the first rank's random numbers, so that they
        shuffle alike.

        Raises:
            ValueError: for a precision that chooses a dtype for each operator, before anything is started.
        """
        require_true_precision(str(self.precision_plugin.precision))
        super().setup_environment()
        torch.set_rng_state(self.broadcast(torch.get_rng_state()))

    def setup(self, trainer: Trainer) -> None:
        """Compiles, and makes the optimizers."""
        trainer._accelerator_connector.use_distributed_sampler = False  # the only place where the Trainer asks
        super(DDPStrategy, self).setup(trainer)  # which does it all, where nothing is wrapped in DDP

    def _setup_model(self, model: nn.Module) -> Any:
        """Puts compiled modules in the places of those that ``model`` holds."""
        held = {name: child for name, child in model.named_children() if any(True for _ in child.parameters())}
        _require_compilable(model, held)
        distinct = {id(child): child for child in held.values()}
        mesh = self._mesh(len(distinct))
        compiled = {
            key: child if isinstance(child, ParallelModule) else compile(child, mesh, **self.compile_options)
            for key, child in distinct.items()
        }
        for name, child in held.items():
            setattr(model, name, compiled[id(child)])
        self._compiled = list(compiled.values())
        metrics: list[Any] = [module for module in model.modules() if hasattr(module, "sync_on_compute")]
        for metric in metrics:  # of torchmetrics
            metric.sync_on_compute, metric.dist_sync_on_step = False, False
        plugin: Any = self.precision_plugin
        if not isinstance(plugin, _Clipping):
            plugin.__class__ = type(type(plugin).__name__, (_Clipping, type(plugin)), {})
        plugin.compiled = self._compiled
        return model

    def _mesh(self, modules: int) -> DeviceMesh | None:
        if self.mesh_shape is None and modules > 1:
            return make_mesh(self.root_device.type, (("dp", self.world_size),))  # one that they share
        return None if self.mesh_shape is None else make_mesh(self.root_device.type, axes_of(self.mesh_shape))

    # -- a step -----------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """``no_sync()`` of every module."""
        with ExitStack() as stack:
            for model in self._compiled:
                stack.enter_context(model.no_sync())
            yield

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: tensors are loaded as they lie."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: :meth:`load_checkpoint` has done it."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the ``LightningModule``, of ``DTensor``s."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        self._state = dict(state)
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves what the Trainer has put together, as a folder; see :meth:`ParallelModule.save`.

        Raises:
            ValueError: for storage options, and where a hook has put other values into the state of the module.
            TypeError: for hyper-parameters and the like that a checkpoint does not keep; it names them.
        """
        if storage_options is not None:
            raise ValueError("a checkpoint of compiled modules is a folder of our own: leave storage_options out")
        rest = dict(checkpoint)
        changed = [name for name, x in rest.pop("state_dict").items() if self._state.get(name) is not x]
        if changed:
            raise ValueError(
                f"on_save_checkpoint() has put another value into checkpoint['state_dict'][{changed[0]!r}], and "
                "what is saved is the module's own: put it under a key of its own"
            )
        with_optimizers = rest.pop("optimizer_states", None) is not None
        states = self._optimizers_by_name() if with_optimizers else {}
        step = int(checkpoint["global_step"])
        save(self._world(), Path(filepath), step, 1, False, {**states, "lightning": rest}).wait()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads what :meth:`save_checkpoint` has saved into the module and, to fit, into its optimizers.

        Returns:
            What else the Trainer has put into it.
        """
        assert self.lightning_module is not None
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        loaded = load(self._world(), Path(checkpoint_path), self._optimizers_by_name() if fits else {})
        return {**loaded.values["lightning"], "state_dict": {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: :meth:`load_checkpoint` has done it."""

    def _optimizers_by_name(self) -> dict[str, torch.optim.Optimizer]:
        return {f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)}

    def _world(self) -> World:
        assert self.lightning_module is not None
        return dataclasses.replace(self._compiled[0]._world(), model=self.lightning_module)

    # -- the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Leaves modules and optimizers where they are, which is where their programs run."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _require_compilable(model: LightningModule | nn.Module, held: Mapping[str, nn.Module]) -> None:
    """Raises ValueError where parameters are not those of one module each that ``model`` holds."""
    name = type(model).__name__
    if direct := [n for n, p in model._parameters.items() if p is not None]:
        raise ValueError(
            f"{name} has a parameter of its own, {direct[0]!r}, and only the modules that it holds are compiled: "
            "put it into one of them"
        )
    if not held:
        raise ValueError(f"{name} holds no module with parameters, so there is nothing to compile")
    owners: dict[int, tuple[str, nn.Module]] = {}
    for path, child in held.items():
        for parameter in child.parameters():
            first, owner = owners.setdefault(id(parameter), (path, child))
            if owner is not child:
                raise ValueError(
                    f"{first!r} and {path!r} of {name} share a parameter of shape {list(parameter.shape)}, and modules "
                    "are compiled each on its own: put both into one module, and call that"
                )


StrategyRegistry.register(
    "autoparallel", TrainerStrategy, description="autoparallel.compile on all devices", override=True
)
