"""Time of an optimizer's step: ours, torch's on plain tensors of the same sizes, and torch's on the same ``DTensor``s.

100 and 1000 parameters of 256 x 256 and 256, sharded over two processes of one thread, AdamW and SGD with and without
momentum, by every flag; then Muon, on a (2, 2) mesh. Contenders alternate; medians of times on the clock, and in
brackets of the main thread's time on a processor, which a busy machine changes less. "lost" stands where ours takes
more than 1.1 times what plain tensors take on a processor, for Muon more than 0.5 times what torch takes on
``DTensor``s.

    python benchmarks/optimizer.py [--rounds 30] [--size 256] [--counts 100 1000]
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoparallel
from benchmarks.clip import Layers
from benchmarks.side_by_side import alternate, launch

FLAGS: dict[str, dict[str, Any]] = {
    "as it comes": {}, "foreach": {"foreach": True}, "for loop": {"foreach": False}, "fused": {"fused": True},
}  # fmt: skip


def _as_torch_does(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer as a class that nothing is known of, so that torch steps on ``DTensor``s."""

    def step(self: Any, closure: Any = None) -> Any:
        return inspect.unwrap(kind.step)(self, closure)

    return type(f"Torchs{kind.__name__}", (kind,), {"step": torch.no_grad()(step)})


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    """A plain parameter of a shard's size and values, with its gradient."""
    assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
    new = nn.Parameter(parameter.to_local().detach().clone())
    new.grad = parameter.grad.to_local().clone()
    return new


def _copies(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for copy, p in zip(copies, parameters, strict=True):
        copy.grad = p.grad
    return copies


def _compare(table: Table, what: str, kind: Any, options: Any, parameters: list[nn.Parameter], rounds: int) -> None:
    """A row of the table."""
    actions: dict[str, Callable[[], object]] = {"ours": kind(parameters, **options).step}
    if kind is not torch.optim.Muon:
        actions["plain"] = kind([_plain(p) for p in parameters], **options).step
    theirs = _as_torch_does(kind)(_copies(parameters), **options).step
    try:
        theirs()
        actions["DTensor"] = theirs
    except Exception:  # noqa: BLE001 - torch cannot step on DTensors with it
        pass
    found = alternate(actions, rounds)
    ratios = {n: [x / y for x, y in zip(found["ours"], found[n], strict=True)] for n in found if n != "ours"}
    lost = ratios["plain"][1] > 1.1 if "plain" in ratios else ratios["DTensor"][0] > 0.5
    cells = ["{:.2f} ({:.2f})".format(*found[n]) if n in found else "" for n in ("ours", "plain", "DTensor")]
    ratio = ["{:.2f}x ({:.2f}x)".format(*ratios[n]) if n in ratios else "" for n in ("plain", "DTensor")]
    table.add_row(what, str(len(parameters)), *cells, *ratio, "lost" if lost else "")


def _run(arguments: argparse.Namespace) -> None:
    table = Table(title="optimizer.step(), gloo ranks of one thread; ms (of those on a processor)")
    for column in ("optimizer", "parameters", "ours", "plain", "DTensor", "/ plain", "/ DTensor", ""):
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    world = dist.get_world_size()
    shape, names = ((2, 2), ("dp", "tp")) if world == 4 else ((world,), ("dp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for count in arguments.counts if world != 4 else [40]:
        torch.manual_seed(0)
        model: Any = autoparallel.compile(Layers(count, arguments.size), mesh, plan="fsdp")
        model(torch.randn(8, arguments.size)).backward()
        parameters = list(model.parameters())
        if world == 4:
            matrices = [p for p in parameters if p.ndim == 2]
            _compare(table, "Muon (2, 2)", torch.optim.Muon, {}, matrices, arguments.rounds)
            continue
        for kind, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {})):
            for flag, chosen in FLAGS.items():
                what = f"{kind.__name__}{' with momentum' if options else ''}, {flag}"
                _compare(table, what, kind, {"lr": 1e-5, **options, **chosen}, parameters, arguments.rounds)
    if dist.get_rank() == 0:
        Console(width=160).print(table)


def main() -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 1000])
    arguments = parser.parse_args()
    launch(_run, arguments, 2)
    launch(_run, arguments, 4)


if __name__ == "__main__":
    main()
