"""What is captured: the model with its loss, its outputs as leaves, and the attributes that a call sets."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel._torch.export import is_fake
from autoparallel._torch.numbers import OPEN
from autoparallel.capture.caches import CURE, asks_for_cache, without_caches
from autoparallel.capture.fake_inputs import FakeInputs
from autoparallel.capture.python.changes import StateChangedError
from autoparallel.capture.python.containers import entries_exchanged
from autoparallel.capture.python.journals import without_journals
from autoparallel.capture.python.recorder import Recorder
from autoparallel.capture.refusals.data_access import DataAccess
from autoparallel.capture.refusals.refusals import refused_sparse
from autoparallel.capture.tracing.open_places import OpenPlaces
from autoparallel.capture.tracing.tensor_attributes import TensorAttributes
from autoparallel.capture.tracing.trace import Question, listening
from autoparallel.graph.beside import method_of, take_apart
from autoparallel.graph.caches import caches_in, release, tensors_in
from autoparallel.graph.changed_arguments import ARGUMENTS, describe_changes, note_containers
from autoparallel.graph.errors import CaptureError
from autoparallel.graph.input_values import Held
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.nesting import cast_floats, flatten_results
from autoparallel.graph.python_state import is_plain
from autoparallel.graph.shared_memory import SharedMemory, memory_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass
class Findings:
    """What tracing found; an object of its own, because export resets the attributes of what it traces.

    Attributes:
        counted: whether the loss function returned a sum and a count.
        spec: how the outputs nest.
        attributes: the attributes that the call sets, and how their values nest.
        originals: of the objects in the copy of the model, by id.
        copies: the copies themselves: an id is unique while its owner lives.
        existing: of the tensors that the copy and its inputs have before a call, by id.
        left_out: what the trace leaves out, by the line of it: checks of values, and gradients of buffers.
        questions: the tensors that Python has asked whether they hold; what they return are the last results.
        has_outputs: whether the model has run, so that what fails now is the loss function.
        registered: the parameters and buffers of the copy before a trace, by their names.
        trained_apart: the tensors of the user's own to which the backward of the results brings a gradient.
        sparse: the names of buffers that are not dense.
        constants: the tensors of the copy that are in lists and objects, with those of the model.
        memory: which leaves of its results, by their places, and which new values of buffers, by name, lie in that of
            a tensor of the model or of an input.
    """

    counted: bool = False
    spec: pytree.TreeSpec | None = None
    attributes: dict[str, pytree.TreeSpec] = field(default_factory=dict)
    originals: dict[int, Any] = field(default_factory=dict)
    copies: dict[int, Any] = field(default_factory=dict)
    existing: set[int] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)
    has_outputs: bool = False
    registered: dict[str, torch.Tensor] = field(default_factory=dict)
    trained_apart: list[torch.Tensor] = field(default_factory=list)
    sparse: frozenset[str] = frozenset()
    constants: Sequence[tuple[torch.Tensor, Held]] = ()
    memory: dict[int | str, SharedMemory] = field(default_factory=dict)

    def take_attributes(self, leaves: Sequence[Any]) -> tuple[dict[str, tuple[pytree.TreeSpec, list[Any]]], list[Any]]:
        """The values of attributes that the call sets, which stand behind its outputs, and the outputs alone."""
        attributes: dict[str, tuple[pytree.TreeSpec, list[Any]]] = {}
        end = len(leaves)
        for name, nesting in reversed(self.attributes.items()):
            begin = end - nesting.num_leaves
            attributes[name], end = (nesting, list(leaves[begin:end])), begin
        return attributes, list(leaves[:end])


class _Exchange(TorchFunctionMode):
    """Inside, operators that are given one tensor are given another, and none is given a buffer that is not dense.

    Export puts tensors of its own in the place of parameters and buffers where they are registered, but not where the
    model holds them otherwise, too, as in a tuple; its lists and dicts get them (``entries_exchanged``).

    Args:
        exchanged: what is given instead, by the id of what stood there before.
        sparse: what stands for buffers that are not dense in a trace, by name: there it is.
    """

    def __init__(self, exchanged: dict[int, torch.Tensor], sparse: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.exchanged = exchanged
        self._sparse = {id(buffer): name for name, buffer in sparse.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, torch.Tensor)]
        if any(id(x) in self.exchanged for x in tensors):  # Dynamo of torch 2.11 knows no id() of numbers
            args, kwargs = pytree.tree_map(self.current, (args, kwargs))
        for x in map(self.current, tensors) if self._sparse else ():
            if id(x) in self._sparse:
                raise refused_sparse(self._sparse[id(x)], line_of_frame(sys._getframe(1)))
        return func(*args, **kwargs)

    def current(self, value: Any) -> Any:
        return self.exchanged.get(id(value), value) if isinstance(value, torch.Tensor) else value


class Training(nn.Module):
    """The model with its loss: what is captured when a target is given.

    Inputs and outputs are cast as ``fully_shard`` casts those of the outermost module.

    Args:
        inputs: what it is called with.
        returned_anyway: the labels of attributes that a call returns as it is given them, where it does not set them.
        fixed_numbers: the labels of those that are whole numbers and no longer open.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        precision: MixedPrecisionPolicy | None,
        recorder: Recorder,
        inputs: FakeInputs,
        returned_anyway: Collection[str],
        fixed_numbers: Collection[str],
    ) -> None:
        super().__init__()
        self.inputs, self.returned_anyway, self.fixed_numbers = inputs, returned_anyway, fixed_numbers
        self.model = model
        self.loss_fn = loss_fn
        cast = precision is not None and precision.cast_forward_inputs
        self.input_dtype = precision.param_dtype if precision is not None and cast else None
        self.output_dtype = precision.output_dtype if precision is not None else None
        self.findings = Findings(registered=dict(_torch.tensors.named_tensors(model)))
        self.recorder = recorder

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # the user's hooks for all modules are not for this one

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of the outputs, and of the attributes that the call sets; then what Python has asked for."""
        inputs, nesting = pytree.tree_flatten((args, kwargs))
        trace = listening()
        for place, value in self.inputs.numbers.items():
            inputs[place] = inputs[place].item()
            if trace is not None:
                trace.note_number(inputs[place], place, value)
        for (first, dim), *others in self.inputs.alike:  # of which one symbol stands for a set
            for other, its in others:
                torch._check(inputs[first].shape[dim] == inputs[other].shape[its])
        for place, constant in self.inputs.constants.items():
            inputs[place] = constant
        for place, earlier in self.inputs.twins:
            inputs[place] = inputs[earlier]
        before, now = self.findings.registered, dict(_torch.tensors.named_tensors(self.model))
        if trace is not None:
            trace.attributes.note_tensors(now, inputs)
            trace.note_call(now, [name for name, _ in self.model.named_buffers()], self.recorder.now)
            trace.note_inputs(inputs)
            if trace.inputs is not None:
                trace.inputs.note_held([*trace.attributes.buffers(), *self.findings.constants])
        self._changes: dict[str, Any] = {}
        args, kwargs = release(pytree.tree_unflatten(inputs, nesting))
        kwargs, beside = take_apart(kwargs)
        attributes = beside.attributes
        if trace is not None:
            trace.ahead = beside.draws
            with trace.silent():
                attributes |= {label: int(attributes[label]) for label in self.fixed_numbers}
        exchanged = {id(before[name]): x for name, x in now.items() if before.get(name, x) is not x}
        exchange = _Exchange(exchanged, {name: x for name, x in now.items() if name in self.findings.sparse})
        with entries_exchanged(self.recorder.containers.held, exchanged), self.recorder.carrying(attributes):
            memory = DataAccess([*now.values(), *inputs], [] if trace is None else trace.of_functions)
            with self.recorder, memory, OpenPlaces(now.values()) as places, exchange:
                outputs = self._outputs(args, kwargs, beside.method)
                outputs = without_journals(outputs) if self.recorder.containers.has_journals else outputs
                leaves, self.findings.spec = flatten_results(outputs)
            written = self.recorder.take(in_order=not self.findings.questions)
            if left := {label: attributes[label] for label in self.returned_anyway if label not in written}:
                written = dict(sorted({**written, **left}.items(), reverse=True))
        if trace is not None:
            trace.end_call()
            _require_unset(trace.attributes)
            trace.require_same_inputs(self.inputs.requiring)
        _require_leaves(leaves)
        for name, value in {**written, **self._changes}.items():
            more, self.findings.attributes[name] = flatten_results(value)
            leaves += more
        bound = self.recorder.buffers.bound_anew()
        if trace is not None and trace.inputs is not None:
            trace.inputs.note_changes({**bound, **written})
        places.require_current([*leaves, *bound.values()])
        leaves = self.recorder.buffers.rebind(leaves)
        leaves = [exchange.current(leaf) for leaf in leaves]
        results: dict[int | str, Any] = dict([*enumerate(leaves), *bound.items()])
        if trace is not None and trace.differentiates and not torch.is_grad_enabled() and _carry(leaves):
            trace.left_out[trace.differentiates] = "the gradient of what the model returns under torch.no_grad()"
        stay = {name: x for name, x in now.items() if name not in bound}
        self.findings.memory = memory_of(results, stay, inputs)
        self.findings.trained_apart = _trained_apart(leaves)
        return [*leaves, *(x for question in self.findings.questions for x in question.results)]

    def _outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None) -> Any:
        """What the model returns, or its loss; what both change of their arguments is kept."""
        inputs, target = (args, ()) if self.loss_fn is None else (args[:-1], args[-1:])
        inputs, kwargs = cast_floats((inputs, kwargs), self.input_dtype)
        containers = note_containers((*inputs, *target), kwargs)
        outputs = self._run(inputs, kwargs, method)
        if self.loss_fn is not None:
            outputs = self._loss(self.loss_fn, outputs, *target)
        if changes := describe_changes(containers):
            self._changes = {ARGUMENTS: changes}
        return outputs

    def _loss(self, loss_fn: Callable[..., Any], outputs: Any, target: Any) -> Any:
        self.findings.has_outputs = True
        loss = loss_fn(outputs, target)
        if isinstance(loss, tuple) and len(loss) == 2 and _is_scalar(loss[0]) and _is_count(loss[1]):
            self.findings.counted = True
            return loss[0] / _as_divisor(loss[1], loss[0])
        return loss

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], method: str | None) -> Any:
        grown = [(cache, tensors_in(cache)) for cache in caches_in((args, kwargs))]
        run = method_of(self.model, method)
        _torch.export.keep_lines_of(inspect.unwrap(run))
        outputs = self.model(*args, **kwargs) if method is None else run(*args, **kwargs)
        returned = {id(cache) for cache in caches_in(outputs)}
        for cache, before in grown:
            if id(cache) not in returned and list(map(id, tensors_in(cache))) != list(map(id, before)):
                raise CaptureError(
                    f"the {type(cache).__name__} that is handed in grows in the call, and is not returned\n"
                    "What to change: call the model with use_cache=True"
                )
        if not asks_for_cache(run, args, kwargs):
            outputs = without_caches(outputs)
        return cast_floats(outputs, self.output_dtype)


def _carry(values: Iterable[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)


def _require_unset(attributes: TensorAttributes) -> None:
    if name := attributes.newly_set():
        raise StateChangedError.refusing(
            f"a call sets {name}, an attribute of a tensor,",
            "keep it in an attribute of the module, or return it as an output",
            lambda *_: bool(attributes.newly_set()),
        )


def _trained_apart(results: Iterable[Any]) -> list[torch.Tensor]:
    """See ``Findings.trained_apart``; a copy of the model has other tensors."""
    left = [x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    visited, trained = {*left}, []
    while left:
        function = left.pop()
        variable = getattr(function, "variable", None)
        if variable is not None and not is_fake(variable):
            trained.append(variable)
        further = dict.fromkeys(x for x, _ in function.next_functions if x is not None and x not in visited)
        visited.update(further)
        left.extend(further)
    return trained


def _require_leaves(values: Sequence[Any]) -> None:
    """Raises where outputs do not nest in a way that is known."""
    for value in values:
        if not is_plain(value) and not isinstance(value, (torch.Tensor, *OPEN)):
            is_cache = type(value).__module__.partition(".")[0] == "transformers"
            raise CaptureError(
                f"the model returns a {type(value).__name__}, in which nobody can look for tensors\nWhat to change: "
                "return tensors, tuples, lists and dicts of them, or objects that hold tensors and constants alone."
                f"{f' Where it is a cache of transformers: {CURE}.' * is_cache}"
            )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _is_count(value: Any) -> bool:
    """Whether a loss function's second result is a count, not another output that happens to be a scalar."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.dtype in (torch.int64, torch.int32)
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _as_divisor(count: Any, total: torch.Tensor) -> Any:
    """A count as what a sum is divided by: a number, but for sizes of the call, as a tensor, because a sum that a loss
    function divides by a number by itself is still a sum."""
    if isinstance(count, torch.Tensor) or not isinstance(count, int) and not _torch.export.is_read(count):
        return count
    return torch.scalar_tensor(count, dtype=torch.int64, device=total.device)
