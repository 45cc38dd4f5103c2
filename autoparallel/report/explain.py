"""A plan in words and tables."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich import box
from rich.table import Table

from autoparallel.comm.traffic import Traffic
from autoparallel.comm.world import mesh_text
from autoparallel.decisions.decisions import Decisions
from autoparallel.decisions.prediction import ACCUMULATORS, ModuleRow, ParameterRow, Prediction
from autoparallel.placements import Layout
from autoparallel.placements.modes import parse_mode
from autoparallel.report.meshes import explain_choice
from autoparallel.report.pipeline import explain_pipeline
from autoparallel.text import duration, plain_text, units

T = TypeVar("T", bound=Hashable)


def explain_plan(plan: Decisions) -> str:
    """The plan as text: mesh, layouts, collectives, time, memory, and what has no rule.

    A plan that was loaded from a file knows what was decided, but predicts nothing before it is compiled again.
    """
    origin = "chosen by the search" if plan.origin == "auto" else f"the preset {plan.origin!r}"
    parts: list[Table | str] = [f"Decisions: {origin}, on the mesh {mesh_text(plan.whole_mesh)}"]
    if plan.choice is not None:
        parts += explain_choice(plan.choice)
    if plan.pipeline is not None:
        parts += explain_pipeline(plan.pipeline)
    if plan.prediction is not None:
        parts += [_modules_table(plan.prediction.modules, plan), *_predicted(plan.prediction, plan)]
    else:
        parts += [_modules_table(_rows_of(plan), plan), _operators_table(plan)]
    if plan.recompute:
        parts.append(f"Recomputed in the backward, to save memory: {recomputed(plan)}.")
    if plan.prediction is None and plan.pipeline is None:
        parts += [
            "Traffic, time and memory are predicted when the plan is compiled: autoparallel.compile(..., plan=plan).",
        ]
    if plan.cost is not None and plan.lower_bound is not None and plan.gap is not None:
        parts.append(
            f"The search minimised {duration(plan.cost)} a step; no plan can be below {duration(plan.lower_bound)} "
            f"(a gap of {100 * plan.gap:.2g}%)."
        )
    parts += [f"{path or '(the model)'} is not sharded by its pieces: {why}." for path, why in fold(plan.notes.items())]
    parts.append(_unruled(plan.unruled))
    return plain_text(*(part for part in parts if part))


# ---------------------------------------------------------------------------------------------------------- in words


def describe_layout(layout: Layout, axes: Sequence[str]) -> str:
    """A layout in words: ``whole``, ``dim 0 over dp``, ``dim 0 over dp, dim 1 over tp``, ``summands over tp``."""
    over: dict[str, list[str]] = {}
    for placement, axis in zip(layout, axes, strict=True):
        if placement.kind == "S":
            over.setdefault(f"dim {placement.dim}", []).append(axis)
        elif placement.kind == "P":
            over.setdefault("summands", []).append(axis)
    return ", ".join(f"{what} over {'+'.join(names)}" for what, names in over.items()) or "whole"


def describe_modes(modes: Sequence[str], axes: Sequence[str]) -> str:
    """How an operator runs, in words: ``whole``, ``n over tp``, ``b over dp, k over tp``."""
    over: dict[str, list[str]] = {}
    for text, axis in zip(modes, axes, strict=True):
        mode = parse_mode(text)
        if mode.kind in ("shard", "partial"):
            over.setdefault(mode.factor or "summands", []).append(axis)
    return ", ".join(f"{what} over {'+'.join(names)}" for what, names in over.items()) or "whole"


def _shape(shape: tuple[int, ...] | None, rows: int | None = None) -> str:
    if shape is None:
        return ""
    sizes = [f"{n} as {rows}" if rows is not None and i == 0 else str(n) for i, n in enumerate(shape)]
    return f"[{', '.join(sizes)}]" if shape else "scalar"


# ------------------------------------------------------------------------------------------------------------ folding


def fold(rows: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Folds rows that differ only in a number in their path: ``layers.0.up`` to ``layers.11.up`` become
    ``layers.0-11.up``, where they say the same."""
    paths = [(tuple(path.split(".")), content) for path, content in rows]
    for position in range(max((len(path) for path, _ in paths), default=0)):
        groups: dict[tuple[Hashable, T], list[tuple[str, ...]]] = {}
        for path, content in paths:
            number = position < len(path) and path[position].isdigit()
            key = (*path[:position], None, *path[position + 1 :]) if number else path
            groups.setdefault((key, content), []).append(path)
        folded: list[tuple[tuple[str, ...], T]] = []
        for (_, content), members in groups.items():
            path = members[0]
            if len(members) > 1:
                numbers = sorted(int(m[position]) for m in members)
                path = (*path[:position], _ranges(numbers), *path[position + 1 :])
            folded.append((path, content))
        paths = folded
    return [(".".join(path), content) for path, content in paths]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# ------------------------------------------------------------------------------------------------------------- tables


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _modules_table(modules: Sequence[ModuleRow], plan: Decisions) -> Table:
    axes = plan.axis_names
    rows: list[tuple[str, tuple[_Cells, ...]]] = []
    for row in modules:
        result = "" if row.layout is None else f"{_shape(row.shape)} {describe_layout(row.layout, axes)}"
        cells = [_parameter_cells(p, axes) for p in row.parameters] or [("", "", "", "")]
        rows.append((row.path, tuple((*c, result if i == 0 else "") for i, c in enumerate(cells))))
    gathered = "gathered" if plan.prediction is not None else "if gathered"
    headers = ("module", "parameter", "at rest", "in use", gathered, "result")
    lines: list[_Cells] = []
    for path, content in fold(rows):
        for i, line in enumerate(content):
            lines.append((path or "(the model)" if i == 0 else "", *line))
    shown = [i for i in range(len(headers)) if any(line[i] for line in lines)]
    table = plain_table(*(headers[i] for i in shown))
    for line in lines:
        table.add_row(*(line[i] for i in shown))
    return table


