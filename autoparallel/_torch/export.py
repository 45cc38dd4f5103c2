"""``torch.export``, fake tensors and ``torch.fx``: what a trace is made with."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx, nn
from torch._decomp import decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._export import utils as _export_utils
from torch._functorch.autograd_function import autograd_function_apply as function_apply
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.export import ExportedProgram
from torch.export._remove_effect_tokens_pass import _remove_effect_tokens
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import (
    _ModuleStackTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.fx.node import has_side_effect
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._sympy.functions import Mod, PythonMod

from autoparallel._torch.numbers import is_of_floats
from autoparallel._torch.transforms import below_transforms

_EXPORT = "torch.export._trace"

VALIDATE_DEVICE = flex, "_validate_device"
"""The function of FlexAttention that raises where a CPU is to differentiate, and where it stands."""


class UncompiledMode(TorchDispatchMode):
    """A mode under which nothing is compiled: Dynamo need not be kept out of it at every operator, which takes time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class UnnoticedMode(TorchDispatchMode):
    """A mode that is called for operators that run graphs, too, and of which Dynamo, by which torch traces these,
    takes no notice."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """What Dynamo asks."""
        return True


class AttendingMode(UnnoticedMode):
    """A mode of which Dynamo takes no notice in FlexAttention alone; what else is compiled runs as in any mode."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """What Dynamo asks."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not flex.flex_attention.__code__:
            frame = frame.f_back
        return frame is not None


@contextmanager
def attention_differentiated_on_cpus() -> Iterator[None]:
    """Inside, FlexAttention on a CPU carries gradients, which torch computes there and does not offer."""
    before = getattr(*VALIDATE_DEVICE)
    setattr(*VALIDATE_DEVICE, lambda *_: None)
    try:
        yield
    finally:
        setattr(*VALIDATE_DEVICE, before)


@contextmanager
def compiled_run_plainly() -> Iterator[None]:
    """Inside, what ``torch.compile`` has made runs as it was written, as where torch itself traces: on tensors without
    memory its code would end the process.  The graphs of operators are traced in any case."""
    tracer = torch.fx._symbolic_trace
    before, tracer._is_fx_tracing_flag = tracer._is_fx_tracing_flag, True
    try:
        with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
            yield
    finally:
        tracer._is_fx_tracing_flag = before


TRACED = FakeTensor, FunctionalTensor
"""The classes of the tensors that a traced model sees."""


@functools.cache
def attributes_of_fakes() -> frozenset[str]:
    """The attributes that the tensors have that a traced model sees, beside those that anybody sets on them."""
    return frozenset(vars(FakeTensorMode().from_tensor(torch.empty(0))))


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, no mode and no class of tensors sees what is called."""
    with without_modes(), torch._C.DisableTorchFunction():
        yield


def indexing_by_tensors() -> AbstractContextManager[Any]:
    """Inside, a tensor of one number indexes without being read."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # it imports Dynamo

    return TransformGetItemToIndex()


GUARD_BOOL = SymNode.guard_bool


def is_unknown(truth: torch.SymBool, numbers: Collection[sympy.Symbol]) -> bool:
    """Whether only the program tells whether a relation holds: of how many rows values select, or of a number that is
    read of a tensor.

    Args:
        numbers: the symbols of those that a call is given.
    """
    return is_read(truth, numbers) and truth.node.shape_env._maybe_evaluate_static(truth.node.expr) is None


def is_read(number: Any, numbers: Collection[sympy.Symbol] = ()) -> bool:
    """Whether a number of a trace is made of what is read of tensors, and not of sizes alone.

    Args:
        numbers: the symbols of those that a call is given.
    """
    return not free_unbacked_symbols(number) <= {*numbers}


def hint_of(relation: SymNode, symbol: sympy.Symbol) -> int | None:
    """A size that a relation speaks of, in this trace; None for what only the program tells."""
    size = relation.shape_env.size_hint(symbol, allow_none=True)  # type: ignore[union-attr]
    return None if size is None else int(size)


