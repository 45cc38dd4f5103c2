"""Records what a traced copy of a model reads and writes of Python state.

Every object of the copy gets a class, derived from the one it has, whose attribute access is recorded (see
``observed_classes``).  What is read before it is written belongs to the kind of call (see ``graph.python_state``); what
is written leaves the program as an output; what is read and then written has another value at the next call, and is
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import nn

from autoparallel.capture.python.bound_buffers import BoundBuffers
from autoparallel.capture.python.changes import (
    IN_THE_MODEL,
    StateChangedError,
    Written,
    advice_on,
    is_first_value,
    refused_past_the_model,
    refused_trained,
    require_may_leave,
)
from autoparallel.capture.python.class_state import ClassState
from autoparallel.capture.python.containers import is_remade, objects_in
from autoparallel.capture.python.copied_objects import copied_containers, copied_objects
from autoparallel.capture.python.given_entries import changes_of_remade
from autoparallel.capture.python.held_containers import HeldContainers
from autoparallel.capture.python.journals import Journal
from autoparallel.capture.python.observed_classes import attributes_among_buffers, observe, release, written_to
from autoparallel.capture.python.reads import note_names, note_read, note_shared
from autoparallel.capture.python.shared_parts import SharedParts, refused_use
from autoparallel.capture.python.watched import (
    INTERNAL,
    TABLES,
    AllAttributes,
    Watched,
    WatchedVariables,
    is_bookkeeping,
)
from autoparallel.graph.carried_attributes import ChangesAttributesError, may_be_carried
from autoparallel.graph.changed_arguments import ENTRIES
from autoparallel.graph.errors import CaptureError, refusal, refused_draw
from autoparallel.graph.generators import GENERATORS
from autoparallel.graph.labels import is_entry, label_of_entry, split_entry
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.plain_tensors import LOSS, TrainedAttribute, holder_of
from autoparallel.graph.python_state import MISSING, PythonState, is_same, shown


class Recorder:
    """The reads and writes of one traced copy of a model.

    Args:
        model, copied: the user's model and the copy, of which every object is watched from now on.
        memo: that of ``copy.deepcopy``.
        trained: attributes that hold tensors which are trained, but are not registered, and where those are.
        loss: the user's loss function and its copy, where it is a module.
        constants: the copy's tensors that are no attributes of modules, by where they are.
        around: what variables around the model hold while the copy runs.
        shared: what cannot be copied, and is in both.
        journals: the labels of lists and dicts to which a call only adds (see ``journals``).
        read: the labels of those that it reads and changes (see ``given_entries``).

    Attributes:
        containers: the lists, dicts, sets and others that the copy holds.
        classes: what the classes of its objects hold.
        written: the attributes that the last run has set, by label.
        buffers: what it has bound to buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        copied: nn.Module,
        memo: dict[int, Any],
        trained: Mapping[str, TrainedAttribute],
        loss: tuple[nn.Module, nn.Module] | None,
        constants: Mapping[str, torch.Tensor],
        around: WatchedVariables,
        shared: SharedParts,
        journals: Collection[str] = (),
        read: Collection[str] = (),
    ) -> None:
        self._model, self._loss, self._memo = model, None if loss is None else loss[0], memo
        self._trained = trained
        self._refusal: CaptureError | None = None
        self._constants = constants
        self._versions: dict[str, int] = {}
        self._carried: dict[str, tuple[torch.Tensor, int]] = {}  # tensors for attributes, with their versions
        self.buffers = BoundBuffers()
        self.written: dict[str, Written] = {}
        self._set: dict[Hashable, str] = {}
        self._past: dict[str, tuple[Any, str]] = {}  # lists and dicts that are read past the model, and where
        self.classes = ClassState()
        self._changes: dict[str, tuple[Any, str, CaptureError]] = {}
        self._results: dict[str, tuple[torch.Tensor, str]] = {}  # with a gradient, and the line that reads it
        self._around, self._shared = around, shared
        self._recording = False
        objects = copied_objects({"": (model, copied), **({LOSS: loss} if loss else {})}, around, memo)
        self._watched = {id(vars(watched.copy)): watched for watched in objects}
        for watched in objects:
            if watched is not around:
                self._watch(watched)
        held = copied_containers(objects, memo)
        self.containers = HeldContainers(held, filter(self._is_reached, objects), journals, read)

    def _watch(self, watched: Watched) -> None:
        original = watched.original
        try:
            observe(watched.copy, self)
        except TypeError:  # all that it has counts as read
            watched.reads.update(n for n in vars(original) if n not in INTERNAL)
            for name in filter(lambda n: self._shared.is_unusable(vars(original)[n]), watched.reads):
                self._refusal = refused_use(watched.label(name), vars(original)[name], "an unknown line")
            watched.all_read = not isinstance(original, nn.Module)

    def __enter__(self) -> Recorder:
        for watched in self._watched.values():
            watched.begin()
        self.classes.begin()
        self.buffers.begin()
        self.containers.begin()
        self.written.clear()
        self._versions = {name: fake._version for name, fake in self._constants.items()}
        self._around.enter()
        self._recording = True
        return self

    def __exit__(self, *_: object) -> None:
        self._recording = False
        self._around.leave()
        self.classes.end()

    @contextmanager
    def carrying(self, attributes: Mapping[str, Any]) -> Iterator[None]:
        """Inside, the copy has the attributes that a call is given, by label."""
        holders = {watched.path: watched for watched in self._watched.values()} if attributes else {}
        entries = {label: value for label, value in attributes.items() if is_entry(label)}
        self._carried = {label: (x, x._version) for label, x in attributes.items() if isinstance(x, torch.Tensor)}
        try:
            for label, value in attributes.items():
                path, _, name = label.rpartition(".")
                if label not in entries and path in holders:  # a call without a target has no loss function
                    holders[path].carry(name, value)
            with self.containers.giving(entries):
                yield
        finally:
            for watched in holders.values():
                watched.put_back()

    def fill(self, values: Iterable[Written]) -> None:
        """Sets in the copy what a call has set."""
        places = {(id(value.table), value.name): value.value for value in values}
        for watched in self._watched.values():
            table = id(vars(watched.original))
            vars(watched.copy).update({name: value for (place, name), value in places.items() if place == table})

    def close(self) -> None:
        """Forgets the copy."""
        for watched in self._watched.values():
            release(watched.copy)

    # -- while the copy runs ----------------------------------------------------------------------------------------

    def read(self, table: dict[str, Any], name: str) -> None:
        """Notes that an attribute of the object with this ``__dict__`` is read."""
        if self._recording and name not in INTERNAL:
            watched = self._watched[id(table)]
            if name not in watched.writes and name not in watched.reads and name not in watched.carried:
                watched.reads.add(name)
                self._look_at(watched, name)
                if name not in table:
                    self.classes.look_at(type(watched.original), name)

    def read_all(self, table: dict[str, Any]) -> Mapping[str, Any]:
        """Notes that the ``__dict__`` of an object is asked for, and thereby all that is in it or is not."""
        tensors = attributes_among_buffers(table)
        if self._recording:
            self._watched[id(table)].all_read = True
            for name in (*table, *tensors):
                self.read(table, name)
        return AllAttributes(table, tensors) if tensors else table

    def read_class(self, cls: type, name: str) -> None:
        """Notes that an attribute of an object's class is read, of the class itself."""
        if self._recording and name not in INTERNAL:
            self.classes.read(cls.__mro__[1], name)  # the class that ours is derived from

    def read_all_of_class(self, cls: type) -> None:
        """Notes that code is given an object's class."""
        if self._recording:
            self.classes.read_all(cls.__mro__[1])

    def _look_at(self, watched: Watched, name: str) -> None:
        """Refuses what is read for the first time and cannot be in a program; later, not in the middle of a call."""
        label, value = watched.label(name), vars(watched.original).get(name)
        if self._refusal:
            return
        if label in self._trained and not self.containers.leads_to_journal(watched, name):
            line, results = line_of_frame(sys._getframe(3)), self._trained[label].results
            if results and self._is_reached(watched):  # of an earlier call: it is given to this one
                entries, _ = self.containers.read_of(watched, name)
                self._results |= {place: (x, line) for place, x in results.items() if place not in entries}
            else:
                self._refusal = refused_trained(self._trained[label].place, line)
        elif isinstance(getattr(value, "__self__", None), GENERATORS):
            self._refusal = refused_draw(
                f"{label}, a method of a {type(value.__self__).__name__},", line_of_frame(sys._getframe(3))
            )
        elif isinstance(value, BuiltinMethodType):  # of a list, such as its append()
            self._past[label] = value.__self__, line_of_frame(sys._getframe(3))
        elif self._shared.is_unusable(value):
            self._refusal = refused_use(label, value, line_of_frame(sys._getframe(3)))
        elif isinstance(value, WeakSet | WeakKeyDictionary | WeakValueDictionary):
            self._refusal = refusal(
                f"{label}, a {type(value).__name__}, is of objects of which what is traced has copies; it is read",
                line_of_frame(sys._getframe(3)),
                "keep the objects in a list or a dict.",
            )
        elif isinstance(value, Iterator):
            self._refusal = refusal(
                f"{label}, a {type(value).__name__}, has another value at every call; it is read",
                line_of_frame(sys._getframe(3)),
                "take the value outside of the model and pass it in",
            )

    def write(self, table: dict[str, Any], name: str) -> None:
        """Notes that an attribute is written."""
        frame = sys._getframe(2)
        if not self._recording:
            return
        watched = self._watched[id(table)]
        if name[0] == "_" and is_bookkeeping(frame.f_globals.get("__name__")):
            watched.ignored.add(name)
        elif not isinstance(getattr(type(watched.original), name, None), property):  # whose setter writes another one
            watched.writes[name] = line_of_frame(frame)

    def now(self) -> dict[str, Any]:
        """What the run has set until now, by label."""
        changed = [(watched, name) for watched in self._watched.values() for name in watched.changed()]
        of_objects = {watched.label(name): watched.now(name) for watched, name in changed}
        return of_objects | self.containers.now() | self.classes.now()

    def is_attribute(self, table: dict[str, Any], name: str) -> bool:
        """Whether a buffer of the copy is a plain attribute of the user's, a tensor."""
        original = self._watched[id(table)].original
        return isinstance(original, nn.Module) and name in vars(original)

    # -- when it has run --------------------------------------------------------------------------------------------

    def take(self, in_order: bool = True) -> dict[str, Any]:
        """The attributes that the run has written, by label, with their values; what they were is put back.

        Args:
            in_order: whether new ones stand in the order in which they were set, not in that of their labels, which is
                the same on all ways that the call may go.

        Raises:
            CaptureError: where the run has changed what it reads, or what no program can carry.
        """
        self._recording = False
        if self._refusal:
            raise self.containers.growing() or self._refusal
        if generator := self.classes.drawn_from():
            raise StateChangedError(
                partial(refused_draw, generator), lambda recorder, _: bool(recorder.classes.drawn_from())
            )
        for change in _UNCARRIED:
            change.require_none(self)
        for watched in list(self._watched.values()):
            for name, line in watched.changed().items():
                if line:
                    self._take(watched, name, line)
                else:
                    self._take_unseen(watched, name)
        for place, (value, line) in self._results.items():
            self._changes[place] = value, line, refused_trained(place, line)
        entries = self.containers.taken(self.written)
        written = {label: x.value for label, x in self.written.items()} | entries
        for label, (now, refused) in self.containers.changes.items():
            self._changes[label] = now, "an unknown line", refused
        if self._changes:
            (_, _, refused), *_ = self._changes.values()
            changes = {label: (now, line) for label, (now, line, _) in self._changes.items()}
            error = ChangesAttributesError(str(refused), changes)
            error.unseen = {label: refused for label, (_, refused) in self.containers.changes.items()}
            raise error
        for watched in self._watched.values():
            watched.writes.clear()
        if not in_order:
            return dict(sorted(written.items(), reverse=True))
        back_to_front = dict(reversed(written.items()))
        return dict(sorted(back_to_front.items(), key=lambda entry: self._place_of(entry[0])))

    def _place_of(self, label: str) -> tuple[str, bool, str]:
        """Where something is set: new attributes of one object, and entries of one dict, stay in the order in which the
        call has set them, but back to front, as ``describe`` reads what stands behind the outputs."""
        if is_entry(label) and not label.endswith(ENTRIES):
            return split_entry(label)[0], False, ""
        path, _, name = label.rpartition(".")
        is_new = label in self.written and name not in self.written[label].table
        return path, is_new, "" if is_new else name

    def changed_class(self) -> str:
        """An attribute of a class that the run has set, which the class made for recording has got; empty for none."""
        classes = {type(watched.copy) for watched in self._watched.values()}
        names = (f"{cls.__name__}.{name}" for cls in classes for name in written_to(cls))
        return next(names, "") or self.classes.changed_attribute()

    def changed_constant(self, of_loss: bool = False) -> str:
        """A tensor in a list, dict or object that the run has changed in place; empty for none.

        Args:
            of_loss: whether only what the loss function holds counts.
        """
        changed = (name for name, fake in self._constants.items() if fake._version != self._versions[name])
        return next((name for name in changed if not of_loss or name.partition(".")[0] == LOSS), "")

    def changed_carried(self) -> str:
        """A tensor that the copy was given in the place of an attribute, and that the run has changed in place."""
        return next((label for label, (x, version) in self._carried.items() if x._version != version), "")

    def _take(self, watched: Watched, name: str, line: str) -> None:
        table, label = vars(watched.copy), watched.label(name)
        if name in watched.carried:
            self._take_carried(watched, name, line)
            return
        of_class = MISSING if watched.caches(name) else getattr(type(watched.original), name, MISSING)
        before = vars(watched.original).get(name, of_class)
        if isinstance(watched.copy, nn.Module):
            if name in table and name in table["_buffers"]:  # a plain attribute is a buffer of the copy
                table["_buffers"][name] = table.pop(name)
            for tensors in TABLES:
                if name in table[tensors] or name in watched.tables[tensors]:
                    self._take_registered(watched, tensors, name, line)
                    return
        now = table.get(name, MISSING)
        if isinstance(now, Journal):  # self.log += [x]
            return
        if is_remade(self._twin(before), now):
            watched.reads |= {name} - INTERNAL  # a call of another kind may set something else
            self._put_back(watched, name, before)
            return
        if now is MISSING:
            raise refusal(f"a call deletes {label}", line, "do so outside of forward")
        entries = changes_of_remade(watched.entries.get(name), now, self.containers.given_in(label))
        if name in watched.reads and not is_first_value(before, now) and entries != {}:
            what = f"a call changes what it reads: {label} is {shown(before)} before it and {shown(now)} after it,"
            changes = refusal(what, line, advice_on(before, now))
            if entries and self._is_reached(watched):
                self._changes |= {label_of_entry(label, key): (x, line, changes) for key, x in entries.items()}
            else:
                self._note_change(watched, name, line, before, now, changes)
            self._put_back(watched, name, before)
            return
        if not self._is_reached(watched):
            raise refusal(
                f"a call sets {label}, an attribute of a {type(watched.original).__name__},",
                line,
                "return the value, or keep it in an attribute of the module",
            )
        self._note_written(watched, Written(vars(watched.original), name, now, name in watched.reads, line))
        self._put_back(watched, name, before)

    def _note_written(self, watched: Watched, written: Written) -> None:
        """Notes what leaves the program in an attribute."""
        label = watched.label(written.name)
        require_may_leave(written.value, label, written.line)
        self.written[label] = written
        self._set[id(watched.original), written.name] = label

    def _take_registered(self, watched: Watched, kind: str, name: str, line: str) -> None:
        before, now = watched.tables[kind].get(name), vars(watched.copy)[kind].get(name)
        result = self.buffers.take(watched, kind, name, line)
        if isinstance(result, CaptureError):
            self._note_change(watched, name, line, before, now, result)
        elif result is not None:
            self.written[watched.label(name)] = result

    def _put_back(self, watched: Watched, name: str, before: Any) -> None:
        """Puts back what an attribute of the copy was."""
        if name in vars(watched.original):
            vars(watched.copy)[name] = self._twin(before)
        else:
            vars(watched.copy).pop(name, None)  # the call may have deleted it itself

    def _note_change(
        self, watched: Watched, name: str, line: str, before: Any, now: Any, refused: CaptureError
    ) -> None:
        """Notes that a call changes what it reads; raises where that cannot be given to it (see
        ``graph.carried_attributes``)."""
        if not self._is_reached(watched) or not (may_be_carried(before) and may_be_carried(now)):
            raise refused
        self._changes[watched.label(name)] = now, line, refused

    def _take_carried(self, watched: Watched, name: str, line: str) -> None:
        """What a call makes of an attribute that it was given."""
        now = watched.now(name)
        if is_same(watched.carried[name], now):
            return
        if now is MISSING:
            raise refusal(f"a call deletes {watched.label(name)}", line, "do so outside of forward")
        self._note_written(watched, Written(vars(watched.original), name, now, fills=False, line=line))

    def _take_unseen(self, watched: Watched, name: str) -> None:
        """The same for what was written unseen: its line is looked for where it is refused."""
        label = watched.label(name)

        def refused_at(line: str) -> CaptureError:
            try:
                self._take(watched, name, line)
            except CaptureError as error:
                return error
            raise AssertionError(f"{label} is not refused")

        try:
            self._take(watched, name, "an unknown line")
        except CaptureError:
            raise StateChangedError(refused_at, lambda recorder, _: recorder.has_changed(label)) from None

    def has_changed(self, label: str) -> bool:
        """Whether the run has changed an attribute, by now."""
        return any(label == w.label(name) for w in self._watched.values() for name in w.changed())

    def _is_reached(self, watched: Watched) -> bool:
        """Whether an object is a module, or an attribute of one."""
        try:
            return holder_of(self._model, watched.path, self._loss) is watched.original
        except (AttributeError, LookupError):
            return False

    def _twin(self, value: Any) -> Any:
        """What the copy was made with in the place of a value of the original's."""
        return self._memo.get(id(value), value)

    def changed(self) -> dict[Hashable, str]:
        """The labels of what the runs have changed of the model's: of lists and dicts by their ids, of attributes by
        the object's id and the name. Raises CaptureError for a list or dict that they have read past the model, too."""
        changed = self._set | self.containers.originals
        for place, (held, line) in {**self._past, **self.classes.containers_read}.items():
            if label := next((changed[id(x)] for x in objects_in(held) if id(x) in changed), ""):
                raise refused_past_the_model(label, place, line)
        return changed

    def state(self) -> PythonState:
        """What was read."""
        state = PythonState()
        for watched in self._watched.values():
            for name in sorted(watched.reads - watched.carried_names):
                note_read(state, watched, name, *self.containers.read_of(watched, name))
            if watched.all_read:
                note_names(state, watched)
        for places in self.containers.shared():
            note_shared(state, places)
        self.classes.add_to(state)
        return state


