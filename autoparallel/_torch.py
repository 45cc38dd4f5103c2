"""The private parts of torch that we use, in one place: a torch release breaks this file and no other.

Tested with torch 2.11 to 2.13.
"""

from __future__ import annotations

import importlib
import logging
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from operator import attrgetter
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import _resolve_process_group
from torch._compile import _disable_dynamo
from torch._decomp import decompositions as decompositions
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._functorch.autograd_function import autograd_function_apply as function_apply
from torch._guards import tracing
from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _random
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import has_side_effect
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils.hooks import BackwardHook

# In a build for CUDA, fake tensors pretend that there are eight GPUs; autograd starts a thread for each that it sees at
# its first backward, and a process with such threads cannot be forked any more. So it has its first one before.
if torch.backends.cuda.is_built() and not torch.cuda.is_available():
    torch.ones((), requires_grad=True).backward()

# What saves the inputs of a checkpoint; gone in 2.13.
NoopSaveInputs = getattr(checkpoint, "_NoopSaveInputs", None)

# Renamed in 2.13; 2.11 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

F = TypeVar("F", bound=Callable[..., Any])

_ONE_LAYER_LSTM = decompositions.one_layer_lstm


def one_layer_lstm(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A trace's LSTM, with states of the shape [rows, width]: before 2.13 torch's have a dim more."""
    outputs, (hidden, cell) = _ONE_LAYER_LSTM(*args, **kwargs)
    return outputs, (hidden.flatten(0, -2), cell.flatten(0, -2))


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` manages a module's parameters."""
    return getattr(module, "_is_fsdp_managed_module", False)


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where a tensor keeps what ``register_hook`` and ``register_post_accumulate_grad_hook`` are given."""


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among nested values, in their order; what operators read and make is looked at very often."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        values = pytree.tree_leaves(values) if type(values) in pytree.SUPPORTED_NODES else ()
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif type(value) not in _PLAIN:
            tensors += tensors_in(value)
    return tensors


def bytes_in(values: Any) -> int:
    """The size of all tensors among nested values."""
    return sum(x.nbytes for x in tensors_in(values))


def make_fake_mode() -> FakeTensorMode:
    """A fake tensor mode with symbolic shapes, which lets real constants in."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def is_composite(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator is differentiated through the others that it calls, and neither writes nor gives a view."""
    schema = operator._schema
    return not any(x.alias_info for x in (*schema.arguments, *schema.returns)) and has_composition(operator)


def has_composition(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator is differentiated through the others that it calls."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"))


def gives_view(target: Any) -> bool:
    """Whether a call's target is an operator that makes no memory of its own, or not always, as ``reshape``."""
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or target is torch.ops.aten.reshape.default)


def saved_as_they_are() -> AbstractContextManager[object]:
    """Inside, hooks on saved tensors that were entered before see none; ``torch.func.grad`` allows no others."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@contextmanager
def parametrizations_made_anew() -> Iterator[None]:
    """Inside, ``torch.nn.utils.parametrize.cached`` that was entered before keeps nothing."""
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


def dtype_of_cast(*args: Any, **kwargs: Any) -> torch.dtype | None:
    """The dtype among the arguments of ``Module.to``."""
    dtype: torch.dtype | None = torch._C._nn._parse_to(*args, **kwargs)[1]
    return dtype


def size_guards(value: torch.Tensor) -> list[tuple[Any, bool]]:
    """What a trace took for granted of its symbols, and whether torch's own code asked for it.

    Args:
        value: a fake tensor of the trace.
    """
    env = value.fake_mode.shape_env  # type: ignore[attr-defined]
    guards: dict[Any, bool] = {}
    for guard in env.guards:
        asker = getattr(guard.sloc.framework_loc, "filename", "")
        condition = env.replace(guard.expr)
        guards[condition] = guards.get(condition, True) and asker.startswith(FOLDER)
    return list(guards.items())


FOLDER = torch.__file__.rpartition("/")[0] + "/"
"""Where torch's own Python lies."""


