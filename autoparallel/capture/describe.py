"""What a trace is of: which placeholder is which parameter, buffer or input, which output is the loss."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from autoparallel._torch.export import graph_module, is_fake, is_read, size_guards
from autoparallel.capture.copies import Copies
from autoparallel.capture.functional.outputs import Objective, find_objective, set_apart
from autoparallel.capture.functional.passes import describing_passes
from autoparallel.capture.functional.returned_numbers import type_of
from autoparallel.capture.functional.ways import Way
from autoparallel.capture.python.changes import IN_THE_MODEL
from autoparallel.capture.refusals.refusals import (
    refused_mutation,
    refused_sparse,
    require_dense_values,
    require_positions,
    require_same_dtypes,
    require_static,
)
from autoparallel.capture.settings import CaptureSettings
from autoparallel.capture.tracing.checks import CHECK
from autoparallel.capture.training import Findings
from autoparallel.graph.captured import Captured, InputSpec, NumberSpec, SizeGuard
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.leaves import Constant, Leaf, Number, Size
from autoparallel.graph.lines import line_of
from autoparallel.graph.shared_memory import SharedMemory
from autoparallel.operators.changed_parameters import with_value
from autoparallel.passes.emitter import replace_node
from autoparallel.passes.mark_gradients import Detached
from autoparallel.passes.resolve_control_flow import price_masks
from autoparallel.passes.runner import run_passes
from autoparallel.rules.calls import is_tensor


def describe(
    way: Way,
    model: nn.Module,
    copies: Copies,
    specs: Sequence[InputSpec | Any],
    arguments: int,
    settings: CaptureSettings,
) -> Captured:
    """Describes a trace, of which the passes of ``describing_passes`` make the graph that is planned.

    Args:
        way: the trace, whose graph is changed.
        model: the plain model.
        copies: of it, of which one was traced.
        specs: the inputs, flattened.
        arguments: how many of the first ones are arguments of the user's.
        settings: what the model is captured for.

    Raises:
        CaptureError: for a trace that no program can have.
    """
    program, trace_findings, owners = way.program, way.findings, copies.owners
    module = graph_module(program.graph)
    graph = module.graph
    parameters, buffers, constants, inputs = _read_inputs(program, graph, copies, trace_findings.sparse)
    numbers_given = [str(inputs[i]) for i, spec in enumerate(specs) if isinstance(spec, NumberSpec)]
    nodes = {n.name: n for n in graph.nodes}
    places = {str(inputs[i]): i for i, spec in enumerate(specs[:arguments]) if isinstance(spec, InputSpec)}
    mutated, results, outputs, written = _read_outputs(program, graph, owners, model, places)
    _leave_unread(graph, buffers, {*mutated, *dict(model.named_buffers(remove_duplicate=False))})
    tensors = [(nodes[n], spec) for n, spec in zip(inputs, specs, strict=True) if n and isinstance(spec, InputSpec)]
    price_masks(graph, constants)
    trace_findings.left_out.update(dict.fromkeys(require_static(graph, numbers_given), CHECK))
    symbols = {symbol: str(inputs[place]) for symbol, (place, _) in way.trace.numbers.items()}
    _require_sizes(outputs, symbols)
    require_dense_values(graph)
    require_positions(graph)
    require_same_dtypes(graph)
    output = graph.output_node()
    output.args = (tuple(set_apart(graph, r) if r.name in parameters else r for r in results),)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    differentiable = {node for node, name in parameters.items() if name in trainable}
    differentiable |= {node.name for node, spec in tensors if spec.requires_grad}
    assert trace_findings.spec is not None
    memory = _read_memory(trace_findings, mutated, outputs, owners)
    attributes, outputs = trace_findings.take_attributes(outputs)
    passes = describing_passes(
        parameters=parameters,
        differentiable=differentiable,
        ranks=settings.ranks,
        buffers=len(mutated),
        objective=partial(
            find_objective,
            outputs=outputs,
            spec=trace_findings.spec,
            buffers=len(mutated),
            of_loss_fn=settings.loss_fn is not None,
            detach_beside_loss=settings.detach_beside_loss,
            counted=trace_findings.counted,
            inputs={name for name in inputs if name is not None},
        ),
    )
    findings = run_passes(passes, module)
    objective, detached = findings[Objective], list(findings[Detached].outputs)
    flowing = [i for i in objective.flowing if i not in detached]
    for place, index in written.items():
        if index in objective.flowing or specs[place].requires_grad:
            raise refused_mutation(str(inputs[place]), results[index], model)
    actual, lengths, guards = _read_sizes(tensors)
    return Captured(
        module, parameters, buffers, constants, inputs, mutated, outputs, trace_findings.spec, objective.loss, flowing,
        detached, actual, objective.weight, attributes=attributes, written=written,
        memory={index: x for index, x in memory.items() if index not in objective.flowing}, lengths=lengths,
        guards=guards, number_symbols=symbols,
    )  # fmt: skip


def _read_inputs(
    program: ExportedProgram,
    graph: fx.Graph,
    copies: Copies,
    sparse: Container[str],
) -> tuple[dict[str, str], dict[str, str], dict[str, torch.Tensor], list[str | None]]:
    """The parameters, buffers, constants and inputs of a trace, as ``Captured`` holds them; every tensor gets one
    placeholder, and what is no tensor loses its own, as does a buffer that is not dense, which nothing reads."""
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs: list[str | None] = []
    _read_parameters_before(graph)
    first_of: dict[str, fx.Node] = {}
    for spec in program.graph_signature.input_specs:
        node = placeholders.get(spec.arg.name)
        if spec.kind == InputKind.USER_INPUT:
            inputs.append(None if isinstance(spec.arg, ConstantArgument) or node is None else node.name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and str(spec.target).startswith("model."):
            name = copies.owners[str(spec.target).removeprefix("model.")]
            first = first_of.setdefault(name, node)  # type: ignore[arg-type]
            if first is not node and node is not None:  # another name of a tied weight
                replace_node(node, first)
                continue
            if name in sparse and node is not None:
                if node.users:
                    raise refused_sparse(name, line_of(next(iter(node.users))))
                graph.erase_node(node)
                continue
            table = parameters if spec.kind == InputKind.PARAMETER else buffers
            table[node.name] = name  # type: ignore[union-attr]
        elif spec.kind == InputKind.PARAMETER:
            raise CaptureError(f"the loss function has a parameter, {spec.target}: move it into the model")
        elif node is not None:
            value = (program.state_dict | program.constants).get(str(spec.target))
            if not isinstance(value, torch.Tensor):
                raise CaptureError(f"the model uses {spec.target!r}, which is not a tensor, as an input of its graph")
            constants[node.name] = value = copies.references.get(id(value), value)
            if is_fake(value):
                line, cure = line_of(next(iter(node.users), node)), "read it where it is registered, or pass it in"
                raise refusal("the model reads a tensor from where the trace does not look", line, cure)
    for node in list(graph.nodes):  # inputs that the graph ignores keep their placeholder, constants lose it
        if node.op == "placeholder" and node.name not in {*parameters, *buffers, *constants, *inputs}:
            if node.users:
                raise CaptureError(f"the input {node.name} is used, but it is not a tensor")
            graph.erase_node(node)
    return parameters, buffers, constants, inputs


def _leave_unread(graph: fx.Graph, buffers: dict[str, str], registered: Container[str]) -> None:
    """Leaves out the plain attributes that a program does not read: the loop may set them to anything else."""
    for node in graph.find_nodes(op="placeholder"):
        if node.name in buffers and not node.users and buffers[node.name] not in registered:
            del buffers[node.name]
            graph.erase_node(node)


def _read_parameters_before(graph: fx.Graph) -> None:
    """Has those that read what a parameter was before the call has changed it read the parameter, which nothing of a
    functional graph changes."""
    for node in graph.find_nodes(op="call_function", target=with_value):
        before = node.args[0]
        if isinstance(before, fx.Node) and before.target is torch.ops.aten.clone.default:
            replace_node(before, before.args[0])


def _require_sizes(outputs: Sequence[Leaf], symbols: Mapping[sympy.Symbol, str]) -> None:
    """Refuses an output that is a number of the call's as a float or a bool, which no program computes; the number is
    then fixed."""
    numbers = [leaf for leaf in outputs if isinstance(leaf, Size) and leaf.kind is not int]
    for number in numbers:
        if is_read(number.expression.xreplace(dict.fromkeys(symbols, 1))):
            raise CaptureError(f"a number that is passed in leaves the model as another {number.kind.__name__}")


def _read_memory(
    trace_findings: Findings, mutated: Sequence[str], outputs: Sequence[Leaf], owners: Mapping[str, str]
) -> dict[int, SharedMemory]:
    """Which results lie in the memory of others' tensors, as ``Captured.memory``."""
    memory: dict[int, SharedMemory] = {}
    for key, shared in trace_findings.memory.items():
        index = outputs[key] if isinstance(key, int) else mutated.index(owners[key])
        if isinstance(index, int):
            owner = shared.owner
            memory[index] = replace(shared, owner=owners[owner]) if isinstance(owner, str) else shared
    return memory


