"""A pipeline's stages, its balance, its traffic and its schedule, as blocks of a report."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.comm.traffic import Traffic
from autoparallel.decisions.pipeline import Border, PipelinePlan, PipelineTraffic
from autoparallel.pipeline.schedules import FORWARD, KINDS, WEIGHT, Action
from autoparallel.report.words import traffic_rows
from autoparallel.text import Block, Span, Table, Timeline, duration, units


def pipeline_blocks(plan: PipelinePlan | None) -> list[Block]:
    """What each stage holds and costs, who waits when, and what is sent; nothing where there is no pipeline."""
    if plan is None:
        return []
    per_rank = plan.count // plan.ranks
    each = f", {per_rank} stages per rank" if per_rank > 1 else ""
    head = (
        f"Pipeline over {plan.axis}={plan.ranks}: {plan.schedule}, {plan.microbatches} microbatches{each}; predicted "
        f"{duration(plan.seconds)} for a step's forwards and backwards, {plan.bubble:.0%} of it waiting"
    )
    if not plan.stages:
        return [head]
    traffic = [] if plan.traffic is None else _traffic_blocks(plan, plan.traffic)
    return [head, _stages_table(plan), schedule_timeline(plan), *traffic]


def _stages_table(plan: PipelinePlan) -> Table:
    seconds = [stage.forward + stage.backward for stage in plan.stages]
    mean = sum(seconds) / len(seconds)
    rows = []
    for i, stage in enumerate(plan.stages):
        balance = f"{seconds[i] / mean:.0%}" if mean else ""
        times = (duration(stage.forward), duration(stage.backward), balance)
        place = (str(i), str(plan.rank_of(i)), f"{stage.first} to {stage.last}")
        rows.append((*place, *times, str(stage.in_flight), units(stage.memory + stage.moment)))
    numbers = ("forward", "backward", "of the mean", "in flight", "memory")
    return Table(("stage", "rank", "from, to", *numbers), rows, right=numbers)


def schedule_timeline(plan: PipelinePlan) -> Timeline:
    """The schedule, played through with the predicted times of its stages: digits are forwards, small letters backwards
    of the microbatch of that number, ``-`` gradients of parameters alone."""
    spans = plan.played().spans
    key = "time goes right: 0 is the forward of microbatch 0 (of 10, ...), a its backward"
    if any(action.kind == WEIGHT for steps in spans for action, _, _ in steps):
        key += ", - gradients of parameters"
    return Timeline({f"rank {rank}": [_span(*step) for step in steps] for rank, steps in enumerate(spans)}, key)


def _span(action: Action, begin: float, end: float) -> Span:
    kind, number = KINDS[action.kind], action.microbatch
    title = f"{kind} of microbatch {number} in stage {action.stage}: {duration(end - begin)}"
    letter = str(number % 10) if action.kind == FORWARD else chr(ord("a") + number % 26)
    return Span(begin, end, kind, title, "-" if action.kind == WEIGHT else letter, str(number))


def _traffic_blocks(plan: PipelinePlan, traffic: PipelineTraffic) -> list[Block]:
    """What crosses between stages, and what each rank sends in a step."""
    blocks: list[Block] = []
    if traffic.borders:
        numbers = ["a microbatch", "its gradients", "a step"]
        rows = [_border_row(plan, *ends, borders) for ends, borders in _by_ends(traffic.borders)]
        table = Table(("stage", "to", "what crosses", *numbers), rows, right=numbers)
        blocks += ["Between stages, sent by each rank of them:", table]
    if traffic.loans:
        numbers = ["a call", "its gradient"]
        loans = [(x.name, str(x.owner), str(x.borrower), units(x.forward), units(x.backward)) for x in traffic.loans]
        table = Table(("parameter", "held by rank", "used by rank", *numbers), loans, right=numbers)
        blocks += ["Parameters that stages share:", table]
    lines = []
    for ranks, parts in _alike(traffic):
        for i, row in enumerate(traffic_rows(*parts)):
            lines.append([", ".join(map(str, ranks)) if i == 0 else "", *row])
    numbers = ["the schedule", "gradients"]
    table = Table(("rank", "collective, axis", *numbers), lines, right=numbers)
    return [*blocks, "A rank's step, which reduces gradients once:", table]


def _border_row(plan: PipelinePlan, source: int, target: int, borders: Sequence[Border]) -> list[str]:
    there, back = sum(b.forward for b in borders), sum(b.backward for b in borders)
    names = [b.key for b in borders]
    what = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    step = units(plan.microbatches * (there + back)) if borders[0].moves else "the same rank"
    return [str(source), str(target), what, units(there), units(back), step]


def _by_ends(borders: Sequence[Border]) -> list[tuple[tuple[int, int], list[Border]]]:
    """What crosses, by the stages it comes from and goes to."""
    groups: dict[tuple[int, int], list[Border]] = {}
    for border in borders:
        groups.setdefault((border.source, border.target), []).append(border)
    return sorted(groups.items())


def _alike(traffic: PipelineTraffic) -> list[tuple[list[int], tuple[Traffic, Traffic]]]:
    """The ranks that send the same, with what they send in the schedule and for gradients."""
    groups: list[tuple[list[int], tuple[Traffic, Traffic]]] = []
    for rank, parts in enumerate(zip(traffic.calls, traffic.gradients, strict=True)):
        for ranks, same in groups:
            if same == parts:
                ranks.append(rank)
                break
        else:
            groups.append(([rank], parts))
    return groups
