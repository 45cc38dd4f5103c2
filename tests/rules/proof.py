"""Proof by execution: an operator run in every way that its rule allows gives what it gives whole.

An example is one call of an operator. For every way to run it (every mode on an axis of three ranks, pairs of modes on
a mesh of two by three) the call is localised by the pass that localises programs, its operands are cut as the typing
says, all ranks run as threads, and what they hold together is compared with the whole call: the result, and the
gradient of every operand. Nothing is redistributed, so nothing can mend a wrong rule.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autoparallel._torch.export import make_fake_mode
from autoparallel.comm import simulate
from autoparallel.comm.simulate import coordinates
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.insert_collectives import insert_collectives
from autoparallel.passes.specification import specify_program
from autoparallel.passes.verify_placements import verify_placements
from autoparallel.placements import Layout, dual_layout, format_layout
from autoparallel.placements.modes import Mode
from autoparallel.placements.redistribution import Redistributor
from autoparallel.rules import rule_for
from autoparallel.rules.calls import may_have_gradient, shape_of, tensor_operands
from autoparallel.rules.typing import Typed
from autoparallel.rules.ways import call_modes, typed_call

TOLERANCE = 1e-10
AXIS = (3,)
MESH = (2, 3)
NAMES = ("dp", "tp")
MOST_PAIRS = 8


class Disproved(AssertionError):
    """A rule whose local programs do not compute what the operator computes."""


@dataclass(frozen=True, eq=False)
class Example:
    """One call of an operator.

    Attributes:
        target, args, kwargs: the call, on real tensors (of the global shapes).
        constant: the tensor operands, by position, that never carry a gradient although they could.
        label: tells the examples of one operator apart.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    constant: frozenset[int] = frozenset()
    label: str = ""

    def __str__(self) -> str:
        return f"{self.target}{f' [{self.label}]' if self.label else ''}"

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor operands, in the order of the call."""
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]


@dataclass
class Proof:
    """What was proved: how often modes of each kind were right, and how often each operator was right while sharded.

    ``factors`` are those that each example was right with while they were sharded; ``skipped`` counts the ways in
    which sizes do not divide.
    """

    counts: dict[str, int] = field(default_factory=dict)
    sharded: dict[Any, int] = field(default_factory=dict)
    factors: dict[Example, set[str]] = field(default_factory=dict)
    skipped: int = 0

    def add(self, example: Example, modes: Sequence[Mode]) -> None:
        """Counts one way of a call that was right."""
        for mode in modes:
            self.counts[mode.kind] = self.counts.get(mode.kind, 0) + 1
            if mode.kind == "shard":
                self.sharded[example.target] = self.sharded.get(example.target, 0) + 1
                self.factors.setdefault(example, set()).add(mode.factor)

    @property
    def total(self) -> int:
        return sum(self.counts.values())


# --------------------------------------------------------------------------------------------- one call as a graph


class Call:
    """An example as a graph, with the meta data that a captured graph has."""

    def __init__(self, example: Example, differentiable: Sequence[bool], differentiates: bool) -> None:
        self.example, self.differentiable = example, list(differentiable)
        self.differentiates = differentiates and any(differentiable)
        with make_fake_mode() as mode:
            self.fakes = [mode.from_tensor(x.detach(), static_shapes=True) for x in example.tensors]
            args, kwargs = fill((example.args, example.kwargs), self.fakes)
            self.value = example.target(*args, **kwargs)

    def graph(self) -> tuple[fx.GraphModule, fx.Node]:
        """A new graph of placeholders and the one call, and the call's node."""
        graph = fx.Graph()
        inputs = [graph.placeholder(f"x{i}") for i in range(len(self.fakes))]
        args, kwargs = fill((self.example.args, self.example.kwargs), inputs)
        node = graph.call_function(self.example.target, args, kwargs)
        graph.output((node,))
        flags = (*self.differentiable, self.differentiates)
        for n, value, flows in zip((*inputs, node), (*self.fakes, self.value), flags, strict=True):
            n.meta |= {"val": value, "differentiable": flows, "backward": flows, "key": n.name, "module": ""}
        return fx.GraphModule(nn.Module(), graph), node


