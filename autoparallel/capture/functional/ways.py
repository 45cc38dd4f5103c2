"""Both ways on which Python may go on from where it asks for a tensor's value, as one program.

A trace goes one way, so the model is traced once for each answer.  The ways have a beginning in common, and mostly an
end; what lies between becomes the graphs of one call, which runs the one or the other.

The answer True (clone is what Python asked for, the last result of the trace):
    clone = aten.clone(gt);  clamp = aten.clamp(x, -1, 1);  linear = aten.linear(clamp, w);  return (linear, clone)
The answer False:
    clone = aten.clone(gt);  linear = aten.linear(x, w);  return (linear, clone)
Merged:
    clone = aten.clone(gt);  if_else = autoparallel.operators.control_flow.if_else(clone, (x,));  getitem = if_else[0]
    linear = aten.linear(getitem, w);  return (linear,)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from autoparallel._torch.export import copy_node, size_guards
from autoparallel._torch.numbers import condition
from autoparallel.capture.functional.inner_graphs import inner_graph, insert_call, obstacle_in
from autoparallel.capture.functional.returned_numbers import make_tensors, type_of
from autoparallel.capture.functional.way_graphs import (
    are_alike,
    calls_behind,
    calls_for,
    calls_to,
    do_the_same,
    explain_difference,
    is_number_given,
    place_of,
    read_outputs,
    reads_of,
    take_places,
    what_is_done,
)
from autoparallel.capture.python.recorder import Recorder
from autoparallel.capture.refusals.refusals import INSTEAD_OF_WAYS
from autoparallel.capture.tracing.trace import Question, Trace
from autoparallel.capture.training import Findings
from autoparallel.graph.captured import SizeGuard
from autoparallel.graph.carried_attributes import ChangesAttributesError
from autoparallel.graph.changed_arguments import shown_changes
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.layers import draw_of
from autoparallel.graph.lines import marks_of
from autoparallel.operators.control_flow import IF_ELSE, control_operator
from autoparallel.rules.calls import READS

Pair = tuple[fx.Node, fx.Node]
"""What stands at one place in both ways: a node of the first and one of the second."""


def literals_of(program: ExportedProgram) -> set[str]:
    """The constants that a trace, not yet functional, makes of numbers: it copies them."""
    targets = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    placeholders = program.graph.find_nodes(op="placeholder")
    return {targets[n.name] for n in placeholders if n.users and all(u.target is _LIFT for u in n.users)}


_LIFT = torch.ops.aten.lift_fresh_copy.default


@dataclass
class Way:
    """A trace of a model, functional, that has been given some answers.

    Args:
        draws: how many times it draws random numbers.
        literals: the constants that the model makes of numbers (``torch.tensor(0.5)``), each trace its own.
        labels: of the attributes that the call is given.

    Attributes:
        places: where it asks, one question after another.
        guards: what it takes for granted of sizes.
        assumed: what it takes for granted of numbers that are left open.
        state: what it has read of Python's.
    """

    program: ExportedProgram
    findings: Findings
    recorder: Recorder
    trace: Trace
    draws: int
    literals: set[str]
    labels: Set[str]

    def __post_init__(self) -> None:
        self.places = take_places(self.program, [len(question.results) for question in self.findings.questions])
        values = [node.meta.get("val") for node in self.program.graph.find_nodes(op="placeholder")]
        sized = [x for x in values if isinstance(x, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in x.shape)]
        self.guards = {SizeGuard(*guard): None for guard in (size_guards(sized[0]) if sized else ())}
        self.assumed = {condition(relation.expr, answer): None for relation, answer in self.trace.assumed}
        self.state = self.recorder.state()
        if self.trace.inputs is not None:
            self.state.inputs.append(self.trace.inputs.taken())


class SetOnOneWayError(Exception):
    """Only one of two ways sets attributes that the call is given: the other must return them as they are.

    Attributes:
        labels: of these.
    """

    def __init__(self, labels: Set[str]) -> None:
        super().__init__(labels)
        self.labels = labels


class FixedOnOneWayError(CaptureError):
    """Only one of two ways fixes a size.

    Attributes:
        place: of the input among all.
    """

    def __init__(self, text: str, place: int) -> None:
        super().__init__(text)
        self.place = place


def merge(first: Way, second: Way) -> None:
    """Makes ``first`` the program of both, which have had different answers to the last question of each.

    Raises:
        SetOnOneWayError: where one sets what the other leaves as the call is given it.
        ChangesAttributesError: where the call is not given that.
        CaptureError: where they differ in what no such call can do.
    """
    number = len(first.findings.questions) - 1
    require_same_python(first, second, number)
    _Merged(first, second, number).make()
    note_merged(first, second)


def note_merged(first: Way, second: Way) -> None:
    """Notes that a way is of another one, too, which was told otherwise at its last question."""
    first.findings.questions.pop()
    first.findings.left_out.update(second.findings.left_out)
    first.guards.update(second.guards)
    first.assumed.update(second.assumed)
    first.state.merge(second.state)


def refused_at(question: Question, why: str) -> CaptureError:
    """The refusal of two ways that begin with a question."""
    return refusal(
        f"Python takes a way that depends on a tensor's values, and the two ways cannot be one program ({why}),",
        question.line, INSTEAD_OF_WAYS,
    )  # fmt: skip


def require_same_python(first: Way, second: Way, number: int) -> None:
    """Refuses what two ways leave behind beside their tensors.

    Args:
        number: of the question to which they have had different answers.
    """
    question = first.findings.questions[number]
    _require_same_python(first, second, question, partial(refused_at, question))


def _require_same_python(first: Way, second: Way, question: Question, refused: Callable[[str], CaptureError]) -> None:
    if first.findings.spec != second.findings.spec or first.findings.counted != second.findings.counted:
        raise refused("one returns what nests otherwise")
    _require_same_attributes(first, second, question.line, refused)
    for one, other in ((first, second), (second, first)):
        in_place = {str(target) for _, target in read_outputs(other.program)[0]} - {None}
        for name in sorted(one.recorder.buffers.rebound - other.recorder.buffers.rebound):
            if f"model.{name}" in in_place:
                raise refused(f"one binds the buffer {name} anew: write into it, {name}.copy_(...)")
    first.recorder.buffers.rebound |= second.recorder.buffers.rebound
    _require_same_memory(first, second, refused)
    ours, theirs = (_changed_parameters(way.program) for way in (first, second))
    if alone := ours ^ theirs:  # as the first batch's does, whose flag may be read instead
        raise refused(f"one changes the parameter {min(alone).removeprefix('model.')}")
    if first.draws != second.draws or first.trace.draw_scripts != second.trace.draw_scripts:
        raise refused(_DRAWS)


def _require_same_memory(first: Way, second: Way, refused: Callable[[str], CaptureError]) -> None:
    """Raises where only one of the ways returns or keeps what lies in memory that a way changes in place; where nobody
    does, such a result is a copy."""
    ours, theirs = first.findings.memory, second.findings.memory
    changes = [*read_outputs(first.program)[0], *read_outputs(second.program)[0]]
    kinds, names = {kind for kind, _ in changes}, {str(target).removeprefix("model.") for _, target in changes}
    names -= first.recorder.buffers.rebound | second.recorder.buffers.rebound
    for key in [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]:
        for shared in filter(None, (ours.pop(key, None), theirs.get(key))):
            owner = shared.owner
            if owner in names or isinstance(owner, int) and OutputKind.USER_INPUT_MUTATION in kinds:
                what = f"a part of {owner}" if isinstance(owner, str) else "a part of an input"
                raise refused(f"one returns or keeps {what}, which the call changes: clone() it")


def _changed_parameters(program: ExportedProgram) -> set[str]:
    specs = program.graph_signature.output_specs
    return {str(spec.target) for spec in specs if spec.kind == OutputKind.PARAMETER_MUTATION}


def _require_same_attributes(first: Way, second: Way, line: str, refused: Callable[[str], CaptureError]) -> None:
    """Raises where only one of the ways sets an attribute."""
    ours, theirs = first.findings.attributes, second.findings.attributes
    changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if not changed:
        return
    written = first.recorder.written | second.recorder.written
    to_give = {name: (written[name].value, line) for name in changed if name in written and written[name].may_stay}
    if any(name in ours and name in theirs or name not in {*first.labels, *to_give} for name in changed):
        kind = {name: x.kind_before for name, x in written.items()}.get(changed[0], "")
        raise refused(f"one {shown_changes(changed[:1])}{f', which is {kind} before' * bool(kind)}")
    if labels := first.labels & {*changed}:
        raise SetOnOneWayError(labels)
    raise ChangesAttributesError(str(refused(f"one {shown_changes(changed[:1])}")), to_give)


_DRAWS = "one draws random numbers"


class Merger:
    """What makes one program of two.

    Args:
        first, second: the ways; the program of the first is rewritten.
        number: of the question to which they have had different answers.

    Attributes:
        questions_left: how many each still returns of what it asks for, which are no results.
        alone: what only the first does, when they are joined.
    """

    questions_left = 1, 1
    alone: list[fx.Node]

    def __init__(self, first: Way, second: Way, number: int) -> None:
        self.first, self.second = first.program, second.program
        self.refused = partial(refused_at, first.findings.questions[number])
        self.literals = first.literals, second.literals
        self.graph = self.first.graph
        self.questions = first.places[number].question, second.places[number].question
        self.twins: dict[fx.Node, fx.Node] = {}  # of what the second has in common with the first

    # -- what is in both ways -------------------------------------------------------------------------------------

    def share_beginning(self) -> None:
        """All that comes before the question is made in any case; what only the second way reads of it was dropped from
        the first."""
        self._share_inputs()
        self._share_calls()

    def _share_inputs(self) -> None:
        """Every placeholder of the second way is one of the first, which gets the constants that it alone reads."""
        ours, theirs = ({n.name: n for n in p.graph.find_nodes(op="placeholder")} for p in (self.first, self.second))
        signature = self.first.graph_signature
        places = {(spec.kind, spec.target): ours.get(spec.arg.name) for spec in signature.input_specs}
        names = enumerate([spec.arg.name for spec in signature.input_specs if spec.kind == InputKind.USER_INPUT])
        place = 0
        constants = [spec for spec in signature.input_specs if spec.kind == InputKind.CONSTANT_TENSOR]
        self._merge_literals({str(spec.target): ours[spec.arg.name] for spec in constants})
        for spec in self.second.graph_signature.input_specs:
            node = theirs.get(spec.arg.name)
            if spec.kind == InputKind.USER_INPUT:
                place, name = next(names)
                twin = ours.get(name)
            elif spec.kind == InputKind.CONSTANT_TENSOR:
                same = [c.arg.name for c in constants if self._is_one(str(c.target), str(spec.target))]
                twin = ours[same[0]] if same else self._add_constant(node, spec)
            else:
                twin = places.get((spec.kind, spec.target))
            if node is None:
                continue
            if twin is None or not are_alike(twin, node):
                why = self.refused("one fixes a size that the other leaves open")
                if spec.kind == InputKind.USER_INPUT:
                    raise FixedOnOneWayError(str(why), place) from ValueError("sizes differ")
                raise why from ValueError("sizes differ")
            self.twins[node] = twin

    def _merge_literals(self, places: Mapping[str, fx.Node]) -> None:
        """What reads a constant that the first has made of numbers reads the first one that is equal, as what the
        second reads finds that."""
        names = [name for name in places if name in self.literals[0]]
        for name in names:
            same = next(other for other in names if _are_equal(*(self.first.constants[x] for x in (other, name))))
            places[name].replace_all_uses_with(places[same])

    def _is_one(self, name: str, other: str) -> bool:
        """Whether a constant of the first and one of the second are one tensor."""
        a, b = self.first.constants[name], self.second.constants[other]
        if name not in self.literals[0] or other not in self.literals[1]:
            return a is b
        return _are_equal(a, b)

    def _add_constant(self, node: fx.Node | None, spec: InputSpec) -> fx.Node | None:
        """Gives the first a constant of the second."""
        if node is None:
            return None
        name = f"{node.target}_other"
        while name in self.first.constants:
            name += "_"
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            placeholder = self.graph.placeholder(name)
        placeholder.meta = dict(node.meta)
        self.first.constants[name] = self.second.constants[str(spec.target)]
        if str(spec.target) in self.literals[1]:
            self.literals[0].add(name)
        self.first.graph_signature.input_specs.insert(
            0, replace(spec, arg=TensorArgument(placeholder.name), target=name)
        )
        return placeholder

    def _share_calls(self) -> None:
        table: dict[Any, list[fx.Node]] = {}
        for node in calls_to(self.questions[0]):
            table.setdefault((what_is_done(node), tuple(reads_of(node))), []).append(node)
        for node in calls_to(self.questions[1]):
            alike = table.get((what_is_done(node), tuple(self.twins[x] for x in reads_of(node))))
            if alike:
                self.twins[node] = alike.pop(0)
                continue
            if not is_number_given(node):
                self._require_plain(node)
            with self.graph.inserting_before(self.questions[0]):
                self.twins[node] = copy_node(self.graph, node, self.twins.__getitem__)
        if self.twins[self.questions[1]] is not self.questions[0]:
            raise self.refused("what comes before the question differs")

    def results(self) -> list[tuple[OutputSpec, Pair | Any]]:
        """What the program returns: for each spec, what the two ways have, or a value that both have; questions that
        are answered are none of it."""
        changes, returned = map(list, zip(*map(read_outputs, (self.first, self.second)), strict=True))
        results: list[tuple[OutputSpec, Pair | Any]] = []
        for place in {**changes[0], **changes[1]}:
            (spec, ours), (_, theirs) = (
                of.get(place) or ((changes[0] | changes[1])[place][0], place_of(place, program))
                for of, program in zip(changes, (self.first, self.second), strict=True)
            )
            results.append((spec, (ours, theirs)))
        returned = [rows[:-left] for rows, left in zip(returned, self.questions_left, strict=True)]
        if len(returned[0]) != len(returned[1]):
            raise self.refused("one returns more than the other")
        for (spec, ours), (other, theirs) in zip(*returned, strict=True):
            kinds = [type_of(*row) for row in ((spec, ours), (other, theirs))]
            if None not in kinds and kinds[0] is not kinds[1]:
                shown = [f"{'an' if kind is int else 'a'} {kind.__name__}" for kind in kinds if kind is not None]
                raise self.refused(f"one returns or sets {shown[0]}, and the other {shown[1]}: let it be of one type")
            if type(spec.arg) is not type(other.arg):
                raise self.refused("one returns a tensor and the other does not")
            if isinstance(spec.arg, ConstantArgument) and (type(ours) is not type(theirs) or ours != theirs):
                raise self.refused(f"one returns {ours!r}, and the other {theirs!r}")
            results.append((spec, ours if isinstance(spec.arg, ConstantArgument) else (ours, theirs)))
        return results

    def common_end(self, ours: Sequence[fx.Node], theirs: Sequence[fx.Node], results: Sequence[Pair]) -> list[Pair]:
        """The longest end of both ways that does the same with what corresponds.

        Args:
            ours, theirs: what is made after the question.
            results: what is made by it.
        """
        most = min(len(ours), len(theirs))
        length = next((i for i in range(most) if not do_the_same(ours[-1 - i], theirs[-1 - i])), most)
        pairs = list(zip(ours[len(ours) - length :], theirs[len(theirs) - length :], strict=True))
        while True:
            places = {node: i for i, pair in enumerate(pairs) for node in pair}
            too_early = 0  # so many pairs do not belong to the end
            for i, (a, b) in [*enumerate(pairs), *((len(pairs), pair) for pair in results)]:
                for x, y in [(a, b)] if i == len(pairs) else zip(reads_of(a), reads_of(b), strict=True):
                    if x in places or y in places:
                        if places.get(x) != places.get(y):
                            too_early = max(too_early, 1 + max(places.get(x, -1), places.get(y, -1)))
                    elif not self._can_join(x, y):
                        if i == len(pairs):
                            raise self.refused(explain_difference(x, y))
                        too_early = max(too_early, i + 1)
            if not too_early:
                return pairs
            pairs = pairs[too_early:]

    def _can_join(self, x: fx.Node, y: fx.Node) -> bool:
        """Whether one value may stand for what the ways have made before their common end."""
        tensors = all(isinstance(node.meta.get("val"), torch.Tensor) for node in (x, y))
        return self.twins.get(y) is x or tensors and are_alike(x, y)

    def key(self, x: fx.Node, y: fx.Node) -> Pair:
        """What stands at a place, with what is of both ways as the first has it."""
        return x, self.twins.get(y, y)

    # -- what is in one of them -----------------------------------------------------------------------------------

    def _require_plain(self, node: fx.Node) -> None:
        """Refuses what only one way does, and a call that runs one of two graphs cannot."""
        if draw_of(node) is not None:
            raise self.refused(_DRAWS)
        if obstacle := obstacle_in(node):
            raise self.refused(f"one runs {obstacle}")
        if node.target in READS:
            raise self.refused("one reads a tensor's value into Python")

    def join(self, ours: list[fx.Node], theirs: list[fx.Node], results: Sequence[Pair]) -> dict[Pair, fx.Node]:
        """Exchanges what only one way does for a call that runs one way or the other; what stands for each pair of
        values that differ.

        Args:
            ours, theirs: what is made after the question.
            results: what is made by it.
        """
        pairs = self.common_end(ours, theirs, results)
        self.twins.update((b, a) for a, b in pairs)
        ours, theirs = (way[: len(way) - len(pairs)] for way in (ours, theirs))
        for node in (*ours, *theirs):
            self._require_plain(node)
        self.alone = ours
        joints = {self.key(x, y): None for a, b in pairs for x, y in zip(reads_of(a), reads_of(b), strict=True)}
        joints |= {self.key(*pair): None for pair in results}
        values = self._insert_call(ours, theirs, [pair for pair in joints if pair[0] is not pair[1]])
        for a, b in pairs:
            reads = iter([values.get(self.key(x, y), x) for x, y in zip(reads_of(a), reads_of(b), strict=True)])
            a.args, a.kwargs = fx.map_arg((a.args, a.kwargs), lambda _, reads=reads: next(reads))  # type: ignore[misc]
        return values

    def erase(self) -> None:
        """Erases what the call does."""
        for node in reversed(self.alone):
            self.graph.erase_node(node)

    def _insert_call(
        self, ours: Sequence[fx.Node], theirs: Sequence[fx.Node], joints: Sequence[Pair]
    ) -> dict[Pair, fx.Node]:
        """Inserts the call that runs one way or the other; what stands for each pair behind it.

        Args:
            ours, theirs: the calls of each way.
            joints: what the common end reads of them.
        """
        if not joints:
            return {}
        ways = [calls_for(ours, [x for x, _ in joints]), calls_for(theirs, [y for _, y in joints])]
        inside = {*ways[0], *ways[1]}
        read = {
            self.twins.get(x, x): None
            for x in [
                *(x for way in ways for node in way for x in reads_of(node)),
                *(x for pair in joints for x in pair),
            ]
            if x not in inside
        }
        operands = [node for node in self.graph.nodes if node in read]
        graphs = [inner_graph(way, [pair[i] for pair in joints], operands, self.twins) for i, way in enumerate(ways)]
        target, arguments = control_operator(IF_ELSE, [self.questions[0], *graphs, tuple(operands)], len(joints) == 1)
        behind = ours[-1] if ours else self.questions[0]
        items = insert_call(behind, target, arguments, [x.meta["val"] for x, _ in joints], marks_of(self.questions[0]))
        return dict(zip(joints, items, strict=True))


class _Merged(Merger):
    """The merging of two programs that are told otherwise at their last question and go on to their ends."""

    def make(self) -> None:
        """Rewrites the first program."""
        make_tensors((self.first, self.second))
        self.share_beginning()
        results = self.results()
        ours, theirs = (calls_behind(question) for question in self.questions)
        values = self.join(ours, theirs, [pair for _, pair in results if isinstance(pair, tuple)])
        returned = [values.get(self.key(*x), x[0]) if isinstance(x, tuple) else x for _, x in results]
        self.graph.output_node().args = (tuple(returned),)
        self.first.graph_signature.output_specs[:] = [spec for spec, _ in results]
        self.erase()


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two constants hold the same."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
