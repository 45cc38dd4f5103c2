"""One training run, and everything that can be seen of it."""

from __future__ import annotations

import contextlib
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.capture.caches import asks_for_cache, without_caches
from autoparallel.capture.python.watched import is_bookkeeping
from autoparallel.graph.labels import label_in
from autoparallel.graph.nesting import cast_floats, flatten_by_names
from autoparallel.operators import RandomState, plain_randomness
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.parameters.slices import lies_elsewhere
from autoparallel.tools.parity.comparison import Record
from autoparallel.tools.parity.task import Batch, Task

LimitOf = Callable[[int, Sequence[Tensor]], float]
"""From a step and all gradients to the limit of their norm."""


def observe(model: nn.Module, task: Task, limit_of: LimitOf) -> Iterator[Record]:
    """Takes the steps of one training run, then calls the model without a target, and tells all that can be seen of it.
    Python's and numpy's generators are seeded before.

    Args:
        model: the plain model, or the compiled one.
    """
    draws = Draws(task.seed)
    random.seed(task.seed)
    np.random.seed(task.seed % 2**32)
    yield from train(model, task, limit_of, draws)
    if task.loss_fn is not None and not _takes_target(task):
        drawing = nullcontext() if isinstance(model, ParallelModule) else draws.call()
        with torch.set_grad_enabled(any(p.requires_grad for p in model.parameters())), drawing:
            outputs = list(tensors_of(call(model, task, task.batch(1), with_target=False)))
        for name, value in outputs:
            yield task.steps, "output", name, _whole(value)


def train(model: nn.Module, task: Task, limit_of: LimitOf, draws: Draws) -> Iterator[Record]:
    """Takes the steps of one training run and tells everything that can be seen of them.

    A rank tells of its own parameters, where the model is cut into stages.

    Args:
        model: the plain model, or the compiled one.
        draws: of the plain model.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = task.optimizer(trained) if trained else None
    before = dict(_attributes(model))
    for step in range(1, task.steps + 1):
        task.before_step(model, step)
        for number in range(1, task.accumulation + 1):
            last = number == task.accumulation
            with model.no_sync() if isinstance(model, ParallelModule) and not last else nullcontext():
                records = _accumulate(model, task, task.batch(step, number), draws)
            for kind, name, value in records:
                yield step, kind, f"{name} of microbatch {number}".strip() if task.accumulation > 1 else name, value
        if optimizer is not None:
            yield from _gradients(step, "gradient", model)
            grads = [g for _, _, _, g in _gradients(step, "", model) if g is not None]
            limit = limit_of(step, grads)
            if isinstance(model, ParallelModule):
                norm = model.clip_grad_norm_(limit, norm_type=task.norm_type)
            else:
                norm = nn.utils.clip_grad_norm_(trained, limit, norm_type=task.norm_type)
            yield step, "norm", "", _whole(norm)
            yield from _gradients(step, "clipped gradient", model)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in parameters_here(model):
                yield step, "parameter", name, _whole(parameter)
        for name, buffer in model.named_buffers():
            yield step, "buffer", name, _whole(buffer)
        for name, attribute in _attributes(model):
            if name not in before or not _equal(before[name], attribute):
                yield step, "attribute", name, attribute


def _accumulate(model: nn.Module, task: Task, batch: Batch, draws: Draws) -> list[tuple[str, str, Tensor | None]]:
    """Adds to the gradients what one batch of a step gives, and tells its outputs: their kinds, names and values."""
    inputs = [x for x in _torch.tensors.tensors_in((batch.args, batch.kwargs)) if x.requires_grad]
    for x in inputs:
        x.grad = None
    trains = any(p.requires_grad for p in model.parameters())
    with nullcontext() if isinstance(model, ParallelModule) else draws.call():
        with torch.set_grad_enabled(trains or bool(inputs)):
            outputs = list(tensors_of(call(model, task, batch)))
            loss, loss_name = loss_of(outputs, task)
        if loss is not None:
            (loss / task.accumulation if task.accumulation > 1 else loss).backward()
        elif trains and not isinstance(model, ParallelModule):
            raise ValueError("no loss depends differentiably on the parameters, though some are trainable")
    results = [("loss" if name == loss_name else "output", name, _whole(value)) for name, value in outputs]
    return results + [
        ("input gradient", str(i), None if x.grad is None else _whole(x.grad)) for i, x in enumerate(inputs)
    ]


class Draws:
    """The random numbers of the calls of a plain model: those of the compiled one, which takes a place in the stream of
    a seed for every call that draws.

    Attributes:
        state: what the numbers of the next call depend on.
    """

    def __init__(self, seed: int) -> None:
        self.state = RandomState(seed, 0)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A context for one call and its backward."""
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            with plain_randomness(self.state):
                yield
            if not torch.equal(before, torch.get_rng_state()):
                self.state = RandomState(self.state.seed, self.state.call + 1)


