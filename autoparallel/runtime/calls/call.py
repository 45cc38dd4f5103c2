"""One call of a model, from its inputs to its outputs: agreed upon, run, and given its outer form."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel._torch.dtensor import local_of
from autoparallel._torch.numbers import evaluator
from autoparallel._torch.tensors import storage_mark
from autoparallel.comm.groups import settle
from autoparallel.comm.waiting import note_raised
from autoparallel.graph.caches import release
from autoparallel.graph.calls import Call, sizes_of, values_of
from autoparallel.graph.captured import Captured
from autoparallel.graph.changed_arguments import (
    ARGUMENTS,
    ENTRIES,
    change_entries,
    make_changes,
    require_apart,
    require_writable,
)
from autoparallel.graph.drawn_numbers import move_on
from autoparallel.graph.errors import refusal
from autoparallel.graph.labels import is_entry, split_entry
from autoparallel.graph.leaves import leaf_value
from autoparallel.graph.lines import line_of, node_of_error, place_of
from autoparallel.graph.losses import LossWeight
from autoparallel.graph.nesting import unflatten
from autoparallel.graph.plain_tensors import attribute_at, holder_of, rebind, tensor_at
from autoparallel.operators import RandomState
from autoparallel.runtime.calls.kinds import Kind, Kinds, ReadCall
from autoparallel.runtime.dtensors.boundary import OverMesh
from autoparallel.runtime.gradients.accumulation import Weight, expected_count
from autoparallel.runtime.parameters.slices import lay_like
from autoparallel.runtime.programs.outputs import Delivery, Entry, NotKept, Outputs, refuse_detached
from autoparallel.runtime.ranks.randomness import STREAM

_OF_SLICES = (torch.ops.aten.index_select.default, torch.ops.aten.index_copy.default)
_CUT_SHORT = (
    "Where this is a slice at a place that values tell (x[:, i:i + n]): eager cuts it short at the end of the tensor, "
    "and a program cannot.\nWhat to change: let i be at most x.shape[1] - n (i = min(i, x.shape[1] - n))."
)


def run_call(kinds: Kinds, read: ReadCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The outputs of a call, which may change buffers and attributes of the model.

    Args:
        kinds: those that the model has had.
        read: reads the call (see :meth:`Kinds.of`).
        args, kwargs: what the user has handed in, whose dicts and lists the call may change.
    """
    store, plain = kinds.store, kinds.maker.model
    call, kind = kinds.of(read)
    with kinds.without_casts(call):
        captured = kind.runner.captured
        buffers = [tensor_at(plain, path) for path in captured.mutated]
        try:
            _require_unchanged(kinds, captured, plain, buffers, call)
            if ARGUMENTS in captured.attributes:
                require_apart(args, kwargs)
            if captured.written:
                call = _with_copies(captured, plain, call)
            store.begin_call()
            entry, entering = Entry(), call
            if store.window is not None and torch.is_grad_enabled():
                _require_weight(kind, store.window)
                entering = replace(call, leaves=tuple(map(entry.take, call.leaves)))
            draws = captured.draws
            move_on(captured.drawn)
            results = kind.runner.run(entering, STREAM.draw(kinds.exchange.place) if draws else RandomState(0, 0))
            settle(store.prefix)
            kinds.calls += call.is_training
            results = _with_numbers_apart(captured, buffers, results)
            sizes = values_of(captured, call.specs) if captured.returns_sizes or captured.memory else {}
            parts = _parts_of_memory(captured, plain, call, results, sizes)
            _write_back(captured, plain, buffers, [parts.get(i, x) for i, x in enumerate(results)])
            _write_back_inputs(captured, call, results)
            values = _deliver(kinds, kind, call, results, entry)
            values = [parts[i] if i in parts and _is_delivered(x, parts[i]) else x for i, x in enumerate(values)]
            for name, (spec, leaves) in captured.attributes.items():
                value = pytree.tree_unflatten([leaf_value(leaf, values, sizes) for leaf in leaves], spec)
                if name == ARGUMENTS:
                    make_changes(value, args, kwargs)
                else:
                    _set_attribute(captured, plain, kinds.maker.loss_fn, name, value)
            leaves = [leaf_value(leaf, values, sizes) for leaf in captured.outputs]
            outputs = (unflatten if captured.returns_fields else pytree.tree_unflatten)(leaves, captured.output_spec)
            return release(outputs, call.caches) if captured.returns_caches else outputs
        except BaseException as error:
            note_raised(error)
            if node := node_of_error(error):
                error.add_note(f"It was raised in {type(plain).__name__} by {place_of(node)}")
                if node.target in _OF_SLICES:
                    error.add_note(_CUT_SHORT)
            raise


def _require_weight(kind: Kind, window: Any) -> None:
    weight = kind.runner.captured.weight
    if window.weights == "loss" and weight.kind in ("unknown", "none"):
        raise ValueError(
            f"accumulate() cannot tell what the loss is a mean over: {weight.reason}. Pass a loss_fn that "
            'returns (sum, count), each a sum over rows, to compile(), or weights="equal" to count all alike'
        )
    if window.weights == "loss" and weight.kind == "mean" and weight.hooked:
        raise ValueError(
            f"accumulate() weighs microbatches, and a hook at {weight.hooked} would be given what is not divided yet\n"
            'What to change: accumulate(..., weights="equal") gives it what loss / steps does by hand; or let '
            "an autograd.Function take its place, whose backward is taken to be linear."
        )


