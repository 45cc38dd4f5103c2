"""``autograd.Function``s in a model: the user's backward runs as written, on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import autoparallel
from autoparallel.operators.opaque import function_operator
from autoparallel.rules.registry import USER_RULES
from tests.distributed import run_distributed
from tests.graph.programs import batches, make_model, refusal, require_as_eager, require_equal, train, train_on_ranks
from tests.rules.examples import real
from tests.rules.proof import Disproved, Example, prove


class Round(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


round_through = Round.apply  # bound before anything is traced


class Reverse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -ctx.scale * grads[0], None


class Clipped(Function):
    """Its backward is not linear in the gradient: the sum of what it makes of summands is something else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / grads[0].norm()


class Saturated(Function):
    """Its backward is not linear in the gradient, but element by element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].tanh()


class Affine(Function):
    """The new style; gradients that no derivative would give, so that they can only come from here."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ weight.t() + (0 if bias is None else bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        return (
            2 * grads[0] @ weight if wants[0] else None,
            3 * grads[0].t() @ x if wants[1] else None,
            5 * grads[0].sum(0) if len(wants) > 2 and wants[2] else None,
        )


class Several(Function):
    """Several results, some without a gradient, and every kind of argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, share: float, sizes: Any, name: str, rest: Any) -> Any:
        assert name == "name" and isinstance(sizes, torch.Size) and sizes[0] == rows
        positive, double, y = (x > 0).long(), x * 2, x.exp()
        ctx.mark_non_differentiable(positive, double)
        ctx.save_for_backward(y)
        ctx.rows, ctx.share = rows, share
        return y, positive, double, None, 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grads[0].clamp(-0.1, 0.1) * ctx.rows + ctx.share * y, None, None, None, None, None


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = Round.apply(x)
        return y * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 7


class ByModule(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class ByAttribute(Function):
    weight: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * ByAttribute.weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)


class StraightThrough(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(round_through(self.up(x) * 3)).square().sum()


class Reversal(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(Reverse.apply(self.up(x), 0.5)).square().sum()


class Clipping(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(Clipped.apply(self.up(x))).square().sum()


class NewStyle(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(Affine.apply(x, self.up.weight, self.up.bias)).square().sum()


class WithoutBias(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(Affine.apply(x, self.up.weight)).square().sum()


class SeveralResults(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y, positive, double, nothing, three = Several.apply(
            h, x.shape[0], 1.0 / x.shape[0], h.shape, "name", [None, True, (torch.float64, {"a": 1})]
        )
        assert nothing is None
        return (self.down(y) + positive + double * three).square().sum()


class InFunction(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(Nested.apply(self.up(x))).square().sum()


class WithoutGradient(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            codes = round_through(h)
        return self.down(h * codes).square().sum()


class Reentrant(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(lambda t: round_through(self.up(t).exp()), self.down(x), use_reentrant=True)).sum()


class NotReentrant(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(lambda t: round_through(self.up(t).exp()), self.down(x), use_reentrant=False)).sum()


class OnCpu(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            h = self.up(x).exp()
        return self.down(h).square().sum()


EQUAL = [
    StraightThrough, Reversal, Clipping, NewStyle, WithoutBias, SeveralResults, InFunction, WithoutGradient, Reentrant,
    NotReentrant, OnCpu,
]  # fmt: skip


@pytest.mark.wide_where(lambda make: make not in EQUAL[::3])
@pytest.mark.parametrize("make", EQUAL)
def test_trains_as_eager(make: Callable[[], nn.Module]) -> None:
    require_as_eager(make)


def test_the_comparison_sees_a_dropped_backward() -> None:
    class Plain(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).mul(3).round()).square().sum()

    with pytest.raises(AssertionError):
        require_equal(train(make_model(StraightThrough), batches()), train(make_model(Plain), batches()))


def test_the_batch_stays_open() -> None:
    plain = make_model(SeveralResults)
    compiled = autoparallel.compile(make_model(SeveralResults))
    for rows in (8, 4, 6):
        torch.testing.assert_close(compiled(batches(rows)[0]), plain(batches(rows)[0]), rtol=1e-9, atol=1e-9)
    assert len(compiled._kinds) == 1


class GivenAModule(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(ByModule.apply(x, self.up)).sum()


class ReadsAParameter(Base):
    def forward(self, x: Tensor) -> Tensor:
        ByAttribute.weight = self.up.weight[0]
        return self.down(ByAttribute.apply(x)).sum()


class ChangesWhatIsShared(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        y = Reverse.apply(h, 2.0)
        h.add_(1)
        return self.down(y + h).sum()


class PacksWhatIsSaved(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            h = self.up(x).exp()
        return self.down(h).sum()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (GivenAModule, "ByModule is given an object of type Linear"),
        (ReadsAParameter, "ByAttribute reads a parameter or an activation that is not among its arguments"),
        (ChangesWhatIsShared, "shares its memory with a result of an autograd.Function"),
        (PacksWhatIsSaved, "saved_tensors_hooks is entered inside of the model"),
    ],
)
def test_is_refused(make: Callable[[], nn.Module], says: str) -> None:
    message = refusal(make)
    assert says in message
    assert "test_functions.py" in message


# ----------------------------------------------------------------------------------------------------- on two ranks


@pytest.mark.wide_where(lambda make, plan: (make, plan) != (Clipping, "fsdp"))
@pytest.mark.parametrize("plan", ["data_parallel", "fsdp", "tensor_parallel"])
@pytest.mark.parametrize("make", [Clipping, SeveralResults])
def test_trains_as_eager_on_two_ranks(make: Callable[[], nn.Module], plan: str) -> None:
    for plain, actual, program in run_distributed(train_on_ranks, make, plan, world_size=2):
        require_equal(plain, actual)
        assert "redistribute" in program or plan == "tensor_parallel"


# ------------------------------------------------------------------------------------------------- rules for classes


@pytest.fixture
def forget_rules() -> Iterator[None]:
    before = dict(USER_RULES)
    yield
    USER_RULES.clear()
    USER_RULES.update(before)


def _train_with_a_rule(make: Callable[[], nn.Module], plan: str) -> Any:
    autoparallel.register_rule(Round, "b d -> b d")
    try:
        return train_on_ranks(make, plan)
    finally:
        USER_RULES.pop(Round)


def _before(program: str, name: str) -> str:
    """The call before that of a Function."""
    lines = program.splitlines()
    return lines[next(i for i, line in enumerate(lines) if f".{name}]" in line) - 1]


def test_a_rule_lets_a_function_run_on_shards() -> None:
    (plain, actual, program), _ = run_distributed(_train_with_a_rule, StraightThrough, "data_parallel", world_size=2)
    require_equal(plain, actual)
    assert "aten.mul" in _before(program, "Round")
    (_, _, whole), _ = run_distributed(train_on_ranks, StraightThrough, "data_parallel", world_size=2)
    assert "redistribute" in _before(whole, "Round")


def test_a_rule_is_proved_by_execution(forget_rules: None) -> None:
    """A backward that is not linear in the gradient: any summand of a gradient would show."""
    autoparallel.register_rule(Saturated, "b d -> b d")
    proof = prove(Example(function_operator(Saturated), (real(6, 6),)))
    assert proof.counts["shard"] >= 2
    assert "R" not in proof.counts


def test_a_function_without_a_rule_runs_whole() -> None:
    proof = prove(Example(function_operator(Clipped), (real(6, 6),)))
    assert set(proof.counts) == {"I"}


def test_a_wrong_rule_is_refuted(forget_rules: None) -> None:
    autoparallel.register_rule(Clipped, "b d -> b d")
    with pytest.raises(Disproved):
        prove(Example(function_operator(Clipped), (real(6, 6),)))
