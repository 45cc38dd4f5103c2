"""Pins: what some parameters and modules must be, or must not be, whatever else the search chooses.

A pin names parameters or modules by a pattern (``layers.*.mlp.up.weight``; ``*`` stands for any text, dots included)
and says one placement for each mesh axis, in the words of ``torch.distributed.tensor``, ``Shard(d)`` and
``Replicate()``, or None for an axis that stays open.  Of a parameter it says how it lies between steps, as
``parameter.placements`` will say; of a module, how its result is made.  A saved plan pins what it decided, as far as
the model still has it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autoparallel.comm.world import mesh_text
from autoparallel.decisions.parameters import ParameterPlan, PlanError, matching
from autoparallel.placements import Layout, format_layout, parse_layout
from autoparallel.plan import Plan
from autoparallel.planner.calls.options import Option
from autoparallel.rules.calls import is_tensor

WHOLE = ("I", "R")


@dataclass(frozen=True)
class Pin:
    """What one pattern pins or forbids.

    Attributes:
        pattern: of parameter names, or else of module paths.
        placements: for each mesh axis ``"R"`` (whole), ``"S0"``, ``"S1"``, ..., or ``"*"`` (open).
        forbid: whether tensors must not lie so, instead of that they must.
    """

    pattern: str
    placements: tuple[str, ...]
    forbid: bool = False

    def __str__(self) -> str:
        return f"{'forbid' if self.forbid else 'pin'} {self.pattern}={','.join(self.placements)}"

    def agrees(self, layout: Layout, dims: int) -> bool:
        """Whether a tensor of so many dims that lies so is as the pin says (or, forbidden, not as it says)."""
        return self._matches(layout, dims) != self.forbid

    def _matches(self, layout: Layout, dims: int) -> bool:
        for text, placement in zip(self.placements, layout, strict=True):
            if text == "*":
                continue
            if text == "R":
                if placement.kind not in WHOLE:
                    return False
            elif placement.kind != "S" or placement.dim - int(text[1:]) not in (0, dims):
                return False
        return True


@dataclass(frozen=True)
class Pins:
    """All pins of a search; the same on every rank.

    Attributes:
        pins: by pattern.
        plan: a saved plan whose decisions are kept as far as the model still has them.
        excluded: decisions that are not to be taken again: parameter name to layouts at rest, operator key to modes.
    """

    pins: tuple[Pin, ...] = ()
    plan: Plan | None = None
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def text(self) -> str:
        """All of it, for ranks to compare."""
        lines = [*map(str, self.pins), *(f"not {k} {sorted(v)}" for k, v in sorted(self.excluded.items()))]
        return "\n".join([*lines, *([self.plan.to_json()] if self.plan is not None else [])])


class ResolvedPins:
    """Pins of one graph: which options of a node they leave.

    Raises:
        PlanError: for a pattern that nothing matches, or a pin that does not fit the mesh.
    """

    def __init__(
        self, pins: Pins, graph: fx.Graph, parameters: Mapping[str, str], axes: Sequence[tuple[str, int]]
    ) -> None:
        self.plan, self.excluded = pins.plan, pins.excluded
        self.parameters = parameters
        self.freed: list[str] = []
        self._pins: dict[fx.Node, list[Pin]] = {}
        if pins.plan is not None and tuple(pins.plan.mesh) != tuple(axes):
            raise PlanError(f"the pinned plan is for the mesh {mesh_text(pins.plan.mesh)}, not for {mesh_text(axes)}")
        nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
        named = {name: nodes[placeholder] for placeholder, name in parameters.items()}
        modules = _results_of_modules(graph) if pins.pins else {}
        for pin in pins.pins:
            if len(pin.placements) != len(axes):
                mesh = ", ".join(name for name, _ in axes)
                raise PlanError(f"{pin} gives {len(pin.placements)} placements, the mesh has the axes ({mesh})")
            matches = matching(pin.pattern, named) or matching(pin.pattern, modules)
            if not matches:
                near = difflib.get_close_matches(pin.pattern, [*named, *modules], 3, 0.4)
                hint = f"; did you mean {', '.join(near)}?" if near else ""
                raise PlanError(f"{pin}: the model has no such parameter or module{hint}")
            for name in matches:
                self._pins.setdefault(named.get(name) or modules[name], []).append(pin)

    def __bool__(self) -> bool:
        """Whether anything is pinned."""
        return bool(self._pins or self.plan is not None or self.excluded)

    def __contains__(self, node: fx.Node) -> bool:
        """Whether a parameter is pinned."""
        return node in self._pins or self._layout_of_plan(node) is not None

    def axes(self, node: fx.Node) -> frozenset[int]:
        """The mesh axes that a parameter's pins say something about; on the others a preset has its say."""
        if node in self._pins:
            return frozenset(a for pin in self._pins[node] for a, text in enumerate(pin.placements) if text != "*")
        layout = self._layout_of_plan(node)
        return frozenset() if layout is None else frozenset(range(len(parse_layout(layout))))

    def layouts(self, node: fx.Node, layouts: Sequence[Layout]) -> list[Layout]:
        """The layouts of a pinned parameter that its pins leave.

        Raises:
            PlanError: where a pattern leaves none.
        """
        if node not in self._pins:
            return [x for x in layouts if format_layout(x) == self._layout_of_plan(node)] or list(layouts)
        left = [x for x in layouts if self._agrees(node, x)]
        if not left:
            texts = sorted({format_layout(x).replace("I", "R") for x in layouts})
            raise PlanError(
                f"{' and '.join(map(str, self._pins[node]))}: {self._name(node)} cannot lie so; it can lie as "
                f"{', '.join(texts[:12])}"
            )
        return left

    def _layout_of_plan(self, node: fx.Node) -> str | None:
        plan = None if self.plan is None else self.plan.parameters.get(self.parameters.get(node.name, ""))
        return None if plan is None else plan.at_rest

    def options(self, node: fx.Node, options: list[Option]) -> list[Option]:
        """The options that are left.

        Raises:
            PlanError: where a pattern leaves none.
        """
        if node in self._pins and node.op == "call_function":
            texts = sorted({format_layout(o.result) for o in options})
            options = [o for o in options if self._agrees(node, o.result)]
            if not options:
                raise PlanError(
                    f"{' and '.join(map(str, self._pins[node]))}: the result of {self._name(node)} cannot be made so; "
                    f"it can be made as {', '.join(texts[:12])} (P is a summand, S a shard)"
                )
        keep = self._decision(node)
        if keep is not None:
            left = [o for o in options if keep(o)]
            if left:
                options = left
            else:
                self.freed.append(self._name(node))
        excluded = self.excluded.get(self._name(node))
        if excluded:
            options = [o for o in options if decided(o) not in excluded]
            if not options:
                raise PlanError(f"nothing else is possible for {self._name(node)}")
        return options

    def _agrees(self, node: fx.Node, layout: Layout) -> bool:
        return all(pin.agrees(layout, node.meta["val"].ndim) for pin in self._pins[node])

    def _decision(self, node: fx.Node) -> Callable[[Option], bool] | None:
        """What the kept plan decided about a node, unless a pattern says something else."""
        if self.plan is None or node in self._pins:
            return None
        if node.name in self.parameters:
            plan: ParameterPlan | None = self.plan.parameters.get(self.parameters[node.name])
            if plan is None:
                return None
            return lambda o: format_layout(o.result) == plan.at_rest and o.gather == plan.gather
        modes = self.plan.operators.get(node.meta.get("key", "")) if node.op == "call_function" else None
        return None if modes is None else lambda o: tuple(map(str, o.modes)) == tuple(modes)

    def _name(self, node: fx.Node) -> str:
        return self.parameters.get(node.name) or str(node.meta.get("key", node.name))


