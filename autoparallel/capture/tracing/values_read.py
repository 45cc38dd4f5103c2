"""What torch's own functions and modules read of a tensor's values: composed of operators that read none, or refused.

``torch.cov`` asks whether its divisor is positive, ``torch.combinations`` which of all pairs are ordered, a batch norm
without a momentum for how many batches it has seen, ``torch.bincount`` for the largest value, ``torch.linalg.lstsq``
for ranks, and ``nn.Transformer`` whether a mask is the causal one.  All of it is known without the values, is a tensor,
or changes nothing of what is computed.  ``squeeze`` asks which sizes are 1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.capture.tracing.open_numbers import with_newest
from autoparallel.capture.tracing.stand_ins import replacement
from autoparallel.capture.tracing.trace import Trace, refuse
from autoparallel.operators.ctc import ctc_losses


def _squeeze(_: Trace, squeeze: Any, *args: Any, **kwargs: Any) -> Any:
    """The same, which asks of open sizes whether they are 1, as a model does."""
    x, *named = args or (kwargs["input"],)
    dims = kwargs.get("dim", named[0] if named else range(x.ndim))
    for dim in dims if isinstance(dims, tuple | list | range) else (dims,):
        if isinstance(dim, int) and -x.ndim <= dim < x.ndim and isinstance(x.shape[dim], torch.SymInt):
            _torch.export.note_of_one(x.shape[dim] == 1, False)
    return squeeze(*args, **kwargs)


def _cov(
    trace: Trace, func: Any, input: Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> Tensor:
    """The covariances of variables, each a row of observations; of one variable, its variance."""
    if input.ndim > 2 or not input.numel():
        return func(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input if input.ndim == 2 else input.reshape(1, -1)
    both = [w for w in (fweights, aweights) if w is not None]
    weights = both[0] * both[-1] if len(both) == 2 else both[0] if both else None
    total: Any = rows.shape[1] if weights is None else weights.sum()
    degrees = correction
    if aweights is not None and correction:
        degrees = correction * (weights * aweights).sum() / total
    weigh = (lambda x: x) if weights is None else lambda x: x * weights
    centred = rows - (weigh(rows).sum(1) / total).unsqueeze(1)
    divisor = total - degrees
    divisor = divisor.clamp(min=0) if isinstance(divisor, Tensor) else max(divisor, 0)
    return _squeeze(trace, Tensor.squeeze, centred @ weigh(centred).T.conj() / divisor)


def _corrcoef(trace: Trace, func: Any, input: Tensor) -> Tensor:
    """The covariances over the deviations of both variables, within -1 and 1."""
    if input.ndim > 2 or not input.numel():
        return func(input)
    covariances = _cov(trace, torch.cov, input)
    if covariances.ndim == 0:
        return covariances / covariances
    deviations = covariances.diagonal().real.sqrt()
    correlations = covariances / deviations.unsqueeze(1) / deviations
    if not correlations.is_complex():
        return correlations.clamp(-1, 1)
    return torch.complex(correlations.real.clamp(-1, 1), correlations.imag.clamp(-1, 1))


def _combinations(_: Trace, func: Any, input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """All choices of elements, a row each, where their number is no open size."""
    if input.ndim != 1 or not isinstance(input.shape[0], int) or not r:
        return func(input, r, with_replacement)
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = [*choose(range(input.shape[0]), r)]
    return input[torch.tensor(places, dtype=torch.int64, device=input.device).reshape(len(places), r)]


def _bincount(_: Trace, func: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """As many counts as ``minlength`` says, where it says so: a value from there on is an error of the call."""
    is_error = input.ndim != 1 or input.is_floating_point() or weights is not None and weights.requires_grad
    if not minlength or is_error:
        return func(input, weights, minlength)
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(minlength).index_add(0, input.long(), weights)


def _tensor(_: Trace, func: Any, data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    """A tensor of lists in which there are tensors, which torch would read number by number."""
    if isinstance(data, Tensor) and not options:
        return data.detach().to(dtype=dtype or data.dtype, device=device or data.device, copy=True)
    parts = pytree.tree_leaves(data)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if not isinstance(data, list | tuple) or not tensors or any(x.numel() != 1 for x in tensors):
        return func(data, dtype=dtype, device=device, **options)
    dtypes = [part.dtype if isinstance(part, Tensor) else torch.tensor(part).dtype for part in parts]
    dtype = dtype or functools.reduce(torch.promote_types, dtypes)
    return _stack(data, dtype).to(device).requires_grad_(options.get("requires_grad", False))


def _stack(data: Any, dtype: torch.dtype) -> Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stack(part, dtype) for part in data])
    return data.detach().reshape(()).to(dtype) if isinstance(data, Tensor) else torch.tensor(data, dtype=dtype)


class _Solved:
    """What torch gives of a problem of least squares, of which a trace knows the solution alone."""

    def __init__(self, solution: Tensor) -> None:
        self.solution = solution

    def __getitem__(self, place: int) -> Tensor:
        if place != 0:
            raise _refuse_ranks()
        return self.solution

    def __iter__(self) -> Any:
        raise _refuse_ranks()

    def __getattr__(self, name: str) -> Any:
        if name in ("residuals", "rank", "singular_values"):
            raise _refuse_ranks()
        raise AttributeError(name)


def _refuse_ranks() -> Exception:
    return refuse(
        "what torch.linalg.lstsq gives beside the solution depends on the ranks of the matrices",
        "read its .solution alone; the residuals are (A @ solution - B).square().sum(-2), the rank "
        "torch.linalg.matrix_rank(A)",
    )


def _lstsq(_: Trace, func: Any, A: Tensor, B: Tensor, rcond: Any = None, *, driver: str | None = None) -> _Solved:
    """The solution of least squares: it is made of the pseudoinverse, as are torch's gradients of it."""
    inverse = torch.linalg.pinv(A, rtol=rcond)
    if B.ndim == 1 or B.ndim == A.ndim - 1 and B.shape == A.shape[:-1]:
        return _Solved((inverse @ B.unsqueeze(-1)).squeeze(-1))
    return _Solved(inverse @ B)


