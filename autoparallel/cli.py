"""The command line: ``python -m autoparallel verify`` and ``explain``.

Exit status: 0 when all is well, 1 when a model fails (it differs, or cannot be compiled), 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import autoparallel
from autoparallel.plan import Plan, PlanError
from autoparallel.planner.presets import PRESETS
from autoparallel.processes import Job, Process, ProcessError, require_plain_process, run_processes
from autoparallel.verify import Task, compile_task, make_task, verify

_FACTORY = """\
FACTORY names a function that makes what is to be checked: package.module:function, or path/to/file.py:function.
It takes no arguments and returns (model, example_inputs) or (model, example_inputs, loss_fn): a plain module in the
mode it is to be checked in, a tuple of the positional inputs of one call (or a dict of keyword inputs), and a function
loss_fn(output, target), for which the last of the inputs is the target:

    def small_gpt():
        tokens = torch.randint(0, 64, (8, 17))
        return GPT(layers=2), (tokens[:, :-1], tokens[:, 1:]), token_loss
"""


class UsageError(Exception):
    """A wrong command line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    console, errors = Console(), Console(stderr=True)
    try:
        require_plain_process(f"autoparallel {options.command}")
        made = _make(options.factory)
        return int(options.run(options, made, console))
    except (UsageError, PlanError) as error:
        parser.exit(2, f"autoparallel {options.command}: error: {error}\n")
    except (ProcessError, RuntimeError, ValueError) as error:
        errors.print(
            str(error), style="red" if errors.is_terminal else "", markup=False, highlight=False, soft_wrap=True
        )
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoparallel",
        description="Makes a plain PyTorch model train on a whole mesh, with the numbers of one device.",
    )
    parser.add_argument("--version", action="version", version=f"autoparallel {autoparallel.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("factory", metavar="FACTORY", help="module:function or file.py:function, see below")
    common.add_argument(
        "--mesh",
        type=_mesh,
        required=True,
        help="the mesh axes: dp=2,tp=2, or only sizes (2,2), which are the axes dp, tp, ep",
    )
    common.add_argument("--plan", default="auto", help=f"{', '.join(PRESETS)}, or a plan's .json file (default: auto)")
    common.add_argument("--seed", type=int, default=0, help="seed of the factory and of dropout masks (default: 0)")
    common.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for everything (default: 300)")

    def add(name: str, help: str, description: str, run: Callable[..., int]) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=help,
            description=description,
            epilog=_FACTORY,
            parents=[common],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    check = add(
        "verify",
        "check that a plan computes what the plain model computes",
        "Trains one step of the model twice, plain in one process and by its plan in one process for each rank of the\n"
        "mesh (gloo, this machine), and compares loss, outputs, every gradient, the gradient norm, and the parameters.",
        _verify,
    )
    check.add_argument("--tolerance", type=_tolerance, default="auto", help="the largest difference that passes")
    check.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="default: float64")
    check.add_argument("--steps", type=int, default=1, help="training steps, all on the same inputs (default: 1)")
    add(
        "explain",
        "print the plan for a model on a mesh",
        "Compiles the model in one process for each rank of the mesh (gloo, this machine) and prints the plan:\n"
        "how parameters and activations are sharded, what is communicated, and what it is predicted to cost.",
        _explain,
    )
    return parser


def _mesh(text: str) -> Any:
    parts = [part.partition("=") for part in text.split(",")]
    try:
        if all(equals for _, equals, _ in parts):
            axes = {name.strip(): int(size) for name, _, size in parts}
            if len(axes) == len(parts) and all(axes):
                return axes
        elif not any(equals for _, equals, _ in parts):
            return tuple(int(size) for size, _, _ in parts)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a mesh: write dp=2,tp=2 or 2,2")


def _tolerance(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _make(factory: str) -> tuple[Callable[[], Any], str]:
    """The function that the command line names, and that name."""
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
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{place} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{factory} is a {type(found).__name__}, not a function that returns (model, example_inputs)")
    return found, factory


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # torch.export looks classes up by their module
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: files beside it can be imported
    spec.loader.exec_module(module)
    return module


def _call_factory(factory: Callable[[], Any], name: str, seed: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    made = factory()
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        model, inputs, loss_fn = (*made, None)[:3]
        if isinstance(inputs, (tuple, list, Mapping, torch.Tensor)) and (loss_fn is None or callable(loss_fn)):
            return model, inputs, loss_fn
    said = f"a tuple of {', '.join(type(x).__name__ for x in made)}" if isinstance(made, tuple) else type(made).__name__
    raise UsageError(
        f"{name} must return (model, example_inputs) or (model, example_inputs, loss_fn), it returned {said}"
    )


def _plan(text: str) -> str | Plan:
    if text in PRESETS:
        return text
    if Path(text).is_file():
        return Plan.load(text)
    raise UsageError(f"unknown plan {text!r}: expected one of {', '.join(PRESETS)}, or a plan's .json file")


def _verify(options: argparse.Namespace, made: tuple[Callable[[], Any], str], console: Console) -> int:
    plan = _plan(options.plan)
    model, inputs, loss_fn = _call_factory(*made, options.seed)
    with _busy(console, f"checking {type(model).__name__}"):
        report = verify(
            model,
            options.mesh,
            inputs,
            loss_fn,
            plan=plan,
            tolerance=options.tolerance,
            dtype=getattr(torch, options.dtype),
            steps=options.steps,
            seed=options.seed,
            timeout=options.timeout,
        )
    console.print(report) if console.is_terminal else print(report)
    return 0 if report.ok else 1


def _explain(options: argparse.Namespace, made: tuple[Callable[[], Any], str], console: Console) -> int:
    plan = _plan(options.plan)
    model, inputs, loss_fn = _call_factory(*made, options.seed)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    with _busy(console, f"planning {type(model).__name__}"):
        task = make_task(model, options.mesh, inputs, loss_fn, plan=plan, dtype=dtype, seed=options.seed, cast=False)
        jobs = [Job(f"rank {rank}", "mesh", rank, task.ranks, _explain_on_rank) for rank in range(task.ranks)]
        texts = run_processes(jobs, task, options.timeout)
    print(texts[0])
    return 0


def _explain_on_rank(process: Process, task: Task) -> str:
    module = compile_task(task, task.axes, task.plan)
    module.prepare(*task.args, **task.kwargs)
    return str(module.plan.explain()) if process.rank == 0 else ""


@contextlib.contextmanager
def _busy(console: Console, text: str) -> Iterator[None]:
    """A spinner on a terminal."""
    if not console.is_terminal:
        yield
        return
    with console.status(f"{text} ..."):
        yield


__all__ = ["UsageError", "main"]
