"""Outputs beside a loss, and without one: each can be differentiated as in eager, or says that it cannot."""

from __future__ import annotations

import copy
import itertools
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoparallel
from autoparallel.graph.nesting import flatten, unflatten
from tests.distributed import run_distributed
from tests.graph.eager import TOLERANCE, Program, difference, rows
from tests.runtime.support import batch, compiled_pair, gradients_off, mesh_of, off, raised

Named = namedtuple("Named", "loss logits")
REFUSED = "is not the loss and was detached"


def auxiliary(m: Any, x: Tensor) -> Any:
    return x @ m.w, m.b.square().mean()


def contrastive(m: Any, x: Tensor) -> Any:
    return x[:, 0] @ m.w, x[:, 1] @ m.w.T, m.b.sum().exp()


def with_loss(m: Any, x: Tensor) -> dict[str, Any]:
    return {"loss": (x @ m.w).square().mean(), "logits": x @ m.w + m.b}


def _one_after_the_other(out: Any) -> Tensor:
    out[0].sum().backward()
    return out[1]


def _sharing_what_is_saved(out: Any) -> Tensor:
    out[0].sum().backward(retain_graph=True)
    return out[1]


# The forward and what is differentiated; without a known loss every output can be.
OPEN: dict[str, tuple[Any, Any]] = {
    "logits and an auxiliary loss": (auxiliary, lambda o: o[0].sin().mean() + 0.1 * o[1]),
    "the logits alone": (auxiliary, lambda o: o[0].sin().mean()),
    "the auxiliary loss alone": (auxiliary, lambda o: o[1]),
    "two embeddings and a scale": (contrastive, lambda o: (o[0] @ o[1].T * o[2]).logsumexp(1).mean()),
    "two losses": (lambda m, x: ((x @ m.w).square().mean(), m.b.mean()), lambda o: o[0] + o[1]),
    "a parameter": (lambda m, x: (x @ m.w, m.b), lambda o: o[0].sum() + o[1].square().sum()),
    "a parameter alone": (lambda m, x: (x @ m.w, m.b), lambda o: o[1].square().sum()),
    "one tensor twice": (lambda m, x: (lambda h: (h, h))(x @ m.w + m.b), lambda o: (o[0] * o[1].sin()).sum()),
    "an input": (lambda m, x: (x, x @ m.w + m.b), lambda o: (o[0] * o[1]).sum()),
    "what has no gradient": (
        lambda m, x: ((x @ m.w).argmax(-1), None, 3, x @ m.w + m.b, "s"),
        lambda o: o[3].sum() + o[2] + (o[1] is None),
    ),
    "one after the other": (auxiliary, _one_after_the_other),
    "one after the other, retained": (
        lambda m, x: (lambda h: (h.exp(), h.square().mean() + m.b.sum()))(x @ m.w),
        _sharing_what_is_saved,
    ),
    "divided in place": (lambda m, x: (x @ m.w).mean() + m.b.sum(), lambda o: o.div_(4)),
    "a loss by name": (with_loss, lambda o: o["loss"]),
}


@pytest.mark.wide_where(lambda name: name not in list(OPEN)[::3])
@pytest.mark.parametrize("name", OPEN)
def test_outputs_are_differentiated_as_in_eager(name: str) -> None:
    assert difference(*OPEN[name], steps=1) < TOLERANCE


@pytest.mark.parametrize("outputs", ["gather", "sharded"])
def test_asked_for_outputs_beside_a_known_loss_are_differentiated(outputs: str) -> None:
    def loss_of(out: Any) -> Tensor:
        logits = out["logits"].full_tensor() if hasattr(out["logits"], "full_tensor") else out["logits"]
        return out["loss"] + logits.exp().mean()

    assert difference(with_loss, loss_of, steps=1, outputs=outputs) < TOLERANCE


