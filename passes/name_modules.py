"""Names in a profile the modules whose operators a program runs.

Ranges nest as modules do, but for those that only list others.  It is done to a copy, for calls that are profiled.

Before (nodes of the modules "layers.0.up" and "layers.0.down"):
    linear = aten.linear(x, w0);  linear_1 = aten.linear(linear, w1)
After:
    begin = ranges.begin('layers.0');  begin_1 = ranges.begin('layers.0.up');  linear = aten.linear(x, w0)
    end = ranges.end(begin_1);  begin_2 = ranges.begin('layers.0.down');  linear_1 = aten.linear(linear, w1)
    end_1 = ranges.end(begin_2);  end_2 = ranges.end(begin)
"""

from __future__ import annotations

from torch import fx

from autoparallel.comm import ranges
from autoparallel.graph.captured import copy_graph
from autoparallel.graph.layers import paths_around


def name_modules(module: fx.GraphModule) -> fx.GraphModule:
    """A copy that names its modules; it has the same submodules."""
    graph = copy_graph(module.graph)
    open_ranges: list[tuple[str, fx.Node]] = []

    def move_to(levels: list[str], before: fx.Node) -> None:
        """Ends the ranges that do not go on, and begins those that are new."""
        shared = 0
        for (name, _), level in zip(open_ranges, levels, strict=False):
            if name != level:
                break
            shared += 1
        with graph.inserting_before(before):
            while len(open_ranges) > shared:
                graph.call_function(ranges.end, (open_ranges.pop()[1],))
            for level in levels[shared:]:
                open_ranges.append((level, graph.call_function(ranges.begin, (level,))))

    for node in list(graph.nodes):
        if node.op == "output":
            move_to([], node)
        elif node.op == "call_function" and "module" in node.meta:
            move_to(_levels(node.meta["module"]), node)
    graph.lint()
    return fx.GraphModule(module, graph)


def _levels(path: str) -> list[str]:
    """A module's path and those of the modules around it, without such as only list others."""
    paths = paths_around(path)
    return [p for p, inner in zip(paths, [*paths[1:], ""], strict=False) if not inner.rpartition(".")[2].isdigit()]
