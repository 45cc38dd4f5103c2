"""Norms of the gradients as they lie, and clipping by them.

[Note: skipping a step] With ``nonfinite="skip"``, gradients whose norm is not finite become zero, decided on the
device, so that nothing non-finite reaches whatever reads them.  An optimizer that steps on them next changes nothing
at all: no parameter (neither by weight decay nor by momentum), no state, no count of steps.  Fused optimizers are
told so on the device, through the ``found_inf`` that gradient scalers use; for the others the decision is looked at
when they step, which waits for the device, as ``torch.amp.GradScaler`` does.

[Note: norms on the way] Where steps clip by themselves, the norm of a bucket's gradients is taken as soon as its
reduction ends, while the other buckets still travel and while they are in the cache.  Clipping then reads one number
instead of those gradients, if nothing has written to them since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel._torch.dtensor import specs_of
from autoparallel.placements import Layout, from_dtensor_placements, to_dtensor_placements
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.norms import norm as arithmetic
from autoparallel.runtime.norms.limits import (
    ClipGradNorm,
    Groups,
    Limit,
    Limits,
    Norms,
    ParameterNames,
    require_nonfinite,
)
from autoparallel.runtime.norms.program import NormProgram
from autoparallel.runtime.parameters.parts import note_changes

Mark = tuple[int, int, int]
Place = tuple[int, int, torch.dtype]


@dataclass
class _OnTheWay:
    """Norms taken as reductions ended (see [Note: norms on the way]).

    Attributes:
        backward: the backward that they are of.
        norms: by the memory that they are of.
        marks: of the gradients that lie there, by name.
        grads: these gradients, so that no others come to lie there.
    """

    backward: int
    norms: dict[Place, torch.Tensor] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    grads: list[torch.Tensor] = field(default_factory=list)


class Clipper:
    """Measures and clips the gradients of one model.

    Args:
        store: where the gradients are.
        model: the model, for the names of its parameters.
        in_step: how an optimizer's step clips by itself, if it does.

    Attributes:
        parameter_ids: the ``id``s of the model's parameters.
        last_norm: the norm of the last clipping, before it, as :meth:`clip_norm` returned it.
    """

    def __init__(self, store: GradientStore, model: nn.Module, in_step: ClipGradNorm | None = None) -> None:
        self.store = store
        self.parameter_ids = frozenset(map(id, store.parameters.values()))
        self.names = ParameterNames(model, store.parameters)
        self.in_step = in_step
        self.limits = None if in_step is None else self.names.limits(in_step.max_norm)
        self.last_norm: Norms | None = None
        self._programs: dict[Any, NormProgram] = {}
        self._skipped: tuple[int, torch.Tensor] | None = None
        self._clipped: tuple[int, dict[str, Mark]] | None = None
        self._on_the_way = _OnTheWay(store.backwards)
        if in_step is not None:
            store.when_reduced = self._measure_on_the_way

    # -- what ParallelModule offers ---------------------------------------------------------------------------------

    def norm(self, norm_type: float, groups: Groups | None) -> torch.Tensor | dict[str, torch.Tensor]:
        """See ``ParallelModule.grad_norm``."""
        p = arithmetic.require_norm_type(norm_type)
        wanted = None if groups is None else self.names.groups(groups)
        grads = self.gradients("grad_norm()")
        names = (frozenset(grads),) if wanted is None else tuple(wanted.values())
        norms = self._visible(self._measure(grads, names, p)[0], grads)
        return norms[0] if wanted is None else dict(zip(wanted, norms.unbind(0), strict=True))

    def clip_norm(self, max_norm: Limit, norm_type: float, error_if_nonfinite: bool, nonfinite: str) -> Norms:
        """See ``ParallelModule.clip_grad_norm_``."""
        p = arithmetic.require_norm_type(norm_type)
        require_nonfinite(nonfinite)
        limits = self.names.limits(max_norm)
        grads = self.gradients("clip_grad_norm_()")
        norms, runs = self._measure(grads, limits.names, p)
        if error_if_nonfinite or nonfinite == "raise":
            _require_finite(norms, p)
        self._scale(runs, norms, limits)
        if nonfinite == "skip":
            self._skip_nonfinite(norms, grads)
        note_changes(grads.values())
        self.last_norm = limits.result(self._visible(norms, grads))
        return self.last_norm

    def clip_value(self, value: float) -> None:
        """See ``ParallelModule.clip_grad_value_``."""
        if not value >= 0:
            raise ValueError(f"value must not be negative, got {value}")
        grads = self.gradients("clip_grad_value_()")
        name = next((n for n, p in self.store.parameters.items() if p.is_complex()), None)
        if name is not None:
            raise ValueError(
                f"clip_grad_value_() cannot clamp the gradient of {name}, which is complex: complex numbers have no "
                "order (torch refuses it, too); use clip_grad_norm_()"
            )
        runs = arithmetic.join([_torch.dtensor.local_of(g) for g in grads.values()])
        if runs:
            torch._foreach_clamp_min_(runs, -float(value))
            torch._foreach_clamp_max_(runs, float(value))
        note_changes(grads.values())

    # -- what an optimizer's step asks for --------------------------------------------------------------------------

    def skipped(self) -> torch.Tensor | None:
        """Whether the gradients that are there now are to be left out (see [Note: skipping a step]); bool scalar."""
        if self._skipped is None or self._skipped[0] != self.store.backwards:
            return None
        return self._skipped[1]

    def clip_for_step(self, optimizer: torch.optim.Optimizer | None) -> torch.Tensor | None:
        """Clips to the model's own limits, unless the gradients that ``optimizer`` holds have been clipped already.

        Args:
            optimizer: the one that steps next; None: nothing is left to it.

        Returns:
            Where the optimizer takes it over: what it must divide the gradients by, a float32 scalar.
        """
        assert self.limits is not None and self.in_step is not None
        held = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else set()
        grads = self.store.grads.all()
        names = [n for n in grads if id(self.store.parameters[n]) in held]
        if optimizer is not None and (not self._is_due(held, names) or self._is_done(grads, names)):
            return None
        grads = self.gradients("optimizer.step()")
        norms, runs = self._measure(grads, self.limits.names, self.in_step.norm_type)
        self._on_the_way = _OnTheWay(self.store.backwards)
        if self.in_step.nonfinite == "raise":
            _require_finite(norms, self.in_step.norm_type)
        scale = getattr(optimizer, "grad_scale", None)  # the gradients still bear it, as a gradient scaler's do
        if scale is not None:
            norms = norms / scale.to(norms)
        self.last_norm = self.limits.result(self._visible(norms, grads))
        skip = self.in_step.nonfinite == "skip"
        if len(norms) == 1 and optimizer is not None and self._can_fold(optimizer, grads, len(names)):
            if skip:
                self._skip_nonfinite(norms, grads)
            inverse = 1.0 / arithmetic.clip_coefficient(norms[0], self.limits.values[0])
            return (inverse if scale is None else inverse * scale.to(inverse)).float()
        self._scale(runs, norms, self.limits)
        if skip:
            self._skip_nonfinite(norms, grads)
        self._clipped = self.store.backwards, {n: _mark(g) for n, g in grads.items()}
        return None

    def _is_due(self, held: Collection[int], names: Sequence[str]) -> bool:
        """Whether an optimizer has something to clip, on this rank or another: all ranks must say the same."""
        if self.store.everyone is None:
            return bool(names)
        return bool(self.store.backwards) and any(
            p.requires_grad and id(p) in held for p in self.store.parameters.values()
        )

    def _is_done(self, grads: Mapping[str, torch.Tensor], names: Sequence[str]) -> bool:
        """Whether these gradients are those that were clipped for the step of another optimizer."""
        if self._clipped is None or self._clipped[0] != self.store.backwards:
            return False
        return all(self._clipped[1].get(n) == _mark(grads[n]) for n in names)

    def _can_fold(self, optimizer: torch.optim.Optimizer, grads: Mapping[str, torch.Tensor], count: int) -> bool:
        """Whether the optimizer may divide the gradients in its own pass over them: it must hold all ``count`` of
        these and no others, and its scale is a float32 number."""
        return (
            bool(getattr(optimizer, "_step_supports_amp_scaling", False))
            and count == len(grads)
            and all(id(p) in self.parameter_ids for group in optimizer.param_groups for p in group["params"])
            and all(g.dtype != torch.float64 for g in grads.values())
        )

    # -- how --------------------------------------------------------------------------------------------------------

    def gradients(self, what: str) -> dict[str, torch.Tensor]:
        """Every gradient there is, reduced, as it lies at rest; ``what`` asks, in messages.

        Raises:
            RuntimeError: on every rank that has it, before any collective: inside ``no_sync()``, before any backward,
                or for a gradient that the user has replaced by one that lies otherwise.
        """
        store = self.store
        if not store.synchronise:
            raise RuntimeError(f"{what} inside no_sync(): gradients are not reduced yet; call it after the window")
        store.passes.end_dead()
        pending = store.pending_layouts()
        grads = store.grads.all()
        parameters = [store.parameters[name] for name in grads]
        if pending or not all(map(is_, specs_of(list(grads.values())), specs_of(parameters))):
            for parameter, (name, grad) in zip(parameters, grads.items(), strict=True):
                self._require_ours(what, name, parameter, grad, pending.get(name))
        if not grads or pending or store.window is not None:
            store.settle()
            grads = store.grads.all()
        if not grads and not (store.everyone is not None and store.backwards):  # other ranks have some
            raise RuntimeError(f"{what} before any backward(): no parameter has a gradient")
        return grads

    def _require_ours(
        self, what: str, name: str, parameter: nn.Parameter, grad: torch.Tensor, pending: Layout | None
    ) -> None:
        if isinstance(grad, DTensor):
            at_rest = parameter.placements  # type: ignore[attr-defined]
            expected = tuple(at_rest if pending is None else to_dtensor_placements(pending))
            if grad.device_mesh == self.store.mesh and tuple(grad.placements) == expected:
                return
            description = f"a DTensor of placements {tuple(grad.placements)}, where {expected} is expected"
            if grad.device_mesh != self.store.mesh:
                description = "a DTensor on another mesh"
            mend = "p.grad = grad.redistribute(p.device_mesh, p.placements)"
            if pending is not None:
                mend = "it after the window's last backward, or clear it with p.grad = None"
        else:
            description = "a plain tensor, where a DTensor is expected"
            mend = "p.grad = distribute_tensor(grad, p.device_mesh, p.placements)"
        raise RuntimeError(f"{what}: the gradient of {name} was replaced by {description}; set {mend}")

    def _measure(
        self, grads: Mapping[str, torch.Tensor], norms: tuple[frozenset[str], ...], p: float
    ) -> tuple[torch.Tensor, dict[tuple[str, ...], list[torch.Tensor]]]:
        """The norms of some of the gradients, float64 [norms], and the memory they lie in, by set of gradients."""
        key = (self.store.prefix, tuple(grads), norms, p)
        program = self._programs.get(key)
        if program is None:
            layouts = {n: from_dtensor_placements(g.placements) for n, g in grads.items()}  # type: ignore[attr-defined]
            sizes = tuple(self.store.mesh.shape)
            names, everyone, device = self.store.names, self.store.everyone, self.store.mesh.device_type
            program = NormProgram(layouts, p, names, sizes, self.store.prefix, norms, everyone, device)
            self._programs[key] = program
        runs = {names: arithmetic.join(_torch.dtensor.locals_of([grads[n] for n in names])) for names in program.sets}
        norms_of = self._known_norms(grads, p)  # a tensor's norm has the same norm
        measured = ([norms_of.get(_place(x), x) for x in runs[names]] if norms_of else runs[names] for names in runs)
        with torch.no_grad():
            inputs = [tensors or _empty(grads, names) for tensors, names in zip(measured, program.sets, strict=True)]
            return program(*inputs), runs

    def _measure_on_the_way(self, names: Sequence[str]) -> None:
        """See [Note: norms on the way]."""
        assert self.in_step is not None
        if self._on_the_way.backward != self.store.backwards:
            self._on_the_way = _OnTheWay(self.store.backwards)
        grads: dict[str, Any] = {n: self.store.parameters[n].grad for n in names}
        for run in arithmetic.join([_torch.dtensor.local_of(g) for g in grads.values()]):
            self._on_the_way.norms[_place(run)] = arithmetic.local_norm(run, self.in_step.norm_type)
        self._on_the_way.marks.update((n, _mark(g)) for n, g in grads.items())
        self._on_the_way.grads.extend(grads.values())

    def _known_norms(self, grads: Mapping[str, torch.Tensor], p: float) -> Mapping[Place, torch.Tensor]:
        """The norms taken on the way, if nothing has written to any gradient since."""
        if self.in_step is None or p != self.in_step.norm_type:
            return {}
        marks = self._on_the_way.marks
        return self._on_the_way.norms if all(marks.get(n) == _mark(g) for n, g in grads.items()) else {}

    def _skip_nonfinite(self, norms: torch.Tensor, grads: Mapping[str, torch.Tensor]) -> None:
        """See [Note: skipping a step]."""
        bad = ~norms.isfinite().all()
        before = self.skipped()  # by an earlier clipping of the same gradients, which are zero since
        bad = bad if before is None else bad | before
        for run in arithmetic.join([_torch.dtensor.local_of(g) for g in grads.values()]):
            run.masked_fill_(bad, 0)
        self._skipped = (self.store.backwards, bad)

    def _scale(self, runs: Mapping[tuple[str, ...], list[torch.Tensor]], norms: torch.Tensor, limits: Limits) -> None:
        for i, (names, limit) in enumerate(zip(limits.names, limits.values, strict=True)):
            members = [run for of, some in runs.items() if of[0] in names for run in some]
            if not members or limit == float("inf"):
                continue
            _torch.tensors.multiply(members, arithmetic.clip_coefficient(norms[i], limit))

    def _visible(self, norms: torch.Tensor, grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Norms in the dtype that users see: float64 for gradients of float64, else float32."""
        held = grads.values() if self.store.everyone is None else self.store.parameters.values()
        wide = any(dtype.to_real() == torch.float64 for dtype in {p.dtype for p in held})
        return norms if wide else norms.float()


def _empty(grads: Mapping[str, torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
    """Something without an element, on the gradients' device."""
    return [_torch.dtensor.local_of(grads[names[0]])]


def _mark(grad: torch.Tensor) -> Mark:
    """Changes when a gradient is replaced or written to: through the ``DTensor``, or by its local tensor itself."""
    return id(grad), grad._version, _torch.dtensor.local_of(grad)._version


def _place(x: torch.Tensor) -> Place:
    return x.data_ptr(), x.numel(), x.dtype


def _require_finite(norms: torch.Tensor, p: float) -> None:
    if not bool(norms.isfinite().all()):
        raise RuntimeError(
            f"the global norm of order {p} of the gradients is {', '.join(str(x) for x in norms.tolist())}, so they "
            "cannot be clipped; pass error_if_nonfinite=False to scale them anyway, or nonfinite='skip' to leave the "
            "step out"
        )