def _masked_select(_: Trace, func: Any, input: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """What an index by the mask selects: two of one mask are of one size."""
    if options:
        return func(input, mask, **options)
    x, where = torch.broadcast_tensors(input, mask)
    return x[where]


def _ctc_loss(
    _: Trace,
    func: Any,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The losses of the sequences, reduced."""
    one = log_probs.ndim == 2
    odds = log_probs.unsqueeze(1) if one else log_probs
    inputs, lengths = (
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64, device=odds.device)
        for x in (input_lengths, target_lengths)
    )
    rows = targets.unsqueeze(0) if one and targets.ndim == 1 else targets
    losses = ctc_losses(odds, rows, inputs.reshape(-1).long(), lengths.reshape(-1).long(), blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0, losses)
    if reduction in ("mean", 1):
        return (losses / lengths.reshape(-1).clamp(min=1)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses.squeeze(0) if one else losses


def _tensor_split(_: Trace, func: Any, input: Tensor, *places: Any, **named: Any) -> Any:
    """The parts of a tensor, which end where a tensor of whole numbers says."""
    return func(input, *(x.tolist() if isinstance(x, Tensor) else x for x in places), **named)


READING: dict[Any, Callable[..., Any]] = {
    Tensor.squeeze: _squeeze, torch.squeeze: _squeeze,
    torch.cov: _cov, Tensor.cov: _cov, torch.corrcoef: _corrcoef, Tensor.corrcoef: _corrcoef,
    torch.tensor_split: _tensor_split, Tensor.tensor_split: _tensor_split,
    torch.bincount: _bincount, Tensor.bincount: _bincount,
    torch.linalg.lstsq: _lstsq, torch.masked_select: _masked_select, Tensor.masked_select: _masked_select,
    torch.combinations: _combinations, torch.tensor: _tensor, torch.ctc_loss: _ctc_loss, F.ctc_loss: _ctc_loss,
}  # fmt: skip
"""The functions, with what takes their place while a model is traced."""


def _batch_norm(_: Trace, forward: Callable[..., Tensor], self: Any, x: Tensor) -> Tensor:
    """Without a momentum the running statistics are means over all batches, of which the newest is one part."""
    counts = (
        self.momentum is None and self.training and self.track_running_stats and self.num_batches_tracked is not None
    )
    if not counts:
        return forward(self, x)
    self._check_input_dim(x)
    self.num_batches_tracked.add_(1)
    run = partial(F.batch_norm, x, weight=self.weight, bias=self.bias, training=True, momentum=1.0, eps=self.eps)
    count = self.num_batches_tracked
    return with_newest(run, self.running_mean, self.running_var, lambda values, new: values + (new - values) / count)


def _is_causal_mask(
    _: Trace, ask: Any, mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Only what the caller says: layers are given the mask beside it, which computes the same."""
    return is_causal is True


NAMES: tuple[tuple[Any, str, Any], ...] = (
    replacement(_torch.nn.BatchNorm, "forward", _batch_norm),
    replacement(*_torch.nn.IS_CAUSAL_MASK, _is_causal_mask),
)
"""What has no door but its name."""
