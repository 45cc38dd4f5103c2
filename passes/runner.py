"""What a list of passes is, and the one function that runs it.

A pass is a function of one graph module with its options bound, such as
``partial(settle_interleaving, modes=modes, axis_sizes=(2, 2))``: it rewrites the module in place, and returns a frozen
dataclass of what later passes or the caller need to know, or nothing.  What it requires of the graph and what it makes
of it are facts (see :class:`Fact`); a list in which a pass misses one is an error when the list is made.  Checking,
recompiling and timing are no business of a pass: :func:`run_passes` does all of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from torch import fx

T = TypeVar("T")


class Fact(Enum):
    """What may be true of a graph."""

    REPRODUCIBLE = "its random numbers depend on their global positions only"
    CANONICAL = "its operators are those that rules speak of"
    INTERLEAVED = "fused projections are dealt out in as many blocks as any plan could need"
    DIFFERENTIABLE = "meta['differentiable'] says of every node whether its value depends on what is trained"
    OBJECTIVE = "which output is the loss, and what it weighs, is known"
    NAMED = "every node has its module and its key"
    DETACHED = "nothing but what may be differentiated leaves it with a gradient"
    BACKWARD = "meta['backward'] says of every node whether a gradient flows through it"
    GLOBAL = "its tensors are whole"
    SETTLED = "fused projections are dealt out in as many blocks as the plan needs"
    SPECIFIED = "what each of its calls must become on a rank is known"
    PLACED = "its tensors are one rank's, and every one has its layout"
    HOISTED = "parameters enter as they are used"
    BUCKETED = "parameters that are gathered together come out of one call"
    FLAT = "all calls stand in one graph"
    CHUNKED = "losses that go through their rows in chunks are calls of their own"
    REGIONS = "layers that run again in the backward are calls of their own"


CAPTURED = frozenset({Fact.CANONICAL, Fact.DIFFERENTIABLE, Fact.NAMED, Fact.BACKWARD, Fact.GLOBAL, Fact.FLAT})
"""The facts of every captured graph: with them the passes of a capture end and those of a program begin."""


class PassOrderError(ValueError):
    """A list of passes in which one requires what none before it has made."""


class Findings:
    """What passes have found, one frozen dataclass of each kind."""

    def __init__(self) -> None:
        self._by_kind: dict[type[Any], Any] = {}

    def __getitem__(self, kind: type[T]) -> T:
        return cast(T, self._by_kind[kind])

    def get(self, kind: type[T]) -> T | None:
        """What was found of a kind; None where no pass has found any."""
        return cast("T | None", self._by_kind.get(kind))

    def add(self, finding: object) -> None:
        """Adds what a pass has found; of one kind only the latest is kept."""
        self._by_kind[type(finding)] = finding


@dataclass(frozen=True)
class Pass:
    """One rewrite of a graph.

    Attributes:
        rewrite: the function, which rewrites a module in place; its options are bound.
        requires: the facts that must be true before.
        provides, removes: the facts that it makes true, and those that are not true any more.
        verify: raises where what it has made is wrong; is given what has been found, too.
        reads: the arguments that are what earlier passes have found.
    """

    rewrite: Callable[..., object]
    requires: Collection[Fact] = ()
    provides: Collection[Fact] = ()
    removes: Collection[Fact] = ()
    verify: Callable[[fx.GraphModule, Findings], object] = lambda module, findings: None
    reads: Callable[[Findings], Mapping[str, object]] = lambda findings: {}

    @property
    def name(self) -> str:
        """The function's."""
        return str(getattr(self.rewrite, "func", self.rewrite).__name__)


def on_graph(rewrite: Callable[..., T]) -> Callable[..., T]:
    """A rewrite of a graph as one of its module."""

    @functools.wraps(rewrite)
    def run(module: fx.GraphModule, *args: Any, **options: Any) -> T:
        return rewrite(module.graph, *args, **options)

    return run


@dataclass(frozen=True)
class PassList:
    """Passes in their order.

    Attributes:
        passes: the passes.
        premises: the facts that are true of a graph before the first of them.
        promised: the facts that must be true after the last of them.

    Raises:
        PassOrderError: when a pass requires a fact that is not true where it stands.
    """

    passes: Sequence[Pass]
    premises: Collection[Fact] = ()
    promised: Collection[Fact] = ()

    def __post_init__(self) -> None:
        facts = {*self.premises}
        for i, each in enumerate(self.passes):
            self._require(each.name, each.requires, facts, self.passes[:i])
            facts = facts.union(each.provides).difference(each.removes)
        self._require("what comes after the list", self.promised, facts, self.passes)

    def _require(self, name: str, required: Collection[Fact], facts: Collection[Fact], before: Sequence[Pass]) -> None:
        missing = [fact for fact in Fact if fact in required and fact not in facts]
        if missing:
            providers = [p.name for p in self.passes if missing[0] in p.provides]
            removers = [p.name for p in before if missing[0] in p.removes]
            cure = f"put it after {providers[0]}" if providers else "no pass of the list makes it so"
            if removers:
                cure = f"put it before {removers[0]}"
            raise PassOrderError(
                f"{name} requires {missing[0].name} ({missing[0].value}), which is not true where it stands: {cure}"
            )


Watch = Callable[[str, float, fx.GraphModule], None]
"""Is told of a pass that has run: its name, its seconds, and the module that it has made."""


def ignore(name: str, seconds: float, module: fx.GraphModule) -> None:
    """Watches nothing."""


def run_passes(
    passes: PassList,
    module: fx.GraphModule,
    watch: Watch = ignore,
    *,
    checked: bool = True,
) -> Findings:
    """Runs all passes of a list on a module, in place, and returns what they have found.

    The graph, with those that it calls, is checked after each pass, what the pass has made is verified as it says, and
    all is compiled once, after the last.

    Args:
        watch: is told of each pass.
        checked: whether all that is done; not for a program that is predicted to compare plans, and then forgotten.
    """
    findings = Findings()
    for each in passes.passes:
        begin = time.perf_counter()
        finding = each.rewrite(module, **each.reads(findings))
        seconds = time.perf_counter() - begin
        if finding is not None:
            findings.add(finding)
        if checked:
            for graph in _graphs(module):
                graph.graph.lint()
            each.verify(module, findings)
        watch(each.name, seconds, module)
    for graph in _graphs(module) if checked else ():
        graph.recompile()
    return findings


def _graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    """A module's graph, after those that it calls."""
    return [each for each in reversed(list(module.modules())) if isinstance(each, fx.GraphModule)]