def bound_size(env: ShapeEnv, symbol: sympy.Symbol) -> None:
    """Bounds a size of which no bound is known but that of 64 bits by one that torch's floats can divide exactly: it
    divides bounds where it takes the size for a part of another, and holds the quotient against them."""
    bounds = env.var_to_range.get(symbol)
    if bounds is not None and bounds.upper.is_Integer and bounds.upper > _MOST_ROWS:
        env.var_to_range[symbol] = type(bounds)(bounds.lower, _MOST_ROWS)


_MOST_ROWS = sympy.Integer(2**48)


def guard_strictly(truth: torch.SymBool) -> bool:
    """Whether a relation of sizes holds, where that is known before the program runs; else torch's error."""
    return bool(GUARD_BOOL(truth.node, "", 0))


def guard_bool(self: SymNode, file: str, line: int) -> bool:
    """What torch is told that asks for a relation of sizes of which one is known only when the program runs: what holds
    of two rows and more, where that is all it asks.

    It mostly asks whether there are none (``logsumexp``), and whether they are one, which broadcasts: what runs later
    are its own operators, which see how many there are.
    """
    try:
        return bool(GUARD_BOOL(self, file, line))
    except GuardOnDataDependentSymNode:
        return bool(self.guard_size_oblivious(file, line))


OF_TRACES = (
    fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException, GuardOnDataDependentSymNode,
    NotImplementedError,
)  # fmt: skip
"""The errors that operators raise of tensors without values alone."""


_ONE_LAYER_LSTM = decompositions.one_layer_lstm


