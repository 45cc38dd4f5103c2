"""A plan that fits into the memory there is: by other layouts, or by running layers again in the backward.

[Note: what fits] The prediction says what fits.  The search adds up what is kept, simply: where less is predicted, the
search may take more than the limit, and where its plan is predicted to be over the limit, it must leave that much room.

[Note: what is recomputed] Whole layers are, the first ones: what they save lives longest.  Layouts are searched with
every layer recomputed; then as few are as the prediction says must be, and layouts are searched again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autoparallel.decisions.parameters import PlanError
from autoparallel.plan import Plan
from autoparallel.predict.forecast import Forecast

TRIES = 7
"""How often a search is told to leave more room, or less."""

CORRECTIONS = 3
"""How often a plan is looked for again because a short model told too little."""


class Search(Protocol):
    """Finds the best plan within a limit, with some layers recomputed; ``room`` is left of the limit."""

    def __call__(self, limit: float | None, recompute: Sequence[str] = (), room: float = 0.0) -> Plan: ...


Predict = Callable[[Plan], Forecast]
"""Predicts what a plan takes."""


def fit(
    search: Search, roughly: Predict, exactly: Predict, limit: float, layers: Sequence[str]
) -> tuple[Plan, Forecast]:
    """The plan that is predicted to be fastest of those that fit, and what it takes.

    Args:
        search: the planner's.
        roughly, exactly: predict from short models and from whole ones; only what fits exactly is returned.
        limit: bytes per device.
        layers: those that can be recomputed.

    Raises:
        PlanError: when nothing fits.
    """
    fitting = Fitting(search, roughly, limit, layers)
    for _ in range(CORRECTIONS):
        try:
            plan, found = fitting.choose()
        except PlanError:
            # Without a correction: the maximum of what grows with the layers is convex, the whole needs more, not less.
            if not fitting.correction:
                raise
            break
        whole = found if found.whole else exactly(plan)
        if whole.memory <= limit:
            return plan, whole
        fitting.correction = max(fitting.correction, whole.memory - found.memory)
    return replace(fitting, predict=exactly, correction=0.0, _known={}).choose()


@dataclass
class Fitting:
    """Finds the plan that is predicted to be fastest of those that fit.

    Attributes:
        search, predict, limit, layers: as ``fit`` takes them.
        correction: bytes by which short models tell too little.
    """

    search: Search
    predict: Predict
    limit: float
    layers: Sequence[str]
    correction: float = 0.0
    _searched: dict[Hashable, Plan | PlanError] = field(default_factory=dict)
    _known: dict[Hashable, tuple[Plan, Forecast]] = field(default_factory=dict)

    def choose(self) -> tuple[Plan, Forecast]:
        """The plan, and what it takes.

        Raises:
            PlanError: when nothing fits.
        """
        free = self._search(None)
        if self._memory(free) <= self.limit:
            return free, self._predicted(free)
        found: list[Plan] = []
        problems: list[str] = []
        try:
            found.append(self._fit(min(0.0, self._difference(free))))
        except PlanError as error:
            problems.append(str(error))
        if self.layers:
            try:
                found.append(self._recompute_few(self._fit(0.0, self.layers)))
            except PlanError as error:
                problems.append(f"with every layer recomputed in the backward, {error}")
        if not found:
            raise PlanError("; ".join(problems))
        best = min(found, key=lambda plan: self._predicted(plan).seconds)
        return replace(best, lower_bound=free.lower_bound), self._predicted(best)

    def _search(self, limit: float | None, recompute: Sequence[str] = (), room: float = 0.0) -> Plan:
        """What is looked for again is found again."""
        key = limit, tuple(recompute), room
        if key not in self._searched:
            try:
                self._searched[key] = self.search(limit, recompute, room)
            except PlanError as error:
                self._searched[key] = error
        found = self._searched[key]
        if isinstance(found, PlanError):
            raise found
        return found

    def _predicted(self, plan: Plan) -> Forecast:
        key = id(plan.operators), plan.recompute  # plans that differ in what they recompute share their operators
        if key not in self._known:
            self._known[key] = plan, self.predict(plan)
        return self._known[key][1]

    def _memory(self, plan: Plan) -> float:
        found = self._predicted(plan)
        return found.memory + (0.0 if found.whole else self.correction)

    def _difference(self, plan: Plan) -> float:
        """By how much more is predicted than the search has added up."""
        assert plan.estimate is not None
        return self._memory(plan) - plan.estimate.memory

    def _fit(self, room: float, recompute: Sequence[str] = ()) -> Plan:
        """The best plan that is predicted to fit, with these layers recomputed (see [Note: what fits]).

        Raises:
            PlanError: where none was found.
        """
        least, over, infeasible = math.inf, 0.0, math.inf
        for i in range(TRIES):
            try:
                plan = self._search(self.limit, recompute, room)
            except PlanError:
                if least == math.inf:
                    raise
                infeasible = room
            else:
                memory = self._memory(plan)
                if memory <= self.limit:
                    return plan
                assert plan.estimate is not None
                # Less room than the plan leaves would find the same plan.
                least, over = min(least, memory), max(room, self.limit - plan.estimate.memory)
            room = over + (least - self.limit) * 2**i if infeasible == math.inf else (over + infeasible) / 2
        raise PlanError(
            f"no plan was found that fits in {self.limit / 1e6:.1f} MB per device; the smallest needs "
            f"{least / 1e6:.1f} MB: raise memory_limit, or use a larger mesh or a smaller batch"
        )

    def _recompute_few(self, plan: Plan) -> Plan:
        """The same, which recomputes every layer, with as few recomputed as must be."""
        few, many = 0, len(plan.recompute)
        tried = {count: replace(plan, recompute=plan.recompute[:count], cost=None) for count in range(many)}
        tried[many] = plan
        if self._memory(tried[few]) <= self.limit:
            return tried[few]
        while many - few > 1:
            most, least = self._memory(tried[few]), self._memory(tried[many])
            guess = few + math.ceil((many - few) * (most - self.limit) / max(most - least, 1.0))
            guess = min(max(guess, few + 1), many - 1)
            few, many = (few, guess) if self._memory(tried[guess]) <= self.limit else (guess, many)
        best = tried[many]
        try:
            again = self._search(self.limit, best.recompute, self._difference(best))
        except PlanError:  # the layouts that were searched with every layer recomputed are the only ones that fit
            return best
        return again if self._memory(again) <= self.limit else best


__all__ = ["fit"]
