"""The first values of a model that was made on the meta device, as its own modules give them.

A module's ``reset_parameters()`` sets its own tensors, as when it was made.  A model may have ``_init_weights(module)``
(all of transformers do), which sets those of any module inside of it; where that leaves something out,
``reset_parameters()`` comes before it.  It may also reach into the modules inside of the one that it is given, so a
layer of such a model gets its values as a whole, and any other module together with those in it that hold no others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoparallel import _torch
from autoparallel.graph.labels import label_in


@dataclass
class Unit:
    """Modules that get their values together.

    Attributes:
        modules: each with its path, and the module around it whose ``_init_weights`` sets it, if there is one; the
            inner ones first, where a model has ``_init_weights``.
    """

    modules: list[tuple[str, nn.Module, Any]]

    def values(self, device: torch.device) -> tuple[dict[nn.Parameter, torch.Tensor], list[torch.Tensor]]:
        """Whole values for the parameters that have none, and the buffers that had none and are set now.

        Raises:
            RuntimeError: naming a module that leaves one of its tensors without a value.
        """
        tables = [(module, dict(module._parameters), dict(module._buffers)) for _, module, _ in self.modules]
        values: dict[nn.Parameter, torch.Tensor] = {}
        buffers: list[torch.Tensor] = []
        missing = [_missing_names(module) for _, module, _ in self.modules]
        for module, parameters, _ in tables:
            for name, p in parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(_blank(p, device), p.requires_grad)
            for name, b in list(module._buffers.items()):
                if b is not None:
                    module._buffers[name] = _blank(b, device) if b.is_meta else b.clone()
        try:
            for (path, module, owner), names in zip(self.modules, missing, strict=True):
                _initialise(module, owner, path, names)
            for (module, parameters, _), names in zip(tables, missing, strict=True):
                for name in names:
                    value = module._parameters.get(name)
                    if value is None:
                        buffers.append(module._buffers[name])  # type: ignore[arg-type]
                    else:
                        values.setdefault(parameters[name], value.detach())  # type: ignore[arg-type]
        except BaseException:
            missing = [[] for _ in missing]  # nothing has got a value
            raise
        finally:
            for (module, parameters, its), names in zip(tables, missing, strict=True):
                module._parameters.update(parameters)
                module._buffers.update({name: b for name, b in its.items() if name not in names})
        return values, buffers


def find_units(model: nn.Module) -> list[Unit]:
    """The modules of a model that have tensors without values, in the order in which they get them.

    Raises:
        RuntimeError: naming one that nothing sets.
    """
    owners: dict[str, Any] = {}
    group: dict[str, str] = {}
    layers: set[str] = set()  # those in lists, outside of any other
    modules = dict(model.named_modules())
    for path, module in modules.items():
        above = path.rpartition(".")[0] if path else None
        owners[path] = module if _initialises(module) else owners[above] if above is not None else None
        group[path] = path
        if above is not None and owners[path] is not None:
            is_leaf = not any(module.children()) and not isinstance(modules[above], nn.ModuleList)
            if group[above] in layers or is_leaf:
                group[path] = group[above]
            elif isinstance(modules[above], nn.ModuleList):
                layers.add(path)
    units: dict[str, Unit] = {}
    for path in _inner_first(model) if any(owner is not None for owner in owners.values()) else modules:
        module = modules[path]
        if (names := _missing_names(module)) and owners[path] is None and not hasattr(module, "reset_parameters"):
            raise RuntimeError(_explain(path, module, names, "no reset_parameters(): add one"))
        units.setdefault(group[path], Unit([])).modules.append((path, module, owners[path]))
    return [unit for unit in units.values() if any(_missing_names(module) for _, module, _ in unit.modules)]


@contextmanager
def set_already(model: nn.Module) -> Iterator[None]:
    """Inside, what a model of transformers sets of its parameters is left as it is, but for those of a unit."""
    marked = [t for t in (*_torch.tensors.parameters_of(model), *model.buffers()) if not hasattr(t, _MARK)]
    for tensor in marked:
        setattr(tensor, _MARK, True)
    try:
        yield
    finally:
        for tensor in marked:
            tensor.__dict__.pop(_MARK, None)


_MARK = "_is_hf_initialized"


def _initialise(module: nn.Module, owner: Any, path: str, names: list[str]) -> None:
    """Sets the tensors of a module."""
    reset: Any = getattr(module, "reset_parameters", None)
    with torch.no_grad():
        if owner is not None:
            owner._init_weights(module)
        left = [name for name in names if _is_blank(_tensor(module, name))]
        if left and reset is not None:
            reset()
            if owner is not None:
                owner._init_weights(module)
            left = [name for name in names if _is_blank(_tensor(module, name))]
    if left:
        how = "reset_parameters()" if owner is None else f"_init_weights() of {type(owner).__name__}"
        raise RuntimeError(_explain(path, module, left, f"{how} leaves them without values: set them there"))


def _explain(path: str, module: nn.Module, names: list[str], what: str) -> str:
    return (
        f"{path or 'the model'} ({type(module).__name__}) has tensors on the meta device ({', '.join(names)}) but "
        f"{what}, or load a state dict with load_state_dict(..., assign=True) before compile()"
    )


def _initialises(module: nn.Module) -> bool:
    """Whether a module has ``_init_weights(module)``."""
    method = getattr(module, "_init_weights", None)
    if not inspect.ismethod(method):
        return False
    needed = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
    return len([p for p in needed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]) == 1


def _inner_first(module: nn.Module) -> list[str]:
    """The paths of all modules, each after those inside of it."""
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, path: str) -> Iterator[str]:
        if module not in visited:
            visited.add(module)
            for name, child in module.named_children():
                yield from visit(child, label_in(path, name))
            yield path

    return list(visit(module, ""))


def _missing_names(module: nn.Module) -> list[str]:
    """The names of a module's own tensors that have no values."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return [name for name, t in tensors if t is not None and _torch.dtensor.local_of(t).is_meta]


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    return module._parameters[name] if name in module._parameters else module._buffers[name]  # type: ignore[return-value]


def _blank(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of values that nobody sets."""
    return torch.full(like.shape, _value(like.dtype), dtype=like.dtype, device=device)


def _is_blank(tensor: torch.Tensor) -> bool:
    """Whether a part of a floating tensor, or all of another, has not been set; of truth values nobody knows."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and tensor.numel() > 0 and bool((tensor == _value(tensor.dtype)).all())


def _value(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min
