"""Other people's loops on two ranks: the numbers of the same loop, with the framework's own classes, in one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from tests.models.pretrained import build_gpt2
from tests.runtime.support import run_on_ranks

MESHES = {
    "fsdp": ((2,), ("dp",), "fsdp"),
    "tensor_parallel": ((1, 2), ("dp", "tp"), "tensor_parallel"),
    "pipeline": ((2, 1), ("pp", "dp"), "auto"),
}


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The environment of a launcher, which the frameworks ask for the ranks."""
    from accelerate.state import AcceleratorState

    world = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()} if dist.is_initialized() else {}
    names = {**world, "LOCAL_RANK": world["RANK"], "MASTER_ADDR": "localhost", "MASTER_PORT": 1} if world else {}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    AcceleratorState._reset_state(True)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(True)


def _gpt2(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build_gpt2(torch.float64).model


def _rows(count: int) -> list[dict[str, Tensor]]:
    """Rows with different numbers of labels."""
    args, batch = build_gpt2(torch.float64).make_batch(0, count)
    assert not args
    return [{name: x[i] for name, x in batch.items()} for i in range(count)]


def _mesh_of(name: str) -> tuple[Any, dict[str, Any]]:
    shape, axes, plan = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=axes), {"plan": plan}


def _whole(model: nn.Module) -> dict[str, Tensor]:
    named: Any = model.full_parameters() if hasattr(model, "full_parameters") else model.named_parameters()
    return {name.removeprefix("module."): x.detach().clone() for name, x in named}  # the plain one is wrapped in DDP


def _off(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max((actual[name] - x).abs().max().item() for name, x in expected.items())


# ----------------------------------------------------------------------------------------------------------- accelerate


def _accelerate(mesh: str | None, path: str) -> tuple[list[float], dict[str, Tensor]]:
    """A loop of Accelerate's users: 5 batches, accumulated by 2, clipped; saved and loaded in the middle."""
    import accelerate

    from autoparallel.integrations.accelerate import Accelerator

    numbers: list[float] = []
    with launched():
        accelerator: Any
        if mesh is None:
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        else:
            device_mesh, options = _mesh_of(mesh)
            options["outputs"] = "gather"
            accelerator = Accelerator(
                mesh=device_mesh, compile_options=options, cpu=True, gradient_accumulation_steps=2
            )
        model = _gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        loader = DataLoader(_rows(18), batch_size=4, shuffle=True)  # type: ignore[arg-type]
        torch.manual_seed(3)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

        def epoch() -> None:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        numbers.append(float(norm))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                numbers.append(accelerator.gather_for_metrics(loss.detach().repeat(len(batch["labels"]))).mean().item())

        epoch()
        accelerator.save_state(path)
        kept = _whole(model)
        epoch()
        numbers.append(optimizer.param_groups[0]["lr"])
        accelerator.load_state(path)
        assert _off(_whole(model), kept) == 0
        if mesh is not None:
            with pytest.raises(ValueError, match="not those of one prepared model"):
                accelerator.clip_grad_norm_([next(iter(model.parameters()))], 1.0)
        return numbers, kept


@pytest.mark.wide
@pytest.mark.parametrize("mesh", MESHES)
def test_accelerate(mesh: str, tmp_path: Path) -> None:
    expected, parameters = _accelerate(None, str(tmp_path / "plain"))
    assert len(expected) == 17 and max(expected[:-1]) > 0.5
    for numbers, actual in run_on_ranks(_accelerate, mesh, str(tmp_path / "ours"), world_size=2):
        assert numbers == pytest.approx(expected, rel=1e-6)  # the loss is a float32, whatever the model's dtype
        assert _off(actual, parameters) < 1e-6


# --------------------------------------------------------------------------------------------------------- transformers


def _trainer(mesh: str | None, path: str, resume: str | None, steps: int) -> Any:
    """A script of the Trainer's users: the log, and the evaluation at the end."""
    import transformers

    from autoparallel.integrations.transformers import Trainer

    with launched():
        args = transformers.TrainingArguments(
            path, use_cpu=True, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=steps,
            gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=0.01, logging_steps=1, save_steps=2,
            eval_strategy="steps", eval_steps=2, report_to="none", disable_tqdm=True, optim="adamw_torch",
            lr_scheduler_type="constant",
        )  # fmt: skip
        data: Any = {"train_dataset": _rows(18), "eval_dataset": _rows(6), "compute_metrics": _accuracy}
        if mesh is None:
            trainer = transformers.Trainer(_gpt2(), args, **data)
        else:
            device_mesh, options = _mesh_of(mesh)
            trainer = Trainer(_gpt2(), args, **data, mesh=device_mesh, compile_options=options)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{path}/last")
        kept = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
        return [{k: row[k] for k in kept if k in row} for row in trainer.state.log_history if {*kept} & {*row}]


def _accuracy(found: Any) -> dict[str, float]:
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    return {"accuracy": float((logits.argmax(-1)[:, :-1] == found.label_ids[:, 1:]).mean())}


@pytest.mark.wide
@pytest.mark.parametrize(("mesh", "other"), [("fsdp", "tensor_parallel"), ("pipeline", "fsdp")])
def test_trainer(mesh: str, other: str, tmp_path: Path) -> None:
    expected = _trainer(None, str(tmp_path / "plain"), None, 4)
    assert len(expected) == 6 and max(row["grad_norm"] for row in expected if "grad_norm" in row) > 0.5
    path = str(tmp_path / "ours")
    logs = run_on_ranks(_trainer, mesh, path, None, 4, world_size=2)
    again = run_on_ranks(_trainer, other, str(tmp_path / "again"), f"{path}/checkpoint-2", 4, world_size=2)
    for log in (*logs, *again):
        for row, reference in zip(log, expected, strict=True):
            assert row == pytest.approx(reference, rel=1e-6)
    load = type(_gpt2()).from_pretrained
    plain = _whole(load(tmp_path / "plain" / "last", dtype=torch.float64))
    for saved in ("ours", "again"):
        assert _off(_whole(load(tmp_path / saved / "last", dtype=torch.float64)), plain) < 1e-6


@pytest.mark.wide
def test_what_a_compiled_model_does_not_follow_is_refused(tmp_path: Path) -> None:
    import transformers

    from autoparallel.integrations.accelerate import Accelerator
    from autoparallel.integrations.transformers import Trainer

    with launched():
        with pytest.raises(ValueError, match="MixedPrecisionPolicy"):
            Accelerator(cpu=True, mixed_precision="bf16")
        args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", label_smoothing_factor=0.1)
        with pytest.raises(ValueError, match="label_smoothing_factor computes a loss outside"):
            Trainer(_gpt2(), args)
        accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="has stepped before prepare"):
            accelerator.prepare(model, optimizer)
