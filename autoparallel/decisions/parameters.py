"""How a parameter lies, and what is refused of a plan."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoparallel.placements import parse_layout


class PlanError(ValueError):
    """A plan that cannot be made, or that does not fit the model or the mesh."""


GATHERS = ("per_use", "per_microbatch", "per_step")


REDUCTIONS = ("per_step", "per_microbatch", "across_replicas_per_step")


@dataclass(frozen=True)
class ParameterPlan:
    """How a parameter lies at rest, when it is gathered, and when its gradient is reduced.

    Attributes:
        at_rest: its layout between steps, as ``placements.format_layout`` writes it.
        gather: ``"per_use"`` gathers before each use and again in the backward, keeping nothing (ZeRO-3);
            ``"per_microbatch"`` gathers once a call and keeps the result for the backward; ``"per_step"`` keeps it for
            the calls that follow under ``no_sync()``, too (ZeRO-1 and -2).
        reduce: of several microbatches, ``"per_step"`` reduces the sum of their gradients, ``"per_microbatch"`` each
            gradient, so that the sum lies as the parameter does, and ``"across_replicas_per_step"`` each over the
            axes that shard the parameter and the sum across the others.
        rows: a vocabulary's with padding, where it is used so (see ``passes.pad_vocabulary``); None for its own.
    """

    at_rest: str
    gather: str = "per_step"
    reduce: str = "per_step"
    rows: int | None = None

    def require_valid(self, name: str, axes: int) -> None:
        """Raises PlanError for what no parameter can be; ``axes`` is the number of mesh axes."""
        layout = parse_layout(self.at_rest)
        if len(layout) != axes or any(p.kind not in ("I", "S") for p in layout):
            raise PlanError(
                f"{name} cannot lie as {self.at_rest!r} at rest: expected I or S<dim> for each of {axes} mesh axes"
            )
        if self.gather not in GATHERS:
            raise PlanError(f"{name} cannot be gathered {self.gather!r}: expected one of {', '.join(GATHERS)}")
        if self.reduce not in REDUCTIONS:
            raise PlanError(f"{name} cannot be reduced {self.reduce!r}: expected one of {', '.join(REDUCTIONS)}")
        if self.rows is not None and not (isinstance(self.rows, int) and self.rows > 0):
            raise PlanError(f"{name} cannot be used with {self.rows!r} rows: expected their number, or null")


def padded_rows(parameters: Mapping[str, ParameterPlan]) -> dict[str, int]:
    """The parameters that are used with rows of padding, and with how many rows in all."""
    return {name: p.rows for name, p in parameters.items() if p.rows is not None}


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern means."""
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]
