"""A few processes of this machine, started for one job: they join gloo groups, answer once, and are gone.

Processes are forked where that is safe, as ``DataLoader`` does, because then a model, a loss function and inputs may be
lambdas, or live in ``__main__`` or in a notebook.  Elsewhere they are spawned, and all of it must be picklable.

[Note: no hang, no zombie] A process that raises reports its traceback; one that dies is noticed by its pipe; one that
does neither is asked for its stack when the time is over.  After the first failure the others get ``GRACE`` seconds to
report theirs, since they may be waiting for the one that failed.  In the end every process is killed and joined,
whatever happened.  A process leaves by ``os._exit``: gloo's threads may hang the interpreter's own exit.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoparallel.comm import groups
from autoparallel.runtime.agreement import forget_groups

FileStore: Any = dist.FileStore  # type: ignore[attr-defined]
GRACE = 5.0
_CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Application timeout")
_LOST_BY_FORKING = ("Unable to handle autograd's threading", "Cannot re-initialize CUDA in forked subprocess")


@dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes:
        label: what messages call it.
        group: processes of one group name form one process group.
        rank, size: its place in the group.
        function: called with the :class:`Process` and ``task``; defined in a module.
    """

    label: str
    group: str
    rank: int
    size: int
    function: Callable[[Process, Any], Any]


@dataclass(frozen=True)
class Process:
    """What a job's function is told about where it runs.

    Attributes:
        directory: a folder that all processes and the parent share; large results are written there.
        shared: a store that all processes share, also those of different groups.
    """

    rank: int
    size: int
    directory: Path
    shared: Any


@dataclass(frozen=True)
class Failure:
    """What went wrong in one process.

    Attributes:
        label: which process.
        type: the exception's class, or "Died" and "TimedOut" for a process that reported nothing.
        message: the exception's text.
        traceback: the traceback, or the stack of a process that hangs.
    """

    label: str
    type: str
    message: str
    traceback: str

    @property
    def blame(self) -> int:
        """What is shown first: 0 for a model that fails by itself, 1 for most, 2 where another process is to blame."""
        if self.type == PlainModelError.__name__:
            return 0
        told = self.type == "RankMismatchError" and " failed" in self.message.partition(":")[0]
        lost = self.type in ("Waited", "TimedOut") or any(text in self.message for text in _CONSEQUENCES)
        return 2 if told or lost else 1


class PlainModelError(RuntimeError):
    """The user's model fails by itself, without autoparallel."""


