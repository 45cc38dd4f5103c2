"""Reads a call: what it is given, flattened, and why this rank cannot make it, if it cannot."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.comm.world import elsewhere, from_host
from autoparallel.graph.beside import CARRIED, DRAWS, METHOD, method_of
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import InputSpec, describe_inputs
from autoparallel.graph.carried_attributes import as_argument, describe_attributes, may_be_carried
from autoparallel.graph.drawn_numbers import describe_draws
from autoparallel.graph.hooks import hooks_of
from autoparallel.graph.labels import is_entry
from autoparallel.graph.nesting import flatten
from autoparallel.graph.plain_tensors import attribute_at
from autoparallel.graph.python_state import MISSING, is_plain
from autoparallel.placements import Layout, from_dtensor_placements
from autoparallel.runtime.calls.kinds import Kinds
from autoparallel.runtime.parameters.state import slots


class CallReader:
    """Reads the calls of one model.

    Args:
        kinds: the kinds of calls that it has had.
        has_loss_fn: whether the last positional argument may be the target of a loss function.
    """

    def __init__(self, kinds: Kinds, has_loss_fn: bool) -> None:
        self.plain = plain = kinds.maker.model
        self.kinds, self.has_loss_fn = kinds, has_loss_fn
        self._signature = inspect.signature(plain.forward)
        self._names = dict(plain.named_parameters(remove_duplicate=False))
        self._listed = [id(p) for _, _, p in slots(plain)]
        self._structures: dict[object, int] = {}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_whole: bool) -> tuple[Call, str | None]:
        """A call, and why this rank cannot make it, if it cannot.

        Args:
            is_whole: whether the model's parameters are gathered now (see ``ParallelModule.whole``).

        Raises:
            RuntimeError: under a transform of ``torch.func``, where ranks cannot even tell each other of it, and under
                ``torch.export``, or ``torch.onnx.export`` of either kind.
        """
        if _torch.transforms.is_transforming() or _torch.autograd.is_dual_level():
            raise RuntimeError(
                "a transform of torch.func (vmap, grad, jvp), or forward-mode autograd, cannot see into a compiled "
                "model\n"
                "What to change: call the transform inside of forward, take gradients with torch.autograd.grad of what "
                "the model returns, or transform the plain model (model.whole())."
            )
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise RuntimeError(
                "torch.export, torch.onnx.export and torch.jit.trace cannot see into a compiled model\n"
                "What to change: export the plain one: `with model.whole() as plain: torch.export.export(plain, args)`."
            )
        method = kwargs.get(METHOD)
        with_target = self.has_loss_fn and not method and len(args) > 0 and self._binds(args[:-1], kwargs)
        caches: list[Any] = []
        carried, problem = self._read_attributes() if self.kinds.carried.values else ({}, None)
        argument = as_argument(carried)
        drawn = self.kinds.carried.draw_ahead()
        more = [*describe_attributes(argument), *describe_draws(drawn)]
        beside: dict[str, Any] = ({CARRIED: argument} if carried else {}) | ({DRAWS: drawn} if drawn else {})
        leaves, in_spec = flatten((args, {**kwargs, **beside} if beside else kwargs), caches)
        leaves = list(map(_as_pythons, leaves))
        count = len(leaves) - len(more)
        mesh = self.kinds.maker.mesh
        modules = _submodules(self.plain)
        listed = [p for m in modules for p in m._parameters.values() if p is not None]
        training = tuple([m.training for m in modules])
        requiring = self.kinds.carried.find_requiring(in_spec, training, leaves)
        for i in requiring:
            leaves[i].requires_grad_()  # as forward does
        if is_whole:
            problem = "the model is called inside of whole(): call the plain model that it gives, or leave it first"
        elif list(map(id, listed)) != self._listed:
            problem = _why_replaced(modules, dict(self.plain.named_parameters(remove_duplicate=False)), self._names)
        problem = problem or self.kinds.store.converted()
        autocast = torch.get_autocast_dtype(mesh.device_type) if torch.is_autocast_enabled(mesh.device_type) else None
        layouts: list[Layout | None] = [None] * len(leaves)
        local = list(leaves)
        for i, leaf in enumerate(leaves[:count]):
            if isinstance(leaf, DTensor):
                local[i] = leaf.to_local()
                try:
                    layouts[i] = from_dtensor_placements(leaf.placements)
                except ValueError as error:
                    problem = str(error)
            elif isinstance(leaf, torch.Tensor):
                local[i] = from_host(leaf, mesh)
            if why := _unfit(leaf, mesh):
                problem = f"{self._name(args, kwargs, i)} {why}"
        if any(isinstance(x, PackedSequence) for x in (*args, *kwargs.values())):
            problem = (
                "a PackedSequence is passed in\n"
                "What to change: pass in padded sequences and their lengths, and pack them in forward."
            )
        specs, batch = describe_inputs(leaves[:count])
        if batch == 0 and any(isinstance(s, InputSpec) and s.shape[:1] == (0,) for s in specs):
            problem = "the batch is empty: its first tensor has 0 rows\nWhat to change: leave such batches out."
        for i in requiring:
            specs[i] = replace(specs[i], is_to_require=True)
        specs += more
        trainable = tuple([p.requires_grad for p in {id(p): p for p in listed}.values()])
        call = Call(
            tuple(local), tuple(specs), tuple(layouts), in_spec, batch, with_target, training, trainable,
            torch.is_grad_enabled(), hooks_of(modules), self._structure_of(modules), autocast, tuple(caches),
            len(more), tuple(leaves),
        )  # fmt: skip
        return call, problem

    def _read_attributes(self) -> tuple[dict[str, Any], str | None]:
        """The attributes that calls change, as they are now, on the mesh's device; and why this rank has none that can
        be given to a call."""
        carried: dict[str, Any] = {}
        problem: str | None = None
        for label in self.kinds.carried.values:
            value = _as_pythons(attribute_at(self.plain, label, self.kinds.maker.loss_fn))
            if value is MISSING and is_entry(label):  # the loop has emptied the container
                continue
            if isinstance(value, DTensor) and value.device_mesh == self.kinds.maker.mesh:  # as a call has made it
                self.kinds.exchange.of_other(f"a call that reads {label}")
                value = value.full_tensor()
            is_constant = is_plain(value) and not isinstance(value, int)
            if not (is_constant or may_be_carried(value)) or isinstance(value, DTensor):
                form = "gone" if value is MISSING else f"a {type(value).__name__}"
                form = "a number of more than 62 bits" if type(value) is int else form
                problem = (
                    f"{label} is {form}, and calls have changed it as a number or a plain tensor\n"
                    "What to change: set it to one, without a gradient (x.detach())."
                )
                value = None
            elif isinstance(value, torch.Tensor) and not value.is_meta:
                value = value.to(self.kinds.maker.mesh.device_type)
            carried[label] = value
        return carried, problem

    def _structure_of(self, modules: tuple[nn.Module, ...]) -> int:
        """The number of a set of submodules of their classes, and of which buffers of theirs are one, among those that
        the model has had."""
        first: dict[int, int] = {}
        buffers = enumerate(b for module in modules for b in module._buffers.values() if b is not None)
        structure = (
            modules,
            tuple(map(type, modules)),
            tuple([first.setdefault(id(buffer), place) for place, buffer in buffers]),
        )
        return self._structures.setdefault(structure, len(self._structures))

    def _binds(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:
            return False
        return True

    def _name(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaf: int) -> str:
        """What a user calls a leaf of the inputs, such as ``the argument x[0]``."""
        (_, first, *rest), _ = pytree.tree_flatten_with_path((args, kwargs))[0][leaf]
        names = list(inspect.signature(method_of(self.plain, kwargs.get(METHOD))).parameters)
        position = getattr(first, "idx", None)
        if position is None:
            name = str(getattr(first, "key", first))
        else:
            name = names[position] if position < len(names) else f"{position} (the target)"
        return f"the argument {name}{pytree.keystr(tuple(rest))}"


def _as_pythons(value: Any) -> Any:
    """A number of numpy as one of Python's: it changes from call to call as that does (``np.linspace``)."""
    return value.item() if isinstance(value, np.floating | np.integer | np.bool_) else value


