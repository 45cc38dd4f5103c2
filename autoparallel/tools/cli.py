"""The command line: ``python -m autoparallel plan``, ``verify`` and ``explain``.

Exit status: 0 when all is well, 1 when a model fails (it differs, or cannot be compiled), 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from torch import nn

from autoparallel.comm.world import Axes, axes_of, make_mesh, mesh_size, mesh_text
from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import Profile
from autoparallel.plan import Plan
from autoparallel.planner.request.presets import PRESETS, Preset
from autoparallel.text import plain_text
from autoparallel.tools import plan as cli_plan
from autoparallel.tools.calibration import calibrate, profile_tables
from autoparallel.tools.parity.task import Task, compile_task, make_task
from autoparallel.tools.plan import plan_of
from autoparallel.tools.processes import Process, ProcessError, ranks_of_mesh, require_plain_process, run_processes
from autoparallel.tools.sources import UsageError, call_factory, find_factory, require_writable
from autoparallel.tools.verify import verify

_FACTORY = """\
FACTORY names a function that makes what is to be checked: package.module:function, or path/to/file.py:function.
It takes no arguments and returns (model, example_inputs) or (model, example_inputs, loss_fn): a plain module in the
mode it is to be checked in, a tuple of the positional inputs of one call (or a dict of keyword inputs), and a function
loss_fn(output, target), for which the last of the inputs is the target:

    def small_gpt():
        tokens = torch.randint(0, 64, (8, 17))
        return GPT(layers=2), (tokens[:, :-1], tokens[:, 1:]), token_loss
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (UsageError, PlanError, OSError) as error:
        parser.exit(2, f"autoparallel {options.command}: error: {error}\n")
    except (ProcessError, RuntimeError, ValueError) as error:
        errors = Console(stderr=True)
        style = "red" if errors.is_terminal else ""
        errors.print(str(error), style=style, markup=False, highlight=False, soft_wrap=True)
        return 1