def cast_module(module: nn.Module, cast: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Casts all parameters and buffers of a module in place; ``Module.to`` drops imaginary parts."""
    return module._apply(cast)


swap_tensors = FunctionType(
    torch.utils.swap_tensors.__code__,
    vars(torch.utils) | {"weakref": SimpleNamespace(getweakrefs=lambda tensor: [])},
)
"""``torch.utils.swap_tensors``, also where there are weak references to a tensor, as recurrent layers have to their
weights: they refer to the Python object, which stays what it is."""


def make_spec(
    mesh: DeviceMesh, placements: tuple[DTensorPlacement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """The description of a contiguous ``DTensor``, made once and shared by all tensors that fit it."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(strides), dtype))


def wrap_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A ``DTensor`` around a rank's local tensor, without any check or communication.

    ``DTensor.from_local`` costs 50 to 100 us a call, and a step makes one for every parameter.  ``__init__`` does
    nothing, but what Dynamo is told of it takes longer than the rest.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A ``DTensor``'s local tensor itself, not a differentiable view of it; a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_in_a_graph(parameter: torch.Tensor) -> bool:
    """Whether autograd has a node for a parameter, as graphs that it is in and hooks on several tensors hold."""
    return parameter._use_count() > 1  # type: ignore[attr-defined]


def memory_span(tensor: torch.Tensor) -> tuple[str, int, int]:
    """The device and the first and the last address (exclusive) of a tensor's elements; no address if it has none."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return str(tensor.device), 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def spec_of(tensor: DTensor) -> DTensorSpec:
    """The description of a ``DTensor``."""
    return tensor._spec


def locals_of(tensors: Sequence[Any]) -> list[Any]:
    """The local tensors of many ``DTensor``s at once; None where something else stands."""
    return _each(tensors, "_local_tensor")


def specs_of(tensors: Sequence[Any]) -> list[Any]:
    """The descriptions of many ``DTensor``s at once; None where something else stands."""
    return _each(tensors, "_spec")


def _each(tensors: Sequence[Any], name: str) -> list[Any]:
    try:
        return list(map(attrgetter(name), tensors))
    except AttributeError:
        return [getattr(t, name, None) for t in tensors]


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each of many tensors has been changed in place."""
    with torch._C.DisableTorchFunctionSubclass():
        return [t._version for t in tensors]


def grads_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """What ``.grad`` is of many tensors at once; looking for an override of it takes longer than reading it."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(attrgetter("grad"), tensors))


def mesh_without_groups(
    device_type: str, ranks: torch.Tensor, names: tuple[str, ...], rank: int | None = None
) -> DeviceMesh:
    """A mesh that nothing is communicated to make, and over which nothing can be sent.

    Args:
        rank: the one that stands here; None for this process's own.  On a mesh of other ranks ``DTensor``s are empty.
    """
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def left_by_dynamo(reason: str) -> Callable[[F], F]:
    """``torch.compiler.disable``, but Dynamo, whose import is a third of ours, is imported at the first call."""

    def decorate(function: F) -> F:
        disabled: Any = _disable_dynamo(function)
        disabled._torchdynamo_disable, disabled._torchdynamo_disable_msg = True, reason  # which Dynamo asks for
        return disabled

    return decorate


def import_tracer() -> None:
    """Imports Dynamo and what else traces a model, which takes long and sets environment variables: both would disturb
    a trace that is watched."""
    importlib.import_module("torch.export._trace")


def graph_module(graph: fx.Graph) -> fx.GraphModule:
    """A graph without submodules as a module, whose Python is written when it is first run: most are rewritten or
    copied, and never are."""
    return _LazyGraphModule(nn.Module(), graph)


def outside_of_dynamo() -> AbstractContextManager[Any]:
    """A context in which a backend of ``torch.compile`` may trace on its own, apart from the trace that called it."""
    return tracing(None)


@contextmanager
def without_fake_errors() -> Iterator[None]:
    """Keeps torch from logging, with a traceback, each operator that a trace cannot run: it is raised as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def source_of(node: fx.Node) -> str:
    """Where Dynamo found a graph input, such as ``L['self']._modules['up']._parameters['weight']``."""
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", node.name)
    return str(name() if callable(name) else name)


def graph_break_of(module: fx.GraphModule) -> tuple[str, list[traceback.FrameSummary]] | None:
    """Why Dynamo ended this graph before the end of the function, and where; None where it did not."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if not getattr(reason, "graph_break", False):
        return None
    return str(getattr(reason, "reason", "")), list(getattr(reason, "user_stack", []))


def leave_open(tensor: torch.Tensor, dims: list[int]) -> None:
    """Asks ``torch.compile`` to compile for any size of these dims, where it can."""
    torch._dynamo.maybe_mark_dynamic(tensor, dims)


def compile_by_inductor(graph: fx.GraphModule, inputs: list[Any], tag: str) -> Callable[..., Any]:
    """A graph of Dynamo's compiled by Inductor, its backward at once; kept in Inductor's folder for other processes,
    also where it has an ``autograd.Function``, whose traced backward is part of what it is found by.

    Args:
        tag: what else it is found by.
    """
    settings = {"autograd_cache_allow_custom_autograd_functions": True, "force_non_lazy_backward_lowering": True}
    tag = f"{torch.compiler.config.cache_key_tag} {tag}"
    with torch._functorch.config.patch(settings), torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")(graph, inputs)
    return compiled


def inductor_folder() -> str:
    """Where Inductor keeps what it compiled, for all processes of this user on this machine."""
    return str(importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir())


def is_compiled_call(filename: str, function: str) -> bool:
    """Whether a stack frame is the one in which ``torch.compile`` begins to run what it was given."""
    return filename.endswith("eval_frame.py") and function in ("compile_wrapper", "_fn")


def process_group(argument: Any) -> dist.ProcessGroup:
    """The process group that an operator was given: itself, boxed for TorchScript, or by name."""
    if isinstance(argument, str):
        return _resolve_process_group(argument)  # type: ignore[arg-type,unused-ignore]
    return argument if isinstance(argument, dist.ProcessGroup) else dist.ProcessGroup.unbox(argument)


def copy_parameter_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Registers the hooks of one parameter on another, in their order."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (getattr(source, "_post_accumulate_grad_hooks", None) or {}).values():
        target.register_post_accumulate_grad_hook(hook)


def is_transforming() -> bool:
    """Whether a transform of ``torch.func`` is running."""
    return torch._C._functorch.maybe_current_level() is not None


def draw_on_cpus(tracker: Any) -> None:
    """Has random operators on ``DTensor``s ask ``tracker``, where torch has none of its own: those need GPUs."""
    if _random._rng_tracker is None and not torch.accelerator.is_available():
        _random._rng_tracker = tracker


def read_whole_scalars() -> None:
    """Has ``.item()`` of a ``DTensor`` that is a summand on each rank read the sum: torch reads the rank's own number.

    Like every operator that needs the sum (``norm > 1``), it is a collective then, of all ranks of the mesh.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, _whole_scalar)


