"""What a model makes of as many rows as values select, as one call.

``h[mask]``, ``nonzero``, ``masked_select`` and ``unique`` give tensors whose sizes only values tell.  A plan knows no
such sizes: so all that is made of them, up to what has a size again, becomes the graph of one call, which runs on whole
tensors on every rank, as the model does on one.  So does what is sized by numbers that are read of tensors
(``rows.split(counts.tolist())``), where nothing else carries a model.

Before:
    index = aten.index(h, [mask]);  index_1 = aten.index(y, [mask]);  loss = aten.cross_entropy_loss(index, index_1)
After, the three calls inside of the operator:
    selection = autoparallel.operators.control_flow.selection((h, y, mask));  getitem = selection[0]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autoparallel._torch.export import free_unbacked_symbols
from autoparallel.capture.functional.inner_graphs import inner_graph, insert_call, obstacle_in
from autoparallel.capture.functional.row_checks import require_as_many
from autoparallel.capture.functional.row_counts import count_by_masks, unknown_sizes
from autoparallel.capture.functional.sizes import Sizes
from autoparallel.capture.refusals.refusals import KEEP_ALL_ROWS
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.lines import line_of, marks_of
from autoparallel.operators.control_flow import SELECTION, control_operator, goes_by_values, inner_graphs, require_sizes
from autoparallel.passes.emitter import Emitter
from autoparallel.passes.mark_gradients import flows, mark_differentiable, mark_new
from autoparallel.rules.calls import is_tensor, selects_rows, shape_of
from autoparallel.rules.flat_calls import INTO_ALONG
from autoparallel.rules.shapes import expression

aten = torch.ops.aten

_SIZED_AS_FIRST = (*INTO_ALONG, aten.index_put.default, aten.masked_scatter.default)
"""What rows are put into, which has the sizes that it had before."""


def group_selections(program: ExportedProgram, by_numbers: bool = False) -> None:
    """Rewrites a functional trace in place.

    Args:
        by_numbers: whether those calls are grouped, too, that are sized by numbers read of tensors.

    Raises:
        CaptureError: where what no graph of a call can do is made of it.
    """
    graph = program.graph
    symbols = {s for node in graph.nodes if _selects(node) for s in unknown_sizes(node)}
    if by_numbers:
        sized = [node for node in graph.nodes if node.op == "call_function" and _is_sized_by_values(node)]
        symbols |= {s for node in sized for x in (node, *node.all_input_nodes) for s in unknown_sizes(x)}
        symbols -= {s for node in graph.find_nodes(op="placeholder") for s in unknown_sizes(node)}
    if symbols or any(map(selects_rows, graph.nodes)):
        require_as_many(graph)
        count_by_masks(graph)
        inputs = graph.find_nodes(op="placeholder")
        mark_differentiable(graph, {x.name for x in inputs if getattr(x.meta.get("val"), "requires_grad", False)})
        sizes_of = Sizes(program)
        for group in _groups(graph, symbols):
            _replace(group, sizes_of)
            mark_new(graph)  # the next one may read what this has become


def _selects(node: fx.Node) -> bool:
    """Whether a call may give as many rows as values select."""
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()) or goes_by_values(node.target)


def _is_sized_by_values(node: fx.Node) -> bool:
    """Whether a call gives a tensor of which only values tell a size."""
    is_of_tensors = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(node.meta.get("val")))
    return _selects(node) or is_of_tensors and bool(unknown_sizes(node))


@dataclass(eq=False)
class _Group:
    """Calls that become one.

    Attributes:
        inside: the calls by their places in the graph.
    """

    inside: dict[int, fx.Node] = field(default_factory=dict)

    @property
    def calls(self) -> list[fx.Node]:
        """The calls in their order."""
        return [node for _, node in sorted(self.inside.items())]


def _groups(graph: fx.Graph, symbols: set[Any]) -> Iterator[_Group]:
    """The groups of calls with what unknown sizes lead to, each with all that lies between two of its calls."""
    nodes = list(graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    unsized = {node for node in nodes if node.op != "output" and symbols & unknown_sizes(node)}
    group_of: dict[fx.Node, _Group] = {}

    def put(node: fx.Node, group: _Group) -> None:
        other = group_of.get(node)
        members = other.inside if other is not None else {places[node]: node}
        group.inside.update(members)
        group_of.update(dict.fromkeys(members.values(), group))

    for node in nodes:
        read = [x for x in node.all_input_nodes if x in unsized]
        if node in unsized or selects_rows(node) or read and node.op != "output":
            group = _Group()
            for x in (node, *read):
                put(x, group)
            if isinstance(node.meta.get("val"), tuple | list):  # of which others take parts
                unsized.add(node)
    changed = True
    while changed:
        changed = False
        for group in dict.fromkeys(group_of.values()):
            for node in _calls_between(nodes, group):
                put(node, group)
                changed = True
    yield from dict.fromkeys(group_of.values())


def _calls_between(nodes: list[fx.Node], group: _Group) -> list[fx.Node]:
    """The calls outside of a group that read of it and are read by it, perhaps through others."""
    inside = {*group.inside.values()}
    window = nodes[min(group.inside) : max(group.inside) + 1]
    after: set[fx.Node] = set()
    for node in window:
        if any(x in inside or x in after for x in node.all_input_nodes):
            after.add(node)
    before: set[fx.Node] = set()
    for node in reversed(window):
        if any(x in inside or x in before for x in node.users):
            before.add(node)
    return [node for node in window if node in after and node in before and node not in inside]


def _replace(group: _Group, sizes: Sizes) -> None:
    """Puts one call in the place of a group's."""
    calls = group.calls
    for node in calls:
        if obstacle := obstacle_in(node):
            raise _refuse_size(f"{obstacle} runs on it", node)
    inside = {*calls}
    results = [node for node in calls if any(user not in inside for user in node.users)]
    read = dict.fromkeys(x for node in calls for x in node.all_input_nodes if x not in inside)
    last = calls[-1]
    _move_behind(last, calls[0], inside)
    if results:
        expected = [_known_sizes(node, sizes) for node in results]
        read |= dict.fromkeys(size for shape in expected for size in shape or () if isinstance(size, fx.Node))
        operands = [node for node in last.graph.nodes if node in read]
        first = next(node for node in calls if _is_sized_by_values(node))
        inner = inner_graph(calls, results, operands)
        of_rows = [any(x in inside or x.graph is not last.graph for x in _sized_as(node)) for node in results]
        open_sizes = [sizes if of else None for of, sizes in zip(of_rows, expected, strict=True)]
        _require_sizes(inner, open_sizes, operands, line_of(first))
        is_packed = len(results) > 1 and _may_be_packed(results)
        pack = [_pack(inner)] if is_packed else []
        target, arguments = control_operator(SELECTION, [inner, tuple(operands)], len(results) == 1 or is_packed)
        for result, shape in zip(results, expected, strict=True):
            result.meta["val"] = _stand_in_for(result.meta["val"], shape)
        values = pack or [result.meta["val"] for result in results]
        items = insert_call(last, target, arguments, values, marks_of(first))
        if is_packed:
            items = _unpack(items[0], results)
        items = [item if flows(x) else _without_gradient(item) for x, item in zip(results, items, strict=True)]
        for result, item in zip(results, items, strict=True):
            result.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
    for node in reversed(calls):
        node.graph.erase_node(node)


