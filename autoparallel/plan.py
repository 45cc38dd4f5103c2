"""A plan: a small, reviewable file, keyed by module path and operator, that can say what it decides."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoparallel.comm.world import mesh_text
from autoparallel.data import from_json, to_json
from autoparallel.decisions.decisions import FULL, Decisions, Reasons
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.prediction import LatePrediction
from autoparallel.report.comparison import plan_report
from autoparallel.report.diff import diff_plans
from autoparallel.report.explain import explain_plan
from autoparallel.report.reasons import explain_module
from autoparallel.report.trace import trace_of

FORMAT = 1


def _renew(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a plan that was written when layers were recomputed whole or not at all."""
    layers = data.get("recompute")
    return {**data, "recompute": dict.fromkeys(layers, FULL)} if isinstance(layers, list) else data


@dataclass(frozen=True, repr=False)
class Plan(Decisions):
    """Every decision about one model on one mesh (see :class:`Decisions`), to be read, saved and run again."""

    def with_prediction(self, late: LatePrediction) -> Plan:
        """The same plan with its predicted traffic, time and memory."""
        return replace(self, late=late)

    def with_reasons(self, reasons: Reasons) -> Plan:
        """The same plan, able to say what the next best would have cost."""
        return replace(self, reasons=reasons)

    def explain(self, module: str | None = None, *, passes: bool = False) -> str:
        """The plan in words and tables: layouts, collectives and bytes per step, predicted time and memory.

        Args:
            module: instead explains what was decided about the modules and parameters of this pattern, such as
                ``"layers.0.mlp"`` or ``"layers.*.mlp.up"``: each decision, and what the next best would cost, for all
                of them together. Each alternative is a search of its own, on this rank alone.
            passes: instead prints the program before and after each pass that makes a rank's program of the captured
                graph, with how long it took. The program is built once more for that, on this rank alone.

        Raises:
            PlanError: when nothing matches, or the plan was loaded from a file and is not compiled yet.
        """
        if passes:
            if self.staging is not None or self.reasons is None:
                raise PlanError(
                    "the passes of a program are shown for the plan of a compiled model (model.plan), or one that was "
                    "made just now, and not for a pipeline or microbatches"
                )
            return self.reasons.history(self)
        if module is not None:
            return explain_module(self, module)
        return explain_plan(self)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.origin!r} on the mesh {mesh_text(self.whole_mesh)}: {len(self.parameters)} parameters, "
            f"{len(self.operators)} operators>"
        )

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        """The report as a notebook shows it: in a frame of its own, so that neither's style reaches the other."""
        return (
            f'<iframe srcdoc="{html.escape(plan_report(self))}" sandbox width="100%" height="700" '
            'style="border: 0"></iframe>'
        )

    def diff(self, other: Plan) -> str:
        """What another plan decides differently, and what that is predicted to change, in words and tables."""
        return diff_plans(self, other)

    def to_json(self) -> str:
        """The decisions as JSON text."""
        return to_json(self, FORMAT)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads a plan.

        Raises:
            PlanError: when the text is not a plan of this format.
        """
        try:
            plan: Plan = from_json(Plan, text, FORMAT, _renew)
            plan.require_valid()
        except PlanError:
            raise
        except ValueError as error:
            raise PlanError(f"not a plan: {error}") from error
        return plan

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(self.to_json())

    def save_trace(self, path: str | Path, beside: str | Path | None = None) -> None:
        """Writes the predicted step as a trace, which Perfetto (https://ui.perfetto.dev) shows: phases, modules, what
        is waited for, collectives and memory of a rank; of a pipeline, the schedule of its ranks.

        Args:
            beside: a trace that ``torch.profiler`` has exported, as JSON: the file shows both, from the same moment.

        Raises:
            PlanError: when the plan was read from a file and is not compiled yet.
        """
        measured = None if beside is None else json.loads(Path(beside).read_text())
        Path(path).write_text(json.dumps(trace_of(self, measured)))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan that :meth:`save` wrote."""
        return Plan.from_json(Path(path).read_text(errors="replace"))
