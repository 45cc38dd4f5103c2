"""An ``Accelerator`` for compiled models::

    accelerator = Accelerator(mesh=mesh, gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

and the loop stays as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.tracking import GeneralTracker
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from autoparallel.api import compile
from autoparallel.comm.world import Axes, count_ranks, make_mesh, mesh_text
from autoparallel.integrations.optimizers import holds_all
from autoparallel.planner.request.presets import SEQUENCE_AXES, TENSOR_AXIS
from autoparallel.runtime.meter import Meter
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.programs.outputs import NotKept


class MeterTracker(GeneralTracker):
    """A tracker of Accelerate that adds what a :class:`autoparallel.Meter` says to what is logged::

        accelerator = Accelerator(log_with=[MeterTracker("runs/steps.jsonl")])
        ...
        accelerator.log({"loss": loss.item()})      # once a step

    Args:
        path: the file to which the first rank adds a line of JSON for each ``log``; its folder is made.

    Attributes:
        meter: of the model that was prepared first; None before.
    """

    name = "autoparallel"
    requires_logging_directory = False

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.meter: Meter | None = None

    @property
    def tracker(self) -> Meter | None:
        """The meter."""
        return self.meter

    def follow(self, model: ParallelModule) -> None:
        """Measures a model, unless it measures one already."""
        self.meter = self.meter or Meter(model, self.path)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Ends a step of the meter, and adds ``values`` to its record.

        Raises:
            RuntimeError: before a model was prepared.
        """
        if self.meter is None:
            raise RuntimeError("MeterTracker.log(): no model is measured yet; call accelerator.prepare(model) before")
        self.meter.step(extra=dict(values) if step is None else {**values, "logged_step": step})


