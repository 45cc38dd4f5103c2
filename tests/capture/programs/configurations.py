"""Settings that a loop changes, in whatever people keep them: dicts, classes, objects, lists."""

from __future__ import annotations

import copy
import multiprocessing
from argparse import Namespace
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import Run, numbers, sgd

STEPS = 6


class AttrDict(dict[str, Any]):
    """As many repositories have it; ``copy.deepcopy`` makes one without attributes of it."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


class DotDict(dict[str, Any]):
    """Has ``None`` for all that is not there, such as a ``__deepcopy__``."""

    __getattr__ = dict.get  # type: ignore[assignment]
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Munch(dict[str, Any]):
    """Makes another dict each time that its ``__dict__`` or a copy is asked for."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: value.__dict__ if isinstance(value, Munch) else value for name, value in self.items()}

    def copy(self) -> Munch:
        return Munch({name: value.copy() if isinstance(value, Munch) else value for name, value in self.items()})


class Settings:
    """A class that is its settings; more are in a class of its own, and in an object."""

    scale = 1.0

    class Layer:
        slope = 0.1


class Holder:
    settings = Settings()


class Net(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.a, self.b = config, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.leaky_relu(self.a(x), self.config.layer.slope)
        return self.b(h) * self.config.scale if self.config.active else self.b(h)


def train(run: Run, model: nn.Module, change: Callable[[int], None]) -> None:
    """Trains a model whose settings change before each step but the first."""
    compiled = run.compile(model.double())
    optimizer = sgd(compiled)
    for step in range(STEPS):
        if step:
            change(step)
        output = compiled(numbers(4, 8, seed=step))
        output.square().mean().backward()
        run.note("output", output)
        finish(run, compiled, optimizer)


def _train_with(run: Run, make: Callable[..., Any]) -> None:
    config = make(scale=1.0, active=True, layer=make(slope=0.1))

    def change(step: int) -> None:
        config.scale, config["active"], config.layer.slope = 1.0 + step, step % 3 > 0, 0.1 * step

    train(run, Net(config), change)


@loop(ranks=True)
def settings_in_their_own_table(run: Run) -> None:
    _train_with(run, AttrDict)


@loop()
def settings_with_none_for_others(run: Run) -> None:
    _train_with(run, DotDict)


@loop()
def settings_that_make_their_table(run: Run) -> None:
    _train_with(run, Munch)


@loop(ranks=True)
def class_that_is_the_settings(run: Run) -> None:
    class Config(Settings):
        active = True

        class layer:  # noqa: N801
            slope = 0.1

    def change(step: int) -> None:
        Config.scale, Config.active, Config.layer.slope = 1.0 + step, step % 3 > 0, 0.1 * step

    train(run, Net(Config), change)


@loop()
def settings_in_an_object_of_a_class(run: Run) -> None:
    """Nobody copies the object for the trace."""

    class Layer:
        def __init__(self) -> None:
            self.slope = 0.1

    class Config:
        scale, active, layer = 1.0, True, Layer()

    config = Config()

    def change(step: int) -> None:
        config.scale, config.layer.slope = 1.0 + step, 0.1 * step

    train(run, Net(config), change)


@program(refused="return what is collected")
class ObjectOfAClassChanged(Two):
    settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        self.settings.scale = self.settings.scale * 0.5  # refused
        return self.a(x) * self.settings.scale


LIBRARYS = BatchEncoding({"scale": 1.0, "layer": BatchEncoding({"slope": 0.1}), "active": True})


@loop(ranks=True)
def settings_of_a_library_around_the_model(run: Run) -> None:
    """Its ``__getattr__`` is no code of the model's, nor is its ``get``."""

    class Around(Two):
        def forward(self, x: Tensor) -> Tensor:
            h = nn.functional.leaky_relu(self.a(x), LIBRARYS.layer.slope)
            return self.b(h) * LIBRARYS.scale if LIBRARYS.get("active") else self.b(h)

    def change(step: int) -> None:
        LIBRARYS["scale"], LIBRARYS["active"], LIBRARYS["layer"]["slope"] = 1.0 + step, step % 3 > 0, 0.1 * step

    change(0)
    train(run, Around(), change)


@loop()
def settings_of_a_user_dict_around_the_model(run: Run) -> None:
    class Config(UserDict[str, Any]):
        """Has what it inherits."""

    config = Config(scale=1.0)

    class Around(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * config.get("scale", 0.0)

    train(run, Around(), lambda step: config.update(scale=1.0 / step))


@loop(ranks=True)
def learning_rates_of_optimizers(run: Run) -> None:
    """Of one around the model, of its scheduler, and of one that the model holds; and a number that processes share."""
    count = multiprocessing.Value("i", 1)

    class Scaled(Two):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.SGD(self.a.parameters(), lr=1.0)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x) * outer.param_groups[0]["lr"] + schedule.get_last_lr()[0] * count.value
            return self.b(h) * self.optimizer.param_groups[0]["lr"]

    model = Scaled()
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(outer, 0.5)

    def change(step: int) -> None:
        outer.step()
        schedule.step()
        model.optimizer.param_groups[0]["lr"] = 1.0 / step
        count.value = step

    train(run, model, change)


class Scaling(dict[str, Any]):
    """Has an attribute beside its entries."""

    factor: float

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) * self.factor


