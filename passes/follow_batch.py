"""Follows the rows of the batch through a graph, to tell what the losses of microbatches are of that of the batch.

They add up to it, or it is their weighted mean, where each call makes of some rows those rows of its result, or a sum
or a mean over rows of which nothing is made but a loss.  What a sharding rule allows for a dim that is cut is what may
be done to a dim that comes in parts, as long as no communication stands behind it.  Rewrites nothing.

For (x is the batch):
    linear = aten.linear(x, w)         rows
    mean = aten.mean(linear, [0])      a mean over the rows of each microbatch
    sub = aten.sub(linear, mean)       of the whole batch only: microbatches would make something else
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from autoparallel import operators
from autoparallel.graph.captured import Captured, InputSpec
from autoparallel.graph.lines import line_of
from autoparallel.graph.losses import LossWeight
from autoparallel.operators.control_flow import goes_by_values
from autoparallel.operators.flex import is_flex, reads_of_rows
from autoparallel.operators.opaque import first_hook, has_own_backward
from autoparallel.passes.canonicalize_operators import BATCH_STATISTIC
from autoparallel.passes.weigh_loss import ADDITIONS, MEANS, NUMBERS, SCALED, clamps_of, terms_of
from autoparallel.placements import Invariant, Partial, Placement, Replicate, Shard
from autoparallel.rules import rule_for
from autoparallel.rules.answers import answers_about_rows
from autoparallel.rules.calls import ancestors, arguments, is_tensor, shape_of, tensor_operands
from autoparallel.rules.table import LOSSES
from autoparallel.rules.ways import call_modes

aten = torch.ops.aten

_ACROSS: dict[Any, int | None] = {
    aten.renorm.default: None, aten.masked_scatter.default: None, aten.put.default: None, aten.take.default: 0,
    aten.index_fill.int_Scalar: 1, aten.index_fill.int_Tensor: 1,
}  # fmt: skip
"""Operators without a rule that read across rows, and of which operand (None: any): norms over all dims but one, places
counted from the start, which of all columns."""
_DIMS = ("dim", "dims", "dim1", "dim2")
_OF_MATRICES = ("linalg_", "cholesky", "lu_", "triangular_solve", "ormqr", "geqrf")
_ALIKE = (aten.expand.default, aten.full.default, aten.zeros.default, aten.ones.default)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_VIEWS = (aten.unsqueeze.default, aten.expand.default, aten.reshape.default, aten._to_copy.default)


def weight_of_rows(captured: Captured, specs: Sequence[Any]) -> LossWeight:
    """What the loss weighs, as ``weigh_loss`` found it, if the loss is made of rows of the batch; else why it is not.

    Batch norm takes the statistics of a microbatch, and a call that no rule knows is taken to leave rows apart;
    ``mixes`` tells where there is one.

    Args:
        specs: the inputs of a call.
    """
    weight = captured.weight
    if weight.kind in ("unknown", "none"):
        return weight
    assert captured.objective is not None
    loss = captured.results[captured.objective]
    counts = [captured.results[i] for i in weight.outputs]
    names = zip(captured.inputs, specs, strict=True)
    batched = {name: spec for name, spec in names if name is not None and isinstance(spec, InputSpec) and spec.batch}
    needed = ancestors(captured.graph, {loss, *counts})
    terms = terms_of(loss, {x for x in captured.inputs if x}, weight.returned)
    walk = _Walk(captured.graph, captured.batches, batched, loss, terms, counts)
    walk.through(needed)
    reason = next(iter(walk.problems.values()), "") or next(filter(None, (_problem(walk, x) for x in walk.terms)), "")
    open_sizes = all(captured.is_batch(shape_of(x)[0]) for x in captured.graph.nodes if x.name in batched)
    rows = {spec.shape[0] // spec.batch for spec in batched.values()}
    if not open_sizes and (reason or any(_is_scaled(node, rows, node in walk.between) for node in needed)):
        reason = f"{reason or 'a number scales it, which may be made of the batch size'}; the batch is fixed: "
        reason += captured.why_fixed
    if reason:
        return replace(weight, kind="unknown", reason=reason)
    kind, *others = {_kind(walk, term, weight.returned) for term in walk.terms}
    sizes = [x.size for x in weight.each if x.output is None] if kind == "mean" and open_sizes else []
    if others:
        reason = f"it adds up means and sums, at {line_of(max(walk.terms))}"
    elif not all(walk.is_batch(size) and walk.grows(size) for size in sizes):
        reason = f"it divides by what does not grow with the rows, at {line_of(max(walk.terms))}"
    if reason:
        return replace(weight, kind="unknown", reason=reason)
    if walk.constant is not None and (kind == "sum" or walk.clamps):
        reason = (
            f"{_key(walk.constant)} adds what is the same however many rows there are, and to a sum, or a mean of none"
        )
        return replace(weight, kind="unknown", reason=reason)
    from_call = any(walk.placements[count] == Invariant for count in counts)
    hook = first_hook(captured.graph)
    hooked = "" if hook is None else line_of(hook)
    return replace(weight, kind=kind, from_call=from_call, mixes=walk.mixes, hooked=hooked)


def _kind(walk: _Walk, term: fx.Node, returned: bool) -> str:
    """Whether a term is a mean over rows, or a sum, also divided by what is the same however many rows there are.

    Args:
        returned: the loss function returned its divisor, which is each microbatch's own.
    """
    count = walk.count_of(term)
    if count is not None:
        return "sum" if walk.placements[count] == Invariant and not returned else "mean"
    by_size = term.target is aten.div.Tensor and walk.is_batch(term.args[1].meta["val"])  # type: ignore[union-attr]
    return "mean" if by_size or term in walk.means else "sum"


def follow_results(captured: Captured, specs: Sequence[Any], statistics: Collection[str]) -> None:
    """Notes which results, beside the loss, microbatches would make otherwise than the batch does, and which buffers
    a call changes to the same whatever its rows are: ``Captured.mixed`` and ``Captured.steady``.

    Args:
        specs: the inputs of a call.
        statistics: the buffers of batch norms, which take the statistics of a microbatch.
    """
    changed = captured.mutated
    left = {i for i, path in enumerate(changed) if path in statistics} | {captured.objective, *captured.weight.outputs}
    results = {i: node for i, node in enumerate(captured.results) if i not in left}
    names = zip(captured.inputs, specs, strict=True)
    batched = [name for name, spec in names if name is not None and isinstance(spec, InputSpec) and spec.batch]
    walk = _Walk(captured.graph, captured.batches, batched, None, (set(), []), [])
    names_of = captured.parameters | captured.buffers
    placeholders = {names_of.get(node.name, ""): node for node in captured.placeholders.values()}
    sums = [i for i in results if i < len(changed) and _adds_up_alone(results[i], placeholders[changed[i]])]
    for path in (changed[i] for i in range(len(changed)) if i in left or i in sums):
        walk.problems[placeholders[path]] = f"it reads the buffer {path}, which each microbatch changes"
    walk.through(ancestors(captured.graph, {*results.values()}))
    steady = set()
    for i, node in results.items():
        if i in sums:
            (node,) = (x for x in node.all_input_nodes if x is not placeholders[changed[i]])
        if node in walk.problems:
            captured.mixed[i] = walk.problems[node]
        elif not is_tensor(node) and walk.is_batch(size := node.meta["val"]):
            if not walk.grows(size):
                captured.mixed[i] = f"{size} of each microbatch do not add up to that of the batch"
        elif i < len(changed) and walk.placements[node] == Invariant:
            steady.add(changed[i])
        elif i < len(changed) and not (i in sums and walk.is_sum(node)):
            captured.mixed[i] = f"{_key(node)} is no sum over rows, at {line_of(node)}"
    captured.steady = frozenset(steady)


def _adds_up_alone(value: fx.Node, buffer: fx.Node) -> bool:
    """Whether a call adds something to a buffer that nothing else reads, before or after."""
    adds = value.target is aten.add.Tensor and len(value.args) == 2 and not value.kwargs and buffer in value.args
    return adds and len(value.all_input_nodes) == 2 and [*buffer.users] == [value] and len(value.users) == 1


def _problem(walk: _Walk, term: fx.Node) -> str:
    """Why a quotient is none of sums over rows; empty where it is, and for other terms."""
    if (count := walk.count_of(term)) is None and term.target is not aten.div.Tensor:
        return ""
    over = count is None or walk.placements[count] == Invariant or walk.is_sum(count)
    sums = over and walk.is_sum(tensor_operands(term)[0])
    return "" if sums else f"it is no quotient of two sums over rows, at {line_of(term)}"


def _is_scaled(node: fx.Node, rows: Collection[int], whatever: bool) -> bool:
    """Whether a number scales something that may be made of the rows' number: it is that, or ``whatever`` it is."""
    numbers = [x for x in node.args if isinstance(x, int | float)] if node.target in (*SCALED, *NUMBERS) else []
    return any(whatever or x in rows or x != 0 and 1 / x in rows for x in numbers)