def _require_unchanged(
    kinds: Kinds, captured: Captured, plain: nn.Module, buffers: Sequence[torch.Tensor], call: Call
) -> None:
    """Raises where an input, or an attribute that a call has set, lies in the memory of a buffer that the call changes:
    the model would go on to read what the buffer is changed to, the program what it was."""
    changed = {
        storage_mark(local_of(x)): path
        for path, x in zip(captured.mutated, buffers, strict=True)
        if path not in captured.rebound
    }
    if not changed:
        return
    names = dict(zip(captured.inputs, call.leaves, strict=True))
    names |= {node: tensor_at(plain, x) for node, x in captured.buffers.items() if x in kinds.set_in_memory}
    arguments = {*captured.inputs[: len(call.leaves) - call.attributes]}
    for name, x in names.items():
        path = changed.get(storage_mark(local_of(x))) if isinstance(x, torch.Tensor) else None
        if path is None or captured.buffers.get(str(name)) in changed.values():
            continue
        node = captured.placeholders.get(str(name))
        if node is None or not node.users:
            continue
        if name in arguments:
            raise ValueError(
                f"an input lies in the memory of {path}, which the call changes in place\n"
                f"What to change: give it a copy (model.{path}.clone())."
            )
        raise refusal(
            f"the model reads what it has kept of {path}, which lies in the memory of that and is changed with it,",
            line_of(next(iter(node.users))),
            "keep a copy (self.x = value.clone()), or read the buffer itself",
        )


def _with_copies(captured: Captured, plain: nn.Module, call: Call) -> Call:
    """A call whose program reads copies of the inputs that it changes, also where it computes again in the backward."""
    tensors = [tensor_at(plain, path) for path in captured.buffers.values()]
    require_writable(call.arguments or call.leaves, captured.written, tensors)
    leaves = (x.clone() if place in captured.written else x for place, x in enumerate(call.leaves))
    return replace(call, leaves=tuple(leaves), arguments=call.arguments or call.leaves)


def _with_numbers_apart(captured: Captured, buffers: Sequence[torch.Tensor], results: Sequence[Any]) -> list[Any]:
    """The results of a call, of which the numbers that it has read of buffers stay as they were read."""
    values = list(results)
    changed = {storage_mark(local_of(x)) for x in buffers} if captured.number_outputs else set()
    for index in captured.number_outputs if changed else ():
        value = values[index]
        if isinstance(value, torch.Tensor) and storage_mark(value) in changed:
            values[index] = value.clone()
    return values


def _write_back_inputs(captured: Captured, call: Call, results: Sequence[Any]) -> None:
    """Gives the inputs that a call changes their new values."""
    with torch.no_grad():
        for place, index in captured.written.items():
            call.arguments[place].copy_(results[index])


