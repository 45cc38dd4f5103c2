"""Where the captured graph parts from the plain model.

The plain model runs in eager autograd under a mode that notes every call of torch's functions: its operands, results,
module and line.  The captured graph runs node by node.  Canonical operators are others than the model's, so the two
are not aligned by name but by value: a result is in the graph when some node computes it.  Backwards, a result's
gradient is right when it reaches such a node.

[Note: the first one] A result that is in no node may be one that the capture has rewritten rightly.  So the search
begins at what is wrong for sure, an output or the gradient of a parameter, and goes over results that are off to the
first one whose operands are right, or, backwards, over gradients that are off to the last one whose result's is right.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.graph.captured import Captured
from autoparallel.graph.lines import line_in, noted_line
from autoparallel.graph.python_state import is_tracers_file
from autoparallel.operators import RandomState, plain_randomness
from autoparallel.rules import rule_for
from autoparallel.tools.parity.comparison import difference, distance
from autoparallel.tools.parity.recording import Recording, arguments_of, run_recorded
from autoparallel.tools.parity.report import Deviation
from autoparallel.tools.parity.task import Batch, Task
from autoparallel.tools.parity.training import call, loss_of, module_stack, tensors_of


@dataclass(eq=False)
class Step:
    """A tensor of the plain model's run: a parameter, an input, or the result of a call.

    Attributes:
        tensor, value: the tensor itself, and what it held then.
        module: the path of the module that made it.
        lines: where it was made, the innermost call first.
        name: of a parameter, a buffer or an input.
        operands: what it was made of.
        readers: what was made of it.
        number: how many were there before it.
    """

    tensor: Tensor
    value: Tensor
    module: str
    lines: tuple[str, ...]
    number: int
    name: str = ""
    operands: list[Step] = field(default_factory=list)
    readers: list[Step] = field(default_factory=list)
    version: int = 0

    @property
    def line(self) -> str:
        """The innermost line where it was made; none in a loss that is a function of torch's."""
        return self.lines[0] if self.lines else "the loss function"

    @property
    def gradient(self) -> Tensor | None:
        """What reached it in the backward; None where it carries no gradient."""
        return self.tensor.grad if self.tensor.requires_grad else None