class _Walk:
    """One walk through a graph.

    Attributes:
        batches: the symbols that are sizes of the batch.
        batched: the placeholders whose first dim is the batch.
        placements: of each value, the dim of its rows, whether it is a summand of each microbatch, or the same for all.
        terms: the sums, means or quotients that the loss adds up.
        between: the calls between them and the loss.
        answers: about rows of each microbatch, which may be other than that about those of the batch.
        constant: the first of these calls that adds what is the same for all rows.
        counts: what quotients are divided by, as it is output.
        clamps: what keeps zero from the divisors of quotients.
        means: those of the summands that are means over the rows of a microbatch.
        numbers: the values that count rows: microbatches may look up their rows with them, and nothing else.
        mixes: which call is the first of which it is only taken for granted that it leaves rows apart.
        problems: which calls do not, and those that read what these make, with the first reason.
    """

    def __init__(
        self,
        graph: fx.Graph,
        batches: Collection[sympy.Symbol],
        batched: Collection[str],
        loss: fx.Node | None,
        terms: tuple[set[fx.Node], list[fx.Node]],
        counts: Sequence[fx.Node],
    ) -> None:
        self.batches, self.batched, self.loss = batches, batched, loss
        self.between, self.terms = terms
        self.constant: fx.Node | None = None
        self.counts = counts
        pairs = [(term, self.count_of(term)) for term in self.terms]
        self.clamps = [clamp for term, count in pairs if count is not None for clamp in clamps_of(term, count)]
        self.placements: dict[fx.Node, Placement] = {}
        self.means: set[fx.Node] = set()
        self.numbers: set[fx.Node] = set()
        self.answers = answers_about_rows(graph)
        self.mixes, self.problems = "", dict[fx.Node, str]()

    def through(self, nodes: Iterable[fx.Node]) -> None:
        """Goes through a graph."""
        for node in nodes:
            read = (self.problems[x] for x in (node, *node.all_input_nodes) if x in self.problems)
            if problem := next(read, ""):
                self.problems[node] = problem
            elif node.op == "placeholder":
                self.placements[node] = Shard(0) if node.name in self.batched else Invariant
            elif node in self.answers:
                self.placements[node] = Invariant  # each microbatch has its own, and makes of it what the batch does
            elif node.op == "call_function":
                placement = self._follow(node) if is_tensor(node) else Invariant
                if placement is None:
                    self.mixes = self.mixes or _explain_mixing(node)
                    placement = self._take_for_granted(node)
                whole = node is self.loss and placement != Partial
                if placement is None or whole or is_tensor(node) and {*self._open_dims(node)} - {placement.dim}:
                    self.problems[node] = _explain_mixing(node)
                else:
                    self.placements[node] = placement

    def count_of(self, term: fx.Node) -> fx.Node | None:
        """Which of the counts a term is divided by; None where it is none of them."""
        divisor: Any = term.args[1] if len(term.args) > 1 else None
        while isinstance(divisor, fx.Node) and divisor not in self.counts:
            divisor = divisor.args[0] if divisor.args else None
        return divisor if isinstance(divisor, fx.Node) else None

    def is_sum(self, node: fx.Node) -> bool:
        """Whether the values of microbatches add up to that of the batch."""
        return self.placements[node] == Partial and node not in self.means

    def _follow(self, node: fx.Node) -> Placement | None:
        """How a call's result lies; None where it is of the whole batch only."""
        operands = [self.placements[x] for x in tensor_operands(node)]
        if node.meta.get(BATCH_STATISTIC):
            return None
        if node.target is operator.getitem:
            return operands[0] if operands else self._follow_result(node)
        if node.target is aten.add.Tensor and len(terms := [x for x in node.args if not _is_zero(x)]) == 1:
            (term,) = terms  # what sums are added up to begins with zero
            if isinstance(term, fx.Node) and is_tensor(term) and shape_of(term) == shape_of(node):
                self.means |= {node} if term in self.means else set()
                return self.placements[term]
        if node in self.between or node in self.clamps or _is_cast_of_count(node):
            self.means |= {node} & {node for x in tensor_operands(node) if x in self.means}
            alone = {*operands} == {Partial, Invariant} or len(node.args) > len(operands)
            if alone and node.target in ADDITIONS and node in self.between:
                self.constant = self.constant or node
            return Partial if Partial in operands and {*operands} <= {Partial, Invariant} else operands[0]
        if node in self.terms and node.target in LOSSES and Shard(0) in operands and rule_for(node) is None:
            self.means |= {node} if arguments(node)["reduction"] == 1 else set()
            return Partial if {*operands} <= {Shard(0), Invariant} else None
        if node.target in MEANS or node in self.terms and node.target is aten.div.Tensor:
            total, divisor = [*operands, Invariant][:2]
            if total == Partial and (divisor == Invariant or divisor == Partial and node in self.terms):
                self.means |= {node} if node.args[0] in self.means else set()
                return Partial
        if any(x in self.numbers for x in node.all_input_nodes) or node.target is aten.arange.default:
            return self._count(node, operands)
        if numbers := self._numbers(node):  # each microbatch has its own, and those of some of them may add up
            alone = node.target in NUMBERS and not shape_of(node)
            return Partial if alone and self.grows(numbers[0]) else None
        if all(x == Invariant for x in operands):
            rows = self._open_dims(node)
            # A row of the batch has its own random numbers, in whatever microbatch it is.
            by_position = node.target is operators.draws.draw and rows == [0] and shape_of(node)[0].node.expr.is_Symbol
            return Invariant if not rows else Shard(rows[0]) if by_position or node.target in _ALIKE else None
        if is_flex(node.target):  # its functions may read their own rows, which the rule does not know
            reads, places = [*arguments(node)["score_reads"], *arguments(node)["mask_reads"]], reads_of_rows(node)
            whole = {*arguments(node)["blocks"], *(x for i, x in enumerate(reads) if i not in places)}
            lookups = {*reads} - whole
            pairs = zip(tensor_operands(node), operands, strict=True)
            operands = [Invariant if x in lookups and p == Shard(0) else p for x, p in pairs]
        return self._along_rule(node, operands) or _along_dim(node, operands)

    def _follow_result(self, node: fx.Node) -> Placement | None:
        """How one of several results lies: of what is the same for all rows (``slogdet`` of a parameter) it is, too."""
        call: Any = node.args[0]
        invariant = all(self.placements[x] == Invariant for x in tensor_operands(call))
        return Invariant if invariant and not self._numbers(call) and not self._open_dims(node) else None

    def _take_for_granted(self, node: fx.Node) -> Placement | None:
        """How the result of a call lies that no rule knows, that is random, or a statistic of a batch norm."""
        if node.meta.get(BATCH_STATISTIC):
            return Invariant
        if node.target in operators.DRAWS and not tensor_operands(node) and (rows := self._open_dims(node)):
            return Shard(rows[0])
        call: Any = node.args[0] if node.target is operator.getitem else node
        if rule_for(call) is not None and not has_own_backward(call.target) or self._numbers(call):
            return None
        placements = [self.placements[x] for x in tensor_operands(call)]
        if Partial in placements or _reads_across(call, placements):
            return None
        if goes_by_values(call.target) and any(placement.kind == "S" for placement in placements):
            return None  # a microbatch might go another way than the batch, and a way may mix rows
        cut = [(x, p) for x in tensor_operands(call) if (p := self.placements[x]).kind == "S"]
        for x, placement in cut:
            if len(shape_of(node)) > placement.dim and shape_of(node)[placement.dim] == shape_of(x)[placement.dim]:
                return placement
        return None if cut else Invariant

    def _along_rule(self, node: fx.Node, operands: list[Placement]) -> Placement | None:
        """How a result lies by the rule of the call, where that sends nothing."""
        rule = rule_for(node)
        summands = {x in self.means for x in tensor_operands(node) if self.placements[x] == Partial}
        for way in call_modes(node) if len(summands) < 2 else ():
            kind = rule.reductions.get(way.mode.factor) if rule is not None and way.mode.kind == "shard" else None
            if kind == "composite":
                continue
            pairs = zip(operands, way.operands, strict=True)
            if all(b in (Invariant, Replicate) if a == Invariant else a == b for a, b in pairs):
                if kind == "mean" or True in summands:
                    self.means.add(node)
                return way.result
        return None

    def _count(self, node: fx.Node, operands: list[Placement]) -> Placement | None:
        """The placement of a call that counts rows, or uses their numbers."""
        rows = next(iter(self._open_dims(node)), None)
        if rows is None:
            return Invariant if not operands else None
        if node.target in _VIEWS or not operands:
            self.numbers.add(node)
            return Shard(rows)
        if node.target is not aten.index.Tensor:
            return None
        x, indices = node.args[:2]
        assert isinstance(x, fx.Node) and isinstance(indices, list | tuple)
        placements = [self.placements[i] for i in indices if isinstance(i, fx.Node)]
        by_rows = self.placements[x] == Shard(0) and indices[0] in self.numbers and x not in self.numbers
        each = shape_of(node)[rows] == shape_of(x)[0]
        return Shard(rows) if by_rows and each and Partial not in placements else None

    def is_batch(self, size: Any) -> bool:
        """Whether a number of the trace depends on the size of the batch."""
        return isinstance(size, _SYMBOLIC) and not size.node.expr.free_symbols.isdisjoint(self.batches)

    def grows(self, size: Any) -> bool:
        """Whether such numbers of microbatches add up to that of the batch, which answers do not."""
        if isinstance(size, torch.SymBool):
            return False
        twice = size.node.expr.subs({symbol: 2 * symbol for symbol in self.batches})
        return bool(sympy.expand(twice - 2 * size.node.expr) == 0)

    def _open_dims(self, node: fx.Node) -> list[int]:
        """The dims of a result whose sizes depend on the batch's."""
        return [dim for dim, size in enumerate(shape_of(node)) if self.is_batch(size)]

    def _numbers(self, node: fx.Node) -> list[Any]:
        """The numbers that a call computes with which depend on the size of the batch; sizes of its result are none."""
        values = [x.meta.get("val") for x in (*node.args, *node.kwargs.values()) if isinstance(x, fx.Node)]
        return [value for value in values if self.is_batch(value)]


