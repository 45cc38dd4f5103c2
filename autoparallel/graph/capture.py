"""From a model to its forward graph.

``torch.export`` (non-strict) traces the model on fake CPU tensors, whatever its device and however large it is; the
graph is made functional, brought into the few canonical operators that rules speak of, and described: which
placeholder is which parameter, buffer or input, which output is the loss.
"""

from __future__ import annotations

import copy
import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, SymIntArgument
from torch.utils import _pytree as pytree

from autoparallel._torch import make_fake_mode
from autoparallel.graph.captured import Captured, CaptureError, Constant, InputSpec, Leaf, Size
from autoparallel.graph.data_access import DataAccess
from autoparallel.graph.globals_read import GlobalsRead, owners_of, packages_of, read_of_loss
from autoparallel.graph.hooks import require_full_hooks
from autoparallel.graph.layers import NotAlike, Run, fill_up, find_runs, leave_out
from autoparallel.graph.lines import line_of
from autoparallel.graph.outputs import find_loss, set_apart, weigh_outputs
from autoparallel.graph.plain_tensors import (
    REPLACED,
    is_attribute,
    make_buffer,
    plain_generators,
    plain_tensors,
    stand_in,
    trained_attributes,
)
from autoparallel.graph.python_state import is_plain
from autoparallel.graph.recorder import IN_THE_MODEL, LOSS, Recorder, StateChangedError, first_line
from autoparallel.graph.refusals import require_positions, require_same_memory, require_static
from autoparallel.graph.seeding import refuse_seeding
from autoparallel.graph.tracing import Trace, everything_seen
from autoparallel.operators.opaque import CALL, HOOK
from autoparallel.passes.canonicalize_operators import canonicalize_operators
from autoparallel.passes.inline_gradient_modes import inline_gradient_modes
from autoparallel.passes.interleave_projections import interleave_projections
from autoparallel.passes.mark_gradients import (
    detach_outputs,
    differentiable_outputs,
    is_loss,
    mark_backward,
    mark_differentiable,
)
from autoparallel.passes.name_nodes import name_nodes
from autoparallel.passes.refusal import Refusal
from autoparallel.passes.replace_random_operators import replace_random_operators
from autoparallel.passes.resolve_opaque_calls import resolve_opaque_calls

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass
class _Found:
    """What tracing found; an object of its own, because export resets the attributes of what it traces.

    Attributes:
        counted: whether the loss function returned a sum and a count.
        spec: how the outputs nest.
        attributes: the attributes that the call sets, and how their values nest.
        originals: of the objects in the copy of the model, by id.
        copies: the copies themselves: an id is unique while its owner lives.
    """

    counted: bool = False
    spec: pytree.TreeSpec | None = None
    attributes: dict[str, pytree.TreeSpec] = field(default_factory=dict)
    originals: dict[int, Any] = field(default_factory=dict)
    copies: dict[int, Any] = field(default_factory=dict)


class _Training(nn.Module):
    """The model with its loss: what is captured when a target is given.

    Inputs and outputs are cast as ``fully_shard`` casts those of the outermost module.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        precision: MixedPrecisionPolicy | None,
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        cast = precision is not None and precision.cast_forward_inputs
        self.input_dtype = precision.param_dtype if precision is not None and cast else None
        self.output_dtype = precision.output_dtype if precision is not None else None
        self.found = _Found()
        self.recorder = recorder

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # the user's hooks for all modules are not for this one

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of the outputs, and of the attributes that the call sets."""
        with self.recorder, refuse_seeding(), DataAccess():
            leaves, self.found.spec = pytree.tree_flatten(self._outputs(args, kwargs))
        _require_leaves(leaves)
        for name, value in self.recorder.take().items():
            more, self.found.attributes[name] = pytree.tree_flatten(value)
            leaves += more
        return leaves

    def _outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.loss_fn is None:
            return self._run(args, kwargs)
        *inputs, target = args
        loss = self.loss_fn(self._run(tuple(inputs), kwargs), target)
        if isinstance(loss, tuple) and len(loss) == 2 and _is_scalar(loss[0]) and _is_count(loss[1]):
            self.found.counted = True
            return loss[0] / loss[1]
        return loss

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = _cast((args, kwargs), self.input_dtype)
        return _cast(self.model(*args, **kwargs), self.output_dtype)


