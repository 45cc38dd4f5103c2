"""Autograd's engine, its hooks and its functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._autograd import _profiler_enabled
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from autoparallel._torch.tensors import storage_mark, tensors_in

# What saves the inputs of a checkpoint; gone in 2.13.
NoopSaveInputs = getattr(checkpoint, "_NoopSaveInputs", None)

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where a tensor keeps what ``register_hook`` and ``register_post_accumulate_grad_hook`` are given."""

GET_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__
GET_GRAD = vars(torch._C.TensorBase)["grad"].__get__
SET_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__set__
"""What a mode sees where a tensor's ``grad_fn`` or ``grad`` is read, and where its ``requires_grad`` is set."""


_OF_AUTOGRAD = tuple(
    getattr(torch._C.DispatchKey, name) for name in ("AutogradCPU", "AutogradCUDA", "AutogradMeta", "AutogradOther")
)


@contextmanager
def below_autograd(operators: Collection[torch._ops.OpOverload]) -> Iterator[None]:
    """Inside, operators are run without their own kernels for autograd, where Python's dispatcher chooses them: a trace
    has the operators then, and not what such a kernel is made of, whose own backward it would lose."""

    def run_below(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    before = {operator: dict(operator.py_kernels) for operator in operators}
    try:
        for operator in operators:
            operator.py_kernels.update(dict.fromkeys(_OF_AUTOGRAD, partial(run_below, operator)))
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in before.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks that ``torch.autograd.grad`` with respect to it runs, too."""
    return bool(tensor._backward_hooks) or tensor.retains_grad


def saved_as_they_are() -> AbstractContextManager[object]:
    """Inside, hooks on saved tensors that were entered before see none; ``torch.func.grad`` allows no others."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_identity, _identity)


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def is_in_a_graph(parameter: torch.Tensor) -> bool:
    """Whether autograd has a node for a parameter, as graphs that it is in and hooks on several tensors hold."""
    return parameter._use_count() > 1  # type: ignore[attr-defined]


def refuse_backward(parameter: torch.Tensor, refuse: Callable[[Any], None]) -> RemovableHandle:
    """Has ``refuse`` be called, which raises, where a graph that a parameter is in would add to its gradient."""
    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    handle: RemovableHandle = node.register_prehook(refuse)
    return handle


def functions_of(results: Sequence[torch.Tensor]) -> list[Any]:
    """The functions of autograd that results come from."""
    with torch._C.DisableTorchFunction():
        functions = [x.grad_fn for x in results]
    return [function for function in functions if function is not None]


def memory_kept(functions: Sequence[Any], visited: set[Any]) -> set[int]:
    """The marks of the storages that functions of autograd, and those behind them, have kept for the backward.

    Args:
        visited: those that are passed over; all others are added.
    """
    waiting, marks = [*functions], set[int]()
    while waiting:
        function = waiting.pop()
        if function not in visited:
            visited.add(function)
            names = [name for name in dir(function) if name.startswith("_saved_") or name == "saved_tensors"]
            marks.update(storage_mark(x) for name in names for x in tensors_in(getattr(function, name)))
            waiting += [before for before, _ in function.next_functions if before is not None]
    return marks


def copy_parameter_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Registers the hooks of one parameter on another, in their order."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (getattr(source, "_post_accumulate_grad_hooks", None) or {}).values():
        target.register_post_accumulate_grad_hook(hook)


def apply_of(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What torch does to apply a Function, past the name that a trace replaces."""
    return super(SingleLevelFunction, cls).apply  # type: ignore[misc]


def recording() -> AbstractContextManager[Any]:
    """Inside, autograd records what runs, in a kernel that it calls, too, such as a fake one of an operator."""
    local = torch._C._dispatch_tls_local_exclude_set()
    excluded = local - torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def is_dual_level() -> bool:
    """Whether forward-mode differentiation is entered."""
    return forward_ad._current_level >= 0


def after_backward(callback: Callable[[], Any]) -> None:
    """Calls ``callback`` when the backward pass that is running now has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_EARLY = 1 << 62


def run_early(node: Any) -> None:
    """Has a backward run a node as soon as all that it needs is there, before whatever else could run.

    Of what could run the engine takes what was made last in the forward, so a node that was made first would run last.
    """
    node._set_sequence_nr(node._sequence_nr() + _EARLY)


MODULE = "autoparallel module"


def mark_module(results: Any, module: str) -> None:
    """Notes on what will differentiate results that a module has made them."""
    for result in tensors_in(results):
        if result.grad_fn is not None:
            metadata: Any = result.grad_fn.metadata
            metadata.setdefault(MODULE, module)


def marked_module() -> str | None:
    """The module that has made what is differentiated now; None where that is not known."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node.metadata.get(MODULE)


def is_profiling() -> bool:
    """Whether a profiler records what this thread runs."""
    return bool(_profiler_enabled())


def running_backward() -> int:
    """The engine's number of the backward pass that calls this; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


@dataclass(frozen=True)
class AskedFor:
    """What a backward is asked for, of the inputs of an autograd function that are leaves.

    Attributes:
        inputs: of which: of all that are trained by ``backward()``, of some by ``backward(inputs=...)`` and by
            ``torch.autograd.grad()``.
        handed: whether gradients are handed to the caller, as by ``torch.autograd.grad()``, not added to ``.grad``.
    """

    inputs: list[bool]
    handed: bool = False


def asked_for(ctx: Any, count: int) -> AskedFor:
    """What is asked for of the last ``count`` inputs of an autograd function, whose backward runs now."""
    nodes = [node for node, _ in ctx.next_functions[-count:]]
    try:
        return AskedFor([node is not None and torch._C._will_engine_execute_node(node) for node in nodes])
    except RuntimeError:  # a leaf under torch.autograd.grad()
        return AskedFor([_is_handed(node) for node in nodes], True)


def is_handed_out(tensor: torch.Tensor) -> bool:
    """Whether a ``torch.autograd.grad()`` that is running, in any thread, is asked for the gradient of a tensor.

    The engine tells that of leaves alone: of other tensors it tells whether it goes through what has made them.
    """
    edge = torch.autograd.graph.get_gradient_edge(tensor)[:2]
    inputs = chain.from_iterable(_inputs_asked_for())
    return any(x is tensor or isinstance(x, tuple) and x[:2] == edge for x in inputs)


def _inputs_asked_for() -> Iterator[Sequence[object]]:
    """What the backwards that are running are asked for: on a GPU another thread than the caller's runs them."""
    for first in sys._current_frames().values():
        frame: FrameType | None = first
        while frame is not None:
            if frame.f_code is torch.autograd.graph._engine_run_backward.__code__:
                yield frame.f_locals["args"][3]
            frame = frame.f_back


def adds_to_grad(leaf: torch.Tensor) -> bool:
    """Whether the backward that runs now adds to ``.grad`` of a leaf, as ``torch.autograd.grad()`` does not."""
    node: Any = torch.autograd.graph.get_gradient_edge(leaf).node
    return not _is_handed(node) and bool(torch._C._will_engine_execute_node(node))


def held_by_others(grads: Sequence[torch.Tensor | None]) -> set[int]:
    """The ids of those of a backward's gradients whose memory somebody else may read: to be called by the backward of
    an autograd function, with the arguments that it was given.

    What nobody else refers to may become ``.grad`` as it is, which autograd itself decides in the same way.
    """
    alone = next((_references_of_one(g) for g in grads if g is not None), set())
    return {id(g) for g, count in zip(grads, _references(grads), strict=True) if g is not None and count not in alone}


_Counts = tuple[int, ...] | None


def _references(grads: Sequence[torch.Tensor | None]) -> list[_Counts]:
    """How many refer to each tensor in Python and in C++, to what it is a view of, and to their memory beside both;
    None for one with gaps."""
    counts: list[_Counts] = []
    for g in grads:
        if g is None or not g.is_contiguous():
            counts.append(None)
            continue
        of_base, base = (0, 0), g._base
        if base is not None:
            of_base = sys.getrefcount(base), base._use_count()  # type: ignore[attr-defined]
        memory = torch._C._storage_Use_Count(g.untyped_storage()._cdata)
        counts.append((sys.getrefcount(g), g._use_count(), memory, *of_base))  # type: ignore[attr-defined]
        del base  # two gradients may be views of one tensor
    return counts


class _Probe(torch.autograd.Function):
    """Counts the references to gradients that nobody else has."""

    @staticmethod
    def forward(ctx: Any, counts: list[Any], *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.counts = counts
        return tuple([x.view_as(x) for x in xs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.counts += _counts_within(grads)
        return None, *[None for _ in grads]


def _counts_within(grads: Sequence[torch.Tensor]) -> list[_Counts]:
    return _references(grads)  # as deep as `held_by_others`


_OF_ONE: dict[tuple[type, torch.device], set[_Counts]] = {}
"""How often what nobody else has is referred to, once that is known: by a backward, which may start threads."""


def _references_of_one(grad: torch.Tensor) -> set[_Counts]:
    """The counts of a tensor of the kind of another, and of a view of such a tensor."""
    kind = type(grad), grad.device
    if kind not in _OF_ONE:
        counts: list[_Counts] = []
        ones = partial(torch.ones, device=grad.device)
        # A mode of the user's may keep what it sees.
        with _disable_current_modes(), getattr(grad, "fake_mode", nullcontext()), torch.enable_grad():
            x, y = _Probe.apply(counts, *[ones(2, 2, requires_grad=True) for _ in range(2)])
            torch.autograd.backward([-x, -y.view(4)], [ones(2, 2), ones(4)])
        _OF_ONE[kind] = set(counts)
    return _OF_ONE[kind]


def _is_handed(node: Any) -> bool:
    """Whether the gradient of a leaf is handed out: torch does not answer for such a leaf."""
    if node is None:
        return False
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False


__all__ = ["SingleLevelFunction", "set_grad_enabled"]  # torch's own, handed on
