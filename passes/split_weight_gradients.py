"""Parts the backward of a stage into the gradients of its inputs and those of its parameters.

A call that reads both a parameter and an activation becomes one that hands only the activation's gradient on, and
leaves the parameter's for later: zero-bubble schedules (Qi et al. 2023) fill their gaps with those.

A layer that runs again in the backward does so once, when the gradients of its inputs are asked for, and computes those
of its parameters with them.

Before:
    linear = aten.linear(x, w)
After:
    linear = Deferring(aten.linear, [1])(x, w)   backward: the gradient of x; that of w by ``Deferred.run``
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel.comm.current import Current
from autoparallel.operators.opaque import has_own_backward
from autoparallel.rules.calls import ancestors, is_tensor, tensor_operands


class Deferred:
    """The gradients of parameters that one call has left for later.

    Attributes:
        output: the call's result, with a graph of its own.
        activations: what it read that is differentiated now, as the call read it.
        weights: what it read that follows from parameters alone: as the caller has it, and as the call read it.
    """

    def __init__(
        self,
        output: torch.Tensor,
        activations: Sequence[torch.Tensor],
        weights: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.output: torch.Tensor | None = output
        self.activations, self.weights = activations, weights
        self._grad: torch.Tensor | None = None

    def give(self, grad: torch.Tensor) -> list[torch.Tensor | None]:
        """Notes the gradient of the result; returns those of the activations."""
        assert self.output is not None
        self._grad = grad if self._grad is None else self._grad + grad
        activations, self.activations = self.activations, ()
        wanted = [x for x in activations if x.requires_grad]
        grads: Sequence[torch.Tensor | None] = ()
        if wanted:
            grads = torch.autograd.grad(self.output, wanted, grad, retain_graph=True, allow_unused=True)
        computed = iter(grads)
        return [next(computed) if x.requires_grad else None for x in activations]

    def run(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The weights with their gradients; nothing where no gradient has reached the call."""
        output, self.output = self.output, None
        if self._grad is None or output is None:
            return []
        used = [inner for _, inner in self.weights]
        grads = torch.autograd.grad(output, used, self._grad, allow_unused=True)
        return [(outer, g) for (outer, _), g in zip(self.weights, grads, strict=True) if g is not None]


_COLLECTED: Current[list[Deferred] | None] = Current(None)


def collect_deferred(deferred: list[Deferred]) -> AbstractContextManager[Any]:
    """Inside, what calls leave for later goes into a list."""
    return _COLLECTED.using(deferred)


class _Deferring(torch.autograd.Function):
    """Hands the gradient of a call's activations on; keeps that of its result for the parameters.

    Beside the activations it reads an anchor, through which a gradient reaches it where none of them has one.
    """

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, anchor: torch.Tensor | None, *activations: torch.Tensor) -> torch.Tensor:
        assert deferred.output is not None
        ctx.deferred = deferred
        ctx.set_materialize_grads(False)
        return deferred.output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        deferred, ctx.deferred = ctx.deferred, None
        if grads[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *deferred.give(grads[0])


class Deferring:
    """Calls a function, and leaves the gradients of some of what it reads for later.

    It is the target of a node, whose arguments are the function's: a function among arguments is no Python when a graph
    is written as such.

    Attributes:
        target: the function.
        weights: the numbers of those tensors, among the tensors that it reads.
    """

    def __init__(self, target: Any, weights: Sequence[int]) -> None:
        self.target, self.weights = target, tuple(weights)
        name = getattr(target, "__name__", "call").replace(".", "_")
        self.__name__ = "_".join(["deferring", name, *map(str, weights)])  # what a program's text shows of it

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        collected = _COLLECTED.value
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        trained = [tensors[n] for n in self.weights if leaves[tensors[n]].requires_grad]
        if collected is None or not torch.is_grad_enabled() or not trained:
            return self.target(*args, **kwargs)
        inner = list(leaves)
        for i in tensors:
            inner[i] = leaves[i].detach().requires_grad_(leaves[i].requires_grad)
        inner_args, inner_kwargs = pytree.tree_unflatten(inner, spec)
        output = self.target(*inner_args, **inner_kwargs)
        others = [i for i in tensors if i not in trained]
        deferred = Deferred(output, [inner[i] for i in others], [(leaves[i], inner[i]) for i in trained])
        collected.append(deferred)
        activations = [leaves[i] for i in others]
        anchor = None
        if not any(x.requires_grad for x in activations):  # the first layer: nothing but parameters is differentiated
            anchor = torch.zeros((), device=output.device, requires_grad=True)
        return _Deferring.apply(deferred, anchor, *activations)


def split_weight_gradients(module: fx.GraphModule, parameters: Sequence[str]) -> None:
    """Rewrites ``module`` in place.

    Args:
        parameters: the placeholders that are parameters as they are used.
    """
    graph = module.graph
    named = set(parameters)
    together = _read_by_regions(graph, named)
    alone: set[fx.Node] = set()  # what follows from trained parameters and nothing that is differentiated beside
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if node.name in named and node.meta.get("differentiable"):
                alone.add(node)
            continue
        if node.op == "call_module" and "region" in node.meta:
            continue
        if node.op == "call_module" or (node.op == "call_function" and "bucket" in node.meta):
            alone.add(node)  # gathered per use
            continue
        if node.op != "call_function" or not node.meta.get("differentiable") or not is_tensor(node):
            continue
        if alone.isdisjoint(node.all_input_nodes):
            continue
        others = [x for x in node.all_input_nodes if x not in alone]
        if not any(is_tensor(x) or x.meta.get("differentiable") for x in others):
            if node not in together:  # else its backward runs once only, for all of its readers
                alone.add(node)
            continue
        if has_own_backward(node.target):  # the user's backward runs once, for all of its operands
            continue
        weights = [i for i, x in enumerate(tensor_operands(node)) if x in alone]
        node.target = Deferring(node.target, weights)


def _read_by_regions(graph: fx.Graph, parameters: Collection[str]) -> set[fx.Node]:
    """What follows from parameters alone and is read by layers that run again, or by what they read of it."""
    follows: set[fx.Node] = set()
    for node in graph.nodes:
        gathered = node.op == "call_module" and "region" not in node.meta
        computed = node.op == "call_function" and node.all_input_nodes and follows.issuperset(node.all_input_nodes)
        if gathered or computed or node.op == "placeholder" and node.name in parameters:
            follows.add(node)
    read = follows.intersection(x for node in graph.nodes if "region" in node.meta for x in node.all_input_nodes)
    return set(ancestors(graph, read))
