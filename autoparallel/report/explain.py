"""A plan in words and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoparallel.comm.world import mesh_text
from autoparallel.decisions.decisions import Decisions
from autoparallel.decisions.prediction import ModuleRow, ParameterRow, Prediction
from autoparallel.report.frontier import frontier_blocks
from autoparallel.report.meshes import choice_blocks
from autoparallel.report.pipeline import pipeline_blocks
from autoparallel.report.words import count_and_bytes, describe_layout, describe_modes, fold, recomputed, traffic_rows
from autoparallel.text import Block, Table, duration, plain_text, units

Cells = tuple[str, ...]


OPERATORS, SENT, UNSHARDED = "How operators run", "What a rank sends in a step", "What was not sharded"
"""The titles of sections in which a page says more than plain text."""


def explain_plan(plan: Decisions) -> str:
    """The plan as text: mesh, layouts, collectives, time, memory, and what has no rule.

    A plan that was loaded from a file knows what was decided, but predicts nothing before it is compiled again.
    """
    return plain_text(*(block for blocks in plan_sections(plan).values() for block in blocks))


def headline(plan: Decisions) -> str:
    """The plan in a line: who made it, on which mesh, and what a step is predicted to take."""
    prediction = plan.prediction
    if prediction is None:
        return _origin(plan)
    took = f"a step of {duration(prediction.seconds())} and {units(prediction.total_memory)} per device"
    return f"{_origin(plan)}; predicted for {prediction.profile}: {took}"


def _origin(plan: Decisions) -> str:
    origin = "chosen by the search" if plan.origin == "auto" else f"the preset {plan.origin!r}"
    return f"{origin}, on the mesh {mesh_text(plan.whole_mesh)}"


def plan_sections(plan: Decisions) -> dict[str, list[Block]]:
    """All that a plan says of itself, under titles."""
    prediction = plan.prediction
    return {
        "The plan": [f"Decisions: {_origin(plan)}"],
        "The mesh beside the alternatives": choice_blocks(plan.choice),
        "Seconds against memory": frontier_blocks(plan.frontier),
        "The pipeline": pipeline_blocks(plan.pipeline),
        "Parameters and results, module by module": _modules_tables(plan),
        OPERATORS: [operators_table(plan)] if prediction is None else [],
        SENT: _traffic_blocks(prediction),
        "What a step takes": [*_prediction(prediction, plan), *_notes(plan)],
        UNSHARDED: [*_without_pieces(plan.notes), _without_rule(plan.unruled)],
    }


# ------------------------------------------------------------------------------------------------------- what is where


def _modules_tables(plan: Decisions) -> list[Block]:
    """How parameters and results lie, module by module; of a plan alone, what it knows of parameters."""
    prediction = plan.prediction
    modules = prediction.modules if prediction is not None else _modules_of(plan)
    parameters = ((row.path, tuple(_parameter_cells(p, plan.axis_names) for p in row.parameters)) for row in modules)
    lines = [
        (path or "(the model)" if i == 0 else "", *cells)
        for path, content in fold(parameters)
        for i, cells in enumerate(content)
    ]
    heads = ("module", "parameter", "at rest", "in use" if prediction is not None else "if gathered")
    shown = [i for i in range(len(heads)) if any(line[i] for line in lines)]
    tables = [Table([heads[i] for i in shown], [[line[i] for i in shown] for line in lines])] if lines else []
    results = fold(
        (row.path, f"{_shape(row.shape)} {describe_layout(row.layout, plan.axis_names)}")
        for row in modules
        if row.layout is not None
    )
    if results:
        tables.append(Table(("module", "result"), [(path or "(the model)", result) for path, result in results]))
    return [*tables]


def _modules_of(plan: Decisions) -> list[ModuleRow]:
    """What a plan alone knows about parameters."""
    modules: dict[str, list[ParameterRow]] = {}
    for name, parameter in plan.parameters.items():
        path, _, leaf = name.rpartition(".")
        layout = plan.at_rest(name)
        gather = parameter.gather if any(p.kind == "S" for p in layout) else ""
        modules.setdefault(path, []).append(ParameterRow(leaf, None, layout, (), gather, True, parameter.rows))
    return [ModuleRow(path, tuple(rows)) for path, rows in modules.items()]


def _parameter_cells(p: ParameterRow, axes: Sequence[str]) -> Cells:
    uses = "; ".join(dict.fromkeys(describe_layout(use, axes) for use in p.uses))
    name = f"{p.name} {_shape(p.shape, p.rows)}".strip() + ("" if p.trainable else " (frozen)")
    used = ", ".join(filter(None, (uses, p.gather.replace("_", " "))))
    return name, describe_layout(p.at_rest, axes), used


def _shape(shape: tuple[int, ...] | None, rows: int | None = None) -> str:
    if shape is None:
        return ""
    sizes = [f"{n} as {rows}" if rows is not None and i == 0 else str(n) for i, n in enumerate(shape)]
    return f"[{', '.join(sizes)}]" if shape else "scalar"


def operators_table(plan: Decisions) -> Table:
    """How each module's operators run."""
    modules: dict[str, dict[str, None]] = {}
    for key, modes in plan.operators.items():
        path, _, operator = key.partition("#")[0].rpartition("/")
        modules.setdefault(path, {})[f"{operator}: {describe_modes(modes, plan.axis_names)}"] = None
    folded = fold((path, tuple(operators)) for path, operators in modules.items())
    return Table(("module", "operators"), [(path or "(the model)", "\n".join(content)) for path, content in folded])


