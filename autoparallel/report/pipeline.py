"""A pipeline's stages, its balance and its bubble, and a picture of its schedule."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from autoparallel.comm.traffic import Traffic
from autoparallel.decisions.pipeline import Border, PipelinePlan, PipelineTraffic
from autoparallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Passing,
    Timeline,
    actions_of,
    play,
)
from autoparallel.text import duration, units

WIDTH = 100
"""Columns of the picture."""


def explain_pipeline(plan: PipelinePlan) -> list[Table | str]:
    """The pipeline as text: what each stage holds and costs, and who waits when."""
    per_rank = plan.count // plan.ranks
    each = f", {per_rank} stages per rank" if per_rank > 1 else ""
    head = (
        f"Pipeline over {plan.axis}={plan.ranks}: {plan.schedule}, {plan.microbatches} microbatches{each}; predicted "
        f"{duration(plan.seconds)} for a step's forwards and backwards, {plan.bubble:.0%} of it waiting"
    )
    if not plan.stages:
        return [head]
    table = Table("stage", "rank", "from", "to", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("forward", "backward", "of the mean", "in flight", "memory"):
        table.add_column(title, justify="right")
    seconds = [stage.forward + stage.backward for stage in plan.stages]
    mean = sum(seconds) / len(seconds)
    for i, stage in enumerate(plan.stages):
        balance = f"{seconds[i] / mean:.0%}" if mean else ""
        table.add_row(
            str(i), str(plan.rank_of(i)), stage.first, stage.last, duration(stage.forward), duration(stage.backward),
            balance, str(stage.in_flight), units(stage.memory),
        )  # fmt: skip
    return [head, table, picture(plan), *_explain_traffic(plan)]


def _explain_traffic(plan: PipelinePlan) -> list[Table | str]:
    """What crosses between stages, and what each rank sends in a step."""
    traffic = plan.traffic
    if traffic is None:
        return []
    parts: list[Table | str] = []
    table = _table("stage", "to", "what crosses", right=("a microbatch", "its gradients", "a step"))
    for (source, target), borders in by_ends(traffic.borders).items():
        there, back = sum(b.forward for b in borders), sum(b.backward for b in borders)
        names = [b.key for b in borders]
        what = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        step = units(plan.microbatches * (there + back)) if borders[0].moves else "the same rank"
        table.add_row(str(source), str(target), what, units(there), units(back), step)
    if traffic.borders:
        parts += ["Between stages, sent by each rank of them:", table]
    table = _table("parameter", "held by rank", "used by rank", right=("a call", "its gradient"))
    for loan in traffic.loans:
        row = (loan.name, str(loan.owner), str(loan.borrower), units(loan.forward), units(loan.backward))
        table.add_row(*row)
    if traffic.loans:
        parts += ["Parameters that stages share:", table]
    table = _table("rank", "collective", "mesh axis", right=("the schedule", "gradients"))
    for ranks, call, gradients in _alike(traffic):
        for kind, axis in (call + gradients).collectives:
            cells = [_cell(part, kind, axis) for part in (call, gradients)]
            table.add_row(", ".join(map(str, ranks)), kind, axis, *cells)
            ranks = []
    return [*parts, "A rank's step, which reduces gradients once:", table]


def _alike(traffic: PipelineTraffic) -> list[tuple[list[int], Traffic, Traffic]]:
    """The ranks that send the same, with what they do."""
    found: list[tuple[list[int], Traffic, Traffic]] = []
    for rank, (call, gradients) in enumerate(zip(traffic.calls, traffic.gradients, strict=True)):
        known = next((ranks for ranks, *same in found if same == [call, gradients]), None)
        if known is None:
            found.append(([rank], call, gradients))
        else:
            known.append(rank)
    return found


def _cell(traffic: Traffic, kind: str, axis: str) -> str:
    count = traffic.collectives.get((kind, axis))
    return f"{count} x, {units(traffic.bytes[kind, axis])}" if count else ""


def by_ends(borders: Sequence[Border]) -> dict[tuple[int, int], list[Border]]:
    """What crosses, by the stages it comes from and goes to."""
    found: dict[tuple[int, int], list[Border]] = {}
    for border in borders:
        found.setdefault((border.source, border.target), []).append(border)
    return dict(sorted(found.items()))


def _table(*columns: str, right: Sequence[str]) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for title in right:
        table.add_column(title, justify="right")
    return table


def picture(plan: PipelinePlan, width: int = WIDTH) -> str:
    """The schedule over time, a line for each rank: digits are forwards, letters backwards of the microbatch of that
    number, ``-`` gradients of parameters alone, and dots waiting."""
    timeline = played(plan)
    scale = width / timeline.seconds
    lines = []
    for rank, spans in enumerate(timeline.spans):
        cells = ["."] * width
        for action, begin, end in spans:
            for i in range(round(begin * scale), max(round(end * scale), round(begin * scale) + 1)):
                if i < width:
                    cells[i] = _letter(action)
        lines.append(f"rank {rank}  {''.join(cells)}")
    legend = "time goes right: 0 is the forward of microbatch 0 (of 10, ...), a its backward"
    legend += ", - gradients of parameters" if any(a.kind == WEIGHT for s in timeline.spans for a, _, _ in s) else ""
    return "\n".join([*lines, f"{legend}, . waiting"])


def _letter(action: Action) -> str:
    if action.kind == WEIGHT:
        return "-"
    number = action.microbatch
    return str(number % 10) if action.kind == FORWARD else chr(ord("a") + number % 26)


def played(plan: PipelinePlan) -> Timeline:
    """The schedule played through with the predicted times of its stages."""

    def seconds(action: Action) -> float:
        stage = plan.stages[action.stage]
        share = {FORWARD: 1.0, BACKWARD: 1.0, INPUT: stage.inputs, WEIGHT: 1 - stage.inputs}[action.kind]
        return max(share * (stage.forward if action.kind == FORWARD else stage.backward), 1e-9)

    passings = [Passing(i, i, i + 1, True) for i in range(plan.count - 1)]
    lists = actions_of(plan.schedule, plan.ranks, plan.count, plan.microbatches)
    return play(lists, plan.rank_of, passings, seconds)


__all__ = ["by_ends", "explain_pipeline", "picture", "played"]