def _require_leaves(values: Sequence[Any]) -> None:
    """Raises where outputs do not nest in a way that is known."""
    for value in values:
        if not is_plain(value) and not isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CaptureError(
                f"the model returns a {type(value).__name__}, in which nobody can look for tensors\nWhat to change: "
                "return tensors, or tuples, lists and dicts of them; a dataclass of your own can be registered "
                "(torch.export.register_dataclass), a cache of transformers left out (use_cache=False)."
            )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _is_count(value: Any) -> bool:
    """Whether a loss function's second result is a count, not another output that happens to be a scalar."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.dtype in (torch.int64, torch.int32)
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Nested values with their floating tensors in another dtype."""
    if dtype is None:
        return values
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)


def capture(
    model: nn.Module,
    specs: Sequence[InputSpec | Any],
    in_spec: pytree.TreeSpec,
    *,
    loss_fn: Callable[..., Any] | None,
    least_batch: int,
    batch: int,
    training: bool | None = None,
    symbolic: bool = True,
    detach_beside_loss: bool = True,
    precision: MixedPrecisionPolicy | None = None,
    ranks: int = 1,
    gradients: bool = True,
) -> Captured:
    """Captures ``model(*args, **kwargs)``, or its loss where ``loss_fn`` is given and the last argument is the target.

    Args:
        model: the plain model; its tensors are not touched.
        specs, in_spec: the inputs, flattened from ``(args, kwargs)``.
        loss_fn: called as ``loss_fn(output, target)``.
        least_batch: the smallest batch to trace with.
        batch: the batch size of the actual call.
        training: captures in this mode instead of the model's own.
        symbolic: leaves the batch size open.
        detach_beside_loss: where the loss is known (see ``graph.outputs``), detaches the other outputs.
        ranks: of the mesh: into at most so many blocks fused projections are interleaved (see
            ``passes.interleave_projections``).
        precision: the dtypes in which parameters are used, inputs come and outputs leave; None leaves them.
        gradients: whether it is called with gradients enabled.

    Raises:
        CaptureError: when the model cannot be captured.
    """
    mode = make_fake_mode()
    scale = max(1, -(-least_batch // max(batch, 1)))
    memo: dict[int, Any] = {}
    names = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    buffer_names = {id(b): name for name, b in reversed(list(model.named_buffers(remove_duplicate=False)))}
    owners: dict[str, str] = {name: names[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    owners |= {name: buffer_names[id(b)] for name, b in model.named_buffers(remove_duplicate=False)}
    with mode:
        for tensor in (*model.parameters(), *model.buffers()):
            is_parameter = isinstance(tensor, nn.Parameter)
            used = precision.param_dtype if precision is not None and is_parameter else None
            dtype = used if used is not None and tensor.is_floating_point() else tensor.dtype
            fake = torch.empty(tensor.shape, dtype=dtype, device="cpu")
            memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        leaves: list[Any] = []
        dynamic: list[dict[int, Any] | None] = []
        for spec in specs:
            if not isinstance(spec, InputSpec):
                leaves.append(spec)
                dynamic.append(None)
                continue
            shape = (spec.shape[0] * scale, *spec.shape[1:]) if spec.batch else spec.shape
            fake = torch.empty(shape, dtype=spec.dtype)
            leaves.append(fake.requires_grad_(spec.requires_grad))
            dynamic.append({0: Dim.AUTO} if spec.batch and symbolic and scale * batch > 1 else {})
    args, kwargs = pytree.tree_unflatten(leaves, in_spec)
    shapes = pytree.tree_unflatten(dynamic, in_spec)

    tensors = plain_tensors(model)
    if isinstance(loss_fn, nn.Module):
        state = {**dict(loss_fn.named_parameters()), **dict(loss_fn.named_buffers()), **plain_tensors(loss_fn)}
        tensors |= {f"{LOSS}.{name}": tensor for name, tensor in state.items() if id(tensor) not in memo}
    with mode:
        for tensor in tensors.values():
            memo.setdefault(id(tensor), stand_in(tensor, memo))
    memo |= {id(generator): generator for generator in plain_generators(model)}  # they cannot be copied
    attributes = {name: t for name, t in tensors.items() if is_attribute(model, name)}
    owners |= {name: name for name in attributes}
    references = {id(memo[id(t)]): t for t in tensors.values()}
    trained = trained_attributes(tensors)
    constants = {name: memo[id(t)] for name, t in tensors.items() if name not in attributes and t not in REPLACED}
    recorders: list[Recorder] = []

    def make() -> _Training:
        table = dict(memo)
        try:
            plain = copy.deepcopy(model, table)
        except Exception as error:
            raise CaptureError(
                f"{type(model).__name__} cannot be copied for tracing ({error}); make its attributes copyable"
            ) from error
        for name in attributes:
            make_buffer(plain, name)
        if training is not None:
            plain.train(training)
        loss = copy.deepcopy(loss_fn, table) if isinstance(loss_fn, nn.Module) else loss_fn
        pair = (loss_fn, loss) if isinstance(loss_fn, nn.Module) and isinstance(loss, nn.Module) else None
        recorders.append(Recorder(model, plain, table, trained, pair, constants))
        wrapper = _Training(plain, loss, precision, recorders[-1])
        wrapper.training = plain.training
        wrapper.found.copies = table
        wrapper.found.originals = {id(table[id(x)]): x for x in table.get(id(table), ()) if id(x) in table}
        return wrapper

    def trace(runs: list[Run]) -> Captured:
        wrapper = make()
        leave_out(wrapper, runs)
        calls = _calls_of(wrapper)
        program, draws = _export(wrapper, (args, kwargs), shapes, model, calls)
        resolve_opaque_calls(program.graph_module, calls.calls, calls.hooks)
        _name_outputs(program)
        captured = _describe(
            program, model, owners, references, specs, loss_fn is not None, detach_beside_loss, wrapper.found, ranks
        )
        captured.state = wrapper.recorder.state()
        captured.draws = draws
        captured.rebound = frozenset(owners[name] for name in wrapper.recorder.rebound)
        for run in runs:
            inner = replace(run, path=run.path.removeprefix("model."))
            fill_up(captured.graph, inner, captured.parameters, captured.buffers)
        if runs:
            captured.graph.lint()
            captured.module.recompile()
        return captured

    def run(wrapper: nn.Module) -> Any:
        with everything_seen(_calls_of(wrapper)):
            return wrapper(args, kwargs)

    require_full_hooks(model)
    packages = packages_of(model, loss_fn)
    reads = GlobalsRead(owners_of(loss_fn), packages)
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(gradients)
    try:
        with mode:
            whole = make()
            try:
                runs, failed = _rehearse(whole, make, run, reads)
            except StateChangedError as error:
                raise _with_line(error, make(), GlobalsRead(owners_of(loss_fn), packages), run) from None
        with reads if failed else nullcontext():
            try:
                captured = trace(runs)
            except NotAlike:
                captured = trace([])
        captured.state.merge(whole.recorder.state())
        captured.state.merge(reads.state())
        captured.state.merge(read_of_loss(loss_fn))
    finally:
        torch.set_grad_enabled(before)
        reads.forget_cached()
        for recorder in recorders:
            recorder.close()
    captured.rest_dtypes = {n: p.dtype for n, p in model.named_parameters() if memo[id(p)].dtype != p.dtype}
    return captured


def _rehearse(
    whole: _Training, make: Callable[[], nn.Module], run: Callable[[nn.Module], Any], reads: GlobalsRead
) -> tuple[list[Run], bool]:
    """Runs the whole model once, without a trace, to see what it reads of Python: the runs of layers that need not be
    traced, and whether it failed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runs = find_runs(whole, make, run, reads)
    except CaptureError:
        raise
    except Exception:  # noqa: BLE001 - whatever a model cannot do here, tracing it will say better
        return [], True
    return ([] if whole.found.attributes else runs), False


def _with_line(
    error: StateChangedError, wrapper: _Training, reads: GlobalsRead, run: Callable[[nn.Module], Any]
) -> CaptureError:
    """What a run changes that no trace can show, with the line that does, for which a copy runs again."""

    def again() -> None:
        with reads:
            run(wrapper)

    return CaptureError(error.message(first_line(again, lambda: error.has_changed(wrapper.recorder, reads))))


def _calls_of(wrapper: nn.Module) -> Trace:
    """What a trace of a copy of the model notes beside operators."""
    assert isinstance(wrapper, _Training)
    return Trace(wrapper.found.originals, {id(module): path for path, module in wrapper.model.named_modules()})


def _export(
    wrapper: nn.Module, inputs: tuple[Any, ...], shapes: tuple[Any, ...], model: nn.Module, calls: Trace
) -> tuple[ExportedProgram, int]:
    """The trace, and how many times it draws random numbers."""
    try:
        with warnings.catch_warnings(), everything_seen(calls):
            warnings.simplefilter("ignore")
            program = export(wrapper, inputs, dynamic_shapes=shapes, strict=False)
            require_same_memory(program.graph)
            draws = replace_random_operators(program.graph_module)
            with calls.silent():
                _inline_gradient_modes(program, calls)
                return program.run_decompositions({}), draws
    except CaptureError:
        raise
    except Refusal as error:
        raise CaptureError(f"{error} at {line_of(error.node)}\nWhat to change: {error.cure}.") from None
    except Exception as error:
        raise CaptureError(_explain(error, model)) from error


def _inline_gradient_modes(program: ExportedProgram, calls: Trace) -> None:
    """Takes the regions of other gradient modes out of a program, which decomposing would lose."""
    module, graph = program.graph_module, program.graph
    differentiable = {
        n.name for n in graph.nodes if n.op == "placeholder" and getattr(n.meta.get("val"), "requires_grad", False)
    }
    inline_gradient_modes(
        module,
        differentiable,
        enabled=torch.is_grad_enabled(),
        transparent=lambda node: node.target is HOOK,
        aliases=lambda node: node.target is CALL and calls.calls[node.args[2]].aliases,  # type: ignore[index]
    )
    _name_outputs(program)


def _name_outputs(program: ExportedProgram) -> None:
    """Writes the names of the results of a graph that was rewritten into its signature."""
    results = program.graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name


def _explain(error: Exception, model: nn.Module) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    package = __file__.rpartition("/graph/")[0]
    own = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith((package, "<"))]
    if own:
        where = f'"{own[-1].filename}", line {own[-1].lineno}, in {own[-1].name}: {own[-1].line}'
    else:
        code = type(model).forward.__code__
        where = f'"{code.co_filename}", line {code.co_firstlineno}, in forward'
    text = str(error).strip()
    kind = type(error).__name__
    depends = "DataDependent" in kind or "data-dependent" in text or "Could not guard" in text
    if depends and any(_loops_over_experts(m) for m in model.modules()):
        advice = (
            "the experts are looped over one by one, as the tokens need them: make the model with "
            "experts_implementation='grouped_mm' (or 'batched_mm')"
        )
    elif depends:
        advice = (
            "Python control flow or a size depends on a tensor's values: use torch.where or masks, or compute it "
            "outside of the model and pass it in"
        )
    elif kind == "UnsupportedOperatorException" and _draws(text):
        advice = "torch cannot trace this random operator: draw outside of the model, and pass the numbers in"
    elif kind == "SyntaxError" and "proxy_tensor" in text:
        advice = "torch cannot trace x.random_(low, high): write torch.randint(low, high, x.shape)"
    elif ".item()" in text or "scalar" in text:
        advice = "a tensor's value is read into Python: keep it a tensor"
    elif "functorch tensor" in text:
        advice = (
            "write the derivative out, or put it into an autograd.Function: not all that torch.func does inside of "
            "a model can be traced"
        )
    elif "Constraints violated" in text or "specialized" in text:
        advice = "the batch size is fixed somewhere in the model: use x.shape[0] instead of a number"
    else:
        advice = "the model must run under torch.export(strict=False) with a symbolic batch"
    first = text.splitlines()[0] if text else ""
    return f"{type(model).__name__} cannot be captured at {where}\n{kind}: {first}\nWhat to change: {advice}."


def _draws(text: str) -> bool:
    """Whether a text begins with the name of an operator that torch tags as random."""
    names = text.split()[0].split(".")
    target: Any = torch.ops
    for name in names:
        target = getattr(target, name, None)
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _loops_over_experts(module: nn.Module) -> bool:
    """Whether it is a model of transformers in whose experts Python asks which of them have tokens."""
    return getattr(getattr(module, "config", None), "_experts_implementation", "") == "eager"


def _describe(
    program: ExportedProgram,
    model: nn.Module,
    owners: Mapping[str, str],
    references: Mapping[int, torch.Tensor],
    specs: Sequence[InputSpec | Any],
    has_loss_fn: bool,
    detach_beside_loss: bool,
    found: _Found,
    ranks: int,
) -> Captured:
    module = fx.GraphModule(torch.nn.Module(), program.graph)
    graph = module.graph
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs: list[str | None] = []
    first_of: dict[str, fx.Node] = {}
    for spec in program.graph_signature.input_specs:
        node = placeholders.get(spec.arg.name)
        if spec.kind == InputKind.USER_INPUT:
            inputs.append(None if isinstance(spec.arg, ConstantArgument) or node is None else node.name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and str(spec.target).startswith("model."):
            name = owners[str(spec.target).removeprefix("model.")]
            known = first_of.setdefault(name, node)  # type: ignore[arg-type]
            if known is not node and node is not None:  # another name of a tied weight
                node.replace_all_uses_with(known)
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
            constants[node.name] = references.get(id(value), value)
    for node in list(graph.nodes):  # inputs that the graph ignores keep their placeholder, constants lose it
        if node.op == "placeholder" and node.name not in {*parameters, *buffers, *constants, *inputs}:
            if node.users:
                raise CaptureError(f"the input {node.name} is used, but it is not a tensor")
            graph.erase_node(node)

    mutated: list[str] = []
    results: list[fx.Node] = []
    outputs: list[Leaf] = []
    nodes = {n.name: n for n in graph.nodes}
    for out in program.graph_signature.output_specs:
        if out.kind == OutputKind.BUFFER_MUTATION:
            if not str(out.target).startswith("model."):
                raise CaptureError(f"the loss function changes its buffer {out.target} in place\n{IN_THE_MODEL}")
            mutated.append(owners[str(out.target).removeprefix("model.")])
            results.append(nodes[out.arg.name])
        elif out.kind == OutputKind.USER_OUTPUT:
            if isinstance(out.arg, ConstantArgument):
                outputs.append(Constant(out.arg.value))
            elif isinstance(out.arg, SymIntArgument):
                size = nodes[out.arg.name].meta["val"]
                outputs.append(Constant(size) if isinstance(size, int) else Size(size.node.expr))
            else:
                outputs.append(len(results))
                results.append(nodes[out.arg.name])
        else:
            raise CaptureError(_explain_mutation(str(out.target), nodes[out.arg.name], model))
    require_static(graph)
    require_positions(graph)
    output = graph.output_node()
    output.args = (tuple(set_apart(graph, r) if r.name in parameters else r for r in results),)
    canonicalize_operators(module)
    interleave_projections(module, parameters, ranks)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    differentiable = {node for node, name in parameters.items() if name in trainable}
    differentiable |= {
        n for n, spec in zip(inputs, specs, strict=True) if n and isinstance(spec, InputSpec) and spec.requires_grad
    }
    mark_differentiable(graph, differentiable)
    assert found.spec is not None
    attributes: dict[str, tuple[pytree.TreeSpec, list[Leaf]]] = {}
    for name, nesting in reversed(found.attributes.items()):
        attributes[name] = nesting, outputs[len(outputs) - nesting.num_leaves :]
        del outputs[len(outputs) - nesting.num_leaves :]
    flowing = differentiable_outputs(output.args[0], len(mutated))
    scalars = [i for i in flowing if is_loss(output.args[0][i])]
    loss = find_loss(outputs, found.spec, scalars, has_loss_fn)
    alone = loss is not None and detach_beside_loss
    weight = weigh_outputs(module, [loss] if alone else flowing, loss, found.counted)  # type: ignore[list-item]
    name_nodes(graph)
    detached = detach_outputs(graph, len(mutated), loss if alone else None)
    flowing = [i for i in flowing if i not in detached]
    mark_backward(graph)
    graph.lint()
    actual: dict[sympy.Symbol, int] = {}
    for placeholder, spec in zip(inputs, specs, strict=True):
        if placeholder is None or not isinstance(spec, InputSpec):
            continue
        for size, real in zip(nodes[placeholder].meta["val"].shape, spec.shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                actual[size.node.expr] = real
    module.recompile()
    return Captured(
        module, parameters, buffers, constants, inputs, mutated, outputs, found.spec, loss, flowing, detached, actual,
        weight, attributes=attributes,
    )  # fmt: skip


def _explain_mutation(target: str, node: fx.Node, model: nn.Module) -> str:
    if target.startswith("model."):
        return (
            f"the model changes its parameter {target.removeprefix('model.')} in place at {line_of(node)}\n"
            "What to change: only the optimizer may change a parameter; keep other state in a buffer."
        )
    kind, _, name = target.partition("_")
    names = list(inspect.signature(model.forward).parameters)
    if kind == "args" and name.isdigit() and int(name) < len(names):
        name = names[int(name)]
    return (
        f"the model changes its input {name or target} in place at {line_of(node)}\n"
        "What to change: work on a copy (x = x.clone())."
    )


def set_device(graph: fx.Graph, device: torch.device) -> None:
    """Rewrites the device that the traced program creates tensors on."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}

