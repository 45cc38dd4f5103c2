"""The space of choices that the search explores: the ways to run each operator, and to keep each parameter."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import fx

from autoparallel import operators
from autoparallel.comm.world import mesh_text
from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.graph.lines import line_of
from autoparallel.placements import Layout, format_layout, parse_layout
from autoparallel.placements.modes import INVARIANT_MODE
from autoparallel.planner.calls.options import Option, operator_options
from autoparallel.planner.request.presets import Constraints
from autoparallel.planner.space.permits import Permits
from autoparallel.planner.space.subject import Subject
from autoparallel.predict.optimizer import parameter_cost
from autoparallel.rules import operator_name, rule_for
from autoparallel.rules.calls import is_tensor, tensor_operands
from autoparallel.rules.ways import call_modes

T = TypeVar("T")

SHOWN = 4
"""How many ways a message lists."""


class SearchSpace:
    """The choices that a preset and pins leave for a captured graph on one mesh.

    Args:
        preset: which axes may do what; the request's, unless told another.
        pinned: how parameters lie that an earlier plan has settled.
        input_layouts: those in which inputs come; the others are whole.

    Attributes:
        options: the ways to run each operator and to keep each parameter, of nodes that are alike the very same list;
            None for a node that has no choice and no tensors.
        unruled: how many calls there are of each operator without a rule.

    Raises:
        PlanError: where nothing is left to choose from for an operator.
    """

    def __init__(
        self,
        subject: Subject,
        preset: str | None = None,
        pinned: Mapping[str, ParameterPlan] | None = None,
        input_layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        self.subject, request = subject, subject.request
        self.captured, self.size, self.profile = subject.captured, subject.size, subject.profile
        self.searched, self.open = subject.searched, subject.open
        self.mesh, self.axis_sizes = request.axes, request.sizes
        self.preset = preset or request.origin
        self.outputs = subject.captured.output_layouts(request.outputs, len(request.axes))
        self.pinned, self.input_layouts = pinned or {}, input_layouts or {}
        self.permits = Permits(subject, preset, self.pinned.keys())
        self.constraints, self.pins = self.permits.constraints, self.permits.pins
        self.options: dict[fx.Node, list[Option] | None] = {}
        self.unruled: dict[str, int] = {}
        # What is alike is worked out once.
        of_kind: dict[Hashable, tuple[list[Option] | None, bool]] = {}  # with whether they have a rule
        self._left: dict[Hashable, list[Option]] = {}
        for node in self.captured.graph.nodes:
            kind = self._kind(node)
            if kind not in of_kind:
                if self._is_chosen(node):
                    options: list[Option] | None = operator_options(
                        node,
                        self.axis_sizes,
                        self.profile,
                        self.size,
                        self.permits.allows,
                        parts=subject.parts(node),
                    )
                    if not options:
                        raise PlanError(self.conflict(node))
                else:
                    options = self._other_options(node)
                of_kind[kind] = options, self._rule_is_known(node)
            options, has_rule = of_kind[kind]
            self.options[node] = self._left_by_pins(node, options)
            if not has_rule:
                producer = node.args[0] if node.target is operator.getitem else node
                name = operator_name(producer.target)
                self.unruled[name] = self.unruled.get(name, 0) + 1

    def uncut(self, choices: Sequence[T], whole: T) -> tuple[T, ...]:
        """Choices, one for each mesh axis, but what is whole over an axis of one rank, which has nobody to share with:
        a cut would be gathered and reduced there, by copies."""
        return tuple([whole if size == 1 else c for c, size in zip(choices, self.axis_sizes, strict=True)])

    def _is_chosen(self, node: fx.Node) -> bool:
        """Whether there are several ways to run a node."""
        is_call = node.op == "call_function" and node.target is not operator.getitem
        return is_call and is_tensor(node) and node in self.searched

    def _other_options(self, node: fx.Node) -> list[Option] | None:
        """The ways to keep a parameter, and the one of what there is no choice about."""
        if node.op == "placeholder" and node.name in self.captured.parameters:
            return self._parameter_options(node)
        if node.op == "placeholder":
            return [Option((), (), self.input_layouts.get(node.name, self.subject.invariant), 0.0)]
        if node.op != "call_function" or not tensor_operands(node) and not is_tensor(node):
            return None
        needs = tuple(self.subject.invariant for _ in tensor_operands(node))
        return [Option((INVARIANT_MODE,) * len(self.axis_sizes), needs, self.subject.invariant, 0.0)]

    def _left_by_pins(self, node: fx.Node, options: list[Option] | None) -> list[Option] | None:
        """The options that the user's pins leave; the same list where they leave the same."""
        if options is None or not self.pins:
            return options
        left = self.pins.options(node, options)
        key = id(options), tuple([id(o) for o in left]) if len(left) < len(options) else ()
        return self._left.setdefault(key, left)

    def _kind(self, node: fx.Node) -> Hashable:
        """What a node's options depend on."""
        if node.op == "placeholder":
            if node.name not in self.captured.parameters:
                return "input", self.input_layouts.get(node.name, self.subject.invariant)
            name = self.captured.parameters[node.name]
            users: Hashable = None
            padded = any(u.target is operators.pad_rows for u in node.users)
            if self.constraints != Constraints() or padded:
                users = tuple([self.size.call(u) for u in node.users if u.op == "call_function"])
            rest = self.captured.rest_dtypes.get(name)
            pinned = self.pinned.get(name)
            label = name if self.pins and node in self.pins else ""
            experts = self.permits.experts.parameters.get(node)
            return "parameter", self.size.tensor(node), rest, experts, pinned, users, label
        kind = self.subject.kinds.get(node)
        if kind is None:
            return "whole", node.op, self.size.call(node) if node.op == "call_function" else -1
        followed = self.permits.experts.factors.get(node), self.permits.sequence.get(node), node in self.permits.chunked
        return "call", kind, followed

    def _rule_is_known(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not is_tensor(node):
            return True
        return node.target is not operator.getitem and (node not in self.searched or rule_for(node) is not None)

    # -- parameters -------------------------------------------------------------------------------------------------

    def _parameter_options(self, node: fx.Node) -> list[Option]:
        pinned, subject = self.pinned.get(self.captured.parameters[node.name]), self.subject
        if pinned is None:
            layouts, gathers = self.permits.at_rest(node)
        else:
            layouts, gathers = [parse_layout(pinned.at_rest)], [pinned.gather]
        options = []
        for layout in layouts:
            sharded = any(p.kind == "S" for p in layout)
            rest = parameter_cost(
                self.captured, node, layout, self.axis_sizes, self.profile, offloaded=subject.offloads
            )
            seconds, held = rest.seconds / subject.microbatches, rest.bytes / subject.stages
            options += [Option((), (), layout, seconds, held, gather=g) for g in (gathers if sharded else ["per_step"])]
        return options

    # -- why there is none ------------------------------------------------------------------------------------------

    def conflict(self, node: fx.Node | None, options: Sequence[Option] = ()) -> str:
        """Why a preset or pins do not fit the model, and what to change.

        Args:
            node: the operator or parameter at which that shows, if it is known.
            options: what is left of its ways; none of them goes together with what is left of its neighbours'.
        """
        ranks = math.prod(self.axis_sizes[axis] for axis in self.constraints.data)
        problem = f"the plan does not fit the model on the mesh {mesh_text(self.mesh)}"
        cure = "use plan='auto'" + (", or pin and forbid less" if self.pins else "")
        sizes = {self.captured.actual[s] for s in self.captured.batches} or set(self._batch_sizes(node))
        if rows := sorted(size for size in sizes if size % ranks):
            what = "a batch" if self.subject.microbatches == 1 else "a microbatch"
            at = f" at {node.meta['key']}" if node is not None and "key" in node.meta else ""
            return (
                f"{problem}{at}: {what} of {', '.join(map(str, rows))} rows must divide by {ranks}, the ranks that "
                f"shard it (the batch is the first dim of the first input: where another has it, give that first, by "
                f"its name); change the batch or the mesh, or {cure}"
            )
        if node is None:
            return f"{problem}: what it asks of some operators contradicts what it asks of others; {cure}"
        if node.op == "placeholder":
            name = self.captured.parameters.get(node.name, node.name)
            readers = _texts(str(user.meta["key"]) for user in node.users if "key" in user.meta)
            lies = _texts(format_layout(option.result).replace("I", "R") for option in options)
            return f"{problem}: {name} can lie as {lies}, from where its readers ({readers}) may not have it; {cure}"
        where = f"{node.meta['key']} ({line_of(node)})"
        if not options:
            modes = _texts(str(way.mode) for way in call_modes(node)) if is_tensor(node) else "whole"
            return f"{problem}: it leaves none of the ways to run {where}: {modes}; {cure}, or register_rule() for it"
        left = _texts(",".join(map(str, option.modes)) for option in options)
        of_batch = ""
        if any(self._batch_sizes(node)):
            of_batch = (
                "; the first dim of the first input is taken for the batch: x[None] gives one to an input that has none"
            )
        return (
            f"{problem}: it leaves {where} to run as {left}, which does not go together with what it leaves for what "
            f"that reads; {cure}, or register_rule() for it{of_batch}"
        )

    def _batch_sizes(self, node: fx.Node | None) -> Iterable[int]:
        """The sizes of the dims of an operator that a preset cuts as the batch."""
        if node is None or node.op != "call_function" or not is_tensor(node):
            return
        for way in call_modes(node):
            if self.permits.cuts_batch(node, rule_for(node), way):
                operands = zip((*tensor_operands(node), node), (*way.operands, way.result), strict=True)
                yield from (self.size.shape(x)[p.dim] for x, p in operands if p.kind == "S")


def _texts(texts: Iterable[str]) -> str:
    """The first of some texts, each once."""
    every = list(dict.fromkeys(texts))
    return " or ".join(every[:SHOWN]) + (" or ..." if len(every) > SHOWN else "")
