"""Whether a wrong program would be noticed: emitted programs with one fault each, and who objects to them.

    python -m benchmarks.mutations [--models mlp gpt norm moe functions] [--every 1]

A mutant is a rank's program of which one thing is changed: a collective is dropped or is another one or goes over
another axis, a layout is written wrongly, an argument stays global, a mean loses its divisor, a detach is lost, the
reduction of one gradient is dropped, moved or changed.  It is noticed when ``verify_placements`` or the check of the
parameters' ways refuses it, or else when, with all ranks as threads of this process, an output or the gradient of a
parameter differs in float64 by more than 1e-9 from the captured graph's, is None where that has one, or the reverse,
or when it does not run at all.
What changes nothing that runs, as its structure says, is equivalent and does not count; it is run all the same, and a
difference would make it count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

from autoparallel.comm.collectives import extent_of, start_transfers
from autoparallel.comm.groups import group_name
from autoparallel.comm.simulate import combine, coordinates, simulate
from autoparallel.graph.captured import Captured
from autoparallel.graph.sizes import Sizes
from autoparallel.hardware import profile_for
from autoparallel.operators import RandomState, draw_from
from autoparallel.passes.hoist_parameter_chains import ParameterChain, hoist_parameter_chains
from autoparallel.passes.settle_interleaving import settle_interleaving
from autoparallel.passes.specification import PlacementError
from autoparallel.passes.verify_placements import verify_placements
from autoparallel.placements import Layout, chunk, dual_layout
from autoparallel.placements.redistribution import Redistributor, Step
from autoparallel.plan import Plan
from autoparallel.planner.draft import call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import prepare
from autoparallel.planner.request.presets import Preset
from autoparallel.planner.request.request import Request
from autoparallel.program.build import lay_out
from autoparallel.tools.parity.recording import arguments_of
from autoparallel.tools.parity.task import Task, make_task
from benchmarks.mutants import Mutant, chain_mutants, graph_mutants
from benchmarks.mutation_models import MODELS

PREFIX = "mesh0"
PLANS: tuple[Preset, ...] = ("data_parallel", "fsdp", "tensor_parallel", "auto")
MESHES: tuple[tuple[int, ...], ...] = ((2,), (2, 2))
TOLERANCE = 1e-9
OUTCOMES = ("verifier", "parity", "raises", "equivalent", "survives")
Named = tuple[str, Preset, tuple[int, ...]]
"""A program: its model, its plan and its mesh."""


@dataclass(frozen=True)
class Result:
    """What a program computes: its outputs, and the gradient of each parameter that has one, both whole."""

    outputs: list[Tensor]
    differentiable: list[bool]
    gradients: dict[str, Tensor]

    def differs(self, other: Result) -> bool:
        """Whether another result is not the same to ``TOLERANCE``."""
        if self.differentiable != other.differentiable or self.gradients.keys() != other.gradients.keys():
            return True
        pairs = [*zip(self.outputs, other.outputs, strict=True)]
        pairs += [(value, other.gradients[name]) for name, value in self.gradients.items()]
        return not all(_equal(a, b) for a, b in pairs)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _differentiate(outputs: Sequence[Any]) -> None:
    """Differentiates every output that can be, each element with a weight of its own."""
    sums = []
    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            weights = torch.arange(1, output.numel() + 1, dtype=output.dtype).view(output.shape) / output.numel()
            sums.append((output * weights).sum())
    if sums:
        torch.stack(sums).sum().backward()


class Program:
    """The program of one model under one plan on one mesh, and what the captured graph computes."""

    def __init__(self, model: str, plan: Preset, mesh: tuple[int, ...]) -> None:
        self.model, self.plan_name = model, plan
        made = MODELS[model]()
        args, kwargs = made.make_batch(0, 8)
        task = make_task(made.model, mesh, args, made.loss_fn, kwargs, plan=plan, dtype=torch.float64)
        self.task: Task = task
        batch = task.batch(1)
        self.axes, self.sizes = task.axes, tuple(size for _, size in task.axes)
        self.names = [name for name, _ in task.axes]
        profile = profile_for("cpu", None)
        request = Request(task.axes, profile, plan=plan, loss_fn=task.loss_fn)
        planner = Planner(task.model, request)
        call = call_of(batch.args, batch.kwargs, with_target=task.loss_fn is not None)
        captured = planner.capture(call)
        self.plan: Plan = planner.search(captured, call)
        prepare(request, captured, self.plan, call)
        modes = {key: self.plan.modes(key) for key in self.plan.operators}
        settle_interleaving(captured.module, modes, self.sizes)
        self.whole = captured.copy()
        self.arguments = arguments_of(captured, task, batch)
        parameters = {n: self.plan.at_rest(p) for n, p in captured.parameters.items() if p in self.plan.parameters}
        self.asked = lay_out(captured, self.plan, request.target(PREFIX), parameters)
        self.captured = captured
        self.redistributor: Redistributor = request.redistributor
        self.expected = self._run_whole()

    def _run_whole(self) -> Result:
        values = {name: _fresh(value) for name, value in self.arguments.items()}
        with draw_from(RandomState(1, 1)):
            results = _call(self.whole.module, values)
        _differentiate(results)
        gradients = {
            path: values[name].grad for name, path in self.whole.parameters.items() if values[name].grad is not None
        }
        tensors = [r for r in results if isinstance(r, Tensor)]
        return Result([t.detach() for t in tensors], [t.requires_grad for t in tensors], gradients)

    def hoisted(self, captured: Captured) -> list[ParameterChain]:
        """Takes the ways of parameters out of a program, as ``build_program`` does."""
        sizes = Sizes(captured.actual)
        return list(hoist_parameter_chains(captured.module, captured.parameters, self.redistributor, sizes).chains)

    def run(self, captured: Captured, chains: Sequence[ParameterChain], layouts: Sequence[Layout]) -> Result:
        """What a program without the ways of its parameters computes on all ranks."""
        captured.module.graph.lint()
        captured.module.recompile()

        def rank(index: int) -> tuple[list[Tensor], dict[str, Tensor]]:
            return _Rank(self, captured, chains, index).run()

        ranks = simulate(rank, self.sizes, self.names)
        outputs = [combine([r[0][i].detach() for r in ranks], layout, self.sizes) for i, layout in enumerate(layouts)]
        gradients = {}
        for chain in chains:
            parts = [r[1][chain.name] for r in ranks if chain.name in r[1]]
            if parts:
                gradients[chain.name] = combine(parts, chain.at_rest, self.sizes)
        return Result(outputs, [t.requires_grad for t in ranks[0][0]], gradients)

    def outcome(self, mutant: Mutant) -> str:
        """Who objects to a mutant: one of ``OUTCOMES``."""
        captured = self.captured.copy()
        try:
            if mutant.on_graph is not None:
                mutant.on_graph(captured.module.graph)
                verify_placements(captured.module, self.asked)
            layouts = _output_layouts(captured)
            chains = self.hoisted(captured)
            if mutant.on_chain is not None:
                chains = [mutant.on_chain(c) if c.name == mutant.key else c for c in chains]
                verify_placements(captured.module, self.asked, chains)
        except PlacementError:
            return "verifier"
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # fx prints the line of an error
                differs = self.run(captured, chains, layouts).differs(self.expected)
        except Exception:  # a program that does not run is noticed, whatever it says
            return "raises"
        if differs:
            return "parity"
        return "equivalent" if mutant.equivalent else "survives"

    def require_right(self) -> None:
        """The program without a fault computes what the captured graph does, or nothing can be told from the others."""
        captured = self.captured.copy()
        verify_placements(captured.module, self.asked)
        layouts = _output_layouts(captured)
        if self.run(captured, self.hoisted(captured), layouts).differs(self.expected):
            raise AssertionError(f"{self.model} under {self.plan_name} on {self.sizes} is wrong without a fault")

    def mutants(self) -> Iterator[Mutant]:
        """Every mutant of the program."""
        yield from graph_mutants(self.captured.graph, self.whole.graph, self.asked)
        yield from chain_mutants(self.hoisted(self.captured.copy()), self.asked)


class _Rank:
    """One rank of a program: gathers the parameters, runs it, and reduces the gradients."""

    def __init__(self, program: Program, captured: Captured, chains: Sequence[ParameterChain], index: int) -> None:
        self.program, self.captured, self.chains = program, captured, chains
        self.at = coordinates(program.sizes)[index]

    def run(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The outputs as this rank has them, and the gradients of its parts of the parameters."""
        values = {n: _fresh(v) for n, v in self.program.arguments.items() if n not in self.captured.parameters}
        placeholders = {path: name for name, path in self.captured.parameters.items()}
        for chain in self.chains:
            rest = _part(self.program.arguments[placeholders[chain.name]], chain.at_rest, self.at, self.program.sizes)
            for name, path in zip(chain.placeholders, chain.paths, strict=True):
                values[name] = self._along(rest, path).clone().requires_grad_(chain.trainable)
        with draw_from(RandomState(1, 1)):
            results = _call(self.captured.module, values)
        _differentiate(results)
        gradients = {}
        for chain in self.chains:
            grads = [values[name].grad for name in chain.placeholders]
            uses = zip(grads, chain.uses, strict=True)
            made = [self._to(grad, chain, dual_layout(use)) for grad, use in uses if grad is not None]
            if made:
                gradients[chain.name] = self._along(sum(made[1:], made[0]), (*chain.each, *chain.sync))
        return [r for r in results if isinstance(r, Tensor)], gradients

    def _along(self, value: Tensor, steps: Sequence[Step]) -> Tensor:
        names = self.program.names
        axes = [group_name(PREFIX, names, (axis,)) for axis in range(len(names))]
        for step in steps:
            group = group_name(PREFIX, names, step.axes)
            (value,) = start_transfers([value], [step.src], [step.dst], group, [extent_of(step, axes)])()
        return value

    def _to(self, grad: Tensor, chain: ParameterChain, layout: Layout) -> Tensor:
        """A use's gradient in the layout in which those of all uses are added up."""
        path = self.program.redistributor.path
        steps = path(layout, chain.gradient_layout, chain.shape, chain.dtype.itemsize, True, False, uneven=True)
        return self._along(grad, steps)


