"""Attributes that the user has set on tensors: ``weight.scale = 2.0``, and ``self.weight.scale`` in a forward.

What stands for the tensors of a model and of its inputs while it is traced has none of them, so that Python asks
``torch.Tensor.__getattr__``, which torch does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from autoparallel import _torch
from autoparallel.graph.errors import refusal
from autoparallel.graph.input_values import Held, is_flag
from autoparallel.graph.plain_tensors import tensor_at
from autoparallel.graph.python_state import MISSING, PythonState, is_plain


class TensorAttributes:
    """What is read of the attributes of a model's tensors, by all traces of one attempt.

    Args:
        model: the user's.
        leaves: the inputs of the call, as far as they are at hand.

    Attributes:
        asks_flags: whether Python has asked for what a flag holds (see ``inputs_read``).
    """

    def __init__(self, model: nn.Module, leaves: Sequence[Any]) -> None:
        self._model, self._leaves = model, leaves
        self.asks_flags = False
        self._users: dict[int, tuple[str, Tensor]] = {}  # by the id of what stands for it, a tensor and its name
        self._inputs: dict[int, Tensor] = {}
        self._before: list[tuple[str, Tensor, set[str]]] = []  # the attributes of what stands for them
        self._read: dict[tuple[str, str], None] = {}
        self._asked_hooks: set[str] = set()

    def note_tensors(self, stand_ins: Mapping[str, Tensor], inputs: Sequence[Any]) -> None:
        """Notes what stands for parameters and buffers, by name, and for inputs."""
        for _, x, names in self._before:  # copies share them
            for name in vars(x).keys() - names:
                delattr(x, name)
        users = dict(_torch.tensors.named_tensors(self._model))
        self._users = {id(x): (name, users[name]) for name, x in stand_ins.items() if name in users}
        self._before = [(name, x, set(vars(x))) for name, x in stand_ins.items()]
        self._inputs = {id(x): leaf for x, leaf in zip(inputs, self._leaves, strict=False) if isinstance(leaf, Tensor)}

    def read(self, tensor: Tensor, name: str, line: str) -> Any:
        """The attribute of the user's tensor; ``MISSING`` where it has none.

        Args:
            line: the one that reads it.

        Raises:
            CaptureError: where it is no constant.
        """
        label, owner = self._users.get(id(tensor), ("", None))
        of_input = self._inputs.get(id(tensor))
        if owner is None:
            if of_input is None or name not in vars(of_input):
                return MISSING
            what = f"{name}, an attribute of an input, is read"
            raise refusal(what, line, "pass it to the model as an argument of its own")
        self._read[label, name] = None
        value = vars(owner).get(name, MISSING)
        if value is not MISSING and not is_plain(value):
            what = f"{label}.{name}, a {type(value).__name__} that is an attribute of a tensor, is read"
            raise refusal(what, line, "keep it in an attribute of the module")
        return value

    def note_asked(self, tensor: Tensor) -> None:
        """Notes that Python asks for a tensor's value, perhaps a flag's."""
        if not self.asks_flags and self.is_buffer(tensor):
            self.asks_flags = is_flag(self._users[id(tensor)][1])

    def has_hooks(self, tensor: Tensor) -> bool:
        """Whether somebody waits for the gradient of a parameter, a buffer or an input, whoever takes it."""
        label, owner = self._users.get(id(tensor), ("", None))
        if owner is not None:
            self._asked_hooks.add(label)
            return _torch.autograd.has_hooks(owner)
        of_input = self._inputs.get(id(tensor))
        return of_input is not None and _torch.autograd.has_hooks(of_input)

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor stands for a parameter of the model."""
        return isinstance(self._users.get(id(tensor), ("", None))[1], nn.Parameter)

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether a tensor stands for a buffer of the model, or for an attribute that is one."""
        owner = self._users.get(id(tensor), ("", None))[1]
        return owner is not None and not isinstance(owner, nn.Parameter)

    def buffers(self) -> list[tuple[Tensor, Held]]:
        """What stands for buffers, and for attributes that are tensors, with those of the model."""
        held: list[tuple[Tensor, Held]] = []
        for label, x, _ in self._before:
            find = partial(tensor_at, self._model, label)
            with suppress(AttributeError, LookupError):  # a call may register one
                if not isinstance(find(), nn.Parameter):
                    held.append((x, Held(label, find)))
        return held

    def newly_set(self) -> str:
        """An attribute of a parameter or a buffer that the run has set; empty for none."""
        new = (f"{label}.{name}" for label, x, names in self._before for name in sorted(vars(x).keys() - names))
        return next((name for name in new if "._dynamo" not in name), "")

    def state(self) -> PythonState:
        """What was read."""
        state = PythonState()
        for label, name in self._read:
            place = id(self._model), label, name
            state.watch(f"{label}.{name}", partial(_attribute_of, self._model, label, name), place)
        for label in self._asked_hooks:
            place = id(self._model), label, _torch.autograd.HOOKS[0]
            state.watch(f"the hooks of {label}", partial(_has_hooks, self._model, label), place)
        return state


def _attribute_of(model: nn.Module, label: str, name: str) -> Any:
    return vars(tensor_at(model, label)).get(name, MISSING)


def _has_hooks(model: nn.Module, label: str) -> bool:
    return _torch.autograd.has_hooks(tensor_at(model, label))
