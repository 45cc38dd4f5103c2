"""Why nothing fits into a limit: what needs the memory, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.comm.world import mesh_text
from autoparallel.decisions.parameters import PlanError
from autoparallel.plan import Plan
from autoparallel.planner.solve.elimination import Infeasible
from autoparallel.planner.space.problem import Problem
from autoparallel.predict.forecast import Forecast
from autoparallel.text import units

SHOWN = 3
"""How many consumers of memory a message names."""


def explain_limit(error: Infeasible, problem: Problem, limit: float, room: float) -> str:
    """Why nothing fits into a limit, of which some room was to be left."""
    needs = ""
    if error.smallest_usage is not None:
        needs = f"; the smallest that a plan needs is {units(error.smallest_usage + room)}"
    if error.choices is not None:
        needs += f", most of it for {_consumers(problem, error.choices)}"
    return (
        f"no plan fits in {units(limit)} per device on the mesh {mesh_text(problem.space.mesh)}{needs}: raise "
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


def _consumers(problem: Problem, choices: Sequence[int]) -> str:
    """What takes the most memory."""
    used: dict[str, float] = {}
    for node, size in problem.shares(problem.usage, choices).items():
        name = str(node.meta.get("key", node.name))
        used[name] = used.get(name, 0.0) + size
    most = sorted(used.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]
    return ", ".join(f"{name.partition('#')[0].strip('/')} ({units(size)})" for name, size in most)
