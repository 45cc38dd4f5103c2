"""What the capture does for each subject of the table, taken away; and whether ``verify()`` objects then."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoparallel.capture import backward_hooks, data_access, functions, passes
from autoparallel.capture.recorder import Recorder
from autoparallel.graph.plain_tensors import tensor_at
from autoparallel.graph.python_state import PythonState
from autoparallel.passes import mark_gradients
from autoparallel.passes.replace_random_operators import Draws
from autoparallel.runtime import calls
from autoparallel.tools.parity.task import make_task
from autoparallel.tools.verify import verify_here
from tests.capture.registry import programs
from tests.capture.runner import STEPS, Keywords, Program, defaults, split

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


def modes() -> Any:
    """Regions without gradients are inlined, as decomposing does."""
    return mock.patch.object(passes, "inline_gradient_modes", lambda module, *others, **options: None)


def custom_backwards() -> Any:
    """What a Function's forward computes is traced, as torch does."""
    return mock.patch.object(functions, "_apply_function", lambda t, cls, args, kw: functions._apply(cls)(*args, **kw))


def tensor_hooks() -> Any:
    def ignored(trace: Any, func: Any, tensor: Tensor, hook: Any) -> Any:
        return backward_hooks._Handle(lambda: None)

    return mock.patch.dict(backward_hooks.HANDLERS, {Tensor.register_hook: ignored})


def module_hooks() -> Any:
    unchanged = {name: lambda self, values: values for name in ("setup_input_hook", "setup_output_hook")}
    return mock.patch.multiple(backward_hooks._ModuleHooks, **unchanged)  # type: ignore[arg-type]


def complex_gradients() -> Any:
    """Complex tensors are taken as not differentiable."""
    return mock.patch.object(mark_gradients, "may_have_gradient", lambda x: x.is_floating_point())


def other_outputs() -> Any:
    """All outputs are detached but the first that could be differentiated."""
    original = mark_gradients.detach_outputs

    def detach(graph: Any, first: int, loss: int | None = None) -> Any:
        flowing = mark_gradients.differentiable_outputs(graph.output_node().args[0], first)
        return original(graph, first, min(flowing, default=None) if loss is None else loss)

    return mock.patch.object(passes, "detach_outputs", detach)


def guards() -> Any:
    """Python is taken to be what it was at the first call."""
    return mock.patch.object(PythonState, "changed", lambda self: None)


def attributes() -> Any:
    """What a call sets is forgotten."""
    original = Recorder.take

    def take(self: Recorder) -> dict[str, Any]:
        original(self)
        return {}

    return mock.patch.object(Recorder, "take", take)


@contextlib.contextmanager
def buffers() -> Iterator[None]:
    """New values of buffers are not written back."""

    def copied(plain: nn.Module, path: str) -> Tensor:
        return tensor_at(plain, path).clone()

    with mock.patch.object(calls, "tensor_at", copied), mock.patch.object(calls, "rebind", lambda *_: None):
        yield


def random_numbers() -> Any:
    """Draws are those of torch's generator."""
    return mock.patch.object(passes, "replace_random_operators", lambda module: Draws(0))


def data() -> Any:
    """``x.data``, diagonals and masks are what torch traces of them."""

    def pass_on(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    return mock.patch.object(data_access.DataAccess, "__torch_function__", pass_on)


SUPPORT: Mapping[str, tuple[Patch, ...]] = {
    "autograd_tools": (modes, custom_backwards, tensor_hooks, module_hooks),
    "complex_numbers": (complex_gradients,),
    "functions": (custom_backwards,),
    "gradient_mode": (modes, buffers),
    "hooks": (tensor_hooks, module_hooks, guards),
    "inplace": (data, buffers),
    "objects": (guards, attributes),
    "outputs": (other_outputs,),
    "python_state": (guards, attributes, buffers),
    "randomness": (random_numbers,),
    "views_and_aliases": (data, buffers),
}
"""By subject what is taken away, all of it together."""


class Front(nn.Module):
    """A model behind a dropout: of its first input of numbers, or else of its first output of them."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        super().__init__()
        self.model, self.drop = model, nn.Dropout(rate)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given, changed = self._dropped((args, kwargs))
        if changed:
            return self.model(*given[0], **given[1])
        return self._dropped(self.model(*args, **kwargs))[0]

    def _dropped(self, values: Any) -> tuple[Any, bool]:
        leaves, spec = pytree.tree_flatten(values)
        first = next((i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()), None)
        if first is None:
            return values, False
        leaves[first] = self.drop(leaves[first])
        return pytree.tree_unflatten(leaves, spec), True


def candidates() -> list[Program]:
    """The programs that are equal to eager with support that can be taken away, and that ``verify()`` can run: those
    with a loop of their own are for the table."""
    return [p for p in programs() if p.subject in SUPPORT and p.loop is None and p.refused is None]


def objects(program: Program, dropout: float, taken: bool) -> str:
    """How ``verify()`` ends: "passes", "fails", or the class of what it raises."""
    between = program.between or (lambda model, step: None)
    with defaults(), contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        made = program.make().double()
        model = Front(made, dropout) if dropout else made
        batches = [split(program.batch(step)) for step in range(STEPS)]
        inputs: Any = [Keywords(kwargs) if not args else args for args, kwargs in batches]
        task = make_task(
            model,
            1,
            inputs,
            program.loss_fn,
            plan="data_parallel",
            before_step=lambda m, step: between(m.model if dropout else m, step - 1),  # type: ignore[arg-type,return-value]
        )
        task = copy.copy(task)
        for patch in SUPPORT[program.subject] if taken else ():
            stack.enter_context(patch())
        try:
            return "passes" if verify_here(task).ok else "fails"
        except Exception as error:  # noqa: BLE001 - that is noticed, too
            return type(error).__name__
