"""Plans side by side: time, tokens per second, MFU, memory, and what each kind of collective sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoparallel.comm.world import mesh_size, mesh_text
from autoparallel.decisions.decisions import Decisions
from autoparallel.decisions.prediction import Prediction, Workload
from autoparallel.hardware import Profile
from autoparallel.report.explain import OPERATORS, SENT, UNSHARDED, headline, operators_table, plan_sections
from autoparallel.report.frontier import means
from autoparallel.report.html import Bars, Chart, Curve, Sections, page
from autoparallel.report.words import fold
from autoparallel.text import Block, Table, duration, memory_of, operations, units


@dataclass(frozen=True)
class Comparison:
    """A plan, and what others would cost.

    Attributes:
        model: the name of the model.
        work: what a step has to do.
        profile: the hardware that was planned for.
        plans: by name, what was decided, and what a step is predicted to cost; the first is the one that was asked for.
        problems: by name, why other plans cannot be.
        limit: bytes of a device that plans were to stay within; None where they were not limited.
        larger: the same asked of more devices, the fewest first.
    """

    model: str
    work: Workload
    profile: Profile
    plans: Mapping[str, tuple[Decisions, Prediction]]
    problems: Mapping[str, str]
    limit: float | None = None
    larger: Sequence[Comparison] = ()

    @property
    def capacity(self) -> float | None:
        """Bytes of a device that a plan may take; None where they are not known."""
        return self.profile.memory if self.limit is None else self.limit

    @property
    def plan(self) -> Decisions:
        """The one that was asked for."""
        return next(iter(self.plans.values()))[0]

    @property
    def predicted(self) -> Prediction:
        """What a step of that plan is predicted to cost."""
        return next(iter(self.plans.values()))[1]

    @property
    def title(self) -> str:
        """What was planned, for how many devices of what kind."""
        return f"{self.model} on {mesh_text(self.plan.whole_mesh)}, {self.profile.name}"

    @property
    def step(self) -> str:
        """What a step has to do, in words."""
        return f"{self.work.count:,} {self.work.unit} a step, {operations(self.work.flops)}"


def comparison_blocks(compared: Comparison) -> list[Block]:
    """A row for each plan, and why others cannot be."""
    work = compared.work
    volumes = {name: _sent_by_kind(prediction) for name, (_, prediction) in compared.plans.items()}
    kinds = sorted({kind for sizes in volumes.values() for kind, size in sizes.items() if size})
    numbers = ["step", f"{work.unit}/s", "MFU", "memory", *(kind.replace("_", " ") for kind in kinds)]
    rows = []
    for name, (plan, prediction) in compared.plans.items():
        seconds, memory = prediction.seconds(), prediction.total_memory
        mfu = work.mfu(seconds, mesh_size(plan.whole_mesh))
        held = memory_of(memory, compared.capacity)
        cells = [duration(seconds), f"{work.count / seconds:,.0f}", f"{100 * mfu:.1f}%", held]
        rows.append([name, *cells, *(units(volumes[name].get(kind, 0.0)) for kind in kinds)])
    rows += [[name, "no plan", *[""] * (len(numbers) - 1)] for name in compared.problems]
    problems = [f"{name}: {problem}" for name, problem in compared.problems.items()]
    table = Table(["plan", *numbers], rows, right=numbers, chosen=0)
    return [table, *problems, *_limit_words(compared), *_blocks_of_larger(compared)]


def _blocks_of_larger(compared: Comparison) -> list[Block]:
    """What the same step would take on more devices, and what would be decided there; nothing where none was asked."""
    if not compared.larger:
        return []
    base = compared.predicted.seconds() * mesh_size(compared.plan.whole_mesh)
    rows = []
    for one in (compared, *compared.larger):
        plan, prediction, devices = one.plan, one.predicted, mesh_size(one.plan.whole_mesh)
        seconds, memory = prediction.seconds(), prediction.total_memory
        cells = [duration(seconds), f"{base / devices / seconds:.0%}", units(memory)]
        rows.append([f"{devices}", mesh_text(plan.whole_mesh), *cells, means(plan.tried(seconds, memory))])
    heads = ("devices", "mesh", "step", "efficiency", "memory", "saves memory by")
    return ["The same step on more devices:", Table(heads, rows, right=("devices", "step", "efficiency", "memory"))]


def _limit_words(compared: Comparison) -> list[str]:
    """The memory within which plans were searched, in words."""
    limit, profile = compared.limit, compared.profile
    if limit is None:
        return []
    of = f" of {units(profile.memory)}" if profile.memory is not None else ""
    rest = ""
    if limit == profile.usable:
        rest = f"; {profile.reserve:.0%} are left to the device's context, buffers of collectives, and fragmentation"
    return [f"Searched within {units(limit)}{of} per device{rest}."]


def _sent_by_kind(prediction: Prediction) -> dict[str, float]:
    """The bytes that a rank sends in a step, by kind of collective."""
    by_kind: dict[str, float] = {}
    for (kind, _), size in prediction.step().bytes.items():
        by_kind[kind] = by_kind.get(kind, 0.0) + size
    return by_kind


# ---------------------------------------------------------------------------------------------------------- as a page


def report(compared: Comparison, *others: Comparison) -> str:
    """The comparison, and all that its first plan says of itself, as one HTML file; and, to switch to, the same of what
    other meshes would do."""
    named = {mesh_text(one.plan.whole_mesh): _view(one) for one in (compared, *others)}
    if not others:
        return page(compared.title, named)
    between = {mesh_text(one.plan.whole_mesh): (one.plan, one.predicted) for one in (compared, *others)}
    across = comparison_blocks(replace(compared, plans=between, problems={}))
    times = Bars({name: prediction.times for name, (_, prediction) in between.items()}, duration)
    memory = Bars({name: prediction.peak for name, (_, prediction) in between.items()}, units)
    every: Sections = {
        "The best plan on each mesh": across, "Where the time goes": [times], "Memory of a device": [memory]
    }  # fmt: skip
    return page(compared.title, {**named, "all of them": every})


def _view(compared: Comparison) -> Sections:
    """What a page shows of one comparison."""
    plan = compared.plan
    predictions = {name: prediction for name, (_, prediction) in compared.plans.items()}
    beside: list[Block] = [f"{compared.step}.", *comparison_blocks(compared)]
    sections = _sections(plan, predictions, compared.profile)
    sections[UNSHARDED] += _whole_parameters(plan)
    return {"The plan beside the alternatives": beside, **sections}


def plan_report(plan: Decisions) -> str:
    """A plan alone, as one HTML file."""
    predictions = {} if plan.prediction is None else {"predicted": plan.prediction}
    return page(headline(plan), {"": _sections(plan, predictions, None)})


def _sections(
    plan: Decisions, predictions: Mapping[str, Prediction], profile: Profile | None
) -> dict[str, list[Block | Chart]]:
    """All that a page says of a plan.

    Args:
        predictions: by name, the plan's own first.
        profile: the hardware that was planned for, where more than its name is known.
    """
    sections: dict[str, list[Block | Chart]] = {}
    if predictions:
        first = next(iter(predictions.values()))
        times = Bars({name: p.times for name, p in predictions.items()}, duration)
        memory = Bars({name: p.peak for name, p in predictions.items()}, units)
        sections["Where the time goes"] = [times]
        sections["Memory of a device"] = [memory, *_memory_over_time(first, profile)]
    sections.update({title: [*blocks] for title, blocks in plan_sections(plan).items()})
    if predictions:
        sections[SENT] += _by_axis(first)
    sections[OPERATORS] = [operators_table(plan)]
    return sections


def _memory_over_time(p: Prediction, profile: Profile | None) -> list[Block | Chart]:
    if len(p.timeline) < 2:
        return []
    what = "parameters, gradients and optimizer states, and what is alive beside them"
    capacity = None if profile is None else profile.memory
    return [f"Over one step with one microbatch: {what}.", Curve(p.timeline, capacity)]


def _by_axis(p: Prediction) -> list[Chart]:
    """What a rank sends over each mesh axis."""
    by_axis: dict[str, dict[str, float]] = {}
    for (kind, axis), size in p.step().bytes.items():
        by_axis.setdefault(axis, {})[kind] = size
    return [Bars(by_axis, units)] if by_axis else []


def _whole_parameters(plan: Decisions) -> list[Block]:
    many = [size > 1 for size in plan.axis_sizes]
    whole = [
        (name, ())
        for name in plan.parameters
        if not any(m and p.kind == "S" for m, p in zip(many, plan.at_rest(name), strict=True))
    ]
    names = ", ".join(name for name, _ in fold(whole))
    return [f"Parameters that every rank keeps whole: {names}"] if whole else []
