"""What Dynamo gives a backend: where a graph is broken, and a graph as a model again.

[Note: graph breaks] Dynamo calls a backend once for each piece of a broken graph, without an error.  A piece is known
by the reason that Dynamo notes on a graph it had to end early, or by a frame of the user's own on the stack between
``torch.compile``'s and ours: the function that broke is running already, and its current line is where.  Where Dynamo
gives a function up as a whole (a break inside a loop), a backend may never be called, and the model runs as it is,
whole on every rank; ``torch.compile(..., fullgraph=True)`` turns that into Dynamo's own error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import preserve_node_meta

from autoparallel import _torch
from autoparallel.graph.lines import line_in
from autoparallel.graph.python_state import is_library
from autoparallel.rules import operator_name

# -- graph breaks ---------------------------------------------------------------------------------------------------


def find_graph_break(module: fx.GraphModule) -> str | None:
    """Where and why the graph that Dynamo gave us is not the whole function (see [Note: graph breaks])."""
    noted = _torch.dynamo.graph_break_of(module)
    if noted is not None:
        reason, stack = noted
        frames = [f for f in stack if not is_library(f.filename)] or stack
        where = (
            f'"{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}'
            if frames
            else "unknown"
        )
        return _explain_break(where, reason.strip().splitlines())
    frame = sys._getframe(1)
    running: Any = None
    while frame is not None:
        code = frame.f_code
        if _torch.dynamo.is_compiled_call(code.co_filename, code.co_name):
            if running is None:
                return None
            return _explain_break(line_in(running), [])
        if running is None and not is_library(code.co_filename):
            running = frame
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _explain_break(where: str, reason: Sequence[str]) -> str:
    said = "\n".join(line for line in reason[:4] if line.strip())
    return (
        f"the model breaks into several graphs at {where}\n{said}{chr(10) if said else ''}What to change: the whole "
        "model must be one graph for the backend 'autoparallel'. Take this line out of the model, or pass "
        "fullgraph=True to torch.compile for Dynamo's full account of it."
    )


# -- the graph as a model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A parameter or buffer of the model among the inputs of Dynamo's graph."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    is_parameter: bool


class Piece:
    """What Dynamo gave us, sorted: which graph inputs are parameters, buffers, sizes, and inputs of the call.

    Attributes:
        states: position among the graph's inputs to the parameter or buffer there.
        sizes: position of a size to the position and dim of the tensor that it is read from.
        inputs: the positions of the rest.
        dynamic: the positions of the inputs whose first dim may change from call to call.
    """

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.module = module
        nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
        paths = {i: _path(_torch.dynamo.source_of(n)) for i, n in enumerate(nodes)}
        is_state = {
            i: isinstance(x, nn.Parameter) or (isinstance(x, torch.Tensor) and _is_state(nodes[i]))
            for i, x in enumerate(example_inputs)
        }
        roots = {paths[i][0] for i, state in is_state.items() if state}
        self.states: dict[int, State] = {}
        self.scopes_with_root = len(roots) > 1
        names: set[str] = set()
        for i, x in enumerate(example_inputs):
            if is_state[i]:
                name = ".".join(paths[i] if self.scopes_with_root else paths[i][1:])
                if not name or name in names or not _is_path(name.split(".")):
                    name = nodes[i].name
                names.add(name)
                self.states[i] = State(name, x.shape, x.dtype, x.requires_grad, isinstance(x, nn.Parameter))
        traced = [n.meta.get("example_value") for n in nodes]
        self.sizes: dict[int, tuple[int, int]] = {}
        for i, value in enumerate(traced):
            if isinstance(value, torch.SymInt):
                place = _dim_of(value, traced)
                if place is not None:
                    self.sizes[i] = place
        self.inputs = [i for i in range(len(nodes)) if i not in self.states and i not in self.sizes]
        self.dynamic = {
            i for i in self.inputs
            if isinstance(traced[i], torch.Tensor) and traced[i].ndim and isinstance(traced[i].shape[0], torch.SymInt)
        }  # fmt: skip

    def describe(self, example_inputs: Sequence[Any]) -> list[str]:
        """The graph in words, the same on ranks that trace the same model."""
        lines = [f"{n.op} {n.name} {operator_name(n.target) if callable(n.target) else n.target}"
                 for n in self.module.graph.nodes]  # fmt: skip
        for i, x in enumerate(example_inputs):
            if isinstance(x, torch.Tensor):
                shape = ["?" if i in self.dynamic and d == 0 else str(s) for d, s in enumerate(x.shape)]
                lines.append(f"{shape} {x.dtype} {x.requires_grad}")
        return lines


def _path(source: str) -> list[str]:
    """``L['self']._modules['up'].weight`` as ``["self", "up", "weight"]``."""
    parts = re.findall(r"\[['\"]?([^'\"\]]+)['\"]?\]|\.(\w+)", source)
    flat = [a or b for a, b in parts]
    return [p for p in flat if p not in ("_modules", "_parameters", "_buffers")] or [source]


def _is_path(parts: Sequence[str]) -> bool:
    """Whether parts may name a module or a tensor of one."""
    return all(part.isidentifier() or part.isdigit() for part in parts)


def _is_state(node: fx.Node) -> bool:
    """Whether a graph input that is no parameter belongs to a module."""
    marks = node.meta.get("tensor_dict") or {}
    return "_dynamo_static_input_type" in marks or "_buffers[" in _torch.dynamo.source_of(node)


def _dim_of(size: torch.SymInt, traced: Sequence[Any]) -> tuple[int, int] | None:
    for i, value in enumerate(traced):
        if isinstance(value, torch.Tensor):
            for dim, length in enumerate(value.shape):
                if isinstance(length, torch.SymInt) and length.node.expr == size.node.expr:
                    return i, dim
    return None


class _Scope(nn.Module):
    """Stands for one of the model's modules, so that what it computes is named after it.

    Attributes:
        stands_for: the class of the module, where it is called.
    """

    stands_for: type = nn.Module

    def forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)


class _Replay(fx.Interpreter):
    """Runs Dynamo's graph call by call, each inside the scope of its module.

    Args:
        enter: the module that a call belongs to.
        functions: the ``autograd.Function``s that have been made of the graph's, by node.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        enter: Callable[[fx.Node], nn.Module | None],
        functions: dict[fx.Node, type[torch.autograd.Function]],
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._enter, self._functions = enter, functions
        self._scope: nn.Module | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._scope = self._enter(n)
        if n.target is _torch.export.function_apply:
            (forward, backward, *operands), options = self.fetch_args_kwargs_from_env(n)
            if n not in self._functions:
                self._functions[n] = make_function(forward, backward, options)
            return self._functions[n].apply(*operands[: tensor_count(operands, options)])
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._scope is None:
            return super().call_function(target, args, kwargs)
        return self._scope(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._scope is None:
            return super().call_method(target, args, kwargs)
        return self._scope(lambda x, *rest, **options: getattr(x, target)(*rest, **options), args, kwargs)


def make_function(
    forward: fx.GraphModule, backward: fx.GraphModule, options: Mapping[str, Any]
) -> type[torch.autograd.Function]:
    """An ``autograd.Function`` of the two graphs into which Dynamo has traced the user's.

    Torch's own operator for the two keeps what one call has saved where the next call overwrites it.
    """
    constant, checked = options.get("non_differentiable_idx", ()), options.get("saved_for_backward_idx", ())

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *operands: Any) -> Any:
            outputs, saved = _run(forward, operands)
            row = outputs if isinstance(outputs, tuple | list) else (outputs,)
            ctx.mark_non_differentiable(*(row[i] for i in constant))
            ctx.save_for_backward(*(saved[i] for i in checked))
            ctx.others = [None if i in checked else value for i, value in enumerate(saved)]
            return tuple(outputs) if isinstance(outputs, list) else outputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = list(ctx.others)
            for i, value in zip(checked, ctx.saved_tensors, strict=True):
                saved[i] = value
            return _run(backward, (*grads, *saved))

    return Function