def _refusal(forward: Any, loss_of: Any) -> str:
    plain = Program(forward)
    loss_of(plain(rows())).backward()  # eager can
    model = autoparallel.compile(Program(forward))
    text = raised(lambda: loss_of(model(rows())).backward())
    parameters = [*model.parameters()]
    for allow_unused in (False, True):  # neither torch's words nor nothing, of which a script would make zeros
        assert text == raised(
            lambda unused=allow_unused: torch.autograd.grad(loss_of(model(rows())), parameters, allow_unused=unused)
        )
    assert all(p.grad is None for p in model.parameters()), "nothing was computed"
    model(rows())["loss" if isinstance(plain(rows()), dict) else 0].backward()  # and the loss still can
    return text


def test_beside_a_known_loss_differentiating_is_refused_with_the_cure() -> None:
    texts = [
        _refusal(with_loss, lambda o: o["loss"] + o["logits"].sum()),
        _refusal(with_loss, lambda o: o["logits"].sum()),
        _refusal(lambda m, x: Named((x @ m.w).mean(), x @ m.w + m.b), lambda o: o.logits.sum()),
    ]
    for text in texts:
        assert REFUSED in text and 'outputs="gather"' in text and "output 1" in text, text


def test_what_is_refused_needs_a_gradient_like_the_plain_models() -> None:
    model = autoparallel.compile(Program(with_loss))
    out = model(rows())
    assert out["logits"].requires_grad and raised(out["logits"].numpy)
    assert off(out["logits"].detach(), Program(with_loss)(rows())["logits"].detach()) < TOLERANCE
    with torch.no_grad():
        assert not model(rows())["logits"].requires_grad


