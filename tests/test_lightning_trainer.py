"""Lightning's Trainer on two ranks: the numbers of the same Trainer with its own strategy in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.runtime.support import run_on_ranks, weights, weights_off
from tests.test_integrations import launched

STRATEGIES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "fsdp": ({"dp": 2}, {"plan": "fsdp"}),
    "tensor_parallel": ({"dp": 1, "tp": 2}, {"plan": "tensor_parallel"}),
}


def _samples() -> list[tuple[Tensor, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return list(zip(torch.randn(22, 6, dtype=torch.float64), torch.randint(0, 4, (22,)), strict=True))


def _trainer(strategy: str | None, path: str | None = None, **options: Any) -> Any:
    """A Trainer in float64: three epochs, accumulated by 2 and clipped; every epoch's checkpoint is kept."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from autoparallel.integrations.lightning import TrainerStrategy

    chosen: Any = "auto" if strategy is None else "autoparallel"
    if strategy in STRATEGIES:
        mesh, compiling = STRATEGIES[strategy]
        chosen = TrainerStrategy(mesh, compiling)
    if path is not None:
        options["callbacks"] = ModelCheckpoint(path, "{epoch}", monitor="val_loss", save_top_k=-1, save_last=True)
    options = {
        "max_epochs": 3,
        "precision": "64-true",
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.2,
        **options,
    }
    return pl.Trainer(
        accelerator="cpu", devices=1 if strategy is None else 2, strategy=chosen, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=path is not None, **options,
    )  # fmt: skip


def _loaders(shuffle: bool = False) -> dict[str, Any]:
    train: Any = DataLoader(_samples(), batch_size=4, shuffle=shuffle)  # type: ignore[arg-type]
    return {"train_dataloaders": train, "val_dataloaders": DataLoader(_samples()[:10], batch_size=4)}  # type: ignore[arg-type]


def _module(name: str, **options: Any) -> Any:
    from tests import lightning_modules

    torch.manual_seed(0)
    return getattr(lightning_modules, name)(**options)


def _fit(strategy: str | None, name: str, path: str) -> tuple[list[float], dict[str, float], str, dict[str, Tensor]]:
    """What a module has counted, the Trainer's metrics, its best checkpoint, and the weights."""
    with launched():
        trainer, module = _trainer(strategy, path), _module(name)
        torch.manual_seed(5)
        trainer.fit(module, **_loaders(shuffle=True))
        metrics = {name: float(x) for name, x in trainer.callback_metrics.items()}
        best, parameters = Path(trainer.checkpoint_callback.best_model_path).name, weights(module)
        trainer.validate(module, _loaders()["val_dataloaders"], ckpt_path=f"{path}/{best}", verbose=False)
        return module.numbers, metrics, best, parameters


@pytest.mark.wide
@pytest.mark.slow_where(lambda strategy: strategy != "fsdp")
@pytest.mark.parametrize(
    ("name", "strategy"), [("Classifier", "registered"), ("Classifier", "tensor_parallel"), ("Pair", "fsdp")]
)
def test_its_numbers_are_those_of_one_process(name: str, strategy: str, tmp_path: Path) -> None:
    expected, metrics, best, parameters = _fit(None, name, str(tmp_path / "plain"))
    assert len(expected) == 37 and max(expected) == 10  # rows that were validated, not as often as there are ranks
    found = run_on_ranks(_fit, strategy, name, str(tmp_path / "ours"), world_size=2)
    for numbers, theirs, kept, actual in found:
        assert numbers == pytest.approx(expected, rel=1e-9)
        assert theirs == pytest.approx(metrics, rel=1e-9) and kept == best
        assert weights_off(actual, parameters) < 1e-9


def _resumed(path: str) -> tuple[list[float], dict[str, Tensor], int]:
    """The last epoch of three, on another mesh than the first two."""
    with launched():
        _trainer("fsdp", path, max_epochs=2).fit(_module("Classifier"), **_loaders())
        trainer, module = _trainer("tensor_parallel", path), _module("Classifier")
        trainer.fit(module, **_loaders(), ckpt_path="last")
        return module.numbers, weights(module), trainer.global_step


@pytest.mark.wide
def test_a_run_goes_on_with_another_mesh(tmp_path: Path) -> None:
    with launched():
        trainer, module = _trainer(None), _module("Classifier")
        trainer.fit(module, **_loaders())
    for numbers, actual, steps in run_on_ranks(_resumed, str(tmp_path), world_size=2):
        last = numbers[2:]  # after the check of validation, of two batches, that the Trainer begins with
        assert last == pytest.approx(module.numbers[-len(last) :], rel=1e-9) and len(last) == 11
        assert weights_off(actual, weights(module)) < 1e-9 and steps == trainer.global_step


def _adversarial(strategy: str | None, path: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of three epochs of a GAN; where a strategy is given, the last is of a run that goes on."""
    numbers: list[float] = []
    with launched():
        for i, epochs in enumerate((3,) if strategy is None else (2, 3)):
            module, stepped = _module("GAN", **options), {"accumulate_grad_batches": 1, "gradient_clip_val": None}
            trainer = _trainer(strategy, path, max_epochs=epochs, **stepped)
            trainer.checkpoint_callback.monitor = None
            trainer.fit(module, _loaders()["train_dataloaders"], ckpt_path=f"{path}/last.ckpt" if i else None)
            numbers += module.numbers
        return numbers, weights(module)


@pytest.mark.wide
@pytest.mark.slow_where(lambda strategy: strategy != "fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_optimizers_that_are_stepped_by_hand(strategy: str, tmp_path: Path) -> None:
    for i, options in enumerate(({}, {"clip": 0.01, "accumulate": 2})):
        expected, weights = _adversarial(None, str(tmp_path / f"plain{i}"), options)
        assert len(expected) == 2 * 3 * 6
        for numbers, actual in run_on_ranks(_adversarial, strategy, str(tmp_path / f"{i}"), options, world_size=2):
            assert numbers == pytest.approx(expected, rel=1e-9)
            assert weights_off(actual, weights) < 1e-9


def _refused(path: str) -> dict[str, str]:
    """What each module, and mixed precision, is refused with."""
    said: dict[str, str] = {}
    with launched():
        for name in ("Bare", "Tied", "Partly", "Averaging"):
            with pytest.raises(ValueError) as caught:
                _trainer("registered", f"{path}/{name}", max_epochs=1).fit(_module(name), **_loaders())
            said[name] = str(caught.value)
        with pytest.raises(ValueError) as caught:
            _trainer("registered", precision="bf16-mixed").fit(_module("Classifier"), **_loaders())
        said["precision"] = str(caught.value)
    return said


@pytest.mark.wide
def test_what_is_not_to_be_had_is_refused(tmp_path: Path) -> None:
    for said in run_on_ranks(_refused, str(tmp_path), world_size=2):
        assert "Bare has a parameter of its own, 'scale'" in said["Bare"]
        assert "'encoder' and 'decoder' of Tied share a parameter of shape [16]" in said["Tied"]
        assert "holds some of a compiled module's parameters" in said["Partly"]
        assert "checkpoint['state_dict']['net.0.weight']" in said["Averaging"]
        assert "MixedPrecisionPolicy" in said["precision"]
