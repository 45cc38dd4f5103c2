"""Runs a program plain and compiled from the same weights, and says what differs.

What a program does goes into notes: outputs, gradients, parameters, buffers, attributes, and whatever a loop adds.
[Note: verdicts] A run ends in one of three ways, and only the first two are right:

- "equal": all notes of both runs agree to 1e-9, exceptions of the user's own included;
- "refused": the compiled run raised a message that names a line of the program that is marked ``# refused`` and ends
  with what to change; all notes before agree, and the attributes of the model are as they were;
- anything else, in words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

import autoparallel
from autoparallel import operators
from autoparallel.graph.plain_tensors import REPLACED, PlainParameter
from tests.devices import DEVICE, on_device

STEPS = 3
SEED = 5
TOLERANCE = 1e-9
PROGRAMS = Path(__file__).parent / "programs"

Batch = Callable[[int], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Program:
    """One small program, as a stranger would write it.

    Attributes:
        name: of the test.
        subject: the file it stands in.
        make: makes the model; whatever the program keeps outside of the model starts anew.
        batch: the arguments of each step's call; a dict at the end holds keyword arguments.
        loss: of the output; None: all outputs that are differentiable, weighed (``weigh``).
        loss_fn: given to ``compile()``.
        between: called with the model before each step.
        loop: what happens with the model; None: three ordinary steps.
        observe: more that is compared after each step.
        refused: a pattern of the cure, where the program cannot run.
        line: whether a refusal can name a line: one about an option cannot.
        ranks: whether it also runs on two ranks.
        random: whether the plain model needs the compiled one's numbers.
        options: of ``compile()``.
    """

    name: str
    subject: str
    make: Callable[[], nn.Module]
    batch: Batch
    loss: Callable[..., Tensor] | None = None
    loss_fn: Callable[..., Any] | None = None
    between: Callable[[Any, int], None] | None = None
    loop: Callable[[Run], None] | None = None
    observe: Callable[[nn.Module], Any] | None = None
    refused: str | None = None
    line: bool = True
    ranks: bool = False
    random: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass
class Run:
    """A plain or a compiled run of one program."""

    program: Program
    wrap: Callable[..., Any]
    numbers: Callable[[int], contextlib.AbstractContextManager[Any]]
    notes: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    plains: list[nn.Module] = dataclasses.field(default_factory=list)
    before: list[Any] = dataclasses.field(default_factory=list)
    models: list[Any] = dataclasses.field(default_factory=list)

    def compile(self, model: nn.Module, loss_fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        """The compiled model, or the plain one behind the same face."""
        self.plains.append(model.to(DEVICE))
        self.changed()
        compiled = self.wrap(model, loss_fn, **options)
        self.models.append(compiled)
        return compiled

    def changed(self) -> None:
        """Says that the user has changed a model, so that a call that is refused leaves it so."""
        self.before = [attributes(m) for m in self.plains]

    def start(self) -> Any:
        """The program's model, compiled as the program says."""
        return self.compile(self.program.make().double(), self.program.loss_fn, **self.program.options)

    @property
    def plain(self) -> nn.Module:
        """The model that was given to ``compile()``."""
        return self.plains[0]

    def call(self, model: Any, step: int) -> Any:
        """The model's output for the batch of this step, noted."""
        args, kwargs = on_device(split(self.program.batch(step)))
        output = model(*args, **kwargs)
        self.note("output", output, grad=True)
        return output

    def backward(self, output: Any) -> Tensor:
        """The program's own loss of this output, noted and differentiated."""
        if self.program.loss is not None:
            loss = self.program.loss(output)
        elif self.program.loss_fn is not None:
            loss = output
        else:
            loss = weigh(output)
        self.note("loss", loss)
        loss.backward()
        return loss

    def note(self, name: str, value: Any, *, grad: bool = False) -> None:
        """Adds to what is compared; ``grad``: also whether tensors require gradients."""
        self.notes.append((name, frozen(value, grad)))

    def note_gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.note(f"gradient of {name}", parameter.grad)

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """The end of an ordinary step, whose loss and gradients are noted."""
        self.note("loss", loss)
        loss.backward()
        self.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    def note_state(self, model: nn.Module) -> None:
        """Parameters, buffers and plain attributes."""
        for name, parameter in model.named_parameters():
            self.note(f"parameter {name}", parameter)
        for name, buffer in model.named_buffers():
            self.note(f"buffer {name}", buffer)
        # Beside the model's own names stands where its stream of random numbers is.
        self.note("names in the state dict", sorted(set(model.state_dict()) - {"_extra_state"}))
        for plain in self.plains:
            for name, value in attributes(plain).items():
                self.notes.append((f"attribute {name}", value))
        if self.program.observe is not None:
            self.note("observed", self.program.observe(self.plains[0]))

    def step(self, model: Any, optimizer: torch.optim.Optimizer, step: int) -> Any:
        """One ordinary step of training, everything noted."""
        if self.program.between is not None:
            self.program.between(model, step)
        with self.numbers(step):
            output = self.call(model, step)
            self.backward(output)
        self.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        self.note_state(model)
        return output


