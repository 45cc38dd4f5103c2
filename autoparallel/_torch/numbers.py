"""Numbers that a trace leaves open: functions of them, those that torch has and those that it lacks, and what computes
expressions of them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._export.verifier import Verifier
from torch.fx.experimental import sym_node
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, statically_known_true
from torch.utils._sympy.functions import OpaqueUnaryFn_exp, OpaqueUnaryFn_log, ToFloat
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis, ValueRanges

KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""The types of such numbers, with those of Python's that they stand for."""

OPEN = tuple(KINDS)
"""The types alone."""


def exp(x: Any) -> Any:
    """As ``math.exp``."""
    return _apply("_sym_exp", x) if isinstance(x, torch.SymInt | torch.SymFloat) else math.exp(x)


def log(x: Any) -> Any:
    """As ``math.log`` of one number."""
    return _apply("_sym_log", x) if isinstance(x, torch.SymInt | torch.SymFloat) else math.log(x)


def is_one(size: Any) -> bool:
    """Whether a size is one in all calls of a trace: it says so itself, or the trace has asked it of an expression."""
    if isinstance(size, int):
        return size == 1
    return not size.node.expr.is_Symbol and statically_known_true(size == 1)


def _apply(method: str, x: Any) -> Any:
    return sym_node.wrap_node(getattr(torch.sym_float(x).node, method)())


def _add(method: str, function: Callable[..., Any], expression: Any) -> None:
    """Adds a function to those of torch's numbers."""
    sym_node.METHOD_TO_OPERATOR[method] = function
    sym_node.always_float_magic_methods.add(method)
    sym_node._make_node_magic(method, expression)


sym_node.unary_methods |= {"sym_exp", "sym_log"}
_add("sym_exp", exp, OpaqueUnaryFn_exp)
_add("sym_log", log, OpaqueUnaryFn_log)


class FloatMod(sympy.Function):
    """The remainder of floats as Python computes it; torch takes it for a whole number."""

    _torch_handler_name = "float_mod"
    is_real = True

    @classmethod
    def eval(cls, x: Any, y: Any) -> Any:
        """What it is of two numbers that are known."""
        return sympy.Float(float(x) % float(y)) if x.is_Number and y.is_Number else None


PythonReferenceAnalysis.float_mod = staticmethod(operator.mod)  # type: ignore[attr-defined]
SymPyValueRangeAnalysis.float_mod = staticmethod(lambda x, y: ValueRanges.unknown())  # type: ignore[attr-defined]
_add("float_mod", operator.mod, FloatMod)


def _mod(self: Any, other: Any) -> Any:
    return self._float_mod(other) if float in (self.pytype, other.pytype) else _OF_WHOLE(self, other)


_OF_WHOLE = sym_node.SymNode._mod  # type: ignore[attr-defined]
sym_node.SymNode._mod = _mod  # type: ignore[attr-defined]


def _add_function(name: str) -> Callable[[Any], Any]:
    """A function of ``math`` that torch's numbers lack."""
    of_python = getattr(math, name)

    def of_any(x: Any) -> Any:
        return _apply(f"_sym_{name}", x) if isinstance(x, torch.SymInt | torch.SymFloat) else of_python(x)

    def evaluate(_: Any, x: Any) -> Any:
        return sympy.Float(of_python(float(x))) if x.is_Number else None

    members = {"eval": classmethod(evaluate), "is_real": True, "_torch_handler_name": f"sym_{name}"}
    expression = type(f"FloatFunction_{name}", (sympy.Function,), members)
    setattr(PythonReferenceAnalysis, f"sym_{name}", staticmethod(of_any))
    setattr(SymPyValueRangeAnalysis, f"sym_{name}", staticmethod(lambda x: ValueRanges.unknown()))
    sym_node.unary_methods.add(f"sym_{name}")
    _add(f"sym_{name}", of_any, expression)
    SYMPY_INTERP[expression.__name__] = of_python
    return of_any


_ADDED = ("log10", "log1p", "expm1", "exp2", "erf", "erfc")