def _is_zero(value: Any) -> bool:
    if isinstance(value, fx.Node) and value.target is aten.full.default:
        value = value.args[1]
    zeros = isinstance(value, fx.Node) and value.target is aten.zeros.default
    return zeros or isinstance(value, int | float) and value == 0


def _is_cast_of_count(node: fx.Node) -> bool:
    dtypes = [x.meta["val"].dtype for x in (*tensor_operands(node), node)]
    exact = not (dtypes[0].is_floating_point or dtypes[0].is_complex or dtypes[-1] == torch.bool)
    return node.target is aten._to_copy.default and exact


def _along_dim(node: fx.Node, operands: list[Placement]) -> Placement | None:
    """How the result of a call without a rule lies that works along one dim, which it is told, and leaves others."""
    values: dict[str, Any] = arguments(node) if isinstance(node.target, torch._ops.OpOverload) else {}
    rows = {x.dim for x in operands if x.kind == "S"}
    if rule_for(node) is not None or len(rows) != 1 or Partial in operands or node.target in _ACROSS:
        return None
    if not isinstance(values.get("dim"), int):
        return None
    (dim,) = rows
    cut = [x for x, p in zip(tensor_operands(node), operands, strict=True) if p.kind == "S"]
    alike = dim < len(shape_of(node)) and all(shape_of(x)[dim] == shape_of(node)[dim] for x in cut)
    if any(_lies_beside(x, shape_of(cut[0]), dim) for x in tensor_operands(node) if x not in cut):
        return None
    return Shard(dim) if alike and values["dim"] % len(shape_of(node)) != dim else None


