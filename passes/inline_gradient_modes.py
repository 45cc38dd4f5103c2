"""Writes gradient modes into a forward graph: what runs under ``torch.no_grad()`` reads its operands detached.

``torch.export`` keeps a region of another gradient mode as one call; decomposing inlines it, and the mode is lost.  So
regions are inlined here, before: an operator under ``no_grad`` reads each tensor that carries a gradient through one
``detach``, shared by the region, unless it returns the tensor itself; one in an ``enable_grad`` inside of it reads the
tensors themselves.

A parameter that is changed under ``no_grad``, or through its ``data``, has another value from there on and the same
gradient; where its value was read before, with a gradient, it is refused:
    detach = aten.detach(w);  copy_ = aten.copy_(detach, v);  linear = aten.linear(x, w)
    clone = aten.clone(w);  detach = aten.detach(w);  copy_ = aten.copy_(detach, v);  detach_1 = aten.detach(w)
    with_value = autoparallel.with_value(clone, detach_1);  linear = aten.linear(x, with_value)

Before (x carries a gradient, ema is a buffer):
    linear = aten.linear(x, w)
    wrap = wrap_with_set_grad_enabled(False, submod_1, ema, linear);  getitem = wrap[0]
    mul = aten.mul(linear, getitem)
    submod_1:  add_ = aten.add_(ema, linear);  return (add_,)
After:
    linear = aten.linear(x, w)
    detach = aten.detach(linear);  add_ = aten.add_(ema, detach)
    mul = aten.mul(linear, add_)

``x.detach_()`` gives what reads x from there on a tensor of its own, if nothing else shares x's memory any more:
    mul = aten.mul(x, w);  detach_ = aten.detach_(mul);  add_ = aten.add_(mul, 1)
    mul = aten.mul(x, w);  detach = aten.detach(mul);  clone = aten.clone(detach);  add_ = aten.add_(clone, 1)

Decomposing makes views anew of what is written through them, and would detach it once more.  So where something that
carries a gradient is written through ``detach()`` of what carries none, that becomes a plain view, and it is the latter
that is read detached from there on:
    detach = aten.detach(x);  add_ = aten.add_(detach, w);  mul = aten.mul(add_, x)
    alias = aten.alias(x);  add_ = aten.add_(alias, w);  detach = aten.detach(x);  mul = aten.mul(add_, detach)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel._torch.casts import wrap_with_autocast
from autoparallel._torch.export import graphs_run, has_composition, make_fake_mode, wrap_with_set_grad_enabled
from autoparallel.graph.errors import refusal
from autoparallel.graph.layers import is_checkpointed
from autoparallel.graph.lines import line_of, marks_of
from autoparallel.operators.changed_parameters import with_value
from autoparallel.operators.derivatives import DERIVATIVE, LEAF
from autoparallel.passes.emitter import replace_node
from autoparallel.passes.mark_gradients import is_continuous, stops_gradient
from autoparallel.rules.calls import may_have_gradient
from autoparallel.rules.shapes import hint

_OF_ANY_MODE = (operator.getitem, DERIVATIVE)
"""What carries a gradient under ``no_grad``, too: what a derivative is taken of is made elsewhere."""


def inline_gradient_modes(
    module: fx.GraphModule,
    differentiable: Collection[str],
    *,
    parameters: Collection[str] = (),
    enabled: bool = True,
    transparent: Callable[[fx.Node], bool] = lambda node: False,
    aliases: Callable[[fx.Node], bool] = lambda node: False,
) -> None:
    """Rewrites ``module`` in place.

    Args:
        differentiable: the placeholders that carry a gradient.
        parameters: those that are parameters.
        enabled: the gradient mode in which the model is called.
        transparent: whether a call reads its operands as they are, whatever the mode.
        aliases: whether a call that is no operator of torch returns what shares memory with its operands.

    Raises:
        CaptureError: where a tensor that carries a gradient is changed in place without its gradient noticing, and
            where a model that is called without gradients makes something inside that carries one, of which it takes
            no gradients itself.
    """
    modes = dict(_flatten(module, enabled))
    for node, (mode, _) in modes.items():
        for inner in graphs_run(module, node) if node.target is not wrap_with_autocast else ():
            if not any(_calls_of(wrap_with_set_grad_enabled, inner)):
                continue
            operands = {x.name for x in inner.graph.find_nodes(op="placeholder") if may_have_gradient(x.meta["val"])}
            inline_gradient_modes(inner, operands, enabled=mode, transparent=transparent, aliases=aliases)
            inner.recompile()
    derivatives = list(_calls_of(DERIVATIVE, module))
    if not derivatives:
        for leaf in _calls_of(LEAF, module):
            modes.pop(leaf, None)
            replace_node(leaf, leaf.args[0])
    if not enabled and not derivatives:
        # Only what reads a parameter or an input there, or a view of one, makes something that carries a gradient.
        carrying = {x for x in module.graph.find_nodes(op="placeholder") if x.name in differentiable}
        for node, (mode, _) in modes.items():
            if mode and not carrying.isdisjoint(node.all_input_nodes):
                raise refusal(
                    "the model is called under torch.no_grad() or torch.inference_mode(), and enables gradients inside",
                    line_of(node),
                    "call it with gradients enabled",
                )
            if not carrying.isdisjoint(_aliases(node)[0]):
                carrying.add(node)
    elif modes:
        # Those by which a derivative is taken: the model may have made them require gradients.
        leaves = {x for call in derivatives for x in cast(Sequence[fx.Node], call.args[1])}
        _Walk(module.graph, modes, differentiable, parameters, transparent, aliases, leaves).run()


def _calls_of(target: Any, module: fx.GraphModule) -> Iterator[fx.Node]:
    """The calls of an operator, also in regions of autocast."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            yield from inner.graph.find_nodes(op="call_function", target=target)