class ProcessError(RuntimeError):
    """A process that ``verify()`` or the command line started raised, died, or ran out of time.

    Attributes:
        failures: all of them, the one to blame first.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(failures)
        first = failures[0]
        text = f"{first.label} failed: {first.type}: {first.message}"
        others = [f.label for f in failures[1:]]
        if others:
            text += f"\n(so did {', '.join(others)})"
        shown = {f.traceback.rstrip(): f.label for f in failures[::-1] if f is first or f.type == "TimedOut"}
        stacks = [f"{label}:\n{stack}" for stack, label in reversed(shown.items()) if stack]
        super().__init__("\n\n".join([text, *stacks]))


def require_plain_process(what: str) -> None:
    """Refuses to start processes from one that is itself a rank of many.

    Raises:
        RuntimeError: saying what to do instead.
    """
    initialized = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if initialized else int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise RuntimeError(
            f"{what} starts its own processes, but this process is one of {world} already "
            f"({'torch.distributed is initialised' if initialized else 'it was started by torchrun'}): call it from a "
            "plain Python process, without torchrun, or use `python -m autoparallel verify`"
        )


def run_processes(jobs: Sequence[Job], task: Any, timeout: float) -> list[Any]:
    """Runs all jobs at once and returns their results.

    Args:
        task: handed to every job's function; need not be picklable where processes are forked.
        timeout: seconds for everything together.

    Raises:
        ProcessError: when any process fails or the time is over; no process is left.
    """
    method = _start_method()
    deadline = time.monotonic() + timeout
    try:
        return _run(jobs, task, deadline, timeout, method)
    except ProcessError as error:
        text = error.failures[0].message
        if method != "fork" or not any(known in text for known in _LOST_BY_FORKING):
            raise
    return _run(jobs, task, deadline, timeout, "spawn")


def _start_method() -> str:
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        return "spawn"
    return "spawn" if torch.cuda.is_initialized() else "fork"  # a forked process cannot use CUDA, not even leave it


def _run(jobs: Sequence[Job], task: Any, deadline: float, timeout: float, method: str) -> list[Any]:
    context: Any = multiprocessing.get_context(method)
    directory = Path(tempfile.mkdtemp(prefix="autoparallel-"))
    processes: list[Any] = []
    connections: list[Connection] = []
    try:
        if method == "spawn":
            _write(task, directory)
            task = None
        for number, job in enumerate(jobs):
            ours, theirs = context.Pipe()
            inherited = [*connections, ours] if method == "fork" else []
            arguments = (number, job, task, directory, theirs, inherited, timeout, os.getpid())
            process = context.Process(target=_serve, args=arguments, name=job.label, daemon=True)
            with warnings.catch_warnings():  # Python warns of forking where there are threads; the child starts none
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        results = _collect(jobs, processes, connections, directory, deadline, timeout)
        for connection in connections:  # all have answered: nobody needs anybody any more
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        for process in processes:
            process.join(GRACE)
        return [_load(value, directory) for value in results]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join(GRACE)
            if process.exitcode is not None:
                process.close()
        for connection in connections:
            connection.close()
        shutil.rmtree(directory, ignore_errors=True)


def _write(task: Any, directory: Path) -> None:
    try:
        with open(directory / "task", "wb") as file:
            pickle.dump(task, file)
    except Exception as error:
        raise RuntimeError(
            "the processes cannot be forked from this one (it uses CUDA, or the platform cannot fork), so the model, "
            f"the inputs and loss_fn must be picklable, and they are not: {error}. Define them in "
            "an importable module, without lambdas, or use `python -m autoparallel verify module:factory`"
        ) from error


def _load(value: Any, directory: Path) -> Any:
    """A job may return ``{"file": name}`` beside other entries; the tensors in the file take its place."""
    if isinstance(value, dict) and "file" in value:
        value["file"] = torch.load(directory / value["file"], weights_only=True)
    return value


def _collect(
    jobs: Sequence[Job],
    processes: Sequence[Any],
    connections: Sequence[Connection],
    directory: Path,
    deadline: float,
    timeout: float,
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    silent: dict[int, Failure] = {}
    late = f"no answer within {timeout:g} s"
    pending: dict[Any, int] = {connection: i for i, connection in enumerate(connections)}
    while pending:
        ready = wait(list(pending), max(deadline - time.monotonic(), 0.0))
        if not ready:
            for i in pending.values():
                kind, text = ("Waited", "still waiting for the others") if failures else ("TimedOut", late)
                silent[i] = Failure(jobs[i].label, kind, text, _stack_of(processes[i], directory / f"stack{i}"))
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            i = pending.pop(connection)
            try:
                ok, value = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                ok, value = False, _death(jobs[i].label, processes[i])
            (results if ok else failures)[i] = value
        if failures and pending:
            deadline = min(deadline, time.monotonic() + GRACE)
    failures |= silent
    if failures:
        raise ProcessError([f for _, f in sorted(failures.items(), key=lambda f: (f[1].blame, f[0]))])
    return [results[i] for i in range(len(jobs))]


def _stack_of(process: Any, path: Path) -> str:
    """Where a silent process is stuck, as faulthandler prints it."""
    if not hasattr(signal, "SIGUSR1"):
        return ""
    with contextlib.suppress(OSError):
        os.kill(process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if path.exists() and path.stat().st_size:
                time.sleep(0.05)
                return path.read_text()
    return ""


def _death(label: str, process: Any) -> Failure:
    process.join(GRACE)
    code = process.exitcode
    cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return Failure(label, "Died", f"the process ended without a report ({cause})", "")


def _serve(
    number: int,
    job: Job,
    task: Any,
    directory: Path,
    connection: Connection,
    inherited: Sequence[Connection],
    timeout: float,
    parent: int,
) -> None:
    """A process's life."""
    torch.set_num_threads(1)  # before anything else: a forked process has lost the threads of its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    for other in inherited:
        other.close()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    stack = open(directory / f"stack{number}", "w")  # noqa: SIM115 - open for life
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=stack)
    _kept = _leave_groups()
    limit = datetime.timedelta(seconds=timeout)
    failed = False
    try:
        if task is None:
            with open(directory / "task", "rb") as file:
                task = pickle.load(file)
        shared = FileStore(str(directory / "shared"))
        shared.set_timeout(limit)
        group = FileStore(str(directory / f"group_{job.group}"), job.size)
        dist.init_process_group("gloo", store=group, rank=job.rank, world_size=job.size, timeout=limit)
        answer = pickle.dumps((True, job.function(Process(job.rank, job.size, directory, shared), task)))
    except BaseException as error:
        failed = True
        text = "".join(traceback.format_exception(error))
        answer = pickle.dumps((False, Failure(job.label, type(error).__name__, str(error), text)))
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(answer)
        while not failed and not connection.poll(1.0):
            if os.getppid() != parent:
                os._exit(1)
        if not failed:
            dist.destroy_process_group()
    os._exit(0)


def _leave_groups() -> list[Any]:
    """Leaves the process group of one rank that a forked process inherits where ``compile()`` was called before.

    Its threads are not inherited, so it must not be destroyed: whoever calls keeps what is returned.
    """
    if not dist.is_initialized():
        return []
    kept = [dist.group.WORLD]
    groups.unbind_all()
    forget_groups()
    dist.destroy_process_group()
    return kept


__all__ = ["Failure", "Job", "PlainModelError", "Process", "ProcessError", "require_plain_process", "run_processes"]
