"""Control flow on values, each as one call: ``torch.cond``, ``while_loop``, ``scan``, ``map`` and ``associative_scan``,
Python's own ``if``, and what is made of as many rows as values select.

A trace holds such a call with the graphs that it may run.  In a program it is a call of plain Python around these
graphs, which autograd differentiates as it would any other.  It runs on whole tensors, because nothing tells how what
its graphs do may be cut.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

Body = Callable[..., Any]


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _has_values(x: Any) -> bool:
    """Whether a value is more than a shape: a prediction runs programs on tensors without values."""
    return not isinstance(x, Tensor) or not (x.is_meta or hasattr(x, "fake_mode"))


def _holds(predicate: Any) -> bool:
    """Whether a condition holds; without values the first way is taken."""
    return bool(predicate) if _has_values(predicate) else True


class _Zeros(torch.autograd.Function):
    """Hands a result through, and zeros as the gradients of what it might have been made of."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *grads, *(torch.zeros_like(x) if x.requires_grad else None for x in ctx.saved_tensors)


def _cond(predicate: Any, true: Body, false: Body, operands: Sequence[Any]) -> list[Any]:
    results = _as_list((true if _holds(predicate) else false)(*operands))
    flowing = [x for x in operands if isinstance(x, Tensor) and x.requires_grad]
    # What only the other way reads gets a gradient of zero, as in eager, and not none.
    return [_Zeros.apply(x, *flowing) if flowing and x.is_floating_point() else x for x in results]


def _if_else(predicate: Any, true: Body, false: Body, operands: Sequence[Any]) -> list[Any]:
    """As Python does: what the other way alone reads gets no gradient."""
    return _as_list((true if _holds(predicate) else false)(*operands))