def _flatten(module: fx.GraphModule, enabled: bool) -> Iterator[tuple[fx.Node, tuple[bool, int]]]:
    """Inlines all regions; gives every call with its mode and its region's number."""
    graph, regions, pending = module.graph, 0, list(module.graph.nodes)
    where = dict.fromkeys(pending, (enabled, 0))
    names: set[str] = set()
    while pending:
        node = pending.pop(0)
        if node.op == "get_attr" and all(user.target is wrap_with_set_grad_enabled for user in node.users):
            names.add(str(node.target))
            continue
        if node.target is not wrap_with_set_grad_enabled:
            if node.op == "call_function":
                yield node, where[node]
            continue
        regions += 1
        mode, source, *operands = node.args
        assert isinstance(mode, bool) and isinstance(source, fx.Node)
        inner = module.get_submodule(str(source.target)) if source in where else None
        assert isinstance(inner, fx.GraphModule)
        copies: dict[fx.Node, fx.Node] = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
        entered = set(copies)
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(inner.graph, copies)
        calls = [copy for part, copy in copies.items() if part not in entered]
        for copy in calls:
            where[copy] = mode, regions
            if copy.op == "get_attr":  # a region in the region, or a tensor
                name = f"{str(source.target).replace('.', '_')}_{copy.target}"
                module.add_module(name, inner.get_submodule(str(copy.target)))
                copy.target = name
        for user in list(node.users):
            assert user.target is operator.getitem
            replace_node(user, results[user.args[1]])
            if user in pending:
                pending.remove(user)
        graph.erase_node(node)
        pending = calls + pending
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users and node.target in names:
            graph.erase_node(node)
    for name in names:
        if not any(node.op == "get_attr" and node.target == name for node in graph.nodes):
            module.delete_submodule(name)


