"""Full parameters for a while, direct calls, copies of a model, averages of its weights, and pickle."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.func import functional_call
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.runtime.support import make, off, placements, raised, run_on_ranks


class Generator(nn.Module):
    """A tied embedding, an odd width, and methods that call the model itself and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.up = nn.Linear(8, 7)
        self.down = nn.Linear(7, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.head(self.down(torch.tanh(self.up(self.embedding(tokens)))))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int = 3) -> Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens

    def score(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def stream(self, hidden: Tensor) -> Iterator[Tensor]:
        try:
            for _ in range(3):
                hidden = hidden + (yield self.down(self.up(hidden)))
            return self.head(hidden)
        finally:
            self.closed = True


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def tokens_of(step: int = 0) -> Tensor:
    return torch.randint(0, 16, (8, 5), generator=torch.Generator().manual_seed(step))


MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "one rank": ((1,), ("dp",)),
    "two ranks": ((2,), ("dp",)),
    "two axes": ((2, 2), ("dp", "tp")),
    "a pipeline": ((2, 2), ("pp", "dp")),
}
SIZES = {name: torch.Size(shape).numel() for name, (shape, _) in MESHES.items()}


@functools.cache
def mesh_called(name: str) -> DeviceMesh:
    shape, axes = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=axes)


def pair(mesh: str, **options: Any) -> tuple[Any, Any]:
    """A compiled model and a plain one of the same weights."""
    import autoparallel

    model = make(Generator)
    plain = copy.deepcopy(model)
    pipeline = autoparallel.Pipeline("1f1b", 2) if mesh == "a pipeline" else None
    options = {"plan": "fsdp", "loss_fn": loss_of, "pipeline": pipeline, **options}
    return autoparallel.compile(model, mesh_called(mesh), **options), plain


def step(model: Any, plain: Any, optimizers: Any, number: int) -> float:
    """One step of both; how far their losses and norms are apart."""
    tokens = tokens_of(number)
    mine, theirs = model(tokens, tokens), loss_of(plain(tokens), tokens)
    mine.backward(), theirs.backward()
    norms = model.grad_norm(), torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    worst = max(off(mine, theirs), off(*norms))
    for optimizer in optimizers:
        optimizer.step(), optimizer.zero_grad()
    return worst


def weights_off(model: Any, plain: nn.Module) -> float:
    """How far the weights of two models are apart; those of other stages are gathered, too."""
    full = dict(model.full_parameters())
    return max(off(full[name], parameter) for name, parameter in plain.named_parameters())


def adam(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]


def _whole(mesh: str) -> dict[str, Any]:
    model, plain = pair(mesh, methods=("generate",))
    results: dict[str, Any] = {}
    with model.whole() as inner:  # before anything is planned
        results["before the plan"] = off(inner.up.weight, plain.up.weight)
    optimizers = adam(model, plain)
    results["a step"] = step(model, plain, optimizers, 0)
    results["lies"] = set(placements(model).values())
    stream = dict(model.full_parameters())
    results["stream"] = max(off(stream[name], p) for name, p in plain.named_parameters())
    results["names"] = list(stream) == [name for name, _ in plain.named_parameters()]
    results["plain tensors"] = all(type(t) is Tensor and not t.requires_grad for t in stream.values())
    prompt, hidden = tokens_of(9)[:3, :2], torch.ones(2, 8, dtype=torch.float64)
    results["generated"] = float(not torch.equal(model.generate(prompt, count=4), plain.generate(prompt, count=4)))
    results["buffer"] = off(model.seen, plain.seen)
    with model.whole() as inner, torch.no_grad(), model.whole() as again:
        results["one for both"] = inner is again
        results["method"] = off(inner.score(hidden), plain.score(hidden))
        results["submodule"] = off(model.head(hidden), plain.head(hidden))
        doubled = [{name: 2 * p.detach() for name, p in m.named_parameters()} for m in (inner, plain)]
        calls = [functional_call(m, p, (prompt,)) for m, p in zip((inner, plain), doubled, strict=True)]
        results["functional call"] = off(*calls)
        results["called inside"] = raised(lambda: model(tokens_of()))
        inner.up.weight.mul_(2), inner.embedding.weight.data.add_(1)
        inner.down.bias.fill_(3)
    with torch.no_grad():
        plain.up.weight.mul_(2), plain.embedding.weight.add_(1), plain.down.bias.fill_(3)
    results["written"] = weights_off(model, plain)
    results["a step after"] = step(model, plain, optimizers, 1)
    results["parameters after"] = weights_off(model, plain)
    lay = placements(model)
    results["submodule outside"] = raised(lambda: model.head(hidden))
    results["method outside"] = raised(lambda: model.score(hidden))

    def replace() -> None:
        with model.whole() as inner:
            inner.up.weight = nn.Parameter(torch.zeros(7, 8, dtype=torch.float64))

    def convert() -> None:
        with model.whole() as inner:
            inner.float()

    def step_inside() -> None:
        optimizers[0].zero_grad()
        with model.whole():
            optimizers[0].step()

    results["replaced"], results["converted"] = raised(replace), raised(convert)
    results["stepped"] = raised(step_inside)
    results["as before"] = float(placements(model) != lay) + weights_off(model, plain)
    return results


