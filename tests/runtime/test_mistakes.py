"""Mistakes of the first hour: what is said names the argument, the module or the line, and what to do."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from tests.runtime.support import make, mesh_of, off, raised, run_on_ranks

X, Y = torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids))


def compiled(model: nn.Module | None = None, loss_fn: Any = F.cross_entropy, **options: Any) -> Any:
    return autoparallel.compile(model or nn.Sequential(nn.Linear(6, 4), nn.ReLU()), loss_fn=loss_fn, **options)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)

    def encode(self, x: Tensor, scale: float) -> Tensor:
        return self.out(x) * scale


def methods() -> Any:
    return autoparallel.compile(Halves(), forward_methods=("encode",))


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "too wide": (lambda: compiled()(torch.ones(8, 7), Y), "Sequential cannot be captured at 0, a Linear\n"),
    "a target of another size": (lambda: compiled()(X, Y[:4]), "cannot be captured at its loss function\n"),
    "a loss that reads": (
        lambda: compiled(loss_fn=lambda out, y: int(F.cross_entropy(out, y)))(X, Y),
        "cannot be captured at its loss function, ",
    ),
    "no loss": (lambda: compiled(loss_fn=None)(X, Y), "TypeError: Sequential.forward() takes .*compile(loss_fn="),
    "a target by name": (lambda: compiled()(X, target=Y), "a target comes last, by its position"),
    "more than it takes": (
        lambda: compiled()(X, X, X, Y),
        "TypeError: Sequential.forward() takes .*give it what it takes",
    ),
    "less than it takes": (
        lambda: compiled(nn.Bilinear(6, 6, 3), loss_fn=None)(X),
        "TypeError: Bilinear.forward() missing 1 required positional argument: .*give it what it takes",
    ),
    "a method of more": (
        lambda: methods().encode(X),
        "TypeError: Halves.encode() missing 1 required positional argument",
    ),
    "a list": (lambda: compiled()(X.tolist(), Y), "It was called with input, a list, the target [8] int64."),
    "None": (lambda: compiled()(None, Y), "It was called with input None, the target [8] int64."),
    "module": (lambda: compiled().module, "model.module is the model itself"),
    "a path for a state": (lambda: compiled().load_state_dict("model.pt"), "takes a dict of tensors.*not a str"),
    "torch.jit": (lambda: torch.jit.script(compiled()), "give torch.jit the plain model"),
    "steps and loader": (lambda: compiled().accumulate([(X, Y)], 4), "got a list: model.accumulate(4, loader)"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_says_what_to_change(name: str) -> None:
    mistake, words = CALLS[name]
    message = raised(mistake)
    for part in words.split(".*"):
        assert part in message, message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_fn": "cross_entropy"}, "loss_fn must be a function of an output and a target.*not a str"),
        ({"loss_fn": nn.CrossEntropyLoss}, "not the class CrossEntropyLoss"),
        ({"example_inputs": X}, "example_inputs must be a tuple of the positional inputs of a call, not a Tensor"),
        ({"cache": 3}, "cache must be the path of a folder, not a int"),
        ({"plan": "plan.json"}, r"Plan.load\(path\)"),
        ({"plan": Path("plan.json")}, r"Plan.load\(path\)"),
        ({"precision": torch.bfloat16}, r"MixedPrecisionPolicy\(param_dtype=torch.bfloat16.*not torch.bfloat16"),
        ({"clip_grad_norm": "1.0"}, "max_norm must be a number, got '1.0'"),
    ],
)
def test_an_option_that_cannot_be_says_what_it_is(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        compiled(**options)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [((Y + 10, Y), "raised in Words by table, at .*ids"), ((Y, Y + 5), "by the loss function")],
    ids=["an input", "the target"],
)
def test_an_index_out_of_range_is_raised_with_its_module_and_line(inputs: tuple[Tensor, Tensor], words: str) -> None:
    with pytest.raises(IndexError) as caught:
        compiled(Words())(*inputs)
    (note,) = caught.value.__notes__
    assert all(part in note for part in words.split(".*")), note


def test_a_cache_that_keeps_nothing_is_said_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "autoparallel"):
        assert compiled(cache=tmp_path / "file")(X, Y).isfinite()
    assert "the cache keeps nothing" in caplog.text


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, places: Tensor, x: Tensor) -> Tensor:
        return self.down(self.up(x) + self.up(places))


def _another_first_input() -> tuple[str, float]:
    plain, model = make(Positions), autoparallel.compile(make(Positions), mesh_of(2), plan="fsdp")
    places, x = torch.ones(5, 8, dtype=torch.float64), torch.ones(8, 5, 8, dtype=torch.float64)
    return raised(lambda: model(places, x)), off(model(x=x, places=places), plain(places, x))


def test_where_the_first_input_has_no_batch_another_is_given_first() -> None:
    for message, difference in run_on_ranks(_another_first_input, world_size=2):
        assert "a batch of 5 rows must divide by 2" in message and "give that first, by its name" in message, message
        assert difference < 1e-12


class Features(nn.Module):
    """Its second output is what the first one is computed of."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.a, self.b, self.detaches = nn.Linear(6, 4), nn.Linear(4, 3), detaches

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x).tanh()
        return self.b(h.detach() if self.detaches else h).square(), h


