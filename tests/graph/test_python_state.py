"""Values of Python's that a call reads make kinds of calls; what a call changes of them is carried or refused."""

from __future__ import annotations

import copy
import gc
import logging
import random
import types
from collections.abc import Callable
from typing import Any

import huggingface_hub.utils
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel.graph.python_state import MISSING, PythonState, freeze

GAIN = 1.0


class Settings:
    """What a model may have as a global: an attribute is read by the model, another by a method."""

    alpha, beta = 0.5, 2.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.beta


SETTINGS = Settings()
SEEN: list[Tensor] = []


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.tau = 1.0


class Temperature(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) / self.tau).pow(2).mean()


class Globals(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (SETTINGS.scaled(self.linear(x)) * GAIN * SETTINGS.alpha).mean()


OPTIONS = {"power": 2}


def _scaled(x: Tensor, *, by: float = 1.0) -> Tensor:
    return x * by


class Defaults(Linear):
    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        def power(h: Tensor, options: dict[str, int] = OPTIONS) -> Tensor:
            return h.pow(options["power"])

        return power(_scaled(self.linear(x)) * gain).mean()


class Rebound(Linear):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h, before = self.linear(x), self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return (h - self.mean + before).pow(2).mean()


class Unregistered(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(4, dtype=torch.float64)
        self.shifts = [torch.ones(4, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale + self.shifts[0]).pow(2).mean()


class Cached(Linear):
    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.arange(4, dtype=torch.float64)
        return (self.linear(x) * self.mask).pow(2).mean()


def train(make: Callable[[], nn.Module], between: Callable[[Any, int], None] = lambda model, step: None) -> Any:
    """Trains a plain and a compiled copy, and holds them together; returns the compiled one."""
    torch.manual_seed(0)
    plain = make()
    compiled = autoparallel.compile(copy.deepcopy(plain))
    for step in range(3):
        x = torch.randn(6 + 2 * (step % 2), 4, dtype=torch.float64)
        losses = []
        for model in (plain, compiled):
            between(model, step)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    for theirs, ours in zip(plain.buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    return compiled


def kinds(model: Any) -> int:
    return len(model._kinds)


def test_an_attribute_that_a_schedule_sets_makes_a_kind_and_one_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="autoparallel"):
        model = train(Temperature, lambda model, step: setattr(model, "tau", 1.0 / (1 + step // 2)))
    assert kinds(model) == 2 and vars(model._plain)["tau"] == 0.5
    assert [r.getMessage() for r in caplog.records if "tau has changed from 1.0 to 0.5" in r.getMessage()]


def test_an_attribute_that_nobody_reads_makes_none() -> None:
    assert kinds(train(Temperature, lambda model, step: setattr(model, "epoch", step))) == 1


@pytest.mark.wide
def test_globals_and_attributes_of_global_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(model: Any, step: int) -> None:
        monkeypatch.setitem(globals(), "GAIN", 1.0 + step)
        monkeypatch.setattr(SETTINGS, "alpha", 0.5 + step // 2)

    assert kinds(train(Globals, between)) == 3


def test_a_method_of_a_global_object(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kinds(train(Globals, lambda model, step: monkeypatch.setattr(SETTINGS, "beta", 2.0 + step))) == 2


def test_the_default_dtype() -> None:
    class Third(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor(1 / 3)

    model, x = autoparallel.compile(Third()), torch.ones(6, dtype=torch.float64)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert torch.equal(model(x), Third()(x))
    finally:
        torch.set_default_dtype(before)


@pytest.mark.wide
def test_defaults_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(model: Any, step: int) -> None:
        monkeypatch.setattr(Defaults.forward, "__defaults__", (1.0 + step,))
        monkeypatch.setattr(_scaled, "__kwdefaults__", {"by": 1.0 + step // 2})
        monkeypatch.setitem(OPTIONS, "power", 2 + step)

    assert kinds(train(Defaults, between)) == 3


@pytest.mark.wide
def test_a_closure_of_the_loss() -> None:
    weight = 1.0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return weight * (output - target).pow(2).mean()

    model = autoparallel.compile(nn.Linear(4, 4, dtype=torch.float64), loss_fn=loss_fn)
    x = torch.randn(6, 4, dtype=torch.float64)
    first = model(x, x)
    weight = 3.0
    torch.testing.assert_close(model(x, x), 3 * first)


def test_a_buffer_that_is_bound_anew_is_carried() -> None:
    assert kinds(train(Rebound)) == 1


def test_unregistered_tensors_are_read_live() -> None:
    def between(model: Any, step: int) -> None:
        model.scale = model.scale * 1.5
        model.shifts[0].mul_(1.1)

    assert kinds(train(Unregistered, between)) == 1


def test_a_cache_that_is_filled_is_there_from_then_on() -> None:
    model = train(Cached)
    assert kinds(model) == 2 and torch.equal(model.mask, torch.arange(4, dtype=torch.float64))


def test_a_submodule_is_replaced() -> None:
    def between(model: Any, step: int) -> None:
        model.act = (nn.Tanh(), nn.Sigmoid(), nn.ReLU())[step]

    class Activated(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.linear(x)).pow(2).mean()

    assert kinds(train(Activated, between)) == 3


def _history(model: Any, x: Tensor) -> Tensor:
    """Torch looks through all modules for where a size is asked for, and runs what this one has of its own."""
    assert type(huggingface_hub.utils) is not types.ModuleType
    model.history.append(x.shape[0])
    return model.linear(x).mean() * len(model.history)


def _python_draw(model: Any, x: Tensor) -> Tensor:
    return model.linear(x).mean() * random.gauss(1, 0.1)


def _numpy_draw(model: Any, x: Tensor) -> Tensor:
    return model.linear(x).mean() * float(np.random.randn())


def _default_list(model: Any, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 - it is what the test is about
    seen.append(1)
    return model.linear(x).mean() * len(seen)


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (_history, r"history, a list that outlives it, and reads .* at .*len\(model.history\)[^\n]*\n.*as an output"),
        (_python_draw, r"Python's random at .*random.gauss\(1, 0.1\)[^\n]*\n.*torch.rand"),
        (_numpy_draw, r"numpy.random at .*np.random.randn\(\)[^\n]*\n.*torch.rand"),
        (_default_list, r"the script.seen, a list that outlives it, and reads .* at .*len\(seen\)[^\n]*\n.*an output"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_call_that_changes_what_it_reads_is_refused(forward: Callable[..., Tensor], says: str) -> None:
    class Model(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[int] = []
            self.register_buffer("state", torch.zeros(2))

    Model.forward = forward  # type: ignore[method-assign]
    states = random.getstate(), freeze(np.random.get_state())
    model = autoparallel.compile(Model())
    with pytest.raises(autoparallel.CaptureError, match=says):
        model(torch.randn(4, 4, dtype=torch.float64))
    assert _default_list.__defaults__ == ([],)
    assert (random.getstate(), freeze(np.random.get_state())) == states


def test_a_buffer_that_is_a_cache_for_one_shape_is_made_when_that_is_met() -> None:
    class Model(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positions", torch.zeros(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if len(self.positions) != x.shape[1]:
                self.positions = torch.arange(x.shape[1], dtype=x.dtype)
            return (self.linear(x) * self.positions[:, None]).mean()

    plain, x = Model(), torch.randn(4, 3, 4, dtype=torch.float64)
    model, eager = autoparallel.compile(copy.deepcopy(plain)), plain
    for length in (3, 2, 3, 3):
        torch.testing.assert_close(model(x[:, :length]), eager(x[:, :length]))
        assert torch.equal(model.positions, eager.positions) and len(eager.positions) == length


def test_a_variable_may_be_called_as_the_attribute_that_it_holds() -> None:
    class Model(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"scale": 2.0}

        def forward(self, x: Tensor) -> Tensor:
            config = self.config
            return (lambda y: y * config["scale"])(self.linear(x)).mean()

    plain, x = Model(), torch.randn(4, 4, dtype=torch.float64)
    model = autoparallel.compile(copy.deepcopy(plain))
    for scale in (2.0, 3.0):
        plain.config["scale"] = model.config["scale"] = scale
        assert torch.equal(model(x), plain(x))


def test_what_a_garbage_collection_calls_is_no_part_of_the_model() -> None:
    class Model(Linear):
        def forward(self, x: Tensor) -> Tensor:
            _ = [[i] for i in range(600_000)]  # so many new objects that a collection begins
            return self.linear(x).mean()

    def count(phase: str, _: Any) -> None:
        SEEN.append(phase)

    model = autoparallel.compile(Model())
    gc.callbacks.append(count)
    try:
        model(torch.randn(4, 4, dtype=torch.float64))
        assert SEEN, "nothing was collected"
    finally:
        gc.callbacks.remove(count)
        SEEN.clear()


class TestPythonState:
    def test_an_entry_that_has_changed_is_said_with_what_it_was(self) -> None:
        table: dict[str, Any] = {"cfg": {"act": len, "sizes": [1, 2], "rates": {"a": 0.5}}}
        state = PythonState()
        state.add("cfg", table, "cfg")
        table["cfg"]["rates"]["a"] = 0.25
        assert state.describe("cfg") == ("cfg['rates']['a']", "0.5", "0.25")
        table["cfg"]["rates"]["a"] = 0.5
        table["cfg"]["act"] = sum
        assert state.describe("cfg") == ("cfg['act']", "len", "sum")
        table["cfg"]["act"] = len
        table["cfg"]["sizes"].append(3)
        assert state.describe("cfg") == ("cfg['sizes']", "a list of 2", "a list of 3")
        table["cfg"]["sizes"].pop()
        table["cfg"]["new"] = 1
        assert state.describe("cfg") == ("cfg['new']", "nothing", "1")

    def test_values_are_compared_with_their_types(self) -> None:
        table: dict[str, Any] = {"a": 1, "b": [1, {"c": 2.0}]}
        state = PythonState()
        state.add("a", table, "a")
        state.add("b", table, "b")
        state.add("gone", table, "gone")
        assert state.changed(()) is None
        table["a"] = True
        assert state.changed(()) == "a" and state.describe("a") == ("a", "1", "True")
        table["a"] = 1
        table["b"][1]["c"] = 3.0
        assert state.changed(()) == "b" and state.describe("b") == ("b[1]['c']", "2.0", "3.0")
        table["b"][1]["c"] = 2.0
        table["gone"] = 0
        assert state.changed(()) == "gone"

    def test_places_that_are_called_alike_are_told_apart(self) -> None:
        tables: list[dict[str, Any]] = [{"a": 1}, {"a": [1]}, {"a": 1}]
        state = PythonState()
        for table in (*tables, *tables):
            more = PythonState()
            more.add("a", table, "a")
            state.merge(more)
        assert list(state) == ["a", "a (3)", "a (2)"]
        for table, label in zip(tables, ("a", "a (2)", "a (3)"), strict=True):
            before, table["a"] = table["a"], 7
            assert state.changed(()) == label
            table["a"] = before

    def test_frozen_values(self) -> None:
        loop: list[Any] = [1]
        loop.append(loop)
        assert freeze(loop) == freeze(loop)
        assert freeze(float("nan")) == freeze(float("nan"))
        assert freeze(0) != freeze(False) and freeze(MISSING) != freeze(0)
        assert freeze(np.arange(3)) == freeze(np.arange(3)) != freeze(np.arange(4))
        one, other = types.SimpleNamespace(a=1), types.SimpleNamespace(a=1)
        assert freeze(one) != freeze(other) and freeze(one) == freeze(one)
        before = freeze(one, deep=True)
        one.a = 2
        assert freeze(one, deep=True) != before and freeze(one) == freeze(one)
