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
from tests.runtime.support import run_on_ranks, weights, weights_off

MESHES = {
    "fsdp": ((2,), ("dp",), "fsdp"),
    "tensor_parallel": ((1, 2), ("dp", "tp"), "tensor_parallel"),
    "pipeline": ((2, 1), ("pp", "dp"), "auto"),
}


CONFIGS = {
    "dp_replicate": {"dp_replicate_size": 2},
    "dp_shard": {"dp_shard_size": 2},
    "tp": {"tp_size": 2},
    "cp": {"cp_size": 2},
    "dp_shard+tp": {"dp_shard_size": 2, "tp_size": 2},
}
"""Accelerate's names of axes."""


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The environment of a launcher, which the frameworks ask for the ranks."""
    from accelerate.state import AcceleratorState

    world = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()} if dist.is_initialized() else {}
    names: dict[str, Any] = {}
    if world:
        names = {**world, "LOCAL_RANK": world["RANK"], "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
        names |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": world["WORLD_SIZE"]}
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
    return {name.removeprefix("module."): x for name, x in weights(model).items()}  # the plain one is wrapped in DDP


# ----------------------------------------------------------------------------------------------------------- accelerate


def _accelerate(mesh: str | None, path: str) -> tuple[list[float], dict[str, Tensor]]:
    """A loop of Accelerate's users: 5 batches, accumulated by 2, clipped; saved and loaded in the middle."""
    import accelerate
    from accelerate.parallelism_config import ParallelismConfig

    from autoparallel.integrations.accelerate import Accelerator

    numbers: list[float] = []
    with launched():
        accelerator: Any
        if mesh is None:
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        elif mesh in CONFIGS:
            config = ParallelismConfig(**CONFIGS[mesh])
            accelerator = Accelerator(parallelism_config=config, cpu=True, gradient_accumulation_steps=2)
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
        assert weights_off(_whole(model), kept) == 0
        if mesh is not None:
            with pytest.raises(ValueError, match="not those of one prepared model"):
                accelerator.clip_grad_norm_([next(iter(model.parameters()))], 1.0)
        if mesh in CONFIGS:
            assert {*model.plan.axis_names} >= {*mesh.split("+")}
            assert all(("S" in p.at_rest) == (mesh != "dp_replicate" and mesh != "cp") for p in _weights(model))
        return numbers, kept


def _weights(model: Any) -> list[Any]:
    """The plans of the parameters of two dims that are used in products."""
    return [p for name, p in model.plan.parameters.items() if name.endswith("c_fc.weight")]


@pytest.mark.wide
@pytest.mark.slow_where(lambda mesh: mesh in ("dp_replicate", "dp_shard", "tp", "cp", "dp_shard+tp"))
@pytest.mark.parametrize("mesh", [*MESHES, *CONFIGS])
def test_accelerate(mesh: str, tmp_path: Path) -> None:
    expected, parameters = _accelerate(None, str(tmp_path / "plain"))
    assert len(expected) == 17 and max(expected[:-1]) > 0.5
    ranks = 4 if "+" in mesh else 2
    for numbers, actual in run_on_ranks(_accelerate, mesh, str(tmp_path / "ours"), world_size=ranks):
        assert numbers == pytest.approx(expected, rel=1e-6)  # the loss is a float32, whatever the model's dtype
        assert weights_off(actual, parameters) < 1e-6


def _two_models(mesh: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """Two models in one loss, each clipped and stepped on its own."""
    import accelerate

    from autoparallel.integrations.accelerate import Accelerator

    with launched():
        numbers: list[float] = []
        if mesh is None:
            accelerator = accelerate.Accelerator(cpu=True)
        else:
            device_mesh, options = _mesh_of(mesh)
            accelerator = Accelerator(mesh=device_mesh, compile_options={**options, "outputs": "gather"}, cpu=True)
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)).double()
        decoder = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)).double()
        optimizers = [torch.optim.AdamW(encoder.parameters(), lr=0.05), torch.optim.SGD(decoder.parameters(), lr=0.1)]
        loader: Any = DataLoader(
            list(zip(torch.randn(12, 6).double(), torch.arange(12) % 4, strict=True)), batch_size=4
        )  # type: ignore[arg-type]
        encoder, decoder, *optimizers, loader = accelerator.prepare(encoder, decoder, *optimizers, loader)
        for x, y in loader:
            loss = nn.functional.cross_entropy(decoder(encoder(x)), y)
            accelerator.backward(loss)
            norms = [accelerator.clip_grad_norm_(model.parameters(), 0.1) for model in (encoder, decoder)]
            numbers += [loss.item(), *map(float, norms)]
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()
        return numbers, {**_whole(encoder), **{f"decoder.{name}": x for name, x in _whole(decoder).items()}}


