"""What is done to a captured graph before programs are made of it; it is a captured graph still.

A plan may use a vocabulary with padding or cut its loss into chunks, and a pipeline differentiates only its loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from autoparallel.graph.captured import Captured
from autoparallel.passes.mark_gradients import Detached, detach_outputs, mark_backward, mark_new
from autoparallel.passes.name_nodes import name_nodes
from autoparallel.passes.pad_vocabulary import pad_vocabulary
from autoparallel.passes.raise_row_views import LOSSES, find_heads, raise_row_views
from autoparallel.passes.runner import CAPTURED, Fact, Pass, PassList, Watch, ignore, on_graph, run_passes
from autoparallel.rules.calls import is_tensor

MARK_BACKWARD = Pass(on_graph(mark_backward), requires={Fact.DIFFERENTIABLE, Fact.DETACHED}, provides={Fact.BACKWARD})
"""Says which calls the backward reaches, once it is known which outputs are differentiated."""


def padding_passes(parameters: Mapping[str, str], rows: Mapping[str, int]) -> PassList:
    """What makes of a captured graph the one that a plan is about; it is a captured graph still.

    Args:
        parameters: placeholder name to parameter name.
        rows: parameter name to the rows that it is used with.
    """
    pad = Pass(
        partial(pad_vocabulary, parameters=parameters, padded=rows),
        requires={Fact.CANONICAL, Fact.DIFFERENTIABLE, Fact.NAMED, Fact.BACKWARD, Fact.GLOBAL},
    )
    return PassList([pad], premises=CAPTURED, promised=CAPTURED)


def leaving_passes(buffers: int, loss: int) -> PassList:
    """What leaves a captured graph nothing but its loss to be differentiated.

    Args:
        buffers: the number of outputs that are new values of buffers.
        loss: the index of the loss.
    """
    passes = [
        Pass(
            partial(on_graph(detach_outputs), first=buffers, loss=loss),
            requires={Fact.NAMED, Fact.DIFFERENTIABLE, Fact.GLOBAL},
            provides={Fact.DETACHED},
            removes={Fact.BACKWARD},
        ),
        MARK_BACKWARD,
    ]
    return PassList(passes, premises=CAPTURED, promised=CAPTURED)


def pad(captured: Captured, rows: Mapping[str, int], watch: Watch = ignore) -> None:
    """Makes a captured graph the one that a plan is about, in place; one that is so already is left as it is."""
    if rows:
        run_passes(padding_passes(captured.parameters, rows), captured.module, watch)


def leave_only_loss(captured: Captured) -> None:
    """Detaches what a pipeline does not differentiate: everything but its loss."""
    loss = captured.objective
    if loss is not None and not captured.flows_from_loss_alone:
        findings = run_passes(leaving_passes(len(captured.mutated), loss), captured.module)
        captured.detached = [*captured.detached, *findings[Detached].outputs]
        captured.flowing = [loss]


def leave_out_logits(captured: Captured) -> None:
    """Makes outputs beside the loss no more that are made of its logits, so that those can be cut into chunks."""
    loss = captured.objective
    if loss is None:
        return
    output = captured.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    needed = {*range(len(captured.mutated)), loss, *captured.weight.outputs, *captured.written.values()}
    logits = {x for head in find_heads(captured.graph, alone=False) for x in (head.product, *head.between)}
    for node in captured.graph.nodes:
        if node.target not in LOSSES and is_tensor(node) and logits.intersection(node.all_input_nodes):
            logits.add(node)
    left_out = {i for i, node in enumerate(results) if i not in needed and node in logits}
    if left_out:
        output.args = (tuple(results[loss] if i in left_out else x for i, x in enumerate(results)),)
        captured.graph.eliminate_dead_code()
        raise_row_views(captured.module)
        name_nodes(captured.graph)
        mark_new(captured.graph)
        captured.left_out |= left_out
        captured.flowing = [i for i in captured.flowing if i not in left_out]
        captured.detached = [i for i in captured.detached if i not in left_out]
