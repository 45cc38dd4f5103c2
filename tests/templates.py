"""Processes that have imported what workers need, and fork a worker whenever one is asked for.

A pool of workers ends often: after a test that kills a rank or leaves a collective half done, and after so many
calls. Starting the next one anew costs each rank several seconds of importing torch; a fork costs none.

[Note: one template for each rank]
Ranks that are forked from one process share the seed of Python's hashes, and with it the order of every set of
strings: whatever depends on that order would look the same on all ranks. So every rank has a template of its own, and
ranks differ in their seeds as processes do that are started one by one.

[Note: what a worker leaves]
A worker writes its standard error to a file, of which the end is a warning where the worker dies: what C++ said before
it gave up, and the C++ stack of the thread at fault, which may be one of gloo's and no thread of Python's.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What every worker imports by its first call of a compiled model. None of it starts a thread or uses autograd.
_IMPORTED = ("torch.distributed", "autoparallel", "torch._dynamo", "torch.export._trace", "pytest")


class Worker:
    """A process that a template has forked, to be used as one of multiprocessing's own."""

    def __init__(self, template: multiprocessing.connection.Connection, function: Callable[..., None], *args: Any):
        self.exitcode: int | None = None
        self._template = template
        descriptor, path = tempfile.mkstemp(prefix="autoparallel-worker-")
        os.close(descriptor)
        self._errors = Path(path)
        template.send((function, args, path))
        self.pid: int = template.recv()

    def is_alive(self) -> bool:
        if self.exitcode is None:
            try:
                self._template.send(self.pid)
                self.exitcode = self._template.recv()
            except (EOFError, OSError):  # the template has ended, and with it the way to ask
                self.exitcode = -signal.SIGKILL
            if self.exitcode is not None:
                self._end()
        return self.exitcode is None

    def _end(self) -> None:
        if self.exitcode not in (0, -signal.SIGKILL):
            text = at_fault(self._errors.read_text(errors="replace"))
            warnings.warn(f"a worker died (exit code {self.exitcode}); it left:\n{text}", stacklevel=2)
        self._errors.unlink()

    def join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def start_from_template(number: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> Worker:
    """Run a function in a process of this number, forked from the template of the number."""
    for rank in range(len(_templates), number + 1):
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_serve, args=(theirs,), name=f"template{rank}", daemon=True)
        with _without_main_module():
            process.start()
        theirs.close()
        _templates.append(ours)
    return Worker(_templates[number], function, *arguments)


_context = multiprocessing.get_context("spawn")
_templates: list[multiprocessing.connection.Connection] = []  # they end where these are closed, with this process


def at_fault(errors: str) -> str:
    """The end of what a process has written to its standard error; of its C++ stacks, that of the thread at fault."""
    before, *stacks = re.split(r"(?m)^(?=SIG[A-Z]+\(\d+\), PID: )", errors)
    return "".join([before[-4000:], *(stack for stack in stacks if "FatalSignalHandler::fatalSignalHandler" in stack)])


def _serve(connection: multiprocessing.connection.Connection) -> None:
    """A template's life: import, then fork and tell of processes that have ended."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in _IMPORTED:
        importlib.import_module(module)
    while True:
        try:
            asked = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            os._exit(0)
        if isinstance(asked, int):
            pid, status = os.waitpid(asked, os.WNOHANG)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        function, args, errors = asked
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
            importlib.import_module("torch._C")._set_print_stack_traces_on_fatal_signal(True)
            function(*args)
            os._exit(0)
        del asked, args  # with the worker's end of its pipe, which must be held by the worker alone
        connection.send(pid)


class _without_main_module:
    """Keep a spawned child from importing the parent's `__main__` (pytest's, or a script that would run again)."""

    def __enter__(self) -> None:
        main = sys.modules["__main__"]
        self._saved: dict[str, Any] = {
            name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
        }
        main.__dict__["__spec__"] = None

    def __exit__(self, *_: object) -> None:
        main = sys.modules["__main__"]
        main.__dict__.pop("__spec__", None)
        main.__dict__.update(self._saved)
