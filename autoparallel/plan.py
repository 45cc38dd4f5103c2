"""What was decided: a small, reviewable file, keyed by module path and operator."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autoparallel import operators
from autoparallel.meshes import Axes, MeshChoice
from autoparallel.passes.insert_collectives import call_modes, typed_call
from autoparallel.passes.recompute_layers import find_layers
from autoparallel.placements import (
    Invariant,
    Layout,
    Shard,
    divides,
    fills_up,
    format_layout,
    parse_layout,
    reaches_all,
)
from autoparallel.rules.calls import is_tensor, tensor_operands
from autoparallel.rules.typing import Mode, parse_mode
from autoparallel.staging import PIPELINE_AXIS, PipelinePlan

if TYPE_CHECKING:
    from autoparallel.report.explain import Prediction
    from autoparallel.report.reasons import Reasons

FORMAT = 1
GATHERS = ("per_use", "per_microbatch", "per_step")
REDUCTIONS = ("per_step", "per_microbatch", "across_replicas_per_step")


class PlanError(ValueError):
    """A plan that cannot be made, or that does not fit the model or the mesh."""


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


@dataclass(frozen=True)
class Estimate:
    """What the search added up, beside the cost.

    Attributes:
        memory: bytes per device.
        parameters: seconds of a step, by parameter: gathering it, reducing its gradient, updating it.
    """

    memory: float
    parameters: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """Every decision about one model on one mesh.

    Attributes:
        mesh: the mesh axes by name and size, in order.
        origin: the preset that constrained the search, or "auto".
        fingerprint: of the captured graph; a plan for another graph is refused.
        operators: node key (``module/operator#occurrence``) to how it runs on each mesh axis.
        shared: node key to the layout that all consumers of a tensor read it in, where that is not the layout it is
            made in.
        parameters: parameter name to its plan.
        unruled: operators without a rule, which run replicated, with how often.
        recompute: the layers, by module path, that keep only what enters them and run again in the backward.
        notes: module path to why it is not sharded as could be expected.
        cost, lower_bound: the predicted seconds of a step that the search minimised, and what it proved that no plan
            costs less than; None for a plan that no search made.
        pipeline: how the model is cut into stages over one more mesh axis, which is not in ``mesh``.
        choice: how the mesh was chosen; None where it was given.
        estimate: what the search added up; only where it was searched just now.
    """

    mesh: tuple[tuple[str, int], ...]
    origin: str
    fingerprint: str
    operators: Mapping[str, tuple[str, ...]]
    shared: Mapping[str, str]
    parameters: Mapping[str, ParameterPlan]
    unruled: Mapping[str, int] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    pipeline: PipelinePlan | None = None
    search_seconds: float = 0.0
    cost: float | None = field(default=None, compare=False)
    lower_bound: float | None = field(default=None, compare=False)
    prediction: Prediction | None = field(default=None, compare=False)
    choice: MeshChoice | None = field(default=None, compare=False)
    estimate: Estimate | None = field(default=None, compare=False, repr=False)
    reasons: Reasons | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: all but the model that ``reasons`` holds."""
        return {**self.__dict__, "reasons": None}

    @property
    def gap(self) -> float | None:
        """By how much a better plan could be cheaper at most, as a part of this plan's cost; None where not known."""
        if self.cost is None or self.lower_bound is None:
            return None
        return max(0.0, 1.0 - self.lower_bound / self.cost) if self.cost else 0.0

    @property
    def whole_mesh(self) -> Axes:
        """The axes of all devices: those of ``mesh``, after the pipeline's."""
        return self.mesh if self.pipeline is None else ((PIPELINE_AXIS, self.pipeline.ranks), *self.mesh)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.mesh)

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.mesh)

    def modes(self, key: str) -> tuple[Mode, ...]:
        """How the operator with this key runs on each mesh axis."""
        return tuple(parse_mode(text) for text in self.operators[key])

    def at_rest(self, parameter: str) -> Layout:
        """A parameter's layout between steps."""
        return parse_layout(self.parameters[parameter].at_rest)

    @property
    def padded(self) -> dict[str, int]:
        """The parameters that are used with rows of padding, and with how many rows in all."""
        return padded_rows(self.parameters)

    def with_prediction(self, prediction: Prediction) -> Plan:
        """The same plan with its predicted traffic, time and memory."""
        return replace(self, prediction=prediction)

    def with_reasons(self, reasons: Reasons) -> Plan:
        """The same plan, able to say what the next best would have cost."""
        return replace(self, reasons=reasons)

    def explain(self, module: str | None = None) -> str:
        """The plan in words and tables: layouts, collectives and bytes per step, predicted time and memory.

        Args:
            module: instead explains what was decided about the modules and parameters of this pattern, such as
                ``"layers.0.mlp"`` or ``"layers.*.mlp.up"``: each decision, and what the next best would cost, for all
                of them together. Each alternative is a search of its own, on this rank alone.

        Raises:
            PlanError: when nothing matches, or the plan was loaded from a file and is not compiled yet.
        """
        if module is not None:
            from autoparallel.report.reasons import explain_module

            return explain_module(self, module)
        from autoparallel.report.explain import explain

        return explain(self)

    def diff(self, other: Plan) -> str:
        """What another plan decides differently, and what that is predicted to change, in words and tables."""
        from autoparallel.report.diff import diff

        return diff(self, other)

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

    def require_fits(
        self, graph: fx.Graph, mesh: tuple[tuple[str, int], ...], parameters: Mapping[str, str] | None = None
    ) -> None:
        """Refuses a mesh or a graph that the plan was not made for, and decisions that cannot be carried out.

        Args:
            graph: the captured graph.
            mesh: the mesh axes by name and size.
            parameters: placeholder name to parameter name; None does not look at parameters.

        Raises:
            PlanError: naming what differs.
        """
        if self.mesh != mesh:
            raise PlanError(f"the plan is for the mesh {mesh_text(self.mesh)}, not for {mesh_text(mesh)}: plan again")
        keys = {n.meta["key"] for n in graph.nodes if is_planned(n)}
        missing, extra = sorted(keys - set(self.operators)), sorted(set(self.operators) - keys)
        if missing or extra or fingerprint(graph) != self.fingerprint:
            detail = [f"the model has {missing[0]}, the plan has not"] if missing else []
            detail += [f"the plan has {extra[0]}, the model has not"] if extra else []
            raise PlanError(f"the plan is for another model ({'; '.join(detail) or 'shapes differ'}): plan again")
        layers = find_layers(graph) if self.recompute else []
        for layer in self.recompute:
            if layer not in layers:
                possible = ", ".join(layers) or "none"
                raise PlanError(f"the plan recomputes {layer!r}, which is no layer of the model (layers: {possible})")
        for node in graph.nodes:
            if node.op == "call_function" and is_tensor(node) and node.target is not operator.getitem:
                self._require_operator(node)
        if parameters is not None:
            self._require_parameters(graph, parameters)

    def _require_operator(self, node: fx.Node) -> None:
        key = node.meta["key"]
        modes = self.modes(key)
        if len(modes) != len(self.mesh):
            raise PlanError(f"the plan says for {len(modes)} mesh axes how {key} runs, the mesh has {len(self.mesh)}")
        ways = {typed.mode for typed in call_modes(node)}
        for mode in modes:
            if mode not in ways:
                raise PlanError(f"{key} cannot run as {mode}; it can run as {', '.join(sorted(map(str, ways)))}")
        needs, result = typed_call(node, modes)
        what = f"{key} as {', '.join(map(str, modes))}"
        self._require_fits(what, node, result, divides)
        for x, layout in zip(tensor_operands(node), needs, strict=True):
            if node.target is not operators.pad_rows:
                self._require_fits(what, x, layout, divides)
                continue
            for dim, whole in enumerate(node.meta["val"].shape):
                cut = tuple(p if p == Shard(dim) else Invariant for p in layout)
                self._require_fits(what, x, cut, functools.partial(_fills_up, whole))

    def _require_parameters(self, graph: fx.Graph, parameters: Mapping[str, str]) -> None:
        missing, extra = (
            set(parameters.values()) - set(self.parameters),
            set(self.parameters) - set(parameters.values()),
        )
        if missing or extra:
            problem = (
                f"has no parameter {min(missing)}" if missing else f"has {min(extra)}, which the model does not use"
            )
            raise PlanError(f"the plan {problem}: plan again")
        for node in graph.nodes:
            if node.op == "placeholder" and node.name in parameters:
                name = parameters[node.name]
                self.parameters[name].require_valid(name, len(self.mesh))
                self._require_fits(name, node, self.at_rest(name), reaches_all)

    def _require_fits(
        self, what: str, node: fx.Node, layout: Layout, fits: Callable[[Sequence[int], Layout, Sequence[int]], bool]
    ) -> None:
        """Each dim that is cut must exist and, where its size is fixed, be cut as ``fits`` wants it."""
        shape = node.meta["val"].shape
        for axis, placement in enumerate(layout):
            if placement.kind == "S":
                dim = placement.dim
                size = shape[dim] if dim < len(shape) else None
                alone = tuple(Shard(0) if p == placement else Invariant for p in layout)
                if size is None or isinstance(size, int) and not fits((size,), alone, self.axis_sizes):
                    raise PlanError(
                        f"{what}: a tensor of shape {[s if isinstance(s, int) else '?' for s in shape]} cannot lie as "
                        f"{format_layout(layout)} on {mesh_text(self.mesh)} (axis {self.axis_names[axis]})"
                    )


