"""Gathering parameters, and accumulating and synchronising their gradients.

[Note: the accumulator is .grad] Under ``no_sync()`` a parameter's ``.grad`` is a ``DTensor`` in the layout in which the
backward made it: Partial where ranks hold summands, full-size where the parameter was gathered.  So there is one place
where a gradient is, ``zero_grad()`` clears it as it does any other, and ``full_tensor()`` of it is right at any time.
A synchronising backward adds to it and reduces the sum, once.  What no synchronising backward has reached is reduced
by clipping or by the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.collectives import Extent, extent_of, pack, settled, start_transfers
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.passes.insert_collectives import group_name
from autoparallel.placements import Layout, dual_layout, to_dtensor_placements
from autoparallel.redistribution import Step

Tensors = list[torch.Tensor]


class GradientReceiver(Protocol):
    """What the boundary between parameters and a program needs: the parameters, and where their gradients go."""

    synchronise: bool

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...
    def start(self, tensors: Tensors, paths: Sequence[Sequence[Step]]) -> Callable[[], Tensors]: ...
    def receive(self, chains: Sequence[ParameterChain], grads: Sequence[Sequence[torch.Tensor | None]]) -> None: ...


class GradientStore:
    """The gradients of one model's parameters: which are whole, which are still to be reduced.

    Args:
        mesh, prefix: the mesh, and the name under which it is bound.
        parameters: the parameters at rest, by name.
        everyone: where other ranks hold other parameters, the name of the group of all of them, over which norms are
            taken; None where the mesh is all there is.
    """

    def __init__(
        self, mesh: DeviceMesh, prefix: str, parameters: Mapping[str, nn.Parameter], everyone: str | None = None
    ) -> None:
        self.move(mesh, prefix, everyone)
        self.parameters = parameters
        self.synchronise = True
        self.backwards = 0
        self.when_reduced: Callable[[list[str]], None] | None = None  # is told whose gradients have become whole
        self.window: Any = None  # of accumulate(), while its gradients are not divided
        self._held: dict[str, None] = {}  # parameters that got a gradient in the window
        for parameter in parameters.values():
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                parameter.grad_dtype = None  # accumulators are float32
        self._pending: dict[str, ParameterChain] = {}
        self._running: list[Callable[[], None]] = []

    def move(self, mesh: DeviceMesh, prefix: str, everyone: str | None = None) -> None:
        """Goes to another mesh, before there are gradients."""
        self.mesh, self.prefix, self.everyone = mesh, prefix, everyone
        self.names = mesh.mesh_dim_names or ()
        self._specs: dict[tuple[str, Layout, torch.dtype], Any] = {}
        self._extents: dict[Step, Extent | None] = {}

    # -- collectives over many tensors ------------------------------------------------------------------------------

    def start(
        self, tensors: Tensors, paths: Sequence[Sequence[Step]], *, owned: bool = False
    ) -> Callable[[], Tensors]:
        """Takes each tensor along its path; all paths go the same way.  The first collective starts at once, in the
        tensors' own memory if that is ``owned``."""
        if not paths or not paths[0]:
            return lambda: tensors
        begun = [self._start_step(tensors, [p[0] for p in paths], owned)]

        def finish() -> Tensors:
            values = begun.pop()()  # what was sent ends with the collective, not with this function
            for i in range(1, len(paths[0])):
                values = self._start_step(values, [p[i] for p in paths])()
            return values

        return finish

    def _start_step(self, tensors: Tensors, steps: Sequence[Step], owned: bool = False) -> Callable[[], Tensors]:
        group = group_name(self.prefix, self.names, steps[0].axes)
        extents = [self._extent(s) for s in steps]
        return start_transfers(tensors, [s.src for s in steps], [s.dst for s in steps], group, extents, owned)

    def _extent(self, step: Step) -> Extent | None:
        """What this rank must know of a step between shards that differ in size."""
        if step.before is not None and step not in self._extents:
            axes = [group_name(self.prefix, self.names, (axis,)) for axis in range(len(self.names))]
            self._extents[step] = extent_of(step, axes)
        return None if step.before is None else self._extents[step]

    # -- from a backward --------------------------------------------------------------------------------------------

    def receive(self, chains: Sequence[ParameterChain], grads: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Takes the gradients of a bucket's parameters: for each, one for every use; None where none was reached."""
        present = [
            (chain, self.sum_uses(chain, values))
            for chain, values in zip(chains, grads, strict=True)
            if any(value is not None for value in values)
        ]
        if present:
            self.receive_sums([chain for chain, _ in present], [value for _, value in present])

    def receive_sums(self, kept: Sequence[ParameterChain], values: Tensors, *, owned: bool = False) -> None:
        """Takes the gradients of some of a bucket's parameters in the layouts in which they are made; ``owned`` are
        those that nobody else has."""
        each = [chain.each for chain in kept]
        if self.window is not None:
            self._held |= dict.fromkeys(chain.name for chain in kept)
        if not self.synchronise:
            if not each[0]:
                self._accumulate(kept, values)
                return
            reduced = self._reduce(kept, values, each)
            self._later(lambda: self._accumulate(kept, reduced()))
            return
        if each[0] and any(chain.name in self._pending for chain in kept):
            values, each = self._reduce(kept, values, each)(), []
        sums = [self._with_pending(chain, value) for chain, value in zip(kept, values, strict=True)]
        owned = owned or all(a is not b for a, b in zip(sums, values, strict=True))
        paths = [(*first, *chain.sync) for first, chain in zip(each or [()] * len(kept), kept, strict=True)]
        if not paths[0] and not owned:  # no collective makes a new tensor: what the engine shares must not become .grad
            sums = [s.clone() for s in sums]
        finish = self._reduce(kept, sums, paths, owned)
        self._later(lambda: self._hand_out(kept, finish()))

    def _reduce(
        self, chains: Sequence[ParameterChain], values: Tensors, paths: Sequence[Sequence[Step]], owned: bool = False
    ) -> Callable[[], Tensors]:
        """Takes gradients along their paths, in the dtype in which they travel."""
        return self.start([cast(v, c.reduce_dtype) for c, v in zip(chains, values, strict=True)], paths, owned=owned)

    def _later(self, hand_out: Callable[[], None]) -> None:
        """Has ``hand_out`` called when the running backward ends, with its collectives under way until then."""
        if not self._running:
            _torch.after_backward(self._finish_backward)
        self._running.append(hand_out)

    def _finish_backward(self) -> None:
        if self.synchronise:
            self.flush()
        else:
            self.finish()

    def sum_uses(self, chain: ParameterChain, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """One gradient, in the layout in which they add up, from those of the parameter's uses."""
        total: torch.Tensor | None = None
        for value, use in zip(values, chain.uses, strict=True):
            if value is None:
                continue
            value = self.along(settled(value), chain.shape, dual_layout(use), chain.made)
            total = value if total is None else total + value
        assert total is not None
        return total

    def _accumulate(self, chains: Sequence[ParameterChain], grads: Tensors) -> None:
        addends = [cast(grad, chain.accumulator_dtype) for chain, grad in zip(chains, grads, strict=True)]
        known = [self._take_accumulator(chain) for chain in chains]
        sums = [k for k in known if k is not None]
        if sums:
            torch._foreach_add_(sums, [a for a, k in zip(addends, known, strict=True) if k is not None])
        # Copied, because the engine may hand a gradient to others, too; side by side, as they will be reduced.
        first = [a for a, k in zip(addends, known, strict=True) if k is None]
        copies = iter(pack(first) if first else ())
        for chain, accumulator in zip(chains, known, strict=True):
            self._keep(chain, next(copies) if accumulator is None else accumulator)

    def _keep(self, chain: ParameterChain, accumulator: torch.Tensor) -> None:
        """Makes a local sum the parameter's gradient, until it is reduced."""
        parameter = self.parameters[chain.name]
        if parameter.grad is None or _torch.local_of(parameter.grad) is not accumulator:
            parameter.grad = self.wrap(chain.name, accumulator, chain.accumulator)
        if chain.sync or accumulator.dtype != parameter.dtype:
            self._pending[chain.name] = chain

    def _take_accumulator(self, chain: ParameterChain) -> torch.Tensor | None:
        """The local sum of what has been accumulated so far, in the accumulator's layout and dtype."""
        grad = self.parameters[chain.name].grad
        if grad is None:  # zero_grad() has cleared it
            self._pending.pop(chain.name, None)
            return None
        local = _torch.local_of(grad)
        known = self._pending.pop(chain.name, None)
        layout = known.accumulator if known is not None else chain.at_rest
        if layout == chain.accumulator and local.dtype == chain.accumulator_dtype:
            return local
        if known is None:  # a whole gradient: it becomes a summand again, without communication
            local = local.to(chain.accumulator_dtype, copy=True)
        self.parameters[chain.name].grad = None
        return self.along(local, chain.shape, layout, chain.accumulator)

    def along(self, value: torch.Tensor, shape: tuple[int, ...], src: Layout, dst: Layout) -> torch.Tensor:
        """A parameter's value or gradient of a global shape, taken from one layout to another."""
        if src == dst:
            return value
        # Of the axes that shard a dim the innermost, which is the last, is left first and entered last.
        order = sorted(range(len(src)), key=lambda i: (src[i].kind != "S", -i if src[i].kind == "S" else i))
        layout = src
        for axis in order:
            if src[axis] != dst[axis]:
                step = Step((axis,), src[axis], dst[axis]).on(shape, layout, tuple(self.mesh.shape))
                value = self._start_step([value], [step])()[0]
                layout = step.apply(layout)
        return value

    def _with_pending(self, chain: ParameterChain, grad: torch.Tensor) -> torch.Tensor:
        if chain.name not in self._pending:
            return grad
        known = self._take_accumulator(chain)
        self._pending.pop(chain.name, None)
        self.parameters[chain.name].grad = None
        return grad if known is None else known.add_(grad)

    def _hand_out(self, chains: Sequence[ParameterChain], values: Tensors) -> None:
        sums: Tensors = []
        addends: Tensors = []
        for chain, value in zip(chains, values, strict=True):
            parameter = self.parameters[chain.name]
            value = cast(value, parameter.dtype)
            if parameter.grad is None:
                # A slice would keep the whole gradient alive, and fused optimizers read strides as the parameter's.
                contiguous = torch.contiguous_format
                value = value.clone(memory_format=contiguous) if chain.ends_in_slice else value.contiguous()
                parameter.grad = self.wrap(chain.name, value, chain.at_rest)
            else:
                sums.append(_torch.local_of(parameter.grad))
                addends.append(value)
        if sums:
            torch._foreach_add_(sums, addends)
        if self.when_reduced is not None and (self.window is None or self.window.divisor() is None):
            self.when_reduced([chain.name for chain in chains])

    def finish(self) -> None:
        """Waits for the reductions that a backward has started and hands their results out."""
        running, self._running = self._running, []
        while running:  # each lets go of its buffers before the next makes its gradients
            running.pop(0)()

    # -- from clipping, the optimizer, and the outside --------------------------------------------------------------

    def wrap(self, name: str, local: torch.Tensor, layout: Layout) -> DTensor:
        """A gradient as the ``DTensor`` that ``.grad`` is."""
        spec = self._specs.get((name, layout, local.dtype))
        if spec is None:
            parameter = self.parameters[name]
            spec = _torch.make_spec(self.mesh, to_dtensor_placements(layout), parameter.shape, local.dtype)
            self._specs[name, layout, local.dtype] = spec
        return _torch.wrap_local(local, spec)

    def flush(self) -> None:
        """Reduces every gradient that is still a summand; a collective that all ranks enter alike."""
        self.finish()
        groups: dict[Any, list[ParameterChain]] = {}
        for name, chain in sorted(self._pending.items()):
            if self.parameters[name].grad is not None:
                kinds = tuple((s.axes, s.src.kind, s.dst.kind) for s in chain.sync)
                groups.setdefault((kinds, chain.reduce_dtype, chain.accumulator_dtype), []).append(chain)
        self._pending.clear()
        for chains in groups.values():
            locals_ = [_torch.local_of(self.parameters[c.name].grad) for c in chains]  # type: ignore[arg-type]
            finish = self._reduce(chains, locals_, [c.sync for c in chains], owned=True)
            for chain in chains:
                self.parameters[chain.name].grad = None
            self._hand_out(chains, finish())

    def settle(self) -> None:
        """Reduces every summand and ends a window of ``accumulate()``: divides the gradients by its weight."""
        self.flush()
        window, self.window = self.window, None
        self._held = {}
        divisor = None if window is None else window.divisor()
        if divisor is not None:
            by_dtype: dict[torch.dtype, Tensors] = {}
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    by_dtype.setdefault(parameter.dtype, []).append(_torch.local_of(parameter.grad))
            for grads in by_dtype.values():
                torch._foreach_div_(grads, divisor)

    def begin_window(self, window: Any) -> None:
        """Starts a window of ``accumulate()``.

        Raises:
            RuntimeError: inside ``no_sync()``, or where a parameter has a gradient already.
        """
        if not self.synchronise:
            raise RuntimeError("accumulate() inside no_sync(): it decides by itself when gradients are reduced")
        name = next((n for n, p in self.parameters.items() if p.grad is not None), None)
        if name is not None:
            raise RuntimeError(
                f"accumulate() starts a window, but {name} has a gradient already: call optimizer.zero_grad() after "
                "every optimizer.step()"
            )
        self.window, self._held = window, {}

    def require_kept(self) -> None:
        """Raises RuntimeError where a gradient of an earlier microbatch of the window is gone."""
        lost = next((name for name in self._held if self.parameters[name].grad is None), None)
        if lost is not None:
            raise RuntimeError(
                f"the gradient of {lost} was cleared in the middle of a window of accumulate(), so that earlier "
                "microbatches would be missing: call optimizer.zero_grad() after optimizer.step(), not in between"
            )

    def whole_gradients(self, what: str) -> dict[str, torch.Tensor]:
        """Every gradient there is, reduced, as it lies at rest; ``what`` asks, in messages.

        Raises:
            RuntimeError: inside ``no_sync()``, or before any backward.
        """
        if not self.synchronise:
            raise RuntimeError(f"{what} inside no_sync(): gradients are not reduced yet; call it after the window")
        self.settle()
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if not grads and not (self.everyone is not None and self.backwards):  # other ranks have some
            raise RuntimeError(f"{what} before any backward(): no parameter has a gradient")
        return grads

    def pending_layouts(self) -> dict[str, Layout]:
        """How the gradients lie that are still summands, by name."""
        return {name: chain.accumulator for name, chain in self._pending.items()}

    @property
    def has_pending(self) -> bool:
        """Whether some gradient is still a summand."""
        return any(self.parameters[name].grad is not None for name in self._pending)


def cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same values in a dtype; the tensor itself where it has that already."""
    return value if value.dtype == dtype else value.to(dtype)
