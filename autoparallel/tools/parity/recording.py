"""What every node of a graph computes, and the gradients that reach it: a graph run node by node."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autoparallel.graph.captured import Captured
from autoparallel.graph.leaves import leaf_value
from autoparallel.graph.plain_tensors import tensor_at
from autoparallel.operators import RandomState, draw_from
from autoparallel.rules.calls import is_tensor
from autoparallel.tools.parity.task import Batch, Task
from autoparallel.tools.parity.training import loss_of, tensors_of

Use = tuple[fx.Node, int]
"""A call, and the position of one of its tensor operands."""


@dataclass
class Recording:
    """What happened at the nodes of a graph.

    Attributes:
        values: each node's result.
        gradients: what reaches each result from all who read it.
        uses: what each call gives back to each of its operands.
    """

    values: dict[fx.Node, Tensor] = field(default_factory=dict)
    gradients: dict[fx.Node, Tensor] = field(default_factory=dict)
    uses: dict[Use, Tensor] = field(default_factory=dict)


class _Recorder(fx.Interpreter):
    """Runs a graph and records it."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.recording = Recording()

    def run_node(self, n: fx.Node) -> Any:
        """The node's value."""
        positions = itertools.count()

        def used_value(x: fx.Node) -> Any:
            return self._use(n, next(positions), self.env[x]) if is_tensor(x) else self.env[x]

        if n.op == "output":
            return fx.map_arg(n.args[0], used_value)
        if n.op != "call_function":
            value = super().run_node(n)
        else:
            args, kwargs = fx.map_arg((n.args, n.kwargs), used_value)
            value = self.call_function(n.target, args, kwargs)
        if isinstance(value, Tensor):
            self.recording.values[n] = value.detach().clone()
            if value.requires_grad:
                value.register_hook(lambda grad: _keep(self.recording.gradients, n, grad))
        return value

    def _use(self, n: fx.Node, position: int, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        value = value.view_as(value)  # a gradient of its own for every use
        value.register_hook(lambda grad: _keep(self.recording.uses, (n, position), grad))
        return value


def _keep(table: dict[Any, Tensor], key: Any, grad: Tensor | None) -> None:
    if grad is not None:  # a custom Function may give None for what is differentiable
        table[key] = grad.detach().clone()


def arguments_of(captured: Captured, task: Task, batch: Batch) -> dict[str, Any]:
    """The value of every placeholder; parameters and inputs are leaves of their own."""
    values: dict[str, Any] = dict(captured.constants)
    for name, path in captured.parameters.items():
        parameter = task.model.get_parameter(path)
        values[name] = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    for name, path in captured.buffers.items():
        values[name] = tensor_at(task.model, path).detach().clone()
    for at, leaf in zip(captured.inputs, pytree.tree_leaves((batch.args, batch.kwargs)), strict=True):
        if at is not None:
            values[at] = leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
    return values


def run_recorded(
    captured: Captured, arguments: Mapping[str, Any], task: Task, random: RandomState
) -> tuple[Recording, list[tuple[str, Tensor]]]:
    """Runs a graph and its backward; returns what happened, and its outputs by name."""
    recorder = _Recorder(captured.module)
    names = [n.name for n in recorder.graph.nodes if n.op == "placeholder"]
    with torch.enable_grad(), draw_from(random):
        results: Any = recorder.run(*(arguments[name] for name in names))
        leaves = [leaf_value(leaf, results, captured.actual) for leaf in captured.outputs]
        outputs = list(tensors_of(pytree.tree_unflatten(leaves, captured.output_spec)))
        loss, _ = loss_of(outputs, task)
        if loss is not None:
            loss.backward()
    return recorder.recording, outputs
