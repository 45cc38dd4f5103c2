"""Python that reads a tensor's numbers: what it is told (see ``inputs_read``)."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoparallel import _torch
from autoparallel.capture.tracing.stand_ins import replacement
from autoparallel.capture.tracing.trace import Trace, listening, refuse
from autoparallel.graph.arrays import array_of
from autoparallel.graph.errors import note_raised


def _read(
    trace: Trace,
    func: Callable[..., Any],
    x: Tensor,
    *args: Any,
    instead: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """What Python is told that reads a tensor's values.

    Args:
        instead: called where it is told none, in the function's place.
    """
    answer = trace.read(lambda values: func(values, *args, **kwargs), x)
    if answer is not None:
        return answer
    x = _torch.export.as_traced(x)
    try:
        return (instead or func)(x, *args, **kwargs)
    except Exception as error:
        note_raised(error)
        raise


def _read_list(trace: Trace, func: Callable[..., Any], x: Tensor) -> Any:
    """What ``tolist()`` gives of a tensor around the model; of others, theirs is asked (see ``NAMES``)."""
    return _read(trace, func, x, instead=lambda traced: traced.tolist())


def _read_array(trace: Trace, func: Callable[..., Any], x: Tensor, *, force: bool = False) -> Any:
    """The array of a tensor's values, or what stands for it where Python is not told them."""
    return _read(trace, func, x, instead=partial(array_of, func), force=force)


def _export(_: Trace, func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Refuses to hand the memory of a tensor around the model to another library."""
    if _torch.export.is_real(x):
        raise refuse("another library is given a tensor's memory", "read its values by x.numpy() or x.tolist()")
    return func(x, *args, **kwargs)


def _note_length(trace: Trace, func: Callable[..., Any], input: Tensor, dim: int = 0) -> Any:
    """Notes that Python asks how long a tensor is, or goes through it, which is an ``unbind``, where values say so."""
    trace.reads_values |= -input.ndim <= dim < input.ndim and _torch.export.is_read(input.shape[dim])
    return func(input) if func is Tensor.__len__ else func(input, dim)


def _list(trace: Trace, tolist: Callable[[Tensor], Any], self: Tensor) -> Any:
    """Stands for a method of torch's own classes that no ``TorchFunctionMode`` sees."""
    answer = trace.read(Tensor.tolist, self)
    return tolist(self) if answer is None else answer


def _compare(sign: str, trace: Trace, compares: Callable[[Any, Any], Any], self: torch.SymFloat, other: Any) -> Any:
    """Compares numbers that are not one and the same, of which a trace says what holds but for NaN."""
    by_torch = sys._getframe(2).f_code.co_filename.startswith(_torch.export.FOLDER)
    if not by_torch and _is_same(self, other) and _torch.export.is_read(self, trace.numbers):
        raise refuse(f"the model asks whether a number that it reads of a tensor is NaN (n {sign} n)", _OF_NAN)
    return compares(self, other)


def _is_same(x: torch.SymFloat, other: Any) -> bool:
    return other is x or isinstance(other, torch.SymFloat) and bool(other.node.expr == x.node.expr)


def _compare_answers(
    holds: bool, trace: Trace, compares: Callable[[Any, Any], Any], self: torch.SymBool, other: Any
) -> Any:
    """A comparison of answers, which torch has for those of sizes only.

    Args:
        holds: what it is of equal ones.
    """
    if not isinstance(other, torch.SymBool | bool):
        return compares(self, other)
    if not any(_torch.export.is_read(answer, trace.numbers) for answer in (self, other)):
        return compares(self, other)
    if isinstance(other, bool):
        return self if other == holds else torch.sym_not(self)
    either, both = self | other, self & other
    return both | torch.sym_not(either) if holds else either & torch.sym_not(both)


def _computes(kind: type, name: str) -> Callable[[Any, Any], Any]:
    """What stands for arithmetic of numbers: an answer among them is 1 or 0, of which torch fixes which one.

    Args:
        name: of the method, which begins with an r where the second number is that on the left.
    """
    original: Any = vars(kind).get(f"__{name}__")

    def method(self: Any, other: Any) -> Any:
        trace, numbers = listening(), (other, self) if name[0] == "r" else (self, other)
        answers = [x for x in numbers if isinstance(x, torch.SymBool)]
        if trace is not None and answers and any(_torch.export.is_read(x, trace.numbers) for x in answers):
            x, y = (torch.sym_ite(n, 1, 0) if isinstance(n, torch.SymBool) else n for n in numbers)
            return getattr(operator, name.removeprefix("r"))(x, y)
        return NotImplemented if original is None else original(self, other)

    return method


_OF_NAN = "ask the tensor, if x.isnan().any(): ..., or look at the loss in the loop"

_OF_NUMBERS = Tensor.__array__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__
READS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_OF_NUMBERS, _read),
    Tensor.__dlpack__: _export,
    Tensor.numpy: _read_array,
    Tensor.tolist: _read_list,
    **dict.fromkeys((Tensor.__len__, Tensor.unbind, torch.unbind), _note_length),
}  # fmt: skip
"""The functions that read values, or tell which they are, with what takes their place while a model is traced."""

NAMES: tuple[tuple[Any, str, Any], ...] = (
    *(replacement(cls, "tolist", _list) for cls in _torch.export.TRACED),
    *(
        replacement(torch.SymFloat, name, partial(_compare, sign))
        for name, sign in (("__ne__", "!="), ("__eq__", "=="), ("__le__", "<="), ("__ge__", ">="))
    ),
    *(
        (kind, f"__{name}__", _computes(kind, name))
        for kind in _torch.numbers.KINDS
        for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")
    ),
    replacement(torch.SymBool, "__eq__", partial(_compare_answers, True)),
    replacement(torch.SymBool, "__ne__", partial(_compare_answers, False)),
)
"""What has no door but its name."""
