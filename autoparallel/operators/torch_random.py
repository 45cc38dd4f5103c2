"""Torch's random operators, in terms of ours.

One table serves the traced graph, where each call is rewritten (``passes.replace_random_operators``), and the plain
model in eager, where each call is intercepted (``plain_randomness``): so both draw the same numbers.  Random operators
are known by torch's own tag; what has it and is not in the table is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch

from autoparallel.operators import draws

aten = torch.ops.aten


class Emit(Protocol):
    """Calls an operator (in eager), or inserts a call of it (into a graph)."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any: ...
    def sizes(self, x: Any) -> list[Any]: ...
    def value(self, x: Any) -> torch.Tensor: ...


class Draw:
    """One call of a random operator of torch.

    Args:
        emit: makes what replaces it.
        target: the operator.
        arguments: by the names of its schema, defaults filled in.
        take: gives the number of the next draw of the call.
        like: has the dtype and device of the result, where they are known already.
    """

    def __init__(
        self,
        emit: Emit,
        target: Any,
        arguments: dict[str, Any],
        take: Callable[[], int],
        like: torch.Tensor | None = None,
    ) -> None:
        self.emit, self.target, self.arguments, self.take, self.like = emit, target, arguments, take, like

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def sizes(self) -> list[Any]:
        """The sizes of the result: those given, or those of the tensor that is filled, or is to be like."""
        return list(self["size"]) if "size" in self.arguments else self.emit.sizes(self["self"])

    def form(self) -> dict[str, Any]:
        """The dtype and the device of the result."""
        if self.like is not None:
            return {"dtype": self.like.dtype, "device": self.like.device}
        name = self.target._schema.name
        default = torch.int64 if name in ("aten::randint", "aten::randperm") else torch.get_default_dtype()
        here = torch.get_default_device()
        if "self" in self.arguments:
            source = self.emit.value(self["self"])
            default, here = source.dtype, source.device
        dtype, device = self.arguments.get("dtype"), self.arguments.get("device")
        return {
            "dtype": dtype if isinstance(dtype, torch.dtype) else default,
            "device": here if device is None else torch.device(device),
        }

    def draw(self, distribution: str, *parameters: float, sizes: list[Any] | None = None, **form: Any) -> Any:
        """Numbers of a distribution, for the result or for other sizes."""
        sizes = self.sizes() if sizes is None else sizes
        return self.emit(
            draws.draw, sizes, distribution, [float(p) for p in parameters], self.take(), **(form or self.form())
        )

    def constant(self, sample: Any, operand: Any) -> Any:
        """``sample``, whose gradient with respect to ``operand`` is zero, as torch has it, and not None."""
        operand_value, value = self.emit.value(operand), self.emit.value(sample)
        if operand_value.shape != value.shape or not operand_value.is_floating_point():
            return sample
        always = self.emit(aten.ones_like.default, operand, dtype=torch.bool)
        if operand_value.dtype != value.dtype:
            operand = self.emit(aten._to_copy.default, operand, dtype=value.dtype)
        return self.emit(aten.where.self, always, sample, operand)


def _bernoulli_of(draw: Draw, p: Any, sizes: list[Any], **form: Any) -> Any:
    uniform = draw.draw("uniform", 0, 1, sizes=sizes, dtype=torch.float64, device=form["device"])
    return draw.emit(aten._to_copy.default, draw.emit(aten.lt.Tensor, uniform, p), dtype=form["dtype"])


def _bernoulli(draw: Draw) -> Any:
    p = draw["self"]
    value = draw.emit.value(p)
    return draw.constant(_bernoulli_of(draw, p, draw.emit.sizes(p), dtype=value.dtype, device=value.device), p)


def _bernoulli_number(draw: Draw) -> Any:
    return draw.draw("bernoulli", draw["p"])


def _bernoulli_tensor(draw: Draw) -> Any:
    return draw.constant(_bernoulli_of(draw, draw["p"], draw.sizes(), **draw.form()), draw["p"])


def _distribution(distribution: str, *names: str) -> Callable[[Draw], Any]:
    return lambda draw: draw.draw(distribution, *(draw[name] for name in names))


def _standard(distribution: str, *parameters: float) -> Callable[[Draw], Any]:
    return lambda draw: draw.draw(distribution, *parameters)


def _normal_of_tensors(draw: Draw) -> Any:
    mean, std = draw["mean"], draw["std"]
    tensors = [x for x in (mean, std) if not isinstance(x, int | float)]
    emit, like = draw.emit, tensors[0]
    if len(tensors) == 2 and emit.value(mean).shape != emit.value(std).shape:
        both = emit(aten.broadcast_tensors.default, tensors)
        mean, std = tensors = [emit(operator.getitem, both, i) for i in range(2)]
        like = mean
    value = emit.value(like)
    sample = draw.draw("normal", 0, 1, sizes=emit.sizes(like), dtype=value.dtype, device=value.device)
    detached = [x if isinstance(x, int | float) else emit(aten.detach.default, x) for x in (mean, std)]
    sample = emit(aten.add.Tensor, emit(aten.mul.Tensor, sample, detached[1]), detached[0])
    for x in tensors:
        sample = draw.constant(sample, x)
    return sample


def _integers(draw: Draw) -> Any:
    sizes, low, high = draw.sizes(), draw.arguments.get("low", 0), draw["high"]
    last = high - 1 if isinstance(high, int) else draw.emit(operator.sub, high, 1)
    return draw.emit(draws.draw_integers, sizes, low, last, draw.take(), **draw.form())


