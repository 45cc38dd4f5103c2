"""Plans side by side: time, tokens per second, MFU, memory, and what each kind of collective sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from rich.table import Table

from autoparallel.decisions.decisions import Decisions
from autoparallel.decisions.prediction import Prediction
from autoparallel.hardware import Profile
from autoparallel.placements import COLLECTIVES
from autoparallel.report.explain import plain_table
from autoparallel.text import duration, units


@dataclass(frozen=True)
class Workload:
    """What a step has to do, whatever the plan.

    Attributes:
        count: tokens, or rows of the batch where no input is made of tokens.
        unit: "tokens" or "rows".
        flops: of the model, forward and backward, on all devices together; nothing computed twice counts.
        dtype: in which most of them are.
    """

    count: int
    unit: str
    flops: float
    dtype: torch.dtype


class Drafted(Protocol):
    """A plan with its prediction."""

    @property
    def plan(self) -> Decisions: ...

    @property
    def prediction(self) -> Prediction: ...


@dataclass(frozen=True)
class Entry:
    """One plan of a comparison.

    Attributes:
        name: the preset.
        draft: the plan; None where there is none.
        problem: why there is none.
    """

    name: str
    draft: Drafted | None
    problem: str = ""

    @property
    def step_seconds(self) -> float:
        """The predicted time of a step; infinite where there is no plan."""
        return self.draft.prediction.seconds() if self.draft is not None else float("inf")


def throughput(entry: Entry, work: Workload) -> float:
    """Tokens (or rows) per second, all devices together."""
    return work.count / entry.step_seconds


def mfu(entry: Entry, work: Workload, profile: Profile, devices: int) -> float:
    """The part of the devices' peak that the model's own arithmetic is."""
    return work.flops / (entry.step_seconds * devices * profile.peak_flops(work.dtype))


def comparison_table(entries: Sequence[Entry], work: Workload, profile: Profile, devices: int) -> Table:
    """One row for each plan; the first is the one that was asked for."""
    kinds = [
        kind
        for kind in sorted(COLLECTIVES)
        if any(e.draft is not None and kind in sent_by_kind(e.draft) for e in entries)
    ]
    heads = ["step", f"{work.unit}/s", "MFU", "memory", *kinds]
    table = plain_table("plan", *heads, right=heads)
    for entry in entries:
        if entry.draft is None:
            table.add_row(entry.name, "no plan", *[""] * (len(heads) - 1))
            continue
        memory = entry.draft.prediction.total_memory
        over = " (too much)" if profile.memory is not None and memory > profile.memory else ""
        sent = sent_by_kind(entry.draft)
        table.add_row(
            entry.name,
            duration(entry.step_seconds),
            f"{throughput(entry, work):,.0f}",
            f"{100 * mfu(entry, work, profile, devices):.1f}%",
            units(memory) + over,
            *(units(sent.get(kind, 0.0)) for kind in kinds),
        )
    return table


def sent_by_kind(draft: Drafted) -> dict[str, float]:
    """The bytes that a rank sends in a step, by kind of collective."""
    found: dict[str, float] = {}
    for (kind, _), size in draft.prediction.step().bytes.items():
        found[kind] = found.get(kind, 0.0) + size
    return found
