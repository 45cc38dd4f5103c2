"""Questions whether any row is selected, of which it makes no difference what the answer is where there is none.

``if mask.any():``, ``if places.numel() == 0: continue``: a call that puts nothing anywhere is as good as none.  So a
part of the batch may be asked about its own rows.

For:
    any_1 = aten.any(mask);  if_else = if_else(any_1, (out, x, mask, weight))
        index = aten.index(x, [mask]);  linear = aten.linear(index, weight);  return aten.index_put(out, [mask], linear)
        return out
the answers are any_1, whose mask has no truths where it is False.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autoparallel.operators.control_flow import goes_by_values
from autoparallel.rules.calls import CASTS, MASKS, arguments, is_tensor
from autoparallel.rules.flat_calls import INTO_ALONG, FlatCall, MixedRows, either

aten = torch.ops.aten

_COUNTS = (aten.sum.default, aten.any.default)
_COMPARES = (
    aten.eq.Scalar, aten.ne.Scalar, aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar,
)  # fmt: skip
_ASKS = (
    *CASTS, *_COMPARES, aten.detach.default, aten.clone.default, aten.logical_not.default, aten.bitwise_not.default,
    aten.mul.Tensor,
)  # fmt: skip
_MOVES = (
    *CASTS, aten.select.int, aten.squeeze.dim, aten.squeeze.dims, aten.reshape.default, aten.view.default,
    aten.flatten.using_ints, aten.unsqueeze.default,
)  # fmt: skip


def answers_about_rows(graph: fx.Graph) -> set[fx.Node]:
    """The answers of which it makes no difference what they are for no rows, and what they are made of."""
    flat_calls: dict[fx.Node, FlatCall | None] = {}
    for node in graph.nodes:
        if goes_by_values(node.target):
            try:
                flat_calls[node] = FlatCall(node) if is_tensor(node) else None
            except MixedRows:
                flat_calls[node] = None
    answers: set[fx.Node] = set()
    for predicate in {x for flat in flat_calls.values() if flat for x in _predicates(flat)}:
        chain = _chain(predicate)
        if chain and all(_agrees(flat_calls.get(user), chain) for user in predicate.users):
            answers |= {*chain}
    return answers


def _predicates(flat: FlatCall) -> set[fx.Node]:
    """The operands by which a call goes one way or the other."""
    inside = {node.args[0] for node in flat.graph.nodes if node.target is either}
    return {x for placeholder, x in flat.operands.items() if placeholder in inside}


def _chain(predicate: fx.Node) -> list[fx.Node]:
    """From a count of a mask, or from whether it has any truths, to an answer about that; empty where it is none."""
    chain = [predicate]
    while chain[0].target not in _COUNTS:
        node = chain[0]
        if node.target not in _ASKS or len(node.all_input_nodes) != 1 or len(node.all_input_nodes[0].users) > 1:
            return []
        chain.insert(0, node.all_input_nodes[0])
    mask: Any = chain[0].args[0]
    numbers = [x for node in chain if node.target in _COMPARES for x in node.args[1:]]
    if mask.meta["val"].dtype not in MASKS or any(x not in (0, 1) for x in numbers):
        return []
    # From two on, all counts compare alike with these numbers.
    return chain if _answer(chain, 0) != _answer(chain, 1) == _answer(chain, 2) else []


def _agrees(flat: FlatCall | None, chain: list[fx.Node]) -> bool:
    """Whether a call goes by an answer between two ways alone that are the same for no rows."""
    if flat is None:
        return False
    (predicate,) = (placeholder for placeholder, x in flat.operands.items() if x is chain[-1])
    for x in predicate.users:
        if x.target is not either or x.args[0] is not predicate:
            return False
        none, some = x.args[1:] if _answer(chain, 0) else x.args[:0:-1]
        while some is not none:
            if not isinstance(some, fx.Node) or flat.key(chain[0].args[0]) not in map(flat.key, _masks_of(some)):
                return False
            some = some.args[0]
    return bool(predicate.users)


def _answer(chain: list[fx.Node], count: int) -> bool:
    """What an answer is where a mask has so many truths."""
    value = torch.tensor(count, dtype=chain[0].meta["val"].dtype)
    for i, node in enumerate(chain[1:]):
        args, kwargs = fx.map_arg((node.args, node.kwargs), {chain[i]: value}.__getitem__)
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    return bool(value)


def _masks_of(put: fx.Node) -> Iterator[fx.Node]:
    """The masks at whose truths a call puts something into its first operand, and nowhere else."""
    places: list[Any] = []
    if put.target is aten.index_put.default:
        places = [x for x in arguments(put)["indices"] if x is not None]
    elif put.target in INTO_ALONG:
        places = [arguments(put)["index"]]
    for x in places:
        if x.meta["val"].dtype in MASKS:
            yield x
        while x.target in _MOVES:
            x = x.args[0]
        if x.target is aten.nonzero.default:
            yield x.args[0]