def _write_back(captured: Captured, plain: nn.Module, buffers: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
    """Gives the buffers that a call changes their new values, which come first among its results."""
    _require_same_shapes(captured, buffers, results)
    with torch.no_grad():
        for path, buffer, value in zip(captured.mutated, buffers, results, strict=False):
            if path in captured.rebound:
                rebind(plain, path, value)
            elif isinstance(buffer, DTensor):  # a parameter, of which each rank has a part
                buffer.copy_(lay_like(value, buffer))
            else:
                buffer.copy_(value)


def _deliver(kinds: Kinds, kind: Kind, call: Call, results: Sequence[Any], entry: Entry) -> list[Any]:
    """The results of a call, those behind the buffers as the user is given them: with what their backward goes through
    first, and as ``DTensor`` where they stay as they lie over the mesh."""
    captured, store = kind.runner.captured, kinds.store
    count = len(captured.mutated)
    left_out = "the loss is computed in chunks of rows, and outputs made of its logits are kept with loss_chunks=1 only"
    values: list[Any] = [
        NotKept(f"output {i - count} of the model", left_out) if i in captured.left_out else x
        for i, x in enumerate(results)
    ]
    weight, nonzero = _weigh(captured, values, call, store.window), _nonzero(captured, values)
    delivery = Delivery(store, captured, weight, nonzero, kind.runner.used, kind.runner.why_once, entry)
    before = captured.outputs_before
    tensors = [i for i in range(count, len(values)) if isinstance(values[i], torch.Tensor)]
    differentiable = [i for i in tensors if values[i].requires_grad]
    for i in sorted(differentiable, key=lambda i: len(before.get(i, ()))):  # first what others are computed of
        first = [x for other in before.get(i, ()) if _is_differentiable(x := values[other])]
        values[i] = Outputs.apply(delivery, values[i], i in captured.own_outputs, i, *first)
        values[i] = _as_it_lies(kinds, kind, i, values[i])
    if torch.is_grad_enabled():
        refuse_detached(captured, values, map(store.parameters.__getitem__, kind.runner.used))
    for i in {*tensors} - {*differentiable}:
        values[i] = delivery.value(values[i], i)
        values[i] = _as_it_lies(kinds, kind, i, values[i])
    for i, others in before.items():
        named = [(f"output {other - count} of the model", values[other]) for other in others]
        delivery.before[i] = [(name, weakref.ref(x)) for name, x in named if _is_differentiable(x)]
    return values


def _is_differentiable(value: Any) -> bool:
    """Whether an output requires a gradient in this call; of a way that Python has not taken, it may require none."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def _parts_of_memory(
    captured: Captured,
    plain: nn.Module,
    call: Call,
    results: Sequence[Any],
    sizes: Mapping[Any, int | float],
) -> dict[int, torch.Tensor]:
    """The results, by index, that lie in the memory of what the call is given, as parts of the user's own tensors.

    Args:
        results: those of the program.
        sizes: the values of the trace's symbols.
    """
    arguments = call.arguments or call.leaves
    bound = {path: results[i] for i, path in enumerate(captured.mutated) if path in captured.rebound}
    parts: dict[int, torch.Tensor] = {}
    for index, shared in captured.memory.items():
        if isinstance(owner := shared.owner, int):
            base = arguments[owner]
        else:
            base = bound[owner] if owner in bound else tensor_at(plain, owner)
        if local_of(base).shape == base.shape and (part := shared.of(local_of(base), sizes)) is not None:
            parts[index] = part
    return parts


def _is_delivered(value: Any, part: torch.Tensor) -> bool:
    """Whether a result that the user is given is all of a part of his memory."""
    alike = isinstance(value, torch.Tensor) and not value.requires_grad
    return alike and (value.shape, value.dtype, value.device) == (part.shape, part.dtype, part.device)


def _as_it_lies(kinds: Kinds, kind: Kind, output: int, value: Any) -> Any:
    """An output that stays as it lies over the mesh as a ``DTensor``, any other as it is."""
    placements, layout = kind.runner.specs[output]
    if not any(p.kind == "S" for p in layout):
        return value
    if not value.requires_grad:
        return DTensor.from_local(value.contiguous(), kinds.maker.mesh, placements, run_check=False)
    return OverMesh.apply(value, kinds.maker.mesh, placements)


def _set_attribute(captured: Captured, plain: nn.Module, loss_fn: Any, name: str, value: Any) -> None:
    """Sets what a call sets: an attribute of the model's, a buffer that is new, or entries of a dict or list."""
    if name.endswith(ENTRIES):
        change_entries(attribute_at(plain, name.removesuffix(ENTRIES), loss_fn), *value)
        return
    if is_entry(name):
        label, key = split_entry(name)
        holder_of(plain, label, loss_fn)[key] = value
        return
    path, _, attribute = name.rpartition(".")
    holder = holder_of(plain, path, loss_fn)
    if name in captured.registered and attribute not in holder._buffers:
        holder.register_buffer(attribute, value, captured.registered[name])
    else:
        setattr(holder, attribute, value)


def _require_same_shapes(captured: Captured, buffers: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
    """Raises RuntimeError where an operator has resized a buffer, of which no trace tells."""
    for path, buffer, value in zip(captured.mutated, buffers, results, strict=False):
        if path not in captured.rebound and value.shape != buffer.shape:
            raise RuntimeError(
                f"the call gives {path}, of shape {list(buffer.shape)}, the shape {list(value.shape)}, as the first "
                "batch does to an observer of torch.ao.quantization\n"
                "What to change: call the plain model once before compile(), so that its buffers have their shapes."
            )


def _nonzero(captured: Captured, values: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Whether the loss weighs something, by its index, where the program leaves a division by zero out."""
    weight = captured.weight
    if not weight.by_zero:
        return {}
    assert weight.output is not None and captured.objective is not None
    return {captured.objective: values[weight.output] != 0}


def _weigh(captured: Captured, values: Sequence[Any], call: Call, window: Any) -> Weight:
    """What a microbatch weighs in a window of ``accumulate()``."""
    weight = captured.weight
    if window is None or window.weights == "equal" or weight.kind == "none":
        return Weight()
    if weight.kind == "sum":
        return Weight(None)
    value, *apart = (_count(x, captured, values, call) for x in weight.each)
    if weight.output is not None:
        # Without any target the gradients of cross-entropies are zero, whatever they are divided by.
        least = 0.0 if weight.by_zero or weight.added else weight.least or 1.0
        expected = expected_count(call.specs, call.batch)
        return Weight(value, expected, weight.divisor(value), least, weight.added, apart, weight.reason)
    return Weight(value, value or 1.0, apart=apart, reason=weight.reason)


def _count(weight: LossWeight, captured: Captured, values: Sequence[Any], call: Call) -> Any:
    """What a mean is over: a scalar tensor where it depends on the data, or else a number."""
    if weight.output is not None:
        return values[weight.output].detach().double()
    size = weight.size
    return float(size if isinstance(size, int) else evaluator(size.node.expr)(sizes_of(captured, call.specs)))