def fill(structure: Any, values: Sequence[Any]) -> Any:
    """The structure with its tensors replaced, in order."""
    rest = iter(values)
    return pytree.tree_map(lambda x: next(rest) if isinstance(x, Tensor) else x, structure)


# ------------------------------------------------------------------------------------------- cutting and combining


def divides(shape: Sequence[int], layout: Layout, mesh: Sequence[int]) -> bool:
    """Whether the layout cuts the shape evenly."""
    pieces = [1] * len(shape)
    for placement, n in zip(layout, mesh, strict=True):
        if placement.kind == "S":
            pieces[placement.dim] *= n
    return all(size % n == 0 for size, n in zip(shape, pieces, strict=True))


def cut(value: Tensor, layout: Layout, mesh: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """What each rank holds of a global value: the first axis cuts first, summands are random.

    Along an axis that holds the whole (Invariant or Replicate) all ranks hold the same bits, also of summands.
    """
    pieces = {(): value}
    for placement, n in zip(layout, mesh, strict=True):
        if placement.kind in "SP":
            pieces = {
                (*at, i): part
                for at, whole in pieces.items()
                for i, part in enumerate(_cut_once(whole, placement.kind, placement.dim, n, generator))
            }
    kept = [axis for axis, placement in enumerate(layout) if placement.kind in "SP"]
    return [pieces[tuple(at[axis] for axis in kept)].clone() for at in coordinates(mesh)]


def _cut_once(value: Tensor, kind: str, dim: int, n: int, generator: torch.Generator) -> list[Tensor]:
    if kind == "S":  # what torch.chunk gives no piece of is empty
        parts = list(value.chunk(n, dim))
        return parts + [value.narrow(dim, value.shape[dim], 0)] * (n - len(parts))
    if value.dtype == torch.bool:
        raise Disproved("a tensor of truth values is Partial")
    if value.is_floating_point() or value.is_complex():
        parts = [torch.randn(value.shape, generator=generator, dtype=value.dtype) for _ in range(n - 1)]
    else:  # of narrow integers that overflow, if a call makes them wider
        parts = [torch.empty_like(value).random_(generator=generator) for _ in range(n - 1)]
    return [*parts, value - sum(parts)]


def combine(values: Sequence[Tensor], layout: Layout, mesh: Sequence[int], what: str) -> Tensor:
    """The global value of what the ranks hold. Ranks that must hold the same must hold the same bits."""
    try:
        return simulate.combine(values, layout, mesh)
    except simulate.ReplicasDiffer as error:
        raise Disproved(f"{what} lies as {format_layout(layout)}, but {error}") from None


# ------------------------------------------------------------------------------------------------------- the proof


def prove(example: Example, proof: Proof | None = None) -> Proof:
    """Runs the example in every way its rule allows; raises ``Disproved`` with all ways that are wrong."""
    proof = proof if proof is not None else Proof()
    wrong = prove_all([example], proof)
    if wrong:
        raise Disproved("\n".join(wrong))
    return proof


def prove_all(examples: Sequence[Example], proof: Proof) -> list[str]:
    """Runs all examples in every way their rules allow, and returns what was wrong."""
    on_axis: list[Run] = []
    on_mesh: list[Run] = []
    for example in examples:
        for i, flags in enumerate(_differentiable_sets(example)):
            call = Call(example, flags, _flows(example, flags))
            reference = Reference(call)
            modes = [t.mode for t in ways_of(call)]
            on_axis += [Run(call, reference, (mode,), AXIS) for mode in modes]
            if i == 0:
                on_mesh += [Run(call, reference, pair, MESH) for pair in _pairs(modes)]
    return execute(on_axis, AXIS, proof) + execute(on_mesh, MESH, proof)


def _pairs(modes: Sequence[Mode]) -> list[tuple[Mode, ...]]:
    """Pairs of modes for a mesh: every factor on both axes, and a sample of the others, always the same."""
    twice: list[tuple[Mode, ...]] = [(m, m) for m in modes if m.kind == "shard"]
    rest = [pair for pair in itertools.product(modes, repeat=2) if pair not in twice]
    return twice + random.Random(0).sample(rest, min(len(rest), max(MOST_PAIRS - len(twice), 4)))


def ways_of(call: Call) -> list[Typed]:
    """Every way in which the call may run on one axis."""
    return call_modes(call.graph()[1])


def _differentiable_sets(example: Example) -> list[list[bool]]:
    """Which operands carry a gradient: all that can, then each alone, then none."""
    tensors = example.tensors
    can = [may_have_gradient(x) and i not in example.constant for i, x in enumerate(tensors)]
    sets = [can]
    if sum(can) > 1:
        sets += [[i == j for j in range(len(can))] for i in range(len(can)) if can[i]]
    if any(can):
        sets.append([False] * len(can))
    return sets


def _flows(example: Example, flags: Sequence[bool]) -> bool:
    inputs = [x.detach().clone().requires_grad_(f) for x, f in zip(example.tensors, flags, strict=True)]
    args, kwargs = fill((example.args, example.kwargs), inputs)
    return bool(example.target(*args, **kwargs).requires_grad)


class Reference:
    """The whole call: its result, a cotangent, and the gradients."""

    def __init__(self, call: Call) -> None:
        example = call.example
        self.generator = torch.Generator().manual_seed(7)
        inputs = [
            x.detach().clone().requires_grad_(f) for x, f in zip(example.tensors, call.differentiable, strict=True)
        ]
        args, kwargs = fill((example.args, example.kwargs), inputs)
        result = example.target(*args, **kwargs)
        self.result = result.detach()
        self.gradients: list[Tensor | None] = [None] * len(inputs)
        self.cotangent = None
        if call.differentiates:
            self.cotangent = torch.randn(result.shape, generator=self.generator, dtype=result.dtype)
            wanted = [x for x in inputs if x.requires_grad]
            found = iter(torch.autograd.grad(result, wanted, self.cotangent, allow_unused=True))
            self.gradients = [next(found) if x.requires_grad else None for x in inputs]


class Run:
    """The call as ``modes`` says on the axes of ``mesh``: the local program, what each rank is given, and the check."""

    def __init__(self, call: Call, reference: Reference, modes: Sequence[Mode], mesh: Sequence[int]) -> None:
        self.call, self.reference, self.modes, self.mesh = call, reference, tuple(modes), tuple(mesh)
        self.module, node = call.graph()
        self.needs, self.result = typed_call(node, modes)
        shapes = [tuple(shape_of(o)) for o in tensor_operands(node)]
        cuts = [*zip(shapes, self.needs, strict=True), (tuple(shape_of(node)), self.result)]
        self.divisible = all(divides(shape, layout, mesh) for shape, layout in cuts)
        self.node = node

    def __str__(self) -> str:
        layouts = "; ".join(format_layout(n) for n in self.needs)
        return (
            f"{self.call.example} as {', '.join(map(str, self.modes))} on {self.mesh}, "
            f"rule {rule_for(self.node)} ({layouts} -> {format_layout(self.result)})"
        )

    def localize(self) -> None:
        """Makes the local program and cuts the operands and the cotangent."""
        names = NAMES[-len(self.mesh) :]
        specification = specify_program(
            self.module,
            modes={self.node.meta["key"]: self.modes},
            placeholders={f"x{i}": layout for i, layout in enumerate(self.needs)},
            outputs=[self.result],
            axes=[*zip(names, self.mesh, strict=True)],
            prefix="proof",
            sizes=Sizes({}),
        )
        redistributor = _redistributor(self.mesh)
        insert_collectives(self.module, specification=specification, shared={}, redistributor=redistributor)
        self.module.recompile()
        verify_placements(self.module, specification)
        generator = self.reference.generator
        tensors = self.call.example.tensors
        self.pieces = [cut(x.detach(), n, self.mesh, generator) for x, n in zip(tensors, self.needs, strict=True)]
        self.cotangents = None
        if self.reference.cotangent is not None:
            self.cotangents = cut(self.reference.cotangent, dual_layout(self.result), self.mesh, generator)

    def run(self, rank: int) -> tuple[Tensor, list[Tensor | None]]:
        """One rank's result and gradients."""
        inputs = [p[rank] for p in self.pieces]
        gradients: list[Tensor | None] = [None] * len(inputs)
        if self.cotangents is None:
            return self.module(*inputs)[0].detach(), gradients
        wanted = [i for i, flows in enumerate(self.call.differentiable) if flows]
        for i in wanted:
            inputs[i].requires_grad_()
        (result,) = self.module(*inputs)
        if result.requires_grad:
            found = torch.autograd.grad(result, [inputs[i] for i in wanted], self.cotangents[rank], allow_unused=True)
            for i, gradient in zip(wanted, found, strict=True):
                gradients[i] = gradient
        return result.detach(), gradients

    def check(self, ranks: Sequence[tuple[Tensor, list[Tensor | None]]]) -> None:
        """Compares what the ranks hold together with the whole call."""
        what = "the result"
        _compare(what, combine([r[0] for r in ranks], self.result, self.mesh, what), self.reference.result)
        if self.cotangents is None:
            return
        for i, whole in enumerate(self.reference.gradients):
            if not self.call.differentiable[i]:
                continue
            what = f"the gradient of operand {i}"
            parts = [torch.zeros_like(self.pieces[i][k]) if r[1][i] is None else r[1][i] for k, r in enumerate(ranks)]
            found = combine(parts, dual_layout(self.needs[i]), self.mesh, what)
            _compare(what, found, whole if whole is not None else torch.zeros_like(found))


def never_sharded(examples: Sequence[Example], proof: Proof) -> list[str]:
    """The factors that a rule lets be sharded, but whose sizes divided on no mesh of the proof."""
    found = []
    for example in examples:
        call = Call(example, [x.is_floating_point() for x in example.tensors], True)
        declared = {t.mode.factor for t in ways_of(call) if t.mode.kind == "shard"}
        found += [f"{example}: {factor}" for factor in sorted(declared - proof.factors.get(example, set()))]
    return found


def execute(runs: Sequence[Run], mesh: Sequence[int], proof: Proof) -> list[str]:
    """Executes all runs on one simulated mesh, one after another; returns what was wrong."""
    possible = [run for run in runs if run.divisible]
    proof.skipped += len(runs) - len(possible)
    wrong: dict[Run, str] = {}
    for run in possible:
        try:
            run.localize()
        except Exception as error:
            wrong[run] = f"{run}: {error}"
    ready = [run for run in possible if run not in wrong]

    def rank_program(rank: int) -> list[Any]:
        results: list[Any] = []
        for run in ready:
            try:
                results.append(run.run(rank))
            except threading.BrokenBarrierError:
                raise
            except Exception as error:  # the other ranks fail alike, or wait for this one in vain, which is told, too
                results.append(error)
        return results

    ranks = simulate.simulate(rank_program, mesh, NAMES[-len(mesh) :]) if ready else []
    for i, run in enumerate(ready):
        try:
            results = [r[i] for r in ranks]
            for result in results:
                if isinstance(result, Exception):
                    raise result
            run.check(results)
            proof.add(run.call.example, run.modes)
        except Exception as error:
            wrong[run] = f"{run}: {error}"
    return [wrong[run] for run in possible if run in wrong]


def _compare(what: str, found: Tensor, expected: Tensor) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Disproved(
            f"{what} is {found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
    if not torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        raise Disproved(f"{what} is wrong by {float((found - expected).abs().max()):.3g}")


_REDISTRIBUTORS: dict[tuple[int, ...], Redistributor] = {}


def _redistributor(mesh: Sequence[int]) -> Redistributor:
    """One for each mesh: its tables of prices are kept by shape."""
    return _REDISTRIBUTORS.setdefault(tuple(mesh), Redistributor(mesh, lambda kind, axes, size: 1e-6 + 1e-12 * size))


__all__ = [
    "AXIS", "MESH", "Call", "Disproved", "Example", "Proof", "Reference", "Run", "combine", "cut", "divides",
    "execute", "fill", "never_sharded", "prove", "prove_all", "ways_of",
]  # fmt: skip
