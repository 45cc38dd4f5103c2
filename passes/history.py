"""What each pass has made of a program, as text: for people who want to see how a model becomes a rank's program."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoparallel.placements import format_layout
from autoparallel.rules import operator_name
from autoparallel.text import duration


class PassHistory:
    """The program before the first pass and after each, and how long each took; ``run_passes`` takes it as a watch.

    Args:
        module: the program before the first pass.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.programs = [program_lines(module)]
        self.passes: list[tuple[str, float]] = []

    def __call__(self, name: str, seconds: float, module: fx.GraphModule) -> None:
        inner = [graph for graph in module.children() if hasattr(graph, "program")]
        regions = [line for graph in inner for line in ["", *program_lines(graph.program)]]  # type: ignore[arg-type]
        self.programs.append([*program_lines(module), *regions])
        self.passes.append((name, seconds))

    def __str__(self) -> str:
        parts = ["# captured", *self.programs[0]]
        for before, after, (name, seconds) in zip(self.programs, self.programs[1:], self.passes, strict=False):
            parts += ["", f"# {name}: {duration(seconds)}{', changes nothing' if before == after else ''}"]
            parts += after if before != after else []
        return "\n".join(parts)


def program_lines(module: fx.GraphModule) -> list[str]:
    """One line a node: ``name = operator(arguments)  layout``."""
    lines = []
    for node in module.graph.nodes:
        layout = node.meta.get("placements")
        end = f"  {format_layout(layout)}" if layout else ""
        if node.op == "placeholder":
            lines.append(f"{node.name}{end}")
        elif node.op == "output":
            lines.append(f"return {_argument(node.args[0])}")
        else:
            called = node.target if isinstance(node.target, str) else _name(node.target)
            arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
            lines.append(f"{node.name} = {called}({', '.join(arguments)}){end}")
    return lines


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return operator_name(target)
    return f"{target.__module__.rpartition('.')[2]}.{target.__name__}"


def _argument(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_argument, value))}]"
    return value.name if isinstance(value, fx.Node) else repr(value)
