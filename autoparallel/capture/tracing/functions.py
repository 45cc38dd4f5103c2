"""An ``autograd.Function`` in a trace: one call that stands for it, whatever its forward computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel import _torch
from autoparallel._torch.autograd import apply_of
from autoparallel._torch.tensors import storage_mark
from autoparallel.capture.tracing.copied_checkpoints import GivenTensors, is_copied_checkpoint
from autoparallel.capture.tracing.refused_calls import COLLECTIVES_CURE
from autoparallel.capture.tracing.trace import CURRENT, Trace, fresh, listening, refuse, register, with_results
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.lines import line_of
from autoparallel.operators.opaque import CALL, Arguments, OpaqueCall, Unsupported, fill_template
from autoparallel.operators.torch_random import arguments_of, silent
from autoparallel.rules.calls import is_tensor


@dataclass(frozen=True)
class FunctionCall:
    """A call of an ``autograd.Function``.

    Attributes:
        cls: the Function.
        template: ``(args, kwargs)``, with slots for tensors and open sizes.
        count: how many results it has.
        tensors: the places of the tensors among them.
        single: whether it returns one tensor, not a tuple.
        aliases: whether a result shares memory with an operand.
        writes: whether it changes operands in place, and so is given copies.
        changes: the places of those that it changes and does not return: nobody may read them afterwards.
    """

    cls: type[torch.autograd.Function]
    template: Any
    count: int
    tensors: tuple[int, ...]
    single: bool
    aliases: bool
    writes: bool = False
    changes: tuple[int, ...] = ()

    def fake(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        tensors = [x.clone() for x in tensors] if self.writes else tensors
        values = {"tensor": tensors, "number": numbers}
        args, kwargs = fill_template(self.template, lambda slot: values[slot.kind][slot.index])
        trace = CURRENT.value
        assert trace is not None
        results = trace.run_silently(lambda: apply_of(self.cls)(*args, **kwargs), tensors)
        return [fresh(results if self.single else results[i]) for i in self.tensors]


class _Watcher(TorchDispatchMode):
    """Notices what a Function reads that it was not given, and which of its operands it changes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.met = set(map(id, tensors))
        self.memory = {storage_mark(t) for t in tensors}
        self.held: list[Any] = [*tensors]
        self.foreign = False
        self.changed: set[int] = set()
        self.draws = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not silent(func, arguments_of(func, args, kwargs or {})):
            self.draws = str(func)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self.met:
                fake = hasattr(leaf, "fake_mode")
                self.foreign |= fake or isinstance(leaf, nn.Parameter) or leaf.requires_grad
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else (kwargs or {}).get(argument.name)
                written = _torch.tensors.tensors_in(value)
                self.changed |= {storage_mark(x) for x in written} & self.memory
        out = func(*args, **(kwargs or {}))
        results = _torch.tensors.tensors_in(out)
        self.met.update(map(id, results))
        self.held += results
        return out


