"""Why something was decided: what the next best would cost, asked of the search itself.

A decision's price is what the best plan without it costs.  So each question is one more search, in which the matched
parameters or operators may be anything but what they are, and one more prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.decisions.decisions import Decisions, Reasons
from autoparallel.decisions.parameters import PlanError, matching
from autoparallel.report.words import TOTALS, describe_layout, describe_modes, describe_parameter
from autoparallel.text import Table, plain_text


@dataclass(frozen=True)
class Decision:
    """One decision, the same for all parameters or operators of a group.

    Attributes:
        what: as the report names it.
        chosen: in words.
        keys: the parameters' names, or the operators' keys.
    """

    what: str
    chosen: str
    keys: tuple[str, ...]


def explain_module(plan: Decisions, pattern: str) -> str:
    """What was decided about some modules or parameters, and what the next best would cost (see ``Plan.explain``)."""
    decisions = _decisions_about(plan, pattern)
    if not decisions:
        raise PlanError(f"nothing in the plan matches {pattern!r}: give a module or parameter path; * is any text")
    if plan.reasons is None:
        raise PlanError(
            "the plan knows what was decided but not why: it was loaded from a file, or is a pipeline's. Ask the plan "
            "of a compiled model without a pipeline (model.plan), or plan again"
        )
    rows = [(decision.what, decision.chosen, *_next_best(plan, plan.reasons, decision)) for decision in decisions]
    numbers = ("step", "memory", "sends")
    return plain_text(
        f"{pattern}: {len(decisions)} decisions",
        Table(("decision", "chosen", "next best", *numbers), rows, right=numbers),
        "Next best: the best plan in which all of these are decided otherwise; what it changes in one step, predicted.",
    )


def _decisions_about(plan: Decisions, pattern: str) -> list[Decision]:
    """What a plan decides about the parameters and modules that a pattern means, alike ones together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in plan.parameters:
        module, _, leaf = name.rpartition(".")
        if matching(pattern, [name, module]) or _contains(pattern, module):
            what = leaf if matching(pattern, [module]) else name
            groups.setdefault((what, describe_parameter(plan, name)), []).append(name)
    for key, modes in plan.operators.items():
        path, _, operator = key.rpartition("/")
        if (matching(pattern, [path]) or _contains(pattern, path)) and any(m != "I" for m in modes):
            what = operator if matching(pattern, [path]) else key
            groups.setdefault((what, _choice(plan, key)), []).append(key)
    return [
        Decision(what + (f" ({len(keys)} x)" if len(keys) > 1 else ""), chosen, tuple(keys))
        for (what, chosen), keys in groups.items()
    ]


def _contains(pattern: str, path: str) -> bool:
    parts = path.split(".")
    return any(matching(pattern, [".".join(parts[:i])]) for i in range(1, len(parts)))


def _next_best(plan: Decisions, reasons: Reasons, decision: Decision) -> Sequence[str]:
    def text(key: str) -> str:
        return plan.parameters[key].at_rest if key in plan.parameters else ",".join(plan.operators[key])

    other = reasons.best_without(plan, {key: frozenset([text(key)]) for key in decision.keys})
    if other is None or plan.prediction is None:
        return "nothing else is possible", "", "", ""
    assert other.prediction is not None
    changes = []
    for number, show in TOTALS.values():
        change = number(other.prediction) - number(plan.prediction)
        changes.append(f"{'+' if change >= 0 else '-'}{show(abs(change))}")
    return " or ".join(sorted({_choice(other, key) for key in decision.keys})), *changes


def _choice(plan: Decisions, key: str) -> str:
    """How a parameter lies at rest, or an operator runs, in words."""
    if key in plan.parameters:
        return describe_layout(plan.at_rest(key), plan.axis_names)
    return describe_modes(plan.operators[key], plan.axis_names)