def train(run: Run) -> None:
    """Three ordinary steps."""
    model = run.start()
    optimizer = sgd(model)
    torch.manual_seed(SEED)
    for step in range(STEPS):
        run.step(model, optimizer, step)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9} | options)


def rows(step: int) -> tuple[Any, ...]:
    """Four rows of eight numbers."""
    return (numbers(4, 8, seed=step),)


def signed(step: int) -> tuple[Any, ...]:
    """Four rows of eight numbers, which are negative in every second step."""
    return (numbers(4, 8, seed=step).abs() * (-1) ** step,)


def rows_and_targets(step: int) -> tuple[Any, ...]:
    return numbers(4, 8, seed=step), numbers(4, 8, seed=100 + step)


def tokens(step: int) -> tuple[Any, ...]:
    """Four rows of six token ids below eight."""
    return (torch.randint(0, 8, (4, 6), generator=torch.Generator().manual_seed(step)).to(DEVICE),)


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(*shape, dtype=torch.float64, device="cpu", generator=generator).to(DEVICE)


def split(batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (batch[:-1], dict(batch[-1])) if batch and isinstance(batch[-1], Keywords) else (batch, {})


class Keywords(dict[str, Any]):
    """Keyword arguments at the end of a batch."""


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors of a structure, dataclasses included."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)


def weigh(output: Any) -> Tensor:
    """A scalar on which every element of every differentiable output has its own influence."""
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for value in leaves(output):
        if value.requires_grad:
            real = torch.view_as_real(value) if value.is_complex() else value
            weights = torch.arange(real.numel(), dtype=torch.float64, device=real.device).cos().reshape(real.shape)
            total = total + (real * weights).mean() + 0.1 * real.square().mean()
    return total


# ------------------------------------------------------------------------------------------------- what is remembered


class Unlike:
    """What can never be equal: a value that should not be there."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __repr__(self) -> str:
        return self.words


@dataclasses.dataclass(frozen=True)
class Grad:
    """An output and whether it is differentiable."""

    value: Tensor
    requires_grad: bool


def frozen(value: Any, grad: bool = False) -> Any:
    """A copy of a structure that nothing changes any more."""
    if isinstance(value, FakeTensor):
        return Unlike("a FakeTensor")
    if isinstance(value, PlainParameter):  # in a list of the model's own
        value = REPLACED[value]
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        dense = value.detach().to_dense()  # gradients of parameters are dense here, of the same numbers
        copy = dense.to("cpu", copy=True)
        copy = copy.resolve_conj().resolve_neg()
        return Grad(copy, value.requires_grad) if grad else copy
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return type(value).__name__, {n: frozen(getattr(value, n), grad) for n in names}
    if isinstance(value, Mapping):
        return type(value).__name__, {k: frozen(v, grad) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [frozen(v, grad) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bool | int | float | complex | str | bytes | None | torch.Size | torch.dtype | enum.Enum):
        return value
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return Unlike("a symbol of the trace")
    if isinstance(value, functools.partial):
        return "partial", frozen(value.func), frozen(value.args), frozen(value.keywords)
    if isinstance(value, FunctionType):
        return value.__qualname__
    if isinstance(value, nn.Module):
        return type(value).__name__
    if hasattr(value, "__dict__") and type(value).__module__.startswith("tests."):
        return type(value).__name__, {k: frozen(v) for k, v in vars(value).items()}
    return type(value).__name__


TORCH = frozenset(vars(nn.Module()))


def attributes(model: nn.Module) -> dict[str, Any]:
    """The plain attributes of all modules."""
    return {
        f"{path}.{name}".lstrip("."): frozen(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in TORCH and not name.startswith("_torchdynamo")
    } | {f"{path}.training".lstrip("."): module.training for path, module in model.named_modules()}


def difference(one: Any, other: Any) -> str:
    """What differs between two notes, in words; nothing where they agree."""
    if type(one) is not type(other):
        return f"{brief(one)} instead of {brief(other)}"
    if isinstance(one, Unlike):
        return str(one)
    if isinstance(one, Grad):
        if one.requires_grad != other.requires_grad:
            return f"requires_grad is {one.requires_grad} instead of {other.requires_grad}"
        return difference(one.value, other.value)
    if isinstance(one, Tensor):
        return tensor_difference(one, other)
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"keys {list(one)} instead of {list(other)}"
        return next((f"{k}: {d}" for k in one if (d := difference(one[k], other[k]))), "")
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{len(one)} entries instead of {len(other)}: {brief(one)} instead of {brief(other)}"
        return next(
            (f"[{i}]: {d}" for i, (a, b) in enumerate(zip(one, other, strict=True)) if (d := difference(a, b))), ""
        )
    if isinstance(one, float):
        close = (
            one == other or math.isnan(one) and math.isnan(other) or abs(one - other) <= TOLERANCE * max(1, abs(other))
        )
        return "" if close else f"{one} instead of {other}"
    return "" if one == other else f"{brief(one)} instead of {brief(other)}"


def tensor_difference(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"shape {tuple(one.shape)} instead of {tuple(other.shape)}"
    if one.dtype != other.dtype:
        return f"{one.dtype} instead of {other.dtype}"
    if not one.numel():
        return ""
    if not one.is_floating_point() and not one.is_complex():
        return "" if torch.equal(one, other) else f"{brief(one)} instead of {brief(other)}"
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return ""
    finite = other.abs()[other.isfinite()]
    size = max(1.0, finite.max().item() if finite.numel() else 1.0)
    loose = TOLERANCE if one.dtype in (torch.float64, torch.complex128) else 1e-5
    worst = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf).max().item()
    return "" if worst <= loose * size else f"off by {worst:.1e} of {size:.1e}: {brief(one)} instead of {brief(other)}"


def brief(value: Any) -> str:
    if isinstance(value, Grad):
        return brief(value.value)
    if isinstance(value, Tensor):
        first = [f"{x:.4g}" for x in value.flatten()[:3].tolist()]
        return f"[{', '.join(first)}{', ...' * (value.numel() > 3)}]"
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


# ------------------------------------------------------------------------------------------------------ the two runs


class PlainWithLoss(nn.Module):
    """The plain model behind the face that ``compile(loss_fn=...)`` gives it."""

    def __init__(self, plain: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = plain.__dict__[table]
        self.__dict__["_plain"], self.__dict__["_loss_fn"] = plain, loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._loss_fn(self._plain(*args[:-1], **kwargs), args[-1])
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    def train(self, mode: bool = True) -> PlainWithLoss:
        self._plain.training = mode
        super().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_plain"], name)


def leave_plain(model: nn.Module, loss_fn: Callable[..., Any] | None, **options: Any) -> nn.Module:
    return model if loss_fn is None else PlainWithLoss(model, loss_fn)


def verdict(program: Program, wrap: Callable[..., Any] = autoparallel.compile) -> str:
    """How the compiled run of a program compares with the plain one."""
    reference = Run(program, leave_plain, compiled_numbers if program.random else no_numbers)
    end = perform(reference)
    if end is not None:
        return f"the plain run raised {type(end).__name__}: {end}"
    compiled = Run(program, lambda model, loss_fn, **options: wrap(model, loss_fn=loss_fn, **options), no_numbers)
    error = perform(compiled)
    for (name, value), (expected_name, expected) in zip(compiled.notes, reference.notes, strict=False):
        if name != expected_name:
            return f"does {name} where the plain run does {expected_name}"
        if words := difference(value, expected):
            return f"WRONG: {name}: {words}"
    if error is None:
        missing = len(reference.notes) - len(compiled.notes)
        return "equal" if not missing else f"WRONG: {missing} notes are missing or too many"
    return refusal(program, compiled, error)


def compiled_numbers(step: int) -> contextlib.AbstractContextManager[Any]:
    """Gives the plain model the random numbers of the compiled one's call, of the stream that ``SEED`` begins."""
    return operators.plain_randomness(operators.RandomState(SEED, step))


def no_numbers(step: int) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def perform(run: Run) -> BaseException | None:
    """Runs a program from fixed seeds; what it raised."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with defaults():
        try:
            (run.program.loop or train)(run)
        except Exception as error:
            return error
    return None


@contextlib.contextmanager
def defaults() -> Iterator[None]:
    """Tensors made anywhere are of double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def refusal(program: Program, run: Run, error: BaseException) -> str:
    """Whether an error is one that a user can act on."""
    text = str(error)
    head = f"{type(error).__name__}: {text[:400]}"
    if "What to change:" not in text:
        return f"BAD REFUSAL (no cure): {head}"
    if program.line and not any("# refused" in line for line in named_lines(text)):
        return f"BAD REFUSAL (names no line that is marked): {head}"
    for model, before in zip(run.plains, run.before, strict=True):
        if words := difference(attributes(model), before):
            return f"WRONG: the refused call changed the model: {words}"
    if program.refused is not None and not re.search(program.refused, text.partition("What to change:")[2]):
        return f"BAD REFUSAL (another cure): {head}"
    return "refused"


def named_lines(text: str) -> Iterator[str]:
    """The lines of programs that a message names."""
    for path, number in re.findall(r'"([^"]+)", line (\d+)', text):
        if Path(path).is_relative_to(PROGRAMS.parent):
            yield Path(path).read_text().splitlines()[int(number) - 1]