LOSSES: dict[str, tuple[Any, Any, str]] = {
    "a loss and another scalar": (lambda o, y: (F.mse_loss(o, y), o.mean()), 0, "output 1"),
    "the key": (lambda o, y: {"accuracy": o.mean(), "loss": F.mse_loss(o, y)}, "loss", "output 0"),
    "after a constant": (lambda o, y: ((o > y).double().mean(), F.mse_loss(o, y), o), 1, "output 2"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_loss_fn_returns_beside_the_loss(name: str) -> None:
    loss_fn, key, refused = LOSSES[name]
    model, plain = _linears(loss_fn)
    x, y = rows(), rows(seed=2)
    a, b = model(x, y), loss_fn(plain(x), y)
    a[key].backward(), b[key].backward()
    assert gradients_off(model, plain) < TOLERANCE
    number = int(refused.rpartition(" ")[2])
    text = raised(lambda: (list(model(x, y).values()) if isinstance(a, dict) else model(x, y))[number].sum().backward())
    assert refused in text and REFUSED in text


def _linears(loss_fn: Any, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Linear(8, 8, dtype=torch.float64)
    return autoparallel.compile(copy.deepcopy(plain), loss_fn=loss_fn, **options), plain


def test_a_loss_per_row_leaves_every_output_open() -> None:
    def loss_fn(out: Tensor, y: Tensor) -> Any:
        return F.mse_loss(out, y, reduction="none").mean(-1), out

    model, plain = _linears(loss_fn)
    x, y = rows(), rows(seed=2)
    for out in (model(x, y), loss_fn(plain(x), y)):
        (out[0].mean() + out[1].exp().sum()).backward()
    assert gradients_off(model, plain) < TOLERANCE


def test_in_eval_mode_outputs_are_differentiated_too() -> None:
    plain = Program(auxiliary).eval()
    model = autoparallel.compile(copy.deepcopy(plain))
    for m in (model, plain):
        logits, other = m(rows())
        (logits.sin().sum() * other).backward()
    assert gradients_off(model, plain) < TOLERANCE


def _accumulate(model: Any, batches: Any, objective: Any, **options: Any) -> None:
    for window in model.accumulate(len(batches), batches, **options):
        for inputs in window:
            objective(model(*inputs) if isinstance(inputs, tuple) else model(inputs)).backward()


class _Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(x[:, 0])
        return logits, F.cross_entropy(logits, y)


class TestWindows:
    """``accumulate()`` weighs a microbatch by what its loss is a mean over."""

    def test_it_asks_which_scalar_is_the_loss(self) -> None:
        model = autoparallel.compile(Program(lambda m, x: ((x @ m.w).square().mean(), m.b.mean())))
        text = raised(lambda: _accumulate(model, [rows(), rows()], lambda out: out[1]))
        assert "returns 2 scalars that can be differentiated" in text and 'weights="equal"' in text

    @pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=str)
    def test_the_only_scalar_is_the_loss(self, options: Any) -> None:
        """``logits, loss = model(x, y)``; with as many valid targets in each microbatch it would not show."""
        plain = _Logits()
        model = autoparallel.compile(copy.deepcopy(plain), **options)
        batches = [(rows(4), torch.tensor([1, 2, -100, -100])), (rows(4, seed=2), torch.tensor([0, 1, 2, 3]))]
        _accumulate(model, batches, lambda out: out[1])
        plain(*(torch.cat(parts) for parts in zip(*batches, strict=True)))[1].backward()
        assert gradients_off(model, plain) < TOLERANCE

    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("weights", ["loss", "equal"])
    def test_what_else_is_differentiated_is_weighed_by_nothing(self, named: bool, weights: str) -> None:
        """A term of the loop's own, of an output, has no weight that anybody knows."""
        plain = Program(with_loss if named else lambda m, x: tuple(with_loss(m, x).values()))
        model = autoparallel.compile(copy.deepcopy(plain), outputs="gather")
        batches = [rows(4), rows(4, seed=2)]

        def both(out: Any) -> Tensor:
            loss, logits = out.values() if named else out
            return loss + logits.sin().mean()

        if weights == "loss":
            text = raised(lambda: _accumulate(model, batches, both))
            assert "output 1 of the model, which is not taken for its loss, was differentiated in a window" in text
            assert all(p.grad is None for p in model.parameters())
            return
        _accumulate(model, batches, both, weights=weights)
        for x in batches:
            (both(plain(x)) / 2).backward()
        assert gradients_off(model, plain) < TOLERANCE

    def test_a_named_loss_is_weighed_whatever_stands_beside_it(self) -> None:
        plain = Program(lambda m, x: {"loss": (x @ m.w + m.b).square().mean(), "norm": m.w.norm()})
        model = autoparallel.compile(copy.deepcopy(plain))
        batches = [rows(4), rows(2, seed=2)]
        for window in model.accumulate(2, batches):
            for x in window:
                model(x)["loss"].backward()
        plain(torch.cat(batches))["loss"].backward()
        assert gradients_off(model, plain) < TOLERANCE

    def test_outputs_of_one_microbatch_that_are_differentiated_apart_count_once(self) -> None:
        plain = Program(auxiliary)
        model = autoparallel.compile(copy.deepcopy(plain))
        batches = [rows(4), rows(4, seed=2)]
        for window in model.accumulate(2, batches, weights="equal"):
            for x in window:
                logits, other = model(x)
                logits.sin().mean().backward()
                other.backward()
        for x in batches:
            logits, other = plain(x)
            ((logits.sin().mean() + other) / 2).backward()
        assert gradients_off(model, plain) < TOLERANCE


def _on_two_ranks(plan: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("logits and an auxiliary loss", "a parameter alone", "one after the other"):
        results[name] = difference(*OPEN[name], mesh=mesh_of(2), plan=plan)
    model, plain = compiled_pair(_Head, 2, loss_fn=None, plan=plan)
    (x, y) = batch(0)
    a, b = model(x, y), plain(x, y)
    results["logits"] = off(a["logits"].detach(), b["logits"].detach())
    results["refused"] = raised(lambda: a["logits"].sum().backward())
    a["loss"].backward(), b["loss"].backward()
    results["then the loss"] = gradients_off(model, plain)
    return results


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.down(self.up(x).tanh())
        return {"logits": logits, "loss": F.mse_loss(logits, y)}


@pytest.mark.wide
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_two_ranks(plan: str) -> None:
    for results in run_distributed(_on_two_ranks, plan, world_size=2):
        assert REFUSED in results.pop("refused")
        assert len(results) == 5 and all(v < TOLERANCE for v in results.values()), results


class _Tuple(_Head):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return tuple(super().forward(x, y).values())


class _TwoScalars(_Head):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        out = super().forward(x, y)
        return out["logits"].square().mean(), out["loss"]


def _pipelines() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    x, y = batch(0)
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    model = autoparallel.compile(_TwoScalars().double(), mesh)
    results["ambiguous"] = raised(lambda: model(x, y))
    for outputs, cls in itertools.product(("auto", "gather"), (_Head, _Tuple)):
        plain = cls().double()
        model = autoparallel.compile(copy.deepcopy(plain), mesh, outputs=outputs)
        (logits, loss), expected = _both(model(x, y)), _both(plain(x, y))
        if outputs == "gather":
            results["kept"] = off(logits.detach(), expected[0].detach())
            results["refused"] = raised(lambda logits=logits: logits.sum().backward())
            parameters = [*model.parameters()]
            results["handed out"] = raised(
                lambda logits=logits, p=parameters: torch.autograd.grad(logits.sum(), p, allow_unused=True)
            )
        else:
            results["not kept"] = raised(lambda logits=logits: logits.sum())
        loss.backward(), expected[1].backward()
        mine = dict(model.named_parameters())
        held = [(n, p) for n, p in plain.named_parameters() if mine[n].grad is not None]
        results[f"{outputs}, {cls.__name__}: held"] = len(held)
        here = [(mine[n].grad.to_local(), p.grad) for n, p in held]  # type: ignore[union-attr]
        gradients = max(off(a, b) for a, b in here if a.numel() and b is not None)
        results[f"{outputs}, {cls.__name__}: gradients"] = gradients
    return results


def _both(out: Any) -> tuple[Any, Any]:
    logits, loss = out.values() if isinstance(out, dict) else out
    return logits, loss


def test_a_pipeline_knows_its_loss_or_says_so() -> None:
    for results in run_distributed(_pipelines, world_size=2):
        assert "a pipeline must know its loss" in results["ambiguous"] and 'the name "loss"' in results["ambiguous"]
        assert "a pipeline differentiates its loss only" in results["refused"] == results["handed out"]
        assert "output 0 of the model is not kept" in results["not kept"]
        assert results["kept"] < TOLERANCE
        for case in itertools.product(("auto", "gather"), ("_Head", "_Tuple")):
            name = ", ".join(case)
            assert results[f"{name}: held"] and results[f"{name}: gradients"] < TOLERANCE


def test_fields_keep_the_order_in_which_they_were_set() -> None:
    """Of an output of transformers; one that is None is no entry."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast

    output = BaseModelOutputWithPooling(last_hidden_state=torch.ones(1), hidden_states=(torch.ones(2),))
    output.pooler_output = torch.ones(3)
    leaves, spec = flatten({"inner": [output]})
    again = unflatten(leaves, spec)["inner"][0]
    assert list(again) == list(output) == ["last_hidden_state", "hidden_states", "pooler_output"]
    without = unflatten([leaves[0], None, leaves[2]], spec)["inner"][0]
    assert without.pooler_output is leaves[2] and without.hidden_states == (None,)
    past = CausalLMOutputWithPast(logits=torch.ones(1), past_key_values=(torch.ones(2),))
    leaves, spec = pytree.tree_flatten(past, is_leaf=lambda x: isinstance(x, tuple))
    gone = unflatten([leaves[0], None], spec)
    assert list(gone) == ["logits"] and gone.past_key_values is None
