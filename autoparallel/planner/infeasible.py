"""Why nothing can be planned: the operator for which no way is left, or what needs the memory, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import fx

from autoparallel.comm.world import mesh_text
from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.lines import line_of
from autoparallel.placements import format_layout
from autoparallel.plan import Plan
from autoparallel.planner.calls.options import Option
from autoparallel.planner.solve.elimination import Infeasible
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.space.space import SearchSpace
from autoparallel.predict.forecast import Forecast
from autoparallel.rules import rule_for
from autoparallel.rules.calls import is_tensor, tensor_operands
from autoparallel.rules.ways import call_modes
from autoparallel.text import units

SHOWN = 4
"""How many ways and consumers of memory a message lists."""


def explain_limit(error: Infeasible, space: SearchSpace, problem: Problem, limit: float, room: float) -> str:
    """Why nothing fits into a limit, of which some room was to be left."""
    needs = ""
    if error.smallest_usage is not None:
        needs = f"; the smallest that a plan needs is {units(error.smallest_usage + room)}"
    if error.choices is not None:
        needs += f", most of it for {_consumers(problem, error.choices)}"
    return (
        f"no plan fits in {units(limit)} per device on the mesh {mesh_text(space.mesh)}{needs}: raise "
        "memory_limit, or use a larger mesh or a smaller batch"
    )


def nothing_fits(least: Plan, limit: float, forecast: Forecast, closed: Sequence[str]) -> PlanError:
    """That nothing fits into a limit: what the plan that takes the least memory needs, what for, and what would help.

    Args:
        least: that plan, for which every means that saves memory was open.
        forecast: what its whole program takes.
        closed: the options that would save more, but change what a call returns.
    """
    parts = sorted(forecast.parts.items(), key=lambda part: -part[1])
    chunks = f"{' and '.join(closed)} (a training call then returns its loss alone), " if closed else ""
    host = ", optimizer states in host memory" if least.offload_optimizer else ""
    what = ", ".join(f"{name} {units(size)}" for name, size in parts if size >= 0.01 * forecast.memory)
    return PlanError(
        f"no plan fits in {units(limit)} per device on the mesh {mesh_text(least.mesh)}: with everything that saves "
        f"memory under plan={least.origin!r} (parameters gathered for each use, {len(least.recompute)} layers run "
        f"again in the backward{host}) a plan needs {units(forecast.memory)} ({what}). Use {chunks}more ranks, fewer "
        "rows at once, or a pipeline (a mesh with an axis 'pp') of more stages; or raise memory_limit"
    )


def _consumers(problem: Problem, choices: Sequence[int], count: int = 3) -> str:
    """What takes the most memory."""
    used: dict[str, float] = {}
    for node, size in problem.shares(problem.usage, choices).items():
        name = str(node.meta.get("key", node.name))
        used[name] = used.get(name, 0.0) + size
    most = sorted(used.items(), key=lambda item: (-item[1], item[0]))[:count]
    return ", ".join(f"{name.partition('#')[0].strip('/')} ({units(size)})" for name, size in most)


def explain_conflict(space: SearchSpace, node: fx.Node | None, options: Sequence[Option] = ()) -> str:
    """Why a preset or pins do not fit the model, and what to change.

    Args:
        node: the operator or parameter at which that shows, if it is known.
        options: what is left of its ways; none of them goes together with what is left of its neighbours'.
    """
    ranks = math.prod(space.axis_sizes[axis] for axis in space.constraints.data)
    problem = f"the plan does not fit the model on the mesh {mesh_text(space.mesh)}"
    cure = "use plan='auto'" + (", or pin and forbid less" if space.pins else "")
    sizes = {space.captured.actual[s] for s in space.captured.batches} or set(_batch_sizes(space, node))
    if rows := sorted(size for size in sizes if size % ranks):
        at = f" at {node.meta['key']}" if node is not None and "key" in node.meta else ""
        return (
            f"{problem}{at}: a batch of {', '.join(map(str, rows))} rows must divide by {ranks}, the ranks that shard "
            f"it (the batch is the first dim of the first input); change the batch or the mesh, or {cure}"
        )
    if node is None:
        return f"{problem}: what it asks of some operators contradicts what it asks of others; {cure}"
    if node.op == "placeholder":
        name = space.captured.parameters.get(node.name, node.name)
        readers = _texts(str(user.meta["key"]) for user in node.users if "key" in user.meta)
        lies = _texts(format_layout(option.result).replace("I", "R") for option in options)
        return f"{problem}: {name} can lie as {lies}, from where its readers ({readers}) may not have it; {cure}"
    where = f"{node.meta['key']} ({line_of(node)})"
    if not options:
        modes = _texts(str(way.mode) for way in call_modes(node)) if is_tensor(node) else "whole"
        return f"{problem}: it leaves none of the ways to run {where}: {modes}; {cure}, or register_rule() for it"
    left = _texts(",".join(map(str, option.modes)) for option in options)
    return (
        f"{problem}: it leaves {where} to run as {left}, which does not go together with what it leaves for what that "
        f"reads; {cure}, or register_rule() for it"
    )


def _batch_sizes(space: SearchSpace, node: fx.Node | None) -> Iterable[int]:
    """The sizes of the dims of an operator that a preset cuts as the batch."""
    if node is None or node.op != "call_function" or not is_tensor(node):
        return
    for way in call_modes(node):
        if space.permits.cuts_batch(node, rule_for(node), way):
            operands = zip((*tensor_operands(node), node), (*way.operands, way.result), strict=True)
            yield from (space.size.shape(x)[p.dim] for x, p in operands if p.kind == "S")


def _texts(texts: Iterable[str]) -> str:
    """The first of some texts, each once."""
    every = list(dict.fromkeys(texts))
    return " or ".join(every[:SHOWN]) + (" or ..." if len(every) > SHOWN else "")
