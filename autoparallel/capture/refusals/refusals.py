"""What a traced graph cannot be a program with: refused before it is rewritten, with the line of the model."""

from __future__ import annotations

import copy
import dis
import inspect
import re
import traceback
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoparallel._torch.dtensor import local_of
from autoparallel._torch.export import free_unbacked_symbols
from autoparallel._torch.tensors import memory_span
from autoparallel.capture.refusals.data_access import KERNEL_CURE, refused_memory
from autoparallel.graph.captured import Captured, CaptureError, refusal
from autoparallel.graph.lines import line_of
from autoparallel.graph.plain_tensors import tensor_at
from autoparallel.graph.python_state import OURS
from autoparallel.passes.settle_memory import STRIDED, relative_start
from autoparallel.rules import operator_name
from autoparallel.rules.calls import is_tensor, tensor_operands


def require_static(graph: fx.Graph, numbers: Collection[str]) -> list[str]:
    """Refuses sizes and numbers that are known only when the program runs; what is only checked is left out.

    Args:
        numbers: the placeholders of numbers that the call is given: what is computed of them is no size.

    Returns:
        The lines of the checks.
    """
    checks: list[str] = []
    allowed: set[Any] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, _READ) and any(map(is_tensor, node.all_input_nodes)):
            if [x.name in numbers for x in node.all_input_nodes] == [True]:
                allowed |= free_unbacked_symbols(value)
            elif _is_only_checked(node):
                allowed |= free_unbacked_symbols(value)
                checks.append(line_of(node))
        unknown = [free_unbacked_symbols(v) for v in pytree.tree_leaves(value)]
        counted = _counts_values(node)
        if counted or any(symbols - (set() if isinstance(value, torch.Tensor) else allowed) for symbols in unknown):
            if operator_name(node.target) in ("aten._local_scalar_dense", "aten.item"):
                cure = "keep it a tensor (no .item()), or compute it outside of the model and pass it in"
                raise refusal("a tensor's value is read into Python", line_of(node), cure)
            raise refusal("a size depends on a tensor's values", line_of(node), KEEP_ALL_ROWS)
    return checks


def _counts_values(node: fx.Node) -> bool:
    """Whether a call selects by values as many rows as there are, also where torch took their number from a later use.

    ``h[mask] + x`` makes it that of ``x``: then no symbol tells, and a call that selects another would be wrong.
    """
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    if node.target in _SIZED_BY:  # it is sized by a number, where that is given
        position, name, unset = _SIZED_BY[node.target]
        return (node.args[position] if len(node.args) > position else node.kwargs.get(name, unset)) == unset
    operands = tensor_operands(node)
    return node.target is not _ATEN.index.Tensor or any(x.meta["val"].dtype in _MASKS for x in operands[1:])


def _is_only_checked(node: fx.Node) -> bool:
    """Whether a value that is read into Python ends in assertions (``torch._check``)."""
    return bool(node.users) and all(
        user.target in _CHECKS or user.op == "call_function" and not is_tensor(user) and _is_only_checked(user)
        for user in node.users
    )


_MASKS = (torch.bool, torch.uint8)
_SIZED_BY = {
    torch.ops.aten.one_hot.default: (1, "num_classes", -1),
    torch.ops.aten.repeat_interleave.Tensor: (1, "output_size", None),
}
_READ = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CHECKS = (torch.ops.aten._assert_scalar.default,)


def require_same_memory(graph: fx.Graph) -> None:
    """Refuses ``x.set_(y)``, which a functional graph would take for the use of another tensor."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == "aten::set_":
            raise refused_memory("x.set_(...)", line_of(node))


def require_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses a sparse tensor that a model holds: it is traced, priced and cut like a dense one."""
    for name, tensor in tensors.items():
        if not _is_dense(tensor):
            raise CaptureError(
                f"{name} is not dense ({tensor.layout}), and only dense tensors are traced\nWhat to change: {_DENSE}."
            )