def one_layer_lstm(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A trace's LSTM, with states of the shape [rows, width]: before 2.13 torch's have a dim more."""
    outputs, (hidden, cell) = _ONE_LAYER_LSTM(*args, **kwargs)
    return outputs, (hidden.flatten(0, -2), cell.flatten(0, -2))


def find_effects(graph: fx.Graph) -> list[fx.Node]:
    """The calls to which torch gives tokens that keep their order: a token, an operator and its arguments."""
    return list(graph.find_nodes(op="call_function", target=with_effects))


def without_effects(program: ExportedProgram) -> ExportedProgram:
    """A program without tokens, and without those calls whose results nobody reads."""
    return _remove_effect_tokens(program)


def make_fake_mode() -> FakeTensorMode:
    """A fake tensor mode with symbolic shapes, which lets real constants in."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def computing_on(kind: str) -> AbstractContextManager[Any]:
    """Inside, fake tensors of the CPU and of this kind of device may be operands of one operator, whose result is on
    this kind."""
    return torch._functorch.config.patch(fake_tensor_prefer_device_type=None if kind == "cpu" else kind)


def python_of(script: Any) -> Callable[..., Any]:
    """The Python that a function of TorchScript was made of, where torch knows it, as it does while it exports."""
    return getattr(script, "_torchdynamo_inline", None) or script


def autocasts() -> bool:
    """Whether an autocast is on, of whatever kind of device."""
    return any(map(torch.is_autocast_enabled, ("cpu", *_ACCELERATORS)))


def move_to_cpu(value: Any) -> None:
    """Has a fake tensor, which has no memory, say that it is on the CPU."""
    if isinstance(value, FakeTensor):
        value.fake_device = torch.device("cpu")


def forget_constant(value: Any) -> None:
    """Has a fake tensor's value not be computed with: that of a tensor which the model holds is a fake, too, of whose
    memory torch would read."""
    if isinstance(value, FakeTensor):
        value.constant = None


def is_real(value: Any) -> bool:
    """Whether a value is a tensor with values of its own, as variables around a model hold, and no stand-in."""
    plain = isinstance(value, torch.Tensor) and not (value.is_meta or is_fake(value))
    return plain and below_transforms(value) is value


def as_traced(value: Any) -> Any:
    """What a trace has of a tensor around the model, whose values are read when the program runs; any other value
    itself."""
    return value.detach() if is_real(value) else value


def has_unknown_sizes(mode: FakeTensorMode) -> bool:
    """Whether anybody has read a value, or a size that values decide, of tensors without values."""
    return bool(mode.shape_env.unbacked_symint_counter)  # type: ignore[union-attr]


def complete_users(module: fx.GraphModule) -> None:
    """Notes every node among the users of what it reads: where torch inlines a region that leaves the gradient mode as
    it is, it forgets those that nobody reads."""
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            for source in node.all_input_nodes:
                source.users.setdefault(node)


def graph_of_trace() -> fx.Graph | None:
    """The graph that is being traced on this thread."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def result_untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function gives, which leaves no call in the trace."""
    with disable_proxy_modes_tracing():
        return function(*args, **kwargs)


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """What a tensor is in the graph that is being traced."""
    mode = get_proxy_mode()
    return None if mode is None else get_proxy_slot(tensor, mode.tracer).proxy.node


def read_instead(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """What reads a tensor from here on, reads another in the trace."""
    mode = get_proxy_mode()
    assert mode is not None
    set_proxy_slot(tensor, mode.tracer, get_proxy_slot(other, mode.tracer))


def place_in_trace() -> tuple[fx.Graph | None, int]:
    """How far the trace on this thread has come."""
    graph = graph_of_trace()
    return graph, 0 if graph is None else len(graph.nodes)


def nodes_since(place: tuple[fx.Graph | None, int]) -> Iterator[fx.Node]:
    """What a trace has recorded since it came to a place, the last first."""
    graph, before = place
    return iter(()) if graph is None else itertools.islice(reversed(graph.nodes), len(graph.nodes) - before)


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


_OF_ONE: WeakKeyDictionary[ShapeEnv, dict[Any, None]] = WeakKeyDictionary()
"""What traces were answered, of relations that may be others where a size is 1."""


def note_of_one(truth: torch.SymBool, holds: bool) -> None:
    """Notes what a model was answered, where torch has answered it because it takes every open size for 2 at least."""
    relation, one = _of_any_size(truth.node.expr), sympy.Integer(1)
    is_open = not free_unbacked_symbols(truth) and not is_of_floats(relation)
    if is_open and any(relation.xreplace({size: one}) != sympy.sympify(holds) for size in relation.free_symbols):
        _OF_ONE.setdefault(truth.node.shape_env, {})[relation if holds else sympy.Not(relation)] = None


def _of_any_size(relation: Any) -> Any:
    """A relation of sizes with Python's remainder: torch's has none below 0, where a size of 1 may come to."""
    return relation.replace(Mod, PythonMod) if relation.has(Mod) else relation


def size_guards(value: torch.Tensor) -> list[tuple[Any, bool]]:
    """What a trace took for granted of its symbols, and whether torch's own code asked for it.

    Args:
        value: a fake tensor of the trace.
    """
    env = value.fake_mode.shape_env  # type: ignore[attr-defined]
    guards: dict[Any, bool] = {env.replace(condition): False for condition in _OF_ONE.get(env, ())}
    for guard in env.guards:
        asker = getattr(guard.sloc.framework_loc, "filename", "")
        condition = _of_any_size(env.replace(guard.expr))
        guards[condition] = guards.get(condition, True) and asker.startswith(FOLDER)
    return list(guards.items())


_ACCELERATORS = ("cuda", "xpu", "hpu", "mps")

FOLDER = torch.__file__.rpartition("/")[0] + "/"
"""Where torch's own Python lies."""


def keep_lines_of(function: object) -> None:
    """Lets traces note the lines of a function beside those of what is called ``forward``; before 2.13 they cannot."""
    note = getattr(torch.fx.proxy, "_register_stack_trace_anchor", None)
    if note is not None:
        note(function)


def name_anew(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Gives nodes of a graph the names that it would give them if it was made now, in this order."""
    renamed = set(nodes)
    names = graph._graph_namespace = fx.graph._Namespace()
    for node in graph.nodes:
        if node not in renamed:
            names.create_name(node.name, node)
    for node in nodes:
        node.name = names.create_name(graph._target_to_str(node.target), node)


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gives a call other arguments, without looking it up among the calls of its target, as assigning them does."""
    object.__setattr__(node, "args", args)
    if kwargs or node.kwargs:
        object.__setattr__(node, "kwargs", kwargs)


def copy_node(graph: fx.Graph, node: fx.Node, argument: Callable[[fx.Node], Any]) -> fx.Node:
    """A copy of a node at the end of a graph, as ``Graph.node_copy`` makes it, which takes most of its time to look for
    sizes among the arguments: those of a node that is there have been looked at.

    Args:
        argument: what a copy reads in the place of a node.
    """
    copy = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
    set_arguments(copy, fx.map_arg(node.args, argument), fx.map_arg(node.kwargs, argument) if node.kwargs else {})
    copy.meta.update(node.meta)
    return copy


def import_tracer() -> None:
    """Imports Dynamo and what else traces a model, which takes long and sets environment variables: both would disturb
    a trace that is watched."""
    importlib.import_module(_EXPORT)


def overriding() -> tuple[Any, str]:
    """Where the function stands that puts others in the place of ``max``, ``min`` and ``math.pow`` while a model is
    traced, in a module that takes a second to import."""
    return importlib.import_module(_EXPORT), "_override_builtin_ops"


def graphs_run(module: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The graphs of a module that a call of a higher-order operator of torch runs, such as the two of ``torch.cond``;
    none, where it is another call."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    values = [getattr(module, str(x.target), None) for x in node.all_input_nodes if x.op == "get_attr"]
    return [value for value in values if isinstance(value, fx.GraphModule)]


def graph_module(graph: fx.Graph) -> fx.GraphModule:
    """A graph without submodules as a module, whose Python is written when it is first run: most are rewritten or
    copied, and never are."""
    return _LazyGraphModule(nn.Module(), graph)


def forward_of(module: fx.GraphModule) -> Callable[..., Any]:
    """The method that runs a graph; not the module itself, which reports every exception."""
    _LazyGraphModule.force_recompile(module)
    return module.forward


@contextmanager
def without_reports() -> Iterator[None]:
    """Keeps torch from logging, with a traceback, each operator that a trace cannot run, and from printing all that was
    traced where a value would decide: both are raised as well."""
    names = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"
    loggers, export = [*map(logging.getLogger, names)], vars(importlib.import_module(_EXPORT))
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    export["print"] = _print_nothing
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        export.pop("print", None)


def _print_nothing(*_: object, **__: object) -> None:
    """Stands for ``print`` in the module of torch that exports, which prints nothing else."""


MODULES_THEMSELVES: tuple[Any, str, Any] = (
    _ModuleStackTracer, "enable_attr_proxy", property(lambda self: False, lambda self, value: None)
)  # fmt: skip
"""What has torch not put proxies in the place of submodules, by the way to each, as soon as one has two names: a model
would find that its modules are others than those among ``self.modules()``."""

_CALL_MODULE = _ModuleStackTracer.call_module


def _leave_module(self: _ModuleStackTracer, *args: Any) -> Any:
    """Calls a module, and takes it from the stack where it raises, too."""
    depth = len(self.module_stack)
    try:
        return _CALL_MODULE(self, *args)
    except BaseException:
        while len(self.module_stack) > depth:
            self.module_stack.popitem()
        raise


MODULES_LEFT: tuple[Any, str, Any] = _ModuleStackTracer, "call_module", _leave_module
"""What has a model catch what a module of it raises, and go on: torch would take what comes for a part of that module,
and end at the end of the one around it."""

OPERATORS_LISTED_ONCE: tuple[Any, str, Any] = (
    _export_utils, "_materialize_cpp_cia_ops", functools.cache(_export_utils._materialize_cpp_cia_ops)
)  # fmt: skip
"""What has torch look up all composed operators in its dispatcher once, not for every namespace of every graph that it
decomposes; those that a graph calls have been looked up by then."""

__all__ = [  # torch's own, handed on
    "ShapeEnv", "SymNode", "decompositions", "enable_python_dispatcher", "free_unbacked_symbols", "function_apply",
    "has_side_effect", "is_fake", "without_modes", "wrap_with_set_grad_enabled",
]  # fmt: skip
