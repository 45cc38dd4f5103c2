"""A program attached to a model's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import NumberSpec
from autoparallel.graph.layers import kernels_of
from autoparallel.graph.plain_tensors import tensor_at
from autoparallel.operators import RandomState, draw_from
from autoparallel.operators.attention_kernels import limited_to
from autoparallel.passes.name_modules import name_modules
from autoparallel.placements import to_dtensor_placements
from autoparallel.program.program import LocalProgram
from autoparallel.runtime.gradients.buckets import ParameterBucket, RegatherHooks, gather_ahead
from autoparallel.runtime.gradients.program_parameters import ProgramParameters
from autoparallel.runtime.programs.second_derivatives import why_once


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
        self.modules = {b.bucket.name: b for b in buckets if b.bucket.per_use}
        called = [node.target for node in program.calls() if node.op == "call_module"]
        self.per_use = [self.modules[name] for name in dict.fromkeys(called) if name in self.modules]
        # No backward needs what a parameter was that the call changes itself, so that another call may change it again.
        self.used = tuple(name for name in program.chains if name not in captured.changed_parameters)
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
