"""Accumulating and synchronising the gradients of a model's parameters.

[Note: the accumulator is .grad] Under ``no_sync()`` a parameter's ``.grad`` is a ``DTensor`` in the layout in which the
backward made it: Partial where ranks hold summands, full-size where the parameter was gathered.  So there is one place
where a gradient is, ``zero_grad()`` clears it as it does any other, and ``full_tensor()`` of it is right at any time.
A synchronising backward adds to it and reduces the sum, once.  What no synchronising backward has reached is reduced
by clipping or by the optimizer's step.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel._torch.autograd import AskedFor
from autoparallel.comm.collectives import pack
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.placements import Layout
from autoparallel.runtime.dtensors.stages import as_gradient
from autoparallel.runtime.gradients.backwards import BackwardPass, Grads, Rows, require_not_handed
from autoparallel.runtime.gradients.hook_calls import HookCalls
from autoparallel.runtime.gradients.parameter_grads import ParameterGrads
from autoparallel.runtime.gradients.program_parameters import ProgramParameters
from autoparallel.runtime.gradients.travel import Tensors, cast
from autoparallel.runtime.parameters.hooks import has_gradient_hooks, show_always, show_engine
from autoparallel.runtime.parameters.parts import note_changes
from autoparallel.runtime.parameters.slices import as_parameter, gradient_as, lies_elsewhere
from autoparallel.runtime.parameters.state import note_parameters


class GradientStore(ProgramParameters):
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
        self.grads = ParameterGrads(parameters, mesh)
        super().__init__(mesh, prefix, parameters)
        self.everyone = everyone
        note_parameters(self, parameters)
        self.offloads_states = False  # whether the optimizer's states lie in host memory
        self.backwards, self.steps = 0, 0
        self.last_step, self.all_steps = "", b""  # what the last was made by, and a digest of what all were
        self.before_backward: Callable[[], None] = lambda: None
        self.before_reduction: Callable[[], None] = lambda: None  # of summands that no backward has reduced
        self.when_reduced: Callable[[list[str]], None] | None = None  # is told whose gradients have become whole
        self.window: Any = None  # of accumulate(), while its gradients are not divided
        beside = weakref.WeakMethod(self._take_beside)
        for name, parameter in parameters.items():
            show_engine(parameter, partial(_call_living, beside, name))
        self._pending: dict[str, ParameterChain] = {}
        self._hooks = HookCalls(parameters, lambda chain, value: self._add([chain], [value]))
        self._lock = threading.RLock()
        self.note_layouts()

    def move(self, mesh: DeviceMesh, prefix: str, everyone: str | None = None) -> None:
        """Goes to another mesh, before there are gradients."""
        super().move(mesh, prefix)
        self.everyone = everyone
        self.grads.move(mesh)

    # -- from a call ------------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Ends what an exception has left: backward passes, and a window of ``accumulate()``."""
        self.passes.end_dead()
        window = self.window
        if window is None or not torch.is_grad_enabled():
            return
        if window.left:
            self.settle()
        elif any(self.parameters[name].grad is None for name in window.names):  # zero_grad() has ended it
            self.window, self.synchronise = None, True
            show_always(self.parameters.values(), False)

    def begin_backward(self) -> None:
        """Counts a backward through an output of the model, which begins, and ends those that have died."""
        running = self.passes.running()
        if not running.is_counted:
            running.is_counted = True
            self.backwards += 1
            self.grads.forget_absent()
            self.before_backward()

    def note_step(self, settings: str, parameters: Iterable[torch.Tensor]) -> None:
        """Counts a step of an optimizer of some parameters, made by the settings that a text tells.  One of parameters
        on all stages steps on every rank, which is so seen; others step where what they hold lies."""
        self.steps += 1
        self.last_step = settings
        if self.everyone is None or _meshes_of(self.parameters.values()) <= _meshes_of(parameters):
            self.all_steps = hashlib.sha256(self.all_steps + settings.encode()).digest()

    def has_stale(self) -> bool:
        """Whether a kept copy of gathered parameters is not what they are now, as far as this rank can see."""
        return any(copy.has_changed() for copy in self.copies.values())

    def versions(self, names: Sequence[str]) -> Sequence[int]:
        """Counts changes of parameters in place: through the ``DTensor``s, then of the local tensors themselves."""
        parameters = [self.parameters[name] for name in names]
        return _torch.tensors.versions_of([*parameters, *_torch.dtensor.locals_of(parameters)])

    def note_layouts(self) -> None:
        """Notes how parameters lie; to be called again when they have got new layouts."""
        self._lying = _torch.dtensor.specs_of(list(self.parameters.values()))

    def converted(self) -> str | None:
        """What is wrong where a parameter does not lie as noted, or has another dtype; None where all do."""
        present = _torch.dtensor.specs_of(list(self.parameters.values()))
        if all(map(is_, present, self._lying)):
            return None
        pairs = zip(self.parameters, present, self._lying, strict=True)
        name = next((name for name, spec, noted in pairs if spec != noted), None)
        return name and (
            f"{name} was given another dtype or layout after compile(), as model.{name.rpartition('.')[0]}.half() "
            "does\nWhat to change: cast or move the plain model, then compile it."
        )

    # -- from a backward --------------------------------------------------------------------------------------------

    def receive(
        self, chains: Sequence[ParameterChain], grads: Grads, asked_for: AskedFor, shared: Collection[int]
    ) -> list[torch.Tensor | None]:
        """Takes the gradients of a bucket's parameters (see :meth:`ProgramParameters.receive`); autograd is handed
        nothing, because the store itself adds to ``.grad``, except under ``torch.autograd.grad()``.

        Raises:
            RuntimeError: under that in a window of ``accumulate()``.
        """
        rows = self.trained(chains, grads, asked_for)
        if self.window is not None:
            require_not_handed(asked_for, "in a window of accumulate(), which divides .grad at its end")
        if asked_for.handed:
            return self._hand_over(chains, rows, shared)
        if rows:
            self.receive_sums([chain for chain, _ in rows], self.sum_uses(rows), shared)
        return [None] * len(chains)

    def _hand_over(
        self, chains: Sequence[ParameterChain], rows: Rows, shared: Collection[int]
    ) -> list[torch.Tensor | None]:
        """The gradients of a bucket's parameters for the caller of ``torch.autograd.grad()``, as those lie."""
        complete = self.complete(rows)
        handed = {
            chain.name: as_parameter(_alone(chain, complete[chain.name], shared), self.parameters[chain.name])
            for chain, _ in rows
        }
        return [handed.get(chain.name) for chain in chains]

    def receive_sums(
        self, chains: Sequence[ParameterChain], values: Tensors, shared: Collection[int] = (), *, owned: bool = False
    ) -> None:
        """Takes the gradients of some of a bucket's parameters in the layouts in which they are made.

        Args:
            shared: the ids of gradients whose memory others may read.
            owned: whether collectives may write to the gradients.
        """
        if self.window is not None:
            self.window.names.update(dict.fromkeys(chain.name for chain in chains))
        if not self.synchronise:
            if not chains[0].each:
                self._accumulate(chains, values)
                return
            reduced = self.reduce(chains, values, [chain.each for chain in chains])
            self.passes.running().expect(reduced, partial(self._accumulate, chains))
            return
        paths = [chain.way_back for chain in chains]
        if self._pending:
            if chains[0].each and any(chain.name in self._pending for chain in chains):
                values = self.reduce(chains, values, [chain.each for chain in chains])()
                paths = [chain.sync for chain in chains]
            sums = [self._with_pending(chain, value) for chain, value in zip(chains, values, strict=True)]
            owned = owned or all(a is not b for a, b in zip(sums, values, strict=True))
            values = sums
        if not paths[0]:  # no collective makes a new tensor: what the engine shares must not become .grad
            values = [value.clone() if id(value) in shared else value for value in values]
        reduced = self.reduce(chains, values, paths, owned)
        self.passes.running().expect(reduced, partial(self._hand_out, chains))

    def _take_beside(self, name: str, grad: torch.Tensor) -> torch.Tensor | None:
        """Sees what the engine is about to add to a parameter's ``.grad`` by itself, of what the loop has computed
        beside the model (a penalty)."""
        parameter = self.parameters[name]
        mesh = _torch.dtensor.spec_of(parameter).mesh  # type: ignore[arg-type]
        if not isinstance(grad, DTensor) or grad.device_mesh != mesh:  # of a number that was sent
            grad = as_gradient(grad, mesh)
        if self.window is None and (not self.synchronise or lies_elsewhere(parameter)):
            return grad
        if torch.is_grad_enabled() and has_gradient_hooks(parameter):
            raise RuntimeError(
                f"create_graph=True: {name} has a hook, which has no graph\nWhat to change: remove it, and compute of "
                "the gradients what it does."
            )
        adds = _torch.autograd.adds_to_grad(parameter)  # torch.autograd.grad() does not
        if adds:
            self.passes.running()
        if not self._awaits_more:
            with torch.no_grad(), self._lock:
                return self._hooks.take_beside(name, grad, adds)
        if adds:
            self.window.beside = name
            self.window.names[name] = None
        return grad

    def _finish_backward(self, ended: BackwardPass) -> None:
        """Waits for the reductions that a backward has started and hands their results out."""
        try:
            with self._delivery():
                if self.window is not None:
                    self.window.require_nothing_beside()
                ended.deliver()
                if self.synchronise:
                    self._complete_pending()
                if self.window is not None and self.window.last:
                    self._conclude(self.window)
        finally:
            note_changes(parameter.grad for parameter in self.parameters.values())

    @contextmanager
    def _delivery(self) -> Iterator[None]:
        """Inside, what is on its way to ``.grad`` arrives, and nothing is on its way afterwards."""
        with self._lock:
            try:
                yield
            finally:
                self._hooks.forget()
                self.grads.forget_absent()

    def _accumulate(self, chains: Sequence[ParameterChain], grads: Tensors) -> None:
        addends = cast(grads, chains[0].accumulator_dtype)
        accumulators = [self._take_accumulator(chain) for chain in chains]
        sums = [k for k in accumulators if k is not None]
        if sums:
            torch._foreach_add_(sums, [a for a, k in zip(addends, accumulators, strict=True) if k is not None])
        # Copied, because the engine may hand a gradient to others, too; side by side, as they will be reduced.
        first = [a for a, k in zip(addends, accumulators, strict=True) if k is None]
        copies = iter(pack(first) if first else ())
        for chain, accumulator in zip(chains, accumulators, strict=True):
            self._keep(chain, next(copies) if accumulator is None else accumulator)

    def _keep(self, chain: ParameterChain, accumulator: torch.Tensor) -> None:
        """Makes a local sum the parameter's gradient, until it is reduced."""
        self.grads.give_part(chain.name, accumulator, chain.accumulator)
        self._pending[chain.name] = chain

    def _take_accumulator(self, chain: ParameterChain) -> torch.Tensor | None:
        """The local sum of what has been accumulated so far, in the accumulator's layout and dtype."""
        pending = self._pending.pop(chain.name, None)
        layout = pending.accumulator if pending is not None else chain.at_rest
        local = self.grads.local(chain.name, layout)
        if local is None:  # zero_grad() has cleared it
            self._hooks.before.pop(chain.name, None)
            return None
        if pending is None and has_gradient_hooks(self.parameters[chain.name]):
            self._hooks.before[chain.name] = local.clone()
        if layout == chain.accumulator and local.dtype == chain.accumulator_dtype:
            return local
        if pending is None:  # a whole gradient: it becomes a summand again, mostly without communication
            local = local.to(chain.accumulator_dtype, copy=True)
        self.grads.take_away(chain.name)
        return self.along(local, chain.shape, layout, chain.accumulator)

    def _with_pending(self, chain: ParameterChain, grad: torch.Tensor) -> torch.Tensor:
        if chain.name not in self._pending:
            return grad
        accumulator = self._take_accumulator(chain)
        self.grads.take_away(chain.name)
        return grad if accumulator is None else accumulator.add_(grad)

    def _hand_out(self, chains: Sequence[ParameterChain], values: Tensors) -> None:
        """Adds reduced gradients to ``.grad``; those that hooks are to see first, when all of them are there."""
        if not self._awaits_more:
            chains, values = self._hooks.keep_back(chains, values)
        if chains:
            self._add(chains, values)

    def _add(self, chains: Sequence[ParameterChain], values: Tensors) -> None:
        sums: Tensors = []
        addends: Tensors = []
        parameters = [self.parameters[chain.name] for chain in chains]
        grads, specs = _torch.tensors.grads_of(parameters), _torch.dtensor.specs_of(parameters)
        rows = zip(chains, parameters, grads, specs, cast(values, chains[0].rest_dtype), strict=True)
        for chain, parameter, grad, spec, value in rows:
            if grad is None:
                self.grads.give(chain.name, _torch.dtensor.wrap_local(_alone(chain, value), spec))
            else:
                local = gradient_as(grad, spec)
                if local is not _torch.dtensor.local_of(grad):
                    self.grads.take_away(chain.name)
                    self.grads.give(chain.name, as_parameter(local, parameter))
                sums.append(local)
                addends.append(value)
        if sums:
            torch._foreach_add_(sums, addends)
        if self.when_reduced is not None and (self.window is None or self.window.divisor() is None):
            self.when_reduced([chain.name for chain in chains])

    # -- from clipping, the optimizer, and the outside --------------------------------------------------------------

    def flush(self) -> None:
        """Reduces every gradient that is still a summand; a collective that all ranks enter alike."""
        self.passes.end_dead()
        if self.has_pending:
            self.before_reduction()
        with self._delivery():
            self._complete_pending()

    def _complete_pending(self) -> None:
        self._reduce_pending()
        self._hooks.call()

    def _reduce_pending(self) -> None:
        groups: dict[Any, list[ParameterChain]] = {}
        for name, chain in sorted(self._pending.items()):
            if self.parameters[name].grad is not None:
                forms = tuple(step.form for step in chain.sync)
                groups.setdefault((forms, chain.reduce_dtype, chain.rest_dtype), []).append(chain)
        self._pending.clear()
        for chains in groups.values():
            sums = [x for c in chains if (x := self.grads.local(c.name, c.accumulator)) is not None]
            finish = self.reduce(chains, sums, [c.sync for c in chains], owned=True)
            for chain in chains:
                self.grads.take_away(chain.name)
            self._hand_out(chains, finish())

    def settle(self) -> None:
        """Reduces every summand and ends a window of ``accumulate()``."""
        self.flush()
        window, self.window = self.window, None
        if window is None:
            return
        show_always(self.parameters.values(), False)
        window.require_alike()
        self._conclude(window)

    @property
    def _awaits_more(self) -> bool:
        """Whether a window of ``accumulate()`` adds to gradients before hooks see them."""
        return self.window is not None and not self.window.is_concluded

    def _conclude(self, window: Any) -> None:
        """Divides the gradients of a window by its weight, and calls the hooks of its parameters; of what another
        backward adds to them, hooks are called as outside of a window."""
        window.divide()
        if not window.is_concluded:
            window.is_concluded = True
            self._hooks.call_after_window(window.names)

    def pending_layouts(self) -> dict[str, Layout]:
        """How the gradients lie that are still summands, by name."""
        return {name: chain.accumulator for name, chain in self._pending.items()}

    @property
    def has_pending(self) -> bool:
        """Whether some gradient is still a summand."""
        return any(self.parameters[name].grad is not None for name in self._pending)


def _call_living(method: weakref.WeakMethod[Any], name: str, grad: torch.Tensor | None) -> torch.Tensor | None:
    """What a store that is alive makes of a gradient that there is."""
    called = method()
    return None if called is None or grad is None else called(name, grad)


def _alone(chain: ParameterChain, value: torch.Tensor, shared: Collection[int] = ()) -> torch.Tensor:
    """A reduced gradient with strides as its parameter's, which fused optimizers read, and without memory of others:
    a slice would keep the whole gradient alive."""
    if chain.ends_in_slice or id(value) in shared:
        return value.clone(memory_format=torch.contiguous_format)
    return value.contiguous()


def _meshes_of(parameters: Iterable[torch.Tensor]) -> set[DeviceMesh]:
    return {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
