"""Linear layers that read what is redistributed, or make it, a chunk of rows after the other.

The collective of one chunk runs while the products of the others are computed, forward and backward, and in the
backward while the gradients of parameters are.  The backward of one kind is the other kind: the gradient of what was
gathered before its products is summed after theirs, and that of a sum is gathered before its own (asynchronous tensor
parallelism: Wang et al., "Overlap Communication with Dependent Computation via Decomposition", 2023).  What is sent is
the same, in as many collectives as there are chunks.

[Note: rows] Rows are cut along the dims before the first one that is redistributed, so that the chunks of a rank are
those of every rank, and lie one behind the other: a sum over ranks that stays whole along any dim but the last, what
is gathered along a sequence along the batch.

[Note: in compiled programs] A compiler sees one operator in each direction, whose collectives overlap inside of it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from autoparallel.comm import ranges
from autoparallel.comm.collectives import (
    apply,
    arriving_shape,
    dims_of_rows,
    ends_of_chunks,
    is_compiled,
    redistribute,
    transposed,
)
from autoparallel.comm.in_flight import finish_transfer, sends, start_transfer

T = TypeVar("T")


def redistribute_then_linear(
    x: Tensor,
    src: str,
    dst: str,
    group: str,
    chunks: int,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Several linear layers of ``redistribute(x, src, dst, group)``.

    Args:
        x: [..., k], or a piece of it.
        src, dst, group: as of ``redistribute``.
        chunks: of the rows, at most.
        weights: [n, k] each.
        biases: [n] each.

    Returns:
        [..., n] for each weight.
    """
    results: tuple[Tensor, ...] = _RedistributeThenLinear.apply(
        x, src, dst, group, chunks, *weights, *biases, len(weights)
    )
    return results[: len(weights)]


def linear_then_redistribute(
    x: Tensor, src: str, dst: str, group: str, chunks: int, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """``redistribute(F.linear(x, weight, bias), src, dst, group)``.

    Args:
        x: [..., k].
        src, dst, group: as of ``redistribute``.
        chunks: of the rows, at most.
        weight: [n, k].
        bias: [n].
    """
    result: Tensor = _LinearThenRedistribute.apply(x, src, dst, group, chunks, weight, bias)
    return result


# ----------------------------------------------------------------------------------- products of what is on its way


def _cut(x: Tensor, src: str, dst: str, group: str, chunks: int) -> tuple[list[Tensor], str, str, str]:
    """The parts of a tensor that are redistributed apart, some maybe without rows, and how."""
    dims = dims_of_rows(x.ndim, src, dst)
    rows = x.reshape(math.prod(x.shape[:dims]), *x.shape[dims:])
    ends = ends_of_chunks(rows.shape[0], chunks if sends(src, dst) else 1)
    src, dst = (f"S{int(p[1:]) - dims + 1}" if p[0] == "S" else p for p in (src, dst))
    return [rows[begin:end] for begin, end in itertools.pairwise(ends)], src, dst, group


def _start(x: Tensor, src: str, dst: str, group: str) -> Callable[[], Tensor]:
    """Starts the redistribution of one chunk; returns the function that waits for it."""
    if sends(src, dst) and x.shape[0]:
        ticket, shape = start_transfer(x, src, dst, group), x.shape
        return lambda: finish_transfer(ticket, shape, src, dst, group)
    result = x.new_empty(arriving_shape(x.shape, src, dst, group)) if sends(src, dst) else apply(x, src, dst, group)
    return lambda: result


def _arrivals(x: Tensor, *way: Any) -> Iterator[tuple[slice, Tensor]]:
    """Rows of what a tensor is redistributed to, chunk by chunk, [..., k], and which of all they are; the others are
    on their way meanwhile."""
    parts, *each = _cut(x, *way)
    waits = deque([_start(part, *each) for part in parts])
    end = 0
    while waits:
        rows = waits.popleft()().flatten(0, -2)
        begin, end = end, end + rows.shape[0]
        yield slice(begin, end), rows


def _send_sum(xs: Sequence[Tensor], factors: Sequence[Tensor], bias: Tensor | None, *way: Any) -> Callable[[], Tensor]:
    """Computes ``sum(x @ factor) + bias`` and starts to redistribute it, chunk by chunk; returns the function that
    waits for all."""
    whole = xs[0].new_empty(*xs[0].shape[:-1], factors[0].shape[1])
    shape = arriving_shape(whole.shape, *way[:3])
    parts, *each = _cut(whole, *way)
    waits, end = [], 0
    for part in parts:
        out = part.flatten(0, -2)
        begin, end = end, end + out.shape[0]
        for i, (x, factor) in enumerate(zip(xs, factors, strict=True)):
            _multiply(_rows(x)[begin:end], factor, out if i else bias, out)
        waits.append(_start(part, *each))
    del whole, parts, part, out  # what is on its way keeps what it needs

    def wait() -> Tensor:
        parts = [arrive() for arrive in waits]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(shape)

    return wait


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _multiply(x: Tensor, factor: Tensor, added: Tensor | None, out: Tensor) -> None:
    if added is None:
        torch.mm(x, factor, out=out)
    else:
        torch.addmm(added, x, factor, out=out)


def _add_up(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b) if total is None else torch.addmm(total, a, b, out=total)


# --------------------------------------------------------------------------------- both kinds, forward and backward


def _gather_chunks(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], src: str, dst: str, group: str, chunks: int
) -> list[Tensor]:
    """The results of all layers, then the rows that they read, chunk by chunk."""
    shape = arriving_shape(x.shape, src, dst, group)[:-1]
    results = [x.new_empty(*shape, weight.shape[0]) for weight in weights]
    received = []
    for place, rows in _arrivals(x, src, dst, group, chunks):
        for result, weight, bias in zip(results, weights, biases, strict=True):
            _multiply(rows, weight.t(), bias, _rows(result)[place])
        received.append(rows)
    return [*results, *received]


