"""Checks the redistributions in two halves that ``overlap_collectives`` has written; changes nothing.

By then layers that run again are graphs of their own, so each graph is checked by itself, against the specification and
what is noted of the layouts in it, which ``verify_placements`` has checked before.  What has been started is finished
once, behind where it was started, as the same redistribution; nothing else reads what is on its way.  Gradients that
are computed late are those of one linear layer, which reads what was finished behind them.
"""

from __future__ import annotations

import torch
from torch import fx

from autoparallel.comm.in_flight import finish_redistribution, start_redistribution
from autoparallel.operators.late import late_linear, late_parameters
from autoparallel.passes.specification import Operand, Specification
from autoparallel.passes.verify_placements import PlacementError, check_redistribution, name_of
from autoparallel.placements import Layout, count_pieces

_PARTS = {finish_redistribution: 0, late_parameters: 0, late_linear: 3}
"""The calls that read what another call has left for them alone, and as which of their arguments."""


def verify_halves(module: fx.GraphModule, specification: Specification) -> None:
    """Raises ``PlacementError`` at the first node that is not what it must be.

    Args:
        module: the program, with the graphs that it calls.
        specification: what it must be.
    """
    for each in module.modules():
        if isinstance(each, fx.GraphModule):
            _Verifier(specification).walk(each.graph)


class _Verifier:
    """One walk through a graph.

    Attributes:
        started: what has been started and not yet finished: the layouts from which and to which it leads.
        finished: by what was started.
        late: the parameters whose gradients are computed late, of which the layer has not come yet.
    """

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self.started: dict[fx.Node, tuple[Layout, Layout]] = {}
        self.finished: dict[fx.Node, fx.Node] = {}
        self.late: set[fx.Node] = set()

    def walk(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            own = node.args[_PARTS[node.target]] if node.target in _PARTS else None
            for x in node.all_input_nodes:
                if x.target in (start_redistribution, late_parameters) and x is not own:
                    raise PlacementError(f"{_name(node)} reads {_name(x)}, which is no tensor and not left for it")
            if node.target is start_redistribution:
                self._start(node)
            elif node.target is finish_redistribution:
                self._finish(node)
            elif node.target is late_parameters:
                self._delay(node)
            elif node.target is late_linear:
                self._compute(node)
        for node in (*self.started, *self.late):
            raise PlacementError(f"{_name(node)} is begun, and never finished in its graph")

    def _start(self, node: fx.Node) -> None:
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.meta.get("placements") is None:
            raise PlacementError(f"{_name(node)} redistributes what has no layout")
        before = source.meta["placements"]
        after = check_redistribution(node, before, self.specification)
        key = f"{_origin(source)}->{','.join(map(str, after))}/start"
        if node.meta["key"] != key:
            raise PlacementError(f"{_name(node)} starts what {key} would be")
        self.started[node] = before, after

    def _finish(self, node: fx.Node) -> None:
        start, *spec = node.args
        if not isinstance(start, fx.Node) or start not in self.started:
            raise PlacementError(f"{_name(node)} finishes {start}, which is not begun before it, or finished already")
        before, after = self.started.pop(start)
        if spec != [*start.args[1:]] or check_redistribution(node, before, self.specification) != after:
            raise PlacementError(f"{_name(node)} finishes as {spec} what was started as {list(start.args[1:])}")
        if start.meta["key"] != f"{node.meta['key']}/start":
            raise PlacementError(f"{_name(node)} finishes what {_name(start)} has started")
        if node.meta["placements"] != after:
            raise PlacementError(f"{_name(node)} becomes {after}; it is said to lie as {node.meta['placements']}")
        self.finished[start] = node

    def _delay(self, node: fx.Node) -> None:
        start, _, _, dim, times = node.args
        if not isinstance(start, fx.Node) or start not in self.started:
            raise PlacementError(
                f"{_name(node)} must stand between {start}, being the start of what is read, and its end"
            )
        before, after = self.started[start]
        assert isinstance(dim, int) and isinstance(times, int)
        sizes = self.specification.axis_sizes
        for each in {dim, *(p.dim for p in (*before, *after) if p.kind == "S")}:
            old, new = (count_pieces(layout, each, sizes) for layout in (before, after))
            if old != new * (times if each == dim else 1):
                raise PlacementError(
                    f"{_name(node)}: dim {each} of {_name(start)} goes from {old} pieces to {new}; told is that dim "
                    f"{dim} becomes {times} times as long"
                )
        self.late.add(node)

    def _compute(self, node: fx.Node) -> None:
        x, weight, bias, late = node.args
        if not isinstance(late, fx.Node) or late not in self.late:
            raise PlacementError(f"{_name(node)} leaves gradients to {late}, which is of no layer, or of another one")
        self.late.remove(late)
        if late.args[1] is not weight or late.args[2] is not bias:
            raise PlacementError(f"{_name(node)} reads {weight} and {bias}; late are {late.args[1]} and {late.args[2]}")
        start = late.args[0]
        assert isinstance(start, fx.Node)
        if x is not self.finished.get(start):
            raise PlacementError(f"{_name(node)} reads {x}; its gradients wait for that of {_name(start)}")
        assert isinstance(x, fx.Node)
        origin = self.specification.calls.get(node.meta["key"])
        expected = self.specification.expected(origin) if origin is not None else None
        if expected is None or expected.target is not torch.ops.aten.linear.default:
            raise PlacementError(f"{_name(node)} is no linear layer of the model")
        read = expected.args[0]
        assert isinstance(read, Operand)
        if (_origin(x), x.meta["placements"]) != (read.node.meta["key"], read.layout):
            raise PlacementError(f"{_name(node)} reads {_name(x)} where its rule gives it {read.node} as {read.layout}")


def _origin(node: fx.Node) -> str:
    """The key of the call of the model whose result a node holds in some layout."""
    return str(node.meta["key"]).partition("->")[0]


def _name(node: fx.Node) -> str:
    return name_of(node) if "key" in node.meta else f"{node.name} of {node.meta.get('module', 'the model')}"
