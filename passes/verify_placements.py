"""Checks a rank's program against what the rules, the plan and the global graph say it must be; changes nothing.

The layout of every tensor is followed through the program: from the placeholders, as the plan lays them out; through
each redistribution, by its arguments; through each call, by the rule of the call of the global graph that it stands
for.  A call must be that which its rule makes of the global one, and read what that one reads, in the layouts in which
it runs.  What passes have noted beside (layouts, ways of running, steps, where gradients flow) is itself checked.  That
each gradient is completed exactly once follows, because a layout says what each rank's gradient is (see
``placements``), and because the way of each parameter's gradient is followed from its uses to where the parameter lies.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from autoparallel.comm.collectives import redistribute
from autoparallel.comm.groups import group_name
from autoparallel.passes.bucket_collectives import Bucket
from autoparallel.passes.hoist_parameter_chains import ParameterChain, after_step, require_complete, require_way
from autoparallel.passes.insert_collectives import Redistribution
from autoparallel.passes.restore_program import restore_program
from autoparallel.passes.specification import ExpectedCall, Operand, PlacementError, Specification, name_of
from autoparallel.placements import Layout, format_layout, parse_placement
from autoparallel.placements.redistribution import Step, steps_by_axis
from autoparallel.rules.calls import is_tensor


def verify_placements(
    module: fx.GraphModule,
    specification: Specification,
    chains: Sequence[ParameterChain] | None = None,
    buckets: Sequence[Bucket] = (),
) -> None:
    """Raises ``PlacementError`` at the first node that is not what it must be.

    Args:
        module: the program; what says only when and how often calls run is undone first (see ``restore_program``).
        specification: what it must be.
        chains: the ways of its parameters, where ``hoist_parameter_chains`` has taken them out; None before.
        buckets: of these chains, where ``bucket_collectives`` has put calls of them into the program.
    """
    verifier = _Verifier(specification)
    for chain in chains or ():
        verifier.follow(chain)
    verifier.collect(chains, buckets)
    for node in restore_program(module).nodes:
        verifier.visit(node)


class _Verifier:
    """One walk through a program.

    Attributes:
        layouts: how each tensor lies.
        origins: the node of the global graph whose value each node holds.
        completions: what must stand between a call and all that read it.
        uses: the placeholders of hoisted parameters: which parameter each is, and how it is used.
        gathered: for each call of a bucket the placeholders that its results stand for.
    """

    def __init__(self, specification: Specification) -> None:
        self.specification = specification
        self.layouts: dict[fx.Node, Layout] = {}
        self.origins: dict[fx.Node, fx.Node] = {}
        self.completions: dict[fx.Node, tuple[Any, int]] = {}
        self.uses: dict[str, tuple[fx.Node, Layout]] = {}
        self.hoisted = False
        self.gathered: dict[str, list[str]] = {}
        self.global_nodes = {*specification.calls.values(), *specification.inputs.values()}

    # ------------------------------------------------------------------------------------------ ways of parameters

    def follow(self, chain: ParameterChain) -> None:
        """Follows a parameter from rest to its uses, and its gradient back."""
        names = [node for node, name in self.specification.parameters.items() if name == chain.name]
        if not names:
            raise PlacementError(f"{chain.name} is no parameter of the model")
        origin = self.specification.inputs[names[0]]
        at_rest = self.specification.layout_of(origin)
        if chain.at_rest != at_rest:
            raise PlacementError(
                f"{chain.name} lies as {_text(at_rest)} at rest, not as {_text(chain.at_rest)}, where its way begins"
            )
        if chain.trainable != origin.meta["differentiable"]:
            raise PlacementError(f"{chain.name} is{'' if origin.meta['differentiable'] else ' not'} trained")
        for layout in chain.comes_back:
            if len(chain.uses) == 1 and chain.gradient_layout != layout:
                raise PlacementError(
                    f"the gradient of {chain.name} is made as {_text(layout)}, and reduced as were it "
                    f"{_text(chain.gradient_layout)}"
                )
            added = steps_by_axis(layout, chain.gradient_layout)
            require_way(f"the gradient of a use of {chain.name}", layout, added, chain.gradient_layout)
        require_complete(chain)
        self.uses |= {
            placeholder: (origin, use) for placeholder, use in zip(chain.placeholders, chain.uses, strict=True)
        }

    def collect(self, chains: Sequence[ParameterChain] | None, buckets: Sequence[Bucket]) -> None:
        """Notes what comes out of which bucket; every hoisted parameter is in one bucket."""
        self.hoisted = chains is not None
        members = [chain for bucket in buckets for chain in bucket.chains]
        if buckets and sorted(c.name for c in members) != sorted(c.name for c in chains or ()):
            raise PlacementError("the buckets do not hold every parameter once")
        for bucket in buckets:
            if bucket.per_use:
                self.gathered[bucket.name] = [name for chain in bucket.chains for name in chain.placeholders]

    # --------------------------------------------------------------------------------------------------- the program

    def visit(self, node: fx.Node) -> None:
        """Checks one node, those before it being right."""
        unfinished = [x for x in node.all_input_nodes if x in self.completions]
        if unfinished:
            self._complete(node, unfinished[0])
        elif node.op == "placeholder":
            self._enter(node)
        elif node.op == "output":
            self._leave(node)
        elif node.op == "call_module":
            if node.target not in self.gathered:
                raise PlacementError(f"{node.target} is no bucket that is gathered in the program")
        elif node.target is operator.getitem and node.args[0].op == "call_module":  # type: ignore[union-attr]
            self._take(node)
        elif node.target is redistribute:
            self._redistribute(node)
        elif node.op == "call_function":
            self._call(node)

    def _enter(self, node: fx.Node) -> None:
        if node.name in self.uses:
            self._settle(node, *self.uses[node.name], "is used as")
            return
        origin = self.specification.inputs.get(node.name)
        if origin is None or self.hoisted and node.name in self.specification.parameters:
            raise PlacementError(f"{node.name} is no input of the model that enters so")
        self._settle(node, origin, self.specification.layout_of(origin), "enters as")

    def _take(self, node: fx.Node) -> None:
        """A parameter that comes out of a bucket."""
        call, index = node.args
        assert isinstance(call, fx.Node) and isinstance(index, int)
        names = self.gathered.get(str(call.target), [])
        if index >= len(names):
            raise PlacementError(f"{node.name} takes number {index} of {call.target}, which gathers {len(names)}")
        self._settle(node, *self.uses[names[index]], "is used as")

    def _complete(self, node: fx.Node, part: fx.Node) -> None:
        target, count = self.completions[part]
        if node.target is not target or node.args != (part, count) or node.kwargs:
            raise PlacementError(
                f"{name_of(part)} is of one of {count} parts, and is read without taking that into account"
            )
        self._settle(node, self.origins[part], self.layouts.get(part), "completes what lies as")

    def _redistribute(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source not in self.layouts:
            raise PlacementError(f"{name_of(node)} redistributes what has no layout")
        after = _check_redistribution(node, self.layouts[source], self.specification)
        self._settle(node, self.origins[source], after, "becomes")

    def _call(self, node: fx.Node) -> None:
        origin = self.specification.calls.get(node.meta.get("key", ""))
        if origin is None:
            # A size that one call is given: it is checked where it is read.
            if is_tensor(node):
                raise PlacementError(f"{name_of(node)} is no call of the model")
            return
        expected = self.specification.expected(origin)
        if node.target is not expected.target:
            raise PlacementError(f"{name_of(node)} must be {expected.target} on a rank; it is {node.target}")
        if "modes" in node.meta and tuple(node.meta["modes"]) != tuple(self._modes(origin)):
            raise PlacementError(
                f"{name_of(node)} runs as {_ways(self._modes(origin))}, not as {_ways(node.meta['modes'])}"
            )
        self._match(node, node.args, expected.args, expected)
        self._match(node, node.kwargs, expected.kwargs, expected)
        self._settle(node, origin, expected.result, "gives")
        if expected.completion is not None:
            self.completions[node] = expected.completion

    def _match(self, node: fx.Node, actual: Any, expected: Any, call: ExpectedCall) -> None:
        """Checks an argument of a call."""
        right = False
        if isinstance(expected, Operand):
            right = isinstance(actual, fx.Node) and self.origins.get(actual) is expected.node
            layout = expected.layout or self.specification.layout_of(expected.node)
            if right and self.layouts[actual] != layout:
                raise PlacementError(
                    f"{name_of(node)} {self._runs(self.specification.calls[node.meta['key']])} needs operand "
                    f"{_position(call, expected)} as {_text(layout)}; it lies as {_text(self.layouts[actual])}"
                )
            expected = expected.node
        elif isinstance(expected, fx.Node) and expected in self.global_nodes:
            right = isinstance(actual, fx.Node) and self.origins.get(actual) is expected
        elif isinstance(expected, fx.Node):  # what the rule inserts before the call
            right = isinstance(actual, fx.Node) and actual.target is expected.target
            if right:
                self._match(node, actual.args, expected.args, call)
                self._match(node, actual.kwargs, expected.kwargs, call)
        elif isinstance(expected, Mapping):
            right = isinstance(actual, Mapping) and actual.keys() == expected.keys()
            for name in expected if right else ():
                self._match(node, actual[name], expected[name], call)
        elif isinstance(expected, list | tuple):
            right = isinstance(actual, list | tuple) and len(actual) == len(expected)
            for a, e in zip(actual, expected, strict=True) if right else ():
                self._match(node, a, e, call)
        else:
            right = actual is expected or type(actual) is type(expected) and bool(actual == expected)
        if not right:
            raise PlacementError(f"{name_of(node)} reads {actual!r} where its rule gives it {expected!r}")

    def _leave(self, node: fx.Node) -> None:
        results: Any = node.args[0]
        for i, (value, origin) in enumerate(zip(results, self.specification.results, strict=True)):
            if not isinstance(origin, fx.Node):
                continue
            if self.origins.get(value) is not origin:
                raise PlacementError(f"output {i} is {value}, not {name_of(origin)}")
            layout = self.specification.output_layout(i)
            if layout is not None and self.layouts[value] != layout:
                raise PlacementError(f"output {i} leaves as {_text(self.layouts[value])}, not as {_text(layout)}")

    def _settle(self, node: fx.Node, origin: fx.Node, layout: Layout | None, why: str) -> None:
        """Takes a node for the value of a node of the global graph, once what is noted about it is right."""
        self.origins[node] = origin
        if layout is None:
            return
        self.layouts[node] = layout
        noted = node.meta.get("placements")
        if noted != layout:
            why = f"{self._runs(origin)} {why}" if why == "gives" else why
            raise PlacementError(
                f"{name_of(node)} {why} {_text(layout)}; it is said to lie as {_text(noted)}"
                if noted is not None
                else f"{name_of(node)} has no layouts"
            )
        derived = self.specification.differentiable(origin)
        if node.meta["differentiable"] != derived:
            whether = "is" if derived else "is not"
            raise PlacementError(f"{name_of(node)} {whether} differentiable, and was laid out as if it were otherwise")

    def _modes(self, origin: fx.Node) -> Sequence[Any]:
        return self.specification.modes.get(origin.meta["key"], ())

    def _runs(self, origin: fx.Node) -> str:
        modes = self._modes(origin)
        return f"runs as {_ways(modes)} and" if modes else "reads whole tensors and"


def _check_redistribution(node: fx.Node, before: Layout, specification: Specification) -> Layout:
    """The layout that a redistribution makes.

    Args:
        before: how its operand lies.

    Raises:
        PlacementError: when there is no such redistribution, or when another one is noted.
    """
    _, src, dst, group = node.args
    noted = node.meta["redistribution"]
    step = Step(_axes_of(node, str(group), specification), parse_placement(str(src)), parse_placement(str(dst)))
    if any(before[axis] != step.src for axis in step.axes):
        raise PlacementError(f"{name_of(node)}: redistributes from {step.src}, its operand lies as {_text(before)}")
    after = after_step(name_of(node), before, step)
    assert isinstance(noted, Redistribution)
    if (noted.before, noted.step.axes, noted.step.src, noted.step.dst) != (before, step.axes, step.src, step.dst):
        raise PlacementError(
            f"{name_of(node)}: redistributes from {step.src} to {step.dst} over the axes {step.axes}, noted is "
            f"{noted.step} from {_text(noted.before)}"
        )
    return after


def _axes_of(node: fx.Node, group: str, specification: Specification) -> tuple[int, ...]:
    """The mesh axes over which a group communicates."""
    names = specification.names
    axes = tuple(names.index(name) for name in group.rpartition("/")[2].split("+") if name in names)
    if group_name(specification.prefix, names, axes) != group:
        raise PlacementError(f"{name_of(node)}: communicates over {group!r}, which is no group of the mesh")
    return axes


def _position(call: ExpectedCall, operand: Operand) -> int:
    """Where an operand stands among those that a call must read."""
    operands = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, Operand)]
    return next(i for i, each in enumerate(operands) if each is operand)


def _text(layout: Layout | None) -> str:
    return format_layout(layout) if layout is not None else "no tensor"


def _ways(modes: Sequence[Any]) -> str:
    return ", ".join(map(str, modes))
