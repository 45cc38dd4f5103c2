"""A program attached to a model's tensors, and the boundary between its outputs and what the user does with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autoparallel import _torch
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured, NumberSpec
from autoparallel.graph.layers import kernels_of
from autoparallel.graph.plain_tensors import tensor_at
from autoparallel.operators import RandomState, draw_from
from autoparallel.operators.attention_kernels import limited_to
from autoparallel.passes.name_modules import name_modules
from autoparallel.placements import to_dtensor_placements
from autoparallel.program.program import LocalProgram
from autoparallel.runtime.gradients.accumulation import Weight
from autoparallel.runtime.gradients.buckets import ParameterBucket, RegatherHooks, gather_ahead
from autoparallel.runtime.gradients.program_parameters import ProgramParameters
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.programs.derivatives import why_once


class Runner:
    """A program attached to a model's tensors: runs it on local inputs.

    Args:
        make_body: what runs the program's body, once all that it calls is there.

    Attributes:
        used: the names of the parameters that it uses.
        modules: the buckets that it gathers where it uses them, by the name under which it calls them.
    """

    def __init__(
        self,
        program: LocalProgram,
        store: ProgramParameters,
        plain: nn.Module,
        make_body: Callable[[LocalProgram], Callable[..., Any]],
    ) -> None:
        self.program, self.store, self.plain = program, store, plain
        self.captured = captured = program.captured
        buckets = [ParameterBucket(b, store) for b in program.buckets]
        self.hoisted = [b for b in buckets if not b.bucket.per_use]
        self.per_use = [b for b in buckets if b.bucket.per_use]
        # No backward needs what a parameter was that the call changes itself, so that another call may change it again.
        self.used = tuple(name for name in program.chains if name not in captured.changed_parameters)
        self.modules = {bucket.bucket.name: bucket for bucket in self.per_use}
        self._complete_graphs()
        self.body = make_body(program)
        gather_ahead(list(program.regions.values()), self.modules)
        self.order = [n.name for n in program.body.graph.nodes if n.op == "placeholder"]
        device = store.mesh.device_type  # a single number may lie on the CPU, where its owner may change it
        self.fixed: dict[str, torch.Tensor] = {n: x.to(device) if x.ndim else x for n, x in captured.constants.items()}
        self.leaf_names = captured.inputs
        # Copied, because the call changes them before the backward, which reads them, too, where layers run again.
        self.saved_buffers = {*captured.saved_buffers, *(captured.mutated if program.regions else ())}
        changed = captured.changed_parameters if program.regions else ()
        chains = [chain for name, chain in program.chains.items() if name in changed]
        self.saved_parameters = [name for chain in chains for name in chain.placeholders]
        self.specs = [(to_dtensor_placements(layout), layout) for layout in program.output_layouts]
        self.regathered: list[int] = []
        self._named: Callable[..., Any] | None = None  # the body that is profiled

    def _complete_graphs(self) -> None:
        """Gives the program the modules that it calls by name."""
        for graph in self.program.graphs():
            for node in graph.graph.nodes:
                if node.op == "call_module" and node.target in self.modules:
                    graph.add_submodule(node.target, self.modules[node.target])
                if node.op == "call_function" and (kernels := kernels_of(node)) is not None:
                    node.target = limited_to(node.target, kernels)
            graph.graph.lint()
            graph.recompile()

    @cached_property
    def why_once(self) -> str:
        """Why what the program computes can be differentiated once only; empty where it can be twice."""
        if self.body is not self.program.body:
            return 'it is compiled\nWhat to change: compile(backend="eager")'
        return why_once(self.program)

    def require_fits(self, call: Call) -> None:
        """Raises ValueError when a call's sizes cannot be cut as the program cuts them."""
        self.program.require_divides(call.specs, call.batch)

    def run(self, call: Call, random: RandomState) -> tuple[torch.Tensor, ...]:
        """The local outputs of a call."""
        with draw_from(random):
            return self(call.leaves)

    def __call__(
        self,
        leaves: Sequence[Any],
        buffers: Mapping[str, torch.Tensor] | None = None,
        held: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The local outputs for local inputs.

        Args:
            buffers: replace some of the model's, by name.
            held: parameters as they are used that are there already, by placeholder: whole buckets of them.
        """
        values: dict[str, Any] = {**{name: _whole(x) for name, x in self.fixed.items()}, **(held or {})}
        for name, path in self.program.captured.buffers.items():
            replacement = buffers.get(path) if buffers else None
            value = self._read(path) if replacement is None else replacement
            values[name] = value.clone() if path in self.saved_buffers else value
        for leaf_name, leaf in zip(self.leaf_names, leaves, strict=True):
            if leaf_name is not None:
                values[leaf_name] = leaf if isinstance(leaf, torch.Tensor) else NumberSpec(type(leaf), leaf).tensor()
        for bucket in self.hoisted:
            if bucket.placeholders[0] not in values:
                values.update(zip(bucket.placeholders, bucket(), strict=True))
        values.update({name: values[name].clone() for name in self.saved_parameters})
        arguments = [values[name] for name in self.order]
        body = self._named_body() if _torch.autograd.is_profiling() else self.body
        if not self.per_use:
            return body(*arguments)
        hooks = RegatherHooks(self.per_use)
        with hooks:
            outputs = body(*arguments)
        self.regathered = [b.number for b in hooks.regathered()]
        return outputs

    def _read(self, path: str) -> torch.Tensor:
        """A buffer, or an attribute.

        Raises:
            RuntimeError: for one that the loop has set to a leaf which requires a gradient, on several ranks.
        """
        value = _whole(tensor_at(self.plain, path))
        if value.requires_grad and value.is_leaf and torch.is_grad_enabled() and self.store.mesh.size() > 1:
            raise RuntimeError(
                f"{path}, which is no parameter, requires a gradient: each rank's would be of its own rows alone\n"
                "What to change: register it as an nn.Parameter; or clear its requires_grad, if nobody reads its "
                "gradient."
            )
        return value

    def _named_body(self) -> Callable[..., Any]:
        """The body, which names its modules in a profile; one that is compiled names its regions itself."""
        if self._named is None:
            self._named = name_modules(self.program.body) if self.body is self.program.body else self.body
        return self._named


def _whole(value: torch.Tensor) -> torch.Tensor:
    """What a call has set, which may lie as it was made, as a program reads it."""
    return _torch.dtensor.gather(value) if isinstance(value, DTensor) else value


class Delivery:
    """The outputs of one call, which the user may differentiate together or one by one.

    Args:
        store: where gradients go; the window of ``accumulate()`` that it has now is the call's.
        weight: what the call weighs there.
        used: the names of the parameters that the call used.
        why_once: why they can be differentiated once only; empty where they can be twice.

    Attributes:
        before: for each output, by its index, the others that it is computed of, with what they are called.
    """

    def __init__(self, store: GradientStore, weight: Weight, used: Sequence[str], why_once: str) -> None:
        self.before: dict[int, list[tuple[str, weakref.ref[torch.Tensor]]]] = {}
        self._store, self._window, self._weight = store, store.window, weight
        self._weighed, self._why_once = False, why_once
        self._used, self._versions = used, store.versions(used)

    def require_twice(self) -> None:
        """Raises RuntimeError where a backward whose own derivatives are asked for would give other ones."""
        why = self._why_once
        if self._window is not None:
            why = "accumulate() divides gradients later\nWhat to change: take it outside of the window"
        if why:
            raise RuntimeError(
                f"create_graph=True: a second derivative cannot be taken through this compiled model, because {why}"
            )

    def require_whole(self, output: int) -> None:
        """Raises RuntimeError where somebody waits for the gradient of an output of which this one is computed: what
        comes from here goes through the program, not through what the user has."""
        for name, reference in self.before.get(output, ()):
            if (x := reference()) is not None and (asks := _asks_for_gradient(x)):
                raise RuntimeError(
                    f"{asks} {name} would be given a part of its gradient: another output is computed of it inside "
                    "of the program, by which its gradient does not pass\n"
                    "What to change: give the model a second call that begins with it (z = model(x, encode=True); y = "
                    "model(z)), or compile both halves; a hook inside of forward (z.register_hook(...)) sees all of it"
                )

    def weighted(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of an output as it enters the program."""
        now = self._store.versions(self._used)
        if now != self._versions:
            names = (*self._used, *self._used)
            changed = next(n for n, a, b in zip(names, self._versions, now, strict=True) if a != b)
            raise RuntimeError(
                f"{changed} was modified in place between the forward and the backward that needs it; step the "
                "optimizer after backward()"
            )
        self._store.begin_backward()
        if self._window is None:
            return grad
        if self._window is not self._store.window:
            raise RuntimeError(
                "backward() of a microbatch after its window of accumulate() has ended: call backward() inside "
                "the loop over the window"
            )
        factor = self._window.factor(self._weight, again=self._weighed)
        self._weighed = True
        return None if grad is None else (grad * factor).to(grad.dtype)


def _asks_for_gradient(x: torch.Tensor) -> str:
    """By what somebody waits for the gradient of an output, as the backward comes to one that is computed of it."""
    if x.retains_grad:
        return "retain_grad() on"
    if x._backward_hooks:
        return "a hook on"
    return "torch.autograd.grad() with respect to" if _torch.autograd.is_handed_out(x) else ""


class Outputs(torch.autograd.Function):
    """The boundary between the program and what the user does with one of its outputs.

    Each output has its own, because a backward frees what all operands of a node have saved, also where no gradient
    comes to them.  ``before``, the outputs that it is computed of, get none from it: the engine comes here where it is
    asked for theirs (see ``Delivery.require_whole``).
    """

    @staticmethod
    def forward(
        ctx: Any, delivery: Delivery, output: torch.Tensor, unshared: bool, number: int, *before: torch.Tensor
    ) -> torch.Tensor:
        ctx.delivery, ctx.number, ctx.nothing = delivery, number, (None,) * len(before)
        ctx.set_materialize_grads(False)
        # A loss, and what shares its memory with nothing else that the user has, may be changed in place: torch refuses
        # that of the others, which are views. All but the loss keep the count of changes that autograd looks at.
        return output.clone() if output.ndim == 0 else output.detach() if unshared else output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            ctx.delivery.require_twice()
        (grad,) = grads
        if grad is not None:
            ctx.delivery.require_whole(ctx.number)
        if isinstance(grad, DTensor):  # something made of the parameters was added to the output
            grad = grad.full_tensor()
        return None, ctx.delivery.weighted(grad), None, None, *ctx.nothing


class OverMesh(torch.autograd.Function):
    """A local output as a ``DTensor``; ``DTensor.from_local``, but that no gradient may come to it: before torch 2.13
    that raises."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        ctx.mesh, ctx.placements = mesh, [Replicate() if p.is_partial() else p for p in placements]
        ctx.set_materialize_grads(False)
        return DTensor.from_local(local, mesh, placements, run_check=False)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> Any:
        (grad,) = grads
        return None if grad is None else grad.redistribute(ctx.mesh, ctx.placements).to_local(), None, None


class Refuse(torch.autograd.Function):
    """An output that cannot be differentiated, though the plain model's can."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, reason: str) -> torch.Tensor:
        ctx.reason = reason
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(ctx.reason)


def refuse_detached(captured: Captured, values: list[Any]) -> None:
    """Lets the outputs that were detached beside the loss raise when they are differentiated; in place."""
    first = len(captured.mutated)
    for i in captured.detached:
        if isinstance(values[i], torch.Tensor) and not values[i].requires_grad:
            reason = (
                f"output {i - first} of the model is not the loss and was detached from what computed it, because the "
                'loss is known (loss_fn returned it, or it is called "loss")\nWhat to change: pass outputs="gather" to '
                'compile() for outputs that are whole and can be differentiated, or outputs="sharded" for such as lie '
                "over the mesh"
            )
            values[i] = refuse_gradient(values[i], reason)


def refuse_gradient(value: torch.Tensor, reason: str) -> Any:
    """A tensor that raises when it is differentiated."""
    return Refuse.apply(torch.zeros((), device=value.device, requires_grad=True), value, reason)
