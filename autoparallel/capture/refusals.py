"""What a traced graph cannot be a program with: refused before it is rewritten, with the line of the model."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoparallel._torch import free_unbacked_symbols
from autoparallel.capture.data_access import explain_new_memory
from autoparallel.graph.captured import CaptureError
from autoparallel.graph.lines import line_of
from autoparallel.passes.settle_memory import STRIDED, relative_start
from autoparallel.rules import operator_name
from autoparallel.rules.calls import is_tensor


def require_static(graph: fx.Graph, numbers: Collection[str] = ()) -> None:
    """Refuses sizes and numbers that are known only when the program runs; what is only checked is left out.

    Args:
        numbers: the placeholders of numbers that the call is given: what is computed of them is no size.
    """
    given: set[Any] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, _READ) and any(map(is_tensor, node.all_input_nodes)):
            if [x.name in numbers for x in node.all_input_nodes] == [True]:
                given |= free_unbacked_symbols(value)
            elif _is_only_checked(node):
                given |= free_unbacked_symbols(value)
                _LOGGER.warning(
                    "the program leaves out a check of values, which eager makes at every call, at %s", line_of(node)
                )
        unknown = [free_unbacked_symbols(v) for v in pytree.tree_leaves(value)]
        if any(symbols - (set() if isinstance(value, torch.Tensor) else given) for symbols in unknown):
            if operator_name(node.target) in ("aten._local_scalar_dense", "aten.item"):
                what, advice = "a tensor's value is read into Python", "keep it a tensor (no .item())"
            else:
                what, advice = "a size depends on a tensor's values", "use torch.where or masks, of a fixed size"
            raise CaptureError(
                f"{what} at {line_of(node)}\nWhat to change: {advice}, or compute it outside of the model and "
                "pass it in."
            )


def _is_only_checked(node: fx.Node) -> bool:
    """Whether a value that is read into Python ends in assertions (``torch._check``)."""
    return bool(node.users) and all(
        user.target in _CHECKS or user.op == "call_function" and not is_tensor(user) and _is_only_checked(user)
        for user in node.users
    )


_READ = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LOGGER = logging.getLogger("autoparallel")
_CHECKS = (torch.ops.aten._assert_scalar.default,)


def require_same_memory(graph: fx.Graph) -> None:
    """Refuses ``x.set_(y)``, which a functional graph would take for the use of another tensor."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == "aten::set_":
            raise CaptureError(explain_new_memory("x.set_(...)", line_of(node)))


def require_positions(graph: fx.Graph) -> None:
    """Refuses what reads or writes through strides of which nobody can say which elements they name."""
    for node in graph.nodes:
        if node.target in STRIDED and relative_start(node) is None:
            raise CaptureError(
                f"the model reads or writes through strides (as_strided) of a tensor that does not lie in one piece in "
                f"memory, at {line_of(node)}\nWhat to change: slice, index, unfold() or diagonal() it, or make it "
                "contiguous() before."
            )


def explain_failure(error: Exception, model: nn.Module) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    package = __file__.rpartition("/capture/")[0]
    own = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith((f"{package}/", "<"))]
    if own:
        where = f'"{own[-1].filename}", line {own[-1].lineno}, in {own[-1].name}: {own[-1].line}'
    else:
        code = type(model).forward.__code__
        where = f'"{code.co_filename}", line {code.co_firstlineno}, in forward'
    text = str(error).strip()
    kind = type(error).__name__
    depends = "DataDependent" in kind or "data-dependent" in text or "Could not guard" in text
    if depends and any(_loops_over_experts(m) for m in model.modules()):
        advice = (
            "the experts are looped over one by one, as the tokens need them: make the model with "
            "experts_implementation='grouped_mm' (or 'batched_mm')"
        )
    elif depends:
        advice = (
            "Python control flow or a size depends on a tensor's values: use torch.where or masks, or compute it "
            "outside of the model and pass it in"
        )
    elif kind == "UnsupportedOperatorException" and _draws(text):
        advice = "torch cannot trace this random operator: draw outside of the model, and pass the numbers in"
    elif kind == "SyntaxError" and "proxy_tensor" in text:
        advice = "torch cannot trace x.random_(low, high): write torch.randint(low, high, x.shape)"
    elif ".item()" in text or "scalar" in text:
        advice = "a tensor's value is read into Python: keep it a tensor"
    elif "functorch tensor" in text:
        advice = (
            "write the derivative out, or put it into an autograd.Function: not all that torch.func does inside of "
            "a model can be traced"
        )
    elif "Constraints violated" in text or "specialized" in text:
        advice = "the batch size is fixed somewhere in the model: use x.shape[0] instead of a number"
    else:
        advice = "the model must run under torch.export(strict=False) with a symbolic batch"
    first = text.splitlines()[0] if text else ""
    return f"{type(model).__name__} cannot be captured at {where}\n{kind}: {first}\nWhat to change: {advice}."


def _draws(text: str) -> bool:
    """Whether a text begins with the name of an operator that torch tags as random."""
    names = text.split()[0].split(".")
    target: Any = torch.ops
    for name in names:
        target = getattr(target, name, None)
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _loops_over_experts(module: nn.Module) -> bool:
    """Whether it is a model of transformers in whose experts Python asks which of them have tokens."""
    return getattr(getattr(module, "config", None), "_experts_implementation", "") == "eager"


def explain_mutation(target: str, node: fx.Node, model: nn.Module) -> str:
    if target.startswith("model."):
        return (
            f"the model changes its parameter {target.removeprefix('model.')} in place at {line_of(node)}\n"
            "What to change: only the optimizer may change a parameter; keep other state in a buffer."
        )
    kind, _, name = target.partition("_")
    names = list(inspect.signature(model.forward).parameters)
    if kind == "args" and name.isdigit() and int(name) < len(names):
        name = names[int(name)]
    return (
        f"the model changes its input {name or target} in place at {line_of(node)}\n"
        "What to change: work on a copy (x = x.clone())."
    )
