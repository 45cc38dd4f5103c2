"""Layers that a model repeats, captured once.

Tracing a layer takes a third of a second, running it on fake tensors a few milliseconds.  So the whole model is run on
fake tensors and every operator written down; where this record shows the same layer again and again, only the first of
them are traced, and the graph is filled up with copies.

[Note: when that is sound] Of a ``ModuleList``, the layers in a row whose records are equal are a stack: the same
operators, the same constants, the same shapes, reading the same places of the layer before, the same values of what
came before all layers, and their own parameters under the same names, of the same kind. The first of them may read
from elsewhere what the others read of the layer before. The model without the inner layers of its stacks is run and
recorded, too, and must say the same everywhere else, with the same values in tensors that it makes of numbers. After
tracing, the graph's last two layers of a stack must again be equal, node by node, and what follows may read the last
one alone. Where layers ask for a tensor's value, once each, all of this must hold for both answers. Draws of random
numbers count on from layer to layer, as in a trace of all. Layers change no buffers of their own. Where anything
differs, the whole model is traced.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.capture.tracing.trace import CURRENT
from autoparallel.graph.captured import Captured
from autoparallel.graph.layers import Kinds, compare, draw_of, paths_around, with_draw

_KEPT = 2  # layers of a stack that are traced
_LEAST_SAVED = 3  # layers that are not traced; for fewer it does not pay


@dataclass(frozen=True)
class Stack:
    """Layers of one ``ModuleList`` that are alike.

    Attributes:
        path: of the list in the model.
        first: the first layer's place in the list.
        count: how many there are, up to the end of the list.
    """

    path: str
    first: int
    count: int

    @property
    def template(self) -> int:
        """The layer that is copied: the last one that is traced."""
        return self.first + _KEPT - 1

    def left_out(self) -> range:
        """The layers that are not traced."""
        return range(self.template + 1, self.first + self.count)


def find_stacks(
    model: nn.Module, make: Callable[[], nn.Module], run: Callable[[Any], Any], watch: AbstractContextManager[Any]
) -> list[Stack]:
    """The stacks of layers that need not be traced (see [Note: when that is sound]); the model runs in any case.

    Args:
        model: a copy of the model, its tensors fake.
        make: makes another one.
        run: calls a copy as it will be traced.
        watch: is entered while the whole model runs.
    """
    if not _stacks(model):
        with watch:
            run(model)
        return []
    whole = Record(model, run, watch)
    stacks = whole.alike()
    if not stacks:
        return []
    part = make()
    leave_out(part, stacks)
    try:
        short = Record(part, run)
    except Exception:  # noqa: BLE001 - a model that needs all its layers is traced with all of them
        return []
    return stacks if whole.equals_without(stacks, short) else []


def leave_out(model: nn.Module, stacks: list[Stack]) -> None:
    """Removes the layers that are not traced from a copy of the model; the others keep their names."""
    for stack in stacks:
        layers = model.get_submodule(stack.path)
        for i in stack.left_out():
            del layers._modules[str(i)]


def _stacks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The lists of layers that may repeat, by path."""
    stacks: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) >= _KEPT + _LEAST_SAVED:
            layers = list(module)
            if len(set(map(id, layers))) == len(layers) and len({type(layer) for layer in layers}) <= 4:
                inside = any(path.startswith(f"{outer}.") for outer in stacks)
                if not inside:
                    stacks[path] = layers
    return stacks


