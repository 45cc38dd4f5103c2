"""Capture: what the graph says about a model, and what it says when there can be no graph."""

from __future__ import annotations

import copy
import cProfile
import inspect
import logging
import math
import random
import re
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils import _pytree as pytree

import autoparallel
from autoparallel.capture import capture as capture_module
from autoparallel.capture.capture import capture
from autoparallel.capture.settings import CaptureSettings
from autoparallel.graph.calls import closed
from autoparallel.graph.captured import Captured, describe_inputs
from autoparallel.graph.errors import CaptureError
from autoparallel.graph.sizes import Sizes
from tests import captures
from tests.distributed import run_distributed
from tests.models import build
from tests.runtime.support import mesh_of


def captured(
    model: nn.Module,
    *args: Any,
    loss_fn: Any = None,
    fixed: bool = False,
    training: bool | None = None,
    **kwargs: Any,
) -> Captured:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    specs, rows = describe_inputs(leaves)
    forms = closed(specs, batch=False) if fixed else specs
    return capture(model, forms, spec, CaptureSettings(8, rows, loss_fn=loss_fn, training=training))


def refusal(model: nn.Module, *args: Any, **options: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(model, *args, **options)
    return str(caught.value)


def line_of(function: Any, text: str) -> int:
    """The number of the line of ``function`` that has ``text`` in it."""
    lines, first = inspect.getsourcelines(function)
    return next(first + i for i, line in enumerate(lines) if text in line)


# ------------------------------------------------------------------------------------------- what cannot be captured


class _Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line
            return torch.nn.functional.dropout(x)  # of one way alone
        return -x


class _Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * math.gamma(x.abs().max().item())  # the line


class _Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x[0, 0])):  # the line
            x = x * 2
        return x


class _Generator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(8, generator=torch.Generator())  # the line


class _Seeds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)  # the line
        return x + torch.rand(8)


class _Forks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            x = x + torch.rand(8)  # which comes again after the fork
        return x + torch.rand(8)


class _Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)  # the line


class _FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(8, 2, 4) if x.shape[0] == 8 else x.reshape(-1)[:64].view(8, 2, 4)


class _ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(self.scale)  # the line
        return x + 1


class _ChangesPart(_ChangesInput):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = self.scale  # the line
        return x + 1


class _ChangesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        with torch.no_grad():
            self.scale.mul_(0.9)  # the line
        return scaled


class _Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(3, 3)  # the line


class _Clusters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.AdaptiveLogSoftmaxWithLoss(8, 8, [2, 4])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x, x.argmax(-1)).loss  # the line


class _FlexOfModule(nn.Module):
    """The function reads the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 3

    def forward(self, x: Tensor) -> Tensor:
        q = x.expand(1, 1, 8, 8)
        return flex_attention(q, q, q, score_mod=lambda s, *at: s.where(at[2] - at[3] < self.window, -1.0))  # the line


class _Masked(nn.Module):
    """The mask is made outside."""

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q = x.expand(1, 1, 8, 8)
        return flex_attention(q, q, q, block_mask=mask)


class _Outer(nn.Module):
    """The line is in a submodule."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 1)


REFUSED = {
    "branch on a value": (_Branch, r"a way that depends on a tensor's values", r"torch.where\(.*torch.cond\("),
    "adaptive softmax": (_Clusters, r"values, inside of AdaptiveLogSoftmaxWithLoss", "F.cross_entropy"),
    "item": (_Item, r"tensor's value is read into Python|on a tensor's values", "keep it a tensor"),
    "loop over a value": (_Loop, r"depends on a tensor's values|read into Python", "pass it in|keep it a tensor"),
    "a generator": (_Generator, r"draws from a torch.Generator of its own", "leave out generator="),
    "a seed": (_Seeds, r"sets torch's generator \(torch.manual_seed\)", "keep them in a buffer"),
    "numpy": (_Numpy, r"cannot be captured", "What to change"),
    "changes its input": (_ChangesInput, r"changes its input x in place", r"x\.clone\(\).* by a module around it"),
    "changes a part of its input": (_ChangesPart, r"changes its input x in place", r"x\.clone\(\)"),
    "changes a parameter": (_ChangesParameter, "a parameter is changed in place behind", "before it is read"),
    "flex attention of a module": (_FlexOfModule, "FlexAttention scores or masks reads a _FlexOfM", "window = self"),
    "an error of the model's own": (_Breaks, r"cannot be captured", "What to change|mat"),
}


