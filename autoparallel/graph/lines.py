"""Lines of the user's model: where a node was made, where a frame runs, after which something has changed."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from torch import fx

from autoparallel.graph.garbage import collected_rarely
from autoparallel.graph.python_state import is_library, is_tracers_file


def line_of(node: fx.Node) -> str:
    """The line of the model that made a node, as the trace noted it."""
    # Under torch.no_grad() the trace keeps modules, but no lines.
    modules = [kind for _, kind in (node.meta.get("nn_module_stack") or {}).values()]
    if modules and str(modules[-1]).endswith(".capture.training.Training"):
        return noted_line(node) or "the loss function"
    return noted_line(node) or (f"forward of {modules[-1]}" if modules else "an unknown line")


def marks_of(node: fx.Node) -> dict[str, Any]:
    """What a node's ``meta`` says of where in the model it stands: those that a rewrite puts there stand there, too."""
    return {name: node.meta[name] for name in _MARKS if name in node.meta}


_MARKS = ("module", "layer", "nn_module_stack", "stack_trace", "torch_fn")


def noted_line(node: fx.Node) -> str:
    """The line of the model that a node is of, as the trace noted it; empty where it noted none."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").strip().splitlines()]
    files = [(i, line.split('"')[1]) for i, line in enumerate(lines) if line.startswith('File "/')]
    places = [i for i, file in files if not is_tracers_file(file)]
    return ": ".join(line.removeprefix("File ") for line in lines[places[-1] : places[-1] + 2]) if places else ""


def node_of_error(error: BaseException) -> fx.Node | None:
    """The call of a program that has raised; None where there is none."""
    node, trace = None, error.__traceback__
    while trace is not None:
        frame, trace_line = trace.tb_frame, trace.tb_lineno
        program = frame.f_locals.get("self")
        if isinstance(program, fx.GraphModule) and frame.f_code.co_name == "forward":
            name = linecache.getline(frame.f_code.co_filename, trace_line).strip().partition(" ")[0]
            node = next((x for x in program.graph.nodes if x.name == name), node)
        trace = trace.tb_next
    return node


def place_of(node: fx.Node) -> str:
    """The module and the line of the model that a call of a program comes from."""
    module = node.meta.get("module")
    return f"{module}, at {line_of(node)}" if module else line_of(node)


def line_of_frame(frame: FrameType | None) -> str:
    """The innermost line of the user's among a frame and its callers."""
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return line_in(frame)
        frame = frame.f_back
    return "an unknown line"


def line_in(frame: FrameType) -> str:
    """The line that a frame is at, written as a trace notes it."""
    name = frame.f_code.co_filename
    text = linecache.getline(name, frame.f_lineno).strip()
    return f'"{name}", line {frame.f_lineno}, in {frame.f_code.co_name}: {text}'


def first_line(run: Callable[[], Any], has_changed: Callable[[], bool]) -> str:
    """The line of the user's after which something has changed, while ``run`` runs."""
    last: list[str] = []
    at: list[str] = []

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if at:
            return None
        if last and has_changed():
            at.append(last[-1])
            return None
        last[:] = [line_of_frame(frame.f_back if event == "return" else frame)]
        return line

    def call(frame: FrameType, *_: Any) -> Any:
        # A module of a class of its own is asked for names by many, such as us.
        of_module = isinstance(frame.f_locals.get("self"), ModuleType)
        return None if at or of_module or is_library(frame.f_code.co_filename) else line

    before = sys.gettrace()
    with collected_rarely(0):  # what a garbage collection calls is no line of the user's
        sys.settrace(call)
        try:
            run()
        except Exception:  # noqa: BLE001 - it has been seen to fail, or to change something, before
            pass
        finally:
            sys.settrace(before)
    return at[0] if at else last[0] if last else "an unknown line"
