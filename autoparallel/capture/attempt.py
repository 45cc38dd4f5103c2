"""One attempt at a capture.

``torch.export`` (non-strict) traces the model on fake tensors, however large it is; the graph is made functional,
brought into the few canonical operators that rules speak of, and described.

[Note: devices] The fakes are on the kind of device that the model will run on: Python asks for it (``x.is_cuda``), and
autocast casts by it.  The graph that is captured speaks of CPUs, wherever it was traced, so that what is planned on one
machine is the same on another; ``passes.set_device`` says where a program runs.  What a model makes on the CPU is then
there, too, so that it may meet what is on the device.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoparallel._torch.export import computing_on, has_unknown_sizes, make_fake_mode
from autoparallel._torch.nn import parametrizations_made_anew, without_trackers
from autoparallel.capture.copies import Copies
from autoparallel.capture.describe import describe
from autoparallel.capture.exports import export_way, name_outputs
from autoparallel.capture.fake_inputs import FakeInputs, scale_of
from autoparallel.capture.first_calls import read_of_next, state_of_next
from autoparallel.capture.functional.detours import trace_all
from autoparallel.capture.functional.devices import forget_devices
from autoparallel.capture.functional.layers import NotAlike, Stack, find_stacks, leave_out
from autoparallel.capture.functional.passes import filling_passes, resolving_passes
from autoparallel.capture.functional.selections import group_selections
from autoparallel.capture.functional.ways import FixedOnOneWayError, SetOnOneWayError, Way
from autoparallel.capture.python.changes import (
    ContainerChangedError,
    StateChangedError,
    VariablesChangedError,
    Written,
)
from autoparallel.capture.python.closures import functions_attached
from autoparallel.capture.python.globals_read import GlobalsRead
from autoparallel.capture.python.journals import JournalReadError
from autoparallel.capture.python.loss_functions import owners_of, packages_of, read_of_loss
from autoparallel.capture.refusals.failures import error_of_call, explain_failure, is_raised_by_model, place_of
from autoparallel.capture.refusals.refusals import (
    INSTEAD_OF_WAYS,
    require_gradients_apart,
    require_gradients_of_parameters,
    require_own_dtype,
    require_own_memory,
    require_own_names,
    require_values_of_parameters,
)
from autoparallel.capture.settings import CaptureSettings
from autoparallel.capture.tracing.drawn_numbers import depends_on_draws, require_dropped
from autoparallel.capture.tracing.inputs_read import CounterReadError, InputsRead
from autoparallel.capture.tracing.tensor_attributes import TensorAttributes
from autoparallel.capture.tracing.trace import Answers, Question, Trace
from autoparallel.capture.tracing.tracing import everything_seen
from autoparallel.capture.training import Training
from autoparallel.capture.user_warnings import only_the_users
from autoparallel.graph.beside import beside_in, take_apart
from autoparallel.graph.captured import Captured, InputSpec
from autoparallel.graph.carried_attributes import ELEMENTS, ChangesAttributesError
from autoparallel.graph.drawn_numbers import CHECKS, RANDOM, TORCH
from autoparallel.graph.errors import CaptureError, FailsUntraced, refused_draw
from autoparallel.graph.hooks import HookTemplate, require_full_hooks
from autoparallel.graph.layers import find_runs, is_checkpointed, layer_of
from autoparallel.graph.lines import first_line, line_of
from autoparallel.graph.python_state import PythonState
from autoparallel.graph.surroundings import SCRIPT
from autoparallel.operators.control_flow import goes_by_values, is_selection
from autoparallel.operators.opaque import OpaqueCall
from autoparallel.passes.recompute_layers import checkpointed_layers
from autoparallel.passes.runner import run_passes
from autoparallel.rules import rule_for
from autoparallel.text import LOGGER

AS_COMPILED = (
    "the model asks whether it is compiled at %s, and is told that it is: the way that it goes otherwise cannot be "
    "traced (%s)"
)

_MOST_REHEARSED = 256
"""How often a call may ask for a tensor's value where it is not traced."""

LEFT_OUT = "the program leaves out %s, at %s"

ON_ONE_WAY = (
    "%d parameters are read on one of the ways alone that Python may take by a tensor's value, at %s: what they are "
    "read for runs on whole tensors on every rank. The less the ways do differently, the more is sharded: torch.where, "
    "and the same calls on both, keep it together"
)

ON_SELECTED = (
    "%d parameters are read for as many rows as a tensor's values select, at %s: what they are read for runs on whole "
    "tensors on every rank. On all rows, weighed by masks, it is sharded"
)