CASES = [(name, "at the top") for name in REFUSED]
CASES += [(name, "in a submodule") for name in REFUSED if "its input" not in name]  # which is none of the model's


@pytest.mark.wide_where(lambda name, where: where == "in a submodule" and name not in list(REFUSED)[::4])
@pytest.mark.parametrize(("name", "where"), CASES)
def test_a_refusal_names_the_line_and_says_what_to_change(
    name: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, what, advice = REFUSED[name]
    message = refusal(kind() if where == "at the top" else _Outer(kind()), torch.rand(8, 8) + 1)
    assert "def forward" not in capsys.readouterr().err  # as torch prints all that it has traced
    assert re.search(what, message), message
    assert re.search(advice, message), message
    assert f'test_capture.py", line {line_of(kind.forward, "# the line")}' in message, message


@pytest.mark.parametrize(("rows", "attempts"), [(8, 1), (4, 2)])
def test_what_fails_anyhow_is_not_tried_with_a_fixed_batch(
    rows: int, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it was traced with more rows than it has, as a batch that is smaller than twice the mesh is."""
    made: list[str] = []
    attempt = capture_module.Attempt
    monkeypatch.setattr(
        capture_module, "Attempt", lambda *args, **options: made.append("") or attempt(*args, **options)
    )
    assert f"got [{rows}, 8]" in refusal(_Breaks(), torch.rand(rows, 8))
    assert len(made) == attempts


class _AsksAndFixes(nn.Module):
    """A table by sizes, as transformers keep of position embeddings, takes no size that is open."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 2 if torch.compiler.is_compiling() else 1
        rows = x.shape[0]
        return x * scale / {rows: rows}[rows]


def test_a_model_that_asks_whether_it_is_compiled_may_fix_its_batch() -> None:
    assert [str(node.args[1]) for node in captured(_AsksAndFixes(), torch.rand(8, 4)).graph.nodes if node.args[1:]] == [
        "1", "8"
    ]  # fmt: skip


def test_a_fork_of_the_generator_is_refused() -> None:
    assert "sets torch's generator (torch.set_rng_state)" in refusal(_Forks(), torch.rand(8, 8))


def test_a_thread_that_draws_while_a_model_is_captured_is_named() -> None:
    ends = threading.Event()

    def draw() -> None:
        while not ends.is_set():
            random.random()

    thread = threading.Thread(target=draw, name="loads data", daemon=True)
    thread.start()
    try:
        with pytest.raises(CaptureError, match=r"loads data.*another thread.*start it after the first call"):
            captured(nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)]), torch.randn(8, 4))
    finally:
        ends.set()
        thread.join()


def test_a_buffer_that_requires_a_gradient_is_refused_on_several_ranks() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4, requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    captures.captured(Scaled(), torch.randn(8, 4))
    with pytest.raises(CaptureError, match=r"scale, which is no parameter.*return self\.linear(?s:.*)nn\.Parameter"):
        captures.captured(Scaled(), torch.randn(8, 4), options={"ranks": 2})


def test_what_the_model_has_compiled_runs_as_it_was_written() -> None:
    sine = torch.compile(torch.sin)

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return sine(super().forward(x))

    captured = captures.captured(Model(4, 4), torch.randn(8, 4))
    assert torch.ops.aten.sin.default in [node.target for node in captured.graph.nodes]


@pytest.mark.wide
def test_a_mask_of_flex_attention_that_is_passed_in_is_refused() -> None:
    mask = create_block_mask(lambda row, head, query, key: query >= key, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    message = refusal(_Masked(), torch.rand(8, 8), mask)
    assert "a BlockMask is passed in" in message and "inside of the model" in message


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    message = refusal(nn.Linear(4, 4), torch.rand(8, 4), torch.rand(8, 4), loss_fn=_LearnedLoss())
    assert "weight" in message and "move it into the model" in message, message


class _LearnedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x - y) ** 2 * self.weight).mean()


