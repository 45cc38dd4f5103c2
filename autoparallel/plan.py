"""A plan: a small, reviewable file, keyed by module path and operator, that can say what it decides."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autoparallel.decisions.decisions import Decisions, Reasons
from autoparallel.decisions.meshes import MeshChoice
from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.decisions.pipeline import PipelinePlan
from autoparallel.decisions.prediction import Prediction
from autoparallel.placements import format_layout, parse_layout
from autoparallel.placements.modes import parse_mode
from autoparallel.report.diff import diff_plans
from autoparallel.report.explain import explain_plan
from autoparallel.report.reasons import explain_module

FORMAT = 1


@dataclass(frozen=True)
class Plan(Decisions):
    """Every decision about one model on one mesh (see :class:`Decisions`), to be read, saved and run again."""

    def with_prediction(self, prediction: Prediction) -> Plan:
        """The same plan with its predicted traffic, time and memory."""
        return replace(self, prediction=prediction)

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
            if self.pipeline is not None or self.reasons is None:
                raise PlanError(
                    "the passes of a program are shown for the plan of a compiled model (model.plan), or one that was "
                    "made just now, and not for a pipeline"
                )
            return self.reasons.history(self)
        if module is not None:
            return explain_module(self, module)
        return explain_plan(self)

    def diff(self, other: Plan) -> str:
        """What another plan decides differently, and what that is predicted to change, in words and tables."""
        return diff_plans(self, other)

    def to_json(self) -> str:
        """The decisions as JSON text."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "mesh": [list(axis) for axis in self.mesh],
            "origin": self.origin,
            "fingerprint": self.fingerprint,
            "parameters": {name: asdict(p) for name, p in self.parameters.items()},
            "operators": {key: list(modes) for key, modes in self.operators.items()},
            "shared": dict(self.shared),
            "unruled": dict(self.unruled),
            "recompute": list(self.recompute),
            "notes": dict(self.notes),
            "cost": self.cost,
            "lower_bound": self.lower_bound,
        }
        if self.pipeline is not None:
            data["pipeline"] = self.pipeline.to_data()
        if self.choice is not None:
            data["choice"] = self.choice.to_data()
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads a plan.

        Raises:
            PlanError: when the text is not a plan of this format.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            if data["format"] != FORMAT:
                raise PlanError(f"the plan has format {data['format']}, this version reads {FORMAT}")
            plan = Plan(
                mesh=tuple((str(name), int(size)) for name, size in data["mesh"]),
                origin=str(data["origin"]),
                fingerprint=str(data["fingerprint"]),
                operators={str(k): tuple(str(m) for m in v) for k, v in data["operators"].items()},
                shared={str(k): format_layout(parse_layout(v)) for k, v in data["shared"].items()},
                parameters={str(k): ParameterPlan(**v) for k, v in data["parameters"].items()},
                unruled={str(k): int(v) for k, v in data["unruled"].items()},
                recompute=tuple(str(layer) for layer in data.get("recompute", ())),
                notes={str(k): str(v) for k, v in data.get("notes", {}).items()},
                cost=_number(data.get("cost")),
                lower_bound=_number(data.get("lower_bound")),
                pipeline=PipelinePlan.from_data(data["pipeline"]) if "pipeline" in data else None,
                choice=MeshChoice.from_data(data["choice"]) if "choice" in data else None,
            )
            for name, parameter in plan.parameters.items():
                parameter.require_valid(name, len(plan.mesh))
            for modes in plan.operators.values():
                for mode in modes:
                    parse_mode(mode)
        except PlanError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a plan: {type(error).__name__}: {error}") from error
        return plan

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan that :meth:`save` wrote."""
        return Plan.from_json(Path(path).read_text())


def _number(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]
