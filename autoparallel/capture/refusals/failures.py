"""How a model or its loss function fails while it is traced, in words of the model: what it does, where, and a cure."""

from __future__ import annotations

import dis
import re
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoparallel.capture.refusals.data_access import KERNEL_CURE
from autoparallel.capture.refusals.refusals import INSTEAD_OF_WAYS, KEEP_ALL_ROWS
from autoparallel.graph.python_state import is_generated, is_tracers_file


def _own_frames(frames: Collection[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Those of an error's frames that are neither torch's nor ours: the model's and its libraries'."""
    return [f for f in frames if not (is_tracers_file(f.filename) or is_generated(f.filename))]


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


_OF_A_TRACE = re.compile(
    r"data-dependent|could not guard|numpy|data pointer|storage|subclass|fake|meta|symbol|symint|proxy|export|dynamo"
    r"|dispatch|generator|unbacked|functional",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class _Symptom:
    """What an error that torch or Python raises tells of a model.

    Attributes:
        text: a regular expression that is searched for in the error's message.
        cure: what to change; empty where the message has a hint of torch's.
        what: the model does, which is said in the place of the message; empty where the message says it.
        kind: a part of the name of the error's class.
    """

    text: str
    cure: str
    what: str = ""
    kind: str = ""


_SYMPTOMS = (
    _Symptom(
        r"torch\._C\.Generator",  # of torch 2.11, which does not trace it
        "leave out generator=, or draw outside of the model and pass the numbers in",
        "this draws from a torch.Generator of its own, whose numbers would be those of the trace in every call",
    ),
    _Symptom(
        "is called directly, but its parameters lie over the mesh",
        "compute it in the model's forward, and return it beside the output, which the loss function is given",
        "a part of the compiled model is called otherwise than through it, as by a loss function or a module apart",
    ),
    _Symptom(
        "is mutated in the forward method",
        "register it as a buffer, and reach it through the module that the hook or the function is given",
        "a tensor is changed in place that is reached otherwise than through the model, as by a hook's closure",
    ),
    _Symptom(
        "Cannot access data pointer",
        KERNEL_CURE,
        "a kernel is launched on a tensor's memory, which no tensor of a trace has",
    ),
    _Symptom(
        "proxy_tensor",
        "torch cannot trace x.random_(low, high): write torch.randint(low, high, x.shape)",
        kind="SyntaxError",
    ),
    _Symptom(
        "RecursionError",
        "a function that torch.cond, while_loop, scan or flex_attention runs reads an attribute of a module: read it "
        "before (w = self.layer.weight), and let the function use that (F.linear(h, w)) instead of the module",
        kind="Dynamo",
    ),
    _Symptom(
        "FunctionalTensor on its own",
        "write the number itself (score * 0.5), or make the tensor before, and let the function read it",
        "a function that torch.cond, while_loop, scan or flex_attention runs makes a tensor of a number",
    ),
    _Symptom(
        "Unsupported input type.*BlockMask",
        "make it inside of the model, of tensors that are passed in, or keep it as an attribute of the model",
        "a BlockMask is passed in, which torch cannot trace",
    ),
    _Symptom(
        r"Unsupported input type|Unfamiliar meta val|^expected \d+ shapes, got \d+",
        "pass the tensors that an object holds (model(data.x, data.edge_index)); set a function or a module as an "
        "attribute of the model (model.act = torch.tanh), which belongs to the kind of call, or pass a string or a "
        "number that says which to take",
        "an argument is neither a tensor nor a constant (a number, a string, a dtype), nor a container of these",
    ),
    _Symptom("", "", kind="UncapturedHigherOrderOpError"),
    _Symptom(
        r"\.numpy\(\) is not supported",
        "return the tensor, or its array as it is (x.detach().cpu().numpy()), and compute what they do of it in the "
        "loop (a matching loss of a detector: outputs = model(pixel_values), then its loss function of the outputs and "
        "the labels, which is differentiated); or put it into a custom operator (torch.library.custom_op)",
        "a tensor is given to numpy, or to scipy",
    ),
    _Symptom(
        "EarlierEntry",
        "return what is collected as an output, or empty the list at the beginning of the call (self.log.clear())",
        "a list is read to which calls add, and that holds what earlier ones have added",
    ),
    _Symptom(
        "destination is read-only",
        "change the tensor itself (lengths[0] += 1)",
        "an array of numpy is changed that shares a tensor's memory",
        kind="ValueError",
    ),
    _Symptom(
        "Unknown symbol zuf",
        "take the power of the tensor (x ** 0.5), or math.sqrt(n) and products",
        "a power is taken of a number that is read of a tensor, which torch traces from 2.13 on",
    ),
    _Symptom(r"\.item\(\)", "a tensor's value is read into Python: keep it a tensor"),
    _Symptom(
        "functorch tensor|Expected FakeTensor",  # the latter of torch 2.11, of torch.func.jvp
        "write the derivative out, or put it into an autograd.Function: not all that torch.func does inside of a model "
        "can be traced",
    ),
    _Symptom(
        "Constraints violated|specialized",
        "the batch size is fixed somewhere in the model: use x.shape[0] instead of a number",
    ),
    _Symptom(
        "",
        "where the plain model raises the same, give it other arguments; else write this in a way that runs under "
        "torch.export(strict=False) with a symbolic batch",
    ),
)
"""What is looked for in an error, one after the other; the last one is what every error shows."""


def error_of_call(error: Exception, model: nn.Module, in_loss: bool) -> TypeError | None:
    """What Python says, with a cure, of a call whose arguments the model does not take; None for other errors.

    Args:
        model, in_loss: as of :func:`explain_failure`.
    """
    text = str(error)
    is_inside = (
        in_loss or _own_frames(traceback.extract_tb(error.__traceback__)) or _inner_of(error, model) is not model
    )
    if type(error) is not TypeError or is_inside or not _MISCALLED.match(text):
        return None
    return TypeError(f"{text}\nWhat to change: {_CALL}.")


def _inner_of(error: Exception, model: nn.Module) -> nn.Module:
    """The innermost module of a model that has raised an error."""
    parts = {id(module) for module in model.modules()}
    return next((module for module in _modules_of(error) if id(module) in parts), model)


def explain_failure(error: Exception, model: nn.Module, in_loss: bool) -> str:
    """What a model or its loss function does that cannot be traced, with its line, or else its module, and a cure.

    Args:
        model: the copy that was run.
        in_loss: whether it has run, and its loss function failed.
    """
    own_frames = _own_frames(traceback.extract_tb(error.__traceback__))
    modules = list(_modules_of(error))
    paths = {id(module): path for path, module in model.named_modules()}
    inner = _inner_of(error, model)
    where = "its loss function" if in_loss else f"{paths[id(inner)] or 'its call'}, a {type(inner).__name__}"
    if own_frames:
        last = own_frames[-1]
        line = f'"{last.filename}", line {last.lineno}, in {last.name}: {last.line}'
        where = f"{where}, {line}" if in_loss else line
    kind, text = type(error).__name__, str(error).strip()
    if _BY_VALUE.search(f"{kind}: {text}"):
        what, cure = _explain_value(error, modules, own_frames[-1].line or "" if own_frames else "")
    elif error_of_call(error, model, in_loss) is not None:
        where, what, cure = "its call", f"{kind}: {text}", _CALL
    else:
        what, cure = _explain_symptom(kind, text)
        what = f"{kind}: {what}"
    return f"{type(model).__name__} cannot be captured at {where}\n{what.splitlines()[0]}\nWhat to change: {cure}."


def _explain_symptom(kind: str, text: str) -> tuple[str, str]:
    """What an error of a class says by its message, and what to change."""
    if kind == "UnsupportedOperatorException" and _draws(text):
        return text, "torch cannot trace this random operator: draw outside of the model, and pass the numbers in"
    symptom = next(each for each in _SYMPTOMS if each.kind in kind and re.search(each.text, text, re.DOTALL))
    if symptom.cure:
        return symptom.what or text, symptom.cure
    hint = next((line.strip().removeprefix("Hint: ") for line in text.splitlines() if "Hint: " in line), "")
    what = next((line for line in text.splitlines()[1:] if line.strip()), text)
    return what, hint.rstrip(".") or "write it without a higher-order operator"


_OF_TORCH = {
    "AdaptiveLogSoftmaxWithLoss": "use a linear layer and F.cross_entropy, whose classes plans can shard: this module "
    "picks the rows of each cluster by the targets' values",
    "FakeQuantize": "quantise by torch.ao.quantization.FusedMovingAvgObsFakeQuantize (get_default_qat_qconfig()), "
    "which is one operator, and call the plain model once before compile(), so that its observers have shapes",
}
"""What to do instead of modules of torch whose Python depends on values, by the name of the class."""

_BY_VALUE = re.compile(r"^\w*DataDependent|^\w*DynamicOutput|data-dependent|Could not guard|^PendingUnbacked")
_MISCALLED = re.compile(r"[\w.]+\(\) (takes|got|missing) ")
_CALL = (
    "give it what it takes; a target comes last, by its position, and is for the loss function that "
    "compile(loss_fn=...) has been given"
)

_ATTRIBUTE = re.compile(r"\b\w+\.(\w+)")
_LOOPS = re.compile(r"\s*(async )?for\b(?!.*\b(range|int|item|tolist)\()")
_FLOAT = re.compile(r"\bfloat\(")
_CUTS = re.compile(r"\[[^\]]*(\b[A-Za-z_]\w*\s*:|\)\s*:|:\s*[A-Za-z_(])")
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
            "keep a place that moves on as a plain attribute (self.at = 0), which calls may read and change, or index "
            "by a tensor, queue[:, (at + torch.arange(n)) % size]; set what says which way to go outside of compiled "
            "calls (a call of the plain model before compile() does what the first one sets), or take elements of both "
            "ways by torch.where"
        )
    if _LOOPS.match(line):
        return "Python loops over as many rows as a tensor's values say", (
            "loop over all that there may be (for expert in range(n): places = torch.where(mask[expert])), without "
            "leaving out those of no rows, which add nothing; or make the list of rows before the call"
        )
    if _DECIDES.search(line):
        return "Python takes a way that depends on a tensor's values", INSTEAD_OF_WAYS
    if _FLOAT.search(line):
        return "a number that no trace has is read into Python, of a tensor or one that the call draws,", (
            "compute with x.item(), or float(x), by Python's arithmetic and functions such as math.exp, ask about it "
            "(if n > 3), give it to operators, keep and return it; or keep it a tensor"
        )
    if _CUTS.search(line):
        return "a part is cut whose size a tensor's values decide", (
            "take elements of both, torch.where(torch.arange(x.shape[1]) < n, x, y), or compute with all and mask what "
            "is left out; or compute the number before the call and pass it in"
        )
    return "a tensor's value is read into Python", (
        "keep it a tensor, or give the number to operators, slices and splits alone (x * n, x[:, :n]); or compute it "
        "before the call and pass it in as a number"
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