NOT_AGAIN = (
    "what torch.utils.checkpoint computes at %s is kept for the backward, because it belongs to no layer (an item of a "
    "ModuleList or a Sequential, whose calls stand together): only layers are computed again"
)


@dataclass
class Attempt:
    """One attempt at a capture: copies of the model, with fakes in the places of tensors, are run and traced.

    Args:
        model: the plain model; its tensors are not touched.
        specs, in_spec: the inputs, flattened from ``(args, kwargs)``, with the dims that are left open.
        settings: what it is captured for.
        fixed: the lines at which the model fixes sizes are added.
        leaves: the inputs of the call.
        may_read: whether Python may read their values (see ``tracing.inputs_read``), single numbers alone where sizes
            are open.
        may_size: whether the numbers that it reads of tensors may be sizes (see ``functional.selections``).
        counters: the labels of buffers whose values it may not read.
        reads_flags: whether it may read flags, and if not ``may_read``, these alone.
        fixes_whole: whether whole numbers that it draws are fixed.
        looks_after: whether another attempt looks after the variables around the model that a run changes.

    Attributes:
        inputs: what stands for those of the call; ``scale`` is how many times its batch is traced.
        copies: what is run and traced.
        rehearsals: what was noted of each run without a trace.
        asked_at: the line at which the model asks first whether it is compiled; None for one that does not.
        reads_values: whether Python reads a tensor's value, or a size that values decide.
        has_open_whole: whether it draws a whole number that is left open.
    """

    model: nn.Module
    specs: Sequence[InputSpec | Any]
    in_spec: pytree.TreeSpec
    settings: CaptureSettings
    _: KW_ONLY
    fixed: dict[str, None]
    leaves: Sequence[Any] = ()
    may_read: bool = False
    may_size: bool = False
    counters: Collection[str] = ()
    reads_flags: bool = False
    fixes_whole: bool = False
    looks_after: bool = True

    def __post_init__(self) -> None:
        self.mode = make_fake_mode()
        self.rehearsals: list[Trace] = []
        self.asked_at: str | None = None
        self.reads_values = self.has_open_whole = False
        self._trained_apart: dict[int, torch.Tensor] = {}
        self._of_next: PythonState | None = None
        settings = self.settings
        self.scale = scale_of(settings.least_batch, settings.batch)
        open_batch = self.scale * settings.batch > 1
        with self.mode:
            self.inputs = FakeInputs(self.specs, self.in_spec, self.scale, open_batch, settings.device)
            self.copies = Copies(self.model, self.inputs, settings)
        self._reads = self._make_reads()
        self.copies.names = self._reads.names
        self._attributes = TensorAttributes(self.model, self.leaves)

    @property
    def asks_flags(self) -> bool:
        """Whether Python has asked for what a flag holds."""
        return self._attributes.asks_flags

    def _make_reads(self) -> GlobalsRead:
        loss_fn = self.settings.loss_fn
        attached = functions_attached(self.model, loss_fn)
        return GlobalsRead(owners_of(loss_fn), packages_of(self.model, loss_fn, attached), self.model, attached)

    def run(
        self, wrapper: Training, answer: bool = True, ahead: Mapping[str, torch.Tensor] | None = None, **tables: Any
    ) -> Any:
        """Runs a copy without a trace, with one answer for all that Python asks of tensors' values.

        Args:
            ahead: what buffers hold, where Python may read it, by label; None for what those of the model do.
            tables: what several runs share of what stands behind names (see ``tracing.trace``).
        """
        answers = Answers(rest=answer, most=_MOST_REHEARSED)
        self.rehearsals.append(self._trace_of(wrapper, [], ahead, answers=answers, **tables))
        with everything_seen(self.rehearsals[-1]):
            try:
                results = wrapper(*self.inputs.arguments)
            finally:
                require_dropped(self.rehearsals[-1])
        self._trained_apart |= {id(x): x for x in wrapper.findings.trained_apart}
        return results

    def _trace_of(
        self,
        wrapper: Training,
        questions: list[Question],
        ahead: Mapping[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> Trace:
        """What a trace of a copy of the model notes beside operators.

        Args:
            questions: the tensors are added that Python asks whether they hold.
            ahead: what buffers hold instead of what those of the model do.
        """
        paths = {id(module): path for path, module in wrapper.model.named_modules()}
        are_open = any(s.batch or s.open for s in self.specs if isinstance(s, InputSpec))
        inputs = None
        if self.may_read or self.reads_flags:
            inputs = InputsRead(
                self.leaves, only_numbers=are_open, only_flags=not self.may_read, counters=self.counters, ahead=ahead
            )
        findings = wrapper.findings
        return Trace(
            findings.originals, paths, findings.existing, findings.left_out, questions, inputs=inputs,
            attributes=self._attributes, places=self._reads.places, fixes_whole=self.fixes_whole, **options,
        )  # fmt: skip

    def trace(self, stacks: list[Stack], as_compiled: bool = False) -> Captured:
        """Traces a copy without the inner layers of its stacks, and fills them up."""
        try:
            way = self._trace_all_ways(stacks, as_compiled)
        except CaptureError as error:
            if as_compiled or self.asked_at is None:
                raise
            try:
                captured = self.trace(stacks, as_compiled=True)
            except CaptureError:
                raise error from error.__cause__  # another attempt may leave less open
            reason = str(error).partition("\nWhat to change")[0].splitlines()[-1]
            LOGGER.warning(AS_COMPILED, self.asked_at, reason)
            self._of_next = None  # that is of what it does where it is not compiled
            return captured
        findings, recorder, settings = way.findings, way.recorder, self.settings
        arguments = len(self.specs) - len(pytree.tree_leaves(take_apart(self.inputs.arguments[1])[1][:3]))
        captured = describe(way, self.model, self.copies, self.specs, arguments, settings)
        captured.guards = tuple({**dict.fromkeys(captured.guards), **way.guards})
        captured.assumed = tuple(way.assumed)
        captured.state = way.state
        captured.drawn = way.trace.draw_scripts
        captured.draws = way.draws + len(captured.drawn.get(TORCH, ()))
        captured.rebound = frozenset(self.copies.owners[name] for name in recorder.buffers.rebound)
        captured.registered = dict(recorder.buffers.registered)
        captured.set_at = {
            name: x.line for name, x in recorder.written.items() if x.line not in ("", "an unknown line")
        }
        for index in captured.written.values():
            captured.set_at[ELEMENTS] = line_of(captured.results[index])
        fakes, parameters = self.copies.fakes, self.model.named_parameters()
        captured.rest_dtypes = {name: p.dtype for name, p in parameters if fakes[id(p)].dtype != p.dtype}
        require_own_dtype(captured)
        require_own_memory(captured, self.model)
        require_gradients_apart(captured, [*self._trained_apart.values()], settings.ranks)
        if settings.ranks > 1:
            require_values_of_parameters(captured, self.model)
        if settings.ranks > 1 and settings.gradients:
            require_gradients_of_parameters(captured, self.model)
        modules = self.model.named_modules(remove_duplicate=False)
        kinds = {path: getattr(module, "stands_for", type(module)) for path, module in modules}
        run_passes(filling_passes(stacks, captured, kinds), captured.module)
        if settings.device != "cpu":
            forget_devices(captured)
        for line, what in findings.left_out.items():
            LOGGER.warning(LEFT_OUT, what, line)
        return captured

    def _trace_all_ways(self, stacks: list[Stack], as_compiled: bool) -> Way:
        """The same, once more for each attribute that only one of the ways sets, and for each whole number among them
        that only one fixes."""
        numbers = beside_in(range(len(self.specs)), self.in_spec).numbers
        while True:
            try:
                return self._trace_ways(stacks, as_compiled)
            except SetOnOneWayError as error:
                self.copies.returned_anyway |= error.labels
            except FixedOnOneWayError as error:
                labels = {label for label, place in numbers.items() if place == error.place}
                if not labels or labels <= self.copies.fixed_numbers:
                    raise
                self.copies.fixed_numbers |= labels

    def _trace_ways(self, stacks: list[Stack], as_compiled: bool) -> Way:
        """A trace that goes all ways on which Python may go on from where it asks for a tensor's value."""
        calls: dict[str, OpaqueCall] = {}
        hooks: dict[str, HookTemplate] = {}

        def trace_with(answers: Answers) -> Way:
            wrapper = self.copies.make()
            leave_out(wrapper, stacks)
            trace = self._trace_of(
                wrapper, wrapper.findings.questions, answers=answers, as_compiled=as_compiled, calls=calls, hooks=hooks
            )
            return self._trace_way(wrapper, trace)

        way = trace_all(trace_with)
        way.program.graph.eliminate_dead_code()
        parameters = way.program.graph_signature.inputs_to_parameters
        group_selections(way.program, self.may_size)
        whole = Counter[tuple[str, str]]()
        for node in (x for x in way.program.graph.nodes if goes_by_values(x.target) and rule_for(x) is None):
            said = ON_SELECTED if is_selection(node.target) else ON_ONE_WAY
            whole[said, line_of(node)] += sum(x.name in parameters for x in node.all_input_nodes)
        for (said, line), count in whole.items():
            if count:
                LOGGER.warning(said, count, line)
        run_passes(resolving_passes(calls, hooks), way.program.graph_module)
        name_outputs(way.program)
        return way

    def _trace_way(self, wrapper: Training, trace: Trace) -> Way:
        """The trace of one way: that of the trace's answers, and of True to each further question."""
        try:
            way = export_way(wrapper, self.inputs, trace)
        except CaptureError as error:
            if error.__cause__ is None or not trace.questions:
                raise
            number = len(trace.questions) - 1
            place = f"where the answer is {trace.answers[number]} at {trace.questions[number].line}"
            raise CaptureError(f"{error}\nThat is on the way {place}: {INSTEAD_OF_WAYS}.") from error.__cause__
        finally:
            self.asked_at = self.asked_at or trace.asked_at
            self.reads_values |= trace.reads_values
            self.has_open_whole |= trace.has_open_whole
            self.fixed.update(dict.fromkeys(trace.fixed.values()))
        require_dropped(trace)
        self._trained_apart |= {id(x): x for x in wrapper.findings.trained_apart}
        return way

    def capture(self) -> Captured:
        """Runs a copy, and traces another as that has shown it to be.

        Raises:
            CaptureError: when the model cannot be captured.
        """
        require_full_hooks(self.model)
        require_own_names(self.model)
        before, numbers, settings = torch.is_grad_enabled(), random.getstate(), self.settings
        torch.set_grad_enabled(settings.gradients)
        cast = torch.autocast(settings.device, settings.autocast, enabled=settings.autocast is not None)
        try:
            with (
                only_the_users(),
                parametrizations_made_anew(),
                without_trackers(),
                cast,
                computing_on(settings.device),
            ):
                captured = self._capture_with_journals()
        finally:
            self.reads_values |= has_unknown_sizes(self.mode) or any(run.reads_values for run in self.rehearsals)
            torch.set_grad_enabled(before)
            self._reads.places.forget_cached()
            if self._reads.draws.checks:  # which were drawn in the trace, too
                random.setstate(numbers)
            for recorder in self.copies.recorders:
                recorder.close()
        captured.runs = find_runs(captured.graph)
        layers, marked = {*checkpointed_layers(captured.graph)}, filter(is_checkpointed, captured.graph.nodes)
        if rest := [node for node in marked if node.meta["backward"] and layer_of(node) not in layers]:
            LOGGER.warning(NOT_AGAIN, line_of(rest[0]))
        return captured

    def _capture_with_journals(self) -> Captured:
        """Captures the model once more for each list or dict of which a run shows that a call adds to it, and for each
        of those that it reads, too."""
        reads: dict[str, JournalReadError] = {}
        while True:
            try:
                return self._capture()
            except ContainerChangedError as error:
                if error.label in reads:  # it cannot be given to a call
                    raise reads[error.label] from None
                self.copies.journals.add(error.label)
            except JournalReadError as error:
                reads[error.label] = error
                self.copies.journals.discard(error.label)
                self.copies.read.add(error.label)
            self.rehearsals.clear()

    def _rehearse(self, whole: Training) -> tuple[list[Stack], Exception | None]:
        """Runs the whole model, without a trace, to see what it reads of Python: the stacks of layers that need not be
        traced, and how it failed, if it did."""
        try:
            stacks = find_stacks(whole, self.copies.make, self.run, self._reads)
            if stacks and self.rehearsals[0].questions:
                no = functools.partial(self.run, answer=False)
                stacks = stacks if find_stacks(self.copies.make(), self.copies.make, no, self._reads) == stacks else []
        except CaptureError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model cannot do here, tracing it will say better
            return [], error
        inside = tuple(f"{stack.path}." for stack in stacks)
        changing = {*whole.findings.attributes, *take_apart(self.inputs.arguments[1])[1].attributes}
        is_inside = any(f"model.{name}".startswith(inside) or name.startswith(f"{SCRIPT}.") for name in changing)
        differentiates = any(trace.differentiates for trace in self.rehearsals)  # what layers compute
        return ([] if is_inside or differentiates else stacks), None

    def _read_of_next(self, written: Mapping[str, Written]) -> PythonState | None:
        """What the next call reads, which finds filled what this one has found empty (see ``first_calls``)."""
        tables: dict[str, Any] = {"calls": {}, "hooks": {}}
        try:
            with self._reads:
                return read_of_next(
                    written, self.copies.make, lambda wrapper: (self.run(wrapper, **tables), self.rehearsals[-1])
                )
        except Exception:  # noqa: BLE001 - then it is left to the next call
            return None

    def _require_no_counters(self) -> None:
        """Refuses to read buffers of which Python reads numbers that not this call alone changes, but the next, too.

        Raises:
            CounterReadError: where there are some.
        """
        inputs = self.rehearsals[0].inputs
        if inputs is None or not inputs.changed:
            return
        ahead = {label: value for label, value in inputs.changed.items() if value is not None}
        if len(ahead) == len(inputs.changed):  # else nobody knows what the next call finds
            self.run(self.copies.make(), ahead=ahead)
            inputs = self.rehearsals.pop().inputs
        if inputs is not None and inputs.changed:
            raise CounterReadError(inputs.changed.keys())

    def _with_lines(self, error: ChangesAttributesError) -> ChangesAttributesError:
        """The error with the lines that change entries of containers, for each of which a copy runs again."""
        lines = dict(error.lines)
        for refused in {id(x): x for x in error.unseen.values()}.values():
            line = self._line_of(refused)
            lines |= {label: line for label, other in error.unseen.items() if other is refused}
        text = str(error).replace("an unknown line", lines[next(iter(lines))], 1)
        return ChangesAttributesError(text, {label: (x, lines[label]) for label, x in error.values.items()})

    def _line_of(self, error: StateChangedError) -> str:
        """The line of what a run changes that no trace can show, for which a copy runs again."""
        wrapper, reads = self.copies.make(), self._make_reads()

        def again() -> None:
            with reads:
                self.run(wrapper)

        return first_line(again, lambda: error.has_changed(wrapper.recorder, reads))

    def _capture(self) -> Captured:
        reads = self._reads
        with self.mode:
            whole = self.copies.make()
            try:
                stacks, failed = self._rehearse(whole)
            except ContainerChangedError:
                raise
            except StateChangedError as error:
                if isinstance(error, VariablesChangedError) and self.looks_after:
                    raise
                raise error.at(self._line_of(error)) from None
            except ChangesAttributesError as error:
                raise self._with_lines(error) from None
            if not failed:
                self._require_no_counters()
            checks, written = reads.draws.checks, whole.recorder.written
            if any(value.fills for value in written.values()) and not failed and not self.may_read:
                self._of_next = self._read_of_next(written)
        asks = bool(self.rehearsals[0].questions)
        if failed and (ranges := self.rehearsals[0].ranges):  # perhaps because of what was drawn
            raise depends_on_draws(self.rehearsals[0], ranges[-1][0]) from None
        with reads if failed or asks else nullcontext():
            try:
                captured = self.trace(stacks)
            except NotAlike:
                captured = self.trace([])
            except CaptureError as error:
                if failed is None or asks:  # the trace says on which way it fails
                    raise
                if error.__cause__ is None or place_of(error.__cause__) != place_of(failed):
                    raise
                # It speaks of sizes, not of symbols.
                same_mode = self.settings.training in (None, self.model.training)
                raised = failed if same_mode and not asks and is_raised_by_model(failed) else None
                of_model = whole.model, whole.findings.has_outputs
                raised = raised or error_of_call(failed, *of_model)
                raise FailsUntraced(explain_failure(failed, *of_model), raised) from failed
        for recorder in self.copies.recorders:
            reads.places.require_others(recorder.changed())
        states = whole.recorder.state(), reads.places.state(), self.copies.closures.state(), self._attributes.state()
        for state in (*states, read_of_loss(self.settings.loss_fn)):
            captured.state.merge(state)
        if self._of_next is not None:
            captured.next_state = state_of_next(captured.state, self._of_next, written)
        for line, what in reads.shown.items():
            LOGGER.warning(LEFT_OUT, what, line)
        if failed is None:  # else all of the model was traced
            captured.drawn = self.rehearsals[0].draw_scripts
        if checks:
            if any(captured.drawn.get(RANDOM, ())):
                raise refused_draw(f"{RANDOM} (beside {CHECKS})", self.rehearsals[0].drawn[RANDOM][-1])
            captured.drawn = {**captured.drawn, CHECKS: (0,) * checks}
        if stacks and (inputs := self.rehearsals[0].inputs) is not None:  # of layers that are not traced, too
            captured.state.inputs.append(inputs.taken())
        return captured
