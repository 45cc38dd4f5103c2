"""``torch.autograd.grad`` inside of forward: forces, gradient penalties, the inner steps of meta-learning.

[Note: derivatives inside] A trace shows the operators of the forward, and not those that autograd runs.  So the trace
notes one call, ``autoparallel::derivative``, which ``passes.write_derivatives`` replaces by what autograd would run.
Which of the inputs have a gradient, torch itself tells: it differentiates the tensors of the trace, without a trace.
What it makes of them is what the results follow from for whoever differentiates these once more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from autoparallel import _torch
from autoparallel.capture.tracing.trace import Trace, refuse
from autoparallel.graph.lines import line_of_frame
from autoparallel.operators.opaque import CALL
from autoparallel.passes.write_derivatives import INSTEAD_OF_GRADIENTS


class _Follow(torch.autograd.Function):
    """A tensor of the trace, whose gradient is that of what autograd has computed in its place."""

    @staticmethod
    def forward(ctx: Any, noted: Tensor, computed: Tensor) -> Tensor:
        ctx.mark_dirty(noted)  # no view, which could not be changed in place
        return noted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient


def differentiate(
    trace: Trace,
    func: Any,
    outputs: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    grad_outputs: Sequence[Tensor | None] | Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """Stands for ``torch.autograd.grad`` (see [Note: derivatives inside])."""
    if _torch.transforms.is_transforming():
        raise refuse(
            "torch.autograd.grad is called inside of torch.func.jvp, jacfwd or vmap",
            "use torch.func.grad, vjp or jacrev, which become parts of the program, also inside of vmap; for many "
            "vectors, call torch.autograd.grad(..., is_grads_batched=True) outside of vmap",
        )
    if _calls_functions(trace):  # from whose results autograd does not get to what they are made of
        raise refuse(
            "a gradient is taken in a model that has an autograd.Function, or backward hooks of modules,",
            INSTEAD_OF_GRADIENTS,
        )
    if any(map(trace.attributes.has_hooks, inputs)):  # which see, and change, this gradient, too
        raise refuse(
            "a gradient is taken with respect to a parameter or an input that has a hook, or keeps its gradient "
            "(retain_grad),",
            "differentiate with respect to a copy (w = w.clone()), of which everything behind it is computed; or leave "
            "out the hook (register_post_accumulate_grad_hook registers one that does not see it)",
        )
    if isinstance(grad_outputs, Tensor):
        grad_outputs = (grad_outputs,)
    gradients = grad_outputs or [None] * len(outputs)
    if is_grads_batched:
        again = partial(differentiate, trace, func, create_graph=create_graph, materialize_grads=True)
        return _differentiate_rows(again, outputs, inputs, cast(Sequence[Tensor], gradients))
    if not any(hasattr(x, "fake_mode") for x in outputs):  # what has nothing to do with the call
        return func(outputs, inputs, grad_outputs, retain_graph, create_graph, allow_unused=allow_unused)
    unused = materialize_grads or allow_unused
    compute = partial(func, outputs, inputs, gradients, retain_graph=True, create_graph=True, allow_unused=unused)
    with torch.enable_grad():
        computed = trace.run_silently(compute, outputs)
    trace.differentiates = line_of_frame(sys._getframe(1))
    seeds = [ones_for(x) if g is None else g for x, g in zip(outputs, gradients, strict=True)]
    places = [i for i, x in enumerate(computed) if x is not None]
    follows = create_graph and any(computed[i].requires_grad for i in places)
    noted = torch.ops.autoparallel.derivative(outputs, [inputs[i] for i in places], seeds, follows)
    results: list[Tensor | None] = [torch.zeros_like(x) if materialize_grads else None for x in inputs]
    for i, x in zip(places, noted, strict=True):
        results[i] = _follow(x, computed[i]) if follows and computed[i].requires_grad else x.detach() if follows else x
    return tuple(results)


def _differentiate_rows(
    differentiate: Callable[..., Sequence[Tensor | None]],
    outputs: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    gradients: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Differentiates once for each place in the first dim of the gradients, which the results have, too."""
    count = len(gradients[0])
    if count > _MOST_ROWS:
        raise refuse(
            f"derivatives are taken in {count} directions",
            f"take no more than {_MOST_ROWS}: products with vectors (torch.func.vjp), or those of fewer outputs",
        )
    rows = [differentiate(outputs, inputs, [g[i] for g in gradients]) for i in range(count)]
    return tuple([torch.stack(cast(Any, parts)) for parts in zip(*rows, strict=True)])


_MOST_ROWS = 256
"""Each is a derivative of its own in the program."""


def ones_for(output: Tensor) -> Tensor:
    """The gradients of scalars by themselves, which depend on no row."""
    return torch.ones(output.shape, dtype=output.dtype, device=output.device)


def _calls_functions(trace: Trace) -> bool:
    """Whether a trace has met a call that only stands for what it computes; its table may have others' calls."""
    graph = _torch.export.graph_of_trace()
    return bool(trace.calls) and (graph is None or bool(graph.find_nodes(op="call_function", target=CALL)))


def _follow(noted: Tensor, computed: Tensor) -> Tensor:
    with _torch.export.unwatched(), torch.enable_grad():  # in whatever mode it is taken
        return cast(Tensor, _torch.autograd.apply_of(_Follow)(noted, computed))
