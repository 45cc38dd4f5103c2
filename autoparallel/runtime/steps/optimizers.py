"""What happens when an optimizer steps: gradients are whole, clipped where asked for, and of parameters that train."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.graph.plain_tensors import REPLACED, refused_plain
from autoparallel.runtime.dtensors.stages import stepping
from autoparallel.runtime.norms.clipping import Clipper
from autoparallel.runtime.parameters.parts import note_changes
from autoparallel.runtime.parameters.slices import lay_like
from autoparallel.runtime.steps.cuts import Part, part_of
from autoparallel.runtime.steps.host_steps import HostStep
from autoparallel.runtime.steps.local_steps import LocalStep
from autoparallel.runtime.steps.owned_steps import step_by_owners
from autoparallel.runtime.steps.twins import take_back, twin_of

_STEPS: weakref.WeakKeyDictionary[torch.optim.Optimizer, LocalStep | HostStep] = weakref.WeakKeyDictionary()
_CLIPPERS: weakref.WeakKeyDictionary[Clipper, None] = weakref.WeakKeyDictionary()
"""As they were made, which every rank does in the same order: what one optimizer holds of several is reduced in it."""

_UNDONE: weakref.WeakKeyDictionary[torch.optim.Optimizer, ExitStack] = weakref.WeakKeyDictionary()
"""What is undone after the step that is running now."""

_NUMBERS = (int, float, bool)


def watch_optimizers(clipper: Clipper) -> None:
    """From now on an optimizer that holds the model's parameters finds their gradients reduced when it steps, clipped
    where the model was compiled so, and left out where a clipping decided that."""
    _CLIPPERS[clipper] = None
    _hook_steps()


@cache
def _hook_steps() -> None:
    """Has every step of any optimizer begin and end here."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if REPLACED and any(parameter in REPLACED for parameter in _parameters_of(optimizer)):
        raise refused_plain("the optimizer holds a plain parameter")  # those made before have been given others
    _after_step(optimizer)  # of a step that raised
    part: Part | None = None
    changed: tuple[Any, Any] | None = None
    for clipper in list(_CLIPPERS):
        store = clipper.store
        if clipper.parameter_ids.isdisjoint(map(id, _parameters_of(optimizer))):  # most often the first is one of them
            continue
        if isinstance(optimizer, Joinable):
            raise RuntimeError(
                f"{type(optimizer).__name__} deals parameters and their states out to the ranks itself\n"
                "What to change: use the optimizer that it is given; states lie as the parameters do, in parts where "
                'these are cut, as under plan="fsdp".'
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise RuntimeError(
                "torch.optim.SparseAdam steps on sparse gradients only, and all gradients of a compiled model are "
                "dense, those of nn.Embedding(sparse=True) too\nWhat to change: use SGD or Adagrad, whose steps are "
                "the same for both, or Adam, which also moves rows that a batch has not used."
            )
        if not store.synchronise:
            raise RuntimeError(
                "optimizer.step() inside no_sync(): gradients are not reduced yet. Leave no_sync() for the last "
                "backward of the window, then step"
            )
        problem = store.converted()
        if problem is not None:
            raise RuntimeError(problem)
        closure = _closure_of(args, kwargs)
        if closure is None or store.window is not None:
            store.settle()
        store.note_step(_settings_of(optimizer), _parameters_of(optimizer))
        part = part_of(optimizer)
        if part is None and store.offloads_states:
            raise RuntimeError(
                f"the plan keeps optimizer states in host memory, but how {type(optimizer).__name__}'s step may be cut "
                "is not known\nWhat to change: say so by autoparallel.register_optimizer(), or give "
                "compile(..., offload_optimizer=False)."
            )
        if part is None:
            _lay_states(optimizer)
            _undo(optimizer).callback(_note_versions, optimizer, clipper)
            _undo(optimizer).enter_context(stepping())
        if closure is not None:  # its gradients are made, reduced with those before, and clipped inside of the step
            changed = args, kwargs = _after_closure(args, kwargs, partial(_end_closure, clipper))
            continue
        if clipper.limits is not None:
            with torch.no_grad():
                _lend(optimizer, "grad_scale", clipper.clip_for_step(optimizer))
        skipped = clipper.skipped()
        if skipped is not None:
            _leave_out(optimizer, clipper, skipped)
    if part is not None:
        _undo(optimizer).callback(_torch.optim.call_innermost(optimizer, _enter, _leave))
    return changed


def _settings_of(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer steps by, in words: its class, and the numbers and flags that its groups set."""
    groups = [
        ", ".join(f"{name}={value}" for name, value in group.items() if value is not False and _is_number(value))
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def _is_number(value: object) -> bool:
    """Whether a setting is a number, or several as betas are; a tensor is not looked into."""
    return type(value) in _NUMBERS or type(value) is tuple and all(type(x) in _NUMBERS for x in value)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _offloads_states(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer holds parameters of a model whose plan keeps states in host memory."""
    ids = [clipper.parameter_ids for clipper in _CLIPPERS if clipper.store.offloads_states]
    return bool(ids) and not frozenset().union(*ids).isdisjoint(map(id, _parameters_of(optimizer)))


def _lay_states(optimizer: torch.optim.Optimizer) -> None:
    """Has plain states, of a step before ``compile()`` or of a checkpoint of one process, lie as their parameters do;
    those of other shapes, such as the one vector of LBFGS, lie whole. Numbers stay as they are."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor) and isinstance(state, dict):
            state.update(pytree.tree_map_only(torch.Tensor, partial(_laid, parameter=parameter), state))


def _laid(value: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    if isinstance(value, DTensor) or not value.ndim:
        return value
    return (
        lay_like(value, parameter)
        if value.shape == parameter.shape
        else _torch.dtensor.replicated(value, parameter.device_mesh)
    )


def _with_gradients(optimizer: torch.optim.Optimizer, clipper: Clipper) -> list[torch.Tensor]:
    """The parameters of one model that an optimizer holds and that have gradients."""
    return [p for p in _parameters_of(optimizer) if id(p) in clipper.parameter_ids and p.grad is not None]


def _note_versions(optimizer: torch.optim.Optimizer, clipper: Clipper) -> None:
    """Has a step on ``DTensor``s show in their versions, which operators over lists leave as they are: after it, for it
    may differentiate once more before it updates, as AdaHessian's does."""
    torch.autograd.graph.increment_version(_with_gradients(optimizer, clipper))


def _enter(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """See [Note: a step on a twin] in ``twins``."""
    twin = twin_of(optimizer)
    begin = partial(_begin, optimizer, twin)
    if _closure_of(args, kwargs) is None:
        with torch.no_grad():
            begin()
        changed = args, kwargs
    else:
        changed = _after_closure(args, kwargs, begin)
    return (twin, *changed[0][1:]), changed[1]


def _begin(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> None:
    if part_of(optimizer) == "parameter":
        _STEPS.pop(optimizer, None)
        step_by_owners(optimizer, twin, [clipper.store for clipper in _CLIPPERS])
        return
    step = _STEPS.get(optimizer)
    if _offloads_states(optimizer):
        if not isinstance(step, HostStep):
            step = _STEPS[optimizer] = HostStep(optimizer)
    elif not (isinstance(step, LocalStep) and step.fits(optimizer)):
        step = _STEPS[optimizer] = LocalStep(optimizer)
    step.begin(optimizer, twin)


def _leave(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    take_back(optimizer, args[0])
    step = _STEPS.get(optimizer)
    if isinstance(step, LocalStep):
        step.end(optimizer)


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of ``step``."""
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def _after_closure(args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]) -> tuple[Any, Any]:
    """The arguments of ``step``, their closure followed by something more."""
    closure = _closure_of(args, kwargs)
    assert closure is not None

    def both() -> Any:
        loss = closure()
        with torch.no_grad():
            then()
        return loss

    return ((args[0], both, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": both})


def _end_closure(clipper: Clipper) -> None:
    clipper.store.settle()
    if clipper.limits is not None:
        clipper.clip_for_step(None)


def _leave_out(optimizer: torch.optim.Optimizer, clipper: Clipper, skipped: torch.Tensor) -> None:
    """See [Note: skipping a step] in ``clipping``."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        scalers = getattr(optimizer, "found_inf", None)
        flag = skipped.to(torch.float32)
        _lend(optimizer, "found_inf", flag if scalers is None else torch.maximum(scalers.to(flag), flag))
    elif bool(skipped):
        for parameter in _with_gradients(optimizer, clipper):
            _undo(optimizer).callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None


def _lend(optimizer: torch.optim.Optimizer, name: str, value: torch.Tensor | None) -> None:
    """Sets an attribute for the time of a step."""
    if value is None:
        return
    if hasattr(optimizer, name):
        _undo(optimizer).callback(setattr, optimizer, name, getattr(optimizer, name))
    else:
        _undo(optimizer).callback(delattr, optimizer, name)
    setattr(optimizer, name, value)


def _undo(optimizer: torch.optim.Optimizer) -> ExitStack:
    return _UNDONE.setdefault(optimizer, ExitStack())


def _after_step(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    if optimizer in _UNDONE:
        _UNDONE.pop(optimizer).close()
    named = ((x.values() if isinstance(x, Mapping) else (x,)) for x in optimizer.state.values())  # or under a name
    states = chain.from_iterable(named)
    grads = (parameter.grad for parameter in _parameters_of(optimizer))  # which the step may have clipped
    note_changes(chain(_parameters_of(optimizer), grads, (x for x in states if isinstance(x, torch.Tensor))))
