"""Hooks that forward registers or modules have, in a trace: calls that stand for them, or a refusal.

What else a model's Python asks of autograd in its forward is refused here, too, with line and cure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel import _torch
from autoparallel._torch.export import FOLDER
from autoparallel.capture.tracing.derivatives import differentiate
from autoparallel.capture.tracing.trace import Trace, fresh, refuse, register, with_results
from autoparallel.graph.errors import NeedsGradientError
from autoparallel.graph.hooks import make_template
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import OURS
from autoparallel.operators.opaque import Unsupported
from autoparallel.passes.write_derivatives import INSTEAD_OF_GRADIENTS
from autoparallel.rules.calls import may_have_gradient

# --------------------------------------------------------------------------------------------------- tensor hooks


class _Handle:
    """What ``register_hook`` returns in a trace."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _register_hook(trace: Trace, func: Any, tensor: Tensor, hook: Any) -> Any:
    if not tensor.requires_grad:
        return func(tensor, hook)  # torch's own error
    if _caller().startswith(FOLDER):
        raise refuse(
            "torch hooks several tensors at once",
            "use Tensor.register_hook on each of them, or a module's backward hook",
        )
    if tensor.is_leaf:
        raise refuse(
            "a hook is registered on a parameter or an input inside of forward",
            "register it once, outside of the model's forward, or on a tensor that forward computes",
        )
    if trace.has_leaves:
        raise refuse(
            "a hook is registered in a model that makes a tensor of its own require gradients",
            "leave out requires_grad_() in forward",
        )
    try:
        template, read = make_template(hook, trace.original)
    except Unsupported as error:
        cure = "give it tensors, numbers and the model's modules"
        raise refuse(f"a tensor's hook {error}, registered", cure) from None
    name = register(trace.hooks, template.name, template)
    torch.ops.autoparallel.hook(tensor, [x.detach() for x in read.tensors], read.numbers, name)

    def remove() -> None:
        raise refuse("a tensor's hook is removed inside of forward", "register it where it is wanted only")

    return _Handle(remove)


def _caller() -> str:
    """The file of the code that called a method of a tensor."""
    skipped = (f"{FOLDER}_tensor.py", f"{FOLDER}overrides.py", f"{FOLDER}_ops.py", OURS)
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(skipped) or "__torch_function__" in frame.f_code.co_name
    ):
        frame = frame.f_back
    return frame.f_code.co_filename


def _refuse_call(what: str, cure: str) -> Callable[..., Any]:
    """What takes the place of a function that no program has."""

    def call(trace: Trace, func: Any, *args: Any, **kwargs: Any) -> Any:
        raise refuse(what, cure)

    return call


def _grad_fn(trace: Trace, func: Any, tensor: Tensor, *rest: Any) -> Any:
    if _caller().startswith(FOLDER):
        return func(tensor, *rest)
    raise refuse(
        "the graph of autograd is read (grad_fn), which the program does not have",
        "use Tensor.register_hook on tensors, and tensor.requires_grad to ask whether one carries a gradient",
    )


def _grad(trace: Trace, func: Any, tensor: Tensor, *rest: Any) -> Any:
    if _caller().startswith(FOLDER) and _caller() != _MODULE:
        return func(tensor, *rest)
    if not tensor.requires_grad and not trace.attributes.is_parameter(tensor):
        return None  # of a buffer, as a library asks for that works on parameters, too
    raise refuse(
        "a gradient is read or cleared inside of the model (.grad), where the program has none",
        "do it in the loop, and keep what the model needs of it in a registered buffer",
    )


def _requires_grad(trace: Trace, func: Any, tensor: Tensor, value: bool = True) -> Any:
    if value and id(tensor) in trace.places:
        trace.requiring.add(trace.places[id(tensor)])
    is_of_torch = _caller().startswith(FOLDER) and _caller() != _MODULE
    if tensor.requires_grad == value or not may_have_gradient(tensor) or is_of_torch:
        return func(tensor, value)
    if value and tensor.is_leaf and id(tensor) not in trace.existing and not isinstance(tensor, nn.Parameter):
        # Its gradient stays with a tensor that no user has; what flows to parameters is the same.
        trace.has_leaves = True
        _begin_leaf(tensor)
        return func(tensor, value)
    if value and trace.attributes.is_buffer(tensor):
        trace.left_out[line_of_frame(sys._getframe(1))] = "the gradient of a buffer, which eager adds up in its .grad"
        return tensor
    if value and id(tensor) in trace.places:
        error = refuse(
            "an input's requires_grad becomes True inside of the model, which has read it before,",
            "x = x.detach().requires_grad_() is a tensor of the model's own; or make the input require gradients "
            "before the call",
        )
        raise error if id(tensor) in trace.read_inputs else NeedsGradientError(str(error), trace.places[id(tensor)])
    raise refuse(
        f"a tensor's requires_grad becomes {value} inside of the model",
        "use x.detach() for what carries none; freeze parameters, and make inputs require gradients, before the call",
    )