# The names that torch prints, for what it computes guards with.
SYMPY_INTERP.update({"OpaqueUnaryFn_exp": math.exp, "OpaqueUnaryFn_log": math.log, "FloatMod": operator.mod})

FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "sqrt": torch.sym_sqrt,
    "exp": exp,
    "log": log,
    **{
        name: getattr(torch, f"_sym_{name}")
        for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
    },
    **{name: _add_function(name) for name in _ADDED},
}
"""What a graph calls of such numbers, by the names in ``math``."""


class _Functions(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return instance in FUNCTIONS.values()


class _Function(metaclass=_Functions):
    """The kind of these functions."""


_TO_COPY = torch.ops.aten._to_copy.default
_COPY = decomposition_table[_TO_COPY]


def tensor_of(x: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    """The copy of a number, [], as ``vmap`` makes one of the dtype of the scalar that each part computes with it."""
    return NotImplemented if isinstance(x, torch.Tensor) else torch.full((), x, dtype=dtype, device=device)


@functools.wraps(_COPY)  # torch asks for the module of what it finds
def _to_copy(x: Any, **options: Any) -> Any:
    """As torch copies tensors and numbers that are known, and open ones, too."""
    return tensor_of(x, **options) if isinstance(x, torch.SymInt | torch.SymFloat) else _COPY(x, **options)


decomposition_table[_TO_COPY] = _to_copy

ALLOWED: tuple[Any, str, Any] = (
    Verifier, "allowed_op_types", lambda _: (torch._ops.OpOverload, torch._ops.HigherOrderOperator, _Function)
)  # fmt: skip
"""What has exported programs call all of them, where torch allows the root alone."""


def is_whole(number: Any) -> bool:
    """Whether a number is whole whatever the sizes are, be it an int or a float."""
    if isinstance(number, torch.SymFloat):
        return isinstance(number.node.expr, ToFloat)
    return isinstance(number, int | torch.SymInt) or isinstance(number, float) and number.is_integer()


def is_of_floats(relation: sympy.Basic) -> bool:
    """Whether a relation compares other numbers than whole ones."""
    sides = [side for inner in relation.atoms(sympy.core.relational.Relational) for side in inner.args]
    sides = sides if isinstance(relation, sympy.logic.boolalg.Boolean) else [relation]
    return any(side.is_integer is not True for side in sides)


def condition(expression: sympy.Basic, answer: bool | int) -> sympy.Basic:
    """What is true where a relation of numbers holds, or does not; where a number is another than 0, or is it; or where
    it is a whole one."""
    if type(answer) is int:
        return sympy.Eq(expression, answer)
    is_relation = isinstance(expression, sympy.logic.boolalg.Boolean)
    relation = expression if is_relation else sympy.Ne(expression, 0)
    return relation if answer else sympy.Not(relation)


class _Writer(fx.proxy.GraphAppendingTracer):
    """Writes arithmetic of sizes to a graph, with what it is in the trace."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        numbers = fx.map_arg(node.args, lambda x: x.meta["val"])
        node.meta["val"] = node.target(*numbers)  # type: ignore[operator]
        return node


def expression_in(graph: fx.Graph, expression: sympy.Expr, symbols: Mapping[Any, Any]) -> fx.Node:
    """The node that computes an expression of sizes in a graph, where nodes are made.

    Args:
        symbols: the nodes that make them.
    """
    writer = _Writer(graph)
    numbers = {symbol: fx.Proxy(node, writer) for symbol, node in symbols.items()}
    number: Any = sympy_interp(PythonReferenceAnalysis, numbers, expression)
    node: fx.Node = number.node
    return node


@functools.cache
def evaluator(expression: sympy.Basic) -> Callable[[Mapping[Any, float]], float]:
    """What computes an expression of sizes and numbers by Python, from what its symbols are: sympy takes a hundred
    times as long."""
    symbols = tuple(expression.free_symbols)
    text = f"lambda {', '.join(map(str, symbols))}: {PythonPrinter().doprint(expression)}"
    function = eval(text, dict(SYMPY_INTERP))  # of torch's own printer, for its own names
    return lambda values: function(*map(values.__getitem__, symbols))
