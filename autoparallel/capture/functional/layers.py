"""Layers that a model repeats, captured once.

Tracing a layer takes a third of a second, running it on fake tensors a few milliseconds.  So the whole model is run on
fake tensors and every operator written down; where this record shows the same layer again and again, only the first of
them are traced, and the graph is filled up with copies.

[Note: when that is sound] Of a ``ModuleList``, the layers in a row whose records are equal are a stack: the same
operators, the same constants, the same shapes, reading the same places of the layer before, the same values of what
came before all layers, and their own parameters under the same names, of the same kind. The first of them may read
from elsewhere what the others read of the layer before. The model without the inner layers of its stacks is run and
recorded, too, and must say the same everywhere else. After tracing, the graph's last two layers of a stack must again
be equal, node by node, and what follows may read the last one alone. Draws of random numbers count on from layer to
layer, as in a trace of all. Layers change no buffers of their own. Where anything differs, the whole model is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.capture.tracing.trace import CURRENT
from autoparallel.graph.captured import Captured
from autoparallel.graph.layers import Kinds, compare, draw_of, with_draw

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
    model: nn.Module, make: Callable[[], nn.Module], run: Callable[[nn.Module], Any], watch: AbstractContextManager[Any]
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
    whole = _Record(model, run, watch)
    stacks = whole.alike()
    if not stacks:
        return []
    part = make()
    leave_out(part, stacks)
    try:
        short = _Record(part, run)
    except Exception:  # noqa: BLE001 - a model that needs all its layers is traced with all of them
        return []
    return stacks if whole.without(stacks) == short.without([]) else []


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


class _Recorder(TorchDispatchMode):
    """Writes down every operator: what it is, its constants, what it reads, and the shapes of what it makes.

    Graphs that an operator runs are constants, known by their code.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Has Dynamo, by which torch traces those graphs, take no notice of it."""
        return True

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names  # of parameters, buffers and inputs, by id
        self.lines: list[tuple[Hashable, list[Hashable]]] = []  # an operator, and what it reads
        self.sources: dict[int, tuple[int, int]] = {}
        self.constants = 0
        self.held: list[Any] = []  # an id is unique while its owner lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # asks a tensor's device or layout, and computes nothing
            return out
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        reads: list[Hashable] = []
        constants: list[Hashable] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                reads.append(self.source(leaf))
                constants.append(None)
            else:
                constants.append((type(leaf).__name__, str(leaf)))
        results: list[Hashable] = []
        for i, value in enumerate(pytree.tree_leaves(out)):
            if isinstance(value, torch.Tensor):
                results.append((tuple(value.shape), value.dtype, value.requires_grad))
                self.sources[id(value)] = (len(self.lines), i)
                self.held.append(value)
            else:
                results.append((type(value).__name__, str(value)))
        trace = CURRENT.value
        mode = torch.is_grad_enabled(), trace is not None and trace.in_region
        self.lines.append(((func, str(spec), tuple(constants), tuple(results), mode), reads))
        return out

    def source(self, tensor: torch.Tensor) -> Hashable:
        if id(tensor) in self.sources:
            return self.sources[id(tensor)]
        if id(tensor) not in self.names:  # a constant: the very same one everywhere, or not alike
            self.names[id(tensor)] = f"constant {self.constants}"
            self.constants += 1
            self.held.append(tensor)
        return self.names[id(tensor)]


class _Record:
    """What one call of a model did, cut where the layers of its lists begin and end."""

    def __init__(
        self, model: nn.Module, run: Callable[[nn.Module], Any], watch: AbstractContextManager[Any] | None = None
    ) -> None:
        names = {id(t): f"buffer {n}" for n, t in reversed(list(model.named_buffers(remove_duplicate=False)))}
        names |= {id(t): f"parameter {n}" for n, t in reversed(list(model.named_parameters(remove_duplicate=False)))}
        recorder = _Recorder(names)
        self.begins: dict[tuple[str, str], int] = {}
        self.ends: dict[tuple[str, str], int] = {}
        self.regular = True
        for path, module in model.named_modules():
            if isinstance(module, nn.ModuleList):
                for name, layer in module.named_children():
                    layer.register_forward_pre_hook(self._note_begin((path, name), recorder), with_kwargs=True)
                    layer.register_forward_hook(self._note_end((path, name), recorder))
        with recorder, watch or nullcontext():
            results = run(model)
        self.lines = recorder.lines
        self.kinds = {  # what cannot be seen in the record: the kinds of what parameters and buffers are
            name: (tuple(t.shape), t.dtype, t.requires_grad, isinstance(t, nn.Parameter))
            for name, t in (*model.named_parameters(), *model.named_buffers())
        }
        leaves = pytree.tree_leaves(results)
        self.results = [recorder.source(t) if isinstance(t, torch.Tensor) else str(t) for t in leaves]
        self.result_spec = str(pytree.tree_structure(results))
        self.stacks = {path: [name for name, _ in module.named_children()] for path, module in _lists(model)}
        self._label()

    def _note_begin(self, key: tuple[str, str], recorder: _Recorder) -> Callable[..., None]:
        def before(*_: Any) -> None:
            self.regular &= key not in self.begins
            self.begins[key] = len(recorder.lines)

        return before

    def _note_end(self, key: tuple[str, str], recorder: _Recorder) -> Callable[..., None]:
        def after(*_: Any) -> None:
            self.ends[key] = len(recorder.lines)

        return after

    def _label(self) -> None:
        """Cuts the record: a layer reaches up to the next layer's first operator, the last one to its own last."""
        self.region: list[tuple[str, str, int]] = [("", "", i) for i in range(len(self.lines))]
        self.last: dict[str, str] = {}
        for path, names in self.stacks.items():
            begun = [name for name in names if (path, name) in self.begins]
            if begun != names or not names:
                continue
            starts = [self.begins[path, name] for name in names]
            stops = [*starts[1:], self.ends.get((path, names[-1]), -1)]
            if any(a >= b for a, b in zip(starts, stops, strict=True)) or self.region[starts[0]][0]:
                continue
            self.last[path] = names[-1]
            for name, a, b in zip(names, starts, stops, strict=True):
                for i in range(a, b):
                    self.region[i] = (path, name, i - a)
        gap, offset, before = 0, 0, ""
        for i, (path, _, _) in enumerate(self.region):
            if path:
                gap, offset = gap + (path != before), 0
            else:
                self.region[i] = ("", str(gap), offset)
                offset += 1
            before = path

    def _line(self, i: int) -> Hashable:
        """An operator of the record, what it reads named by its place relative to it."""
        path, name, _ = self.region[i]
        what, reads = self.lines[i]
        return what, tuple([self._place(read, path, name) for read in reads])

    def _place(self, read: Hashable, path: str, name: str) -> Hashable:
        if isinstance(read, str):
            prefix = f"{path}.{name}."
            kind, _, full = read.partition(" ")
            if path and full.startswith(prefix):
                return kind, "own", full.removeprefix(prefix), self.kinds.get(full)
            return read
        line, output = cast(tuple[int, int], read)
        there, its, offset = self.region[line]
        if there and there == path:
            names = self.stacks[path]
            steps = names.index(name) - names.index(its)
            if steps in (0, 1):
                return "layer", steps, offset, output
        if there and its == self.last[there] and there != path:
            return "last", there, offset, output
        return there, its, offset, output

    def _segments(self) -> dict[tuple[str, str], list[Hashable]]:
        segments: dict[tuple[str, str], list[Hashable]] = {}
        for i, (path, name, _) in enumerate(self.region):
            segments.setdefault((path, name), []).append(self._line(i))
        return segments

    def alike(self) -> list[Stack]:
        """The equal layers at the end of each list, where leaving some out pays."""
        stacks: list[Stack] = []
        if not self.regular:
            return stacks
        segments = self._segments()
        for path in self.last:
            names = self.stacks[path]
            if names != [str(i) for i in range(len(names))]:
                continue
            kinds: dict[Hashable, int] = {}
            alike = [
                kinds.setdefault((tuple(segments[path, name]), self._kind(f"{path}.{name}")), len(kinds))
                for name in names
            ]
            first = len(names) - 1
            while first and alike[first - 1] == alike[-1]:
                first -= 1
            if first and self._enters(path, names[first - 1], names[first]):
                first -= 1
            count = len(names) - first
            if count - _KEPT >= _LEAST_SAVED:
                stacks.append(Stack(path, first, count))
        return stacks

    def _enters(self, path: str, name: str, next_name: str) -> bool:
        """Whether a layer is as the next one, but that it reads from elsewhere what that one reads of it."""
        layers = [[i for i, region in enumerate(self.region) if region[:2] == (path, x)] for x in (name, next_name)]
        if self._kind(f"{path}.{name}") != self._kind(f"{path}.{next_name}") or len({*map(len, layers)}) > 1:
            return False
        entered: dict[Hashable, Hashable] = {}

        def same(read: Hashable, following: Hashable) -> bool:
            place = self._place(following, path, next_name)
            if isinstance(read, str) or place[:2] != ("layer", 1):  # type: ignore[index]
                return self._place(read, path, name) == place
            is_outside = self.region[cast(tuple[int, int], read)[0]][:2] != (path, name)
            return (
                is_outside
                and self._kind_of(read) == self._kind_of(following)
                and entered.setdefault(place, read) == read
            )

        for i, following in zip(*layers, strict=True):
            (what, reads), (next_what, next_reads) = self.lines[i], self.lines[following]
            if what != next_what or not all(map(same, reads, next_reads)):
                return False
        return True

    def _kind_of(self, read: Hashable) -> Hashable:
        """The kind of what an operator has made."""
        line, output = cast(tuple[int, int], read)
        what: Any = self.lines[line][0]
        return what[3][output]

    def _kind(self, prefix: str) -> Hashable:
        """The parameters and buffers of a layer."""
        return tuple(sorted((n.removeprefix(prefix), k) for n, k in self.kinds.items() if n.startswith(f"{prefix}.")))

    def without(self, stacks: list[Stack]) -> Hashable:
        """The record without the layers that are left out; what comes after them reads the last one that is left."""
        gone = {(stack.path, str(i)) for stack in stacks for i in stack.left_out()}
        segments = {key: tuple(lines) for key, lines in self._segments().items() if key not in gone}
        results = tuple([self._place(r, "", "") if not isinstance(r, str) else r for r in self.results])
        return tuple(segments.items()), results, self.result_spec


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            yield path, module


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
    if any(name.startswith(f"{stack.path}.{stack.template}.") for name in captured.mutated_buffers):
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