WAITERS: dict[str, Callable[[Tensor], Any]] = {
    "retain_grad()": lambda h: h.retain_grad(),
    "a hook": lambda h: h.register_hook(lambda grad: 2 * grad),
}


@pytest.mark.parametrize("waiter", WAITERS)
def test_who_waits_for_an_outputs_gradient_is_given_all_of_it_or_told(waiter: str) -> None:
    model = compiled(Features(detaches=False), loss_fn=None)
    out, h = model(X)
    WAITERS[waiter](h)
    h.sum().backward()  # nothing goes through the other output
    out, h = model(X)
    WAITERS[waiter](h)
    message = raised(lambda: (out.sum() + h.sum()).backward())
    assert f"{waiter} on output 1 of the model" in message and "What to change" in message
    out, h = model(X)
    WAITERS[waiter](out)
    (out.sum() + h.sum()).backward()


ASKING: dict[str, Callable[[Tensor, Tensor, list[Any]], Any]] = {
    "alone": lambda out, h, _: torch.autograd.grad(out.sum(), h),
    "unused": lambda out, h, _: torch.autograd.grad(out.sum(), h, allow_unused=True),
    "beside parameters": lambda out, h, p: torch.autograd.grad(out.sum() + h.sum(), [*p, h], allow_unused=True),
    "an edge": lambda out, h, _: torch.autograd.grad(out.sum(), torch.autograd.graph.get_gradient_edge(h)),
    "by a vmap": lambda out, h, _: torch.autograd.grad(
        out, h, torch.eye(24).view(24, 8, 3), is_grads_batched=True, allow_unused=True
    ),
    "inputs=": lambda out, h, _: torch.autograd.backward(out.sum(), inputs=[h]),
}
"""Ways to ask for the gradient of an output of which another is computed."""


@pytest.mark.parametrize("way", ASKING)
def test_the_gradient_of_an_output_by_another_is_refused(way: str) -> None:
    model = compiled(Features(detaches=False), loss_fn=None)
    out, h = model(X)
    message = raised(lambda: ASKING[way](out, h, list(model.parameters())))
    assert "output 1 of the model would be given a part of its gradient" in message and "What to change" in message


def test_gradients_that_are_whole_are_handed_out_of_several_outputs() -> None:
    plain = Features(detaches=False)
    model = compiled(copy.deepcopy(plain), loss_fn=None)

    def grads(model: Any) -> list[Tensor | None]:
        out, h = model(X)
        weights = list(model.parameters())
        both = torch.autograd.grad(out.sum() + h.square().sum(), weights, retain_graph=True)
        alone = torch.autograd.grad(h.square().sum() + out.detach().sum(), h, retain_graph=True)
        return [*both, *alone, *torch.autograd.grad(h.sum(), out, allow_unused=True)]

    for ours, eager in zip(grads(model), grads(plain), strict=True):
        assert (ours is None) == (eager is None)
        if ours is not None:
            torch.testing.assert_close(getattr(ours, "full_tensor", lambda ours=ours: ours)(), eager)


def test_an_output_of_which_none_is_differentiated_may_be_waited_for() -> None:
    out, h = compiled(Features(detaches=True), loss_fn=None)(X)
    h.retain_grad()
    (out.sum() + h.sum()).backward()
    torch.testing.assert_close(h.grad, torch.ones(8, 4))
