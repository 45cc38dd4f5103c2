"""Python in forward: branches, loops, recursion, exceptions, arguments."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Keywords, Run, numbers, rows, sgd, signed


@program(batch=signed, ranks=True)
class BranchOnValue(Two):
    """The parameters of a way that is not taken get no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.mean() > 0:
            h = self.b(h)
        return h


@program(ranks=True)
class FlagInABuffer(Two):
    """What the first batch initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.ready:
            self.shift.copy_(h.detach().mean(0))
            self.ready.fill_(True)
        return h - self.shift


@program()
class FlagOfTheFirstCall(Two):
    """The same with a flag of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.ready:
            self.shift.copy_(h.detach().mean(0))
            self.ready = True
        return h - self.shift


@program(ranks=True)
class ItemInForward(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) / x.abs().max().item()


@program(ranks=True)
class BooleanIndexing(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h[x.sum(-1) > 0]).sum(0)


@program(ranks=True)
class TensorToFloat(Two):
    """As ``.item()``."""

    def forward(self, x: Tensor) -> Tensor:
        scale = float(self.a.weight.abs().sum())
        return self.a(x) / scale


@program(refused=".")
class TensorToNumpy(Two):
    def forward(self, x: Tensor) -> Tensor:
        order = x.detach().numpy().argsort(-1)  # refused
        return self.a(x).gather(1, torch.from_numpy(order))


