"""The face of a plain model: its tables and its attributes, under their names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial, update_wrapper
from types import GeneratorType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.graph.beside import METHOD
from autoparallel.runtime.parameters.slices import lay_like
from autoparallel.runtime.programs.outputs import anchor_of, refuse_gradient

_TABLES = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
"""What both faces of a model share; those that are called when it is loaded are called by the plain model."""

_CONTAINER = ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__")
"""What Python looks up on a class only: ``model[0]`` of an ``nn.Sequential``."""


_OF_METHOD = (
    "what the method {name} returns is differentiated, which ran on full parameters that are gathered for the call, "
    "and not trained\nWhat to change: name it in compile(forward_methods=({name!r},)), which trains it, instead of in "
    "methods=; or detach() it."
)


class _ResumedBy(Generator[Any, Any, Any]):
    """A generator that is resumed by a function, such as one that gathers for a while what it needs."""

    def __init__(self, run: Callable[..., Any], generator: GeneratorType[Any, Any, Any]) -> None:
        self._run, self._generator = run, generator

    def send(self, value: Any) -> Any:
        return self._resume(self._generator.send, value)

    def throw(self, *error: Any) -> Any:
        return self._resume(self._generator.throw, *error)

    def close(self) -> None:
        self._generator.close()  # without gathering: a garbage collection may call it, on one rank alone

    def _resume(self, resume: Callable[..., Any], *args: Any) -> Any:
        def step() -> tuple[Any, bool]:
            try:
                return resume(*args), False
            except StopIteration as end:
                return end.value, True

        value, is_over = self._run(step)
        if is_over:
            raise StopIteration(value)
        return value


def _of_plain(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._plain, name)(*args)


class Face(nn.Module):
    """A module that has a plain model's submodules, parameters, buffers and attributes; parameters are ``DTensor``s.

    What is set on it before ``_plain`` is there belongs to this object, what is set afterwards to the plain model.

    Args:
        plain: the model.
        methods: those of its methods that need whole parameters.
        forward_methods: those that are programs of their own.
    """

    whole: Callable[[], AbstractContextManager[nn.Module]]

    def __init__(self, plain: nn.Module, methods: Collection[str], forward_methods: Collection[str]) -> None:
        super().__init__()
        for table in _TABLES:
            self.__dict__[table] = plain.__dict__[table]
        self._methods, self._forward_methods = methods, forward_methods
        self.training = plain.training
        if container := {name: _of_plain(name) for name in _CONTAINER if hasattr(type(plain), name)}:
            self.__class__ = type(type(self).__name__, (type(self),), container)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the plain model, but for those that are this object's; ``training`` is both's."""
        plain = self.__dict__.get("_plain")
        if plain is not None and name == "training":
            plain.training = value
        if plain is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(plain, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._plain, name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" and not hasattr(self.__dict__["_plain"], name):  # what DistributedDataParallel has
                raise AttributeError("a compiled model wraps nothing: model.module is the model itself") from None
            value = getattr(self.__dict__["_plain"], name)
        if name in self.__dict__["_forward_methods"]:
            return update_wrapper(partial(self.forward, **{METHOD: name}), value)  # it has a name and a signature
        return self._under_whole(name) if name in self.__dict__["_methods"] else value

    def _under_whole(self, name: str) -> Callable[..., Any]:
        """A method of the plain model that gathers the parameters while it runs: a generator's, for each of its
        values, so that the loop it is in may train the model in between."""

        def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            trained = [torch.is_grad_enabled() and p.requires_grad for p in self._plain.parameters()]
            with self.whole() as plain:
                lent = list(itertools.compress(plain.parameters(), trained))
                for parameter in lent:
                    parameter.requires_grad_(True)  # so that results tell whether they are made of them
                try:
                    results = call(*args, **kwargs)
                finally:
                    for parameter in lent:
                        parameter.requires_grad_(False)
            if not lent:
                return results
            anchor, reason = anchor_of(self._plain.parameters()), _OF_METHOD.format(name=name)

            def refused(result: torch.Tensor) -> Any:
                return refuse_gradient(result.detach(), reason, anchor) if result.requires_grad else result

            return pytree.tree_map_only(torch.Tensor, refused, results)

        def method(*args: Any, **kwargs: Any) -> Any:
            results = run(getattr(self._plain, name), *args, **kwargs)
            return _ResumedBy(run, results) if isinstance(results, GeneratorType) else results

        return method

    def train(self, mode: bool = True) -> Self:
        """Sets the training mode as the plain model's class does, which may leave a part in evaluation."""
        self._plain.train(mode)
        self.training = self._plain.training
        return self

    def eval(self) -> Self:
        """Sets the evaluation mode, also where the plain model's class has an ``eval`` of its own."""
        self.train(False)
        self._plain.eval()
        return self

    def parameters(self, *args: Any, **kwargs: Any) -> Iterator[nn.Parameter]:
        """The parameters, or those of them that the plain model's class gives an optimizer."""
        plain = self.__dict__.get("_plain")
        return super().parameters(*args, **kwargs) if plain is None else plain.parameters(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes parameters, or trains them again, as the plain model's class does."""
        self._plain.requires_grad_(requires_grad)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What ``to()``, ``float()`` and the like call; the program is made for one dtype and device.

        Raises:
            RuntimeError: when a tensor would change, or be shared with other processes.
        """
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            probe = torch.empty(0, dtype=tensor.dtype, device=_torch.dtensor.local_of(tensor).device)
            changed = fn(probe)
            if (changed.dtype, changed.device.type) != (probe.dtype, probe.device.type):
                raise RuntimeError(
                    f"{name} would become {changed.dtype} on {changed.device.type}, for which the program is not made"
                    "\nWhat to change: cast or move the plain model (model.to(...)), then compile it."
                )
            if changed.device.type == "cpu" and changed.is_shared():
                raise RuntimeError(
                    f"share_memory() would share {name} with processes beside the mesh, where it is a DTensor\n"
                    "What to change: share plain copies, such as t.clone().share_memory_() for each name, t of "
                    "model.full_parameters()."
                )
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads parameters and buffers; plain tensors are whole values, of which each rank takes its part."""
        if not isinstance(state_dict, Mapping):
            kind = type(state_dict).__name__
            raise TypeError(f"load_state_dict() takes a dict of tensors, such as torch.load(path) gives, not a {kind}")
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the sharded parameters; use assign=False")
        parameters = dict(self.named_parameters(remove_duplicate=False))
        meta = [n for n, t in [*parameters.items(), *self.named_buffers()] if _torch.dtensor.local_of(t).is_meta]
        if meta:
            raise RuntimeError(
                f"{meta[0]} is on the meta device until the first call is planned, so there is nowhere to load it to: "
                "pass example_inputs to compile(), or call model.prepare(*inputs), and load then"
            )
        converted = {}
        for name, value in state_dict.items():
            parameter = parameters.get(name)
            is_laid_out = isinstance(parameter, DTensor) and isinstance(value, torch.Tensor)
            converted[name] = lay_like(value, parameter) if is_laid_out else value  # type: ignore[arg-type]
        return super().load_state_dict(converted, strict=strict)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """What ``DistributedDataParallel`` asks first of what it is to wrap, in ``Accelerator.prepare`` also."""
        raise TypeError(
            "a model compiled by autoparallel cannot be wrapped in DistributedDataParallel (as Accelerate's prepare "
            "does), nor given to torch.jit: it reduces its gradients itself. What to change: use the compiled model as "
            "it is, and prepare only the data loader; give torch.jit the plain model"
        )

    def __copy__(self) -> Any:
        """Refuses ``copy.copy``, whose copy would have the same parameters, and plans and counts of its own."""
        raise TypeError(
            "copy.copy() of a model compiled by autoparallel would be a second one of the same parameters. What to "
            "change: copy.deepcopy(model), or the model itself under another name."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses pickle, and with it ``torch.save`` of the whole model."""
        raise TypeError(
            "a model compiled by autoparallel cannot be pickled: it belongs to the processes of its mesh. What to "
            "change: model.save(path), which loads on any mesh, or whole "
            "tensors with torch.save({n: t.cpu() for n, t in model.full_parameters()}, path)"
        )