def decided(option: Option) -> str:
    """An option as ``Pins.excluded`` names it."""
    return ",".join(map(str, option.modes)) if option.modes else format_layout(option.result)


def _results_of_modules(graph: fx.Graph) -> dict[str, fx.Node]:
    """Module path to the call that makes the module's result: the last one in it."""
    results: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and is_tensor(node):
            parts = str(node.meta.get("module", "")).split(".")
            for count in range(1, len(parts) + 1):
                if parts[0]:
                    results[".".join(parts[:count])] = node
    return results


# ------------------------------------------------------------------------------------------------------ from the user


def parse_pins(pins: Mapping[str, Any] | Plan | None, forbid: Mapping[str, Any] | None) -> Pins:
    """Pins as ``compile()`` takes them.

    Raises:
        TypeError, ValueError: for what is no pin.
    """
    plan = pins if isinstance(pins, Plan) else None
    table = {} if pins is None or isinstance(pins, Plan) else pins
    parsed: list[Pin] = []
    for patterns, negative, what in ((table, False, "pins"), (forbid or {}, True, "forbid")):
        if not isinstance(patterns, Mapping):
            raise TypeError(f"{what} must be a dict of patterns, not a {type(patterns).__name__}")
        for pattern, placements in patterns.items():
            parsed.append(Pin(pattern, _parse_placements(pattern, placements), negative))
    return Pins(tuple(parsed), plan)


def _parse_placements(pattern: str, placements: Any) -> tuple[str, ...]:
    """Placements as ``Pin`` writes them; from torch's, or from a text such as ``"R,S0"``."""
    if not isinstance(pattern, str):
        raise TypeError(f"a pin is named by a pattern, not by a {type(pattern).__name__}")
    if isinstance(placements, Placement):
        placements = (placements,)
    if isinstance(placements, str):
        placements = placements.split(",")
    if not isinstance(placements, Sequence):
        kind = type(placements).__name__
        raise TypeError(f"the pin {pattern!r} needs one placement for each mesh axis, not a {kind}")
    return tuple(_text_of(pattern, p) for p in placements)


def _text_of(pattern: str, placement: Any) -> str:
    if placement is None:
        return "*"
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, str) and re.fullmatch(r"\*|R|S-?\d+", placement.strip()):
        return placement.strip()
    raise ValueError(
        f"the pin {pattern!r} has the placement {placement!r}: expected Shard(dim), Replicate() or None (for an axis "
        "that stays open) of torch.distributed.tensor; on the command line S0, R or *"
    )