def require_dense_values(graph: fx.Graph) -> None:
    """Refuses a sparse tensor that a model makes."""
    for node in graph.nodes:
        if is_tensor(node) and not _is_dense(node.meta["val"]):
            raise refusal("the model makes a tensor that is not dense", line_of(node), _DENSE)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


_DENSE = (
    "keep it as tensor.to_dense(), or as its indices and values, with index_add_ or index_select in the place of its "
    "product"
)


def require_own_memory(captured: Captured, model: nn.Module) -> None:
    """Refuses a tensor in whose memory another lies that a step or a call changes in place.

    In the plain model both change; here a parameter has memory of its own, and a buffer's new value is written back to
    that buffer.  What nobody changes may share.
    """
    tensors: dict[fx.Node, tuple[str, torch.Tensor, bool]] = {}
    for node in captured.graph.find_nodes(op="placeholder"):
        if name := captured.parameters.get(node.name):
            parameter = model.get_parameter(name)
            tensors[node] = name, local_of(parameter), parameter.requires_grad
        elif name := captured.buffers.get(node.name):
            changes = name in captured.mutated_buffers and name not in captured.rebound
            if changes or node.users:  # an attribute that a hook sets before it is read has no users
                tensors[node] = name, tensor_at(model, name), changes
        elif node.name in captured.constants and node.users:
            tensors[node] = node.name, captured.constants[node.name], False
    spans = sorted((*memory_span(tensor), node.name, node) for node, (_, tensor, _) in tensors.items())
    for i, (device, _, end, _, node) in enumerate(spans):
        for other_device, other_start, _, _, other in spans[i + 1 :]:
            if (other_device, other_start) >= (device, end):
                break
            changed, twin = (node, other) if tensors[node][2] else (other, node)
            if tensors[changed][2]:
                raise refusal(
                    f"{tensors[changed][0]}, which is changed in place, and {tensors[twin][0]} lie in the same memory; "
                    "the latter is read",
                    line_of(next(iter(twin.users), twin)),
                    "keep one of them and make the other of it in forward (self.weight[:4].detach()), register one "
                    "tensor under both names (b.weight = a.weight), or clone() it",
                )


def require_positions(graph: fx.Graph) -> None:
    """Refuses what reads or writes through strides of which nobody can say which elements they name."""
    for node in graph.nodes:
        if node.target in STRIDED and relative_start(node) is None:
            raise refusal(
                "the model reads or writes through strides (as_strided) of a tensor that does not lie in one piece in "
                "memory,",
                line_of(node),
                "slice, index, unfold() or diagonal() it, or make it contiguous() before",
            )


def require_same_dtypes(graph: fx.Graph) -> None:
    """Refuses products of two dtypes, which torch traces and cannot run."""
    for node in graph.nodes:
        dtypes = {x.meta["val"].dtype: None for x in tensor_operands(node)} if node.target in _PRODUCTS else {}
        if len(dtypes) > 1:
            shown = " by ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            error = TypeError(f"{operator_name(node.target)} multiplies {shown}")
            raise refusal(str(error), line_of(node), "give it inputs of the model's dtype, or cast them") from error


_ATEN = torch.ops.aten
_PRODUCTS = (
    _ATEN.linear.default, _ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN.baddbmm.default,
    _ATEN.convolution.default,
)  # fmt: skip