def test_capture_leaves_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    captured(model, torch.rand(8, 4), training=True)
    assert not model.training and not model[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --------------------------------------------------------------------------------------------- what the graph says


def test_the_batch_is_symbolic_and_nothing_else() -> None:
    result = captured(nn.Linear(4, 6), torch.rand(3, 5, 4))
    shape = result.placeholders[result.inputs[0]].meta["val"].shape
    assert isinstance(shape[0], torch.SymInt) and shape[1:] == (5, 4)
    assert list(result.actual.values()) == [3]
    assert Sizes(result.actual).shape(result.results[0]) == (3, 5, 6)
    assert result.results[0].meta["val"].shape[1:] == (5, 6)


def test_a_batch_of_one_is_traced_like_any_other() -> None:
    result = captured(nn.Linear(4, 6), torch.rand(1, 4))
    (node,) = (n for n in result.graph.nodes if n.op == "placeholder" and n.name == result.inputs[0])
    assert isinstance(node.meta["val"].shape[0], torch.SymInt)
    assert list(result.actual.values()) == [1]


def test_a_fixed_batch_is_traced_as_a_number() -> None:
    result = captured(nn.Linear(4, 6), torch.rand(16, 4), fixed=True)
    assert not result.actual


def test_a_tied_weight_has_one_placeholder() -> None:
    case = build("gpt")
    args, _ = case.make_batch(0, 8)
    result = captured(case.model, *args, loss_fn=case.loss_fn)
    names = list(result.parameters.values())
    assert len(names) == len(set(names)) == len(dict(case.model.named_parameters()))
    (tied,) = (node for node, name in result.parameters.items() if name == "tok.weight")
    (node,) = (n for n in result.graph.nodes if n.name == tied)
    assert len(node.users) >= 2, "the embedding and the head both read it"


def test_changed_buffers_come_first_among_the_outputs() -> None:
    result = captured(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.rand(8, 4))
    assert sorted(result.mutated) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert result.outputs == [3]
    assert not captured(nn.Sequential(nn.BatchNorm1d(4)), torch.rand(8, 4), training=False).mutated


class _Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float, flag: bool = True) -> dict[str, Any]:
        y = self.lin(x) * scale
        return {"loss": y.mean(), "logits": y, "count": 3, "nested": (y + 1, None)}


def test_outputs_keep_their_form_and_their_constants() -> None:
    result = captured(_Dictionary(), torch.rand(8, 4), scale=2.0)
    values: list[Any] = ["constant" if not isinstance(o, int) else o for o in result.outputs]
    out = pytree.tree_unflatten(values, result.output_spec)
    assert out["count"] == "constant" and out["nested"][1] in ("constant", None)
    assert result.loss == out["loss"] and result.flowing == [out["loss"]]
    assert set(result.detached) == {out["logits"], out["nested"][0]}
    results = result.graph.output_node().args[0]
    assert "detach" in str(results[out["logits"]].target), "beside a loss, other outputs are detached"


def test_a_scalar_that_nothing_calls_the_loss_leaves_the_others_as_they_are() -> None:
    class Pair(_Dictionary):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            out = super().forward(x, scale=1.0)
            return out["logits"], out["loss"]

    result = captured(Pair(), torch.rand(8, 4))
    assert (result.loss, result.objective, result.flowing, result.detached) == (None, 1, [0, 1], [])
    assert result.weight.kind == "mean", "where microbatches are put together it is the loss"


def test_of_two_scalars_nobody_knows_which_is_the_loss() -> None:
    class Pair(_Dictionary):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            out = super().forward(x, scale=1.0)
            return out["logits"].square().mean(), out["loss"]

    result = captured(Pair(), torch.rand(8, 4))
    assert (result.loss, result.objective, result.flowing) == (None, None, [0, 1])
    assert result.weight.kind == "unknown" and "none of them is called 'loss'" in result.weight.reason


def test_keys_name_module_operator_and_occurrence() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    keys = {n.meta["key"] for n in captured(model, torch.rand(8, 4)).graph.nodes if n.op == "call_function"}
    assert {"0/aten.linear#0", "1/aten.relu#0", "2/aten.linear#0"} <= keys, keys


def test_a_shared_module_called_twice_has_two_keys() -> None:
    linear = nn.Linear(4, 4)
    nodes = captured(nn.Sequential(linear, nn.ReLU(), linear), torch.rand(8, 4)).graph.nodes
    keys = [n.meta["key"] for n in nodes if n.op == "call_function"]
    assert len(keys) == len(set(keys)), keys