_Cells = tuple[str, ...]


def _parameter_cells(p: ParameterRow, axes: Sequence[str]) -> _Cells:
    uses = "; ".join(dict.fromkeys(describe_layout(use, axes) for use in p.uses))
    name = f"{p.name} {_shape(p.shape, p.rows)}".strip() + ("" if p.trainable else " (frozen)")
    return name, describe_layout(p.at_rest, axes), uses, p.gather.replace("_", " ")


def _rows_of(plan: Decisions) -> list[ModuleRow]:
    """What a plan alone knows about parameters."""
    found: dict[str, list[ParameterRow]] = {}
    for name, parameter in plan.parameters.items():
        path, _, own = name.rpartition(".")
        layout = plan.at_rest(name)
        gather = parameter.gather if any(p.kind == "S" for p in layout) else ""
        found.setdefault(path, []).append(ParameterRow(own, None, layout, (), gather, True, parameter.rows))
    return [ModuleRow(path, tuple(rows)) for path, rows in found.items()]


def _operators_table(plan: Decisions) -> Table:
    """How each module's operators run: what a plan alone knows about activations."""
    table = plain_table("module", "operators")
    found: dict[str, dict[str, None]] = {}
    for key, modes in plan.operators.items():
        path, _, operator = key.partition("#")[0].rpartition("/")
        found.setdefault(path, {})[f"{operator}: {describe_modes(modes, plan.axis_names)}"] = None
    for path, content in fold((path, tuple(operators)) for path, operators in found.items()):
        table.add_row(path or "(the model)", "\n".join(content))
    return table