def _sized_as(node: fx.Node) -> Iterator[fx.Node]:
    """What has the sizes of a result before rows are put into it, on each way that is gone by values."""
    while node.target in _SIZED_AS_FIRST:
        node = node.args[0]  # type: ignore[assignment]
    graphs = inner_graphs(node.target) if is_tensor(node) else ()
    for module in graphs:
        operands = dict(zip(module.graph.find_nodes(op="placeholder"), node.args[-1], strict=True))  # type: ignore[arg-type]
        output: Any = module.graph.output_node().args[0]
        for x in _sized_as(output[0]):
            yield from _sized_as(operands[x]) if x in operands else (x,)
    if not graphs:
        yield node


def _may_be_packed(results: list[fx.Node]) -> bool:
    """Whether results, as sums over rows and counts of them are, are numbers that one dtype holds, and what has a
    gradient of one has one of all: else another would have one of zero where nothing is made of it."""
    return all(map(_is_number, results)) and _flow_together(results[0].graph, [x for x in results if flows(x)])


def _flow_together(graph: fx.Graph, results: list[fx.Node]) -> bool:
    """Whether each output is made of all results, or of none, as far as gradients flow."""
    made_of: dict[fx.Node, set[fx.Node]] = {result: {result} for result in results}
    for node in graph.nodes if len(results) > 1 else ():
        if node not in made_of and node.op == "call_function" and flows(node):
            made_of[node] = {result for x in node.all_input_nodes for result in made_of.get(x, ())}
    return all(len(made_of.get(x, ())) in (0, len(results)) for x in graph.output_node().all_input_nodes)