@pytest.mark.wide_where(lambda mesh: mesh != "two ranks")
@pytest.mark.parametrize("mesh", MESHES)
def test_full_parameters_for_a_while(mesh: str) -> None:
    for results in run_on_ranks(_whole, mesh, world_size=SIZES[mesh]):
        assert mesh == "one rank" or "S0" in str(results["lies"]), "nothing was gathered"
        assert results["names"] and results["plain tensors"] and results["one for both"]
        numbers = {k: v for k, v in results.items() if isinstance(v, float)}
        assert len(numbers) >= 10 and all(v < 1e-9 for v in numbers.values()), numbers
        assert "inside of whole()" in results["called inside"]
        for where in ("submodule outside", "method outside"):
            assert "Linear is called directly" in results[where] and "model.whole()" in results[where]
        assert "up.weight was replaced" in results["replaced"] and "was replaced" in results["converted"]
        assert "an optimizer has made a step" in results["stepped"]


def raised_end(stream: Any, value: Tensor) -> Any:
    """What a generator returns that is over when it is sent a value."""
    try:
        stream.send(value)
    except StopIteration as end:
        return end.value


def _methods_results() -> dict[str, Any]:
    model, plain = pair("two ranks", methods=("generate", "score", "stream"))
    tokens, hidden = tokens_of(), torch.ones(2, 8, dtype=torch.float64)
    optimizers = adam(model, plain)
    results: dict[str, Any] = {"a step": step(model, plain, optimizers, 0)}
    streams = model.stream(hidden), plain.stream(hidden)
    results["streamed"] = [off(*map(next, streams))]  # type: ignore[arg-type]
    step(model, plain, optimizers, 1)  # the next values are those of trained parameters
    for _ in range(2):
        results["streamed"].append(off(*(stream.send(hidden) for stream in streams)))  # type: ignore[attr-defined]
    results["lies between"] = placements(model)
    ends = [raised_end(stream, hidden) for stream in streams]
    results["streamed"].append(off(*ends))
    unfinished = model.stream(hidden)
    next(unfinished)
    del model.closed
    if torch.distributed.get_rank() == 0:  # as a garbage collection may, on one rank
        unfinished.close()
        results["closed"] = model.closed
    scores = model.score(hidden)
    results["scores"] = off(scores, plain.score(hidden))
    results["requires grad"] = scores.requires_grad, model.generate(tokens).requires_grad
    results["with the loss"] = raised(lambda: (model(tokens, tokens) + scores.mean()).backward())
    with torch.no_grad():
        results["requires grad then"] = model.score(hidden).requires_grad
    model.requires_grad_(False)
    results["requires grad frozen"] = model.score(hidden).requires_grad
    return results


def test_what_a_method_returns_is_not_differentiated_in_silence() -> None:
    for results in run_on_ranks(_methods_results, world_size=2):
        assert results["a step"] < 1e-9 and results["scores"] < 1e-9
        assert len(results["streamed"]) == 4 and max(results["streamed"]) < 1e-9, results["streamed"]
        assert "S0" in str(results["lies between"]) and results.get("closed", True)
        assert results["requires grad"] == (True, False)
        assert "the method score returns is differentiated" in results["with the loss"]
        assert not results["requires grad then"] and not results["requires grad frozen"]