def _own_frames(frames: Collection[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Those of an error's frames that are neither torch's nor ours: the model's and its libraries'."""
    return [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith((OURS, "<"))]


def place_of(error: BaseException) -> object:
    """What kind of error was raised, and in which line of a model."""
    frames = _own_frames(traceback.extract_tb(error.__traceback__))
    return type(error), [(f.filename, f.lineno) for f in frames[-1:]]


def is_raised_by_model(error: BaseException) -> bool:
    """Whether an error comes of a ``raise`` or an ``assert`` of the model, or of a library of its, and of no other
    error of a trace alone: torch fails otherwise on tensors without memory than on those of the call."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not _own_frames(traceback.extract_tb(trace)):
        return False
    context = error.__context__
    if context is not None and not (is_raised_by_model(context) or _fails_on_values(context)):
        return False
    code = trace.tb_frame.f_code.co_code
    return dis.opname[code[trace.tb_lasti]] == "RAISE_VARARGS"


def _fails_on_values(error: BaseException) -> bool:
    """Whether Python or torch raises an error for the tensors of a call as well, such as for their shapes: of what
    tensors without memory cannot do, torch says so."""
    kinds = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, ZeroDivisionError)
    return type(error) in kinds and not _OF_A_TRACE.search(str(error))


_NO_INPUT = re.compile(r"Unsupported input type|Unfamiliar meta val|^expected \d+ shapes, got \d+")
"""What ``torch.export`` says of arguments that it does not take."""

_OF_A_TRACE = re.compile(
    r"data-dependent|could not guard|numpy|data pointer|storage|subclass|fake|meta|symbol|symint|proxy|export|dynamo"
    r"|dispatch|generator|unbacked|functional",
    re.IGNORECASE,
)


def explain_failure(error: Exception, model: nn.Module, in_loss: bool) -> str:
    """What a model or its loss function does that cannot be traced, with its line, or else its module, and a cure.

    Args:
        model: the copy that was run.
        in_loss: whether it has run, and its loss function failed.
    """
    own_frames = _own_frames(traceback.extract_tb(error.__traceback__))
    modules = list(_modules_of(error))
    paths = {id(module): path for path, module in model.named_modules()}
    inner = next((module for module in modules if id(module) in paths), model)
    where = "its loss function" if in_loss else f"{paths[id(inner)] or 'its call'}, a {type(inner).__name__}"
    if own_frames:
        last = own_frames[-1]
        line = f'"{last.filename}", line {last.lineno}, in {last.name}: {last.line}'
        where = f"{where}, {line}" if in_loss else line
    text = str(error).strip()
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in text or "Could not guard" in text or "DynamicOutput" in kind:
        what, advice = _explain_value(error, modules, own_frames[-1].line or "" if own_frames else "")
        return f"{type(model).__name__} cannot be captured at {where}\n{what}\nWhat to change: {advice}."
    if kind == "UnsupportedOperatorException" and _draws(text):
        advice = "torch cannot trace this random operator: draw outside of the model, and pass the numbers in"
    elif "torch._C.Generator" in text:  # of torch 2.11, which does not trace it
        text = "this draws from a torch.Generator of its own, whose numbers would be those of the trace in every call"
        advice = "leave out generator=, or draw outside of the model and pass the numbers in"
    elif "expected compiled_fn to be GraphModule" in text:  # of torch.export, for a tensor under two names
        names = " and as ".join(_registered_twice(model)) or "twice"
        text = f"a buffer that is registered as {names} is changed in place, which torch cannot trace"
        advice = "register it once, and reach it through the module that has it (keep that module, not its buffer)"
    elif "is mutated in the forward method" in text:
        text = "a tensor is changed in place that is reached otherwise than through the model, as by a hook's closure"
        advice = "register it as a buffer, and reach it through the module that the hook or the function is given"
    elif "Cannot access data pointer" in text:
        text = "a kernel is launched on a tensor's memory, which no tensor of a trace has"
        advice = KERNEL_CURE
    elif kind == "SyntaxError" and "proxy_tensor" in text:
        advice = "torch cannot trace x.random_(low, high): write torch.randint(low, high, x.shape)"
    elif "Dynamo" in kind and "RecursionError" in text:
        advice = (
            "a function that torch.cond, while_loop, scan or flex_attention runs reads an attribute of a module: read "
            "it before (w = self.layer.weight), and let the function use that (F.linear(h, w)) instead of the module"
        )
    elif "FunctionalTensor on its own" in text:
        text = "a function that torch.cond, while_loop, scan or flex_attention runs makes a tensor of a number"
        advice = "write the number itself (score * 0.5), or make the tensor before, and let the function read it"
    elif "Unsupported input type" in text and "BlockMask" in text:
        text = "a BlockMask is passed in, which torch cannot trace"
        advice = "make it inside of the model, of tensors that are passed in, or keep it as an attribute of the model"
    elif _NO_INPUT.search(text):
        text = "an argument is neither a tensor nor a number, a string or None, nor a container of these"
        advice = (
            "set a function, a dtype, a device, an enum or a module as an attribute of the model (model.act = "
            "torch.tanh), which belongs to the kind of call, or pass a string or a number that says which to take"
        )
    elif kind == "UncapturedHigherOrderOpError":
        advice = next((line.strip().removeprefix("Hint: ") for line in text.splitlines() if "Hint: " in line), "")
        text = next((line for line in text.splitlines()[1:] if line.strip()), text)
        advice = advice.rstrip(".") or "write it without a higher-order operator"
    elif ".numpy() is not supported" in text:
        text = "a tensor is given to numpy, or to scipy"
        advice = (
            "compute what they do in the loop, of what the model returns (a matching loss of a detector: "
            "outputs = model(pixel_values), then its loss function of the outputs and the labels, which is "
            "differentiated); or put it into a custom operator (torch.library.custom_op)"
        )
    elif kind == "ValueError" and "destination is read-only" in text:
        text = "an array of numpy is changed that shares a tensor's memory"
        advice = "change the tensor itself (lengths[0] += 1)"
    elif ".item()" in text:
        advice = "a tensor's value is read into Python: keep it a tensor"
    elif "functorch tensor" in text or "Expected FakeTensor" in text:  # the latter of torch 2.11, of torch.func.jvp
        advice = (
            "write the derivative out, or put it into an autograd.Function: not all that torch.func does inside of "
            "a model can be traced"
        )
    elif kind == "TypeError" and not in_loss and not own_frames and inner is model and _MISCALLED.search(text):
        where = "its call"
        advice = (
            "give it what its forward takes; a target comes last, by its position, and is for the loss function that "
            "compile(loss_fn=...) has been given"
        )
    elif "Constraints violated" in text or "specialized" in text:
        advice = "the batch size is fixed somewhere in the model: use x.shape[0] instead of a number"
    else:
        advice = (
            "where the plain model raises the same, give it other arguments; else write this in a way that runs under "
            "torch.export(strict=False) with a symbolic batch"
        )
    first = text.splitlines()[0] if text else ""
    return f"{type(model).__name__} cannot be captured at {where}\n{kind}: {first}\nWhat to change: {advice}."


def _registered_twice(model: nn.Module) -> list[str]:
    """The names of the first buffer that several modules have, or one under several names."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                names.setdefault(id(buffer), []).append(f"{path}.{name}".lstrip("."))
    return next((each for each in names.values() if len(each) > 1), [])


def uncopied(model: nn.Module, memo: Mapping[int, Any]) -> str:
    """What of a model cannot be copied: the first attribute of a module that cannot be alone, else the model.

    Args:
        memo: of ``copy.deepcopy``.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # noqa: BLE001 - whatever the user's class raises
                return f"{'.'.join(filter(None, (path, name)))}, a {type(value).__name__},"
    return type(model).__name__


_OF_TORCH = {
    "AdaptiveLogSoftmaxWithLoss": "use a linear layer and F.cross_entropy, whose classes plans can shard: this module "
    "picks the rows of each cluster by the targets' values",
    "FakeQuantize": "quantise by torch.ao.quantization.FusedMovingAvgObsFakeQuantize (get_default_qat_qconfig()), "
    "which is one operator, and call the plain model once before compile(), so that its observers have shapes",
}
"""What to do instead of modules of torch whose Python depends on values, by the name of the class."""

INSTEAD_OF_WAYS = (
    "torch.where(condition, a, b) takes elements of both, torch.cond(condition, f, g, operands) runs one of two "
    "functions; a check that only raises belongs before the call, and what Python must know (a largest length) into an "
    "argument that is a number"
)
"""What to do instead of going one of two ways by a tensor's value."""

KEEP_ALL_ROWS = (
    "keep all rows and weigh them by masks, such as (loss * mask).sum() / mask.sum(), use torch.where or ignore_index, "
    "or compute it outside of the model and pass it in"
)
"""What to do instead of selecting as many rows as there are by a tensor's values."""

_MISCALLED = re.compile(r"forward\(\) (takes|got|missing) ")

_ATTRIBUTE = re.compile(r"\b\w+\.(\w+)")
_LOOPS = re.compile(r"\s*(async )?for\b(?!.*\b(range|int|item|tolist)\()")
_DECIDES = re.compile(r"\s*(if|elif|while|assert)\b|\bif\b.+\belse\b|\b(any|all|bool)\(")


def _explain_value(error: Exception, modules: list[nn.Module], line: str) -> tuple[str, str]:
    """What Python does with a tensor's values in a line, and what to do instead."""
    for module in modules:
        names = {cls.__name__ for cls in type(module).__mro__}
        advice = next((text for name, text in _OF_TORCH.items() if name in names), None)
        if advice is not None:
            return f"Python there depends on a tensor's values, inside of {type(module).__name__}", advice
    if any(_loops_over_experts(module) for module in modules):
        return "Python loops over the experts one by one, as the tokens need them", (
            "make the model with experts_implementation='grouped_mm' (or 'batched_mm')"
        )
    if "DynamicOutput" in type(error).__name__:
        return "a size depends on a tensor's values", KEEP_ALL_ROWS
    buffers = modules[0]._buffers if modules else {}
    if flag := next((name for name in _ATTRIBUTE.findall(line) if buffers.get(name) is not None), None):
        return f"Python asks for the value of the buffer {flag}", (
            "keep it as a plain attribute, a number or a bool, and set it outside of compiled calls (what a first call "
            "sets, a call of the plain model before compile() does); or take elements of both ways by torch.where"
        )
    if _LOOPS.match(line):
        return "Python loops over as many rows as a tensor's values say", (
            "loop over all that there may be (for expert in range(n): places = torch.where(mask[expert])), without "
            "leaving out those of no rows, which add nothing; or make the list of rows before the call"
        )
    if _DECIDES.search(line):
        return "Python takes a way that depends on a tensor's values", INSTEAD_OF_WAYS
    return "a tensor's value is read into Python", (
        "keep it a tensor (no int(), float(), .item(), .tolist()), or compute it before the call and pass it in as a "
        "number"
    )


def _modules_of(error: Exception) -> Iterator[nn.Module]:
    """The modules whose code an error has passed through, the innermost first."""
    modules = []
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            modules.append(module)
        trace = trace.tb_next
    return reversed(modules)


def _draws(text: str) -> bool:
    """Whether a text begins with the name of an operator that torch tags as random."""
    names = text.split()[0].split(".")
    target: Any = torch.ops
    for name in names:
        target = getattr(target, name, None)
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _loops_over_experts(module: nn.Module) -> bool:
    """Whether it is a module of transformers in which Python asks which experts have tokens, where it can also not."""
    return hasattr(module, "is_transposed") and type(module).__module__.startswith("transformers.")


def refused_mutation(target: str, node: fx.Node, model: nn.Module) -> CaptureError:
    if target.startswith("model."):
        return refusal(
            f"the model changes its parameter {target.removeprefix('model.')} in place",
            line_of(node),
            "let an optimizer change it, or the loop between calls, under no_grad (a momentum encoder), or keep it in "
            "a buffer",
        )
    kind, _, name = target.partition("_")
    names = list(inspect.signature(model.forward).parameters)
    if kind == "args" and name.isdigit() and int(name) < len(names):
        name = names[int(name)]
    return refusal(
        f"the model changes its input {name or target} in place",
        line_of(node),
        "work on a copy (x = x.clone()); a class that is not yours is given one by a module around it, whose forward "
        "calls it with x.clone()",
    )