class _Change(NamedTuple):
    """Something that a run may change: what tells its label, or an empty one, and the refusal."""

    label: Callable[[Recorder], str]
    what: str
    cure: str

    def require_none(self, recorder: Recorder) -> None:
        if label := self.label(recorder):
            what, cure = self.what.format(label), self.cure.format(label.rpartition(".")[2])
            raise StateChangedError.refusing(what, cure, lambda recorder, _: bool(self.label(recorder)))


_UNCARRIED = (
    _Change(
        Recorder.changed_class,
        "a call changes an attribute of a class, {},",
        "keep it in a registered buffer, or set it outside of forward",
    ),
    _Change(
        lambda recorder: recorder.classes.changed_container(),
        "a call changes {}, which all objects of the class share,",
        "return what is collected as an output, or keep it in a registered buffer of the module",
    ),
    _Change(
        lambda recorder: recorder.changed_constant(of_loss=True),
        "a call changes the tensor {} in place,",
        IN_THE_MODEL,
    ),
    _Change(
        Recorder.changed_constant,
        "a call changes the tensor {} in place,",
        "register it as a buffer (self.register_buffer), or replace it each time (x = x + ...)",
    ),
    _Change(
        Recorder.changed_carried,
        "a call changes {} in place, a tensor that calls replace,",
        "replace it each time (self.{} = ...)",
    ),
)
"""What a run may change that no program carries."""