def _gathered_backward(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    received: Sequence[Tensor],
    src: str,
    dst: str,
    group: str,
    chunks: int,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients that are wanted of x, of each weight and of each bias; ``src`` and ``dst`` are those of the
    gradient of x."""
    wait = _send_sum(grads, weights, None, src, dst, group, chunks) if wanted[0] else None
    results: list[Tensor] = []
    for grad in _select(grads, wanted[1:]):
        total, end = None, 0
        for rows in received:
            begin, end = end, end + rows.shape[0]
            total = _add_up(total, _rows(grad)[begin:end].t(), rows)
        results += [total] if total is not None else []
    results += [_rows(grad).sum(0) for grad in _select(grads, wanted[1 + len(grads) :])]
    return results if wait is None else [wait(), *results]


def _select(items: Sequence[T], wanted: Sequence[bool]) -> list[T]:
    return [item for item, wants in zip(items, wanted, strict=False) if wants]


def _reduce_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, src: str, dst: str, group: str, chunks: int
) -> Tensor:
    return _send_sum([x], [weight.t()], bias, src, dst, group, chunks)()


def _reduced_backward(
    grad: Tensor, x: Tensor, weight: Tensor, src: str, dst: str, group: str, chunks: int, wanted: Sequence[bool]
) -> list[Tensor]:
    """The gradients that are wanted of x, of the weight and of the bias; ``src`` and ``dst`` are those of ``grad``."""
    for_x = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
    for_weight: Tensor | None = None
    for_bias: Tensor | None = None
    for place, rows in _arrivals(grad, src, dst, group, chunks):
        if for_x is not None:
            _multiply(rows, weight, None, _rows(for_x)[place])
        if wanted[1]:
            for_weight = _add_up(for_weight, rows.t(), _rows(x)[place])
        if wanted[2]:
            for_bias = rows.sum(0) if for_bias is None else for_bias.add_(rows.sum(0))
    return [each for each in (for_x, for_weight, for_bias) if each is not None]


# ------------------------------------------------- the backward by torch's operators, which can be differentiated


def _gathered_twice(
    shape: Sequence[int],
    of_received: Sequence[Tensor | None],
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    received: Sequence[Tensor],
    src: str,
    dst: str,
    group: str,
    _: int,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """What ``_gathered_backward`` gives, and what the gradients of the rows add, which a derivative of it has; the rows
    of all chunks are ``shape``."""
    rows = torch.cat(list(received))
    results: list[Tensor] = []
    if wanted[0]:
        pairs = zip(received, of_received, strict=True)
        total = torch.cat([torch.zeros_like(part) if grad is None else grad for part, grad in pairs])
        total = sum((_rows(grad) @ weight for grad, weight in zip(grads, weights, strict=True)), total)
        results.append(redistribute(total.view(*shape, total.shape[-1]), src, dst, group))
    results += [_rows(grad).t() @ rows for grad in _select(grads, wanted[1:])]
    return results + [_rows(grad).sum(0) for grad in _select(grads, wanted[1 + len(grads) :])]


def _reduced_twice(
    grad: Tensor, x: Tensor, weight: Tensor, src: str, dst: str, group: str, _: int, wanted: Sequence[bool]
) -> list[Tensor]:
    """What ``_reduced_backward`` gives."""
    grad = redistribute(grad, src, dst, group)
    results = [grad @ weight] if wanted[0] else []
    results += [_rows(grad).t() @ _rows(x)] if wanted[1] else []
    return results + ([_rows(grad).sum(0)] if wanted[2] else [])


# ----------------------------------------------------- what a compiler sees (see [Note: in compiled programs])

_WAY = "str src, str dst, str group, int chunks"


def _has_graph(x: Tensor) -> bool:
    """Whether the backward that runs is to be differentiated; a compiler traces each with gradients enabled."""
    return torch.is_grad_enabled() and not is_compiled(x)


def _define(name: str, function: Callable[..., Any], arguments: str, result: str, fake: Callable[..., Any]) -> None:
    schema = f"({arguments.format(way=_WAY)}) -> {result}"
    defined = torch.library.custom_op(f"autoparallel::{name}", function, mutates_args=(), schema=schema)
    defined.register_fake(fake)


def _gathered_fake(
    x: Tensor, weights: Sequence[Tensor], biases: Any, src: str, dst: str, group: str, chunks: int
) -> list[Tensor]:
    *shape, k = arriving_shape(x.shape, src, dst, group)
    dims = dims_of_rows(x.ndim, src, dst)
    each = math.prod(shape[dims:])
    ends = ends_of_chunks(math.prod(shape[:dims]), chunks)
    received = [x.new_empty((end - begin) * each, k) for begin, end in itertools.pairwise(ends)]
    return [*(x.new_empty(*shape, weight.shape[0]) for weight in weights), *received]


def _gathered_backward_fake(
    grads: Sequence[Tensor], weights: Sequence[Tensor], received: Any, src: str, dst: str, group: str, chunks: int,
    wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    count = len(weights)
    shape = arriving_shape([*grads[0].shape[:-1], weights[0].shape[1]], src, dst, group)
    results = [grads[0].new_empty(shape)] if wanted[0] else []
    results += [w.new_empty(w.shape) for w in _select(weights, wanted[1 : 1 + count])]
    return results + [w.new_empty(w.shape[0]) for w in _select(weights, wanted[1 + count :])]


def _reduced_fake(x: Tensor, weight: Tensor, bias: Any, src: str, dst: str, group: str, chunks: int) -> Tensor:
    return x.new_empty(arriving_shape([*x.shape[:-1], weight.shape[0]], src, dst, group))


def _reduced_backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, src: str, dst: str, group: str, chunks: int, wanted: Sequence[bool]
) -> list[Tensor]:
    return [x.new_empty(shape) for shape in _select([x.shape, weight.shape, weight.shape[:1]], wanted)]


_define(
    "gathered_linears",
    _gather_chunks,
    "Tensor x, Tensor[] weights, Tensor?[] biases, {way}",
    "Tensor[]",
    _gathered_fake,
)
_define(
    "gathered_linears_backward",
    _gathered_backward,
    "Tensor[] grads, Tensor[] weights, Tensor[] received, {way}, bool[] wanted",
    "Tensor[]",
    _gathered_backward_fake,
)
_define("reduced_linear", _reduce_chunks, "Tensor x, Tensor weight, Tensor? bias, {way}", "Tensor", _reduced_fake)
_define(
    "reduced_linear_backward",
    _reduced_backward,
    "Tensor grad, Tensor x, Tensor weight, {way}, bool[] wanted",
    "Tensor[]",
    _reduced_backward_fake,
)


# ------------------------------------------------------------------------------------------------ differentiable


class _RedistributeThenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, src: str, dst: str, group: str, chunks: int, *parameters: Any
    ) -> tuple[Tensor, ...]:
        # Under no_grad Dynamo leaves ctx out where there is one argument less than forward has parameters, by name:
        # with the count among those without a name, there never is.
        *tensors, count = parameters
        weights, biases = list(tensors[:count]), list(tensors[count:])
        ctx.set_materialize_grads(False)
        ctx.module = ranges.place()
        ctx.way, ctx.count = (*transposed(src, dst), group, chunks), count
        if sends(src, dst):
            run = torch.ops.autoparallel.gathered_linears if is_compiled(x) else _gather_chunks
            tensors = run(x, weights, biases, src, dst, group, chunks)
            results, received = tensors[:count], tensors[count:]
        else:
            x = apply(x, src, dst, group)
            results, received = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], [_rows(x)]
        ctx.shape = results[0].shape[:-1]
        ctx.save_for_backward(*weights, *received)
        if is_compiled(x):
            return tuple(results)
        return *results, *received  # so that what is saved of the rows can be differentiated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved, count = ctx.saved_tensors, ctx.count
        used = {i: grad for i, grad in enumerate(grads[:count]) if grad is not None}
        places = [0, *(5 + i for i in used), *(5 + count + i for i in used)]
        wanted = [ctx.needs_input_grad[place] for place in places]
        results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        weights, received, of_received = [saved[i] for i in used], saved[count:], grads[count:]
        arguments = [*used.values()], weights, received, *ctx.way, wanted
        gradients: list[Tensor] = []
        if _has_graph(saved[0]) or any(grad is not None for grad in of_received):
            gradients = ranges.in_backward(ctx.module, _gathered_twice, ctx.shape, of_received, *arguments)
        elif used:
            run = torch.ops.autoparallel.gathered_linears_backward if is_compiled(saved[0]) else _gathered_backward
            gradients = ranges.in_backward(ctx.module, run, *arguments)
        for place, grad in zip(_select(places, wanted), gradients, strict=True):
            results[place] = grad
        return tuple(results)


class _LinearThenRedistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, src: str, dst: str, group: str, chunks: int, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.module = ranges.place()
        ctx.way = *transposed(src, dst), group, chunks
        ctx.save_for_backward(x, weight)
        run = torch.ops.autoparallel.reduced_linear if is_compiled(x) else _reduce_chunks
        result: Tensor = run(x, weight, bias, src, dst, group, chunks)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        results: list[Tensor | None] = [None] * 7
        if grad is not None:
            places = [0, 5, 6]
            wanted = [ctx.needs_input_grad[place] for place in places]
            run: Callable[..., list[Tensor]] = _reduced_twice
            if not _has_graph(grad):
                run = torch.ops.autoparallel.reduced_linear_backward if is_compiled(grad) else _reduced_backward
            gradients = ranges.in_backward(ctx.module, run, grad, *ctx.saved_tensors, *ctx.way, wanted)
            for place, each in zip(_select(places, wanted), gradients, strict=True):
                results[place] = each
        return tuple(results)
