"""What calls change around the model: globals, closures, defaults, and objects that only functions know."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections import ChainMap, Counter, UserList, defaultdict
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.hooks import two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop
from tests.capture.runner import STEPS, Run, numbers, sgd

FEATURES: dict[str, Tensor] = {}
HISTORY: list[Any] = []
CALLS = 0


def _train(run: Run, model: Any, read: Callable[[], Any], steps: int = STEPS + 1) -> None:
    """Trains a model on batches of several sizes; after each step what eager leaves around it is noted."""
    optimizer = sgd(model)
    for step in range(steps):
        output = model(numbers(4 + step % 2, 8, seed=step))
        output.square().mean().backward()
        finish(run, model, optimizer)
        run.note("around", read())


def remember(name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        FEATURES[name] = output.detach()

    return hook


@loop(ranks=True)
def activations_in_a_global_dict(run: Run) -> None:
    FEATURES.clear()
    model = two()
    model[0].register_forward_hook(remember("first"))
    model[2].register_forward_hook(remember("last"))
    _train(run, run.compile(model.double()), lambda: dict(FEATURES))


@loop(ranks=True)
def features_in_a_loss(run: Run) -> None:
    """A hook keeps what still has a graph, of which the loop makes a term of its loss."""
    features: list[Tensor] = []
    model = two()
    model[1].register_forward_hook(lambda module, args, output: features.append(output))
    model = run.compile(model.double())
    optimizer = sgd(model)
    for step in range(STEPS):
        features.clear()
        first, second = (model(numbers(4, 8, seed=step + i)) for i in range(2))
        (first.mean() + second.mean() + F.mse_loss(features[0], features[1])).backward()
        run.note("features", features)
        finish(run, model, optimizer)


class Extractor:
    """Keeps what some layers give, as a model's user does."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.features: dict[str, Tensor] = {}
        self.calls = 0
        self.handles = [model.get_submodule(name).register_forward_hook(self.save(name)) for name in names]

    def save(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.features[name] = output
            self.calls += 1

        return hook


@loop(ranks=True)
def extractor_of_layers(run: Run) -> None:
    """An object that closures alone know, made of the compiled model; its hooks are removed in the end."""
    model = run.compile(two().double())
    extractor = Extractor(model, ("0", "2"))
    _train(run, model, lambda: [dict(extractor.features), extractor.calls])
    for handle in extractor.handles:
        handle.remove()
    _train(run, model, lambda: extractor.calls)


class Cam:
    """Grad-CAM: it knows the compiled model, and its methods are hooks."""

    def __init__(self, model: Any, layer: nn.Module) -> None:
        self.model = model
        self.activations: list[Tensor] = []
        self.gradients: list[Tensor] = []
        layer.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.activations.append(output.cpu().detach())
        output.register_hook(self.keep_gradient)

    def keep_gradient(self, grad: Tensor) -> None:
        self.gradients = [grad.cpu().detach(), *self.gradients]

    def __call__(self, x: Tensor, place: int) -> Tensor:
        self.activations, self.gradients = [], []
        self.model.zero_grad()
        self.model(x)[:, place].sum().backward(retain_graph=True)
        return (self.gradients[0].mean(0) * self.activations[0]).sum(1)


@loop(ranks=True)
def map_of_activations(run: Run) -> None:
    model = run.compile(two().double())
    cam = Cam(model, model.get_submodule("1"))
    for step in range(STEPS):
        run.note("map", cam(numbers(4, 8, seed=step), step))


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0
        self.values: list[float] = []
        self.last: float | None = None

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count
        self.values.append(value)
        self.last = value

    def read(self) -> Any:
        return [self.total, self.count, list(self.values), self.last]


METER = Meter()


@loop(ranks=True)
def meter_of_a_closure(run: Run) -> None:
    meter = Meter()
    model = two()
    model[0].register_forward_hook(lambda m, args, out: meter.update(out.detach().mean().item(), len(out)))
    _train(run, run.compile(model.double()), meter.read)


@loop(ranks=True)
def global_meter(run: Run) -> None:
    METER.__init__()  # type: ignore[misc]
    model = two()
    model[0].register_forward_hook(lambda m, args, out: METER.update(out.detach().mean().item(), len(out)))
    _train(run, run.compile(model.double()), METER.read)


@loop()
def meters_in_an_object(run: Run) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.meters = {"mean": Meter()}

    trainer = Trainer()
    model = two()
    model[0].register_forward_hook(
        lambda m, args, out: trainer.meters["mean"].update(out.detach().mean().item(), len(out))
    )
    _train(run, run.compile(model.double()), lambda: trainer.meters["mean"].read())


@loop(ranks=True)
def counts_in_variables(run: Run) -> None:
    """A global, a variable of an outer function, and an entry of a list."""
    global CALLS
    CALLS, rows, last, total = 0, 0, None, [0]

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal rows, last
        global CALLS
        CALLS += 1
        rows += output.shape[0]
        total[0] += output.numel()
        last = output.detach()

    model = two()
    model[0].register_forward_hook(hook)
    _train(run, run.compile(model.double()), lambda: [CALLS, rows, list(total), last])


def counting(module: nn.Module, args: Any, output: Tensor) -> None:
    counting.calls += 1  # type: ignore[attr-defined]
    Counts.calls += 1
    Counts.values.append(output.mean().item())


class Counts:
    calls = 0
    values: ClassVar[list[float]] = []


@loop(ranks=True)
def counts_of_a_function_and_a_class(run: Run) -> None:
    counting.calls, Counts.calls, Counts.values = 0, 0, []  # type: ignore[attr-defined]
    model = two()
    model[1].register_forward_hook(counting)
    _train(run, run.compile(model.double()), lambda: [counting.calls, Counts.calls, list(Counts.values)])  # type: ignore[attr-defined]


def save_in(module: nn.Module, args: Any, output: Tensor, name: str, store: dict[str, Tensor]) -> None:
    store[name] = output.detach()


def append_to(log: list[Any], module: nn.Module, args: Any, output: Tensor) -> None:
    log.append(output.detach().mean())


@loop(ranks=True)
def partial_functions_that_keep(run: Run) -> None:
    store: dict[str, Tensor] = {}
    log: list[Any] = []
    model = two()
    for name in ("0", "2"):
        model.get_submodule(name).register_forward_hook(functools.partial(save_in, name=name, store=store))
    model[1].register_forward_hook(functools.partial(append_to, log))
    _train(run, run.compile(model.double()), lambda: [dict(store), list(log)])


@loop(ranks=True)
def defaults_that_keep(run: Run) -> None:
    log: list[Any] = []
    meter = Meter()

    def hook(module: nn.Module, args: Any, output: Tensor, log: list[Any] = log, *, meter: Meter = meter) -> None:
        log.append(output.detach())
        meter.update(output.detach().mean().item(), len(output))

    model = two()
    model[0].register_forward_hook(hook)
    _train(run, run.compile(model.double()), lambda: [list(log), meter.read()])


def scaled(scale: list[float], module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * scale[0]


@loop(ranks=True)
def argument_of_a_partial_function_that_the_loop_sets(run: Run) -> None:
    scale = [1.0]
    model = two()
    model[0].register_forward_hook(functools.partial(scaled, scale))
    model = run.compile(model.double())
    for step in range(STEPS):
        run.note("output", model(numbers(4, 8, seed=step)))
        scale[0] *= 0.5


@loop()
def lists_in_a_dict_around_the_model(run: Run) -> None:
    """Lists in a dict, a dict of lists that makes them, and one that counts."""
    lists: dict[str, list[Tensor]] = {"0": [], "1": [], "2": []}
    made: defaultdict[str, list[float]] = defaultdict(list)
    counts: Counter[str] = Counter()

    def hook(module: nn.Module, args: Any, output: Tensor, name: str) -> None:
        lists[name].append(output.detach())
        made[name].append(output.detach().mean().item())
        counts.update([type(module).__name__])

    model = two()
    for name, layer in model.named_children():
        layer.register_forward_hook(functools.partial(hook, name=name))
    _train(run, run.compile(model.double()), lambda: [lists, dict(made), dict(counts)])


@loop(ranks=True)
def average_of_activations(run: Run) -> None:
    """Each call reads what the one before has left."""
    average: dict[str, Tensor] = {}

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        mean = output.detach().mean(0)
        average["mean"] = 0.9 * average["mean"] + 0.1 * mean if "mean" in average else mean

    model = two()
    model[0].register_forward_hook(hook)
    _train(run, run.compile(model.double()), lambda: dict(average))


@loop(ranks=True)
def loss_function_that_logs(run: Run) -> None:
    history: dict[str, list[float]] = {"loss": []}

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        history["loss"].append(loss.item())
        return loss

    model = run.compile(two().double(), loss_fn)
    optimizer = sgd(model)
    for step in range(STEPS):
        model(numbers(4, 8, seed=step), numbers(4, 8, seed=step + 9)).backward()
        finish(run, model, optimizer)
        run.note("history", history)


class LossWithState:
    """Weighs itself by what it has seen, and by what the loop sets."""

    def __init__(self) -> None:
        self.steps, self.weight = 0, 1.0
        self.average: Tensor | None = None
        self.log: list[float] = []

    def __call__(self, output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
        self.steps += 1
        loss = F.mse_loss(output, target) * self.weight * scale / self.steps
        self.average = loss.detach() if self.average is None else 0.9 * self.average + 0.1 * loss.detach()
        self.log.append(loss.item())
        return loss + self.average

    def of(self, output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
        return self(output, target, scale)


@loop(ranks=True)
def losses_that_are_objects(run: Run) -> None:
    """As it is, by a method, and in a partial."""
    for kind in range(3):
        loss = LossWithState()
        loss_fn = (loss, loss.of, functools.partial(loss.of, scale=0.5))[kind]
        model = run.compile(two().double(), loss_fn)
        optimizer = sgd(model)
        for step in range(STEPS + 1):
            model(numbers(4, 8, seed=step), numbers(4, 8, seed=step + 9)).backward()
            finish(run, model, optimizer)
            run.note("loss", [loss.steps, loss.average, [*loss.log]])
            loss.weight = 1.0 + step


@loop(ranks=True)
def layers_that_log_to_one_list(run: Run) -> None:
    """Layers that are alike, of which one would be traced for all."""
    HISTORY.clear()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    for layer in model:
        layer[1].register_forward_hook(lambda m, args, out: HISTORY.append(out.mean().item()))  # type: ignore[index]
    _train(run, run.compile(model.double()), lambda: list(HISTORY))


@loop()
def two_models_that_share_a_dict(run: Run) -> None:
    FEATURES.clear()
    models = []
    for name in ("one", "other"):
        model = two()
        model[0].register_forward_hook(remember(name))
        models.append(run.compile(model.double()))
    for step in range(STEPS):
        for model in models:
            model(numbers(4, 8, seed=step))
            run.note("features", dict(FEATURES))


@loop(ranks=True)
def variables_that_share_a_list_and_a_dict(run: Run) -> None:
    """The second hook finds changed by the first what both know, under names of their own."""
    HISTORY.clear()
    values, counts = HISTORY, {"calls": 0}
    same = counts

    def first(module: nn.Module, args: Any, output: Tensor) -> None:
        values.append(output.detach().mean())
        counts["calls"] += 1

    def last(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        HISTORY.append(output.sum().item())
        same["calls"] += 2
        return output * same["calls"]

    model = two()
    model[0].register_forward_hook(first)
    model[2].register_forward_hook(last)
    _train(run, run.compile(model.double()), lambda: [list(values), dict(counts)])


@loop(ranks=True)
def tensor_of_a_closure_that_is_replaced(run: Run) -> None:
    """It is bound to a tensor from the start, and another hook reads it."""
    average = numbers(8, seed=9)

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal average
        average = 0.9 * average + 0.1 * output.detach().mean(0)

    model = two()
    model[2].register_forward_hook(lambda m, args, out: out - average)
    model[2].register_forward_hook(keep)
    _train(run, run.compile(model.double()), lambda: average)


@loop(refused="return what is collected")
def appends_to_a_bytearray(run: Run) -> None:
    marks = bytearray(b"ab")
    model = two()
    model[0].register_forward_hook(lambda m, args, out: marks.append(7))  # refused
    _train(run, run.compile(model.double()), lambda: list(marks))


@loop(refused="return what is collected")
def fills_an_array(run: Run) -> None:
    totals = np.zeros(3)
    model = two()
    model[0].register_forward_hook(lambda m, args, out: totals.fill(7.0))  # refused
    _train(run, run.compile(model.double()), lambda: totals.tolist())


@loop(refused=".")
def replaces_an_array_of_an_object(run: Run) -> None:
    state = SimpleNamespace(maps=np.zeros(2))

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        state.maps = output.detach().numpy()  # refused

    model = two()
    model[0].register_forward_hook(keep)
    _train(run, run.compile(model.double()), lambda: state.maps.tolist())


@loop()
def containers_of_libraries_that_the_loop_changes(run: Run) -> None:
    """They are read by their methods alone."""
    scales, array, options = UserList([1.0]), np.ones(3), {"gain": 1.0}
    chain, proxy = ChainMap({}, options), MappingProxyType(options)

    def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * scales.count(1.0) * float(array.sum()) * chain.get("gain") + proxy.get("gain")

    model = two()
    model[0].register_forward_hook(scale)
    model = run.compile(model.double())
    for step in range(STEPS):
        run.note("output", model(numbers(4, 8, seed=step)))
        scales.append(1.0)
        array[step % 3] += 1.0
        options["gain"] += 1.0


@loop(refused="keep it in an attribute of the model", line=False)
def keeps_an_object_that_cannot_be_copied(run: Run) -> None:
    class Writer:
        def __init__(self) -> None:
            self.values: list[float] = []

        def __deepcopy__(self, memo: Any) -> Writer:
            raise TypeError("a writer has a file")

    writer = Writer()
    model = two()
    model[0].register_forward_hook(lambda m, args, out: writer.values.append(out.mean().item()))
    _train(run, run.compile(model.double()), lambda: list(writer.values))


OPTIONS = Namespace(beta=1.0, schedule=SimpleNamespace(tau=1.0))
STEP = 0


@loop(ranks=True)
def numbers_that_the_loop_sets_around_the_model(run: Run) -> None:
    """A global, one of an object's, and a variable of an outer function."""
    global STEP
    STEP, OPTIONS.beta, weight = 0, 1.0, 0.5

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * min(1.0, STEP / 4), target) + OPTIONS.beta * output.square().mean() * weight

    model = run.compile(two().double(), loss_fn)
    optimizer = sgd(model)
    for step in range(12):
        STEP, OPTIONS.beta, OPTIONS.schedule.tau, weight = step, 1.0 / (step + 1), 3.0 - step / 8, 0.5 + step
        model(numbers(4, 8, seed=step), numbers(4, 8, seed=step + 9)).backward()
        finish(run, model, optimizer)


@loop()
def count_that_the_loop_sets_around_the_model(run: Run) -> None:
    """What the model fixes by it has a trace for each value; another number is set beside it."""
    rounds, options = 1, Namespace(scale=1.0)

    def repeat(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        for _ in range(rounds):
            output = output * options.scale
        return output

    model = two()
    model[0].register_forward_hook(repeat)
    model = run.compile(model.double())
    for step in range(6):
        rounds, options.scale = 1 + step % 2, 1.0 / (step + 1)
        run.note("output", model(numbers(4, 8, seed=step)))