def _begin_leaf(tensor: Tensor) -> None:
    """Notes from where on a tensor requires a gradient."""
    node = _torch.export.node_of(tensor)
    if node is None:
        return
    if node.op == "placeholder" and node.users:  # in a later call, that has a gradient, too
        raise refuse(
            "a buffer's requires_grad becomes True inside of the model, which has read it before,",
            "use buffer.detach().requires_grad_(), a tensor of the model's own",
        )
    _torch.export.read_instead(tensor, torch.ops.autoparallel.leaf(tensor))


_MODULE = f"{FOLDER}nn/modules/module.py"
"""Where ``Module.zero_grad`` and ``requires_grad_`` stand, which are the user's calls."""

OF_AUTOGRAD: dict[Any, Callable[..., Any]] = {
    Tensor.register_hook: _register_hook,
    Tensor.register_post_accumulate_grad_hook: _refuse_call(
        "a hook is registered on a parameter inside of forward", "register it once, outside of forward"
    ),
    Tensor.retain_grad: _refuse_call(
        "the gradient of a tensor inside of the model is kept (retain_grad)",
        "look at it in a hook: x.register_hook(lambda grad: ...)",
    ),
    _torch.autograd.GET_GRAD_FN: _grad_fn,
    _torch.autograd.GET_GRAD: _grad,
    Tensor.backward: _refuse_call("backward() differentiates inside of the model", INSTEAD_OF_GRADIENTS),
    _torch.autograd.SET_REQUIRES_GRAD: _requires_grad,
    Tensor.requires_grad_: _requires_grad,
    torch.autograd.grad: differentiate,
}
"""What is asked of autograd, with what takes its place while a model is traced."""


# ------------------------------------------------------------------------------------------- module backward hooks


@dataclass(frozen=True)
class ModuleBoundary:
    """Where a module with backward hooks is entered or left; its last operand is the ticket from one to the other.

    Attributes:
        count: how many values pass.
        tensors: the places of those through which gradients flow.
        module: the user's, not the traced copy, where it is entered; None where it is left.
        path: of the module in the model.
    """

    count: int
    tensors: tuple[int, ...]
    module: nn.Module | None = None
    path: str = ""
    aliases: bool = True

    def fake(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        return [fresh(x) for x in (tensors[:-1] if self.module is None else tensors)]


class _ModuleHooks:
    """Stands for ``torch.utils.hooks.BackwardHook`` while a model is traced."""

    def __init__(self, trace: Trace, module: nn.Module) -> None:
        self.trace, self.module = trace, module
        self.ticket: Tensor | None = None

    def setup_input_hook(self, args: tuple[Any, ...]) -> Any:
        args = tuple(args)
        places = _gradient_places(args)
        module = self.trace.original(self.module)
        path = self.trace.paths.get(id(self.module), type(module).__name__)
        # The ticket stands for what goes from a module's entry to its exit.
        ticket = torch.empty(0)
        entry = ModuleBoundary(len(args), places, module, path)
        name = register(self.trace.calls, f"{type(module).__name__} {path!r} {len(args)} {places}", entry)
        *results, self.ticket = torch.ops.autoparallel.call([*(args[i] for i in places), ticket], [], name)
        return with_results(args, places, results)

    def setup_output_hook(self, result: Any) -> Any:
        row = result if isinstance(result, tuple) else (result,)
        places = _gradient_places(row)
        assert self.ticket is not None
        name = register(self.trace.calls, f"exit {len(row)} {places}", ModuleBoundary(len(row), places))
        results = torch.ops.autoparallel.call([*(row[i] for i in places), self.ticket.detach()], [], name)
        out = with_results(row, places, results)
        return out if isinstance(result, tuple) else out[0]


def _gradient_places(values: Sequence[Any]) -> tuple[int, ...]:
    """The places of all tensors, where a gradient flows through one of them; else nothing happens to them."""
    places = tuple(i for i, x in enumerate(values) if isinstance(x, Tensor))
    return places if torch.is_grad_enabled() and any(values[i].requires_grad for i in places) else ()


def backward_hook(trace: Trace, cls: Any, module: nn.Module, hooks: Any, pre_hooks: Any) -> _ModuleHooks:
    return _ModuleHooks(trace, module)
