"""The kinds of calls of a model: which kind a call is, and one program for each.

Two calls are of one kind where one trace serves both: the modules and their modes, what is trained, the form of the
inputs and the state of Python that the trace has read are the same.  A kind is made at its first call, by all ranks
together; from then on a call of it finds its program as soon as the ranks have shown that they make the same call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoparallel import _torch
from autoparallel.comm.groups import before_next_collective
from autoparallel.graph.calls import (
    Call,
    UnevenSizeError,
    changing_of,
    closed,
    fits,
    form_of,
    numbers_fit,
    opened,
    without_numbers,
)
from autoparallel.graph.captured import Captured, InputSpec, NumberSpec
from autoparallel.graph.carried_attributes import (
    ChangesAttributesError,
    as_argument,
    describe_attributes,
)
from autoparallel.graph.drawn_numbers import DrawsNumbersError, add_script
from autoparallel.graph.errors import FailsUntraced, NeedsGradientError
from autoparallel.graph.python_state import PythonState
from autoparallel.plan import Plan
from autoparallel.runtime.calls.carried import Carried, fixes_numbers
from autoparallel.runtime.calls.exchange import CHECKED_CALLS, Exchange
from autoparallel.runtime.calls.words import describe_call, log_change
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.programs.pipeline import PipelineRunner
from autoparallel.runtime.programs.runner import Runner
from autoparallel.runtime.ranks.agreement import Agreement
from autoparallel.text import LOGGER

ReadCall = Callable[[], tuple[Call, str | None]]
"""Reads a call, and why this rank cannot make it, if it cannot."""

MANY_KINDS = (16, 64, 256, 1024)
"""At so many traces of calls that one could serve, but for what the model asks, the user is told."""

MANY_ANSWERS = (
    "calls with inputs alike have %d traces by now, each of them kept with its program: one for each set of answers to "
    "what the model asks of sizes, and of numbers that it draws or changes; ask less in forward (a layerdrop of 0), or "
    "give fewer lengths"
)


@dataclass
class Kind:
    """One kind of call: its runner, what the runner is for, and the trace, where other plans of it may be wanted."""

    runner: Runner | PipelineRunner
    plan: Plan
    trace: Captured | None = None


class KindMaker(Protocol):
    """What makes the program of a new kind of call; every rank alike."""

    model: nn.Module
    agreement: Agreement
    store: GradientStore

    @property
    def loss_fn(self) -> Callable[..., Any] | None: ...
    @property
    def mesh(self) -> DeviceMesh: ...
    @property
    def owners(self) -> Mapping[str, int]: ...
    def make_kind(self, call: Call, trace: Captured | None = None) -> Kind: ...
    def copied(self, model: nn.Module) -> KindMaker: ...


@dataclass(frozen=True)
class Key:
    """What tells kinds of calls apart.

    Attributes:
        call: what can be seen of a call.
        state: which of the states of Python that such calls have met.
        sizes: the inputs' shapes, where the trace or the plan of the others does not serve them.
    """

    call: tuple[object, ...]
    state: int
    sizes: tuple[object, ...] | None = None


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """A call, with those lengths and numbers open of which calls of its form have had several.

    Attributes:
        key: its kind.
        sized: its kind with its sizes.
    """

    call: Call
    key: Key
    sized: object


@dataclass(frozen=True)
class KindSearch:
    """What a search among the kinds that there are has found for a call.

    Attributes:
        call: the call, with its sizes fixed where the model has fixed those of others.
        key: under which its kind is kept.
        kind: the kind; None where it has to be made.
        trace: that of another kind which serves the call, where only the plan of that does not.
        why: why the other kinds of such calls do not serve these sizes.
    """

    call: Call
    key: Key
    kind: Kind | None
    trace: Captured | None = None
    why: str = ""


class Kinds:
    """The kinds of calls that a model has had.

    Args:
        maker: makes the program of a new kind.
        exchange: what the ranks show each other about the model.

    Attributes:
        plan: of the first kind that trains; until there is one, of the first.
        trains: whether it is of one that trains.
        calls: how many calls in training mode the model has had.
        carried: what calls are given beside their inputs.
        set_in_memory: the attributes and buffers that calls set to what lies in the memory of other tensors.
    """

    def __init__(self, maker: KindMaker, exchange: Exchange) -> None:
        self.maker, self.exchange, self.store = maker, exchange, maker.store
        self.plan: Plan | None = None
        self.trains = False
        self.calls = 0
        self.carried = Carried(exchange)
        self.set_in_memory: set[str] = set()
        self._kinds: dict[Key, list[Kind]] = {}  # of calls whose sizes the model is answered about in several ways
        self._ready: dict[object, Kind] = {}  # by kind and shapes: calls whose sizes are known to fit
        self._states: dict[object, list[PythonState]] = {}  # by call: what Python was when each of its traces was made
        self._next: dict[Key, int] = {}  # of a kind: in which of these the call after its first one finds Python
        self._forms: dict[object, list[tuple[int | float, ...]]] = {}  # by form: sizes and numbers of such calls
        self._fixing: set[object] = set()  # forms of calls whose numbers the model fixes
        self._noted: set[str] = set()  # why sizes have kinds of their own, as far as it has been said
        self.store.before_backward = self._agree_on_backward
        self.store.before_reduction = self._agree_on_reduction

    def __iter__(self) -> Iterator[Kind]:
        return iter({id(kind): kind for kinds in self._kinds.values() for kind in kinds}.values())

    def __len__(self) -> int:
        return len(list(iter(self)))

    # -- before a call and before a backward ------------------------------------------------------------------------

    def agree(self, call: Call, problem: str | None) -> KeyedCall:
        """Has all ranks show that they are about to make the same call; where that has been made before and draws
        nothing, its first collective waits for them to have shown it.

        Args:
            problem: why this rank cannot make the call, if it cannot.
        """
        keyed = self.with_key(call)
        whole = self.calls < CHECKED_CALLS or not self._kinds
        synchronise = self.store.synchronise
        require_same = self.exchange.of_call(
            keyed.call, (keyed.key, len(self._kinds), self._answers(keyed), self.carried.given(call)), problem, whole,
            lambda: self._describe(keyed, synchronise),
        )  # fmt: skip
        ready = self._ready_for(keyed)
        at_once = whole or problem or self.store.copies or self.exchange.agreement.broken
        if ready is None or at_once or ready.runner.captured.draws:  # what the first rank draws comes with the table
            require_same()
        else:
            before_next_collective(self.store.prefix, require_same)
        return keyed

    def _answers(self, keyed: KeyedCall) -> tuple[object, ...]:
        """What a model asks of the numbers of a call, by which the ranks choose a trace; the numbers themselves, where
        there is none."""
        numbers = [s.value for s in keyed.call.specs if isinstance(s, NumberSpec)]
        if not numbers:
            return ()
        kinds = [kind.runner.captured for kind in self._kinds.get(keyed.key, ())]
        answers = tuple([numbers_fit(captured, keyed.call.specs) for captured in kinds if captured.assumed])
        chosen = any(answers) or bool(kinds) and not answers
        return answers if chosen else (*answers, *numbers)

    def _agree_on_backward(self) -> None:
        """Has the ranks show each other that they come to a backward, before the first collective of it."""
        if self.exchange.agreement.alone:
            return
        require_same = self.exchange.of_backward()
        if self.store.everyone is None:
            before_next_collective(self.store.prefix, require_same)
        else:  # a pipeline sends over other groups, too
            require_same()

    def _agree_on_reduction(self) -> None:
        """Has the ranks show each other that they come to reduce what microbatches have left; of the stages of a
        pipeline some may have nothing left."""
        if self.store.everyone is None and not self.exchange.agreement.alone:
            self.exchange.of_other("a reduction of what was accumulated")

    def _describe(self, keyed: KeyedCall, synchronise: bool) -> str:
        """A call in words, for comparison with those of other ranks."""
        words = describe_call(keyed.call, self._states.get(keyed.key.call, ()), synchronise)
        return f"{words}; {len(self._kinds)} kinds of calls so far"

    # -- which kind -------------------------------------------------------------------------------------------------

    def with_key(self, call: Call) -> KeyedCall:
        """A call with its kind."""
        key = self._key(call)
        if key not in self._kinds and (form := self._form(call)) in self._forms:
            specs = opened(call.specs, [*self._forms[form], changing_of(call.specs)])
            call = replace(call, specs=without_numbers(specs) if form in self._fixing else specs)
            key = self._key(call)
        return KeyedCall(call, key, (key, call.sizes))

    def _form(self, call: Call) -> object:
        """The inputs of a call but for sizes and numbers: what is open in training is so in evaluation, too."""
        return str(call.in_spec), form_of(without_numbers(call.specs)), call.with_target

    def _key(self, call: Call) -> Key:
        """What a trace depends on, except for the sizes that are open."""
        specs = tuple(
            (s.batch, s.open, s.fixed_shape, s.dtype, s.requires_grad, s.twin, s.is_to_require)
            if isinstance(s, InputSpec)
            else s
            for s in call.specs
        )
        key = (
            call.structure, call.training, call.trainable, str(call.in_spec), repr(specs), call.layouts,
            call.with_target, call.gradients, call.hooks, call.autocast, torch.get_default_dtype(),
            _torch.tensors.function_modes(),
        )  # fmt: skip
        states = self._states.get(key, [])
        leaves = call.values if any(state.inputs for state in states) else ()
        return Key(key, next((i for i, state in enumerate(states) if state.changed(leaves) is None), len(states)))

    def of(self, read: ReadCall) -> tuple[Call, Kind]:
        """A call, which the ranks agree upon, and the kind whose trace has its sizes; it is made where there is none.

        Args:
            read: is called again where the call turns out to change what it reads, and is given that from then on.
        """
        while True:
            call, problem = read()
            with self.without_casts(call):
                keyed = self.agree(call, problem)
                if (kind := self._ready_for(keyed)) is not None:
                    return call, kind
                search = self._search(keyed)
                kind, started = search.kind, time.perf_counter()
                if kind is None and self._is_given_numbers(search):
                    self._note_carried(call, read()[0])
                    continue
                try:
                    if kind is None:
                        # What is made now is used for training, too; what the loop does to saved tensors, or counts (as
                        # FlopCounterMode does), is not for dry runs.
                        with (
                            torch.inference_mode(False),
                            _torch.autograd.saved_as_they_are(),
                            _torch.export.without_modes(),
                        ):
                            kind = self.maker.make_kind(search.call, search.trace)
                        self.carried.require_open(kind.runner.captured, search.call, self._captured_before(search.key))
                        self._add(kind, search, started)
                        self.carried.drop_fixed(kind.runner.captured, search.call)
                except ChangesAttributesError as error:
                    self.carried.add_changed(error)
                except DrawsNumbersError as error:
                    self.carried.draws = add_script(self.carried.draws, error)
                    continue
                except NeedsGradientError as error:
                    self.carried.add_requiring(call, error.place)
                    continue
                except FailsUntraced as error:
                    if error.raised_by_model is None:
                        raise
                    error.raised_by_model.add_note(f"Raised by the model itself, before anything was computed: {error}")
                    raise error.raised_by_model from None
                else:
                    kind.runner.require_fits(search.call)
                    self._ready[keyed.sized] = kind
                    self._note(search.call)
                    # What was on the meta device until the first kind was made has its values now.
                    is_late = self.carried.values and any(
                        isinstance(x, torch.Tensor) and x.is_meta for x in call.leaves
                    )
                    return read()[0] if is_late else call, kind
            self._note_carried(call, read()[0])

    def _is_given_numbers(self, search: KindSearch) -> bool:
        """Whether calls are given more from now on: numbers that the loop has set since the last of this kind."""
        states = self._states.get(search.key.call, []) if search.trace is None else []
        return self.carried.add_set(states, search.call, self.maker.model, self.maker.loss_fn)

    def _captured_before(self, key: Key) -> list[Captured]:
        return [kind.runner.captured for k in {key, replace(key, sizes=None)} for kind in self._kinds.get(k, ())]

    def _search(self, keyed: KeyedCall) -> KindSearch:
        """Looks for the kind of a call among those that there are."""
        call, key = keyed.call, keyed.key
        kinds = self._kinds.get(key, [])
        kind = _first_fitting(kinds, call)
        if kind is not None:
            try:
                kind.runner.require_fits(call)
            except UnevenSizeError as error:
                key = replace(key, sizes=call.sizes)
                planned = next(iter(self._kinds.get(key, [])), None)
                return KindSearch(call, key, planned, kind.trace, str(error).partition(". ")[0])
            return KindSearch(call, key, kind)
        why = kinds[-1].runner.captured.why_fixed if kinds else ""
        if fixing := [kind.runner.captured for kind in kinds if kind.runner.captured.fixes_sizes]:
            call = replace(call, specs=closed(call.specs, batch=bool(fixing[-1].batches)))
            key = replace(key, sizes=call.sizes)
            kind = _first_fitting(self._kinds.get(key, []), call)
        return KindSearch(call, key, kind, why=why)

    def without_casts(self, call: Call) -> AbstractContextManager[object]:
        """Inside, nothing is cast by ``torch.autocast``: a program has its casts already."""
        return nullcontext() if call.autocast is None else torch.autocast(self.maker.mesh.device_type, enabled=False)

    def _ready_for(self, keyed: KeyedCall) -> Kind | None:
        """The kind of a call whose sizes are known to fit, and whose numbers do."""
        ready = self._ready.get(keyed.sized)
        if ready is None or self.carried.values:
            return ready and _first_fitting([ready], keyed.call)
        return ready if numbers_fit(ready.runner.captured, keyed.call.specs) else None

    def _note_carried(self, before: Call, call: Call) -> None:
        """Keeps what calls before have had of sizes, and what this one makes of the attributes that it is given now:
        that they change is known."""
        after = changing_of(describe_attributes(as_argument(self.carried.values)))
        history = self._forms.get(self._form(before), [changing_of(without_numbers(before.specs))])
        history = [(*sizes[: len(changing_of(call.specs)) - len(after)], *after) for sizes in history]
        if all(len(sizes) == len(changing_of(call.specs)) for sizes in history):  # of their first kinds still
            self._forms.setdefault(self._form(call), history)

    def _note(self, call: Call) -> None:
        """Keeps sizes and numbers of a call where they tell what is open, and dims that share a length, from others."""
        specs = without_numbers(call.specs)
        forms, new = self._forms.setdefault(self._form(call), []), changing_of(specs)
        # A size of 0 or 1 opens nothing, so what comes after it must be kept for the one after that.
        grows = any(max(sizes) <= 1 < size for size, *sizes in zip(new, *forms, strict=True) if sizes)
        if not forms or grows or opened(specs, [*forms, new]) != opened(specs, [*forms, forms[-1]]):
            forms.append(new)

    def _add(self, kind: Kind, search: KindSearch, started: float) -> None:
        """Keeps a new kind; says why it was made where only a value of Python's is new, or sizes are.

        Args:
            search: what has not found one.
            started: when its making began.
        """
        seconds = time.perf_counter() - started
        call, key, why = search.call, search.key, search.why
        states = self._states.setdefault(key.call, [])
        changes = [(label, state) for state in states if (label := state.changed(call.values)) is not None]
        if self.plan is None or call.trains and not self.trains:
            self.plan, self.trains = kind.plan, call.trains
        if fixes_numbers(kind.runner.captured, call):
            self._fixing.add(self._form(call))
            key = self._key(replace(call, specs=without_numbers(call.specs)))
            states = self._states.setdefault(key.call, [])
            why = kind.runner.captured.why_fixed
        self.set_in_memory |= kind.runner.captured.set_in_memory
        read = kind.runner.captured.state
        if key.state < len(states):
            states[key.state].merge(read)
        else:
            states.append(read)
            log_change(changes, seconds)
        if why:
            level = logging.INFO if why in self._noted else logging.WARNING
            self._noted.add(why)
            LOGGER.log(
                level, "inputs of shapes %s were %s once more, in %.1f s, and so will others be: %s",
                list(call.sizes), "captured and planned" if search.trace is None else "planned", seconds, why,
            )  # fmt: skip
        kinds = self._kinds.setdefault(key, [])
        kinds.append(kind)
        if len(kinds) in MANY_KINDS:
            LOGGER.warning(MANY_ANSWERS, len(kinds))
        if (of_next := kind.runner.captured.next_state) is not None:
            number = self._next.setdefault(replace(key, sizes=None), len(states))
            states[number:] = states[number:] or [PythonState()]
            states[number].merge(of_next)
            self._kinds.setdefault(replace(key, state=number), []).append(kind)


def _first_fitting(kinds: Sequence[Kind], call: Call) -> Kind | None:
    """Which of some kinds has a trace that serves the sizes of a call."""
    return next((kind for kind in kinds if fits(kind.runner.captured, call.specs)), None)
