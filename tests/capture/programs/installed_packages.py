"""What functions of installed packages hold that somebody changes between calls, or that a call changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, sgd

TEXT = """
import collections
import functools
from torch import nn

GAINS, SETTINGS, SHAPES = [1.0], {"gain": 1.0}, {}

def scaled(layer):
    gain = 1.0
    def set_gain(value):
        nonlocal gain
        gain = value
    layer.register_forward_hook(lambda module, inputs, output: output * gain)
    return set_gain

def scaled_by_a_list(layer):
    gains = [1.0]
    layer.register_forward_hook(lambda module, inputs, output: output * gains[0])
    return functools.partial(gains.__setitem__, 0)

def patched(layer):
    state, forward = {"gain": 1.0}, layer.forward
    def patched_forward(x):
        return forward(x) * state["gain"]
    layer.forward = patched_forward
    return functools.partial(state.__setitem__, "gain")

def collected(layer):
    seen = {"calls": 0}
    def hook(module, inputs, output):
        seen["calls"] += 1
        seen["last"] = output.detach()
    layer.register_forward_hook(hook)
    return seen

def collected_by_layer(layer):
    seen = collections.defaultdict(dict)
    def hook(module, inputs, output):
        seen[layer][output.device] = output.detach()
    layer.register_forward_hook(hook)
    return seen

class Stats:
    def __init__(self, layer, function):
        self.stats = {"mean": []}
        layer.register_forward_hook(self.make_hook(function))

    def make_hook(self, function):
        def hook(module, inputs, output):
            self.stats["mean"].append(function(output))
        return hook

def decorated(function):
    gain = 1.0
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * gain
    def set_gain(value):
        nonlocal gain
        gain = value
    wrapper.set_gain = set_gain
    return wrapper

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    @decorated
    def forward(self, x):
        SHAPES[len(SHAPES)] = x.shape[1]  # as caches of kernels by shapes do
        return self.a(x) * GAINS[0] * SETTINGS["gain"] + len(SHAPES) * 0

def mean_loss():
    return decorated(lambda x, y: (x - y).square().mean())
"""
PACKAGE: dict[str, Any] = {"__name__": "installed"}
exec(compile(TEXT, "/site-packages/installed.py", "exec"), PACKAGE)


def _train(run: Run, model: nn.Module, set_gain: Any, loss_fn: Any = None) -> Any:
    """Changes a gain between the steps."""
    compiled = run.compile(model.double(), loss_fn)
    optimizer = sgd(compiled)
    try:
        for step in range(STEPS):
            set_gain(1.0 + step)
            run.changed()
            x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8) + step
            output = compiled(x) if loss_fn is None else compiled(x, x.cos())
            run.note("output", output)
            run.finish(compiled, optimizer, output.square().sum())
    finally:
        set_gain(1.0)
    return compiled


@loop()
def hook_with_a_number(run: Run) -> None:
    model = nn.Linear(8, 8)
    _train(run, model, PACKAGE["scaled"](model))


@loop()
def hook_with_a_list(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    _train(run, model, PACKAGE["scaled_by_a_list"](model[0]))


@loop()
def forward_patched_by_a_package(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    _train(run, model, PACKAGE["patched"](model[0]))


@loop()
def loss_decorated_by_a_package(run: Run) -> None:
    loss = PACKAGE["mean_loss"]()
    _train(run, nn.Linear(8, 8), loss.set_gain, loss)


@program(between=lambda model, step: PACKAGE["Scaled"].forward.set_gain((2.0, 0.5, 1.0)[step]), ranks=True)
def forward_decorated_by_a_package() -> nn.Module:
    model: nn.Module = PACKAGE["Scaled"]()
    return model


@loop()
def list_of_a_package(run: Run) -> None:
    _train(run, PACKAGE["Scaled"](), lambda gain: PACKAGE["GAINS"].__setitem__(0, gain))


@loop()
def dict_of_a_package(run: Run) -> None:
    _train(run, PACKAGE["Scaled"](), lambda gain: PACKAGE["SETTINGS"].update(gain=gain))


@loop()
def dict_that_a_package_fills(run: Run) -> None:
    """A hook's own, as of ``torchinfo``."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    seen = PACKAGE["collected"](model[0])
    _train(run, model, lambda gain: None)
    run.note("calls", seen["calls"])
    run.note("last", seen["last"])


@loop()
def object_that_a_hook_of_a_package_fills(run: Run) -> None:
    """As timm's hooks of statistics."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    holder = PACKAGE["Stats"](model[0], lambda output: output.detach().mean())
    _train(run, model, lambda gain: None)
    run.note("stats", list(holder.stats["mean"]))


@loop(refused="return what is collected", line=False)
def dict_by_layers_that_a_package_fills(run: Run) -> None:
    """As of captum."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    PACKAGE["collected_by_layer"](model[0])
    _train(run, model, lambda gain: None)


class OwnGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.a(x))


def _scale_gelu(gain: float) -> None:
    """Replaces a function of torch's, as kernels of others are put in."""
    nn.functional.gelu = _GELU if gain == 1 else lambda x: _GELU(x) * gain


_GELU = nn.functional.gelu


@loop()
def function_of_torch_that_is_replaced(run: Run) -> None:
    _train(run, OwnGelu(), _scale_gelu)


@loop(refused="keep what is there in attributes of the modules", line=False)
def names_by_layers_that_a_hook_has(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    names = {layer: name for name, layer in model.named_children()}
    model[0].register_forward_hook(lambda module, inputs, output: output * len(names[module]))
    _train(run, model, lambda gain: None)