def _without_pieces(notes: Mapping[str, str]) -> list[str]:
    return [f"{path or '(the model)'} is not sharded by its pieces: {why}." for path, why in fold(notes.items())]


def _without_rule(unruled: Mapping[str, int]) -> str:
    if not unruled:
        return "Every operator has a sharding rule."
    names = ", ".join(f"{name} ({count} x)" for name, count in sorted(unruled.items()))
    return (
        f"Warning: operators without a sharding rule: {names}. Every rank gathers their operands and computes them "
        "whole, which is correct but slow; give an operator of your own a rule with autoparallel.register_rule()."
    )


# ---------------------------------------------------------------------------------------------------- what it will take


def _traffic_blocks(p: Prediction | None) -> list[Block]:
    """What each rank sends in a step, and when."""
    if p is None:
        return []
    blocks: list[Block] = ["No collective is needed, forward or backward: every rank sends 0 B."]
    columns = {"forward": p.forward, "backward": p.backward, "gradients": p.gradients, "step": p.step()}
    if p.unshard.total_collectives:
        columns = {"unshard": p.unshard, **columns}
    rows = traffic_rows(*columns.values())
    if rows:
        if len(rows) > 1:
            rows.append(["all", *(count_and_bytes(t.total_collectives, t.total_bytes) for t in columns.values())])
        table = Table(("collective, axis", *columns), rows, right=list(columns))
        blocks = ["Collectives and bytes that each rank sends; forward and backward once a microbatch:", table]
    if p.clip.total_collectives:
        ((_, axis),) = p.clip.collectives
        blocks.append(f"clip_grad_norm_() adds 1 all_reduce over {axis}, {units(p.clip.total_bytes)}.")
    return blocks


def _prediction(p: Prediction | None, plan: Decisions) -> list[Block]:
    """The time and the memory of a step."""
    if p is None:
        return []
    times = [f"{part} {duration(seconds)}" for part, seconds in p.times.items() if seconds or part != "unshard"]
    rows = [(what, units(size)) for what, size in p.peak.items()]
    blocks: list[Block] = [
        f"\nPredicted time of a step on the profile {p.profile!r}: {duration(p.seconds())} ({', '.join(times)}).",
        f"Predicted memory per device: {units(p.total_memory)}, with the states of {p.optimizer}:",
        Table(("of which", "bytes"), rows, right=["bytes"]),
    ]
    if any(cost.seconds or cost.accumulators for cost in p.reductions.values()):
        blocks += ["A step of several microbatches adds up gradients:", _reductions_table(p, plan)]
    return blocks


_WHEN = {
    "per_step": "reduced once a step",
    "across_replicas_per_step": "scattered each microbatch, reduced across replicas once a step",
    "per_microbatch": "reduced each microbatch",
}


def _reductions_table(p: Prediction, plan: Decisions) -> Table:
    """The ways to add up gradients: which parameters take each, and what each would cost."""
    rows = []
    choices = [parameter.reduce for parameter in plan.parameters.values()]
    shown: set[tuple[float, float]] = set()
    for when, cost in p.reductions.items():
        count = choices.count(when)
        if not count and (cost.accumulators, cost.seconds) in shown:
            continue
        shown.add((cost.accumulators, cost.seconds))
        chosen = f"{'all' if count == len(choices) else count} (chosen)" if count else "none"
        rows.append((_WHEN[when], chosen, units(cost.accumulators), duration(cost.seconds)))
    heads = ("gradients are", "parameters", "more memory", "time per microbatch")
    return Table(heads, rows, right=["more memory"])


def _notes(plan: Decisions) -> list[Block]:
    """What is computed twice, and how good the search knows the plan to be."""
    blocks: list[Block] = []
    if plan.recompute:
        blocks.append(f"Recomputed in the backward, to save memory: {recomputed(plan)}.")
    if plan.checkpointed:
        layers = ", ".join(path for path, _ in fold((layer, "") for layer in plan.checkpointed))
        blocks.append(f"Of these, the model itself calls torch.utils.checkpoint in {layers}.")
    if plan.microbatches > 1:
        blocks.append(f"A training call runs in {plan.microbatches} microbatches, and reduces gradients once.")
    if plan.offload_optimizer:
        how = ""
        if plan.prediction is not None:
            size, seconds = plan.prediction.host_memory, plan.prediction.host_seconds
            how = f": {units(size)} for each device, which take {duration(seconds)} of a step to come and go"
        blocks.append(f"Optimizer states lie in host memory{how}.")
    if plan.loss_chunks > 1:
        blocks.append(f"The loss is computed in {plan.loss_chunks} chunks of rows: its logits never exist whole.")
    if plan.linear_chunks > 1:
        blocks.append(
            f"Linear layers that read what is exchanged, or make it, run in {plan.linear_chunks} chunks of rows, whose "
            "exchange overlaps with the products of the others."
        )
    if plan.prediction is None and plan.pipeline is None:
        blocks.append(
            "Traffic, time and memory are predicted when the plan is compiled: autoparallel.compile(..., plan=plan)."
        )
    if plan.cost is not None and plan.lower_bound is not None and plan.gap is not None:
        blocks.append(
            f"The search minimised {duration(plan.cost)} a step; no plan can be below {duration(plan.lower_bound)} "
            f"(a gap of {100 * plan.gap:.2g}%)."
        )
    return blocks
