"""The clock and the ledger of a dry run: what operators cost, what overlaps, and which memory is alive.

[Note: two clocks] What computes runs in one line, and so do collectives.  A collective that the program waits for at
once takes its whole time.  One that it starts ahead (the next bucket's gather, a gradient's reduction, half of
a redistribution) runs beside what computes, as far as the hardware lets it (``Profile.overlap``), and only what is left
of it when its result is needed is waited for.

[Note: memory by liveness] Tensors of a dry run have no data, but they live and die as the real ones do: autograd holds
what it saves, and lets go of it as the backward proceeds.  So the ledger asks the storages themselves.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autoparallel import _torch
from autoparallel.comm.collectives import local_shape
from autoparallel.comm.groups import axis_size, communicator_of
from autoparallel.comm.traffic import CountingMode
from autoparallel.decisions.prediction import COMPUTE, NETWORK, PredictedSpan
from autoparallel.hardware import Profile
from autoparallel.placements import COLLECTIVES, action, parse_placement
from autoparallel.predict.fusion import Fusion, is_fused
from autoparallel.predict.results import CallKind, call_on_meta, kind_of
from autoparallel.rules.calls import may_have_gradient


class Clock:
    """Time on one rank (see [Note: two clocks]).

    Attributes:
        phase, module: of a step, and whose operators run.
        layers: those that the modules are of.
    """

    def __init__(self, overlap: float) -> None:
        self.overlap = overlap
        self.now = 0.0
        self.phase = self.module = ""
        self.layers: dict[str, str | None] = {}
        self._begun: list[tuple[str, str, float, str]] = []  # of every span its line, its name, its begin, its module
        self._ends: list[float] = []  # of every span
        self._network = 0.0
        self._held: list[tuple[float, Any]] = []
        self._last: dict[str, int] = {}  # by line, the place of its last span

    @property
    def spans(self) -> list[PredictedSpan]:
        """What it takes; those of what computes follow each other without a gap."""
        spans = zip(self._begun, self._ends, strict=True)
        return [PredictedSpan(line, name, begin, end, module) for (line, name, begin, module), end in spans]

    def compute(self, seconds: float) -> None:
        """Something computes."""
        self._note(COMPUTE, self.module or "(the model)", self.now, self.now + seconds)
        self._advance(self.now + seconds)

    def start(self, seconds: float, name: str = "") -> float:
        """A collective starts; when it will be done."""
        begun = max(self.now, self._network)
        self._note(COMPUTE, f"start {name}", self.now, self.now + (1 - self.overlap) * seconds)
        self._advance(self.now + (1 - self.overlap) * seconds)
        self._network = max(self.now, self._network) + self.overlap * seconds
        self._note(NETWORK, name, begun, self._network, joined=False)
        return self._network

    def _note(self, line: str, name: str, begin: float, end: float, joined: bool = True) -> None:
        """Notes what takes a while; what goes on is one span, where spans may be joined."""
        if end <= begin:
            return
        place = self._last.get(line)
        if joined and place is not None and self._begun[place][1] == name and self._ends[place] == begin:
            self._ends[place] = end
            return
        self._last[line] = len(self._ends)
        self.record(line, name, begin, end, self.module)

    def record(self, line: str, name: str, begin: float, end: float, module: str = "") -> None:
        """Adds a span of its own."""
        self._begun.append((line, name, begin, module))
        self._ends.append(end)

    def hold(self, value: Any, end: float) -> None:
        """Keeps a value alive until a collective is done, whether anybody waits for it or not."""
        self._held.append((end, value))

    def wait(self, end: float) -> None:
        """Its result is needed."""
        if end > self.now:
            self._note(COMPUTE, "wait", self.now, end)
            self._advance(end)
        elif self._held:
            self._advance(self.now)

    def _advance(self, now: float) -> None:
        self.now = now
        if self._held:
            self._held = [(end, value) for end, value in self._held if end > now]


class Ledger:
    """Bytes that are alive, by what they are for (see [Note: memory by liveness]).

    Attributes:
        kind: what is made now is for; empty for memory that is there anyway and is counted elsewhere.
        live: bytes, by what they are for.
        peak: ``live`` at the worst moment.
        history: seconds and all bytes, whenever they changed.
        most: the most bytes while each module ran in each phase.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.kind = ""
        self.live: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.history: list[tuple[float, int]] = [(0.0, 0)]
        self.most: dict[tuple[str, str], int] = {}
        self._total = self._worst = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # storages, by their ids

    def add(self, value: Any) -> None:
        """Counts the tensors in ``value`` until they die."""
        for tensor in _torch.tensors.tensors_in(value):
            storage = tensor.untyped_storage()
            if (key := id(storage)) in self._alive:
                continue
            size = storage.nbytes() if self.kind else 0
            self._alive[key] = weakref.ref(storage, partial(self._die, key, self.kind, size))
            if self.kind:
                self._change(self.kind, size)

    def _die(self, key: int, kind: str, size: int, _: object) -> None:
        """A storage is no more."""
        del self._alive[key]
        if kind:
            self._change(kind, -size)

    def _change(self, kind: str, size: int) -> None:
        self.live[kind] = self.live.get(kind, 0) + size
        self._total += size
        self.history.append((self.clock.now, self._total))
        if self._total > self._worst:
            self._worst, self.peak = self._total, dict(self.live)
        moment = self.clock.phase, self.clock.module
        if self._total > self.most.setdefault(moment, 0):
            self.most[moment] = self._total

    @contextmanager
    def holding(self, kind: str) -> Iterator[None]:
        """What is made inside is for ``kind``."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before


class Meter(_torch.export.UncompiledMode):
    """Prices every operator of a dry run, forward and backward, on the sizes that it really has.

    Args:
        profile: what is priced for.
        axis_sizes: the mesh's.
        clock, ledger: what is told.
        begin: starts a collective of a kind over an axis, of so many bytes in all and so many ranks; when it is done.

    Attributes:
        layered: whether what runs has layers: then they alone are compiled, where programs are.
    """

    def __init__(
        self,
        profile: Profile,
        axis_sizes: Sequence[int],
        clock: Clock,
        ledger: Ledger,
        begin: Callable[[str, str, int, int], float],
    ) -> None:
        super().__init__()
        self.profile, self.axis_sizes = profile, tuple(axis_sizes)
        self.clock, self.ledger = clock, ledger
        self.layered = False
        self._queued = replace(profile, launch=0.0)
        self._fusion = Fusion() if profile.fuses else None
        self._seconds_of: dict[tuple[CallKind, float], float] = {}  # seconds, by kind of call and seconds of a launch
        self._ends: list[float] = []  # when the collectives of the operator that runs are done
        # By ticket: when a collective is done, and the memory that it has until it is waited for.
        self._in_flight: Any = WeakTensorKeyDictionary()
        self._written: dict[int, int] = {}  # by a mask's storage, the rows that are written in its places
        self._traffic = CountingMode(lambda *volume: self._ends.append(begin(*volume)))

    @contextmanager
    def copying(self, kind: str) -> Iterator[None]:
        """What runs inside copies what is sent and received, for ``kind``: it costs its bytes, but no launches, which
        are queued while something else computes."""
        before, self.profile = self.profile, self._queued
        try:
            with self.ledger.holding(kind):
                yield
        finally:
            self.profile = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == "autoparallel::finish_transfer":
            end, result, _ = self._in_flight.pop(args[0])
            self.clock.wait(end)
            return result
        if func.is_view:  # neither takes time nor makes memory
            self._follow_module()
            return func(*args, **(kwargs or {}))
        self._traffic.count(func, args, kwargs or {})
        end = self.clock.now
        if self._ends:
            end, self._ends = max(self._ends), []
        kwargs = kwargs or {}
        if name in _BY_INDEX and any(x is not None and x.dtype == torch.bool for x in args[1]):
            args = self._by_positions(name, *args)
        kind = kind_of(func, args, kwargs)
        result = call_on_meta(kind, func, args, kwargs)
        beside = _workspace(name, args, result, self.profile)
        extra = args[0].new_empty(beside) if beside else None
        if extra is not None:
            self.ledger.add(extra)
        if name == "autoparallel::start_transfer":
            x, src, dst, group = args
            shape = local_shape(x.shape, parse_placement(src), parse_placement(dst), axis_size(group))
            self._in_flight[result] = end, x.new_empty(shape), extra
            self.ledger.add(self._in_flight[result])
            return result
        self.clock.wait(end)
        self.ledger.add(result)
        self._follow_module()
        layer = self.clock.layers.get(self.clock.module) if self.layered else None
        fused = is_fused(func) and (layer is not None or not self.layered)
        self.clock.compute(self.seconds(name, args, kwargs, result, kind, fused=fused, layer=layer))
        return result

    def _by_positions(self, name: str, x: torch.Tensor, indices: Sequence[Any], *values: Any) -> tuple[Any, ...]:
        """The arguments of an operator that a mask tells what to take, or where to write, with as many positions in the
        mask's place as were written there; of one that no write has told, with all."""
        positions: list[Any] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                positions.append(index)
                continue
            mark = _torch.tensors.storage_mark(index)
            if name != "aten::index" and values[0].ndim == x.ndim - index.ndim + 1:
                self._written[mark] = values[0].shape[0]
            count = self._written.get(mark, index.numel())
            positions += [index.new_empty(count, dtype=torch.int64)] * index.ndim
        return x, positions, *values

    def _follow_module(self) -> None:
        self.clock.module = _torch.autograd.marked_module() or self.clock.module

    def seconds(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Any,
        result: Any,
        kind: CallKind | None,
        *,
        fused: bool,
        layer: str | None,
    ) -> float:
        """The time of one call.

        Args:
            kind: its kind, where that is known; calls that are alike and make a new tensor are priced once.
            fused: whether it is compiled, and the operator one that a compiler fuses.
            layer: whose it is; None where a program is compiled whole, or between layers.
        """
        if name in _FREE:
            return 0.0
        fuses = self._fusion is not None and self.profile is not self._queued
        if fuses or kind is None or kind.result is None:
            return self._call_seconds(name, args, kwargs, result, fused=fused, layer=layer)
        key = kind, self.profile.launch
        if key not in self._seconds_of:
            self._seconds_of[key] = self._call_seconds(name, args, kwargs, result, fused=fused, layer=layer)
        return self._seconds_of[key]

    def _call_seconds(
        self, name: str, args: Sequence[Any], kwargs: Any, result: Any, *, fused: bool, layer: str | None
    ) -> float:
        outputs = _torch.tensors.tensors_in(result)
        inputs = _torch.tensors.tensors_in([*args, *kwargs.values()])
        if not outputs:
            return 0.0
        storages = {id(x.untyped_storage()) for x in inputs}
        aliases = all(id(x.untyped_storage()) in storages for x in outputs)
        if aliases and not name.endswith("_") and "out" not in kwargs and name != "autoparallel::transfer":  # a view
            return 0.0
        if self._fusion is None or self.profile is self._queued:
            return self._own_seconds(name, args, kwargs, inputs, outputs)
        moved = self._fusion.moved(inputs, outputs, fused=fused, layer=layer)
        kernels = self.profile.compute_seconds(0.0, moved, outputs[0].dtype) if moved else 0.0
        return kernels + (0.0 if fused else self._own_seconds(name, args, kwargs, inputs, outputs))

    def _own_seconds(
        self, name: str, args: Sequence[Any], kwargs: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> float:
        """The time of one call on its own."""
        if name == "autoparallel::transfer":
            kind = action(parse_placement(args[1]), parse_placement(args[2]))
            if kind in COLLECTIVES:  # counted as traffic, and paid for there
                return 0.0
            size = max(_torch.tensors.bytes_in(inputs), _torch.tensors.bytes_in(outputs))
            return self.profile.step_seconds(self.axis_sizes, kind, (), size)
        if name in _LOOKUPS:
            return self.profile.compute_seconds(0.0, 2 * _torch.tensors.bytes_in(outputs), outputs[0].dtype)
        flops, dtype = 0.0, next((x.dtype for x in inputs if may_have_gradient(x)), outputs[0].dtype)
        if name in _FLOPS:
            flops = _FLOPS[name](args, kwargs, outputs[0])
            if "attention" in name:
                flops /= self.profile.attention
        return self.profile.compute_seconds(flops, _torch.tensors.bytes_in(inputs + outputs), dtype)


_BY_INDEX = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


def _workspace(name: str, args: Sequence[Any], result: Any, profile: Profile) -> int:
    """Elements that an operator has, while it runs, beside what it reads and makes."""
    if name in ("autoparallel::transfer", "autoparallel::start_transfer"):
        return _exchange_elements(args, profile.copies)
    if name == "aten::convolution" and profile.unfolds:
        return _column_elements(args[0], args[1], result, args[3:7])
    if name == "aten::convolution_backward" and profile.unfolds and args[10][1]:  # else in the gradient's own memory
        return _column_elements(args[1], args[2], args[0], args[4:8], backward=True)
    return 0


def _column_elements(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, how: Sequence[Any], backward: bool = False
) -> int:
    """Elements of the columns, ``[rows, channels * kernel, positions]``, that a convolution multiplies its weight with.

    oneDNN takes no float64, and torch's own kernels unfold all rows at once, in the forward and again for the weight's
    gradient (``aten/src/ATen/native/ConvolutionMM2d.cpp``, ``Convolution.cpp`` in three dims).  Dilated ones
    (``NaiveDilatedConvolution.cpp``), the backward of transposed ones, and their forward in three dims
    (``NaiveConvolutionTranspose2d.cpp``, ``3d.cpp``), go row by row.  A kernel of one element that leaves out nothing
    reads a view.

    Args:
        how: stride, padding, dilation, and whether it is transposed.
    """
    stride, padding, dilation, transposed = how
    if x.dtype != torch.float64:
        return 0
    if {*weight.shape[2:], *stride} == {1} and not any(padding) and (backward or not transposed):
        return 0
    by_row = backward or x.ndim == 5 if transposed else any(step > 1 for step in dilation)
    rows = 1 if by_row else x.shape[0]
    return rows * weight[0].numel() * math.prod((x if transposed else out).shape[2:])


def _exchange_elements(args: Sequence[Any], copies: Sequence[str]) -> int:
    """Elements that a redistribution inside the body needs beside its operand and its result."""
    src, dst = parse_placement(args[1]), parse_placement(args[2])
    kind, size = action(src, dst), args[0].numel()
    communicator, axis = communicator_of(args[3])
    if kind == "all_gather":  # what arrives, one rank's piece after another, is put together along the dim
        return size * communicator.size(axis) * (int(src.dim > 0) + int(kind in copies))
    if kind == "reduce_scatter":  # the pieces, one behind the other
        return size * (int(dst.dim > 0) + int(kind in copies))
    return 2 * size if kind == "all_to_all" else 0


_FREE = frozenset(
    ["aten::empty", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided", "aten::empty_strided",
     "aten::detach", "aten::lift_fresh", "aten::sym_size", "autoparallel::all_reduce"]
)  # fmt: skip
_LOOKUPS = frozenset(["aten::embedding", "aten::index", "aten::gather", "aten::index_select"])


def _product(a: torch.Tensor, b: torch.Tensor) -> float:
    """The operations of ``[..., m, k] @ [..., k, n]``."""
    return 2.0 * a.numel() * b.shape[-1]


def _attention(args: Sequence[Any], kwargs: Any, first: int, causal: int, products: tuple[int, int]) -> float:
    """The operations of a fused attention.

    Args:
        first, causal: where ``q`` and ``is_causal`` stand among the arguments.
        products: how many products have the size of ``q k^T``, and of the scores with ``v``.
    """
    q, k, v = args[first : first + 3]
    rows = math.prod(q.shape[:-1]) * k.shape[-2]
    is_causal = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
    return 2.0 * rows * (products[0] * q.shape[-1] + products[1] * v.shape[-1]) * (0.5 if is_causal else 1.0)


def _grouped_product(args: Sequence[Any]) -> float:
    """Each row meets one of the stacked weights."""
    rows = next(x.shape[0] for x in args if isinstance(x, torch.Tensor) and x.ndim == 2)
    weight = next(x for x in args if isinstance(x, torch.Tensor) and x.ndim == 3)
    return 2.0 * rows * math.prod(weight.shape[1:])


def _convolution(out: torch.Tensor, weight: torch.Tensor) -> float:
    return 2.0 * out.numel() * math.prod(weight.shape[1:])


def _convolution_backward(args: Sequence[Any], kwargs: Any, out: Any) -> float:
    grad, weight = args[0], args[2]
    return sum(args[-1][:2]) * _convolution(grad, weight)


_FLOPS: dict[str, Callable[[Sequence[Any], Any, Any], float]] = {
    "aten::mm": lambda a, k, out: _product(a[0], a[1]),
    "aten::bmm": lambda a, k, out: _product(a[0], a[1]),
    "aten::addmm": lambda a, k, out: _product(a[1], a[2]),
    "aten::baddbmm": lambda a, k, out: _product(a[1], a[2]),
    "aten::linear": lambda a, k, out: _product(a[0], a[1].t()),
    "aten::convolution": lambda a, k, out: _convolution(out, a[1]),
    "aten::convolution_backward": _convolution_backward,
    "aten::_grouped_mm": lambda a, k, out: 2.0 * out.numel() * a[0].shape[-1],
    "autoparallel::grouped_linear": lambda a, k, out: _grouped_product(a),
    "autoparallel::grouped_linear_exchanged": lambda a, k, out: _grouped_product(a),
    "autoparallel::grouped_linear_backward": lambda a, k, out: 2 * _grouped_product(a),
    "autoparallel::grouped_linear_exchanged_backward": lambda a, k, out: 2 * _grouped_product(a),
    # The one fused attention of a dry run (see ``predict.attention``).
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda a, k, out: _attention(a, k, 0, 4, (1, 1)),
    # The scores once more, and the gradients of q, k, v and of the scores.
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda a, k, out: _attention(a, k, 1, 7, (3, 2)),
}
