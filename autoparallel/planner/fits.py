"""Whether a plan fits a graph and a mesh, and can be carried out."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from autoparallel import operators
from autoparallel.comm.world import Axes, mesh_text
from autoparallel.decisions.decisions import Decisions
from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured, InputSpec
from autoparallel.graph.carried_attributes import computed_attributes
from autoparallel.graph.changed_arguments import shown_changes
from autoparallel.graph.fingerprint import fingerprint
from autoparallel.graph.input_values import places_of
from autoparallel.graph.lines import line_of
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.chunk_loss import chunkable
from autoparallel.passes.recompute_layers import find_layers
from autoparallel.placements import Invariant, Layout, Shard, divides, fills_up, format_layout, reaches_all
from autoparallel.planner.calls.signatures import Signatures
from autoparallel.rules.calls import is_tensor, tensor_operands
from autoparallel.rules.ways import call_modes, typed_call


class UnevenError(PlanError):
    """A tensor of a call does not divide as a plan cuts it."""


def _is_planned(node: fx.Node) -> bool:
    """Whether a call makes or reads a tensor, so that a plan says how it runs."""
    return node.op == "call_function" and (is_tensor(node) or bool(tensor_operands(node)))


def _fills_up(whole: int, shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> bool:
    return fills_up(shape, (whole,), layout, axis_sizes)


def require_fits(plan: Decisions, captured: Captured, mesh: Axes) -> None:
    """Refuses a mesh or a graph that a plan was not made for, and decisions that cannot be carried out.

    Raises:
        UnevenError: where only the sizes of the call do not fit.
        PlanError: naming what differs.
    """
    graph = captured.graph
    _require_mesh(plan, mesh)
    keys = {n.meta["key"] for n in graph.nodes if _is_planned(n)}
    missing, extra = sorted(keys - set(plan.operators)), sorted(set(plan.operators) - keys)
    if missing or extra or fingerprint(captured) != plan.fingerprint:
        detail = [f"the model has {missing[0]}, the plan has not"] if missing else []
        detail += [f"the plan has {extra[0]}, the model has not"] if extra else []
        what = "; ".join(detail) or "shapes differ, or which parameters are trained"
        raise PlanError(f"the plan is for another model ({what}): plan again")
    layers = find_layers(graph) if plan.recompute else []
    for layer in plan.recompute:
        if layer not in layers:
            possible = ", ".join(layers) or "none"
            raise PlanError(f"the plan recomputes {layer!r}, which is no layer of the model (layers: {possible})")
    sizes = Sizes(captured.actual)
    _require_parameters(plan, captured, sizes)
    kinds, checked = Signatures({}), set()
    for node in graph.nodes:
        if node.op == "call_function" and is_tensor(node) and node.target is not operator.getitem:
            alike = kinds.call(node), plan.operators[node.meta["key"]]
            if alike not in checked:
                _require_operator(plan, node, sizes)
                checked.add(alike)


def require_lies(plan: Decisions, shapes: Mapping[str, Sequence[int]], mesh: Axes) -> None:
    """Refuses a mesh, or a model's parameters, that a plan was not made for.

    Args:
        shapes: of every parameter of the model, by name.

    Raises:
        PlanError: naming what differs.
    """
    _require_mesh(plan, mesh)
    for name, parameter in plan.parameters.items():
        if name not in shapes:
            raise PlanError(f"the plan is for another model (the plan has {name}, the model has not): plan again")
        parameter.require_valid(name, len(plan.mesh))
        _require_layout(plan, name, shapes[name], plan.at_rest(name), reaches_all, PlanError)


def _require_mesh(plan: Decisions, mesh: Axes) -> None:
    if plan.mesh != mesh:
        raise PlanError(f"the plan is for the mesh {mesh_text(plan.mesh)}, not for {mesh_text(mesh)}: plan again")


def _require_operator(plan: Decisions, node: fx.Node, sizes: Sizes) -> None:
    key = node.meta["key"]
    modes = plan.modes(key)
    if len(modes) != len(plan.mesh):
        raise PlanError(f"the plan says for {len(modes)} mesh axes how {key} runs, the mesh has {len(plan.mesh)}")
    ways = {typed.mode for typed in call_modes(node)}
    for mode in modes:
        if mode not in ways:
            raise PlanError(f"{key} cannot run as {mode}; it can run as {', '.join(sorted(map(str, ways)))}")
    needs, result = typed_call(node, modes)
    what = f"{key} as {', '.join(map(str, modes))}"
    _require_layout(plan, what, sizes.shape(node), result, divides)
    for x, layout in zip(tensor_operands(node), needs, strict=True):
        if node.target is not operators.pad_rows:
            _require_layout(plan, what, sizes.shape(x), layout, divides)
            continue
        for dim, whole in enumerate(node.meta["val"].shape):
            cut = tuple(p if p == Shard(dim) else Invariant for p in layout)
            _require_layout(plan, what, sizes.shape(x), cut, functools.partial(_fills_up, whole))


def _require_parameters(plan: Decisions, captured: Captured, sizes: Sizes) -> None:
    names = set(captured.parameters.values())
    missing, extra = names - set(plan.parameters), set(plan.parameters) - names
    if missing or extra:
        problem = f"has no parameter {min(missing)}" if missing else f"has {min(extra)}, which the model does not use"
        raise PlanError(f"the plan {problem}: plan again")
    for node in captured.parameter_nodes:
        name = captured.parameters[node.name]
        plan.parameters[name].require_valid(name, len(plan.mesh))
        _require_layout(plan, name, sizes.shape(node), plan.at_rest(name), reaches_all, PlanError)


def require_gathered_once(plan: Decisions, captured: Captured) -> None:
    """Refuses a plan that gathers what a parameter was before the call has changed it."""
    for name in sorted(captured.changed_parameters):
        gather = plan.parameters[name].gather
        if "S" in plan.parameters[name].at_rest and gather != "per_microbatch":
            raise PlanError(
                f"{name}, which a call changes, cannot be gathered {gather!r}, only 'per_microbatch': once a call"
            )


def _require_layout(
    plan: Decisions,
    what: str,
    shape: Sequence[int],
    layout: Layout,
    fits: Callable[[Sequence[int], Layout, Sequence[int]], bool],
    uneven: type[PlanError] = UnevenError,
) -> None:
    """Each dim that is cut must exist, and be cut as ``fits`` wants it."""
    for axis, placement in enumerate(layout):
        if placement.kind == "S":
            dim = placement.dim
            size = shape[dim] if dim < len(shape) else None
            alone = tuple(Shard(0) if p == placement else Invariant for p in layout)
            if size is None or not fits((size,), alone, plan.axis_sizes):
                kind = PlanError if size is None else uneven
                raise kind(
                    f"{what}: a tensor of shape {list(shape)} cannot lie as "
                    f"{format_layout(layout)} on {mesh_text(plan.mesh)} (axis {plan.axis_names[axis]})"
                )


def unable(captured: Captured, call: Call) -> str:
    """Why a model cannot be run in microbatches, as a pipeline does; empty where it can."""
    if captured.weight.problem:
        return captured.weight.problem
    if captured.objective is None:
        return (
            "this call makes no loss (pass loss_fn to compile() and the target to the call, return the loss, or make "
            "it under torch.no_grad())"
        )
    if any(layout is not None for layout in call.layouts):
        return "an input is a DTensor"
    if any(isinstance(s, InputSpec) and s.requires_grad for s in call.specs):
        return "an input is differentiated"
    reads = [read for reads in captured.state.inputs for read in reads.reads if places_of(read.source)]
    if read := next(iter(reads), None):
        return f"Python reads a value of the whole batch at {read.line}"
    if not captured.is_open(call.specs):
        return f"the batch size is fixed at {call.batch}: {captured.why_fixed}"
    return ""


def returns_loss_alone(captured: Captured, outputs: str) -> bool:
    """Whether microbatches keep all that a model returns; ``outputs`` as ``compile()`` takes it."""
    return outputs == "gather" or captured.output_indices <= {captured.objective}


def differing(captured: Captured, call: Call, count: int) -> str:
    """Why a call cannot be run in so many microbatches with the numbers of the whole batch; empty where it can."""
    if problem := unable(captured, call):
        return problem
    if computed := computed_attributes(captured):
        line = next((line for name in computed if (line := captured.set_at.get(name))), "")
        return f"it {shown_changes(computed)}{f', at {line}' * bool(line)}"
    if captured.mutated:
        place = line_of(captured.results[0])
        return f"it would change the buffer {captured.mutated[0]} once in each microbatch, as made at {place}"
    return captured.weight.apart or captured.weight.mixes


def require_cuttable(captured: Captured, call: Call, count: int) -> None:
    """Raises PlanError where a call cannot run in so many microbatches with the numbers of the whole batch."""
    if problem := differing(captured, call, count):
        raise PlanError(
            f"the batch cannot be cut into {count} microbatches with the same numbers: {problem}\n"
            "What to change: leave microbatches out, or what hinders them (what a call sets can be set outside of it)."
        )


def require_chunkable(graph: fx.Graph, chunks: int) -> None:
    """Raises PlanError where the loss of a call cannot be computed in so many chunks of rows."""
    if chunks > 1 and not chunkable(graph):
        raise PlanError(
            f"the loss cannot be computed in {chunks} chunks of rows: that takes a linear layer whose logits go to "
            "cross_entropy (or through log_softmax to nll_loss) with reduction 'mean' or 'sum', and which nothing else "
            "reads, outputs included, unless the loss is among them and outputs='auto'. Else leave loss_chunks out"
        )
