"""Why something was decided: what the next best would cost, asked of the search itself.

A decision's price is what the best plan without it costs.  So each question is one more search, in which the matched
parameters or operators may be anything but what they are, and one more prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from autoparallel.decisions.decisions import Decisions, Reasons
from autoparallel.decisions.parameters import PlanError, matching
from autoparallel.report.explain import describe_layout, describe_modes, plain_table
from autoparallel.text import duration, plain_text, units


@dataclass(frozen=True)
class Decision:
    """One decision, the same for all parameters or operators of a group.

    Attributes:
        what: as the report names it.
        kind: "parameter" or "operator".
        keys: the parameters' names, or the operators' keys.
        chosen: in words.
    """

    what: str
    kind: str
    keys: tuple[str, ...]
    chosen: str


def explain_module(plan: Decisions, pattern: str) -> str:
    """What was decided about some modules or parameters, and what the next best would cost (see ``Plan.explain``)."""
    decisions = decisions_about(plan, pattern)
    if not decisions:
        raise PlanError(f"nothing in the plan matches {pattern!r}: give a module or parameter path; * is any text")
    parts: list[Table | str] = [f"{pattern}: {len(decisions)} decisions"]
    table = plain_table("decision", "chosen", "next best", "step", "memory", "sends", right=("step", "memory", "sends"))
    if plan.reasons is None:
        raise PlanError(
            "the plan was loaded from a file, so that it knows what was decided but not why: ask the plan of a "
            "compiled model (model.plan), or plan again"
        )
    for decision in decisions:
        table.add_row(decision.what, decision.chosen, *_next_best(plan, plan.reasons, decision))
    parts += [
        table,
        "Next best: the best plan in which all of these are decided otherwise; what it changes in one step, predicted.",
    ]
    return plain_text(*parts)


def decisions_about(plan: Decisions, pattern: str) -> list[Decision]:
    """What a plan decides about the parameters and modules that a pattern means, alike ones together."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, parameter in plan.parameters.items():
        module, _, own = name.rpartition(".")
        if matching(pattern, [name, module]) or _inside(pattern, module):
            gathered = f", gathered {parameter.gather.replace('_', ' ')}" if "S" in parameter.at_rest else ""
            chosen = describe_layout(plan.at_rest(name), plan.axis_names) + gathered
            found.setdefault(("parameter", own if matching(pattern, [module]) else name, chosen), []).append(name)
    for key, modes in plan.operators.items():
        path, _, operator = key.rpartition("/")
        if (matching(pattern, [path]) or _inside(pattern, path)) and any(m != "I" for m in modes):
            chosen = describe_modes(modes, plan.axis_names)
            what = operator if matching(pattern, [path]) else key
            found.setdefault(("operator", what, chosen), []).append(key)
    return [
        Decision(what + (f" ({len(keys)} x)" if len(keys) > 1 else ""), kind, tuple(keys), chosen)
        for (kind, what, chosen), keys in found.items()
    ]


def _inside(pattern: str, path: str) -> bool:
    parts = path.split(".")
    return any(matching(pattern, [".".join(parts[:i])]) for i in range(1, len(parts)))


def _next_best(plan: Decisions, reasons: Reasons, decision: Decision) -> Sequence[str]:
    if decision.kind == "parameter":
        excluded = {name: frozenset([plan.parameters[name].at_rest]) for name in decision.keys}
    else:
        excluded = {key: frozenset([",".join(plan.operators[key])]) for key in decision.keys}
    other = reasons.best_without(plan, excluded)
    if other is None or plan.prediction is None:
        return "nothing else is possible", "", "", ""
    assert other.prediction is not None
    if decision.kind == "parameter":
        words = {describe_layout(other.at_rest(name), plan.axis_names) for name in decision.keys}
    else:
        words = {describe_modes(other.operators[key], plan.axis_names) for key in decision.keys}
    a, b = plan.prediction, other.prediction
    return (
        " or ".join(sorted(words)),
        signed(b.seconds() - a.seconds(), duration),
        signed(b.total_memory - a.total_memory, units),
        signed(b.step().total_bytes - a.step().total_bytes, units),
    )


def signed(value: float, show: object) -> str:
    """A difference as people write it, with its sign."""
    return f"{'+' if value >= 0 else '-'}{show(abs(value))}"  # type: ignore[operator]