def _read_outputs(
    program: ExportedProgram,
    graph: fx.Graph,
    owners: Mapping[str, str],
    model: nn.Module,
    places: Mapping[str, int],
) -> tuple[list[str], list[fx.Node], list[Leaf], dict[int, int]]:
    """The mutated buffers and parameters of a trace; the nodes of their new values, of the outputs that are tensors,
    and of the new values of inputs; the leaves of its outputs; and the inputs that are changed, as
    ``Captured.written``.

    Args:
        places: of the arguments that may be changed, by their placeholders.
    """
    mutated: list[str] = []
    results: list[fx.Node] = []
    outputs: list[Leaf] = []
    written: dict[int, fx.Node] = {}
    nodes: Any = graph.output_node().args[0]
    for out, node in zip(program.graph_signature.output_specs, nodes, strict=True):
        if out.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            if not str(out.target).startswith("model."):
                raise CaptureError(
                    f"the loss function changes its buffer {out.target} in place\nWhat to change: {IN_THE_MODEL}."
                )
            mutated.append(owners[str(out.target).removeprefix("model.")])
            results.append(node)
        elif out.kind == OutputKind.USER_OUTPUT:
            if isinstance(out.arg, ConstantArgument):
                outputs.append(Constant(out.arg.value))
            elif (kind := type_of(out, node)) is not None and not is_tensor(node):
                size = node.meta["val"]
                outputs.append(Constant(size) if isinstance(size, kind) else Size(size.node.expr, kind))
            else:
                outputs.append(len(results) if kind is None else Number(len(results), kind))
                results.append(node)
        elif out.kind == OutputKind.USER_INPUT_MUTATION and out.target in places:
            written[places[out.target]] = node
        else:
            raise refused_mutation(str(out.target), node, model)
    return mutated, [*results, *written.values()], outputs, {x: len(results) + i for i, x in enumerate(written)}


def _read_sizes(
    tensors: Sequence[tuple[fx.Node, InputSpec]],
) -> tuple[dict[sympy.Symbol, int], frozenset[sympy.Symbol], tuple[SizeGuard, ...]]:
    """The sizes that a trace has left open, of its inputs: what they are in the call, those that are not the batch's,
    and what was taken for granted of them."""
    actual: dict[sympy.Symbol, int] = {}
    rows: set[sympy.Symbol] = set()
    guards: dict[SizeGuard, None] = {}
    for placeholder, spec in tensors:
        traced = placeholder.meta["val"]
        for dim, (size, real) in enumerate(zip(traced.shape, spec.shape, strict=True)):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                actual[size.node.expr] = real
                rows |= {size.node.expr} if dim == 0 and spec.batch else set()
                guards = guards or {SizeGuard(*guard): None for guard in size_guards(traced)}
    return actual, frozenset(actual) - rows, tuple(guards)
