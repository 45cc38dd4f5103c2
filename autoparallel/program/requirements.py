"""What a graph must be so that it can be run in stages and microbatches."""

from __future__ import annotations

from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.calls import batch_dim
from autoparallel.graph.captured import Captured
from autoparallel.graph.lines import line_of
from autoparallel.operators.opaque import first_hook


def require_stageable(captured: Captured, outputs: str, microbatches: int, differentiated: bool) -> None:
    """Refuses what no cuts and no schedule could run.

    Args:
        outputs: as ``compile()`` takes it.
        microbatches: how many there are; one can be of any loss.
        differentiated: whether the call is made in training mode, with gradients.

    Raises:
        PlanError: naming what to change.
    """
    if differentiated:
        _require_loss(captured)
        if microbatches > 1 and (problem := why_whole(captured, outputs)):
            raise PlanError(problem)


_ONE_MICROBATCH = "use one microbatch, which takes a mesh without an axis 'pp'"


def kept_outputs(captured: Captured, outputs: str) -> list[int]:
    """The model's outputs that a pipeline keeps, with what the loss weighs, by their number among the results."""
    first = len(captured.mutated)
    every = captured.objective is None or outputs == "gather"
    numbers = [i for i in range(first, len(captured.results)) if i not in captured.left_out]
    return [i for i in numbers if every or i in (captured.objective, *captured.weight.outputs)]


def _require_loss(captured: Captured) -> None:
    """Refuses a call in training that returns several scalars of which nobody knows which is the loss."""
    if captured.objective is None and captured.weight.kind == "unknown":
        raise PlanError(
            f"{captured.weight.reason}, but a pipeline must know its loss, which is all that it "
            'differentiates: pass loss_fn to compile(), return the loss under the name "loss" (the key of a dict, the '
            "field of a named tuple), or detach the others in the model"
        )


def why_whole(captured: Captured, outputs: str) -> str:
    """Why microbatches would not make what the batch does, and what to change; empty where they would.

    Batch norms take the statistics of a microbatch, as is said in the documentation.
    """
    if problem := captured.weight.problem:
        return (
            f"the losses of microbatches cannot be put together: {problem}. Pass a loss_fn that returns (sum, "
            f"count), each a sum over rows, to compile(), or {_ONE_MICROBATCH}"
        )
    if (hook := first_hook(captured.graph)) is not None:
        return (
            f"a hook is given the gradient of each microbatch, not of the batch ({line_of(hook)}): use an "
            f"autograd.Function in its place, which is taken to work row by row, or {_ONE_MICROBATCH}"
        )
    for i in {*kept_outputs(captured, outputs)} - {captured.objective, *captured.weight.outputs}:
        key = captured.results[i].meta["key"]
        if batch_dim(captured, i) < 0:
            return (
                f"an output of the model ({key}) has no batch dim, so that those of microbatches cannot be put "
                "together: return it per row, or leave it out (outputs='auto' beside a loss)"
            )
        if i in captured.mixed:
            return (
                f"an output of the model ({key}) is not what microbatches make: {captured.mixed[i]}. Compute it of "
                "what the model returns, or leave it out (outputs='auto' beside a loss)"
            )
    for i, path in enumerate(captured.mutated):
        if path in captured.changed_parameters:
            return (
                f"microbatches would change the parameter {path} once each, at {line_of(captured.results[i])}. Change "
                f"it in the loop, under torch.no_grad(); or {_ONE_MICROBATCH}"
            )
        if i in captured.mixed:
            return (
                f"microbatches would change the buffer {path} otherwise than the batch does: {captured.mixed[i]}. Let "
                f"it count calls, add up sums over rows, or change it outside of the model; or {_ONE_MICROBATCH}"
            )
    return ""