def call(model: nn.Module, task: Task, batch: Batch, with_target: bool = True) -> Any:
    """What a call gives: the compiled model's, or the plain one's in eager torch."""
    args, with_loss = batch.args, task.loss_fn is not None
    if isinstance(model, ParallelModule):
        return model(*(args if with_target or not with_loss else args[:-1]), **batch.kwargs)
    with _torch.export.attention_differentiated_on_cpus():
        output = _plain_call(model, task, args[:-1] if with_loss else args, batch.kwargs)
    if task.loss_fn is None or not with_target:
        return output
    loss = task.loss_fn(output, args[-1])
    if isinstance(loss, tuple) and len(loss) == 2 and _is_count(loss[1]):
        return loss[0] / loss[1]
    return loss


def module_stack(model: nn.Module) -> list[str]:
    """The paths of the modules whose forwards run, the innermost last: a list that hooks on ``model`` keep."""
    stack: list[str] = []

    def leave(*_: Any) -> None:
        stack.pop()

    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: stack.append(path), prepend=True)
        module.register_forward_hook(leave, always_call=True)
    return stack


def _is_count(value: Any) -> bool:
    """Whether a loss function's second result is the count that its first one, a sum, is to be divided by."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype in (torch.int64, torch.int32)
    return isinstance(value, int) and not isinstance(value, bool)


def _plain_call(model: nn.Module, task: Task, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a plain model returns, without the caches of generation for which nobody asks."""
    outputs = _run_plain(model, task, args, kwargs)
    return outputs if asks_for_cache(model.forward, args, kwargs) else without_caches(outputs)


def _run_plain(model: nn.Module, task: Task, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    policy = task.precision
    if policy is None:
        return model(*args, **kwargs)
    if policy.cast_forward_inputs:
        args, kwargs = cast_floats((args, dict(kwargs)), policy.param_dtype)
    used = {name: cast_floats(p, policy.param_dtype) for name, p in model.named_parameters()}
    return cast_floats(functional_call(model, used, args, dict(kwargs)), policy.output_dtype)


def _takes_target(task: Task) -> bool:
    """Whether a call without a target would be taken for one whose last input is the target."""
    batch = task.batch(1)
    try:
        inspect.signature(task.model.forward).bind(*batch.args[:-2], **batch.kwargs)
    except TypeError:
        return False
    return len(batch.args) > 1


def loss_of(outputs: Sequence[tuple[str, Tensor]], task: Task) -> tuple[Tensor | None, str | None]:
    """What is differentiated, and its name among the outputs; None where nothing can be or no gradient is wanted.

    Where the loss is known (``loss_fn``, or an output named "loss") it is that alone, and else all outputs.
    """
    if not torch.is_grad_enabled():
        return None, None
    flowing = {n: x for n, x in outputs if x.requires_grad}
    scalars = [n for n, x in flowing.items() if x.ndim == 0 and not x.is_complex()]
    named = dict(outputs).get("loss")
    if named is not None and named.ndim == 0:
        return flowing.get("loss"), "loss"
    if scalars and (task.loss_fn is not None or len(flowing) == 1):
        return flowing[scalars[0]], scalars[0]
    if not flowing:
        return None, None
    total = [_weigh(x, task.seed + i) for i, (_, x) in enumerate(outputs) if x.requires_grad]
    return torch.stack(total).sum(), None


def _weigh(x: Tensor, seed: int) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    golden = (math.sqrt(5) - 1) / 2  # its multiples are spread evenly over [0, 1]; a random operator would be numbered
    weights = (torch.arange(1, x.numel() + 1, dtype=torch.float64, device=x.device) * golden + seed / 7) % 1
    return (x.double() * weights.view(x.shape)).sum()


def tensors_of(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output, with the keys and indices that lead to them."""
    if isinstance(output, Tensor):
        yield name, output
        return
    if isinstance(output, Mapping):
        children: list[tuple[Any, Any]] = list(output.items())
    elif isinstance(output, (tuple, list)):
        children = list(zip(getattr(output, "_fields", range(len(output))), output, strict=True))
    else:
        leaves = flatten_by_names(output)
        children = [(".".join(map(str, path)), leaf) for path, leaf in leaves if leaf is not output]
    for key, child in children:
        yield from tensors_of(child, f"{name}.{key}" if name else str(key))


def parameters_here(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of which this rank has a part; others are those of another rank's stage."""
    for name, parameter in model.named_parameters():
        if not lies_elsewhere(parameter):
            yield name, parameter


def _gradients(step: int, kind: str, model: nn.Module) -> Iterator[Record]:
    for name, parameter in parameters_here(model):
        yield step, kind, name, None if parameter.grad is None else _whole(parameter.grad)


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The numbers and tensors in the plain attributes of all modules, but for what libraries note for themselves."""
    root = model.__dict__["_plain"] if isinstance(model, ParallelModule) else model
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            of_library = name in vars(nn.Module()) or is_bookkeeping(type(module).__module__)
            if name.startswith("_") and of_library or name == "training":
                continue
            for i, leaf in enumerate(pytree.tree_leaves(value)):
                if isinstance(leaf, Tensor | bool | int | float) and not isinstance(leaf, nn.Parameter):
                    at = label_in(path, name)
                    with contextlib.suppress(RuntimeError, OverflowError):  # no fake tensor, no huge integer
                        yield at if leaf is value else f"{at}[{i}]", _whole(torch.as_tensor(leaf))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _whole(x: Tensor) -> Tensor:
    x = x.detach()
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return whole.to("cpu", copy=True)  # a replicated one would be the tensor itself
