"""What ``torch.export`` traces of a copy of a model, as a program of values."""

from __future__ import annotations

from torch import fx
from torch.export import ExportedProgram, export
from torch.export.graph_signature import ConstantArgument

from autoparallel._torch.casts import gradient_modes_in_casts
from autoparallel._torch.export import complete_users
from autoparallel.capture.fake_inputs import FakeInputs
from autoparallel.capture.functional.functional import make_functional
from autoparallel.capture.functional.passes import tracing_passes
from autoparallel.capture.functional.returned_numbers import make_tensors_of_counts
from autoparallel.capture.functional.ways import Way, literals_of
from autoparallel.capture.python.profilers import without_model
from autoparallel.capture.refusals.failures import explain_failure
from autoparallel.capture.refusals.refusals import require_same_memory
from autoparallel.capture.tracing.functions import require_unread
from autoparallel.capture.tracing.trace import Trace
from autoparallel.capture.tracing.tracing import everything_seen
from autoparallel.capture.training import Training
from autoparallel.graph.beside import take_apart
from autoparallel.graph.errors import CaptureError
from autoparallel.passes.defer_numbers import defer_numbers
from autoparallel.passes.replace_random_operators import Draws
from autoparallel.passes.runner import run_passes
from autoparallel.passes.write_derivatives import write_derivatives


def export_way(wrapper: Training, inputs: FakeInputs, trace: Trace) -> Way:
    """The way that a trace goes."""
    try:
        with everything_seen(trace):
            with gradient_modes_in_casts():
                program = export(wrapper, inputs.arguments, dynamic_shapes=inputs.shapes, strict=False)
            complete_users(program.graph_module)
            require_same_memory(program.graph)
            with trace.silent(), without_model():
                parameters = _trained_of(program)
                findings = run_passes(tracing_passes(program.graph, trace.calls, parameters), program.graph_module)
                require_unread(program.graph, trace.calls)
                name_outputs(program)
                literals = literals_of(program)
                program = make_functional(program)
                write_derivatives(program.graph_module)
                defer_numbers(program.graph, inputs.number_names(program))
                make_tensors_of_counts(program, trace.numbers)
                name_outputs(program)
                labels = frozenset(take_apart(inputs.arguments[1])[1].attributes)
                return Way(program, wrapper.findings, wrapper.recorder, trace, findings[Draws].count, literals, labels)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(explain_failure(error, wrapper.model, wrapper.findings.has_outputs)) from error


def name_outputs(program: ExportedProgram) -> None:
    """Writes the names of the results of a graph that was rewritten into its signature, and the results that were sizes
    until a question of the model's has fixed them."""
    results = program.graph.output_node().args[0]
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(result, fx.Node):
            spec.arg.name = result.name
        elif isinstance(result, int | float) and not isinstance(spec.arg, ConstantArgument):
            spec.arg = ConstantArgument("", result)


def _trained_of(program: ExportedProgram) -> set[str]:
    """The placeholders of parameters, and of buffers that require a gradient as one does."""
    places, signature = {x.name: x for x in program.graph.find_nodes(op="placeholder")}, program.graph_signature
    buffers = {x for x in signature.inputs_to_buffers if places[x].meta["val"].requires_grad}
    return {*signature.inputs_to_parameters, *buffers}