@pytest.mark.wide
def test_the_same_model_gives_the_same_graph() -> None:
    from autoparallel.graph.fingerprint import fingerprint

    first, second = (captured(build("gpt").model, build("gpt").make_batch(0, 8)[0][0]) for _ in range(2))
    assert fingerprint(first) == fingerprint(second)
    assert str(first.graph) == str(second.graph)
    other = captured(build("gpt").model, build("gpt").make_batch(0, 16)[0][0])
    assert fingerprint(other) == fingerprint(first), "the batch size is open"


@pytest.mark.wide
def test_a_profiler_sees_the_same_graph_and_goes_on() -> None:
    case = build("gpt")
    (tokens, _), _ = case.make_batch(0, 8)
    expected = captured(case.model, tokens).graph.python_code("self").src
    profiler = cProfile.Profile()
    with profiler:
        found = captured(case.model, tokens)
        _seen()
    assert found.graph.python_code("self").src == expected
    assert any(entry.code is _seen.__code__ for entry in profiler.getstats())


def _seen() -> None:
    """Called under the profiler."""


def test_frozen_parameters_take_no_part_in_the_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    result = captured(model, torch.rand(8, 4))
    flows = {result.parameters.get(n.name): n.meta["backward"] for n in result.graph.nodes if n.op == "placeholder"}
    assert flows["1.weight"] and not flows["0.weight"]


@pytest.mark.wide
def test_experts_in_a_python_loop_are_told_apart() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    options: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    options |= {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_local_experts": 2}
    model: Any = MixtralForCausalLM(MixtralConfig(**options, experts_implementation="eager"))
    message = refusal(model, torch.zeros(8, 8, dtype=torch.int64))
    assert "modeling_mixtral.py" in message
    assert "Python loops over the experts one by one" in message
    assert "experts_implementation='grouped_mm'" in message


# ---------------------------------------------------------------------------------------------------------- warnings


class _Warns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("the scale is a guess", UserWarning, stacklevel=1)  # the line
        return 2 * x


@pytest.mark.wide
def test_the_models_own_warnings_are_given_once_and_torchs_are_not() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured(_Warns(), torch.rand(8, 4))
    assert [(str(w.message), w.lineno) for w in caught] == [("the scale is a guess", line_of(_Warns, "the line"))]


def test_a_warning_that_the_user_has_made_an_error_is_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="the scale is a guess"):
            captured(_Warns(), torch.rand(8, 4))


class _Shows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("rows", len(x))
        logging.getLogger("of the user").warning("rows %d", len(x))
        if not self.training:
            print("in evaluation")
        return x.exp()


def test_what_forward_prints_and_logs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    captured(_Shows(), torch.rand(8, 4))
    texts = [record.getMessage() for record in caplog.records if record.name == "autoparallel"]
    lines = [line_of(_Shows, 'print("rows"'), line_of(_Shows, "logging")]
    assert [f"line {line}, in forward" in text for text, line in zip(texts, lines, strict=True)] == [True, True]


def test_what_cannot_be_captured_is_said_once_and_not_in_torchs_log(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(autoparallel.CaptureError, match=r"same reduction dim, but got \[4, 7\] X \[8, 2\]"):
        autoparallel.compile(nn.Linear(8, 2))(torch.randn(4, 7))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


class _Shares(nn.Module):
    """Reads one buffer after it has changed the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("read", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.mean(0))
        return self.linear(x) + self.read


def _share_after_a_call() -> list[float]:
    off = []
    for called in (False, True):
        model, x = _Shares().double(), torch.rand(4, 4, dtype=torch.float64)
        plain = copy.deepcopy(model)
        compiled = autoparallel.compile(model, mesh_of(1), plan="fsdp")
        if called:
            compiled(x), plain(x)
        compiled.read, plain.read = compiled.total, plain.total
        off += [float((compiled(x) - plain(x)).abs().max()) for _ in range(2)]
        off.append(float((compiled.read - plain.read).abs().max()))
    return off


def test_two_buffers_that_are_made_one_are_not_taken_for_two() -> None:
    assert max(run_distributed(_share_after_a_call, world_size=1)[0]) < 1e-12