def _while_loop(condition: Body, body: Body, carried: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    values = list(carried)
    while _holds(_as_list(condition(*values, *more))[0]):
        values = _as_list(body(*values, *more))
        if not all(map(_has_values, values)):
            break
    return values


def _scan(combine: Body, init: Sequence[Any], xs: Sequence[Tensor], more: Sequence[Any] = ()) -> list[Any]:
    carry, outputs = list(init), []
    for row in zip(*(x.unbind(0) for x in xs), strict=True):
        results = _as_list(combine(*carry, *row, *more))
        carry = results[: len(init)]
        outputs.append(results[len(init) :])
    return [*carry, *(torch.stack(rows) for rows in zip(*outputs, strict=True))]


def _associative_scan(combine: Body, xs: Sequence[Tensor], more: Sequence[Any] = ()) -> list[Any]:
    first, *rows = zip(*(x.unbind(0) for x in xs), strict=True)
    outputs = [list(first)]
    for row in rows:
        outputs.append(_as_list(combine(*outputs[-1], *row, *more)))
    return [torch.stack(parts) for parts in zip(*outputs, strict=True)]


def _map(body: Body, xs: Sequence[Tensor], more: Sequence[Any] = ()) -> list[Any]:
    return _scan(body, (), xs, more)


def _selection(body: Body, operands: Sequence[Any]) -> list[Any]:
    return _as_list(body(*operands))


def require_sizes(x: Tensor, sizes: Sequence[int], line: str) -> Tensor:
    """A tensor that is made of as many rows as values select, if these are as many as the rest of a model needs.

    Raises:
        RuntimeError: otherwise, on all ranks alike.
    """
    if _has_values(x) and tuple(x.shape) != tuple(sizes):
        raise RuntimeError(
            f"a tensor's values select the sizes {[*x.shape]} at {line}, where the model goes on with {[*sizes]}\n"
            "What to change: select as many rows as that; one row that stands for all is rows.sum(0) or rows.mean(0)"
        )
    return x


IF_ELSE, SELECTION = "if_else", "selection"

RUNS: dict[str, Callable[..., list[Any]]] = {
    IF_ELSE: _if_else, SELECTION: _selection, "cond": _cond, "while_loop": _while_loop, "scan": _scan,
    "associative_scan": _associative_scan, "map_impl": _map,
}  # fmt: skip
"""What each of torch's higher-order operators does, by its name; ``if_else`` and ``selection`` are none of torch's (see
``capture.functional.ways`` and ``selections``)."""


def control_operator(name: str, arguments: Sequence[Any], alone: bool = False) -> tuple[Callable[..., Any], list[Any]]:
    """The operator that makes one such call, which prints under its name, and the arguments it is called with:
    all but the graphs.

    Args:
        alone: whether its only result is what it gives, and not the one item of a tuple.
    """
    graphs = [x for x in arguments if isinstance(x, fx.GraphModule)]
    places = [isinstance(x, fx.GraphModule) for x in arguments]
    return _operator(name, places, alone, graphs), [x for x, graph in zip(arguments, places, strict=True) if not graph]


def _operator(name: str, places: Sequence[bool], alone: bool, graphs: Sequence[fx.GraphModule]) -> Callable[..., Any]:
    """The operator whose arguments at some places are graphs."""

    def call(*rest: Any) -> Any:
        inner, outer = iter(graphs), iter(rest)
        results = tuple(RUNS[name](*(next(inner) if graph else next(outer) for graph in places)))
        return results[0] if alone else results

    call.__name__ = call.__qualname__ = name
    call.__module__ = __name__
    call.graphs = graphs  # type: ignore[attr-defined]
    call.of_graphs = functools.partial(_operator, name, places, alone)  # type: ignore[attr-defined]
    return call


def is_selection(target: Any) -> bool:
    """Whether an operator runs on as many rows as values select."""
    return bool(inner_graphs(target)) and target.__name__ == SELECTION


def goes_by_values(target: Any) -> bool:
    """Whether an operator is Python's own ``if``, or runs on as many rows as values select."""
    return is_selection(target) or bool(inner_graphs(target)) and target.__name__ == IF_ELSE


def kind_of(target: Any) -> Hashable:
    """What an operator does: of one that runs graphs its name and theirs, but for the names in them, else itself."""
    graphs = inner_graphs(target)
    return (target.__name__, *map(calls_of, graphs)) if graphs else target


def calls_of(module: fx.GraphModule) -> tuple[Hashable, ...]:
    """The calls of a graph, each with its arguments and the places of what it reads, without names."""
    places = {node: i for i, node in enumerate(module.graph.nodes)}
    calls: list[Hashable] = []
    for node in module.graph.nodes:
        arguments, reads = take_apart(node.args, node.kwargs)
        calls.append((what_of(node, module), arguments, *map(places.__getitem__, reads)))
    return tuple(calls)


def what_of(node: fx.Node, module: fx.GraphModule) -> Hashable:
    """What a node of a module's graph does, but for its arguments and without names."""
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(module)
        return calls_of(value) if isinstance(value, fx.GraphModule) else id(value)
    return kind_of(node.target) if node.op == "call_function" else node.op


def take_apart(args: Any, kwargs: Any) -> tuple[str, list[fx.Node]]:
    """The arguments of a call without what it reads; and what it reads, one after another, some perhaps twice."""
    reads: list[fx.Node] = []

    def note(x: fx.Node) -> str:
        reads.append(x)
        return "_"

    return repr(fx.map_arg((args, kwargs), note)), reads


def create_on(node: fx.Node, device: torch.device) -> None:
    """Has a call create its tensors on a device, those included that graphs create which it runs."""
    if node.op == "call_function":
        target = on_device(node.target, device)
        if target is not node.target:
            node.target = target
        if any(isinstance(x, torch.device) for x in (*node.args, *node.kwargs.values())):
            node.args = tuple([device if isinstance(x, torch.device) else x for x in node.args])
            node.kwargs = {k: device if isinstance(x, torch.device) else x for k, x in node.kwargs.items()}


def on_device(target: Any, device: torch.device) -> Any:
    """The operator whose graphs create their tensors on a device; itself where it runs none."""
    return _move(target, device) if inner_graphs(target) else target


@functools.lru_cache(maxsize=256)
def _move(target: Any, device: torch.device) -> Any:
    return target.of_graphs([_copy_on(module, device) for module in inner_graphs(target)])


def _copy_on(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    module = copy.deepcopy(module)
    for node in module.graph.nodes:
        create_on(node, device)
    module.recompile()
    return module


def inner_graphs(target: Any) -> Sequence[fx.GraphModule]:
    """The graphs that an operator may run; its ``of_graphs`` makes the same operator of others."""
    graphs: Sequence[fx.GraphModule] = getattr(target, "graphs", ())
    return graphs