@loop(ranks=True)
def settings_with_attributes_beside_entries(run: Run) -> None:
    config = Scaling(scale=1.0)
    config.factor = 2.0

    class Around(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * config["scale"]

    train(run, Around(), lambda step: setattr(config, "factor", 1.0 / step))


@loop(ranks=True)
def settings_that_are_replaced(run: Run) -> None:
    """A variable around the model, of which the model reads attributes, is bound to another object, and so is a
    teacher, of which it calls a method, and a tensor."""
    config, teacher, weight = Namespace(scale=1.0), Two().double().requires_grad_(False), numbers(8, 8, seed=9)

    class Around(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * config.scale - teacher.a.forward(x) @ weight.t()

    def change(step: int) -> None:
        nonlocal config, teacher, weight
        if step % 3 == 0:
            config = Namespace(scale=1.0 + step)
        elif step % 3 == 1:
            teacher = Two().double().requires_grad_(False)
        else:
            weight = weight * 2

    train(run, Around(), change)


@loop(ranks=True)
def names_of_settings(run: Run) -> None:
    """Code of Python's own asks for all of them."""

    class Asks(Two):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.space = Namespace(scale=1.0), SimpleNamespace(scale=1.0)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x) * 2.0 if "twice" in self.config else self.a(x)
            return self.b(h) * copy.copy(self.config).scale * len(vars(self.space))

    model = Asks()

    def change(step: int) -> None:
        model.config.scale = 1.0 + step // 2
        if step == 2:
            model.config.twice = True
        if step == 4:
            model.space.more = True

    train(run, model, change)


@loop(ranks=True)
def weights_in_lists_and_dicts(run: Run) -> None:
    """One trace serves all of them, for each answer to what the model asks."""

    class Weighed(Two):
        def __init__(self) -> None:
            super().__init__()
            self.weights, self.options = [1.0, 2.0], {"loss": {"scale": 1.0, "power": 2}, "name": "plain"}
            self.by_kind = {torch.float64: 1.0}

        def forward(self, x: Tensor) -> Tensor:
            h = self.by_kind[x.dtype] * sum(
                w * layer(x) for w, layer in zip(self.weights, (self.a, self.b), strict=True)
            )
            scaled = h * self.options["loss"]["scale"]  # type: ignore[index]
            return scaled.square() if self.options["name"] == "square" else scaled  # type: ignore[no-any-return]

    model = Weighed()

    def change(step: int) -> None:
        model.weights[1], model.options["loss"]["scale"] = 1.0 / step, 0.5 * step  # type: ignore[index]
        model.options["name"] = "square" if step > 2 else "plain"
        model.by_kind[torch.float64] = 1.0 + step // 3

    train(run, model, change)


@loop(ranks=True)
def table_that_training_drops(run: Run) -> None:
    """Evaluation fills it before the first step of training, which does not read it."""

    class Caching(Two):
        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.table = None
                return self.b(self.a(x))
            if self.table is None:
                self.table = self.b.weight.detach() @ self.a.weight.detach()
            return x @ self.table.T

    model = run.compile(Caching().double())
    optimizer = sgd(model)
    for step, is_training in enumerate((False, True, True, False, False, True, True)):
        output = model.train(is_training)(numbers(4, 8, seed=step))
        run.note("output", output)
        if is_training:
            output.square().mean().backward()
            finish(run, model, optimizer)
