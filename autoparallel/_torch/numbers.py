"""Numbers that a trace leaves open: functions of them, those that torch has and two that it lacks, and what computes
expressions of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch._export.verifier import Verifier
from torch.fx.experimental import sym_node
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._sympy.functions import OpaqueUnaryFn_exp, OpaqueUnaryFn_log
from torch.utils._sympy.printers import PythonPrinter


def exp(x: Any) -> Any:
    """As ``math.exp``."""
    return _apply("_sym_exp", x) if isinstance(x, torch.SymInt | torch.SymFloat) else math.exp(x)


def log(x: Any) -> Any:
    """As ``math.log`` of one number."""
    return _apply("_sym_log", x) if isinstance(x, torch.SymInt | torch.SymFloat) else math.log(x)


def _apply(method: str, x: Any) -> Any:
    return sym_node.wrap_node(getattr(torch.sym_float(x).node, method)())


def _add(function: Callable[[Any], Any], expression: Any) -> None:
    """Adds a function to those of torch's numbers."""
    method = f"sym_{function.__name__}"
    sym_node.METHOD_TO_OPERATOR[method] = function
    sym_node.unary_methods.add(method)
    sym_node.always_float_magic_methods.add(method)
    sym_node._make_node_magic(method, expression)


_add(exp, OpaqueUnaryFn_exp)
_add(log, OpaqueUnaryFn_log)

FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "sqrt": torch.sym_sqrt,
    "exp": exp,
    "log": log,
    **{
        name: getattr(torch, f"_sym_{name}")
        for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
    },
}
"""What a graph calls of such numbers, by the names in ``math``."""


class _Functions(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return instance in FUNCTIONS.values()


class _Function(metaclass=_Functions):
    """The kind of these functions."""


ALLOWED: tuple[Any, str, Any] = (
    Verifier, "allowed_op_types", lambda _: (torch._ops.OpOverload, torch._ops.HigherOrderOperator, _Function)
)  # fmt: skip
"""What has exported programs call all of them, where torch allows the root alone."""


def condition(relation: sympy.Basic, holds: bool) -> sympy.Basic:
    """What is true where a relation of numbers holds, or does not; of a number, where it is another than 0."""
    relation = relation if isinstance(relation, sympy.logic.boolalg.Boolean) else sympy.Ne(relation, 0)
    return relation if holds else sympy.Not(relation)


_NAMES = {**SYMPY_INTERP, "OpaqueUnaryFn_exp": math.exp, "OpaqueUnaryFn_log": math.log}


@functools.cache
def evaluator(expression: sympy.Basic) -> Callable[[Mapping[Any, float]], float]:
    """What computes an expression of sizes and numbers by Python, from what its symbols are: sympy takes a hundred
    times as long."""
    symbols = tuple(expression.free_symbols)
    text = f"lambda {', '.join(map(str, symbols))}: {PythonPrinter().doprint(expression)}"
    function = eval(text, dict(_NAMES))  # of torch's own printer, for its own names
    return lambda values: function(*map(values.__getitem__, symbols))
