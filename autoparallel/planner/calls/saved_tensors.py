"""What the backward finds of what a graph computes: autograd is asked, by running each kind of call once without data.

A view has no memory of its own: what is saved of it is what it looks at.  What a call saves beside its operands and its
result (a mask, a softmax inside of a loss) counts with the largest of these, and is cut as that is.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoparallel import _torch
from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of
from autoparallel.hardware import Profile
from autoparallel.passes.raise_row_views import find_heads
from autoparallel.planner.calls.signatures import Signatures
from autoparallel.predict.unseen import call_without_data, is_unseen, stand_in
from autoparallel.rules import operator_name
from autoparallel.rules.calls import is_tensor, may_have_gradient


@dataclass(frozen=True)
class SavedByCall:
    """What one kind of call saves.

    Attributes:
        viewed: the operand that its result is a view of; None for memory of its own.
        operands: those that are saved, by number.
        result: whether its result is.
        beside: bytes that are saved beside these, for each byte of the largest of them.
        largest: the operand that this is; None for the result.
    """

    viewed: int | None
    operands: tuple[int, ...]
    result: bool
    beside: float
    largest: int | None


@dataclass(frozen=True)
class SavedTensors:
    """What the backward finds of the nodes of a graph.

    Attributes:
        parts: bytes of each node, for each byte of its result; without those of which it finds none.
        read: the nodes that a reader saves, as it reads them; and whether nobody else keeps them as they are made.
    """

    parts: Mapping[fx.Node, float]
    read: Mapping[fx.Node, bool]


def saved_tensors_of(graph: fx.Graph, size: Signatures, profile: Profile, loss_chunks: int = 1) -> SavedTensors:
    """What the backward finds of each node.

    Args:
        profile: whose kernels run.
        loss_chunks: into how many chunks of rows the loss is cut; what is made in chunks never exists whole.
    """
    saved_by_kind: dict[Hashable, SavedByCall] = {}
    owners: dict[fx.Node, fx.Node] = {}
    saved_nodes: set[fx.Node] = set()
    read: dict[fx.Node, set[fx.Node | None]] = {}  # of each that is saved: as what; None is what makes it itself
    beside: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        operands = size.operands(node)
        if node.target is operator.getitem or not node.meta.get("backward"):
            owners[node] = node
            continue
        key = size.call(node), *[tuple(map(str, x.meta["val"].stride())) for x in operands]
        if key not in saved_by_kind:
            saved_by_kind[key] = _run(node, operands, size, profile)
        saved = saved_by_kind[key]
        owners[node] = node if saved.viewed is None else owners.get(operands[saved.viewed], operands[saved.viewed])
        for x, by in [*((operands[i], operands[i]) for i in saved.operands), *([(node, None)] if saved.result else [])]:
            owner = owners.get(x, x)
            saved_nodes.add(owner)
            read.setdefault(owner, set()).add(by)
        if saved.beside:
            largest = node if saved.largest is None else operands[saved.largest]
            beside[largest] = beside.get(largest, 0.0) + saved.beside
    heads = find_heads(graph) if loss_chunks > 1 else ()
    chunked = {node for head in heads for node in (head.product, *head.between)}
    left = (saved_nodes | beside.keys()) - chunked
    parts = {node: float(node in saved_nodes) + beside.get(node, 0.0) for node in graph.nodes if node in left}
    # Logits are the largest tensor of a step, and alive as they are made when the worst moment may be: at the loss.
    logits = {head.product for head in find_heads(graph, alone=False)} - chunked
    parts |= {node: max(1.0, parts.get(node, 0.0)) for node in logits}
    alone = {x: ways == {x} for owner, ways in read.items() if owner in left for x in ways if x is not None}
    return SavedTensors(parts, alone)


def _run(node: fx.Node, operands: list[fx.Node], size: Signatures, profile: Profile) -> SavedByCall:
    """Runs a call on tensors without data, of the sizes of the whole batch."""
    values: dict[fx.Node, Any] = {}

    def value(x: fx.Node) -> Any:
        if x not in values:
            val: Any = x.meta.get("val")
            if is_tensor(x):
                strides = [size(stride) for stride in val.stride()]
                tensor = torch.empty_strided(size.shape(x), strides, dtype=val.dtype, device="meta")
                flows = bool(x.meta["differentiable"]) and may_have_gradient(val)
                values[x] = tensor.requires_grad_(flows)
            elif isinstance(val, int | torch.SymInt) and _is_known(val, size):
                values[x] = size(val)
            elif isinstance(val, torch.SymInt | torch.SymFloat):
                values[x] = val.node.pytype(1)  # a number that a call brings, which is no size
            else:  # several tensors, or what is made of sizes for a call
                values[x] = _call(x, *fx.map_arg((x.args, x.kwargs), value), size, profile)
        return values[x]

    saved: dict[int, Any] = {}  # storages, which stay alive here, by id

    def note(x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        saved[id(storage)] = storage

    arguments = fx.map_arg((node.args, node.kwargs), value)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda _: torch.empty(0)):
            results = _torch.tensors.tensors_in(_call(node, *arguments, size, profile))
    except NotImplementedError as error:
        what = f"{operator_name(node.target)} cannot run on tensors without data, as planning does to see what is kept,"
        raise refusal(what, line_of(node), "write it with other operators or in a torch.autograd.Function") from error
    places = {id(values[x].untyped_storage()): i for i, x in reversed(list(enumerate(operands)))}
    storages = [id(x.untyped_storage()) for x in results]
    beside = sum(storage.nbytes() for i, storage in saved.items() if i not in places and i not in storages)
    sizes = {None: sum(x.nbytes for x in results)} | {i: values[x].nbytes for i, x in enumerate(operands)}
    largest = max(sizes, key=lambda i: sizes[i])
    viewed = [places[i] for i in storages if i in places]
    return SavedByCall(
        viewed[0] if viewed and is_tensor(node) else None,
        tuple(sorted(places[i] for i in saved if i in places)),
        any(i in saved and i not in places for i in storages),
        beside / max(1, sizes[largest]),
        largest,
    )


def _is_known(value: Any, size: Signatures) -> bool:
    return isinstance(value, int) or value.node.expr.free_symbols <= size.actual.keys()


def _call(node: fx.Node, args: Any, kwargs: Any, size: Signatures, profile: Profile) -> Any:
    if is_unseen(node):
        return stand_in(node, args, kwargs, lambda traced: tuple(size(s) for s in traced.shape))
    return call_without_data(node.target, args, kwargs, profile)