class _Recorder(_torch.export.UnnoticedMode):
    """Records every operator as a call of a graph: its constants, what it reads, and the kinds of what it makes.

    Graphs that an operator runs are constants, known by their code.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.calls: list[fx.Node] = []
        self._graph = fx.Graph()
        self._names = names  # of parameters and buffers, by id
        self._sources: dict[int, tuple[fx.Node, int]] = {}  # of tensors, by id: the node, and which of its results
        self._held: list[Any] = []  # an id is unique while its owner lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # which asks a tensor's device or layout, and computes nothing
            self.record(func, (args, kwargs or {}), out)
        return out

    def record(self, target: Any, reads: Any, makes: Any) -> None:
        """Adds a call.

        Args:
            reads, makes: nested values.
        """
        leaves, nesting = pytree.tree_flatten(reads)
        call = self._graph.call_function(target, (*map(self._read, leaves), str(nesting)))
        trace, results = CURRENT.value, pytree.tree_leaves(makes)
        call.meta["key"] = str((torch.is_grad_enabled(), trace is not None and trace.in_region))
        call.meta["val"] = str(list(map(_kind, results)))
        call.meta["questions"] = 0 if trace is None else len(trace.questions)
        self._sources |= {id(x): (call, i) for i, x in enumerate(results) if isinstance(x, torch.Tensor)}
        self._held += results
        self.calls.append(call)

    def _read(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf).__name__, str(leaf)
        if id(leaf) not in self._sources:
            node = self._graph.placeholder(self._names.get(id(leaf)) or _constant(leaf))
            node.meta["val"] = _kind(leaf)
            self._sources[id(leaf)] = node, 0
            self._held.append(leaf)
        return self._sources[id(leaf)]


def _constant(tensor: torch.Tensor) -> str:
    """What a tensor without a name is called: one that the model makes by its value, a fake by itself, which all copies
    of a model share."""
    if _torch.export.is_fake(tensor) or tensor.layout is not torch.strided:
        return f"constant {id(tensor)}"
    with _torch.export.unwatched():
        memory = _torch.tensors.as_bytes(tensor.detach().cpu())
        return f"constant {hashlib.sha256(memory.numpy().data).hexdigest()}"


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    return str((tuple(value.shape), value.dtype, value.requires_grad, isinstance(value, nn.Parameter)))


class Record:
    """What one call of a model did.

    Attributes:
        calls: in their order; the last one stands for what the model returned.
        layers: the calls of each layer of the lists that run from the first to the last, by their paths: a layer
            reaches up to the next layer's first call, the last one to its own last.
        held: the kinds of the parameters and buffers that a layer alone has, by its path.
    """

    def __init__(
        self, model: nn.Module, run: Callable[[Any], Any], watch: AbstractContextManager[Any] | None = None
    ) -> None:
        tensors = _torch.tensors.named_tensors(model)
        recorder = _Recorder({id(tensor): name for name, tensor in reversed(tensors)})
        self.calls = recorder.calls
        begins: dict[str, list[int]] = {}
        ends: dict[str, list[int]] = {}

        def note(places: dict[str, list[int]], path: str) -> Callable[..., None]:
            return lambda *_: places.setdefault(path, []).append(len(recorder.calls))

        lists = {path: len(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        for path in lists:
            for name, layer in model.get_submodule(path).named_children():
                layer.register_forward_pre_hook(note(begins, f"{path}.{name}"))
                layer.register_forward_hook(note(ends, f"{path}.{name}"))
        with recorder, watch or nullcontext():
            results = run(model)
        recorder.record(tuple, results, ())
        self.layers: dict[str, list[list[fx.Node]]] = {}
        self.held: dict[str, list[tuple[str, str]]] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            for outer in filter(begins.__contains__, paths_around(name)):
                self.held.setdefault(outer, []).append((name.removeprefix(outer), _kind(tensor)))
        self._kinds = Kinds()
        spans: list[range] = []
        for path, count in lists.items() if all(len(places) == 1 for places in begins.values()) else ():
            starts = [place for i in range(count) for place in begins.get(f"{path}.{i}", ())]
            stops = [*starts[1:], *ends.get(f"{path}.{count - 1}", ())]
            if not 0 < len(starts) == count == len(stops) or any(map(operator.ge, starts, stops)):
                continue
            if not any(starts[0] in span for span in spans):  # a list in a layer is a part of that
                spans.append(range(starts[0], stops[-1]))
                self.layers[path] = [self.calls[a:b] for a, b in zip(starts, stops, strict=True)]

    def alike(self) -> list[Stack]:
        """The equal layers at the end of each list, where leaving some out pays."""
        stacks: list[Stack] = []
        for path, layers in self.layers.items():
            first = len(layers) - 1
            while first and self._repeats(path, first, layers[first - 2] if first > 1 else []):
                first -= 1
            if first and self._repeats(path, first, None):  # of the first one, what enters may come from elsewhere
                first -= 1
            questions = [layer[0].meta["questions"] for layer in layers[first:]]
            once = all(b - a <= 1 for a, b in itertools.pairwise(questions))
            if len(layers) - first - _KEPT >= _LEAST_SAVED and once:
                stacks.append(Stack(path, first, len(layers) - first))
        return stacks

    def _repeats(self, path: str, i: int, before: Sequence[fx.Node] | None) -> bool:
        """Whether a layer of a list repeats the one before it (see ``compare``), with parameters of its own."""
        old, new = f"{path}.{i - 1}", f"{path}.{i}"
        first, second = self.layers[path][i - 1 : i + 1]
        alike = compare(first, second, self._kinds, before)
        return (
            alike is not None
            and self.held.get(old) == self.held.get(new)
            and all(x.target == old + str(y.target).removeprefix(new) for y, x in alike.placeholders.items())
        )

    def equals(self, other: Record) -> bool:
        """Whether another record, of another copy of the model, says the same."""
        return self.equals_without((), other)

    def equals_without(self, stacks: Sequence[Stack], short: Record) -> bool:
        """Whether another record is this one without layers that are left out; what comes after them reads the last one
        that is left."""
        instead: dict[fx.Node, fx.Node | None] = {}
        for stack in stacks:
            layers = self.layers[stack.path]
            template, following = layers[stack.template : stack.template + 2]
            if not {*template, *following}.issuperset(user for node in template for user in node.users):
                return False
            instead |= {node: None for i in stack.left_out() for node in layers[i]}
            instead |= dict(zip(layers[-1], template, strict=True))
        rest = [node for node in self.calls if node not in instead]
        twins: dict[fx.Node, fx.Node] = {}

        def same(whole: fx.Node, part: fx.Node) -> bool:
            if part.op == "placeholder":
                return whole.target == part.target and self._kinds.of(whole) == self._kinds.of(part)
            return instead.get(whole, whole) is twins[part]

        for node, twin in zip(rest, short.calls, strict=False):
            (what, reads), (what_twin, reads_twin) = self._kinds.call(node), self._kinds.call(twin)
            if what != what_twin or not all(map(same, reads, reads_twin)):
                return False
            twins[twin] = node
        return len(rest) == len(short.calls)


# ------------------------------------------------------------------------------------------------------- the graph


class NotAlike(Exception):
    """The traced layers of a stack are not copies of each other."""


def fill_up(graph: fx.Graph, stack: Stack, captured: Captured) -> None:
    """Inserts the layers that were not traced, as copies of the last traced one of their stack.

    Args:
        captured: it learns the parameters, the buffers and the draws of the copies.

    Raises:
        NotAlike: where the traced layers differ; the graph is not changed then.
    """
    if any(name.startswith(f"{stack.path}.{stack.template}.") for name in captured.mutated):
        raise NotAlike(f"the layers of {stack.path} change buffers of their own, which copies would not")
    parameters, buffers = captured.parameters, captured.buffers
    names = {**parameters, **buffers}
    owned = {node: names[node.name] for node in graph.nodes if node.op == "placeholder" and node.name in names}
    first, second = _stretches(graph, stack)
    alike = compare(first, second, Kinds())
    old, older = f"{stack.path}.{stack.template}.", f"{stack.path}.{stack.template - 1}."
    if alike is None or any(
        owned.get(x) != older + owned.get(y, "").removeprefix(old) for y, x in alike.placeholders.items()
    ):
        raise NotAlike(f"two layers of {stack.path} differ")
    draws = _draws_of_layer(graph, stack, first, second, captured.draws)
    _count_on(second[-1], draws * len(stack.left_out()))
    captured.draws += draws * len(stack.left_out())
    held = [node for node, name in owned.items() if name.startswith(old)]
    inside = set(second)
    before, point, place = second, second[-1], held[-1] if held else None
    for i in stack.left_out():
        copies = {node: before[offset] for node, offset in alike.carried.items()}
        for node in held:
            with graph.inserting_after(place):
                copy = graph.placeholder(_rename(str(node.target), stack, i))
            copy.meta = {**node.meta, "key": f"/{copy.name}#0"}
            table = parameters if node.name in parameters else buffers
            table[copy.name] = f"{stack.path}.{i}.{owned[node].removeprefix(old)}"
            copies[node], place = copy, copy
        for node in second:
            with graph.inserting_after(point):
                copy = graph.node_copy(node, lambda n, copies=copies: copies.get(n, n))  # type: ignore[misc]
            if (number := draw_of(node)) is not None:
                copy.args = with_draw(copy, number + draws * (i - stack.template))
            copy.meta = {**node.meta, "module": _move(node.meta["module"], stack, i)}
            copy.meta["key"] = _move(node.meta["key"], stack, i)
            copies[node], point = copy, copy
        before = [copies[node] for node in second]
        inside.update(before)
    for node, final in zip(second, before, strict=True):
        node.replace_all_uses_with(final, delete_user_cb=lambda user: user not in inside)
    for table in (parameters, buffers):
        ordered = {n.name: table[n.name] for n in graph.nodes if n.op == "placeholder" and n.name in table}
        table.clear()
        table.update(ordered)


def _stretches(graph: fx.Graph, stack: Stack) -> tuple[list[fx.Node], list[fx.Node]]:
    """The calls of the last two traced layers, which must be whole stretches of the graph, one after the other."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    places = [
        [i for i, node in enumerate(calls) if _is_in(node, f"{stack.path}.{layer}")]
        for layer in (stack.template - 1, stack.template)
    ]
    if not all(places) or [*places[0], *places[1]] != list(range(places[0][0], places[1][-1] + 1)):
        raise NotAlike(f"the calls of two layers of {stack.path} do not follow each other")
    return [calls[i] for i in places[0]], [calls[i] for i in places[1]]