def _is_number(result: fx.Node) -> bool:
    value = result.meta["val"]
    if not is_tensor(result) or value.ndim:
        return False
    counted = result.args[0] if result.target in (aten.sum.default, aten.sum.dim_IntList) else None
    is_count = isinstance(counted, fx.Node) and counted.meta["val"].dtype is torch.bool
    return bool(value.dtype.is_floating_point or is_count)


def _pack(inner: fx.GraphModule) -> torch.Tensor:
    """Has a graph give its results as one tensor, and gives that: rules speak of operators with one."""
    output = inner.graph.output_node()
    results: Any = output.args[0]
    dtypes = {result.meta["val"].dtype for result in results}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
    emit = Emitter(output)
    stacked = emit(aten.stack.default, [emit.cast(result, dtype) for result in results])
    output.args = ((stacked,),)
    inner.recompile()
    return emit.value(stacked)


def _unpack(call: fx.Node, results: Sequence[fx.Node]) -> list[fx.Node]:
    """Inserts what takes each result from the one tensor of a call."""
    emit = Emitter(call.next, like=call)
    return [emit.cast(emit(aten.select.int, call, 0, i), x.meta["val"].dtype) for i, x in enumerate(results)]


def _without_gradient(item: fx.Node) -> fx.Node:
    """Has a result of a call have no gradient, as by itself it has none, whatever the call's others have."""
    if not is_tensor(item):
        return item
    with item.graph.inserting_after(item):
        detached = item.graph.call_function(aten.detach.default, (item,))
    detached.meta = dict(item.meta)
    return detached


def _require_sizes(inner: fx.GraphModule, expected: list[list[Any] | None], operands: list[fx.Node], line: str) -> None:
    """Has a graph require of its results the sizes with which the rest of the model goes on.

    Torch takes the number of rows from what they are used for, where eager takes one row for all of them.

    Args:
        expected: of each result, numbers and those of the operands; None, or none, for one of any sizes.
    """
    (output,) = inner.graph.find_nodes(op="output")
    inside = dict(zip(operands, inner.graph.find_nodes(op="placeholder"), strict=True))
    results = list(output.args[0])
    with inner.graph.inserting_before(output):
        for i, sizes in enumerate(expected):
            if sizes:
                numbers = [inside.get(size, size) for size in sizes]
                results[i] = inner.graph.call_function(require_sizes, (results[i], numbers, line))
                results[i].meta = {"val": output.args[0][i].meta["val"]}
    output.args = (tuple(results),)
    inner.recompile()


def _known_sizes(node: fx.Node, sizes: Sizes) -> list[Any] | None:
    """The sizes of a result: numbers, and nodes that compute them of those of the inputs; None for what is no tensor,
    or of unknown sizes."""
    if not is_tensor(node) or free_unbacked_symbols(node.meta["val"]):
        return None
    return [sizes.of_inputs(expression(size)) for size in shape_of(node)]


def _stand_in_for(value: Any, sizes: list[Any] | None) -> Any:
    """A result as a plan sees it: of known sizes, or of one row for as many as there are, where it leaves the model so.

    Args:
        sizes: numbers, and nodes of them; None where they are not known.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if sizes is not None:
        shape = [size.meta["val"] if isinstance(size, fx.Node) else size for size in sizes]
        has_strides = not any(isinstance(stride, torch.SymInt) for stride in value.stride())
        return value.new_empty_strided(shape, value.stride()) if has_strides else value.new_empty(shape)
    return value.new_empty([1 if free_unbacked_symbols(size) else size for size in value.shape])


def _move_behind(last: fx.Node, first: fx.Node, inside: set[fx.Node]) -> None:
    """Moves what reads of a group, and stands before the last of its calls, behind that."""
    late: dict[fx.Node, None] = {}
    node = first
    while node is not last:
        if node not in inside and any(x in inside or x in late for x in node.all_input_nodes):
            late[node] = None
        node = node.next
    behind = last
    for node in late:
        behind.append(node)
        behind = node


def _refuse_size(why: str, node: fx.Node) -> CaptureError:
    return refusal(f"a size depends on a tensor's values, and {why},", line_of(node), KEEP_ALL_ROWS)