def _whole_scalar(operator: Any, args: tuple[Any, ...], _: Any) -> Any:
    [value] = args
    whole = value.full_tensor() if any(not p.is_replicate() for p in value.placements) else value.to_local()
    return operator(whole)


def after_backward(callback: Callable[[], Any]) -> None:
    """Calls ``callback`` when the backward pass that is running now has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def default_store() -> Any:
    """The key-value store that the processes' group was made with."""
    return dist.distributed_c10d._get_default_store()


def is_open(group: Any) -> bool:
    """Whether a process group has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def _backend_of(group: Any, device: str) -> Any:
    """What carries out a group's collectives on a kind of device; None where it has nothing for that."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def is_gloo(group: Any, device: str) -> bool:
    """Whether gloo carries out a group's collectives on a kind of device."""
    kind = getattr(dist, "ProcessGroupGloo", None)
    return kind is not None and isinstance(_backend_of(group, device), kind)


def timeout_of(group: Any, device: str) -> timedelta:
    """How long a process group waits for a rank."""
    for kind in (device, "cpu"):
        options = getattr(_backend_of(group, kind), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return dist.distributed_c10d.default_pg_timeout


def storage_mark(tensor: torch.Tensor) -> int:
    """A number of a tensor's storage, which no other has while there is a reference to that, a weak one at least."""
    return tensor.untyped_storage()._cdata


def storage_marks(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Numbers of the storages of tensors; a ``DTensor``'s own has no memory to compare."""
    return list(map(torch._C._storage_id, tensors))  # type: ignore[attr-defined]


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


def accumulated(ctx: Any, count: int) -> list[bool]:
    """Which of the last ``count`` inputs of an autograd function, whose backward runs now, have ``.grad`` added to.

    All that are trained under ``backward()``, the chosen ones under ``backward(inputs=...)``, and none under
    ``torch.autograd.grad()``, which hands gradients out instead.
    """
    nodes = [node for node, _ in ctx.next_functions[-count:]]
    try:
        return [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]
    except RuntimeError:  # a leaf under torch.autograd.grad()
        return [_accumulates(node) for node in nodes]


def _accumulates(node: Any) -> bool:
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where an optimizer keeps what is called before and after its steps."""

FILLER = "_init_group"
"""What gathers a group's tensors in the steps of torch's optimizers."""


def drop_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Leaves an object that shares another optimizer's hooks without any."""
    for name in STEP_HOOKS:
        setattr(optimizer, name, OrderedDict())


def call_innermost(optimizer: torch.optim.Optimizer, before: Any, after: Any) -> Callable[[], None]:
    """Has hooks called right before and right after an optimizer's step, all others outside of them; returns what
    removes them, when no hook is being called."""
    first: Any = optimizer._optimizer_step_pre_hooks
    last: Any = optimizer._optimizer_step_post_hooks
    first[_INNERMOST], last[_INNERMOST] = before, after
    last.move_to_end(_INNERMOST, last=False)

    def remove() -> None:
        first.pop(_INNERMOST, None)
        last.pop(_INNERMOST, None)

    return remove


_INNERMOST = -1
"""Among an optimizer's hooks, which torch numbers from 0."""


class Filled(NamedTuple):
    """What the step of one of torch's optimizers has gathered from a group before it updates.

    Attributes:
        params: the parameters that have gradients.
        rest: what belongs to them, beside the gradients.
        result: what else it has found out.
    """

    params: list[Any]
    rest: list[list[Any]]
    result: Any


def filler_of(kind: type[torch.optim.Optimizer]) -> Any:
    """See ``FILLER``; None where a class of optimizers has no such thing."""
    return getattr(kind, FILLER, None)


def note_filled(optimizer: torch.optim.Optimizer, into: list[Filled]) -> None:
    """Has an optimizer's next step note what it gathers from each group."""
    itself, filler = ref(optimizer), filler_of(type(optimizer))

    def fill(group: dict[str, Any], params: list[Any], grads: list[Any], *rest: list[Any]) -> Any:
        result = filler(itself(), group, params, grads, *rest)
        into.append(Filled(list(params), [list(some) for some in rest], result))
        return result

    setattr(optimizer, FILLER, fill)


def refill(optimizer: torch.optim.Optimizer, filled: Sequence[Filled], grads: Sequence[list[Any]]) -> None:
    """Hands an optimizer's next step what was noted, with other gradients, instead of having it gathered."""
    groups = zip(filled, grads, strict=True)

    def fill(_: dict[str, Any], params: list[Any], into: list[Any], *rest: list[Any]) -> Any:
        noted, new = next(groups)
        params += noted.params
        into += new
        for some, values in zip(rest, noted.rest, strict=True):
            some += values
        return noted.result

    setattr(optimizer, FILLER, fill)


def backward_hook_of(module: nn.Module) -> BackwardHook:
    """What runs a module's backward hooks, as they are registered now, in one call of it."""
    full = module._get_backward_hooks()[0] if module._backward_hooks or modules._global_backward_hooks else []
    return BackwardHook(module, full, module._get_backward_pre_hooks())


__all__ = [  # what torch's own modules have, handed on
    "BackwardHook", "SingleLevelFunction", "StorageWeakRef", "free_unbacked_symbols", "function_apply",
    "has_side_effect", "modules", "without_modes", "wrap_with_set_grad_enabled",
]  # fmt: skip
