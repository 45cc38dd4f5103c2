"""The places that Python functions load from while a model runs, as they were before it: see ``globals_read``."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from autoparallel.capture.python.changes import StateChangedError, VariablesChangedError, refused_past_the_model
from autoparallel.capture.python.containers import leaves_of, objects_in
from autoparallel.capture.python.modules_apart import refused_change
from autoparallel.capture.python.roots import Finder, Root, find_nothing
from autoparallel.capture.python.shared_parts import is_unusable, refused_use
from autoparallel.graph.errors import CaptureError, refusal, refused_draw
from autoparallel.graph.generators import GENERATORS
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import Attributes, PythonState, is_installed, is_plain, kind_of_number, shown
from autoparallel.graph.surroundings import Surroundings
from autoparallel.graph.variables import Global, Variable, is_left

_CACHE = type(cache(len))


class PlacesRead:
    """The places that have been read, and what cannot be read there.

    Args:
        surroundings: the variables around the model that are looked after.
        attached: the functions that have been attached to it: what they have is the user's, whoever wrote them.
    """

    def __init__(self, surroundings: Surroundings, attached: Sequence[types.FunctionType]) -> None:
        self._surroundings, self._attached = surroundings, {function.__code__ for function in attached}
        self._roots: dict[Hashable, Root] = {}
        self._links: dict[Hashable, tuple[str, Callable[[], Any], Variable | None]] = {}
        self._caches: list[Any] = []
        self._problems: list[tuple[str, Variable | None]] = []
        self._registries: set[Hashable] = set()  # an installed package's lists and dicts: a call may add to them

    def __contains__(self, key: Hashable) -> bool:
        return key in self._roots

    # -- while functions run ----------------------------------------------------------------------------------------

    def is_users(self, code: types.CodeType) -> bool:
        """Whether what a function has may be the user's, and no registry of an installed package."""
        return not is_installed(code.co_filename) or code in self._attached

    def add_variable(self, variable: Variable, label: str, frame: types.FrameType) -> None:
        """A place that is a variable."""
        key, find = (id(variable.owner), variable.name), partial(find_alone, variable)
        self.add(key, label, variable.read, frame, variable.write, find, variable)

    def add(
        self,
        key: Hashable,
        label: str,
        read: Callable[[], Any],
        frame: types.FrameType,
        write: Callable[[Any], None] | None = None,
        find: Finder = find_nothing,
        variable: Variable | None = None,
    ) -> None:
        """A place that a function loads from.

        Args:
            key: tells it from others.
            frame: the function.
            write: puts back what was there.
            find: finds the variables that it is reached by.
            variable: where it is one itself.
        """
        if key in self._roots:
            return
        value = read()
        if isinstance(value, _CACHE):
            self._caches.append(value)
            return
        is_users = self.is_users(frame.f_code)
        if isinstance(value, types.ModuleType) or not (is_users or may_be_state(value)):
            return
        self.require_usable(label, value, frame, variable)
        if isinstance(value, Iterator):
            self.refuse(
                f"the model reads {label}, a {type(value).__name__} that has another value at every call, in "
                f"{line_of_frame(frame)}\nWhat to change: take the value outside of the model and pass it in.",
                variable,
            )
            return
        self._roots[key] = Root(key, label, read, line_of_frame(frame), write, find, variable)
        if not (is_users or is_plain(value)):
            self._registries.add(key)

    def add_link(self, key: Hashable, label: str, read: Callable[[], Any], variable: Variable | None = None) -> None:
        """A place from which more is read, whose object may be replaced by another."""
        if not isinstance(read(), types.ModuleType):
            self._links.setdefault(key, (label, read, variable))

    def refuse(self, problem: str, variable: Variable | None = None) -> None:
        """Keeps a problem for when the model's call is over: it is none where the call has made the variable."""
        self._problems.append((problem, variable))

    def require_usable(self, label: str, value: Any, frame: types.FrameType, variable: Variable | None = None) -> None:
        """Refuses to use what no copy can be made of."""
        if is_unusable(value) and self.is_users(frame.f_code):
            self.refuse(str(refused_use(label, value, line_of_frame(frame))), variable)

    def now(self) -> dict[str, Any]:
        """What the run has changed until now, by any name."""
        changed = (x for x in self._roots.values() if not is_left(x.variable) and x.changed())
        return {f"{i}: {root.label}": root.read() for i, root in enumerate(changed)}

    @property
    def kept(self) -> int:
        """How much the caches of functions have been given and hold by now: it changes where one is used anew."""
        infos = [cached.cache_info() for cached in self._caches]
        return sum(info.misses + info.currsize for info in infos)

    # -- when they have run -----------------------------------------------------------------------------------------

    def put_back(self) -> list[Root]:
        """Puts back what was there; what has changed.  Cells that nobody has any more are places no longer."""
        self._links = {k: link for k, link in self._links.items() if k not in self._roots and not is_left(link[2])}
        registries = {key for key in self._registries & self._roots.keys() if self._roots[key].changed()}
        roots = {key: root for key, root in self._roots.items() if key not in registries}
        self._roots = {key: root for key, root in roots.items() if not is_left(root.variable)}
        changed = [root for root in self._roots.values() if root.changed()]
        for root in changed:
            root.now = shown(root.read())
        for root in reversed(changed):  # what two places have was first looked at before the run changed it
            root.restore()
        return changed

    def require_unchanged(self, changed: list[Root]) -> None:
        """Raises where something has changed, or a place was read that cannot be."""
        if changed:
            key, at = changed[0].key, _explain_change(changed[0])
            refused = StateChangedError(at, lambda _, reads: reads.places.has_changed(key))
            variables = [root.find() for root in changed]
            if all(variables):
                raise VariablesChangedError(refused, [x for several in variables for x in several])
            raise refused
        for problem, variable in self._problems:
            if not is_left(variable):
                raise CaptureError(problem)

    def forget_cached(self) -> None:
        """Empties the caches of functions that the run has called: they hold its tensors."""
        for cached in self._caches:
            cached.cache_clear()

    def has_changed(self, key: Hashable) -> bool:
        """Whether a global or cell is not what it was before."""
        return key in self._roots and self._roots[key].changed()

    def require_others(self, changed: Mapping[Hashable, str]) -> None:
        """Refuses to read past the model what a call changes in it: a copy changes its own.

        Args:
            changed: the labels of what it changes, by the id of a list or dict, or of an object and a name.
        """
        for root in self._roots.values() if changed else ():
            places = (root.key, *map(id, objects_in(root.value)))
            if label := next((changed[place] for place in places if place in changed), ""):
                raise refused_past_the_model(label, root.label, root.line)

    def state(self) -> PythonState:
        """What was read."""
        state = PythonState()
        for root in self._roots.values():
            if isinstance(root.variable, Global):
                label = state.add(root.label, root.variable.owner, root.label, deep=True)
            else:
                label = state.watch(root.label, root.read, root.key, deep=True)
            if kind_of_number(type(root.value)) or isinstance(root.value, list | dict):
                state.around[label] = partial(root.look_after, self._surroundings)
        for key, (label, read, _) in self._links.items():
            state.watch(label, read, ("link", key))
        return state


def may_be_state(value: Any) -> bool:
    """Whether what an installed package has may be settings, which somebody changes between calls: a number and the
    like, or a few of them. Its registries, of functions, classes and much else, are no model's state."""
    if is_plain(value):
        return True
    return isinstance(value, list | dict) and len(value) <= _MOST_SETTINGS and all(map(is_plain, leaves_of(value)))


_MOST_SETTINGS = 16


def find_alone(variable: Variable) -> list[Variable]:
    """The variables by which what one has is reached: that one."""
    return [variable]


def _explain_change(root: Root) -> Callable[[str], CaptureError]:
    if isinstance(root.value, GENERATORS):
        return partial(refused_draw, root.label)
    if isinstance(root.value, Attributes):
        return partial(refused_change, root.label)
    before = shown(root.value)
    return lambda line: refusal(
        f"a call changes what it reads: {root.label} is {before} before it and {root.now} after it,",
        line,
        "return what changes as an output, keep it in a registered buffer, or change it outside of the model",
    )
