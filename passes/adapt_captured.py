"""What is done to a captured graph before programs are made of it; it is a captured graph still.

A plan may use a vocabulary with padding, and a pipeline differentiates nothing but its loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoparallel.graph.captured import Captured
from autoparallel.passes.mark_gradients import Detached, detach_outputs, mark_backward
from autoparallel.passes.pad_vocabulary import pad_vocabulary
from autoparallel.passes.runner import CAPTURED, Fact, Pass, PassList, Watch, ignore, run_passes

MARK_BACKWARD = Pass(
    "mark_backward",
    lambda module, findings: mark_backward(module.graph),
    requires={Fact.DIFFERENTIABLE, Fact.DETACHED},
    provides={Fact.BACKWARD},
)
"""Says which calls the backward reaches, once it is known which outputs are differentiated."""


def padding_passes(parameters: Mapping[str, str], rows: Mapping[str, int]) -> PassList:
    """What makes of a captured graph the one that a plan is about; it is a captured graph still.

    Args:
        parameters: placeholder name to parameter name.
        rows: parameter name to the rows that it is used with.
    """
    pad = Pass(
        "pad_vocabulary",
        lambda module, findings: pad_vocabulary(module, parameters, rows),
        requires={Fact.CANONICAL, Fact.DIFFERENTIABLE, Fact.NAMED, Fact.BACKWARD, Fact.GLOBAL},
    )
    return PassList([pad], given=CAPTURED, promised=CAPTURED)


def leaving_passes(buffers: int, loss: int) -> PassList:
    """What leaves a captured graph nothing but its loss to be differentiated.

    Args:
        buffers: the number of outputs that are new values of buffers.
        loss: the index of the loss.
    """
    passes = [
        Pass(
            "detach_outputs",
            lambda module, findings: detach_outputs(module.graph, buffers, loss),
            requires={Fact.NAMED, Fact.DIFFERENTIABLE, Fact.GLOBAL},
            provides={Fact.DETACHED},
            removes={Fact.BACKWARD},
        ),
        MARK_BACKWARD,
    ]
    return PassList(passes, given=CAPTURED, promised=CAPTURED)


def pad(captured: Captured, rows: Mapping[str, int], watch: Watch = ignore) -> None:
    """Makes a captured graph the one that a plan is about, in place; one that is so already is left as it is."""
    if rows:
        run_passes(padding_passes(captured.parameters, rows), captured.module, watch)


def leave_only_loss(captured: Captured) -> None:
    """Detaches what a pipeline does not differentiate: everything but its loss."""
    loss = captured.objective
    if loss is not None and captured.flowing != [loss]:
        findings = run_passes(leaving_passes(len(captured.mutated_buffers), loss), captured.module)
        captured.detached = [*captured.detached, *findings[Detached].outputs]
        captured.flowing = [loss]


__all__ = ["MARK_BACKWARD", "leave_only_loss", "leaving_passes", "pad", "padding_passes"]
