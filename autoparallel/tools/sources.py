"""What the command line plans: a factory's model, or one that a ``config.json`` of transformers describes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


class UsageError(Exception):
    """A wrong command line."""


@dataclass(frozen=True)
class Source:
    """A model, and one call of it.

    Attributes:
        model: the plain model.
        args, kwargs: the inputs of one call; the last positional one is the target where there is a ``loss_fn``.
        loss_fn: as ``compile()`` takes it.
        call: how the model is to be called, in words.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Any] | None
    call: str = ""


def find_factory(factory: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` or ``file.py:function`` names."""
    place, colon, name = factory.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{factory!r} does not name a function: write package.module:function or file.py:function")
    # Like `python -m`: what lies in the current directory can be imported.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
            raise RuntimeError(f"importing {place} failed: {error}") from error
        raise UsageError(f"there is no module {place!r} here (for a file, write its path with .py)") from None
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            raise UsageError(f"{place} has no {part!r}")
        function = getattr(function, part)
    if not callable(function):
        raise UsageError(
            f"{factory} is a {type(function).__name__}, not a function that returns (model, example_inputs)"
        )
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # torch.export looks classes up by their module
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: files beside it can be imported
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RuntimeError(f"running {path} failed: {type(error).__name__}: {error}") from error
    return module


def call_factory(factory: Callable[..., Any], name: str, seed: int, **sizes: int) -> tuple[nn.Module, Any, Any]:
    """The model, the inputs and the loss function that a factory makes."""
    torch.manual_seed(seed)
    try:
        result = factory(**sizes)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise RuntimeError(f"{name} failed: {type(error).__name__}: {error} ({at.filename}:{at.lineno})") from error
    if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module):
        model, inputs, loss_fn = (*result, None)[:3]
        if isinstance(inputs, (tuple, list, Mapping, torch.Tensor)) and (loss_fn is None or callable(loss_fn)):
            return model, inputs, loss_fn
    kinds = ", ".join(type(x).__name__ for x in result) if isinstance(result, tuple) else ""
    said = f"a tuple of {kinds}" if kinds else type(result).__name__
    raise UsageError(
        f"{name} must return (model, example_inputs) or (model, example_inputs, loss_fn), it returned {said}"
    )


def from_factory(name: str, batch: int | None, seq: int | None, seed: int, real: bool) -> Source:
    """The model and inputs of a factory, on the meta device unless ``real``.

    Raises:
        UsageError: for a factory that takes no ``batch`` or ``seq`` where one is given.
        RuntimeError: for one that cannot run on the meta device.
    """
    factory = find_factory(name)
    parameters = inspect.signature(factory).parameters
    sizes = {key: value for key, value in (("batch", batch), ("seq", seq)) if value is not None}
    for key in sizes:
        if key not in parameters:
            raise UsageError(f"--{key} is given, but {name} takes no argument {key!r}: add it, or leave --{key} out")
    if real:
        model, inputs, loss_fn = call_factory(factory, name, seed, **sizes)
    else:
        try:
            with torch.device("meta"):
                model, inputs, loss_fn = call_factory(factory, name, seed, **sizes)
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}\nPerhaps it cannot run on the meta device, where tensors have shapes but no values. What to "
                "change: let it read no values, or plan with --real-tensors"
            ) from error
    if isinstance(inputs, Mapping):
        return Source(model, (), dict(inputs), loss_fn)
    return Source(model, (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {}, loss_fn)


def config_file(model: str) -> Path | None:
    """The configuration of transformers that ``--model`` names by itself or by its folder; None for a factory."""
    inner = Path(model, "config.json")
    return inner if inner.is_file() else Path(model) if model.endswith(".json") else None


def from_config(file: Path, batch: int | None, seq: int | None) -> Source:
    """The model of a ``config.json`` of transformers, on the meta device, and a batch for it.

    Raises:
        UsageError: for a file that is no such configuration, or without a batch size.
    """
    if batch is None:
        raise UsageError("--batch is needed with a config.json: how many rows the global batch has")
    try:
        import transformers
    except ModuleNotFoundError:
        raise UsageError(f"{file} describes a model of transformers, which is not installed") from None
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    try:
        content = json.loads(file.read_text(), parse_constant=_refuse_constant)
        if "auto_map" in content:
            raise UsageError(
                f"{file} names code of its own that makes the model (auto_map), which is not run: write a factory that "
                "makes it, and give file.py:function"
            )
        _require_counts(content)
        config = transformers.AutoConfig.from_pretrained(file.parent if file.name == "config.json" else file)
        with torch.device("meta"):
            model_class: Any = getattr(transformers, (config.architectures or [""])[0], None)
            if model_class is None:
                model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
            else:
                model = model_class._from_config(config, attn_implementation="sdpa")
    except UsageError:
        raise
    except Exception as error:  # of any kind: transformers checks little of what it reads
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{file} is not a configuration of transformers that makes a model: {words}") from None
    with torch.device("meta"):
        model.train()
        if model.main_input_name == "pixel_values":
            size, channels = config.image_size, getattr(config, "num_channels", 3)
            inputs = {
                "pixel_values": torch.empty(batch, channels, size, size),
                "labels": torch.empty(batch, dtype=torch.int64),
            }
        else:
            length = seq or int(getattr(config, "max_position_embeddings", 0) or 0)
            if not length:
                raise UsageError("--seq is needed with this config.json: how many tokens a row has")
            tokens = torch.empty(batch, length, dtype=torch.int64)
            inputs = {"input_ids": tokens, "labels": torch.empty_like(tokens)}
    call = f"model({', '.join(f'{name}={name}' for name in inputs)})"
    return Source(model, (), inputs, None, call)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _require_counts(content: Mapping[str, Any]) -> None:
    """Raises ValueError for numbers that transformers takes, and no model can have."""
    for name, value in content.items():
        most = 1 if "dropout" in name else math.inf
        if type(value) in (int, float) and (name.startswith("num_") or most == 1) and not 0 <= value <= most:
            raise ValueError(f"{name} cannot be {value}")


def require_writable(path: str | None) -> None:
    """Raises UsageError for a file that cannot be written, before anything is made for it."""
    if path is None:
        return
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written: give a file in a folder that is there and may be written to")