def _draws_of_layer(
    graph: fx.Graph, stack: Stack, first: Sequence[fx.Node], second: Sequence[fx.Node], count: int
) -> int:
    """How many draws a layer makes: by so much the numbers of the second layer are larger than those of the first.

    Args:
        count: of the draws of the trace, those included whose results nobody reads: the graph does not show where they
            were made.
    """
    numbers = {draw_of(node) for node in graph.nodes} - {None}
    pairs = [(draw_of(a), draw_of(b)) for a, b in zip(first, second, strict=True)]
    steps = {b - a for a, b in pairs if a is not None and b is not None} or {0}
    if len(numbers) != count or len(steps) != 1:
        raise NotAlike(f"not all that the layers of {stack.path} draw can be seen")
    return steps.pop()


def _count_on(last: fx.Node, more: int) -> None:
    """Gives the draws behind a call the numbers that they have after so many draws more."""
    node = last.next
    while node.op != "root":
        if (number := draw_of(node)) is not None:
            node.args = with_draw(node, number + more)
        node = node.next


def _is_in(node: fx.Node, path: str) -> bool:
    return f"{node.meta.get('module', '')}.".startswith(f"{path}.")


def _move(text: str, stack: Stack, layer: int) -> str:
    """A module path or key of the template, as that of another layer."""
    old = f"{stack.path}.{stack.template}"
    return f"{stack.path}.{layer}{text.removeprefix(old)}"


def _rename(target: str, stack: Stack, layer: int) -> str:
    path = stack.path.replace(".", "_")
    return target.replace(f"{path}_{stack.template}_", f"{path}_{layer}_", 1)