@pytest.mark.wide
@pytest.mark.slow_where(lambda mesh: mesh != "fsdp")
@pytest.mark.parametrize("mesh", ["fsdp", "tensor_parallel"])
def test_accelerate_with_two_models(mesh: str) -> None:
    expected, parameters = _two_models(None)
    assert len(expected) == 9 and min(expected) > 0.1
    for numbers, actual in run_on_ranks(_two_models, mesh, world_size=2):
        assert numbers == pytest.approx(expected, rel=1e-9)
        assert weights_off(actual, parameters) < 1e-9


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


@pytest.mark.slow
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
        assert weights_off(_whole(load(tmp_path / saved / "last", dtype=torch.float64)), plain) < 1e-6


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


def test_axes_of_accelerate_that_are_not_all_ranks_are_refused() -> None:
    from accelerate.parallelism_config import ParallelismConfig

    from autoparallel.integrations.accelerate import Accelerator

    with launched():
        with pytest.raises(ValueError, match=r"\(dp_shard=2, tp=2\), 4 ranks, and there are 1"):
            Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2), cpu=True)
        with pytest.raises(ValueError, match="give one of them"):
            Accelerator(parallelism_config=ParallelismConfig(), mesh=object(), cpu=True)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- fabric and colossal-ai


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4)).double()


