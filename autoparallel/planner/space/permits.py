"""What a preset and the user's pins permit: ways to run an operator, to keep a parameter, to bring it to its uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch import fx

from autoparallel import operators
from autoparallel.placements import Invariant, Layout, Placement, Shard
from autoparallel.placements.modes import REPLICATE_MODE
from autoparallel.planner.calls.options import Option, outer_factors
from autoparallel.planner.request.pins import ResolvedPins
from autoparallel.planner.space.at_rest import every_layout, permitted, without_needless_padding
from autoparallel.planner.space.experts import experts_of
from autoparallel.planner.space.sequences import sequence_factors
from autoparallel.planner.space.subject import Subject
from autoparallel.rules import Rule, rule_for
from autoparallel.rules.calls import is_tensor, tensor_operands
from autoparallel.rules.typing import Typed
from autoparallel.rules.ways import call_modes, operand_fits

OptionsOf = Mapping[fx.Node, Sequence[Option] | None]
"""The options of nodes; None for one that has no choice."""


class Permits:
    """What is permitted on one mesh.

    Args:
        preset: which axes may do what; the request's, unless told another.
        pinned: the names of parameters whose layouts are given.

    Attributes:
        constraints: what the preset asks of each mesh axis.
        pins: the user's.
        experts: what runs expert by expert, where a preset shards that.
        sequence: the factors of operators that run over the sequence, where a preset shards it.
        chunked: the losses that go through their rows in chunks (see [Note: the same gradient] in ``chunk_loss``).

    Raises:
        PlanError: for a preset that shards what the graph does not have, or what does not divide.
    """

    def __init__(self, subject: Subject, preset: str | None, pinned: Collection[str]) -> None:
        captured, request, size = subject.captured, subject.request, subject.size
        self.captured, self.axis_sizes, self.size, self.pinned = captured, request.sizes, size, pinned
        self.changed_parameters = captured.changed_parameters
        self.constraints = request.constraints(preset)
        self.pins = ResolvedPins(request.pins, captured.graph, captured.parameters, request.axes)
        self.experts = experts_of(captured.graph, captured.parameters, self.constraints, self.axis_sizes, size)
        self.sequence = sequence_factors(captured.input_nodes, self.constraints, self.axis_sizes, size)
        self.chunked = {head.loss for head in subject.heads}

    def allows(self, node: fx.Node, rule: Rule | None, ways: Sequence[Typed], way: Typed, axis: int) -> bool:
        """Whether this mode is permitted: a preset's data axes cut the batch wherever there is one, tensor axes never
        do."""
        if way.mode == REPLICATE_MODE and node in self.chunked:
            return False
        if axis in self.constraints.tensor and self.cuts_batch(node, rule, way):
            return False
        if axis in self.constraints.sequence:
            along = self.sequence.get(node, ())
            return way.mode.factor in along or not any(other.mode.factor in along for other in ways)
        if node in self.experts.factors and axis in self.constraints.expert:
            exchanged = rule is not None and rule.exchange
            wanted = rule.exchanged() if rule is not None and exchanged else self.experts.factors[node]
            return way.mode.kind == "shard" and way.mode.factor == wanted
        batched = axis in self.constraints.data and node.meta["differentiable"]
        if not batched or self.cuts_batch(node, rule, way):
            return True
        return not any(self.cuts_batch(node, rule, other) for other in ways)

    def cuts_batch(self, node: fx.Node, rule: Rule | None, way: Typed) -> bool:
        """Whether an operator that runs in this way has a part of the batch."""
        factor = way.mode.factor
        open_size = rule is not None and self.captured.is_batch(rule.sizes.get(factor, 1))
        return way.mode.kind == "shard" and (open_size or factor in node.meta.get("batch_factors", ()))

    def can_read(self, node: fx.Node, shape: tuple[int, ...], layout: Layout) -> bool:
        """Whether an operator can read an operand of this shape that lies so."""
        return operand_fits(node, shape, self.size.shape(node), layout, self.axis_sizes)

    def at_rest(self, node: fx.Node) -> tuple[list[Layout], list[str]]:
        """The layouts that a parameter may have between steps, and when it may be gathered where it is sharded."""
        shape = self.size.shape(node)
        constraints, experts = self.constraints.without(self.pins.axes(node)), self.experts.parameters.get(node)
        every = every_layout(shape, self.axis_sizes)
        if node in self.pins:
            pinned = self.pins.layouts(node, every)
            layouts = permitted(pinned, constraints, experts) or pinned
        else:
            fills = [user for user in node.users if user.target is operators.pad_rows]  # which read uneven shards
            even = without_needless_padding(shape, every, self.axis_sizes, constraints.tensor)
            worthwhile = [x for x in every if x in even or any(self.can_read(fill, shape, x) for fill in fills)]
            layouts = permitted(worthwhile, constraints, experts)
        if self.captured.parameters[node.name] in self.changed_parameters:  # what it was cannot be gathered again
            return layouts, ["per_microbatch"]
        return layouts, ["per_use"] if constraints.sharded_at_rest else ["per_step", "per_use"]

    def forbidden(self, options_of: OptionsOf, node: fx.Node, columns: Sequence[Layout]) -> np.ndarray:
        """What a preset forbids between a parameter at rest and its use, as infinite prices.

        Args:
            options_of: those of the parameter and of the nodes that read it, among others.
            columns: the layouts in which it may be used.
        """
        options = options_of[node] or ()
        out = np.zeros((len(options), len(columns)))
        large = len(node.meta["val"].shape) >= 2
        whole = {"R" if node.meta["differentiable"] else "I"}
        if any(not user.meta["differentiable"] for user in node.users if user.op == "call_function"):
            whole.add("I")  # what reads it without a gradient has no summands to keep apart
        whole_in_use = self.constraints.data | self.constraints.sequence
        along = self._along_sequence(node)
        alone = {axis for axis in whole_in_use if self._is_read_whole(options_of, node, axis)}
        stacked = self.experts.parameters.get(node)
        pinned = self.captured.parameters[node.name] in self.pinned
        tensor = self.constraints.tensor - self.pins.axes(node)  # its user knows better than the preset
        sharded = {axis for axis in tensor if large and self._can_shard(node, axis)}
        for j, column in enumerate(columns):
            for axis in whole_in_use:
                if stacked is not None and axis in self.constraints.expert:
                    wrong = column[axis] != Shard(stacked)
                elif axis in self.constraints.sequence and column[axis] in along:
                    wrong = False
                else:
                    wrong = column[axis].kind not in (whole | {"I"} if axis in alone else whole)
                if wrong:
                    out[:, j] = np.inf
            for i, option in enumerate(options):
                for axis in tensor:
                    at_rest, used = option.result[axis], column[axis]
                    if at_rest.kind == "S" and used != at_rest:
                        out[i, j] = np.inf
                    free = used if pinned else at_rest
                    if axis in sharded and free.kind != "S":
                        out[i, j] = np.inf
        return out

    def _along_sequence(self, node: fx.Node) -> set[Placement]:
        """How operators that run over the sequence read a parameter: a part of learned positions ``[sequence,
        features]`` that are added to tokens, and of a layer's weight that mixes these."""
        return {
            p
            for user in node.users
            for way in (call_modes(user) if user in self.sequence and is_tensor(user) else ())
            if way.mode.factor in self.sequence[user]
            for x, p in zip(tensor_operands(user), way.operands, strict=True)
            if x is node
        }

    def _is_read_whole(self, options_of: OptionsOf, node: fx.Node, axis: int) -> bool:
        """Whether some consumer can read a parameter Invariant only, such as a ``Function`` with its own backward."""
        for user in node.users:
            options = options_of[user] if user.op == "call_function" else None
            for position, x in enumerate(self.size.operands(user)) if options else ():
                if x is node and all(o.needs[position][axis].kind == "I" for o in options or ()):
                    return True
        return False

    def _can_shard(self, node: fx.Node, axis: int) -> bool:
        """Whether some consumer can use a parameter sharded over a tensor axis."""
        shape = self.size.shape(node)
        for user in node.users:
            if user.op != "call_function" or not is_tensor(user):
                continue
            operands, rule = tensor_operands(user), rule_for(user)
            outer = {} if rule is None else {factor: rule.sizes[factor] for factor in outer_factors(rule)}
            for typed in call_modes(user):
                if typed.mode.kind == "shard" and outer.get(typed.mode.factor, 0) % self.axis_sizes[axis]:
                    continue  # no whole groups, blocks or heads on every rank
                for x, p in zip(operands, typed.operands, strict=True):
                    alone = tuple(p if a == axis else Invariant for a in range(len(self.axis_sizes)))
                    whole = not self.cuts_batch(user, rule, typed)
                    if x is node and p.kind == "S" and whole and self.can_read(user, shape, alone):
                        return len(node.users) == 1 or self._all_can_shard(node, p.dim)
        return False

    def _all_can_shard(self, node: fx.Node, dim: int) -> bool:
        return all(
            any(
                x is node and p == Shard(dim)
                for typed in call_modes(user)
                for x, p in zip(tensor_operands(user), typed.operands, strict=True)
            )
            for user in node.users
            if user.op == "call_function" and is_tensor(user)
        )