class _Watch(TorchFunctionMode):
    """Notes every call of torch's functions."""

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.stack = module_stack(model)
        self.steps: list[Step] = []
        self.latest: dict[Any, Step] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.add(tensor, name.rpartition(".")[0], (), [], name)
        for i, tensor in enumerate(inputs):
            self.add(tensor, "", (), [], f"input {i}")

    def add(self, tensor: Tensor, module: str, lines: tuple[str, ...], operands: list[Step], name: str = "") -> None:
        """Notes a tensor."""
        value = tensor.detach().clone()
        step = Step(tensor, value, module, lines, len(self.steps), name, operands, version=tensor._version)
        for x in operands:
            x.readers.append(step)
        self.steps.append(step)
        self.latest[id(tensor)] = self.latest[_place(tensor)] = step

    def find(self, tensor: Tensor) -> Step | None:
        """What a tensor is: itself, or an alias of it that autograd has made."""
        return self.latest.get(id(tensor)) or self.latest.get(_place(tensor))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [self.find(x) for x in _torch.tensors.tensors_in((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        steps = list(dict.fromkeys(x for x in operands if x is not None))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and not any(x is s.tensor and x._version == s.version for s in steps):
                self.add(x, self.stack[-1] if self.stack else "", _lines_here(), steps)
        return result


def _place(x: Tensor) -> tuple[Any, ...]:
    if _torch.transforms.is_transformed(x):  # it has no memory of its own
        return (id(x),)
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _lines_here() -> tuple[str, ...]:
    """The lines of the model that run now, and are neither torch's nor ours; the innermost first."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not call.__code__:
        if not is_tracers_file(frame.f_code.co_filename):
            lines.append(line_in(frame))
        frame = frame.f_back
    return tuple(lines)


def capture_deviation(
    task: Task, captured: Captured, batch: Batch, random: RandomState, tolerance: float
) -> Deviation | None:
    """The first call of the plain model that the captured graph computes otherwise; None where there is none.

    Args:
        captured: is run, not changed.
    """
    recording, results = run_recorded(captured, arguments_of(captured, task, batch), task, random)
    plain = replace(task, model=copy.deepcopy(task.model))  # without hooks of parameters, which the runtime calls
    leaves = _torch.tensors.tensors_in((batch.args, batch.kwargs))
    watch = _Watch(plain.model, leaves)
    with torch.enable_grad(), plain_randomness(random):
        with watch:
            outputs = list(tensors_of(call(plain.model, plain, batch)))
        for step in watch.steps:
            step.tensor.grad = None
            if step.tensor.requires_grad:
                step.tensor.retain_grad()
        loss, named = loss_of(outputs, task)
        if loss is not None:
            loss.backward()
    search = _Search(captured, recording, watch, tolerance, all_flow=named is None)
    return search.forward(outputs, results) or search.buffers(plain.model) or search.backward()


class _Search:
    """
    Args:
        all_flow: whether all outputs are differentiated, not only a loss among them.
    """

    def __init__(
        self, captured: Captured, recording: Recording, watch: _Watch, tolerance: float, all_flow: bool
    ) -> None:
        self.captured, self.recording, self.watch, self.tolerance = captured, recording, watch, tolerance
        self.all_flow = all_flow
        self.by_shape: dict[Any, list[fx.Node]] = {}
        for node, value in recording.values.items():
            self.by_shape.setdefault((value.shape, value.dtype), []).append(node)
        self.same: dict[Step, list[fx.Node]] = {}

    def nodes(self, step: Step) -> list[fx.Node]:
        """The nodes that compute a tensor of the plain model."""
        if step not in self.same:
            candidates = self.by_shape.get((step.value.shape, step.value.dtype), [])
            values = self.recording.values
            self.same[step] = [n for n in candidates if difference(values[n], step.value) <= self.tolerance]
        return self.same[step]

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self, outputs: Sequence[tuple[str, Tensor]], results: Sequence[tuple[str, Tensor]]) -> Deviation | None:
        """The first call on the way to an output that is off."""
        actual = dict(results)
        for name, expected in outputs:
            result = actual.get(name)
            off = difference(result.detach(), expected.detach()) if result is not None else float("inf")
            if off <= self.tolerance:
                if self.all_flow and result is not None and result.requires_grad != expected.requires_grad:
                    return self._one_sided_output(name, expected, result)
                continue
            step = self.watch.find(expected)
            if step is None or step.name or self.nodes(step):
                return Deviation("capture", "forward", value=off, detail=f"the output {name!r} is off", line="no line")
            return self._describe(self._first(step), "forward", off, "its operands are right, its result is not")
        return None

    def _one_sided_output(self, name: str, expected: Tensor, actual: Tensor) -> Deviation:
        """An output that can be differentiated on one side only, where there is no loss beside it."""
        which = "plain model" if expected.requires_grad else "captured graph"
        detail = f"the output {name!r} has a gradient in the {which} only"
        step = self.watch.find(expected)
        if step is None or step.name:
            return Deviation("capture", "forward", value=float("inf"), detail=detail, line="no line")
        return self._describe(step, "forward", float("inf"), detail)

    def _first(self, step: Step) -> Step:
        """The first of the results that are off and lead to one another, up to ``step``."""
        visited, stack = {step}, [step]
        while stack:
            for x in stack.pop().operands:
                if x not in visited and not x.name and not self.nodes(x):
                    visited.add(x)
                    stack.append(x)
        return min(visited, key=lambda s: s.number)

    def buffers(self, model: nn.Module) -> Deviation | None:
        """The first buffer that is updated otherwise."""
        results = self.captured.graph.output_node().args[0]
        changed = dict(zip(self.captured.mutated, results, strict=False))  # type: ignore[arg-type]
        first = {step.name: step.value for step in self.watch.steps if step.name}
        for name, buffer in model.named_buffers():
            node = changed.get(name)
            value = self.recording.values[node] if isinstance(node, fx.Node) else first.get(name)
            off = difference(value, buffer.detach()) if value is not None else 0.0
            if off > self.tolerance:
                operator = str(node.meta["key"]) if isinstance(node, fx.Node) else ""
                text = (noted_line(node) if isinstance(node, fx.Node) else "") or "no line"
                module = name.rpartition(".")[0]
                detail = f"the buffer {name} is updated otherwise"
                return Deviation("capture", "forward", module, text, operator, value=off, detail=detail)
        return None

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self) -> Deviation | None:
        """The last call on the way from a parameter or an input whose gradient is off."""
        placeholders = self.captured.placeholders
        names = {name: placeholders[at] for at, name in self.captured.parameters.items()}
        for leaf in self.watch.steps:
            if not leaf.name or not leaf.tensor.requires_grad:
                continue
            node = names.get(leaf.name)
            nodes = self.nodes(leaf) if node is None else [node]
            gradients = [self.recording.gradients.get(n) for n in nodes] or [None]
            gradient = leaf.gradient
            if all(m is None for m in gradients) and gradient is None or any(
                m is not None and gradient is not None and difference(m, gradient) <= self.tolerance for m in gradients
            ):  # fmt: skip
                continue
            off = min(distance(m, gradient) for m in gradients)
            return self._last(leaf, off)
        return None

    def _last(self, leaf: Step, off: float) -> Deviation:
        visited, stack = {leaf}, [leaf]
        culprits: list[tuple[Step, str]] = []
        while stack:
            step = stack.pop()
            readers = [r for r in step.readers if r not in visited]
            wrong = [r for r in readers if not self._gradient_is_right(r)]
            stops = [r for r in wrong if not r.tensor.requires_grad and step.tensor.requires_grad]
            for r in stops:
                culprits.append((r, "the plain model gives no gradient through it, the captured graph does"))
            visited.update(wrong)
            stack += [r for r in wrong if r not in stops]
            if not wrong:
                target = f"the gradient of {step.name}" if step.name else f"that of the operand made at {step.line}"
                if step.tensor._backward_hooks:
                    culprits.append((step, "a hook on its result changes the gradient in the plain model"))
                    continue
                reader = min(readers, key=lambda r: r.number, default=step)
                culprits.append((reader, f"the gradient that reaches its result is right, {target} is not"))
        step, text = max(culprits, key=lambda c: c[0].number)
        return self._describe(step, "backward", off, text)

    def _gradient_is_right(self, step: Step) -> bool:
        """Whether some node that computes the tensor is reached by its gradient."""
        if step.tensor._version != step.version:  # changed in place since: its gradient is that of the new value
            return False
        gradients = [self.recording.gradients.get(n) for n in self.nodes(step)]
        return any(distance(m, step.gradient) <= self.tolerance for m in gradients)

    # -- in words ---------------------------------------------------------------------------------------------------

    def _describe(self, step: Step, direction: str, off: float, detail: str) -> Deviation:
        node = self._node_of(step)
        operator = str(node.meta["key"]) if node is not None else ""
        rule = str(rule_for(node) or "none") if node is not None else ""
        return Deviation("capture", direction, step.module, step.line, operator, rule, "", off, detail)

    def _node_of(self, step: Step) -> fx.Node | None:
        """The node that stands for a call: one that computes its result, or else one of its module and line."""
        calls = [n for n in self.captured.graph.nodes if n.op == "call_function"]
        same = [n for n in self.nodes(step) if n.op == "call_function"]
        at = [n for n in calls if noted_line(n) in step.lines]
        here = [n for n in at if n.meta.get("module", "") == step.module]
        lineless = [n for n in calls if n.meta.get("module", "") == step.module and not noted_line(n)]
        likely = [*(n for n in same if n in here), *reversed(here), *same, *reversed(at)]
        return next(iter(likely or ([] if step.lines else lineless[::-1])), None)
