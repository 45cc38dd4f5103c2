"""The plain model with the numbers that its compiled self would draw.

[Note: which draw is which] Draws are numbered in the order in which the plain model makes them, and so is the traced
graph.  A model's own ``torch.utils.checkpoint`` draws some of them again in its backward, after it has put back the
state that torch's generator had in the forward.  So torch's generator is moved on by every draw, and what is drawn at a
state where something was drawn before gets that number.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autoparallel import _torch
from autoparallel.operators.random import RandomState, alone, draw_from
from autoparallel.operators.torch_random import BASIC, Draw, EagerEmit, arguments_of, rrelu_slope, silent

aten = torch.ops.aten


class UnsupportedRandomness(NotImplementedError):
    """A random operator whose numbers cannot be made to depend on the global position."""


class _Numbered(_torch.export.AttendingMode):
    """Draws our numbers wherever a random operator of torch is called."""

    def __init__(self, state: RandomState) -> None:
        super().__init__()
        self.state = state
        self.numbers: dict[bytes, int] = {}  # by the state that torch's generator had
        self.alone: dict[bytes, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # FlexAttention, whose functions draw nothing
            return func(*args, **kwargs)
        arguments = arguments_of(func, args, kwargs)
        theirs = arguments.get("generator") is not None  # a compiled model is refused for it; a loss may have one
        if torch.Tag.nondeterministic_seeded not in func.tags or theirs or silent(func, arguments):
            return func(*args, **kwargs)
        if func not in BASIC and func not in _FUSED:
            raise UnsupportedRandomness(f"{func} draws random numbers that a compiled model cannot draw")
        with draw_from(self.state):
            is_alone = func is aten.rand.default and not arguments["size"]
            draw = Draw(EagerEmit(), func, arguments, self._take_alone if is_alone else self.take)
            if func in _FUSED:
                return _FUSED[func](draw)
            value = BASIC[func](draw)
        return args[0].copy_(value) if func._schema.name.endswith("_") else value

    def take(self) -> int:
        """The number of the draw that is made now (see [Note: which draw is which])."""
        return self.numbers.setdefault(_move_on(), len(self.numbers))

    def _take_alone(self) -> int:
        """The same of ``torch.rand([])``."""
        return self.alone.setdefault(_move_on(), alone(len(self.alone)))


class _DropsNothing(TorchFunctionMode):
    """Counts the dropouts of what has no elements, as the rows may have that values select: torch leaves them out, and
    the compiled model does not know."""

    def __init__(self, numbered: _Numbered) -> None:
        super().__init__()
        self.numbered = numbered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (signature := _DROPOUTS.get(func)) is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            x, p, train = [*bound.arguments.values()][:3]
            if train and p > 0 and not x.numel():
                self.numbered.take()
        return func(*args, **kwargs)


_KINDS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_DROPOUTS: dict[Any, inspect.Signature] = {getattr(F, name): inspect.signature(getattr(F, name)) for name in _KINDS}
_DROPOUTS |= {
    getattr(torch, kind + end): inspect.signature(lambda input, p, train: None)
    for kind in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for end in ("", "_")
}


def _move_on() -> bytes:
    """Moves torch's generator on by a draw; the state that it had."""
    state = torch.get_rng_state().numpy().tobytes()
    torch.rand((), generator=torch.default_generator)
    return state


def _dropout(draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    x, p = draw["input"], draw["p"]
    keep = draw.draw("bernoulli", 1 - p, sizes=list(x.shape), dtype=x.dtype, device=x.device)
    return x * keep.div(1 - p), keep.bool()


def _rrelu_with_noise(draw: Draw) -> torch.Tensor:
    x: torch.Tensor = draw["self"]
    noise = draw["noise"].copy_(rrelu_slope(draw))
    return x.mul_(noise) if draw.target is aten.rrelu_with_noise_.default else x * noise


_FUSED = {
    aten.native_dropout.default: _dropout,
    aten.rrelu_with_noise.default: _rrelu_with_noise,
    aten.rrelu_with_noise_.default: _rrelu_with_noise,
}
"""What one device or another makes in one piece of what the traced graph has otherwise."""


@contextmanager
def plain_randomness(state: RandomState) -> Iterator[None]:
    """A context in which a plain model, in eager, draws what the compiled one draws in a call with this state.

    One context holds one call, its backward included.  What is drawn from a generator of its own stays as it is.

    Raises:
        UnsupportedRandomness: at a random operator that a compiled model would be refused for.
    """
    with ExitStack() as stack:
        if torch.cuda.is_available():  # kernels that draw inside are left for those whose numbers can be given
            stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        numbered = stack.enter_context(_Numbered(state))
        stack.enter_context(_DropsNothing(numbered))
        yield