class _Walk:
    """One walk through the calls, which knows what carries a gradient and what shares memory with what."""

    def __init__(
        self,
        graph: fx.Graph,
        modes: dict[fx.Node, tuple[bool, int]],
        differentiable: Collection[str],
        parameters: Collection[str],
        transparent: Callable[[fx.Node], bool],
        aliases: Callable[[fx.Node], bool],
        leaves: Collection[fx.Node],
    ) -> None:
        self.graph, self.modes, self.transparent, self.aliases = graph, modes, transparent, aliases
        self.roots: dict[fx.Node, frozenset[fx.Node]] = {}  # whose memory a tensor is
        self.carries: dict[fx.Node, bool] = {}
        self.severed: set[fx.Node] = set()  # shares memory with what carries a gradient, but not the gradient
        self.stops: dict[fx.Node, frozenset[fx.Node]] = {}  # through which detach() it shares the memory of its roots
        self.tied: set[fx.Node] = set()  # memory that the results of an opaque call may share
        self.detached: dict[tuple[fx.Node, int], fx.Node] = {}
        self.parameters: dict[fx.Node, list[fx.Node]] = {}  # by what names each is read
        self.named: dict[fx.Node, fx.Node] = {}  # which of them a name is of
        self.overtaken: list[tuple[fx.Node, list[fx.Node]]] = []  # changes of parameters, what has read these
        self.leaves = leaves
        self.apart: set[fx.Node] = set()  # those of them that carry none of what is trained
        self.last_placeholder = next(reversed(graph.find_nodes(op="placeholder")), None)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.roots[node] = frozenset([node])
                self.stops[node] = frozenset()
                self.carries[node] = node.name in differentiable
                if node.name in parameters:
                    self._name(node, node)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and not self._cut(node):
                self._visit(node, *self.modes[node])
        self._require_unread()

    def _cut(self, node: fx.Node) -> bool:
        """Has what reads ``x`` behind ``x.detach_()`` read a tensor of its own, where nothing else shares x's memory
        any more; whether that was done."""
        if node.target is not torch.ops.aten.detach_.default:
            return False
        target = node.all_input_nodes[0]
        roots, enabled_in = self.roots[target], self.modes[node]
        readers = [user for user in target.users if user > node]
        others = [x for x, owners in self.roots.items() if x is not target and owners & roots]
        if not self._carries_trained(target) or any(x.op == "placeholder" or x in self.tied for x in roots):
            return False
        if any(user > node for x in others for user in x.users):
            return False
        with self.graph.inserting_before(node):
            detached = self.graph.call_function(torch.ops.aten.detach.default, (target,))
            copied = self.graph.call_function(torch.ops.aten.clone.default, (detached,))
        for new in (detached, copied):
            new.meta = {"val": node.meta["val"], **marks_of(node)}
            self._visit(new, *enabled_in)
        for user in readers:
            user.replace_input_with(target, copied)
        replace_node(node, copied)
        return True

    def _visit(self, node: fx.Node, enabled: bool, region: int) -> None:
        shared, written = _aliases(node)
        if node.target is wrap_with_autocast:
            self._change_in_cast(node, enabled)
        if self.aliases(node):
            shared = list(node.all_input_nodes)
            self.tied.update(root for x in shared for root in self.roots.get(x, ()))
        for x in written:
            self._change(node, x, enabled)
        changed = [(x, root) for x in written for root in self.roots.get(x, ()) if root in self.parameters]
        self.roots[node] = frozenset(root for x in shared for root in self.roots.get(x, ())) or frozenset([node])
        stops = [stop for x in shared for stop in self.stops.get(x, ())]
        self.stops[node] = frozenset([*stops, node] if shared and stops_gradient(node) else stops)
        carried = any(self.carries.get(x) for x in node.all_input_nodes)
        unstopped = enabled or node.target in _OF_ANY_MODE or carried and _is_its_operand(node)
        flows = unstopped and not stops_gradient(node)
        if any(x in self.severed or self.carries.get(x) and not flows for x in shared):
            self.severed.add(node)
        self.carries[node] = carried and flows and is_continuous(node) or node in self.leaves
        if node in self.leaves and not (flows and any(self._carries_trained(x) for x in node.all_input_nodes)):
            self.apart.add(node)
        if carried and not (unstopped or self.transparent(node)):
            self._detach(node, region)
        for target, parameter in changed:
            self._give_value(node, target, parameter)
        read = node.args[0] if node.args else None
        if isinstance(read, fx.Node) and read in self.named and _is_its_operand(node):  # w.to(...) of its own dtype
            self._name(self.named[read], node)

    def _carries_trained(self, node: fx.Node) -> bool:
        return self.carries.get(node, False) and node not in self.apart

    def _name(self, parameter: fx.Node, name: fx.Node) -> None:
        """Notes by what a parameter is read."""
        self.parameters.setdefault(parameter, []).append(name)
        self.named[name] = parameter

    def _detach(self, node: fx.Node, region: int) -> None:
        for x in node.all_input_nodes:
            if not self.carries.get(x) or not isinstance(x.meta.get("val"), torch.Tensor):
                continue
            if (x, region) not in self.detached:
                with self.graph.inserting_before(node):
                    self.detached[x, region] = self._insert_detach(x, node)
            node.replace_input_with(x, self.detached[x, region])

    def _insert_detach(self, x: fx.Node, reader: fx.Node) -> fx.Node:
        new = self.graph.call_function(torch.ops.aten.detach.default, (x,))
        new.meta = {"val": x.meta["val"], **marks_of(reader)}
        self.roots[new], self.stops[new], self.carries[new] = self.roots[x], self.stops[x] | {new}, False
        self.severed.add(new)
        return new

    def _change(self, node: fx.Node, target: fx.Node, enabled: bool) -> None:
        """A change in place: of everything that shares the memory."""
        roots = self.roots.get(target, frozenset())
        alike = [x for x, owners in self.roots.items() if owners & roots]
        is_of_caller = any(
            root.op == "placeholder" for root in roots
        )  # an input's is refused where the graph is described
        flows = any(map(self._carries_trained, alike))
        if not roots.isdisjoint(self.parameters):
            self._note_readers(node, target, alike, enabled)
            return
        leaf = next((x for x in alike if x.target is LEAF), None)
        is_read_as_leaf = all(user.target is LEAF for root in roots for user in root.users)
        if leaf is not None and (enabled or target not in self.apart or not is_read_as_leaf):
            raise refusal(
                f"a tensor is changed in place that forward makes require a gradient ({line_of(leaf)}), or what shares "
                "its memory,",
                line_of(node),
                "make a new tensor instead (x = (x - step).detach().requires_grad_())",
            )
        if self.tied & roots:
            raise refusal(
                "a tensor is changed in place that shares its memory with a result of an autograd.Function",
                line_of(node),
                "change a copy (y = x.clone())",
            )
        if flows and not is_of_caller and node.target is torch.ops.aten.detach_.default:
            raise refusal("a tensor that carries a gradient is detached in place", line_of(node), "use x = x.detach()")
        beside = any(self.carries[x] and not self.stops[x] >= self.stops[target] for x in alike)
        if flows and not is_of_caller and (not enabled or target in self.severed or beside):
            how = "torch.no_grad()" if not enabled else "detach()"
            raise refusal(
                f"under {how} a tensor that carries a gradient is changed in place: its value changes, its gradient "
                "does not",
                line_of(node),
                "make a new tensor that says so, such as x = x + (new - x).detach()",
            )
        if enabled and any(self.carries.get(x) for x in node.all_input_nodes):
            if self.stops[target]:
                self._connect(node, target, alike)
            for x in alike:
                self.carries[x] = x not in self.severed and self.stops[x] == self.stops[target]

    def _change_in_cast(self, node: fx.Node, enabled: bool) -> None:
        """Changes in place in a region of autocast, which stays one call."""
        for write, target, detached in _writes_in(node):
            roots = self.roots.get(target, frozenset())
            if not roots.isdisjoint(self.parameters):
                raise refusal(
                    "a parameter is changed in place in a region of autocast",
                    line_of(write),
                    "change it before the region begins",
                )
            if detached and any(self.carries[x] for x, owners in self.roots.items() if owners & roots):
                enabled = False
            self._change(write, target, enabled)

    def _note_readers(self, node: fx.Node, target: fx.Node, alike: Sequence[fx.Node], enabled: bool) -> None:
        """Notes what has read a parameter that is changed; refuses a change that brings in a gradient."""
        if enabled and any(self.carries.get(x) for x in node.all_input_nodes if x is not target):
            raise refusal(
                "a parameter is changed in place by what carries a gradient", line_of(node), "use torch.no_grad()"
            )
        if is_checkpointed(node):
            raise refusal(
                "a parameter is changed in place in a region of torch.utils.checkpoint, which changes it once more "
                "where the backward runs it again,",
                line_of(node),
                "change it before the region begins",
            )
        names = {x for root in self.roots[target] for x in self.parameters.get(root, ())}
        readers = [user for x in {*alike, *names} for user in x.users if self.carries.get(user) and user not in names]
        self.overtaken.append((node, readers))

    def _require_unread(self) -> None:
        """Refuses a change of a parameter whose value the backward may need as it was before."""
        needed = self._find_needed() if any(readers for _, readers in self.overtaken) else set()
        for node, readers in self.overtaken:
            # What looks rows up has a backward of the indices alone.
            if readers := [x for x in readers if x in needed and x.target is not torch.ops.aten.embedding.default]:
                raise refusal(
                    f"a parameter is changed in place behind what is differentiated of it ({line_of(readers[0])}), and "
                    "the backward would read what it is then,",
                    line_of(node),
                    "change it before it is read, or in the loop, under torch.no_grad() behind optimizer.step()",
                )

    def _find_needed(self) -> set[fx.Node]:
        """What the backward may go through: what carries a gradient to a result, or writes one to memory."""
        needed: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if node.op == "output" or self.carries.get(node) and (node in needed or _aliases(node)[1]):
                needed.update({node, *(x for x in node.all_input_nodes if self.carries.get(x))})
        return needed

    def _give_value(self, node: fx.Node, target: fx.Node, parameter: fx.Node) -> None:
        """Has those that read a parameter behind a change of it read the value that it has then."""
        names = self.parameters[parameter]
        if target in names:
            self._name(parameter, node)
        if not self.carries[parameter]:
            return
        later = [user for x in names for user in x.users if user not in self.carries and self._reads_gradient(user)]
        if not later:
            return
        assert self.last_placeholder is not None
        with self.graph.inserting_after(self.last_placeholder):
            before = self.graph.call_function(torch.ops.aten.clone.default, (parameter,))
        with self.graph.inserting_after(node):
            now = self._insert_detach(parameter, node)
        with self.graph.inserting_after(now):
            value = self.graph.call_function(with_value, (before, now))
        for new in (before, value):
            new.meta = {"val": parameter.meta["val"], **marks_of(node)}
            self.roots[new], self.stops[new], self.carries[new] = frozenset([new]), frozenset(), new is value
        for user in later:
            for x in names:
                user.replace_input_with(x, value)
        self._name(parameter, value)

    def _reads_gradient(self, user: fx.Node) -> bool:
        """Whether what reads a tensor may carry its gradient; all else goes on to read, or to write to, its memory."""
        return self.modes.get(user, (True, 0))[0] and not stops_gradient(user) and not _aliases(user)[1]

    def _connect(self, node: fx.Node, target: fx.Node, alike: Sequence[fx.Node]) -> None:
        """A change through ``detach()`` of what carries no gradient, which brings in one: what is detached carries it
        from here on, as a plain view does, and what it is detached from only sees the values."""
        stops = self.stops[target]
        for x in alike:
            if self.stops[x] >= stops:
                self.stops[x] -= stops
            elif later := [user for user in x.users if user > node]:
                with self.graph.inserting_after(node):
                    detached = self._insert_detach(x, node)
                for user in later:
                    user.replace_input_with(x, detached)
        for stop in stops:
            stop.target = torch.ops.aten.alias.default


