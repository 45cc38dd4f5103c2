"""A meter: what a step took, beside what it was predicted to take."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autoparallel.comm.waiting import waited_seconds
from autoparallel.comm.world import mesh_size
from autoparallel.runtime.module import ParallelModule


class Meter:
    """Measures the steps of a compiled model::

        meter = autoparallel.Meter(model, "runs/steps.jsonl")
        for x, y in loader:
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.step()

    Nothing is sent between ranks, unless asked for.

    Args:
        model: what :func:`autoparallel.compile` returned.
        path: a file to which the first rank adds a line of JSON for each step; its folder is made.
        over_ranks: adds the numbers that differ between ranks, of all of them; one small exchange a step, as before a
            call, for which all ranks must call :meth:`step`.
    """

    def __init__(self, model: ParallelModule, path: str | Path | None = None, *, over_ranks: bool = False) -> None:
        self._model, self._over_ranks = model, over_ranks
        self._path = None if path is None else Path(path)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._is_cuda = model._kinds.maker.mesh.device_type == "cuda"
        self._steps = 0
        self._begin()

    def step(self, count: int | None = None, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What has happened since the last call of this, or since the meter was made; waits for the device.

        Args:
            count: the tokens or rows of all ranks' batches; unless told, those of the calls that were planned for.
            extra: what else belongs to the step, such as the loss, as JSON's types; it is added to the record.

        Returns:
            ``step``, ``calls`` in training, ``programs`` that were compiled meanwhile, ``seconds``;
            ``tokens_per_second`` (``rows_per_second``, where no input is made of tokens) of all ranks; ``mfu``, the
            part of the devices' peak that the model's own arithmetic was, where nothing computed twice counts, as for
            calls of the sizes that were planned for; ``predicted_seconds`` of such calls and one update, of a pipeline
            without the update; ``peak_memory``, bytes of a device in this step, or of a process on CPUs so far;
            ``waited_seconds`` in which this process stood still for collectives, only on CPUs: a GPU waits by itself.
            With ``over_ranks``, ``ranks``: lists of ``seconds``, ``peak_memory`` and ``waited_seconds``, by rank.

        Raises:
            RuntimeError: before the first call of the model.
            ValueError: where ``extra`` has a name that the record has.
        """
        plan, kinds = self._model.plan, self._model._kinds
        if self._is_cuda:
            torch.cuda.synchronize()
        seconds, calls = time.perf_counter() - self._began, kinds.calls - self._calls
        record: dict[str, Any] = {"step": self._steps, "calls": calls, "programs": len(kinds) - self._programs}
        record["seconds"] = seconds
        if plan.work is not None and calls:
            units = calls * plan.work.count if count is None else count
            record[f"{plan.work.unit}_per_second"] = units / seconds
            record["mfu"] = plan.work.mfu(seconds / calls, mesh_size(plan.whole_mesh))
        if plan.prediction is not None and calls:
            record["predicted_seconds"] = plan.prediction.seconds(calls)
        elif plan.pipeline is not None and plan.pipeline.stages and calls:
            record["predicted_seconds"] = plan.pipeline.seconds * calls
        record["peak_memory"] = torch.cuda.max_memory_allocated() if self._is_cuda else _peak_of_process()
        if not self._is_cuda:
            record["waited_seconds"] = waited_seconds() - self._waited
        if self._over_ranks:
            record["ranks"] = self._of_all(record)
        if common := sorted(record.keys() & (extra or {}).keys()):
            raise ValueError(f"extra has {common[0]!r}, which the meter's record has already: give it another name")
        record |= extra or {}
        if self._path is not None and kinds.exchange.agreement.is_first:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        self._steps += 1
        self._begin()
        return record

    def _begin(self) -> None:
        """Begins a step."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        kinds = self._model._kinds
        self._calls, self._programs, self._waited = kinds.calls, len(kinds), waited_seconds()
        self._began = time.perf_counter()

    def _of_all(self, record: dict[str, Any]) -> dict[str, list[float]]:
        """What every rank measured."""
        names = [name for name in ("seconds", "peak_memory", "waited_seconds") if name in record]
        columns = self._model._kinds.exchange.of_other("Meter.step()", *(record[name] for name in names))
        return dict(zip(names, columns, strict=True))


def _peak_of_process() -> int:
    import resource  # is not there on Windows

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
