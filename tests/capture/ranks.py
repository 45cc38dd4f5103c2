"""Programs on one rank and on two: many in one call."""

from __future__ import annotations

import dataclasses
import functools

import torch

import autoparallel
from autoparallel.tools.processes import Place, Pool, Process
from tests.capture.registry import programs
from tests.capture.runner import Program, verdict
from tests.devices import DEVICE, send_through_host
from tests.distributed import run_distributed
from tests.runtime.support import mesh_of
from tests.templates import start_from_template

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


def verdicts_on_one_rank(names: list[str]) -> dict[str, str]:
    """For each program its verdict on one rank, two programs at a time: each process takes the next that is left."""
    places = [Place(f"process {number}", f"group {number}", 0, 1) for number in range(2)]
    timeout = 60.0 + 20.0 * len(names)
    with Pool(places, None, start_from_template, timeout, group_timeout=timeout) as pool:
        taken = pool.run(_take_programs, names, timeout)
    return {name: words for verdicts in taken for name, words in verdicts.items()}


def _take_programs(process: Process, names: list[str]) -> dict[str, str]:
    verdicts: dict[str, str] = {}
    while (number := process.shared.add("taken", 1)) <= len(names):
        torch.manual_seed(0)
        verdicts[names[number - 1]] = verdict_of(names[number - 1])
    return verdicts


def _verdicts(names: list[str], plan: str) -> dict[str, str]:
    if DEVICE != "cpu":
        send_through_host()
    table = {p.name: p for p in programs()}
    return {name: _verdict(table[name], plan) for name in names}


def _verdict(program: Program, plan: str) -> str:
    options = dict(program.options)
    plan = str(options.pop("plan", plan))
    wrap = functools.partial(autoparallel.compile, mesh=mesh_of(2), plan=plan)
    return verdict(dataclasses.replace(program, options=options), wrap)