def _copies(mesh: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for when in ("before the plan", "after it"):
        model, plain = pair(mesh)
        if when == "after it":
            model.prepare(tokens_of(), tokens_of())
        average = get_ema_multi_avg_fn(0.9)
        mine, theirs = (AveragedModel(m, multi_avg_fn=average, use_buffers=False) for m in (model, plain))
        optimizers = adam(model, plain)
        for number in range(3):
            results[f"{when}: step {number}"] = step(model, plain, optimizers, number)
            mine.update_parameters(model), theirs.update_parameters(plain)
        results[f"{when}: average"] = weights_off(mine.module, theirs.module)
        results[f"{when}: apart"] = float(weights_off(mine.module, plain) < 1e-4)  # not vacuous
        results[f"{when}: lies"] = float(placements(mine.module) != placements(model))
        mine.eval(), theirs.eval()
        results[f"{when}: in evaluation"] = off(mine(tokens_of(7)), theirs(tokens_of(7)))
        results[f"{when}: the model"] = weights_off(model, plain)
    twin, plain_twin = copy.deepcopy(model), copy.deepcopy(plain)
    results["gradient"] = float(any(p.grad is not None for p in twin.parameters()))
    results["copy's step"] = step(twin, plain_twin, adam(twin, plain_twin), 5)
    results["copy's parameters"], results["kept"] = weights_off(twin, plain_twin), weights_off(model, plain)
    gone = weakref.ref(twin)
    del twin, plain_twin
    gc.collect()
    results["collected"] = float(gone() is not None)
    results["pickle"] = raised(lambda: pickle.dumps(model))
    results["copy"] = raised(lambda: copy.copy(model))
    return results


@pytest.mark.wide_where(lambda mesh: mesh != "two ranks")
@pytest.mark.parametrize("mesh", MESHES)
def test_copies_and_averages_of_weights(mesh: str) -> None:
    for results in run_on_ranks(_copies, mesh, world_size=SIZES[mesh]):
        numbers = {k: v for k, v in results.items() if isinstance(v, float)}
        assert len(numbers) == 21 and all(v < 1e-9 for v in numbers.values()), numbers
        assert "model.save(path)" in results["pickle"] and "copy.deepcopy(model)" in results["copy"]


def _refused() -> list[str]:
    import autoparallel

    with torch.device("meta"):
        meta = Generator()
    model = autoparallel.compile(meta, mesh_called("one rank"), loss_fn=loss_of)
    found = [raised(lambda: copy.deepcopy(model)), raised(lambda: list(model.full_parameters()))]
    for methods in ("generate", ("generatr",), ("parameters",)):
        found.append(raised(functools.partial(pair, "one rank", methods=methods)))
    found.append(raised(functools.partial(pair, "one rank", forward_methods=("generatr",))))
    return found


def test_what_is_refused() -> None:
    (found,) = run_on_ranks(_refused, world_size=1)
    for text in found[:2]:
        assert "embedding.weight is on the meta device" in text and "example_inputs" in text
    assert found[2].startswith("TypeError: methods must be names of methods")
    assert "methods names 'generatr'" in found[3] and "'parameters', which every compiled model has" in found[4]
    assert "forward_methods names 'generatr'" in found[5]


def _pruned() -> dict[str, Any]:
    import autoparallel

    compiled, plain = pair("two ranks", plan="fsdp")
    words = []
    for change in (lambda m: prune.l1_unstructured(m.up, "weight", amount=0.3), lambda m: prune.remove(m.up, "weight")):
        compiled(tokens_of(), tokens_of()).backward()
        loss_of(plain(tokens_of()), tokens_of()).backward()
        with compiled.whole() as whole:
            new = copy.deepcopy(whole)
        change(compiled)
        words.append(raised(lambda model=compiled: model(tokens_of(), tokens_of())))
        change(new), change(plain)
        compiled = autoparallel.compile(new, mesh_called("two ranks"), plan="fsdp", loss_fn=loss_of)
    loss, expected = compiled(tokens_of(1), tokens_of(1)), loss_of(plain(tokens_of(1)), tokens_of(1))
    plain.zero_grad(), loss.backward(), expected.backward()
    gradients = [off(p.grad, q.grad) for p, q in zip(compiled.parameters(), plain.parameters(), strict=True)]
    return {"words": words, "loss": off(loss, expected), "gradients": max(gradients)}


def _copied_and_saved() -> list[list[bool]]:
    import autoparallel

    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain[1].weight.requires_grad_(False)
    model, file = autoparallel.compile(plain, mesh_called("two ranks"), plan="fsdp"), io.BytesIO()
    with model.whole() as whole:
        torch.save(whole, file)
        models = [whole, copy.deepcopy(whole), torch.load(io.BytesIO(file.getvalue()), weights_only=False)]
        return [[p.requires_grad for p in m.parameters()] for m in models]


def test_copies_of_full_parameters_are_trained_where_the_models_are() -> None:
    for results in run_on_ranks(_copied_and_saved, world_size=2):
        assert results == [[False] * 4, [True, True, False, True], [True, True, False, True]]


@pytest.mark.wide
def test_pruning_goes_on_as_the_refusal_says() -> None:
    for results in run_on_ranks(_pruned, world_size=2):
        assert all("new = copy.deepcopy(plain)" in text for text in results["words"])
        assert max(results["loss"], results["gradients"]) < 1e-12, results
