"""Programs on two ranks: many in one call, so that processes are started once."""

from __future__ import annotations

import dataclasses
import functools

import autoparallel
from tests.capture.registry import programs
from tests.capture.runner import Program, verdict
from tests.distributed import run_distributed
from tests.runtime.support import mesh_of

PLANS = ("fsdp", "tensor_parallel")


def chosen() -> list[Program]:
    """Those that also run on two ranks."""
    return [p for p in programs() if p.ranks]


def verdicts(names: list[str], plan: str) -> dict[str, list[str]]:
    """For each program the verdicts of both ranks."""
    ranks = run_distributed(_verdicts, names, plan, world_size=2, timeout=30.0 + 20.0 * len(names))
    return {name: [rank[name] for rank in ranks] for name in names}


def verdict_of(name: str) -> str:
    """The verdict of one program on one rank."""
    return verdict(next(p for p in programs() if p.name == name))


def _verdicts(names: list[str], plan: str) -> dict[str, str]:
    table = {p.name: p for p in programs()}
    return {name: _verdict(table[name], plan) for name in names}


def _verdict(program: Program, plan: str) -> str:
    options = dict(program.options)
    plan = str(options.pop("plan", plan))
    wrap = functools.partial(autoparallel.compile, mesh=mesh_of(2), plan=plan)
    return verdict(dataclasses.replace(program, options=options), wrap)
