"""Which of a model's outputs is the loss, and what it weighs.

The loss is known where ``loss_fn`` has computed the outputs, or where one of them is called "loss": the key of a dict,
the field of a named tuple or a dataclass.  What a user differentiates elsewhere, nobody can know before; where
microbatches are put together, one scalar among the outputs is taken for the loss, and alone is differentiated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel.graph.leaves import Leaf
from autoparallel.graph.losses import NAME, NO_LOSS, LossWeight, explain_ambiguity, is_loss
from autoparallel.passes.mark_gradients import differentiable_outputs
from autoparallel.passes.weigh_loss import weigh_loss


@dataclass(frozen=True)
class Objective:
    """What of a graph can be differentiated.

    Attributes:
        flowing: the indices of the outputs that can be, before any is detached.
        loss: the index of the loss, where it is known.
        alone: the same, where everything beside the loss is to be detached.
        weight: what the loss weighs among microbatches.
    """

    flowing: tuple[int, ...]
    loss: int | None
    alone: int | None
    weight: LossWeight


def find_objective(
    module: fx.GraphModule,
    outputs: Sequence[Leaf],
    spec: pytree.TreeSpec,
    *,
    buffers: int,
    of_loss_fn: bool,
    detach_beside_loss: bool,
    counted: bool,
    inputs: Collection[str],
) -> Objective:
    """Finds the loss, and makes what it weighs an output of ``module`` where that depends on the data.

    Args:
        outputs, spec: as ``Captured`` holds them.
        buffers: the number of outputs that are new values of buffers: the first ones.
        of_loss_fn: whether ``loss_fn`` computed the outputs.
        detach_beside_loss: whether only a known loss is to be differentiated.
        counted: whether the loss function returned its sum and its count.
        inputs: the placeholders that are inputs.
    """
    results: Any = module.graph.output_node().args[0]
    flowing = differentiable_outputs(results, buffers)
    loss = find_loss(outputs, spec, [i for i in flowing if is_loss(results[i])], of_loss_fn)
    alone = loss if detach_beside_loss else None
    weight = weigh_outputs(module, flowing if alone is None else [alone], loss, counted, inputs)
    return Objective(tuple(flowing), loss, alone, weight)


def find_loss(outputs: Sequence[Leaf], spec: pytree.TreeSpec, scalars: Collection[int], of_loss_fn: bool) -> int | None:
    """The index (among the graph's outputs) of the loss, where it is known.

    Args:
        outputs, spec: as ``Captured`` holds them.
        scalars: the scalars that are differentiated.
        of_loss_fn: whether ``loss_fn`` computed them: then the first scalar is the loss where none is called so.
    """
    named = _loss_index(pytree.tree_unflatten([o if isinstance(o, int) else None for o in outputs], spec))
    if named in scalars:
        return named
    return next((o for o in outputs if isinstance(o, int) and o in scalars), None) if of_loss_fn else None


def set_apart(graph: fx.Graph, parameter: fx.Node) -> fx.Node:
    """A parameter that is returned as a result of its own, which is laid out apart from the parameter."""
    with graph.inserting_before(graph.output_node()):
        result = graph.call_function(torch.ops.aten.alias.default, (parameter,))
    result.meta = dict(parameter.meta)
    return result


def weigh_outputs(
    module: fx.GraphModule, flowing: Sequence[int], loss: int | None, counted: bool, inputs: Collection[str]
) -> LossWeight:
    """What the loss weighs, where a scalar output can be differentiated."""
    results: Any = module.graph.output_node().args[0]
    scalars = [i for i in flowing if is_loss(results[i])]
    if len(scalars) > 1:
        several = f"the model returns {len(scalars)} scalars that can be differentiated (detach all but the loss)"
        return LossWeight("unknown", reason=explain_ambiguity(len(scalars)) if loss is None else several)
    return weigh_loss(module, scalars[0], counted, inputs) if scalars else NO_LOSS


def _loss_index(output: Any) -> int | None:
    """What is called "loss" at the top of an output."""
    value = output.get(NAME) if isinstance(output, Mapping) else getattr(output, NAME, None)
    return value if isinstance(value, int) else None