class Accelerator(accelerate.Accelerator):
    """Accelerate's, where ``prepare`` compiles, and accumulation, clipping and checkpoints are ours.

    A loader's ``batch_size`` is that of the batch of all ranks, which all of them read; schedulers step once a step;
    what is gathered is whole already.

    Args:
        mesh, compile_options: for :func:`autoparallel.compile`.
        parallelism_config: Accelerate's, in place of a mesh: the axes of which more than one rank is asked for, and,
            unless ``compile_options`` has a plan, ``context_parallel`` where one of them is "cp" or "sp",
            ``tensor_parallel`` where one is "tp", else ``data_parallel``; over "dp_shard" parameters are sharded at
            rest, as FSDP does. Its backends and handlers are not used. ``accelerate launch`` may have set it, too.
        options: Accelerate's own. ``mixed_precision`` is refused: give ``compile_options`` a ``precision``.

    Raises:
        ValueError: for options that do not go together, or axes that are not of all ranks.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        compile_options: Mapping[str, Any] | None = None,
        parallelism_config: ParallelismConfig | None = None,
        **options: Any,
    ) -> None:
        if parallelism_config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
            parallelism_config = ParallelismConfig()
        none = ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)
        super().__init__(parallelism_config=none, **options)
        if parallelism_config is not None:
            if mesh is not None:
                raise ValueError("mesh and parallelism_config say the same: give one of them")
            mesh, plan = _mesh_of(parallelism_config, self.device.type)
            compile_options = {"plan": plan, **(compile_options or {})}
        self.adopt(mesh, compile_options)

    def adopt(self, mesh: DeviceMesh | None, compile_options: Mapping[str, Any] | None) -> None:
        """Sets what ours has beside Accelerate's own.

        Raises:
            ValueError: for options that a compiled model does not follow.
        """
        if self.mixed_precision != "no":
            raise ValueError(
                f"mixed_precision={self.mixed_precision!r} chooses a dtype for each operator: give "
                "compile_options={'precision': MixedPrecisionPolicy(...)} instead"
            )
        self.mesh, self.compile_options = mesh, dict(compile_options or {})

    @property
    def num_processes(self) -> int:
        """One: all ranks run one model."""
        return 1

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is that of all ranks."""
        return True

    @property
    def dispatch_batches(self) -> bool:
        """Whether one rank reads for the others."""
        return False

    # -- preparing --------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Compiles a model, once."""
        model = self._compile(model)
        if not any(model is compiled for compiled in self._models):
            self._models.append(model)
        return model

    def _compile(self, model: nn.Module) -> nn.Module:
        if isinstance(model, ParallelModule):
            return model
        compiled = compile(model.to(self.device), self.mesh, **self.compile_options)
        for tracker in self.log_with:
            if isinstance(tracker, MeterTracker):
                tracker.follow(compiled)
        return compiled

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """The model's own; nothing for one that is not compiled."""
        with model.no_sync() if isinstance(model, ParallelModule) else contextlib.nullcontext():
            yield

    # -- gradients and metrics ----------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips the gradients of one model's parameters, all of them, by their true norm; see
        :meth:`ParallelModule.clip_grad_norm_`.

        Raises:
            ValueError: for parameters that are not those of one prepared model.
        """
        model = self._owner(parameters, "clip_grad_norm_")
        self.unscale_gradients()
        return model.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """See :meth:`ParallelModule.clip_grad_value_`."""
        model = self._owner(parameters, "clip_grad_value_")
        self.unscale_gradients()
        model.clip_grad_value_(clip_value)

    def _owner(self, parameters: Tensor | Iterable[Tensor], what: str) -> ParallelModule:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for model in self._models:
            if isinstance(model, ParallelModule) and holds_all(tensors, model):
                return model
        raise ValueError(
            f"{what}() was given parameters that are not those of one prepared model: give it model.parameters(), or "
            f"limits by name to model.{what}()"
        )

    def gather(self, tensor: Any) -> Any:
        """What it is given, whole: every rank has the values of the whole batch."""
        return tree_map_only(DTensor, lambda x: x.full_tensor(), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What it is given, whole.

        Raises:
            RuntimeError: for an output that a pipeline has not kept; it says what to change.
        """
        leaves = tree_leaves(input_data)
        for missing in (x for x in leaves if isinstance(x, NotKept)):
            missing.shape  # noqa: B018 - raises, and says why
        return super().gather_for_metrics(input_data) if all(isinstance(x, Tensor) for x in leaves) else input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """What it is given, scaled: it is of the whole batch already."""
        return tree_map_only(Tensor, lambda x: x * scale, self.gather(tensor))

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """What it is given: all ranks have the same sizes."""
        return tensor

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **_: Any) -> str:
        """Saves the model, optimizers, schedulers and registered objects, to go on with on any mesh; all ranks call it.

        Returns:
            The folder.
        """
        path = self._folder(output_dir)
        self._only_model().save(path, step=self.step, **self._states(), rng=torch.get_rng_state())
        return str(path)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **_: Any) -> None:
        """Loads what :meth:`save_state` has saved; all ranks call it. See :meth:`ParallelModule.load`."""
        loaded = self._only_model().load(self._folder(input_dir), **self._states())
        self.step = loaded.step
        torch.set_rng_state(loaded.values["rng"])

    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Writes the model's safetensors files; see :meth:`ParallelModule.export_hf`."""
        assert isinstance(model, ParallelModule)
        model.export_hf(save_directory, max_shard_size)

    def _folder(self, folder: str | None) -> Path:
        if folder is None and self.project_dir is None:
            raise ValueError("save_state() and load_state() need a folder, or Accelerator(project_dir=...)")
        return Path(folder) if folder is not None else Path(self.project_dir) / "checkpoints"

    def _only_model(self) -> ParallelModule:
        if len(self._models) != 1:
            raise ValueError(
                f"save_state() and load_state() keep one model, and {len(self._models)} were prepared: save each with "
                "model.save(folder, optimizer=...)"
            )
        return self._models[0]

    def _states(self) -> dict[str, Any]:
        kinds = {
            "optimizer": [optimizer.optimizer for optimizer in self._optimizers],
            "scheduler": self._schedulers,
            "object": self._custom_objects,
        }
        return {f"{kind}_{i}": x for kind, objects in kinds.items() for i, x in enumerate(objects)}


def _mesh_of(config: ParallelismConfig, device: str) -> tuple[DeviceMesh | None, str]:
    """The mesh that Accelerate's configuration means, and the plan on it; no mesh for one rank."""
    sizes = {name: getattr(config, f"{name}_size") for name in ("dp_replicate", "dp_shard", *SEQUENCE_AXES, "tp")}
    axes: Axes = tuple((name, size) for name, size in sizes.items() if size > 1)
    ranks = count_ranks()
    if config.total_size != ranks:
        raise ValueError(f"parallelism_config is {mesh_text(axes)}, {config.total_size} ranks, and there are {ranks}")
    names = dict(axes).keys()
    plan = "tensor_parallel" if TENSOR_AXIS in names else "data_parallel"
    return make_mesh(device, axes) if axes else None, "context_parallel" if names & {*SEQUENCE_AXES} else plan
