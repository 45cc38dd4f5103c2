"""Numbers that a program returns as tensors: how many rows values select, and those that two ways return at one place
(``return not n > 0``, ``self.bad = 0`` on one way and ``self.bad += 1`` on the other), of which one call can choose
(see ``ways``).

The answer True:
    return (h, 0, clone)
The answer False:
    add = operator.add(sym_size, 1);  return (h, add, clone)
As tensors:
    full = aten.full([], 0, dtype=torch.int64);  return (h, full, clone)
    add = operator.add(sym_size, 1);  full = aten.full([], add, dtype=torch.int64);  return (h, full, clone)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
)

from autoparallel._torch.export import is_read
from autoparallel.capture.functional.way_graphs import calls_behind, last_result, read_outputs
from autoparallel.graph.leaves import TYPES
from autoparallel.graph.lines import marks_of
from autoparallel.passes.emitter import Emitter

_DTYPES: dict[type, torch.dtype] = {float: torch.float64, int: torch.int64, bool: torch.bool}
_ARGUMENTS: dict[type, Any] = {float: SymFloatArgument, int: SymIntArgument, bool: SymBoolArgument}


def make_tensors(programs: Sequence[ExportedProgram]) -> None:
    """Makes tensors of the numbers that programs return at one place, where which one it is shows when a way is taken:
    of the type of Python's that all have there, or pairs of values and types (see ``graph.leaves.Number``)."""
    for rows in zip(*(read_outputs(program)[1][:-1] for program in programs), strict=False):
        types = [type(None) if _is_none(*row) else type_of(*row) for row in rows]
        kinds = [kind for kind in types if kind is not None]
        shown = {_shown(value) for _, value in rows}
        if len(kinds) < len(types) or len(shown) == 1 and None not in shown:
            continue
        mixed = len({*kinds}) > 1 or any(map(_is_pair, (value for _, value in rows)))
        for program, kind, (spec, value) in zip(programs, kinds, rows, strict=True):
            if mixed and not _is_pair(value):
                _return(program, spec, _insert_pair(program, value, kind), float)
            elif _shown(value) is not None:
                _return(program, spec, _insert_number(program, value, _DTYPES[kind]), kind)


def _return(program: ExportedProgram, spec: OutputSpec, tensor: fx.Node, kind: type) -> None:
    """Returns a tensor for a number."""
    values: list[Any] = list(program.graph.output_node().args[0])
    values[program.graph_signature.output_specs.index(spec)] = tensor
    spec.arg = _ARGUMENTS[kind](tensor.name)
    program.graph.output_node().args = (tuple(values),)


def _is_none(spec: OutputSpec, value: Any) -> bool:
    return isinstance(spec.arg, ConstantArgument) and value is None


def _is_pair(value: Any) -> bool:
    """Whether what is returned for a number is its value and its type."""
    return isinstance(value, fx.Node) and isinstance(x := value.meta["val"], torch.Tensor) and x.ndim > 0


def _insert_pair(program: ExportedProgram, number: Any, kind: type) -> fx.Node:
    """A number's value and its type."""
    dtype = torch.float64
    if _shown(number) is not None:
        tensor = _insert_number(program, 0.0 if number is None else number, dtype)
    else:
        tensor = Emitter(number.next).cast(number, dtype)
    emit = Emitter(tensor.next)
    place = emit(torch.ops.aten.full.default, [], float(TYPES.index(kind)), dtype=dtype)
    pair = emit(torch.ops.aten.stack.default, [tensor, place])
    for node in (tensor, place, pair):
        node.meta |= marks_of(last_result(program))
    return pair


def make_tensors_of_counts(program: ExportedProgram, numbers: Collection[sympy.Symbol]) -> None:
    """Makes tensors of the numbers that a program returns and that follow from how many rows values select.

    Args:
        numbers: the symbols of those that a call is given.
    """
    values: Any = program.graph.output_node().args[0]
    for spec, value in zip(program.graph_signature.output_specs, values, strict=True):
        kind = type_of(spec, value)
        if kind and isinstance(value, fx.Node) and _shown(value) is not None and is_read(value.meta["val"], numbers):
            tensor = Emitter(value.next)(torch.ops.aten.full.default, [], value, dtype=_DTYPES[kind])
            tensor.meta |= marks_of(value)
            _return(program, spec, tensor, kind)


def _insert_number(program: ExportedProgram, number: Any, dtype: torch.dtype) -> fx.Node:
    """A tensor of a number that is made as early in a way as it can be: what follows may be what the other way does."""
    question = last_result(program)
    calls = calls_behind(question)
    emit = Emitter((number if number in calls else question).next)
    tensor = emit(torch.ops.aten.full.default, [], number, dtype=dtype)
    tensor.meta |= marks_of(question)
    return tensor


def type_of(spec: OutputSpec, value: Any) -> type | None:
    """The type of a number that a program returns; None for what is no number."""
    if isinstance(spec.arg, ConstantArgument):
        return type(value) if type(value) in _DTYPES else None
    return next((kind for kind, argument in _ARGUMENTS.items() if isinstance(spec.arg, argument)), None)


def _shown(value: Any) -> str | None:
    """What tells apart numbers that are no tensors; None of a tensor."""
    example = value.meta["val"] if isinstance(value, fx.Node) else value
    return None if isinstance(example, torch.Tensor) else repr(example)
