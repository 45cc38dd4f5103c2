"""The ``Trainer`` of transformers for compiled models.

The import and the mesh are the lines that change::

    from autoparallel.integrations.transformers import Trainer

    trainer = Trainer(model, TrainingArguments(...), train_dataset=..., mesh=mesh)
    trainer.train()
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.api import compile
from autoparallel.comm.world import PIPELINE_AXIS
from autoparallel.integrations.accelerate import Accelerator
from autoparallel.runtime.module import ParallelModule

STATE = "autoparallel"
"""The folder of a checkpoint that a run goes on from."""


class Trainer(transformers.Trainer):
    """The trainer of ``transformers``, whose model trains on a whole mesh.

    ``per_device_train_batch_size`` and ``per_device_eval_batch_size`` are the batches of all ranks, so that all numbers
    are those of the same script in one process. A checkpoint is a folder that ``from_pretrained`` reads, with what
    ``resume_from_checkpoint`` goes on from, on any mesh, in ``autoparallel/``.

    Args:
        model: the plain model.
        args: as always; ``bf16`` and ``fp16`` are refused: give ``compile_options`` a ``precision``.
        mesh, compile_options: for :func:`autoparallel.compile`.
        options: those of ``transformers``.
    """

    def __init__(
        self,
        model: nn.Module,
        args: transformers.TrainingArguments | None = None,
        *others: Any,
        mesh: DeviceMesh | None = None,
        compile_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if options.get("model_init") is not None:
            raise ValueError("model_init makes a new model for every train(): give the Trainer a model")
        if args is not None and args.label_smoothing_factor:
            raise ValueError(
                "label_smoothing_factor computes a loss outside of the model: compute it in the model's forward, or in "
                "compute_loss_func with compile_options={'outputs': 'gather'}"
            )
        self._compiling = mesh, compile_options
        super().__init__(model, args, *others, **options)
        self._set_signature_columns_if_needed()  # from the plain model's forward
        compiling: dict[str, Any] = dict(compile_options or {})
        if self.compute_metrics is not None and mesh is not None and PIPELINE_AXIS in (mesh.mesh_dim_names or ()):
            compiling.setdefault("outputs", "gather")  # a pipeline keeps none otherwise
        self.model: ParallelModule = compile(model, mesh, **compiling)
        self.model_wrapped = self.model

    def create_accelerator_and_postprocess(self) -> None:
        """Takes ours."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # made by the line above, and seen by nobody yet
        self.accelerator.adopt(*self._compiling)
        gather = self.accelerator.gather_for_metrics
        self.gather_function = functools.partial(gather, use_gather_object=self.args.eval_use_gather_object)

    # -- a step -----------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.model.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return self.model.grad_norm() if grad_norm is None else grad_norm

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes what ``from_pretrained`` reads; all ranks call it."""
        path = output_dir if output_dir is not None else self.args.output_dir
        assert path is not None
        self.model.export_hf(path)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(path)
            torch.save(self.args, Path(path) / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.model.save(Path(output_dir) / STATE, step=self.state.global_step, **self._states())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing, where the model is loaded with its optimizer."""
        if not (Path(resume_from_checkpoint) / STATE).is_dir():
            self.model.load_hf(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / STATE).is_dir():
            return
        self._plan()  # so that what is loaded lies as it will
        self.model.load(Path(checkpoint) / STATE, **self._states())

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self.model.load_hf(self.state.best_model_checkpoint)

    def _states(self) -> dict[str, Any]:
        return {"optimizer": getattr(self.optimizer, "optimizer", self.optimizer), "scheduler": self.lr_scheduler}

    def _plan(self) -> None:
        """Plans for the first batch, whose values do not matter."""
        batch = next(iter(self.get_train_dataloader()))
        inputs = self._prepare_inputs(batch)
        count = self._get_num_items_in_batch([inputs], self.args.device)
        self.model.train()
        more = {"num_items_in_batch": count} if self.model_accepts_loss_kwargs and count is not None else {}
        self.model.prepare(**inputs, **more)