def _version() -> str:
    try:
        return metadata.version("torch-autoparallel")
    except metadata.PackageNotFoundError:  # it runs from its sources
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoparallel",
        description="Makes a plain PyTorch model train on a whole mesh, with the numbers of one device.",
    )
    parser.add_argument("--version", action="version", version=f"autoparallel {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("factory", metavar="FACTORY", help="module:function or file.py:function, see below")
    common.add_argument(
        "--mesh",
        type=_mesh,
        required=True,
        help="the mesh axes: dp=2,tp=2, or only sizes (2,2), the axes dp, tp (of three: pod, dp, tp)",
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
    check.add_argument(
        "--dtype",
        choices=("float64", "float32", "own"),
        default="float64",
        help="default: float64; own leaves the model as it is and measures the tolerance",
    )
    check.add_argument("--steps", type=int, help="training steps (default: one for each batch)")
    check.add_argument("--localize", action="store_true", help="look for the first operator that deviates")
    add(
        "explain",
        "print the plan for a model on a mesh",
        "Compiles the model in one process for each rank of the mesh (gloo, this machine) and prints the plan:\n"
        "how parameters and activations are sharded, what is communicated, and what it is predicted to cost.",
        _explain,
    )
    command = commands.add_parser(
        "plan",
        help="plan for any mesh and hardware, without it",
        description="Plans a model for a mesh and hardware that need not be here: on fake tensors, without process\n"
        "groups, for any number of devices. Prints what the plan is predicted to cost, and what the presets would.",
        epilog=_FACTORY + "\nA factory that takes batch= and seq= gets those of the command line.\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli_plan.add_arguments(command, _open_mesh)
    command.set_defaults(run=cli_plan.run)
    command = commands.add_parser(
        "calibrate",
        help="measure a hardware profile",
        description="Measures matrix products, memory, launches and collectives, and writes them as a profile for\n"
        "--hardware and compile(hardware=...). Under torchrun on the ranks of the launcher, with their devices; else\n"
        "in one process for each rank of the mesh, on this machine's CPUs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--mesh", type=_mesh, required=True, help="the mesh axes: dp=2,tp=2, or only sizes (2,2)")
    command.add_argument("--out", required=True, help="the profile's .json file")
    command.add_argument("--name", default="measured", help="the profile's name (default: measured)")
    command.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for everything")
    command.set_defaults(run=_calibrate)
    return parser


def _mesh(text: str) -> Axes:
    parts = [part.rpartition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in parts]
    try:
        sizes = [int(size) for _, _, size in parts]
        if "=" not in text:
            return axes_of(sizes)
        if all(names) and len(set(names)) == len(names):
            return axes_of(dict(zip(names, sizes, strict=True)))
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a mesh of one to three axes, and pp: write dp=2,tp=2 or 2,2")


def _open_mesh(text: str) -> Axes | int:
    """A mesh, or the number of devices of one that the search factors."""
    kind, colon, count = text.partition(":")
    if kind != "auto":
        return _mesh(text)
    if not colon or not count.isdigit() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of devices: write auto:64")
    return int(count)


def _tolerance(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _verify(options: argparse.Namespace) -> int:
    model, inputs, loss_fn, plan = _subject(options)
    console = Console(highlight=False)
    with _busy(f"checking {type(model).__name__}"):
        report = verify(
            model,
            dict(options.mesh),
            inputs,
            loss_fn,
            plan=plan,
            tolerance=options.tolerance,
            dtype=None if options.dtype == "own" else getattr(torch, options.dtype),
            steps=options.steps,
            localize=options.localize,
            seed=options.seed,
            timeout=options.timeout,
        )
    text, _, verdict = str(report).rpartition("\n")
    print(text)
    console.print(verdict, style="bold green" if report.ok else "bold red", markup=False, soft_wrap=True)
    return 0 if report.ok else 1


def _explain(options: argparse.Namespace) -> int:
    model, inputs, loss_fn, plan = _subject(options)
    with _busy(f"planning {type(model).__name__}"):
        task = make_task(model, dict(options.mesh), inputs, loss_fn, plan=plan, seed=options.seed)
        texts = run_processes(ranks_of_mesh(task.ranks), _explain_on_rank, task, options.timeout)
    print(texts[0])
    return 0


def _subject(options: argparse.Namespace) -> tuple[nn.Module, Any, Any, Preset | Plan]:
    """The model, the inputs and the loss function of the factory, and the plan."""
    require_plain_process(f"autoparallel {options.command}")
    factory, plan = find_factory(options.factory), plan_of(options.plan)
    return *call_factory(factory, options.factory, options.seed), plan


def _explain_on_rank(process: Process, task: Task) -> str:
    module = compile_task(task)
    batch = task.batch(1)
    module.prepare(*batch.args, **batch.kwargs)
    return str(module.plan.explain()) if process.rank == 0 else ""


def _calibrate(options: argparse.Namespace) -> int:
    require_writable(options.out)
    axes: Axes = options.mesh
    if "RANK" in os.environ:  # a launcher's, which may have started one process
        text = _measure(axes, options.name, "cuda" if torch.cuda.is_available() else "cpu")
        if not text:
            return 0
    else:
        with _busy("measuring"):
            text = run_processes(
                ranks_of_mesh(mesh_size(axes)), _calibrate_on_rank, (axes, options.name), options.timeout
            )[0]
    profile = Profile.from_json(text)
    profile.save(options.out)
    print(plain_text(f"{profile.name}, on {mesh_text(axes)}:", *profile_tables(profile)))
    print(f"\nwrote {options.out}")
    return 0


def _calibrate_on_rank(process: Process, task: tuple[Any, str]) -> str:
    return _measure(*task, "cpu")


def _measure(axes: Axes, name: str, device: str) -> str:
    """The profile that the mesh's ranks measure, as the first of them writes it."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mesh = make_mesh(device, axes)
    profile = calibrate(mesh, name)
    return profile.to_json() if mesh.get_rank() == 0 else ""


def _busy(text: str) -> contextlib.AbstractContextManager[Any]:
    """A spinner on a terminal."""
    console = Console()
    return console.status(f"{text} ...") if console.is_terminal else contextlib.nullcontext()