def _submodules(model: nn.Module) -> tuple[nn.Module, ...]:
    """A model and its submodules, in the order of ``model.modules()``, in a fraction of its time."""
    listed: dict[nn.Module, None] = {}
    left = [model]
    while left:
        module = left.pop()
        if module not in listed:
            listed[module] = None
            if module._modules:
                left += [child for child in reversed(module._modules.values()) if child is not None]
    return tuple(listed)


def _why_replaced(
    modules: tuple[nn.Module, ...], now: Mapping[str, nn.Parameter], before: Mapping[str, nn.Parameter]
) -> str | None:
    """What has become of parameters that are not the ones that were compiled; None where they are only listed so."""
    if any(map(_torch.nn.is_fully_sharded, modules)):
        return (
            "fully_shard() was applied to the compiled model, which shards its parameters itself\n"
            "What to change: use the compiled model as it is (plan='fsdp' shards as fully_shard does)."
        )
    name = next((n for n in (*now, *before) if now.get(n) is not before.get(n)), None)
    return name and (
        f"{name} was added, removed or replaced after compile(), so that it would not be trained\n"
        "What to change: change a plain model (with model.whole() as plain: new = copy.deepcopy(plain)), then compile "
        "it, and make its optimizer; for values of one call, "
        "`with model.whole() as plain: torch.func.functional_call(plain, whole_tensors, args)`, on every rank."
    )


def _unfit(leaf: Any, mesh: DeviceMesh) -> str | None:
    """Why one leaf of the inputs cannot be used; None where it can."""
    if isinstance(leaf, np.ndarray):
        return f"is a numpy array: give torch.from_numpy(array).to({mesh.device_type!r})"
    if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
        return f"is not dense ({leaf.layout}), and only dense tensors are cut into parts: give x.to_dense()"
    if isinstance(leaf, DTensor) and leaf.device_mesh != mesh:
        return "is a DTensor that lies on another mesh than the model"
    return elsewhere(leaf, mesh) if isinstance(leaf, torch.Tensor) and not leaf.is_cpu else None