def _call(module: fx.GraphModule, values: Mapping[str, Any]) -> list[Any]:
    names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    with torch.enable_grad():
        return list(module(*(values[name] for name in names)))


def _fresh(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _part(value: Tensor, layout: Layout, at: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """What a rank holds of a parameter."""
    value = value.detach()
    for placement, index, n in zip(layout, at, sizes, strict=True):
        if placement.kind == "S":
            value = value.narrow(placement.dim, *chunk(value.shape[placement.dim], n, index))
    return value.clone()


def _output_layouts(captured: Captured) -> list[Layout]:
    results: Any = captured.graph.output_node().args[0]
    return [r.meta["placements"] for r in results if isinstance(r.meta.get("val"), Tensor)]


@dataclass
class Score:
    """How many mutants met which end, by kind; and the survivors."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)

    def add(self, program: Program, mutant: Mutant, outcome: str) -> None:
        """Counts one mutant."""
        row = self.counts.setdefault(mutant.kind, dict.fromkeys(OUTCOMES, 0))
        row[outcome] += 1
        if outcome == "survives":
            mesh = "x".join(map(str, program.sizes))
            self.survivors.append(
                f"{mutant.kind}: {program.model}, {program.plan_name} on {mesh}, {mutant.key}: {mutant.detail}"
            )

    def total(self, outcome: str) -> int:
        """How many mutants met an end."""
        return sum(row[outcome] for row in self.counts.values())

    @property
    def noticed(self) -> float:
        """The part of the mutants that count which was noticed."""
        noticed = sum(map(self.total, ("verifier", "parity", "raises")))
        return noticed / max(1, noticed + self.total("survives"))

    def table(self) -> Table:
        """One row for each kind of mutant."""
        table = Table(title=f"{self.noticed:.2%} of the mutants are noticed")
        table.add_column("kind")
        for title in ("mutants", "by the verifier", "by parity", "by an error", "equivalent", "survive"):
            table.add_column(title, justify="right")
        rows = {**self.counts, "all": {outcome: self.total(outcome) for outcome in OUTCOMES}}
        for kind, row in rows.items():
            counted = sum(row.values()) - row["equivalent"]
            table.add_row(kind, str(counted), *(str(row[outcome]) for outcome in OUTCOMES))
        return table


def score(programs: Sequence[Named], every: int = 1, console: Console | None = None) -> Score:
    """Runs the mutants of some programs; of each kind only one of ``every``."""
    result = Score()
    for model, plan, mesh in programs:
        start = time.perf_counter()
        program = Program(model, plan, mesh)
        program.require_right()
        seen: dict[str, int] = {}
        count = 0
        for mutant in program.mutants():
            seen[mutant.kind] = seen.get(mutant.kind, -1) + 1
            if seen[mutant.kind] % every == 0:
                result.add(program, mutant, program.outcome(mutant))
                count += 1
        if console is not None:
            shape = "x".join(map(str, mesh))
            console.print(f"{model}, {plan} on {shape}: {count} mutants, {time.perf_counter() - start:.0f} s")
    return result


def main() -> None:
    """Runs the mutants of all programs that are asked for and prints the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], choices=[math.prod(m) for m in MESHES])
    parser.add_argument("--every", type=int, default=1, help="runs one of so many mutants of each kind")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=150)
    meshes = [mesh for mesh in MESHES if math.prod(mesh) in given.ranks]
    programs = [(model, plan, mesh) for model in given.models for mesh in meshes for plan in given.plans]
    result = score(programs, given.every, console)
    console.print(result.table())
    for survivor in result.survivors:
        console.print(survivor, highlight=False)


if __name__ == "__main__":
    main()