def _predicted(prediction: Prediction, plan: Decisions) -> list[Table | str]:
    p = prediction
    step = p.step()
    parts: list[Table | str] = []
    if step.total_collectives:
        parts += ["Collectives and bytes that each rank sends; forward and backward once a microbatch:", _traffic(p)]
    else:
        parts.append("No collective is needed, forward or backward: every rank sends 0 B.")
    if p.clip.total_collectives:
        ((_, axis),) = p.clip.collectives
        parts.append(f"clip_grad_norm_() adds 1 all_reduce over {axis}, {units(p.clip.total_bytes)}.")
    parts.append(
        f"\nPredicted time of a step on the profile {p.profile!r}: {duration(p.seconds())} "
        f"({f'unshard {duration(p.unshard_seconds)}, ' if p.unshard_seconds else ''}"
        f"forward {duration(p.forward_seconds)}, backward {duration(p.backward_seconds)}, "
        f"gradients {duration(p.gradient_seconds)}, update {duration(p.update_seconds)})."
    )
    parts.append(f"Predicted memory per device: {units(p.total_memory)}, with two states of Adam:")
    memory = plain_table("of which", "bytes", right=["bytes"])
    for what, size in p.memory.items():
        if what != ACCUMULATORS:
            memory.add_row(what, units(size))
    parts.append(memory)
    if any(cost.seconds or cost.accumulators for cost in p.reductions.values()):
        parts += ["A step of several microbatches adds up gradients:", _reductions(p, plan)]
    return parts


_WHEN = {
    "per_step": "reduced once a step",
    "across_replicas_per_step": "scattered each microbatch, reduced across replicas once a step",
    "per_microbatch": "reduced each microbatch",
}


def _reductions(p: Prediction, plan: Decisions) -> Table:
    """The ways to add up gradients: which parameters take each, and what each would cost."""
    table = plain_table("gradients are", "parameters", "more memory", "time per microbatch", right=["more memory"])
    taken = [parameter.reduce for parameter in plan.parameters.values()]
    shown: set[tuple[float, float]] = set()
    for when, cost in p.reductions.items():
        count = taken.count(when)
        if not count and (cost.accumulators, cost.seconds) in shown:
            continue
        shown.add((cost.accumulators, cost.seconds))
        chosen = f"{'all' if count == len(taken) else count} (chosen)" if count else "none"
        table.add_row(_WHEN[when], chosen, units(cost.accumulators), duration(cost.seconds))
    return table


def _traffic(p: Prediction) -> Table:
    columns: dict[str, Traffic] = {
        "unshard": p.unshard, "forward": p.forward, "backward": p.backward, "gradients": p.gradients, "step": p.step()
    }  # fmt: skip
    if not p.unshard.total_collectives:
        del columns["unshard"]
    table = plain_table("collective", "mesh axis", *columns, right=list(columns))

    each = list(columns.values())
    total = columns["step"]
    for kind, axis in total.collectives:
        table.add_row(kind, axis, *(_cell(t.collectives.get((kind, axis)), t.bytes.get((kind, axis))) for t in each))
    if len(total.collectives) > 1:
        table.add_row("all", "", *(_cell(t.total_collectives, t.total_bytes) for t in each))
    return table


def _cell(count: int | None, sent: float | None) -> str:
    return f"{count} x, {units(sent or 0.0)}" if count else ""


def recomputed(plan: Decisions) -> str:
    """The layers that a plan recomputes, in words."""
    return ", ".join(path for path, _ in fold((layer, ()) for layer in plan.recompute))


def _unruled(unruled: Mapping[str, int]) -> str:
    if not unruled:
        return "Every operator has a sharding rule."
    names = ", ".join(f"{name} ({count} x)" for name, count in sorted(unruled.items()))
    return (
        f"Warning: operators without a sharding rule: {names}. Every rank gathers their operands and computes them "
        "whole, which is correct but slow; give an operator of your own a rule with autoparallel.register_rule()."
    )


__all__ = ["describe_layout", "explain_plan", "fold", "recomputed"]