def _run(graph: fx.GraphModule, operands: Sequence[Any]) -> Any:
    """What a graph of Dynamo's gives; in some releases its first input stands for the context."""
    count = sum(node.op == "placeholder" for node in graph.graph.nodes)
    return graph(*(None,) * (count - len(operands)), *operands)


def tensor_count(operands: Sequence[Any], options: Mapping[str, Any]) -> int:
    """How many of the operands of a Function are its own; in some releases others follow."""
    return sum(options["args_tensor_mask"]) if "args_tensor_mask" in options else len(operands)


class _Shared:
    """Keeps a value from being copied with the module that holds it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


class GraphModel(nn.Module):
    """Dynamo's graph as a model again: modules, parameters and buffers under the original names.

    Parameters and buffers have no storage but while a call runs, with which they are given (see ``holding``).
    """

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self._piece = _Shared(piece)
        slots: list[tuple[int, dict[str, Any], str, torch.Tensor]] = []
        for i, state in piece.states.items():
            scope, _, leaf = state.name.rpartition(".")
            empty = torch.empty(state.shape, dtype=state.dtype, device="meta")
            owner = self._scope(scope)
            if state.is_parameter:
                owner.register_parameter(leaf, nn.Parameter(empty, requires_grad=state.trainable))
            else:
                owner.register_buffer(leaf, empty)
            table: dict[str, Any] = owner._parameters if state.is_parameter else owner._buffers
            slots.append((i, table, leaf, table[leaf]))
        self._slots, self._functions = _Shared(slots), _Shared({})
        paths = {node: self._path(node) for node in piece.module.graph.nodes}
        for node, path in paths.items():
            self._scope(path)
            # The scopes that are entered name what is traced now.
            for source, kind in (node.meta.pop("nn_module_stack", None) or {}).values():
                if isinstance(owner := self._scope(self._path_of(source)), _Scope):
                    owner.stands_for = kind
        self._paths = _Shared({node: path for node, path in paths.items() if path and self._scope(path) is not self})

    @contextmanager
    def holding(self, arguments: Sequence[Any]) -> Iterator[None]:
        """Inside, the parameters and buffers are those among the graph's inputs."""
        for i, table, leaf, _ in self._slots.value:
            table[leaf] = arguments[i]
        try:
            yield
        finally:
            for _, table, leaf, empty in self._slots.value:
                table[leaf] = empty

    def _path(self, node: fx.Node) -> str:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if not stack or node.op not in ("call_function", "call_method"):
            return ""
        return self._path_of(stack[-1][0])

    def _path_of(self, source: object) -> str:
        """The path of a module in Dynamo's words."""
        path = _path(str(source).partition("@")[0])
        path = path if self._piece.value.scopes_with_root else path[1:]
        return ".".join(path) if _is_path(path) else ""

    def _scope(self, path: str) -> nn.Module:
        module: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in module._modules:
                if hasattr(module, part):
                    return module
                module.add_module(part, _Scope())
            module = module._modules[part]  # type: ignore[assignment]
        return module

    def forward(self, *inputs: Any) -> Any:
        piece: Piece = self._piece.value
        values = dict(zip(piece.inputs, inputs, strict=True))
        for i, state in piece.states.items():
            scope, _, leaf = state.name.rpartition(".")
            values[i] = getattr(self.get_submodule(scope), leaf)
        for i, (tensor, dim) in piece.sizes.items():
            values[i] = values[tensor].shape[dim]

        def enter(node: fx.Node) -> nn.Module | None:
            path = self._paths.value.get(node)
            return None if path is None else self.get_submodule(path)

        replay = _Replay(piece.module, enter, self._functions.value)
        with preserve_node_meta():  # so that what is traced now keeps the user's lines
            return replay.run(*(values[i] for i in range(len(values))), enable_io_processing=False)
