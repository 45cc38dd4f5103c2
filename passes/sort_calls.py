"""Puts the calls of a captured graph into an order, and under names, that follow from what reads what alone.

Python goes through a set of strings in another order in each process (``for kind in set(config.layer_types)``), so that
ranks trace the same calls one after the other otherwise.  Each call comes as soon as all that it reads is there, in the
order in which the results ask for it.

Before, where another rank has both calls of ``cos`` the other way round:
    cos = aten.cos(b_local)
    cos_1 = aten.cos(b_full)
    mul = aten.mul(x, cos_1)
    mul_1 = aten.mul(mul, cos)
After:
    cos = aten.cos(b_full)
    mul = aten.mul(x, cos)
    cos_1 = aten.cos(b_local)
    mul_1 = aten.mul(mul, cos_1)
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoparallel import _torch
from autoparallel.graph.captured import Captured
from autoparallel.graph.layers import find_runs
from autoparallel.passes.name_nodes import name_nodes


def sort_calls(captured: Captured) -> Captured:
    """The capture with its graph in that order; its buffers are changed in the order of their names."""
    graph, output, changed = captured.graph, captured.graph.output_node(), captured.mutated
    order = [*sorted(range(len(changed)), key=changed.__getitem__), *range(len(changed), len(captured.results))]
    output.args = (tuple([captured.results[i] for i in order]),)
    for node in _as_read(graph):
        output.prepend(node)
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    _torch.export.name_anew(graph, calls)
    for node in calls:
        node.meta.pop("key", None)
    name_nodes(graph)
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    return replace(
        captured,
        parameters={name: captured.parameters[name] for name in names if name in captured.parameters},
        buffers={name: captured.buffers[name] for name in names if name in captured.buffers},
        constants={name: captured.constants[name] for name in names if name in captured.constants},
        mutated=[changed[i] for i in order[: len(changed)]],
        mixed={place: captured.mixed[i] for place, i in enumerate(order) if i in captured.mixed},
        runs=find_runs(graph),
    )


def _as_read(graph: fx.Graph) -> list[fx.Node]:
    """The nodes but for the output, as the results ask for them; what nothing reads comes last."""
    ordered = dict.fromkeys(sorted(graph.find_nodes(op="placeholder"), key=lambda node: node.name))
    for result in (graph.output_node(), *graph.nodes):
        ways = [result]
        while ways:
            node = ways[-1]
            missing = next((x for x in node.all_input_nodes if x not in ordered), None)
            if missing is not None:
                ways.append(missing)
            else:
                ordered[ways.pop()] = None
    return [node for node in ordered if node.op != "output"]