@program()
class TensorToList(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * max(x[0].tolist())


@program(ranks=True)
class BranchOnTraining(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if self.training else self.a(x)


@program(batch=lambda step: (*rows(step), step % 2 == 0))
class BranchOnArgument(Two):
    def forward(self, x: Tensor, deep: bool) -> Tensor:
        return self.b(self.a(x)) if deep else self.a(x)


@program(batch=lambda step: (*rows(step), Keywords(scale=1.0 + step, mode=("a", "b", "a")[step])))
class KeywordOnly(Two):
    def forward(self, x: Tensor, *, scale: float = 1.0, mode: str = "a", **rest: Any) -> Tensor:
        return getattr(self, mode)(x) * scale


@program(batch=lambda step: (*rows(step), *rows(step + 5), *rows(step + 9)))
class VariableArguments(Two):
    def forward(self, *inputs: Tensor) -> Tensor:
        return self.b(torch.stack([self.a(x) for x in inputs]).mean(0))


@program(ranks=True, batch=lambda step: (*rows(step), *rows(step + 5)))
class RepeatsToAnothersBatch(Two):
    """As often as the other batch is larger, which is once."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.a(x).repeat(y.size(0) // x.size(0), 1), self.b(y)], dim=1)


@program(batch=lambda step: ({"x": rows(step)[0], "rest": [rows(step + 5)[0], None]},))
class DictInput(Two):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        y, none = batch["rest"]
        assert none is None
        return self.a(batch["x"]) + self.b(y)


@program(batch=lambda step: (numbers((4, 8, 4)[step], 8, seed=step),))
class BatchOfAnotherSize(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()) / x.shape[0]


@program(batch=lambda step: (numbers(4, 3 + step, 8, seed=step),))
class SequenceOfAnotherSize(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).cumsum(1)).mean(1) * len(x[0])


@program()
class DependsOnBatchSize(Two):
    """A number computed from the batch's size enters the result."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 6:
            return self.a(x)
        return self.b(x) * x.shape[0] ** 0.5 / x.size(0)


@program(ranks=True)
class Recursion(Two):
    def descend(self, x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else self.a(self.descend(x, depth - 1)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.descend(x, 3))


@program(batch=lambda step: (*rows(step), ("left", "right", "left")[step]))
class ModuleByName(nn.Module):
    """A head per task: those that are not used have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"left": nn.Linear(8, 4), "right": nn.Linear(8, 4)})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](x)


@program(refused="symbolic batch", line=False)
class TriesAndFallsBack(Two):
    """Catches an error of its own, which a trace with an open batch runs into in another way."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            h = self.a(x.view(3, -1, 8).mean(0))
        except RuntimeError:
            h = self.a(x)
        return self.b(h)


class TooWide(ValueError):
    pass


@loop()
def exception_of_the_user(run: Run) -> None:
    """The second batch is refused by the model itself; training goes on."""

    class Strict(Two):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] != 8:
                raise TooWide(f"expected 8 columns, not {x.shape[-1]}")
            return self.b(self.a(x))

    model = run.compile(Strict())
    optimizer = sgd(model)
    for step in range(STEPS):
        try:
            model(numbers(4, 5, seed=0))
        except TooWide as error:
            run.note("raised", str(error))
        except Exception as error:
            run.note("raised", isinstance(error.__cause__, TooWide) and "expected 8 columns, not 5" in str(error))
            run.notes[-1] = ("raised", "expected 8 columns, not 5") if run.notes[-1][1] else ("raised", repr(error))
        run.step(model, optimizer, step)


@program()
class AssertsAndPrints(Two):
    """Logs and asserts shapes."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.ndim == 2 and x.shape[1] == 8, "two dims"
        logging.getLogger(__name__).debug("input %s", x.shape)
        if x.shape[1] > 100:
            warnings.warn("wide", stacklevel=2)
        return self.b(self.a(x))


@contextmanager
def scaled(values: list[float], factor: float) -> Iterator[None]:
    values.append(factor)
    try:
        yield
    finally:
        values.pop()


@program()
class ContextManagerOfItsOwn(Two):
    """A stack that is empty again after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        with scaled(self.stack, 2.0):
            h = self.a(x) * self.stack[-1]
        return self.b(h) * self.stack[-1]


@program(ranks=True)
class EarlyExit(nn.Module):
    """Comprehension over modules, zip, enumerate, any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        outs = [g * layer(x).relu() for layer, g in zip(self.layers, self.gains, strict=True)]
        return sum((o / (i + 1) for i, o in enumerate(outs)), torch.zeros(8))


@program()
class CondOperator(Two):
    """``torch.cond`` on a value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (h,))


@program()
class LambdaLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.steps = [lambda t: t.tanh(), self.a, lambda t, k=3: t * k]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


@program()
class GeneratorAndStar(Two):
    def states(self, x: Tensor) -> Iterator[Tensor]:
        yield self.a(x)
        yield self.b(x)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.states(x)
        return torch.cat([first, *others], dim=-1)


@program(refused=".")
class ModuleMadeInForward(nn.Module):
    """A layer that is made at the first call is not trained by an optimizer of before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.late = nn.Linear(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        if self.late is None:
            self.late = nn.Linear(8, 8, dtype=torch.float64)  # refused
        return self.late(self.a(x))


class Pool(nn.Module):
    """A layer without parameters, which a forward makes or copies; it is no module yet when its methods begin."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.double()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.rate * x.mean(0)


@program(ranks=True)
class LayersMadeAndCopiedInForward(Two):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return Pool(0.5)(self.a(x)) + copy.deepcopy(self.pool)(self.b(x))


@program()
class LazyLayer(nn.Module):
    """A lazy layer that had its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.LazyLinear(8, dtype=torch.float64)
        self.a(torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.a(x))


@program()
class AsksWhetherItIsCompiled(nn.Module):
    """A model that does something else under torch.compile: ours is the plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            h = h.detach()
        return h.tanh() if torch._dynamo.is_compiling() or is_compiling() else 2 * h


@program()
class ChecksItsInputsUnlessCompiled(nn.Module):
    """The way of the plain model depends on a value, that of torch.compile does not: the latter is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not bool(x.isfinite().all()):
            x = x.nan_to_num()
        out: Tensor = self.a(x)
        return out


@program()
class ChecksThatOnlyRaise(Two):
    """Values that are asked for in every way in which nothing but an error follows from them."""

    def forward(self, x: Tensor) -> Tensor:
        assert not x.isnan().any() and (x.abs() < 1e3).all(), "not a number"
        if not torch.isfinite(x).all() or (x > 1e3).any():
            message = f"{x.shape} is not finite"
            raise ValueError(message)
        with torch.no_grad():
            assert torch.allclose(x, x) and torch.equal(x, x) and torch.equal(input=x, other=x)
        if (x > 1e3).any().item() or 1e3 in x:
            raise ValueError("large")
        assert 1e4 not in x and not torch.is_nonzero((x > 1e3).any())
        if (x < 1e3).all():
            h = self.a(x)
        else:
            raise ValueError("large")
        try:
            return self.b(h)
        except TypeError:  # around no check
            return h


@program()
class ChecksOfTorchThatOnlyRaise(Two):
    """Python of torch's that asks for values, to which no TorchFunctionMode listens."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return F.gaussian_nll_loss(self.b(h), x, h.exp(), reduction="none")


@program()
class CatchesItsCheck(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        try:
            assert (h > 100).all()
        except AssertionError:
            h = self.b(h)
        return h


@program(batch=signed)
class CallerCatchesTheCheck(Two):
    def check(self, x: Tensor) -> None:
        if x.min() < 0:
            raise TooWide

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with suppress(TooWide):
            self.check(x)
            h = 2 * h
        return self.b(h)


@contextmanager
def unless_too_wide() -> Iterator[None]:
    with suppress(TooWide):
        yield


@program(batch=signed)
class ContextCatchesTheCheck(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with unless_too_wide():
            if x.min() < 0:
                raise TooWide
            h = 2 * h
        return self.b(h)


@contextmanager
def timed(times: list[int]) -> Iterator[None]:
    with torch.enable_grad():
        try:
            yield
        finally:
            times.clear()


class Span:
    """A timer that is a class of the user's own."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


class Taken(Span):
    def __exit__(self, *error: Any) -> bool:  # type: ignore[override]
        return error[0] is not None


class Swallowed(Span):
    """What is called is no class: what it gives catches."""

    def __call__(self) -> Taken:
        return Taken()


@contextmanager
def going_on() -> Iterator[None]:
    for _ in range(1):
        try:
            yield
        finally:
            break  # noqa: B012 - that is what is tried


@program()
class ChecksWithinATimer(Two):
    """Contexts of the user's own that catch nothing: what only raises is left out, as outside of them."""

    def forward(self, x: Tensor) -> Tensor:
        with timed([]), Span(), Span() as span:
            h = self.a(x)
            if h.isnan().any():
                raise ValueError("nan")
            with span:
                assert h.isfinite().all()
        return self.b(h)


@program(batch=signed)
class ChecksWithinContextsThatCatch(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with Taken():
            if x.min() < 0:
                raise TooWide
            h = 2 * h
        with Swallowed()():
            if x.min() < 0:
                raise TooWide
            h = h + 1
        with going_on():
            if x.min() < 0:
                raise TooWide
            h = 3 * h
        return self.b(h)


class Halved:
    """Halves of a tensor, as long as they are large."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Halved:
        return self

    def __next__(self) -> Tensor:
        self.x = self.x / 2
        if self.x.abs().max() < 0.1:  # refused
            raise StopIteration
        return self.x


@program(refused="torch.where")
class LoopUntilAnIteratorRaises(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(sum(Halved(self.a(x))))


@program()
class AsksWithinACheck(Two):
    """What is checked depends on a value, too; the check is left out."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        assert (h if h.mean() > 0 else -h).sum() > -1e9
        return self.b(h)
