"""What the capture does for each subject of the table, taken away; and whether ``verify()`` objects then."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoparallel.capture.functional import passes
from autoparallel.capture.python.recorder import Recorder
from autoparallel.capture.tracing import backward_hooks, functions, tracing
from autoparallel.graph.plain_tensors import tensor_at
from autoparallel.graph.python_state import PythonState
from autoparallel.passes import mark_gradients
from autoparallel.passes.replace_random_operators import Draws
from autoparallel.runtime.calls import call as calls
from autoparallel.tools.verify import verify
from tests.capture.registry import programs
from tests.capture.runner import STEPS, Program, defaults
from tests.test_verify_here import check

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


def modes() -> Any:
    """Regions without gradients are inlined, as decomposing does."""

    @functools.wraps(passes.inline_gradient_modes)
    def leave(module: Any, **options: Any) -> None:
        return None

    return mock.patch.object(passes, "inline_gradient_modes", leave)


def custom_backwards() -> Any:
    """What a Function's forward computes is traced, as torch does."""
    return mock.patch.object(
        functions, "_apply_function", lambda t, cls, args, kw: functions.apply_of(cls)(*args, **kw)
    )


def tensor_hooks() -> Any:
    def ignored(trace: Any, func: Any, tensor: Tensor, hook: Any) -> Any:
        return backward_hooks._Handle(lambda: None)

    return mock.patch.dict(tracing.HANDLERS, {Tensor.register_hook: ignored})


def module_hooks() -> Any:
    unchanged = {name: lambda self, values: values for name in ("setup_input_hook", "setup_output_hook")}
    return mock.patch.multiple(backward_hooks._ModuleHooks, **unchanged)  # type: ignore[arg-type]


def complex_gradients() -> Any:
    """Complex tensors are taken as not differentiable."""
    return mock.patch.object(mark_gradients, "may_have_gradient", lambda x: x.is_floating_point())


def other_outputs() -> Any:
    """All outputs are detached but the first that could be differentiated."""
    original = mark_gradients.detach_outputs

    @functools.wraps(original)
    def detach(graph: Any, first: int, loss: int | None = None) -> Any:
        flowing = mark_gradients.differentiable_outputs(graph.output_node().args[0], first)
        return original(graph, first, min(flowing, default=None) if loss is None else loss)

    return mock.patch.object(passes, "detach_outputs", detach)


def guards() -> Any:
    """Python is taken to be what it was at the first call."""
    return mock.patch.object(PythonState, "changed", lambda self, leaves: None)


def attributes() -> Any:
    """What a call sets is forgotten."""
    original = Recorder.take

    def take(self: Recorder, in_order: bool = True) -> dict[str, Any]:
        original(self, in_order)
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

    @functools.wraps(passes.replace_random_operators)
    def leave(module: Any) -> Draws:
        return Draws(0)

    return mock.patch.object(passes, "replace_random_operators", leave)


SUPPORT: Mapping[str, tuple[Patch, ...]] = {
    "autograd_tools": (modes, custom_backwards, tensor_hooks, module_hooks),
    "complex_numbers": (complex_gradients,),
    "functions": (custom_backwards,),
    "gradient_mode": (modes, buffers),
    "hooks": (tensor_hooks, module_hooks, guards),
    "inplace": (buffers,),
    "objects": (guards, attributes),
    "outputs": (other_outputs,),
    "python_state": (guards, attributes, buffers),
    "randomness": (random_numbers,),
}
"""By subject what is taken away, all of it together."""


SHARDED: Mapping[str, tuple[str, str]] = {
    "fourier_mixer": ("tensor_parallel", "tp"),
    "spectral_filter": ("fsdp", "dp"),
    "complex_parameter": ("fsdp", "dp"),
}
"""Programs that need support where something is sharded only: the plan, and the axis of two ranks."""

