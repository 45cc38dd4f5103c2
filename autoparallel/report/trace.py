"""A predicted step as a trace in Chrome's format, which Perfetto shows; its times are in microseconds.

Slices of one line that overlap, be it by the rounding of a float, are dropped by Perfetto and put into each other by
others: every moment is a multiple of ``TICK``, so that a begin and a length add up to the next begin exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoparallel.decisions.decisions import Decisions
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.prediction import COMPUTE, NETWORK, PHASES, PredictedSpan, Prediction
from autoparallel.report.pipeline import schedule_timeline

Event = dict[str, Any]
Curve = Sequence[tuple[float, float]]

TICK = 0.125
"""Microseconds: exact in binary and in decimal digits, and whole nanoseconds, which Perfetto counts in."""


def trace_of(plan: Decisions, beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The trace of a predicted step of one call; of a pipeline, of its schedule.

    Args:
        beside: a trace of ``torch.profiler``'s, whose events are part of the result; the prediction begins with the
            first step there that the profiler was told of, or else with the first event.

    Raises:
        PlanError: where nothing is predicted.
    """
    memory: Curve = ()
    if plan.pipeline is not None and plan.pipeline.stages:
        rows = schedule_timeline(plan.pipeline).rows
        lines = {name: [PredictedSpan(name, s.title, s.begin, s.end) for s in spans] for name, spans in rows.items()}
    elif plan.prediction is not None and plan.prediction.spans:
        spans, memory = _step(plan.prediction)
        lines = {line: [s for s in spans if s.line == line] for line in (PHASES, COMPUTE, NETWORK)}
    else:
        raise PlanError(
            "a plan that was read from a file predicts nothing: compile it, autoparallel.compile(model, plan=plan), "
            "and save the trace of model.plan after the first call"
        )
    events = list((beside or {}).get("traceEvents", ()))
    process = max((e["pid"] for e in events if isinstance(e.get("pid"), int)), default=-1) + 1
    return {**(beside or {}), "traceEvents": [*events, *_events(lines, memory, process, _origin(events))]}


def _step(p: Prediction) -> tuple[list[PredictedSpan], Curve]:
    """What a step of one call is spent on, and its memory; of microbatches that are alike, the last is shown."""
    before = (p.forward_seconds + p.backward_seconds) * (p.microbatches - 1)

    def later(seconds: float) -> float:
        return seconds + before if seconds >= p.unshard_seconds else seconds

    spans = [PredictedSpan(s.line, s.name, later(s.begin), later(s.begin) + s.end - s.begin, s.module) for s in p.spans]
    end = max(span.end for span in spans if span.line == PHASES)
    first, name = p.unshard_seconds, f"the {p.microbatches - 1} microbatches before, which are alike"
    for line in (PHASES, COMPUTE):
        if before:
            spans.append(PredictedSpan(line, name, first, first + before))
        if p.update_seconds:
            spans.append(PredictedSpan(line, "update", end, end + p.update_seconds))
    return spans, [(later(seconds), size) for seconds, size in p.timeline]


def _origin(events: Sequence[Event]) -> float:
    timed = [e for e in events if e.get("ph") == "X"]
    steps = [e for e in timed if str(e.get("name")).startswith("ProfilerStep#")]
    return float(min((e["ts"] for e in steps or timed), default=0.0))


def _events(
    lines: Mapping[str, Sequence[PredictedSpan]], memory: Curve, process: int, origin: float
) -> Iterator[Event]:
    def named(kind: str, name: str, line: int = 0) -> Event:
        return {"ph": "M", "name": kind, "pid": process, "tid": line, "args": {"name": name}}

    yield named("process_name", "autoparallel, predicted")
    for number, (line, spans) in enumerate(lines.items()):
        yield named("thread_name", line, number)
        for span in sorted(spans, key=lambda s: s.begin):
            begin, end = _ticks(origin, span.begin), _ticks(origin, span.end)
            event: Event = {"ph": "X", "name": span.name, "cat": "predicted", "pid": process, "tid": number}
            event |= {"ts": begin, "dur": end - begin}
            yield event | ({"args": {"module": span.module}} if span.module else {})
    for seconds, size in memory:
        event = {"ph": "C", "name": "memory", "pid": process, "tid": 0, "ts": _ticks(origin, seconds)}
        yield event | {"args": {"bytes": size}}


def _ticks(origin: float, seconds: float) -> float:
    """The moment in microseconds, of which ``origin`` is the first."""
    return TICK * (round(origin / TICK) + round(1e6 * seconds / TICK))