def _lies_beside(operand: fx.Node, shape: Sequence[Any], dim: int) -> bool:
    """Whether rows of an operand that is the same for all microbatches go with those of one that is cut along a dim, by
    where they lie, as the numbers of ``scatter`` do."""
    sizes = shape_of(operand)
    return len(sizes) == len(shape) and sizes[dim] != 1


def _reads_across(call: fx.Node, placements: list[Placement]) -> bool:
    """Whether a call without a rule makes something of rows that lie beside one another: it is told their dim, they are
    a dim of its matrices, or times of a recurrent layer."""
    if not isinstance(call.target, torch._ops.OpOverload):
        return False
    values = arguments(call)
    told = [values.get(name) for name in _DIMS]
    along = [dim for x in told for dim in (x if isinstance(x, list | tuple) else [x]) if isinstance(dim, int)]
    recurrent = (
        "batch_first" in values or "batch_sizes" in values
    )  # the latter with rows of all times one after another
    matrices = call.target._schema.name.rpartition("::")[2].lstrip("_").startswith(_OF_MATRICES)
    operands = tensor_operands(call)
    beside = [x for x, p in zip(operands, placements, strict=True) if p.kind != "S" and "dim" in values]
    for position, (x, placement) in enumerate(zip(operands, placements, strict=True)):
        if placement.kind == "S":
            dims = len(shape_of(x))
            sequence = call.target is aten.searchsorted.Tensor and position == 0
            last = 2 if matrices else int(sequence)
            if _ACROSS.get(call.target, -1) in (None, position) or placement.dim >= dims - last:
                return True
            if any(dim % dims == placement.dim for dim in along):
                return True
            if any(_lies_beside(y, shape_of(x), placement.dim) for y in beside):
                return True
            if recurrent and position == 0 and placement.dim == int(values.get("batch_first", False)):
                return True
    return False


def _key(node: fx.Node) -> str:
    return str(node.meta["key"])


def _explain_mixing(node: fx.Node) -> str:
    call: Any = node.args[0] if node.target is operator.getitem else node
    return f"{_key(call)} is of the whole batch, not of its rows one by one, at {line_of(call)}"