def _samples() -> list[tuple[Tensor, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return list(zip(torch.randn(22, 6, dtype=torch.float64), torch.randint(0, 4, (22,)), strict=True))


def _fabric(strategy: str | None, path: str) -> tuple[list[float], dict[str, Tensor]]:
    """A loop of Fabric's users: 6 batches, accumulated by 2, clipped by norm and by value; saved, and gone on from."""
    from lightning.fabric import Fabric

    from autoparallel.integrations.lightning import AutoparallelStrategy

    numbers: list[float] = []
    with launched():
        options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true"}
        if strategy is None:
            fabric = Fabric(devices=1, **options)
        elif strategy == "registered":
            fabric = Fabric(strategy="autoparallel", devices=2, **options)
        else:
            ours = AutoparallelStrategy({"dp": 1, "tp": 2}, {"plan": strategy})
            fabric = Fabric(strategy=ours, devices=2, **options)
        fabric.launch()
        model = _net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(DataLoader(_samples(), batch_size=4))  # type: ignore[arg-type]
        state = {"model": model, "optimizer": optimizer, "step": 0, "seen": [1]}

        def epoch() -> None:
            for i, (x, y) in enumerate(loader):
                accumulates = i % 2 == 0
                with fabric.no_backward_sync(model, enabled=accumulates):
                    loss = nn.functional.cross_entropy(model(x), y)
                    fabric.backward(loss / 2)
                numbers.append(fabric.all_reduce(loss.detach()).item())
                if not accumulates:
                    norm = fabric.clip_gradients(model, optimizer, max_norm=0.2)
                    assert norm is not None
                    numbers.append(norm.item())
                    fabric.clip_gradients(model, optimizer, clip_val=0.05)
                    optimizer.step()
                    optimizer.zero_grad()

        epoch()
        state["step"] = 3
        fabric.save(path, state)
        kept = _whole(model._forward_module)
        epoch()
        state |= {"step": 0, "seen": []}
        assert fabric.load(path, state) == {} or strategy is None
        assert (state["step"], state["seen"]) == (3, [1])
        assert weights_off(_whole(model._forward_module), kept) == 0
        epoch()
        if strategy is not None:
            with pytest.raises(ValueError, match="one compiled model"):
                fabric.save(path, {"optimizer": optimizer})
            some = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)
            with pytest.raises(ValueError, match="all of them, whose gradients would be clipped"):
                fabric.clip_gradients(model, some, max_norm=1.0)
            with pytest.raises(ValueError, match="MixedPrecisionPolicy"):
                Fabric(strategy="autoparallel", devices=2, accelerator="cpu", precision="bf16-mixed").launch()
        return numbers, _whole(model._forward_module)


@pytest.mark.wide
def test_fabric(tmp_path: Path) -> None:
    expected, parameters = _fabric(None, str(tmp_path / "plain.ckpt"))
    assert len(expected) == 27 and max(expected) > 0.5
    for strategy in ("registered", "tensor_parallel"):
        for numbers, actual in run_on_ranks(_fabric, strategy, str(tmp_path / strategy), world_size=2):
            assert numbers == pytest.approx(expected, rel=1e-9)
            assert weights_off(actual, parameters) < 1e-9


def _booster(name: str, path: str) -> tuple[list[float], dict[str, Tensor]]:
    """The loops of the two tutorials, one after the other: clipped by norm and value, then accumulated."""
    from autoparallel.integrations import booster as colossal

    plugins = {
        "ddp": colossal.TorchDDPPlugin, "fsdp": colossal.TorchFSDPPlugin,
        "hybrid": lambda: colossal.HybridParallelPlugin(tp_size=2), "searched": lambda: colossal.Plugin({"dp": 2}),
    }  # fmt: skip
    model = _net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.3)
    criterion = nn.CrossEntropyLoss()
    plugin = plugins[name]()
    booster = colossal.Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(_samples(), batch_size=4, shuffle=True, drop_last=True)
    boosted = booster.boost(model, optimizer, criterion, loader, scheduler)
    compiled, optimizer, criterion, loader, scheduler = boosted
    numbers = []
    for _ in range(2):
        for x, y in loader:
            loss = criterion(compiled(x), y)
            booster.backward(loss, optimizer)
            numbers += [loss.item(), optimizer.clip_grad_by_norm(max_norm=0.5).item()]
            optimizer.clip_grad_by_value(0.1)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    for i, (x, y) in enumerate(loader):
        with contextlib.nullcontext() if i == 4 else booster.no_sync(compiled, optimizer):
            loss = criterion(compiled(x), y) / 5
            booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    kept = _whole(compiled)
    compiled.save(f"{path}.states", optimizer=optimizer)
    states = {name: x.detach().clone() for name, x in _momenta(compiled, optimizer).items()}
    for momentum in optimizer.state.values():
        momentum["momentum_buffer"] += 1
    compiled.load(f"{path}.states", optimizer=optimizer)
    assert states and weights_off(_momenta(compiled, optimizer), states) == 0
    booster.save_model(compiled, path)
    booster.load_model(compiled, path)
    assert weights_off(_whole(compiled), kept) == 0
    with pytest.raises(ValueError, match="'bf16'"):
        colossal.Booster(mixed_precision="fp16")
    with pytest.raises(ValueError, match="tp_size=3 does not divide the 2 ranks"):
        colossal.Booster(colossal.HybridParallelPlugin(tp_size=3)).boost(_net())
    return [*numbers, optimizer.param_groups[0]["lr"]], kept


def _momenta(model: Any, optimizer: Any) -> dict[str, Tensor]:
    return {n: optimizer.state[p]["momentum_buffer"].full_tensor() for n, p in model.named_parameters()}


def _booster_plain() -> tuple[list[float], dict[str, Tensor]]:
    """The same without a booster."""
    model, numbers = _net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.3)
    order = torch.Generator().manual_seed(1024)
    loader: Any = DataLoader(_samples(), 4, True, drop_last=True, generator=order)  # type: ignore[arg-type]
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            numbers += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    for x, y in loader:
        (nn.functional.cross_entropy(model(x), y) / 5).backward()
    optimizer.step()
    return [*numbers, optimizer.param_groups[0]["lr"]], _whole(model)


@pytest.mark.wide
@pytest.mark.slow_where(lambda plugin: plugin != "hybrid")
@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "hybrid", "searched"])
def test_booster(plugin: str, tmp_path: Path) -> None:
    expected, parameters = _booster_plain()
    assert len(expected) == 21 and max(expected) > 0.5
    for numbers, actual in run_on_ranks(_booster, plugin, str(tmp_path / "model"), world_size=2):
        assert numbers == pytest.approx(expected, rel=1e-9)
        assert weights_off(actual, parameters) < 1e-9