def _fills_up(whole: int, shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> bool:
    return fills_up(shape, (whole,), layout, axis_sizes)


def mesh_text(mesh: Sequence[tuple[str, int]]) -> str:
    """A mesh as reports and messages write it: ``(dp=2, tp=4)``."""
    return "(" + ", ".join(f"{name}={size}" for name, size in mesh) + ")"


def _number(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]


def is_planned(node: fx.Node) -> bool:
    """Whether a call makes or reads a tensor, so that a plan says how it runs."""
    return node.op == "call_function" and (is_tensor(node) or bool(tensor_operands(node)))


def padded_rows(parameters: Mapping[str, ParameterPlan]) -> dict[str, int]:
    """The parameters that are used with rows of padding, and with how many rows in all."""
    return {name: p.rows for name, p in parameters.items() if p.rows is not None}


def fingerprint(graph: fx.Graph) -> str:
    """A digest of a captured graph: keys, operators, wiring and shapes; batch sizes count as open."""
    lines = []
    known: dict[tuple[int, Any], str] = {}  # of values, which copied layers share
    for node in graph.nodes:
        meta = node.meta
        value, flows = meta.get("val"), meta.get("differentiable")
        text = known.get((id(value), flows))
        if text is None:
            shapes = [
                (tuple([s if isinstance(s, int) else "?" for s in v.shape]), str(v.dtype))
                for v in torch.utils._pytree.tree_leaves(value)
                if isinstance(v, torch.Tensor)
            ]
            text = known[id(value), flows] = f"|{shapes}|{flows}"
        lines.append(f"{meta.get('key')}|{[n.name for n in node.all_input_nodes]}{text}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
