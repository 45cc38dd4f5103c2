"""Every random operator: the traced graph draws what the plain model draws, or the trace is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributions as D
from torch.utils.checkpoint import checkpoint

from autoparallel.graph.errors import CaptureError
from autoparallel.operators import DRAWS, RandomState, UnsupportedRandomness, draw_from, plain_randomness
from tests.passes.support import captured, show

STATE = RandomState(7, 3)


@torch.no_grad()
def _without_gradient(x: Tensor) -> Tensor:
    return torch.randn_like(x)


def _into_a_view(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 0].normal_()
    return x + y


def _empty(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout of everything": lambda x: F.dropout(x, 1.0) + F.dropout(x, 0.5),
    "dropout that is not read": lambda x: (F.dropout(x, 0.3), F.dropout(x, 0.3))[1],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature dropout": lambda x: F.dropout1d(x, 0.3),
    "feature dropout of images": lambda x: F.dropout2d(x[:, None], 0.3),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True),
    "attention that drops everything": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=1.0)
    + F.dropout(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "rand": lambda x: x + torch.rand(x.shape),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape[0], 1, 1, dtype=x.dtype),
    "randn_like of another dtype": lambda x: x + torch.randn_like(x, dtype=torch.float32),
    "new_empty": lambda x: x + x.new_empty(x.shape).normal_(1, 2),
    "bernoulli of a tensor": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "bernoulli of a number": lambda x: x * _empty(x).bernoulli_(0.4),
    "bernoulli_ of a tensor": lambda x: x * _empty(x).bernoulli_(torch.full_like(x, 0.2)),
    "uniform": lambda x: x * _empty(x).uniform_(-1, 1),
    "uniform in float32": lambda x: x + torch.empty(x.shape, dtype=torch.float32).uniform_(),
    "exponential": lambda x: x * _empty(x).exponential_(2.0),
    "geometric": lambda x: x * _empty(x).geometric_(0.3),
    "cauchy": lambda x: x * _empty(x).cauchy_(),
    "log_normal": lambda x: x * _empty(x).log_normal_(0.1, 0.2),
    "random": lambda x: x * _empty(x, torch.int8).random_(),
    "random up to": lambda x: x * _empty(x, torch.int64).random_(5),
    "randint": lambda x: x + torch.randint(2, 5, x.shape),
    "randint_like": lambda x: x + torch.randint_like(x, 5),
    "randint of rows": lambda x: x[torch.randint(0, x.shape[0], (5,))],
    "normal of tensors": lambda x: torch.normal(x, x.abs()) + x,
    "normal of a mean": lambda x: torch.normal(x, 2.0) + x,
    "normal of a broadcast deviation": lambda x: torch.normal(x[:, :1], x.abs()) + x,
    "normal of a deviation": lambda x: torch.normal(1.0, x.abs()) + x,
    "normal of numbers": lambda x: torch.normal(0.0, 2.0, (3, 1)) + x,
    "what is overwritten": lambda x: (x * 2).normal_() + 0 * torch.rand(3, 4),
    "a view": _into_a_view,
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(3), 2)],
    "multinomial with replacement": lambda x: torch.multinomial(x[:, 0].abs(), 9, replacement=True) + x.sum(),
    "randperm": lambda x: x[torch.randperm(x.shape[0])] * x,
    "poisson": lambda x: x + torch.poisson(x.abs() * 5),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 0.5),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "Normal": lambda x: D.Normal(x, x.exp(), validate_args=False).rsample(),
    "Bernoulli": lambda x: D.Bernoulli(logits=x, validate_args=False).sample() + x,
    "Categorical": lambda x: D.Categorical(logits=x, validate_args=False).sample() + x.sum(),
    "Exponential": lambda x: D.Exponential(x.abs() + 1, validate_args=False).rsample(),
    "Uniform": lambda x: D.Uniform(x, x + 1, validate_args=False).rsample(),
    "Laplace": lambda x: D.Laplace(x, 1.0, validate_args=False).rsample(),
    "without gradient": lambda x: x + _without_gradient(x),
    "a checkpoint": lambda x: checkpoint(lambda y: F.dropout(y, 0.2), x, use_reentrant=False) + F.dropout(x, 0.3),
}  # fmt: skip


class Scaled(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "transformer layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True),
    "multihead attention": lambda: Attends(),
}


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=True)[0]


def _runs(model: nn.Module, x: Tensor, state: RandomState = STATE) -> tuple[Any, Any]:
    """The output and the gradients of the traced graph, and of the plain model under the mode."""
    graph = captured(model, x)
    values = dict(model.named_parameters())
    given = {name: x for name in graph.inputs if name is not None} | graph.constants
    arguments = [
        values[graph.parameters[n.name]] if n.name in graph.parameters else given[n.name]
        for n in graph.graph.nodes if n.op == "placeholder"
    ]  # fmt: skip
    results = []
    for run in (lambda: graph.module(*arguments)[graph.outputs[0]], lambda: model(x)):  # type: ignore[index]
        model.zero_grad()
        with draw_from(state), plain_randomness(state):  # the graph draws by itself
            out = run()
            out.double().pow(2).sum().backward()
        results.append((out.detach(), [p.grad for p in model.parameters()]))
    return results[0], results[1]


def _input() -> Tensor:
    return torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _require_equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=1e-12)
    for mine, its in zip(ours[1], theirs[1], strict=True):
        assert (mine is None) == (its is None)
        if its is not None:
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-10)


@pytest.mark.wide_where(lambda name: name not in [*FUNCTIONS, *MODULES][1::8])
@pytest.mark.slow_where(lambda name: name in [*FUNCTIONS, *MODULES][::2])
@pytest.mark.parametrize("name", [*FUNCTIONS, *MODULES])
def test_the_trace_draws_what_the_plain_model_does(name: str) -> None:
    torch.manual_seed(0)
    model = Scaled(FUNCTIONS[name]) if name in FUNCTIONS else MODULES[name]().double()
    ours, theirs = _runs(model, _input())
    _require_equal(ours, theirs)
    with plain_randomness(RandomState(8, 3)):
        assert not torch.equal(model(_input()), theirs[0]), "nothing was drawn"


@pytest.mark.wide_where(lambda dtype: dtype != torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        x = F.dropout(x.to(dtype), 0.3) + torch.empty_like(x, dtype=dtype).exponential_()
        return x + torch.randn_like(x) + torch.rand_like(x) + torch.bernoulli(torch.sigmoid(x).detach())

    ours, theirs = _runs(Scaled(function), _input())
    assert ours[0].dtype == theirs[0].dtype == dtype
    torch.testing.assert_close(ours[0], theirs[0])


class TestTheExample:
    def test_after(self) -> None:
        def function(x: Tensor) -> Tensor:
            return F.dropout(x, 0.1) + torch.empty_like(x).normal_(0.0, 1.0)

        lines = show(captured(Scaled(function), torch.rand(8, 4, dtype=torch.float64)).module)
        draws = [line for line in lines if "draws.dropout(" in line or "autoparallel.draw(" in line]
        assert draws[0].endswith("0.1, 0)") and "'normal', [0.0, 1.0], 1" in draws[1]


class TestNumbers:
    def test_draws_are_numbered_as_they_are_made_whether_read_or_not(self) -> None:
        def function(x: Tensor) -> Tensor:
            torch.rand(3)
            F.dropout(x, 0.5)
            F.dropout(x, 1.0)  # draws nothing
            F.dropout(x, 0.5, training=False)
            return F.dropout(x, 0.5) + torch.rand(4)

        graph = captured(Scaled(function), _input())
        numbers = [n.args[2] if n.target is DRAWS[0] else n.args[3] for n in graph.graph.nodes if n.target in DRAWS]
        assert numbers == [2, 3] and graph.draws == 4

    def test_layers_that_draw_are_not_copies_of_each_other(self) -> None:
        class Stack(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(6))

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x

        graph = captured(Stack(), torch.rand(8, 4))
        assert [n.args[2] for n in graph.graph.nodes if n.target in DRAWS] == list(range(6))


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a generator": (
        lambda x: x + torch.rand(4, generator=torch.Generator()), "aten.rand.generator .*leave out generator="
    ),
    "a generator in place": (
        lambda x: x + torch.empty_like(x).normal_(generator=torch.Generator()), "normal_ .*leave out generator="
    ),
    "binomial": (
        lambda x: torch.binomial(x.detach() * 0 + 3, x.detach() * 0 + 0.5) + x,
        "aten.binomial.*draw the numbers outside of the model",
    ),
    "dirichlet": (lambda x: D.Dirichlet(x.abs() + 1, validate_args=False).sample() + x, "_sample_dirichlet.*draw outs"),
    "random with two bounds": (
        lambda x: x + torch.empty_like(x, dtype=torch.int64).random_(2, 5), "write torch.randint"
    ),
    "a tensor's bound": (
        lambda x: x + torch.randint_like(x, torch.tensor(5)), "randint_like.Tensor draws .*docs/randomness.md"
    ),
    "inside of a branch": (
        lambda x: torch.cond(x.sum() > 0, lambda y: y + torch.rand_like(y), lambda y: y * 2, (x,)), "draw the numbers b"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(CaptureError, match=f"(?s){message}") as raised:
        captured(Scaled(function), _input())
    if name != "random with two bounds":  # torch fails where it writes the graph down, which has no line
        assert 'test_replace_random_operators.py", line ' in str(raised.value)


def test_the_mode_refuses_what_the_trace_refuses() -> None:
    for name in ("binomial", "dirichlet", "a tensor's bound"):
        with pytest.raises(UnsupportedRandomness), plain_randomness(STATE):
            Scaled(REFUSED[name][0])(_input())


# --------------------------------------------------------------------------------------------------- as torch draws

COUNT = 100_000


def _filled(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.empty(COUNT, dtype=dtype)


DRAWN: dict[str, Callable[[], Tensor]] = {
    "uniform": lambda: _filled().uniform_(-1, 2),
    "uniform in bfloat16": lambda: torch.rand(COUNT, dtype=torch.bfloat16),
    "normal": lambda: _filled().normal_(1, 2),
    "log_normal": lambda: _filled().log_normal_(0, 0.5),
    "exponential": lambda: _filled().exponential_(2),
    "geometric": lambda: _filled().geometric_(0.3),
    "cauchy": lambda: _filled().cauchy_().atan(),
    "randint": lambda: torch.randint(-3, 9, (COUNT,)),
    "random": lambda: _filled(torch.int8).random_(),
    "all integers": lambda: _filled(torch.int64).random_(-(2**63), None) / 2**63,
    "poisson": lambda: torch.poisson(torch.full((COUNT,), 3.7)),
    "poisson of a large rate": lambda: torch.poisson(torch.full((COUNT,), 300.0)),
    "poisson of a small rate": lambda: torch.poisson(torch.full((COUNT,), 0.1)),
    "gamma": lambda: torch._standard_gamma(torch.full((COUNT,), 2.5)),
    "gamma of a small shape": lambda: torch._standard_gamma(torch.full((COUNT,), 0.3)),
    "classes": lambda: torch.multinomial(torch.tensor([0.1, 0.5, 0, 0.4]), COUNT, replacement=True),
    "two classes": lambda: torch.multinomial(torch.tensor([[0.1, 0.5, 0, 0.4]]).expand(COUNT, 4), 2)[:, 1],
    "permutation": lambda: torch.randperm(COUNT) / COUNT,
    "bernoulli": lambda: torch.bernoulli(torch.full((COUNT,), 0.3)),
    "rrelu": lambda: F.rrelu(-torch.ones(COUNT), training=True),
    "dropout": lambda: F.dropout(torch.ones(COUNT), 0.3),
}


@pytest.mark.parametrize("name", DRAWN)
def test_distributions_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    theirs = DRAWN[name]()
    with plain_randomness(STATE):
        ours, next_draw = DRAWN[name](), DRAWN[name]()
    with plain_randomness(RandomState(STATE.seed, STATE.call + 1)):
        next_call = DRAWN[name]()
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    ours, theirs, next_draw, next_call = (x.double() for x in (ours, theirs, next_draw, next_call))
    error = 6 * math.sqrt(2 / COUNT)  # of what is compared, in deviations
    deviation = theirs.std()
    assert abs(ours.mean() - theirs.mean()) < error * deviation
    assert ours.std() == pytest.approx(deviation.item(), rel=0.03)
    levels = theirs.quantile(torch.linspace(0.02, 0.98, 25, dtype=torch.float64))
    for level in levels.unique():
        for below in (torch.lt, torch.le):
            assert abs(below(ours, level).double().mean() - below(theirs, level).double().mean()) < error
    for other in (ours.roll(1), ours.roll(64), next_draw, next_call):
        correlation = ((ours - ours.mean()) * (other - other.mean())).mean() / ours.var()
        assert abs(correlation) < error