def _is_its_operand(node: fx.Node) -> bool:
    """Whether a call returns a tensor that it reads, itself, such as ``x.to(...)`` of what has that dtype: no gradient
    mode stops that, and whatever reads the tensor later reads it by the name of the call."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or not has_composition(target):
        return False
    if not isinstance(next(iter(pytree.tree_leaves(node.meta.get("val"))), None), torch.Tensor):
        return False
    with make_fake_mode():  # of sizes that are numbers: the trace is asked nothing about its own
        values = {x: _example(x.meta["val"]) for x in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        results = [x for x in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    return any(result is x for result in results for x in pytree.tree_leaves(list(values.values())))


def _example(value: Any) -> Any:
    """A value of the sizes that the trace has seen."""
    if isinstance(value, torch.Tensor):
        sizes, strides = (list(map(_example, numbers)) for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    if isinstance(value, torch.SymInt):
        return hint(value) if value.node.has_hint() else 2  # of what values select
    return pytree.tree_map(_example, value) if isinstance(value, list | tuple) else value


def _is_cast(node: fx.Node, x: fx.Node) -> bool:
    """Whether ``x.to(...)`` makes another dtype, and so a copy."""
    dtypes = {getattr(each.meta.get("val"), "dtype", None) for each in (node, x)}
    return node.target._schema.name == "aten::to" and len(dtypes) == 2  # type: ignore[union-attr]


def _writes_in(region: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, bool]]:
    """The calls in a region of autocast that write to memory of its operands, with these, and whether they do so
    through ``detach()``."""
    source = next(x for x in region.args if isinstance(x, fx.Node) and x.op == "get_attr")
    owner = region.graph.owning_module
    assert owner is not None
    inner = owner.get_submodule(str(source.target))
    assert isinstance(inner, fx.GraphModule)
    operands = [x for x in region.args if isinstance(x, fx.Node) and x is not source]
    entries = inner.graph.find_nodes(op="placeholder")
    memory = {entry: {(x, False)} for entry, x in zip(entries, operands, strict=True)}
    for node in inner.graph.nodes:
        if node.op != "call_function":
            continue
        shared, written = _aliases(node)
        for x in written:
            yield from ((node, operand, stopped) for operand, stopped in memory.get(x, ()))
        if node.target is wrap_with_autocast:
            for write, x, stopped in _writes_in(node):
                yield from ((write, operand, stopped or before) for operand, before in memory.get(x, ()))
        stops = stops_gradient(node)
        memory[node] = {(x, stopped or stops) for other in shared for x, stopped in memory.get(other, ())}


def _aliases(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The operands that a call's results may share memory with, and those that it changes."""
    if node.target in (operator.getitem, LEAF):
        return list(node.all_input_nodes), []
    if not isinstance(node.target, torch._ops.OpOverload):
        return [], []
    shared: list[fx.Node] = []
    written: list[fx.Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        info = argument.alias_info
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if info is not None and value is not None:
            operands = [x for x in pytree.tree_leaves(value) if isinstance(x, fx.Node)]
            shared += [x for x in operands if not _is_cast(node, x)]
            if info.is_write:
                written += operands
    return shared, written
