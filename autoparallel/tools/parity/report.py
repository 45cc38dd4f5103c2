"""The report of ``verify()``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoparallel.comm.world import mesh_text
from autoparallel.plan import Plan
from autoparallel.text import Block, Table, plain_text

SHOWN = 12
"""How many differences a report lists."""

WIDTH = 120
"""Characters in a line of the report."""


class VerifyError(AssertionError):
    """A plan that does not compute what the plain model computes; the message is the report."""


@dataclass(frozen=True)
class Difference:
    """How far one tensor of the parallel program is from the reference's.

    Attributes:
        kind: "loss", "output", "gradient", "input gradient", "norm", "clipped gradient", "parameter", "buffer",
            "attribute" (a number or tensor in a plain attribute of a module), or "replicas" (0 where all ranks that
            should hold the same bits do, else inf).
        name: of the parameter, buffer, output or attribute.
        value: ``max |a - b| / max(1, max |b|)``; inf where shapes, dtypes or non-finite values differ.
        step: at which training step.
        layout: how the parameter lies on the mesh axes at rest.
        detail: both values, in short.
        size: ``max |b|``; a tensor smaller than the tolerance cannot fail.
        tolerance: how large the value may be; None where the report's tolerance counts.
    """

    kind: str
    name: str
    value: float
    step: int = 1
    layout: tuple[str, ...] = ()
    detail: str = ""
    size: float = float("inf")
    tolerance: float | None = None


@dataclass(frozen=True)
class Deviation:
    """The first operator whose result, or whose gradients, are off, although its operands, or its result's gradient,
    are right.

    Attributes:
        stage: "capture" (the plain model against the captured graph), "program" (the captured graph against what the
            ranks run), or "" where both agree: then what is wrong is done to gradients or parameters behind the
            operators, or only in a narrower dtype than float64.
        direction: "forward" or "backward".
        module: the path of its module.
        line: of the model's source: file, line, function, and the text.
        operator: its key in plans.
        rule: its sharding rule, and how it runs on each mesh axis.
        layouts: how each operand lies, and the result.
        value: by how much it is off, as in :class:`Difference`.
        detail: what is off.
    """

    stage: str
    direction: str = ""
    module: str = ""
    line: str = ""
    operator: str = ""
    rule: str = ""
    layouts: str = ""
    value: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        if not self.stage:
            return self.detail
        sides = {"capture": "the captured graph and the plain model", "program": "the ranks and the captured graph"}
        lines = [
            f"{sides[self.stage]} part in the {self.direction} at {self.operator or 'an operator that is not captured'}"
        ]
        lines.append(f"  module {self.module or 'the top level'}, {self.line}")
        lines += [f"  {name} {text}" for name, text in (("rule", self.rule), ("layouts", self.layouts)) if text]
        return "\n".join([*lines, f"  {self.detail} (off by {_number(self.value)})"])


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """What ``autoparallel.verify()`` found; ``print`` it.

    Attributes:
        model: the model's class.
        mesh: the mesh axes by name and size.
        plan: the plan that ran.
        dtype: what both runs computed in; None for the model's own dtypes.
        tolerance: the largest difference that passes; of measured ones, the largest.
        differences: everything that was compared, the worst first.
        reference: what the parallel program was compared with.
        layouts: for each parameter, how it lies on each mesh axis at rest.
        casts: where the model itself casts to a dtype narrower than ``dtype``.
        notes: what else a reader should know.
        seconds: how long it took.
        deviation: the first operator that deviates, where that was asked for and something failed.
    """

    model: str
    mesh: tuple[tuple[str, int], ...]
    plan: Plan
    dtype: torch.dtype | None
    tolerance: float
    differences: tuple[Difference, ...]
    reference: str
    layouts: dict[str, tuple[str, ...]]
    casts: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float
    deviation: Deviation | None = None

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.failed

    @property
    def failed(self) -> tuple[Difference, ...]:
        """What differs by more than the tolerance, the worst first."""
        return tuple(d for d in self.differences if not d.value <= self.limit_of(d))

    def limit_of(self, d: Difference) -> float:
        """The largest value of a difference that passes."""
        return self.tolerance if d.tolerance is None else d.tolerance

    @property
    def first_failed_step(self) -> int:
        """The first step of which something fails; replicas of parameters are compared after the last."""
        return min((d.step for d in self.failed if d.step), default=1)

    @property
    def measured(self) -> bool:
        """Whether every tensor has a tolerance of its own."""
        return any(d.tolerance is not None for d in self.differences)

    @property
    def worst(self) -> Difference:
        """The largest difference."""
        return self.differences[0]

    @property
    def sharded_parameters(self) -> tuple[str, ...]:
        """The parameters of which no rank holds the whole between steps."""
        many = [size > 1 for _, size in self.mesh]
        return tuple(
            name
            for name, layout in self.layouts.items()
            if any(m and not text.startswith("R") for m, text in zip(many, layout, strict=True))
        )

    @property
    def sharded_operators(self) -> tuple[str, ...]:
        """The operators that are cut over ranks, so that each computes a part of the activations."""
        many = [size > 1 for _, size in self.mesh]
        return tuple(
            key
            for key, modes in self.plan.operators.items()
            if any(m and mode.startswith("shard") for m, mode in zip(many, modes, strict=True))
        )

    def raise_if_failed(self) -> VerifyReport:
        """Returns the report itself.

        Raises:
            VerifyError: when something differs; the message is the report.
        """
        if not self.ok:
            raise VerifyError(f"\n{self}")
        return self

    def __str__(self) -> str:
        return plain_text(*self._blocks(), width=WIDTH)

    __repr__ = __str__

    def _verdict(self) -> str:
        """Whether everything agrees, in a line."""
        if self.ok:
            return f"PASSED: all {len(self.differences)} tensors agree to {self._limits} ({self.seconds:.1f} s)"
        failed, worst = self.failed, self.failed[0]
        text = f"FAILED: {len(failed)} of {len(self.differences)} tensors differ by more than {self._limits}"
        return f"{text}, the worst is {f'{worst.kind} {worst.name}'.strip()} ({self.seconds:.1f} s)"

    def _blocks(self) -> list[Block]:
        dtype = str(self.dtype).removeprefix("torch.") if self.dtype is not None else "its own dtypes"
        blocks: list[Block] = [
            f"{self.model} on the mesh {mesh_text(self.mesh)}, plan {self.plan.origin}, {dtype}",
            f"compared with {self.reference}",
            f"sharded: {len(self.sharded_parameters)} of {len(self.layouts)} parameters, "
            f"{len(self.sharded_operators)} of {len(self.plan.operators)} operators with their activations",
            self._summary(),
            *self._failures(),
        ]
        if self.deviation is not None:
            blocks += [str(self.deviation), ""]
        return [*blocks, *(f"note: {note}" for note in self._notes()), self._verdict()]

    def _summary(self) -> Table:
        """One row for each kind of quantity, the worst first."""
        kinds: dict[str, list[Difference]] = {}
        for d in self.differences:
            kinds.setdefault(d.kind, []).append(d)
        rows = []
        for kind, differences in kinds.items():
            worst = next((d for d in differences if not d.value <= self.limit_of(d)), differences[0])
            where = self._where(worst) if worst.value > 0 else ""
            rows.append((kind, str(len(differences)), _number(worst.value), where))
        numbers = ("tensors", "largest difference")
        return Table(("compared", *numbers, "where"), rows, right=numbers)

    def _failures(self) -> list[Block]:
        """What differs by more than its tolerance, the worst first."""
        failed, numbers = self.failed, ("difference", "tolerance") if self.measured else ("difference",)
        if not failed:
            return []
        rows = []
        for d in failed[:SHOWN]:
            values = (d.value, self.limit_of(d))[: len(numbers)]
            rows.append((*map(_number, values), f"{d.kind} {self._where(d)}", d.detail, " ".join(d.layout)))
        title = f"{len(failed)} of {len(self.differences)} differ by more than {self._limits}"
        title += f"; the worst {SHOWN}" if len(failed) > SHOWN else ""
        return [title, Table((*numbers, "what", "found", "at rest"), rows, right=numbers)]

    @property
    def _limits(self) -> str:
        return f"what rounding moves (up to {self.tolerance:.1e})" if self.measured else f"{self.tolerance:g}"

    def _where(self, d: Difference) -> str:
        several = max(x.step for x in self.differences) > 1 and d.step
        return d.name + (f" (step {d.step})" if several else "")

    def _notes(self) -> list[str]:
        notes = list(self.notes)
        if self.casts:
            shown = "; ".join(self.casts[:4]) + (f"; and {len(self.casts) - 4} more" if len(self.casts) > 4 else "")
            notes.append(f"the model itself casts to a narrower dtype, which limits the agreement ({shown})")
        tiny = sorted({d.name for d in self.differences if d.kind == "gradient" and d.size <= self.limit_of(d)})
        if tiny:
            names = ", ".join(tiny[:3]) + (f" and {len(tiny) - 3} more" if len(tiny) > 3 else "")
            notes.append(f"gradients that are zero, or too small to tell apart from zero: {names}")
        several = any(size > 1 for _, size in self.mesh)
        if several and not self.sharded_parameters and not self.sharded_operators:
            notes.append("nothing is sharded: every rank computes everything, so this says little about the plan")
        if self.plan.unruled:
            names = ", ".join(self.plan.unruled)
            notes.append(f"operators without a sharding rule run replicated: {names}")
        return notes


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
