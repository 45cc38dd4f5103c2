"""Copies of a model, with fakes in the places of its tensors: they are run and traced in its place."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autoparallel import _torch
from autoparallel._torch.export import keep_lines_of
from autoparallel._torch.nn import laid_out_by_nobody
from autoparallel.capture.caches import asks_for_cache, make_no_caches
from autoparallel.capture.fake_inputs import FakeInputs
from autoparallel.capture.python.closures import Closures
from autoparallel.capture.python.recorder import Recorder
from autoparallel.capture.python.shared_parts import SharedParts, refused_copy
from autoparallel.capture.python.watched import WatchedVariables
from autoparallel.capture.refusals.refusals import is_dense, require_dense
from autoparallel.capture.settings import CaptureSettings
from autoparallel.capture.training import Training
from autoparallel.graph.beside import method_of, take_apart
from autoparallel.graph.errors import CaptureError
from autoparallel.graph.input_values import Held
from autoparallel.graph.plain_tensors import (
    LOSS,
    REPLACED,
    held_unregistered,
    is_attribute,
    make_buffer,
    not_copied,
    stand_in,
    trained_attributes,
)
from autoparallel.graph.python_state import is_data
from autoparallel.graph.surroundings import SCRIPT, TRACED, surroundings_of


class Copies:
    """Makes copies of a model with its loss; to be made in a fake mode.

    Args:
        model: the plain model; its tensors are not touched.
        inputs: what the copies are called with.
        settings: what the model is captured for.

    Attributes:
        fakes: of every tensor of the model, by id, what stands for it in copies; and all that copies share.
        owners: the first name of each tied parameter and buffer, by every name that it has.
        references: the tensors that are neither parameters nor buffers, by the ids of their fakes.
        recorders: of all copies.
        closures: of the model's functions, as the last copy has them.
        names: of the variables around the model that are looked after and that a run has read.
        journals: the labels of lists and dicts that a run has changed: it may only add to them.
        read: the labels of those that it has read as well.
        returned_anyway: the labels of attributes that calls are given, and return also where they leave them as they
            are; ways of the model that are traced add to them.
        fixed_numbers: the labels of those that are whole numbers, and no longer open; ways add to them, too.
    """

    def __init__(self, model: nn.Module, inputs: FakeInputs, settings: CaptureSettings) -> None:
        self._model, self._inputs, self._settings = model, inputs, settings
        self.recorders: list[Recorder] = []
        self.names: set[str] = set()
        self.journals: set[str] = set()
        self.read: set[str] = set()
        self.returned_anyway: set[str] = set()
        self.fixed_numbers: set[str] = set()
        self._shared = SharedParts()
        self.owners = _owners_of(model)
        registered = (*_torch.tensors.parameters_of(model), *model.buffers())
        self.fakes: dict[int, Any] = {id(t): self._fake(t) for t in registered}
        args, (kwargs, beside) = inputs.arguments[0], take_apart(inputs.arguments[1])
        run, loss_fn = method_of(model, beside.method), settings.loss_fn
        self._cached = asks_for_cache(run, args[:-1] if loss_fn is not None else args, kwargs)
        tensors, modules_apart = held_unregistered(model)
        if isinstance(loss_fn, nn.Module):
            plain, _ = held_unregistered(loss_fn)
            state = {**dict(loss_fn.named_parameters()), **dict(loss_fn.named_buffers()), **plain}
            tensors |= {f"{LOSS}.{name}": tensor for name, tensor in state.items() if id(tensor) not in self.fakes}
        require_dense(tensors)  # as buffers they may lie there, unread
        for tensor in tensors.values():
            self.fakes.setdefault(id(tensor), stand_in(tensor, self.fakes, settings.device))
        self.fakes |= {id(held): held for held in (*not_copied(model), *modules_apart)}
        self._attributes = [name for name, t in tensors.items() if is_attribute(model, name) and t not in REPLACED]
        self._constants = {
            name: self.fakes[id(t)] for name, t in tensors.items() if name not in self._attributes and t not in REPLACED
        }
        self._held = [
            (fake, Held.by_reference(name, tensors[name]))
            for name, fake in self._constants.items()
            if not tensors[name].requires_grad
        ]
        self.references = {id(self.fakes[id(t)]): t for t in tensors.values()}
        self.owners |= {name: name for name in self._attributes}
        self._trained = trained_attributes(tensors)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a parameter or a buffer, in the dtype in which it is used."""
        is_parameter = isinstance(tensor, nn.Parameter)
        precision = self._settings.precision
        used = precision.param_dtype if precision is not None and is_parameter else None
        dtype = used if used is not None and tensor.is_floating_point() else tensor.dtype
        fake = torch.empty(tensor.shape, dtype=dtype, device=self._settings.device)
        return nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake.requires_grad_(tensor.requires_grad)

    def make(self) -> Training:
        """A copy of the model with its loss, of which all that it reads and writes is recorded; a plain attribute that
        is a tensor is a buffer of the copy."""
        model, settings = self._model, self._settings
        plain, loss, table = self._copy_both()
        around = self._copy_surroundings(table)
        _tie_tables(table)
        for name in self._attributes:
            make_buffer(plain, name)
        if settings.training is not None:
            plain.train(settings.training)
        if not self._cached:
            make_no_caches(plain)
        loss_fn = settings.loss_fn
        pair = (loss_fn, loss) if isinstance(loss_fn, nn.Module) and isinstance(loss, nn.Module) else None
        recorder = Recorder(
            model, plain, table, self._trained, pair, self._constants, around, self._shared, self.journals, self.read
        )  # fmt: skip
        self.recorders.append(recorder)
        wrapper = Training(
            plain, loss, settings.precision, recorder, self._inputs, self.returned_anyway, self.fixed_numbers
        )
        keep_lines_of(loss)
        wrapper.training = plain.training
        wrapper.findings.copies = table
        buffers = model.named_buffers(remove_duplicate=False)
        wrapper.findings.sparse = frozenset(name for name, x in buffers if not is_dense(x))
        wrapper.findings.constants = self._held
        wrapper.findings.existing = {*map(id, table.values()), *self._inputs.ids}
        wrapper.findings.originals = {id(table[id(x)]): x for x in table.get(id(table), ()) if id(x) in table}
        return wrapper

    def _copy_both(self) -> tuple[nn.Module, Callable[..., Any] | None, dict[int, Any]]:
        """Copies of the model and of its loss, and what stands in them for what, by ids; what cannot be copied stands
        for itself."""
        model, loss_fn = self._model, self._settings.loss_fn
        while True:
            table = {**self.fakes, **self._shared.by_id, id(TRACED): TRACED}
            for module in model.modules():  # the model's own run, in the backward of its program
                hooks = module._backward_hooks, module._backward_pre_hooks
                table |= {id(x): OrderedDict(x) for x in hooks}
            try:
                self.closures = Closures(model, table)
                with laid_out_by_nobody():
                    plain = copy.deepcopy(model, table)
                self.closures.fill(plain)
                return plain, copy.deepcopy(loss_fn, table) if isinstance(loss_fn, nn.Module) else loss_fn, table
            except Exception as error:
                roots = {"": model} | ({LOSS: loss_fn} if isinstance(loss_fn, nn.Module) else {})
                if not self._shared.find(roots, self.fakes):
                    raise refused_copy("", type(model), error) from error

    def _copy_surroundings(self, table: dict[int, Any]) -> WatchedVariables:
        """What a copy has in the place of what the variables around the model hold."""
        holder, twins = surroundings_of(self._model).holder, {}
        for name, value in vars(holder).items():
            try:
                twins[name] = copy.deepcopy(value, table)
            except Exception as error:
                raise CaptureError(
                    f"a call changes {SCRIPT}.{name}, a {type(value).__name__}, which cannot be copied for tracing "
                    f"({type(error).__name__}: {error})\n"
                    "What to change: return what changes as an output, or keep it in an attribute of the model."
                ) from error
        return WatchedVariables(SCRIPT, holder, SimpleNamespace(**twins), reads=self.names)


def _tie_tables(memo: dict[int, Any]) -> None:
    """Lets copies of dicts that are their own ``__dict__`` (``self.__dict__ = self``) be so, too, which
    ``copy.deepcopy`` leaves out."""
    for original in memo.get(id(memo), ()):
        if isinstance(original, dict) and is_data(original) and vars(original) is original:
            twin = memo[id(original)]
            twin.__dict__ = twin


def _owners_of(model: nn.Module) -> dict[str, str]:
    owners: dict[str, str] = {}
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        first: dict[int, str] = {}
        owners |= {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
    return owners
