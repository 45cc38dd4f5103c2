"""From a model to its forward graph: what is tried, one attempt after another, until a model can be traced.

What an attempt leaves open (numbers, lengths, the batch size), the next one fixes (see ``capture.attempt``).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.capture.attempt import Attempt
from autoparallel.capture.fake_inputs import scale_of, traced_shape
from autoparallel.capture.python.changes import VariablesChangedError
from autoparallel.capture.refusals.refusals import SizedByValuesError
from autoparallel.capture.settings import CaptureSettings
from autoparallel.capture.tracing.inputs_read import CounterReadError
from autoparallel.graph.beside import beside_in, method_of, take_apart
from autoparallel.graph.calls import closed, fits, without_numbers
from autoparallel.graph.captured import Captured, InputSpec, NumberSpec
from autoparallel.graph.errors import CaptureError, FailsUntraced, ReadAgainError
from autoparallel.graph.garbage import MANY, collected_rarely, count_as_old
from autoparallel.graph.surroundings import surroundings_of
from autoparallel.passes.follow_batch import follow_results, weight_of_rows


class _Values(Enum):
    """What becomes of values of tensors that Python reads: they are refused as sizes, it is told those that follow from
    inputs, or they may be sizes."""

    REFUSED = auto()
    READ = auto()
    SIZES = auto()


def capture(
    model: nn.Module,
    specs: Sequence[InputSpec | Any],
    in_spec: pytree.TreeSpec,
    settings: CaptureSettings,
    leaves: Sequence[Any] = (),
) -> Captured:
    """Captures ``model(*args, **kwargs)``, or its loss where ``loss_fn`` is given and the last argument is the target.

    What a model does not leave open is fixed: first numbers, then lengths, then the batch size, too.  A model whose
    Python reads values of inputs is told of single numbers where all sizes are open (``int(batch.max()) + 1`` graphs),
    and of all values where none is; ``Captured.fixed`` has the lines.  In the end, numbers that it reads may be sizes.
    The arguments are those of :class:`Attempt`.

    Raises:
        CaptureError: when the model cannot be captured.
    """
    with collected_rarely(MANY):
        try:
            return _capture(model, specs, in_spec, settings, leaves)
        finally:
            count_as_old()


def _capture(
    model: nn.Module,
    specs: Sequence[InputSpec | Any],
    in_spec: pytree.TreeSpec,
    settings: CaptureSettings,
    leaves: Sequence[Any],
) -> Captured:
    _torch.export.import_tracer()
    fixed_numbers = without_numbers(specs)
    fully_closed = closed(fixed_numbers, batch=False)
    numbers = any(isinstance(s, NumberSpec) and not s.is_drawn for s in specs)
    has_batch = any(s.batch for s in specs if isinstance(s, InputSpec))
    attempts = [(specs, _Values.REFUSED)]
    attempts += [(fixed_numbers, _Values.REFUSED)] * numbers
    attempts += [(closed(fixed_numbers), _Values.REFUSED)] * any(s.open for s in specs if isinstance(s, InputSpec))
    attempts += [(fully_closed, _Values.REFUSED)] * has_batch
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        attempts += [(fixed_numbers, _Values.READ)] * has_batch
        attempts += [(fully_closed, _Values.READ)]
    attempts += [(fixed_numbers, _Values.SIZES)] * has_batch
    attempts += [(fully_closed, _Values.SIZES)]
    failed: CaptureError | None = None
    vain: list[Any] | None = None  # what a model cannot be called with, traced or not
    reads_values = reads_flags = fixes_whole = refused = is_sized = False
    surroundings, rounds = surroundings_of(model), 0
    fixed: dict[str, None] = {}
    counters: set[str] = set()
    while attempts:
        forms, values = attempts.pop(0)
        is_vain = {_Values.READ: not reads_values, _Values.SIZES: not is_sized}.get(values, refused)
        if is_vain or values is _Values.REFUSED and _examples(forms, settings) == vain:
            continue
        attempt = Attempt(
            model, forms, in_spec, settings, fixed=fixed, leaves=leaves, may_read=values is _Values.READ,
            may_size=values is _Values.SIZES, counters=counters, reads_flags=reads_flags, fixes_whole=fixes_whole,
            looks_after=rounds < _MOST_ROUNDS,
        )  # fmt: skip
        try:
            with _torch.export.without_reports(), _torch.transforms.left_at_the_end():
                captured = attempt.capture()
        except ReadAgainError:  # whatever is open
            raise
        except VariablesChangedError as error:
            rounds += 1
            for variable in error.variables:
                surroundings.add(variable)
            attempts.insert(0, (forms, values))
            continue
        except CounterReadError as error:
            counters |= error.labels
            attempts.insert(0, (forms, values))
            continue
        except CaptureError as error:
            failed = error  # the last one speaks of the sizes of the call
            if attempt.has_open_whole and not fixes_whole:  # where a crop begins, which decides a size to the trace
                fixes_whole = True
                attempts.insert(0, (forms, values))
                continue
            if attempt.asks_flags and not reads_flags:
                reads_flags = True
                attempts.insert(0, (forms, values))
                continue
            reads_values |= attempt.reads_values
            is_sized |= isinstance(error, SizedByValuesError)
            refused = error.__cause__ is None and not numbers  # by ourselves, whatever is open
            vain = _examples(forms, settings) if isinstance(error, FailsUntraced) else vain
            fixed[str(error).splitlines()[0].partition(" at ")[2]] = None
            continue
        if values is _Values.REFUSED or forms is not fixed_numbers:  # else no size need be fixed
            captured.fixed = tuple(line for line in fixed if line not in ("", "an unknown line"))
        captured.numbers = tuple([i for i, spec in enumerate(forms) if isinstance(spec, NumberSpec)])
        if fits(captured, forms):
            captured.pinned = _pinned_numbers(captured, specs, in_spec)
            captured.weight = weight_of_rows(captured, specs)
            norms = [name for name, module in model.named_modules() if isinstance(module, _torch.nn.BatchNorm)]
            statistics = [path for path in captured.mutated if path.rpartition(".")[0] in norms]
            follow_results(captured, specs, statistics)
            return captured
    assert failed is not None  # the last attempt has no symbols that could differ from the call
    if failed.__cause__ is not None:
        text = f"{failed}\n{_arguments(model, specs, in_spec, settings)}"
        raised = failed.raised_by_model if isinstance(failed, FailsUntraced) else None
        raise (CaptureError(text) if raised is None else FailsUntraced(text, raised)) from failed.__cause__
    raise failed


_MOST_ROUNDS = 4
"""How often what a run changes around a model is looked after: cells may be made anew in each call."""


def _pinned_numbers(captured: Captured, specs: Sequence[InputSpec | Any], in_spec: pytree.TreeSpec) -> dict[str, str]:
    """The numbers among the attributes that a call is given of which its trace serves this value alone, with the line
    that fixes one."""
    names, numbers = (beside_in(leaves, in_spec).numbers for leaves in (captured.inputs, specs))
    line = next(reversed(captured.fixed), "an unknown line")
    return {label: line for label, spec in numbers.items() if spec.open and not _is_open(captured, names[label])}


def _is_open(captured: Captured, name: str) -> bool:
    """Whether a trace serves other numbers than the one that an input stands for."""
    sizes = [size.node.expr for size in captured.placeholders[name].meta["val"].shape if not isinstance(size, int)]
    symbols = {symbol for size in sizes for symbol in size.free_symbols}
    conditions = [guard.condition for guard in captured.guards if guard.condition.free_symbols == symbols]
    others = ({symbol: sympy.Integer(size) for symbol in symbols} for size in _TRIED)
    return bool(symbols) and sum(all(x.xreplace(y) == sympy.true for x in conditions) for y in others) > 1


_TRIED = (*range(2, 64), *(2**i for i in range(6, 32)))
"""Sizes of which a trace that leaves one open serves at least two."""


def _examples(specs: Sequence[InputSpec | Any], settings: CaptureSettings) -> list[Any]:
    """What tells apart the inputs that a model is traced with, but for what of them is left open."""
    scale = scale_of(settings.least_batch, settings.batch)
    return [traced_shape(s, scale) if isinstance(s, InputSpec) else isinstance(s, NumberSpec) for s in specs]


def _arguments(model: nn.Module, specs: Sequence[Any], in_spec: pytree.TreeSpec, settings: CaptureSettings) -> str:
    """What a call was given, by the names of the model's arguments."""
    args, kwargs = pytree.tree_unflatten(specs, in_spec)
    kwargs, (*_, method) = take_apart(kwargs)
    target = {"the target": args[-1]} if settings.loss_fn is not None and args else {}
    names = list(inspect.signature(method_of(model, method)).parameters)
    names += [f"argument {i}" for i in range(len(names) + 1, len(args) + 1)]  # more than it takes
    values = {**dict(zip(names, args[: len(args) - len(target)], strict=False)), **kwargs, **target}
    shown: list[str] = []
    for name, value in values.items():
        tensors = [
            f"{name}{pytree.keystr(path)} {list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"
            for path, spec in pytree.tree_flatten_with_path(value)[0]
            if isinstance(spec, InputSpec)
        ]
        text = repr(value.value if isinstance(value, NumberSpec) else value)
        shown += tensors or [f"{name} {text}" if len(text) < 30 else f"{name}, a {type(value).__name__}"]
    called = f"Its {method}()" if method else "It"
    return f"{called} was called with {', '.join(shown) or 'nothing'}."