UNTOUCHED: Mapping[str, tuple[str, ...]] = {
    "nothing flows there": (
        "momentum_encoder", "inference_mode_target", "function_under_no_grad", "leaf_of_forward", "backward_that_logs",
        "backward_hook_logs", "none_output", "checkpoint_by_hand",
    ),
    "operators of torch or of the user's, which are traced with their gradients": (
        "logits_of_detached", "scaled_gradient", "saved_on_cpu", "vmapped", "score_with_enable_grad", "jvp_inside",
        "custom_operator", "custom_operator_without_backward", "stop_gradient_alternates", "vmap_of_functional_call",
    ),
    "a checkpoint computes what its function computes": (
        "function_of_module", "checkpoint_with_keywords", "checkpoint_in_checkpoint", "selective_checkpoint",
        "checkpoint_under_debug", "checkpoint_only_in_training",
    ),
    "Python that runs while the model is traced, and does not change": (
        "forward_hook_changes", "forward_hook_with_kwargs", "state_dict_hook", "list_of_the_call", "cached_function",
        "forward_patched_before", "config_filled_by_acall", "forward_hook_logs", "hook_changes_its_buffer",
    ),
    "told apart by modules and their flags": ("swapped_module", "part_in_evaluation"),
    "tensors are read when the program runs": (
        "tensor_attribute", "tensor_attribute_replaced", "tensor_attribute_in_place", "buffer_of_aschedule",
        "buffer_replaced",
    ),
    "no part of it is changed: memory is seen as another dtype, or cast to what it is": (
        "views_of_another_dtype", "casts_under_no_grad_to_what_it_is", "casts_aselection_under_no_grad",
    ),
    "verify() copies the model, and the closure of a hook holds the one that was copied": (
        "hook_changes_anothers_buffer",
    ),
    "a generator that is held, and not drawn from": ("generator_that_is_not_asked",),
    "complex, but on two ranks no gradient through what is complex is exchanged": (
        "complex_rotary", "polar", "complex_linear", "complex_output", "short_time_fourier", "real_and_imaginary",
    ),
    "gradients that are taken inside are written out as operators, whatever the mode": (
        "hessian_vector_product", "gradient_penalty_inside", "requires_grad_inside", "input_made_to_require_grad",
        "buffer_made_to_require_grad", "buffer_that_requires_grad", "aconstant_that_requires_one",
    ),
    "Python's own classes and numpy's arrays, and data that is not changed": (
        "data_that_stays_where_it_is", "arrays_of_numpy", "numbers_of_numpy", "checks_types", "method_of_an_object",
        "has_made_its_criterion", "locals_of_aclosure",
    ),
    "what is written behind autograd's back is a value of its own": ("no_grad_in_place",),
    "in eager torch 2.13 has no backward of torch.cond whose functions return one tensor": ("no_grad_inside_of_acond",),
    "it counts around the model, where both runs of one process do": ("global_counter", "cell_counter"),
    "the loss is known, and the others are detached in any case": ("dict_with_loss", "sum_and_count"),
}  # fmt: skip
"""Programs that need nothing of what is taken away, by the reason."""


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
    untouched = {name for names in UNTOUCHED.values() for name in names}
    equal = [p for p in programs() if p.subject in SUPPORT and p.loop is None and p.refused is None]
    return [p for p in equal if p.name not in untouched and (p.subject != "inplace" or "buffer" in p.name)]


def end_of_verify(program: Program, dropout: float, taken: bool) -> str:
    """How ``verify()`` ends: "passes", "fails", or the class of what it raises."""
    between = program.between or (lambda model, step: None)

    def before_step(model: Any, step: int) -> None:
        between(model.model if dropout else model, step - 1)

    with defaults(), contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        model = program.make().double()
        model = Front(model, dropout) if dropout else model
        inputs: Any = [program.batch(step) for step in range(STEPS)]
        for patch in SUPPORT[program.subject] if taken else ():
            stack.enter_context(patch())
        options: Any = {"before_step": before_step}
        try:
            if program.name in SHARDED:
                plan, axis = SHARDED[program.name]
                options |= {"steps": 1, "plan": plan}
                return "passes" if verify(model, {axis: 2}, inputs, program.loss_fn, **options).ok else "fails"
            return "passes" if check(model, inputs, program.loss_fn, **options).ok else "fails"
        except Exception as error:  # noqa: BLE001 - that is noticed, too
            return type(error).__name__
