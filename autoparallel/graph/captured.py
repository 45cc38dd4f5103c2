"""What is captured of a model: its forward graph on global shapes, and the inputs it was captured for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.graph.caches import HeldCache
from autoparallel.graph.layers import Run
from autoparallel.graph.leaves import Leaf, Number, Size
from autoparallel.graph.losses import NO_LOSS, LossWeight, is_loss
from autoparallel.graph.python_state import PythonState
from autoparallel.graph.shared_memory import SharedMemory
from autoparallel.placements import Invariant, Layout


@dataclass
class Captured:
    """A model's forward graph, on global shapes.

    Attributes:
        module: the graph; its placeholders are parameters, buffers, constants and inputs, its output a flat tuple:
            first the new values of mutated buffers and parameters, then the model's outputs.
        parameters, buffers: placeholder name to the name in the model (one name for a tied weight).
        constants: placeholder name to the tensor.
        inputs: for each leaf of the call's inputs, the placeholder's name, or None where the graph ignores it.
        mutated: the names of the buffers and parameters that the first outputs are new values of.
        outputs: for each leaf of the model's output, the index among the graph's outputs, or what it is instead.
        output_spec: how the outputs nest.
        loss: the index (among the graph's outputs) of the loss, where it is known (see ``capture.functional.outputs``).
        flowing: the indices of the outputs that can be differentiated.
        detached: the indices of those that could be without a known loss, and beside it are not.
        actual: the traced symbols' sizes in the call that was captured for (the trace itself uses larger ones).
        lengths: those of the symbols that are no sizes of the batch.
        guards: what the trace took for granted of the symbols; it serves sizes of which all of it is true.
        numbers: the leaves of the inputs that are numbers of Python's and left open.
        number_symbols: what stands for them in what is made of them, with their placeholders' names.
        assumed: what the trace took for granted of them; it serves numbers of which all of it is true.
        pinned: the attributes that are numbers which the call changes, and of which the trace serves one alone, with
            the line that fixes it.
        fixed: the lines at which the model fixed sizes or numbers that were to be open.
        weight: what the loss weighs among the microbatches of a step.
        mixed: of the other results, by index, those that microbatches would make otherwise, and why.
        steady: the mutated buffers that a call changes to the same whatever its rows are, as one that counts calls.
        rest_dtypes: parameter name to its dtype in the model, where it is used in another one.
        rebound: of the mutated buffers those that a call binds to a new tensor, instead of changing theirs in place.
        attributes: for each attribute of the model that a call sets, by its path: how its value nests, and its leaves.
        written: the inputs that a call changes in place, by their places among the leaves: the index, among the
            graph's outputs, of what each becomes.
        memory: of the results, by index, those that lie in that of a tensor of the model or of an input.
        set_at: the lines at which a call sets them, as far as they are known.
        registered: those of them that are buffers from then on, with whether they belong to the state dict.
        state: the values of Python's that the trace has read.
        next_state: those that the next call reads, where this one fills what is empty and the graph is that of both.
        draws: how many times a call draws random numbers.
        drawn: what it draws one by one: scripts, by what they draw from (see ``graph.drawn_numbers``).
        runs: the layers that are alike; passes that rewrite the graph before it is planned leave their nodes' names.
        left_out: the indices of outputs that the graph does not make any more; it has the loss in their place.
        time_first: the line of the recurrent layer that takes the first dim of the first input for time, where one
            does: the second is the batch.
        batch_dims: which dim is the batch then, of each leaf of the inputs that has it.
    """

    module: fx.GraphModule
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: list[str | None]
    mutated: list[str]
    outputs: list[Leaf]
    output_spec: pytree.TreeSpec
    loss: int | None = None
    flowing: list[int] = field(default_factory=list)
    detached: list[int] = field(default_factory=list)
    actual: dict[sympy.Symbol, int] = field(default_factory=dict)
    weight: LossWeight = NO_LOSS
    mixed: dict[int, str] = field(default_factory=dict)
    steady: frozenset[str] = frozenset()
    rest_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    rebound: frozenset[str] = frozenset()
    attributes: dict[str, tuple[pytree.TreeSpec, list[Leaf]]] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    memory: dict[int, SharedMemory] = field(default_factory=dict)
    set_at: dict[str, str] = field(default_factory=dict)
    registered: dict[str, bool] = field(default_factory=dict)
    state: PythonState = field(default_factory=PythonState)
    next_state: PythonState | None = None
    draws: int = 0
    drawn: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    lengths: frozenset[sympy.Symbol] = frozenset()
    guards: tuple[SizeGuard, ...] = ()
    numbers: tuple[int, ...] = ()
    number_symbols: dict[sympy.Symbol, str] = field(default_factory=dict)
    assumed: tuple[sympy.Basic, ...] = ()
    pinned: dict[str, str] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    left_out: frozenset[int] = frozenset()
    time_first: str = ""
    batch_dims: dict[int, int] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def placeholders(self) -> dict[str, fx.Node]:
        """The graph's placeholders, by name."""
        return {node.name: node for node in self.graph.find_nodes(op="placeholder")}

    @property
    def parameter_nodes(self) -> list[fx.Node]:
        """The placeholders that are parameters, in the order of the graph."""
        return [node for name, node in self.placeholders.items() if name in self.parameters]

    @property
    def input_nodes(self) -> list[fx.Node]:
        """The placeholders that are inputs, in the order of the leaves of a call."""
        placeholders = self.placeholders
        return [placeholders[name] for name in self.inputs if name in placeholders]

    def input_layouts(self, specs: Sequence[object], layouts: Sequence[Layout | None]) -> dict[str, Layout]:
        """The layouts of the inputs that are ``DTensor``s, by placeholder."""
        return {
            name: layout
            for name, spec, layout in zip(self.inputs, specs, layouts, strict=True)
            if name is not None and layout is not None and isinstance(spec, InputSpec)
        }

    def output_layouts(self, mode: str, axes: int) -> list[Layout | None]:
        """The layout in which each output must leave: whole, or None where it may stay as it is made.

        Args:
            mode: as ``Target.outputs``.
            axes: the number of mesh axes.
        """
        invariant: Layout = (Invariant,) * axes
        buffers = len(self.mutated)
        layouts: list[Layout | None] = []
        ends = {*self.written.values(), *self.number_outputs}
        for i, node in enumerate(self.results):
            whole = i < buffers or i in ends or node.meta["val"].ndim == 0
            whole = whole or mode == "gather" or (mode == "auto" and self.loss is None)
            layouts.append(invariant if whole else None)
        return layouts

    def rest_dtype(self, node: fx.Node) -> torch.dtype:
        """The dtype that a parameter has in the model."""
        dtype: torch.dtype = self.rest_dtypes.get(self.parameters[node.name], node.meta["val"].dtype)
        return dtype

    @property
    def results(self) -> list[fx.Node]:
        """The graph's outputs: first the new values of mutated buffers and parameters, then the model's outputs."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def objective(self) -> int | None:
        """The index of what is taken for the loss where one is asked for: the known one, or the one scalar among the
        outputs that can be differentiated, which alone is then."""
        results = self.results
        scalars = [i for i in self.flowing if is_loss(results[i])]
        return scalars[0] if self.loss is None and len(scalars) == 1 else self.loss

    @property
    def flows_from_loss_alone(self) -> bool:
        """Whether nothing but the loss is differentiated, where that is known."""
        return self.objective is not None and self.flowing == [self.objective]

    @cached_property
    def own_outputs(self) -> frozenset[int]:
        """The indices of the outputs whose memory is no input's and no other output's, whatever the plan."""
        roots: dict[fx.Node, set[fx.Node]] = {}
        for node in self.graph.nodes:
            target = node.target
            makes = isinstance(target, torch._ops.OpOverload) and target.namespace != "autoparallel"
            makes = makes and not _torch.export.gives_view(target)
            read = [roots[n] for n in node.all_input_nodes if not isinstance(n.meta.get("val"), torch.SymInt)]
            roots[node] = {node} if makes or not read else set().union(*read)
        memory = [roots[node] for node in self.results]
        users = Counter(node for nodes in memory for node in nodes)
        unshared = {node for node, count in users.items() if count == 1 and node.op != "placeholder"}
        return frozenset(i for i, nodes in enumerate(memory) if nodes <= unshared)

    @cached_property
    def outputs_before(self) -> dict[int, tuple[int, ...]]:
        """For the index of each output that is differentiated, those of others that it is computed of."""
        flowing = [(i, self.results[i]) for i in self.flowing]
        before: dict[fx.Node, set[int]] = {}
        for node in self.graph.nodes:
            cut = node.target is torch.ops.aten.detach.default
            read = [] if cut else [before[n] for n in node.all_input_nodes]
            before[node] = set().union(*read) | {i for i, result in flowing if result is node}
        return {i: tuple(sorted(before[node] - {i})) for i, node in flowing if len(before[node]) > 1}

    @property
    def batches(self) -> frozenset[sympy.Symbol]:
        """The symbols that are sizes of the batch; none where the trace fixes it."""
        return frozenset(self.actual) - self.lengths

    @property
    def fixes_sizes(self) -> bool:
        """Whether sizes are fixed that others would leave open."""
        return bool(self.time_first or self.fixed)

    @property
    def why_fixed(self) -> str:
        """Where the model fixes sizes that others would leave open, and what to write instead."""
        if self.time_first:
            return (
                f"the layer at {self.time_first} takes the first dim of the first input for time, and only a first dim "
                "stays open as the batch: batch_first=True, and inputs [batch, time, ...]"
            )
        if not self.fixed:
            return (
                "what the model asks of its sizes (such as if x.shape[1] > ...), or of numbers that its calls change "
                "or draw, has another answer for others"
            )
        lines = "; and at ".join(self.fixed)
        return (
            f"the model fixes a size or a number at {lines}. What range(...), an index of a list or a function "
            "such as math.gamma(n) reads into Python is fixed: x.shape[0], int(n) and tensors stay open"
        )

    def rows(self, specs: Sequence[Any], batch: int) -> int:
        """How many rows a call has whose first dims are ``batch``."""
        return next((int(specs[leaf].shape[dim]) for leaf, dim in self.batch_dims.items()), batch)

    def is_batch(self, size: Any) -> bool:
        """Whether a traced size is the batch's, or a multiple of it."""
        return not isinstance(size, int) and any(_is_multiple(size.node.expr, s) for s in self.batches)

    def is_open(self, specs: Sequence[object]) -> bool:
        """Whether the trace serves fewer rows of the batch, in all of a call's inputs that have them."""
        placeholders = self.placeholders
        rows = [
            placeholders[name].meta["val"].shape[0]
            for name, spec in zip(self.inputs, specs, strict=True)
            if name in placeholders and isinstance(spec, InputSpec) and spec.batch
        ]
        return bool(self.batches) and all(map(self.is_batch, rows))

    @property
    def changed_parameters(self) -> frozenset[str]:
        """The parameters that a call changes in place."""
        return frozenset(self.mutated) & frozenset(self.parameters.values())

    @property
    def saved_buffers(self) -> frozenset[str]:
        """The buffers that a call changes although the backward may need what they were."""
        changed = set(self.mutated) - self.rebound
        return frozenset(
            self.buffers[name]
            for name, node in self.placeholders.items()
            if self.buffers.get(name) in changed
            if any(user.meta.get("backward") for user in node.users)
        )

    @property
    def set_in_memory(self) -> set[str]:
        """The attributes and buffers that a call sets to what lies in the memory of other tensors."""
        attributes = {
            name
            for name, (_, leaves) in self.attributes.items()
            if any(isinstance(leaf, int) and leaf in self.memory for leaf in leaves)
        }
        return attributes | {self.mutated[index] for index in self.memory if index < len(self.mutated)}

    @property
    def output_indices(self) -> set[int]:
        """Which of the graph's outputs a call returns, as tensors or as their values."""
        leaves = [leaf.index if isinstance(leaf, Number) else leaf for leaf in self.outputs]
        return {leaf for leaf in leaves if isinstance(leaf, int)}

    @cached_property
    def number_outputs(self) -> frozenset[int]:
        """The indices of the outputs whose values a call returns, or sets, as numbers."""
        return frozenset(leaf.index for leaf in self._leaves if isinstance(leaf, Number))

    @property
    def _leaves(self) -> list[Leaf]:
        """The leaves of the outputs, and of what a call sets."""
        return [*self.outputs, *(leaf for _, parts in self.attributes.values() for leaf in parts)]

    @cached_property
    def returns_sizes(self) -> bool:
        """Whether a leaf of the outputs is a size of the call."""
        return any(isinstance(leaf, Size) for leaf in self._leaves)

    @cached_property
    def returns_caches(self) -> bool:
        """Whether caches of generation are among the outputs."""
        return HeldCache.__name__ in str(self.output_spec)

    @cached_property
    def returns_fields(self) -> bool:
        """Whether outputs of transformers are returned, whose fields have an order of their own."""
        return "Output" in str(self.output_spec)

    def copy(self) -> Captured:
        """The same graph once more, for another program to be made of."""
        return replace(self, module=_torch.export.graph_module(copy_graph(self.graph)))

    def part(self, graph: fx.Graph) -> Captured:
        """The capture with another graph, and what is known of those of its placeholders that this one has, too."""
        names = {node.name for node in graph.nodes if node.op == "placeholder"}
        return replace(
            self,
            module=_torch.export.graph_module(graph),
            parameters={node: name for node, name in self.parameters.items() if node in names},
            buffers={node: name for node, name in self.buffers.items() if node in names},
            constants={node: value for node, value in self.constants.items() if node in names},
        )


_MANY = math.factorial(20)  # rows, which all small numbers divide


@cache
def _is_multiple(size: sympy.Expr, batch: sympy.Symbol) -> bool:
    """Whether a size is the batch's, times or divided by something: a batch twice as large makes it a multiple."""
    if batch not in size.free_symbols:
        return False
    others = dict.fromkeys(size.free_symbols - {batch}, 97)
    once, twice = (int(size.subs({**others, batch: rows})) for rows in (_MANY, 2 * _MANY))
    return once > 0 and twice % once == 0


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """The same graph once more."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = _torch.export.copy_node(copy, node, copies.__getitem__)
    return copy


@dataclass(frozen=True)
class SizeGuard:
    """What a trace took for granted of its sizes.

    Attributes:
        condition: a relation of traced symbols.
        is_torchs: whether torch asked for it, and not the model.  Where torch asks whether a size is one, it wants to
            know what a broadcast does, so that a batch of one row is served like a larger one.
    """

    condition: sympy.Basic
    is_torchs: bool

    def holds(self, actual: Mapping[Any, int]) -> bool:
        """Whether it is true of these sizes."""
        if self.condition.xreplace(actual) == sympy.true:
            return True
        larger = {symbol: sympy.Integer(max(int(size), 2)) for symbol, size in actual.items()}
        return self.is_torchs and larger != actual and self.condition.xreplace(larger) == sympy.true


@dataclass(frozen=True)
class InputSpec:
    """One tensor among the inputs of a call.

    Attributes:
        shape: the global shape of the actual call.
        batch: how many rows of the batch one unit of dim 0 stands for; 0 when dim 0 is not the batch.
        open: the other dims whose size is left open, each with the number of a length that it shares.
        twin: the number of the earlier input that is the same tensor; None where there is none.
        is_number: whether its sizes stand for a number that calls change (see ``graph.carried_attributes``).
        is_to_require: whether it requires a gradient because forward is known to have it require one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    batch: int
    open: tuple[tuple[int, int], ...] = ()
    twin: int | None = None
    is_number: bool = False
    is_to_require: bool = False

    @property
    def fixed_shape(self) -> tuple[int, ...]:
        """The shape, with 0 for what is open: the batch, and the dims of ``open``."""
        dims = {dim for dim, _ in self.open} | ({0} if self.batch else set())
        return tuple([0 if dim in dims else n for dim, n in enumerate(self.shape)])

    @property
    def is_integer(self) -> bool:
        """Whether it holds integers or truth values: tokens, labels, masks."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex)


@dataclass(frozen=True)
class NumberSpec:
    """A number among the inputs of a call that is left open: the program is given it as a tensor of no dims.

    Attributes:
        kind: int or float.
        value: in the actual call.
        is_drawn: whether it is drawn for the call (see ``graph.drawn_numbers``): then it is always open.
    """

    kind: type
    value: int | float = field(compare=False, repr=False)
    is_drawn: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The one that holds every number of its kind, within 64 bits."""
        return torch.int64 if self.kind is int else torch.float64

    def tensor(self) -> torch.Tensor:
        """What the program is given."""
        return torch.tensor(self.value, dtype=self.dtype)


def describe_inputs(leaves: Sequence[Any]) -> tuple[list[InputSpec | Any], int]:
    """Tells the batch dim of each input: dim 0, where it is the first tensor's batch size or a multiple of it."""
    batch = next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.ndim > 0), 0)
    specs: list[InputSpec | Any] = []
    first: dict[int, int] = {}
    for number, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor):
            specs.append(x)
            continue
        rows = x.shape[0] if x.ndim else 0
        multiple = rows // batch if batch and rows and rows % batch == 0 and (batch > 1 or rows == 1) else 0
        earlier = first.setdefault(id(x), number)
        twin = earlier if earlier != number else None
        specs.append(InputSpec(tuple(x.shape), x.dtype, x.requires_grad, multiple, twin=twin))
    return specs, batch