def _apply_function(trace: Trace, cls: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
    """Records one call of an ``autograd.Function``."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__ == "torch.distributed.nn.functional":
        raise refuse(f"the model sends what it computes ({name})", COLLECTIVES_CURE)
    arguments = Arguments()
    try:
        template = arguments.template((args, kwargs))
    except Unsupported as error:
        raise refuse(
            f"the autograd.Function {name} is given an object of type {error}, which no program holds,",
            "pass tensors, numbers, strings and tuples of them. In the place of a Function that runs modules again in "
            "its backward (reversible layers), call torch.utils.checkpoint on them; in the place of an adjoint, "
            "differentiate what it solves (odeint); or pass all parameters as tensors, and compute with these",
        ) from None
    top = {id(x) for x in (*args, *kwargs.values())}
    tensors = [x if id(x) in top else x.detach() for x in arguments.tensors]  # autograd looks no deeper
    if not any(hasattr(x, "fake_mode") for x in tensors):
        return apply_of(cls)(*args, **kwargs)
    copies = [x.detach().requires_grad_(x.requires_grad).clone() for x in tensors]
    values: dict[str, Sequence[Any]] = {"tensor": copies, "number": arguments.numbers}
    inner_args, inner_kwargs = fill_template(template, lambda slot: values[slot.kind][slot.index])
    watcher = _Watcher(copies)

    def look() -> Any:
        with watcher:
            return apply_of(cls)(*inner_args, **inner_kwargs)

    results = trace.run_silently(look, copies)
    if watcher.foreign:
        raise refuse(
            f"the forward of the autograd.Function {name} reads a parameter or an activation that is not among its "
            "arguments, called",
            "pass it to apply() as a tensor",
        )
    if watcher.draws:
        raise refuse(
            f"the forward of the autograd.Function {name} draws random numbers ({watcher.draws}), which would "
            "differ from rank to rank, called",
            "draw outside of the Function, and pass the numbers to apply() as a tensor",
        )
    single = isinstance(results, Tensor)
    row = (results,) if single else results
    if not isinstance(row, tuple) or any(not isinstance(x, Tensor) and _holds_values(x) for x in row):
        raise refuse(
            f"the autograd.Function {name} returns what is neither tensors nor constants, called",
            "return a tensor or a tuple of tensors",
        )
    changed = [j for j, x in enumerate(copies) if storage_mark(x) in watcher.changed]
    if changed and len(set(map(storage_mark, tensors))) < len(tensors):
        raise refuse(
            f"the forward of the autograd.Function {name} changes an argument in place, in whose memory another lies, "
            "called",
            "return a new tensor (x = x.clone() first)",
        )
    # What is returned is what the argument is from then on (``ctx.mark_dirty``).
    returned = {i: j for i, x in enumerate(row) for j in changed if x is copies[j]}
    changes = tuple(j for j in changed if j not in returned.values())
    places = tuple(i for i, x in enumerate(row) if isinstance(x, Tensor))
    aliases = not changed and any(storage_mark(row[i]) in watcher.memory for i in places)
    call = FunctionCall(cls, template, len(row), places, single, aliases, bool(changed), changes)
    shown = f"{name}{template[0]}{template[1] or ''} -> {places}{' alias' if aliases else ''}"
    shown += f" writes {changes}" * bool(changed)
    key = register(trace.calls, shown, call)
    tensors_out = torch.ops.autoparallel.call(tensors, arguments.numbers, key)
    trace.of_functions += [*arguments.tensors, *tensors_out]
    out = with_results(tuple(row), places, tensors_out)
    for i, j in returned.items():
        out = (*out[:i], arguments.tensors[j].copy_(out[i]), *out[i + 1 :])
    return out[0] if single else out


def _holds_values(value: Any) -> bool:
    """Whether a result that is no tensor has something of the trace in it."""
    arguments = Arguments()
    try:
        arguments.template(value)
    except Unsupported:
        return True
    return bool(arguments.tensors or arguments.numbers)


def _checkpoint(trace: Trace, run: Callable[..., Any], preserve: Any, *args: Any) -> Any:
    """Reentrant checkpointing computes what the function computes; it gives gradients where an argument has one."""
    flows = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    trace.begin_region()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled() and flows):
            return run(*args)
    finally:
        trace.end_region()


def _copied_checkpoint(trace: Trace, run: Callable[..., Any], length: int, *args: Any) -> Any:
    """One that differentiates what the function is given, and the parameters that the checkpoint is, alone."""

    def run_given(*tensors: Any) -> Any:
        with GivenTensors(args):
            return run(*tensors[:length])

    return _checkpoint(trace, run_given, None, *args)


def function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    trace = listening()
    if trace is None or _torch.transforms.is_transforming():
        return apply_of(cls)(*args, **kwargs)
    if cls is torch.utils.checkpoint.CheckpointFunction:
        return _checkpoint(trace, *args)
    if is_copied_checkpoint(cls):
        return _copied_checkpoint(trace, *args)
    if cls is _torch.autograd.NoopSaveInputs:
        with trace.silent(), _torch.export.unwatched():
            return torch.empty(0, requires_grad=True).view(0)  # where nothing is differentiated, there is no region
    if cls.__module__.startswith("torch._"):
        return apply_of(cls)(*args, **kwargs)
    return _apply_function(trace, cls, args, kwargs)


def function_under_vmap(_: Trace, call: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for what torch calls of a Function inside of a transform, as no graph has what runs there."""
    raise refuse(
        f"the autograd.Function {cls.__module__}.{cls.__qualname__} is called inside of torch.vmap",
        "call it for all parts at once, outside of vmap, or write what it computes in operators of torch",
    )


def require_unread(graph: fx.Graph, calls: Mapping[str, OpaqueCall]) -> None:
    """Refuses to read what an ``autograd.Function`` has changed without a word to autograd, in whose program it changes
    a copy."""
    if not any(getattr(call, "changes", ()) for call in calls.values()):
        return
    inputs = filter(is_tensor, graph.find_nodes(op="placeholder"))
    changed: dict[int, fx.Node] = {storage_mark(x.meta["val"]): x for x in inputs}
    for node in graph.nodes:
        for x in node.all_input_nodes:
            call = changed.get(storage_mark(x.meta["val"])) if is_tensor(x) else None
            if call is not None and call.op != "placeholder":
                raise _refused_read(call, line_of(call if node.op == "output" else node))
        if node.target is CALL:
            operands: Any = node.args[0]
            for place in getattr(calls[str(node.args[2])], "changes", ()):
                mark = storage_mark(operands[place].meta["val"])
                if mark in changed and changed[mark].op == "placeholder":
                    raise _refused_read(node, line_of(node))
                changed[mark] = node


def _refused_read(call: fx.Node, line: str) -> CaptureError:
    return refusal(
        f"an autograd.Function changes its argument in place, at {line_of(call)}, and the argument is the model's, or "
        "read after that,",
        line,
        "return a new tensor (x = x.clone() first), or the argument itself, as ctx.mark_dirty(x) says",
    )