def _random(draw: Draw) -> Any:
    """``random_``: by default all that the dtype has; of a floating one, all integers that it tells apart."""
    form = draw.form()
    dtype = form["dtype"]
    if dtype.is_floating_point:
        top = round(2 / torch.finfo(dtype).eps)
    else:
        top = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    low, high = draw.arguments.get("from", 0), draw.arguments.get("to")
    last = top if high is None else high - 1
    return draw.emit(draws.draw_integers, draw.sizes(), low, last, draw.take(), **form)


def _rrelu(draw: Draw) -> Any:
    x, emit = draw["self"], draw.emit
    return emit(aten.mul.Tensor, x, rrelu_slope(draw))


def rrelu_slope(draw: Draw) -> Any:
    """What the elements of a randomised leaky ReLU are multiplied by."""
    x, emit = draw["self"], draw.emit
    value = emit.value(x)
    form = {"dtype": value.dtype, "device": value.device}
    slope = draw.draw("uniform", draw["lower"], draw["upper"], sizes=emit.sizes(x), **form)
    return emit(aten.where.ScalarOther, emit(aten.le.Scalar, x, 0), slope, 1.0)


def _classes(draw: Draw) -> Any:
    weights = draw.emit(aten.detach.default, draw["self"])
    return draw.emit(draws.draw_classes, weights, draw["num_samples"], draw["replacement"], draw.take())


def _poisson(draw: Draw) -> Any:
    rate = draw.emit(aten.detach.default, draw["self"])
    return draw.constant(draw.emit(draws.draw_poisson, rate, draw.take()), draw["self"])


BASIC: dict[Any, Callable[[Draw], Any]] = {
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_number,
    aten.bernoulli_.float: _bernoulli_number,
    aten.bernoulli.Tensor: _bernoulli_tensor,
    aten.bernoulli_.Tensor: _bernoulli_tensor,
    aten.uniform.default: _distribution("uniform", "from", "to"),
    aten.uniform_.default: _distribution("uniform", "from", "to"),
    aten.normal_functional.default: _distribution("normal", "mean", "std"),
    aten.normal_.default: _distribution("normal", "mean", "std"),
    aten.normal.float_float: _distribution("normal", "mean", "std"),
    aten.normal.Tensor_float: _normal_of_tensors,
    aten.normal.float_Tensor: _normal_of_tensors,
    aten.normal.Tensor_Tensor: _normal_of_tensors,
    aten.log_normal.default: _distribution("log_normal", "mean", "std"),
    aten.log_normal_.default: _distribution("log_normal", "mean", "std"),
    aten.exponential.default: _distribution("exponential", "lambd"),
    aten.exponential_.default: _distribution("exponential", "lambd"),
    aten.cauchy.default: _distribution("cauchy", "median", "sigma"),
    aten.cauchy_.default: _distribution("cauchy", "median", "sigma"),
    aten.geometric.default: _distribution("geometric", "p"),
    aten.geometric_.default: _distribution("geometric", "p"),
    aten.rand.default: _standard("uniform", 0, 1),
    aten.rand_like.default: _standard("uniform", 0, 1),
    aten.randn.default: _standard("normal", 0, 1),
    aten.randn_like.default: _standard("normal", 0, 1),
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.randint_like.default: _integers,
    aten.randint_like.low_dtype: _integers,
    aten.random.default: _random,
    aten.random.to: _random,
    getattr(aten.random, "from"): _random,
    aten.random_.default: _random,
    aten.random_.to: _random,
    getattr(aten.random_, "from"): _random,
    aten.rrelu.default: _rrelu,
    aten.rrelu_.default: _rrelu,
    aten.randperm.default: lambda draw: draw.emit(draws.draw_permutation, draw["n"], draw.take(), **draw.form()),
    aten.multinomial.default: _classes,
    aten.poisson.default: _poisson,
    aten._standard_gamma.default: lambda draw: draw.emit(draws.draw_gamma, draw["self"], draw.take()),
}
"""What draws once, whatever it is given; an operator whose name ends in "_" fills its first argument."""

for _target, _name in [
    (aten.rand.default, "generator"),
    (aten.rand_like.default, "generator"),
    (aten.randn.default, "generator"),
    (aten.randn_like.default, "generator"),
    (aten.randint.default, "generator"),
    (aten.randint.low, "low_generator"),
    (aten.randint_like.default, "generator"),
    (aten.randint_like.low_dtype, "low_generator_dtype"),
    (aten.randperm.default, "generator"),
]:  # what torch calls for ``generator=None`` as well
    if _name in _target.overloadpacket.overloads():  # some came with later versions
        BASIC[getattr(_target.overloadpacket, _name)] = BASIC[_target]


class EagerEmit:
    """Calls operators."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def sizes(self, x: torch.Tensor) -> list[int]:
        return list(x.shape)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return x


def arguments_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names of its schema, defaults filled in."""
    arguments = {a.name: a.default_value for a in target._schema.arguments}
    arguments.update(zip(arguments, args, strict=False))
    arguments.update(kwargs)
    return arguments


def silent(target: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call with torch's tag for random operators draws nothing."""
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    if name == "_fused_sdp_choice" or arguments.get("train") is False or arguments.get("training") is False:
        return True
    if "num_layers" in arguments and arguments["num_layers"] == 1:
        return True
    chances = [arguments[key] for key in ("dropout_p", "dropout", "p") if key in arguments]
    if "dropout" in name and "p" in arguments:
        return arguments["p"] == 0
    return "p" not in arguments and bool(chances) and not chances[0]
