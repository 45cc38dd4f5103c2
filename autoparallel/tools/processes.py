"""Processes of this machine: they join gloo groups, run one function after another, and are gone when that is over.

``launch()``, ``verify()`` and the command line start them for one job, the tests keep them for many.  They are forked
where that is safe, as ``DataLoader`` does, because then a model, a loss function and inputs may be lambdas, or live in
``__main__`` or in a notebook.  Elsewhere they are spawned, and all of it must be picklable.

[Note: no hang, no zombie] A process that raises reports its traceback and ends; one that dies is noticed by its pipe;
one that does neither is asked for its stack when the time is over.  After the first failure the others get ``GRACE``
seconds to report theirs, since they may be waiting for the one that failed.  In the end every process is killed and
joined, whatever happened.  A process leaves by ``os._exit``: gloo's threads may hang the interpreter's own exit.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
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

FileStore: Any = dist.FileStore  # type: ignore[attr-defined]
GRACE = 5.0
_CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Application timeout")
_LOST_BY_FORKING = ("Unable to handle autograd's threading", "Cannot re-initialize CUDA in forked subprocess")


@dataclass(frozen=True)
class Place:
    """Where one process stands.

    Attributes:
        label: what messages call it.
        group: processes of one group name form one process group.
        rank, size: its place in the group.
    """

    label: str
    group: str
    rank: int
    size: int


@dataclass(frozen=True)
class Process(Place):
    """What a function is told about where it runs.

    Attributes:
        shared: a store that all processes share, also those of different groups.
    """

    shared: Any


Function = Callable[[Process, Any], Any]
Start = Callable[[int, Callable[..., None], tuple[Any, ...]], Any]
"""Starts a process, given its number, what it runs and the arguments of that.  The result is one of multiprocessing's
own processes, or has their ``pid``, ``exitcode``, ``is_alive``, ``join`` and ``kill``."""


@dataclass(frozen=True)
class Failure:
    """What went wrong in one process.

    Attributes:
        label: which process.
        type: the exception's class, or "Died" and "TimedOut" for a process that reported nothing.
        message: the exception's text.
        traceback: the traceback, or the stack of a process that hangs or was ended by a fault of its own.
    """

    label: str
    type: str
    message: str
    traceback: str

    @property
    def reported(self) -> bool:
        """Whether the process itself said what went wrong, so that it can go on."""
        return self.type not in ("Died", "TimedOut", "Waited")

    @property
    def blame(self) -> int:
        """What is shown first: 0 for a model that fails by itself, 1 for most, 2 where another process is to blame."""
        if self.type == PlainModelError.__name__:
            return 0
        told = self.type in ("RankMismatchError", "PlanError") and " failed" in self.message.partition(":")[0]
        lost = self.type in ("Waited", "TimedOut") or any(text in self.message for text in _CONSEQUENCES)
        return 2 if told or lost else 1


class PlainModelError(RuntimeError):
    """The user's model fails by itself, without autoparallel."""


class ProcessError(RuntimeError):
    """A process that ``launch()``, ``verify()`` or the command line started raised, died, or ran out of time.

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
            "plain Python process, without torchrun"
        )


def ranks_of_mesh(ranks: int) -> list[Place]:
    """The places of so many ranks, which form one process group."""
    return [Place(f"rank {rank}", "mesh", rank, ranks) for rank in range(ranks)]


def run_processes(places: Sequence[Place], function: Function, task: Any, timeout: float) -> list[Any]:
    """Runs a function in a process for each place, in all of them at once, and returns their results.

    Args:
        function: is defined in a module.
        task: handed to the function; need not be picklable where processes are forked.
        timeout: seconds for everything together.

    Raises:
        ProcessError: when any process fails or the time is over; no process is left.
    """
    method = _start_method()
    deadline = time.monotonic() + timeout

    def run(method: str) -> list[Any]:
        with Pool(places, task, method, timeout, group_timeout=timeout, deadline=deadline) as pool:
            return pool.run(function, None, timeout, deadline=deadline)

    try:
        return run(method)
    except ProcessError as error:
        text = error.failures[0].message
        if method != "fork" or not any(words in text for words in _LOST_BY_FORKING):
            raise
    return run("spawn")


def _start_method() -> str:
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        return "spawn"
    return "spawn" if torch.cuda.is_initialized() else "fork"  # a forked process cannot use CUDA, not even leave it


class Pool:
    """Processes that run one function after another, until the pool is closed or one of them fails.

    Args:
        places: one for each process.
        task: the task of a function that is given none; need not be picklable where processes are forked.
        start: how processes are started: "fork", "spawn", or a function that does it.
        timeout: seconds until all have joined their groups.
        group_timeout: seconds that a process group waits for a rank; None for torch's own.
        deadline: when ``timeout`` is over, where it runs already.

    Raises:
        ProcessError: when a process does not join its group.
    """

    def __init__(
        self,
        places: Sequence[Place],
        task: Any,
        start: str | Start,
        timeout: float,
        *,
        group_timeout: float | None,
        deadline: float | None = None,
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="autoparallel-"))
        self._places = tuple(places)
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._ended = False
        try:
            if start != "fork" and task is not None:
                self._write(task)
                task = None
            for number, place in enumerate(self._places):
                ours, theirs = multiprocessing.Pipe()
                self._connections.append(ours)
                inherited = tuple(self._connections) if start == "fork" else ()
                arguments = (number, place, task, self._directory, theirs, inherited, group_timeout)
                self._processes.append(_start(start, number, arguments))
                theirs.close()
            self._collect(timeout, deadline)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """Whether the pool can run a function: it has not ended, and all its processes live."""
        return not self._ended and all(process.is_alive() for process in self._processes)

    def run(
        self,
        function: Function,
        task: Any,
        timeout: float,
        *,
        deadline: float | None = None,
        keep_after_error: bool = False,
    ) -> list[Any]:
        """Runs a function in all processes at once, and returns their results.

        Args:
            task: handed to the function, picklable; None for what the processes were given at their start.
            timeout: seconds for all of it.
            deadline: when ``timeout`` is over, where it runs already.
            keep_after_error: keeps the processes where the function raises, which it must do in all of them and in
                step: else collectives may be half done.

        Raises:
            ProcessError: when any process fails or the time is over; no process is left, unless they are kept.
        """
        if self._ended:
            raise RuntimeError("the pool has ended: its processes were closed, or one of them failed")
        call = pickle.dumps((pickle.dumps((function, task)), keep_after_error))
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the process has died, and its pipe will tell
                connection.send_bytes(call)
        try:
            return self._collect(timeout, deadline)
        except ProcessError as error:
            if not keep_after_error or not all(f.reported for f in error.failures):
                self._end()
            raise

    def close(self) -> None:
        """Ends the processes: politely, because groups should be destroyed, then for certain."""
        if self._ended:
            return
        for connection in self._connections:  # all have answered: nobody needs anybody any more
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        deadline = time.monotonic() + GRACE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._end()

    def _end(self) -> None:
        self._ended = True
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(GRACE)
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write(self, task: Any) -> None:
        try:
            with open(self._directory / "given", "wb") as file:
                pickle.dump(task, file)
        except Exception as error:
            raise RuntimeError(
                "the processes cannot be forked from this one (it uses CUDA, or the platform cannot fork), so the "
                f"model, the inputs and loss_fn must be picklable, and they are not: {error}. Define them in an "
                "importable module, without lambdas, or use `python -m autoparallel verify module:factory`"
            ) from error

    def _collect(self, timeout: float, deadline: float | None) -> list[Any]:
        """The answers of all processes to what they were sent last."""
        deadline = time.monotonic() + timeout if deadline is None else deadline
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        silent: dict[int, Failure] = {}
        late = f"no answer within {timeout:g} s"
        pending: dict[Any, int] = {connection: i for i, connection in enumerate(self._connections)}
        while pending:
            ready = wait(list(pending), max(deadline - time.monotonic(), 0.0))
            if not ready:
                for i in pending.values():
                    kind, text = ("Waited", "still waiting for the others") if failures else ("TimedOut", late)
                    silent[i] = Failure(self._places[i].label, kind, text, self._stack_of(i))
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                i = pending.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    ok, value = False, self._death_of(i)
                (results if ok else failures)[i] = value
            if failures and pending:
                deadline = min(deadline, time.monotonic() + GRACE)
        failures |= silent
        if failures:
            raise ProcessError([f for _, f in sorted(failures.items(), key=lambda f: (f[1].blame, f[0]))])
        return [results[i] for i in range(len(self._places))]

    def _stack_of(self, number: int) -> str:
        """Where a silent process is stuck, as faulthandler prints it."""
        path = _stack_file(self._directory, number)
        if not hasattr(signal, "SIGUSR1"):
            return ""
        with contextlib.suppress(OSError):
            os.kill(self._processes[number].pid, signal.SIGUSR1)
            for _ in range(20):
                time.sleep(0.05)
                if path.exists() and path.stat().st_size:
                    time.sleep(0.05)
                    return path.read_text()
        return ""

    def _death_of(self, number: int) -> Failure:
        process = self._processes[number]
        process.join(GRACE)
        code = process.exitcode
        cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        # A segmentation fault leaves the stack at which it happened there.
        path = _stack_file(self._directory, number)
        stack = path.read_text() if path.exists() else ""
        return Failure(self._places[number].label, "Died", f"the process ended without a report ({cause})", stack)


def _stack_file(directory: Path, number: int) -> Path:
    return directory / f"stack{number}"


def _start(start: str | Start, number: int, arguments: tuple[Any, ...]) -> Any:
    if not isinstance(start, str):
        return start(number, _serve, arguments)
    context: Any = multiprocessing.get_context(start)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    with warnings.catch_warnings():  # Python warns of forking where there are threads; the child starts none
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return process


def _serve(
    number: int,
    place: Place,
    shared_task: Any,
    directory: Path,
    connection: Connection,
    inherited: Sequence[Connection],
    group_timeout: float | None,
) -> None:
    """A process's life: it joins its group, runs what it is sent, answers, and leaves the group."""
    parent = os.getppid()
    torch.set_num_threads(1)  # before anything else: a forked process has lost the threads of its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    for other in inherited:
        other.close()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    stack = open(_stack_file(directory, number), "w")  # noqa: SIM115 - open for life
    faulthandler.enable(stack)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=stack)
    _groups = _leave_groups()
    limit = None if group_timeout is None else datetime.timedelta(seconds=group_timeout)
    shared = FileStore(str(directory / "shared"))
    if limit is not None:
        shared.set_timeout(limit)

    def join() -> None:
        nonlocal shared_task
        if (directory / "given").exists():
            shared_task = pickle.loads((directory / "given").read_bytes())
        group = FileStore(str(directory / f"group_{place.group}"), place.size)
        dist.init_process_group("gloo", store=group, rank=place.rank, world_size=place.size, timeout=limit)

    def work(call: bytes) -> Any:
        function, task = pickle.loads(call)
        return function(Process(**vars(place), shared=shared), shared_task if task is None else task)

    with contextlib.suppress(BaseException):
        _answer(connection, place.label, join, keep=False)
        while message := _receive(connection, parent):
            call, keep = pickle.loads(message)
            _answer(connection, place.label, functools.partial(work, call), keep)
        dist.destroy_process_group()
    os._exit(0)


def _receive(connection: Connection, parent: int) -> bytes:
    while not connection.poll(1.0):
        if os.getppid() != parent:
            os._exit(1)
    return connection.recv_bytes()


def _answer(connection: Connection, label: str, action: Callable[[], Any], keep: bool) -> None:
    """Sends what an action gives; after one that raises the process ends, unless it is kept."""
    failed = False
    try:
        answer = pickle.dumps((True, action()))
    except BaseException as error:
        failed = True
        text = "".join(traceback.format_exception(error))
        answer = pickle.dumps((False, Failure(label, type(error).__name__, str(error), text)))
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(answer)
    if failed and not keep:
        os._exit(0)


def _leave_groups() -> list[Any]:
    """Leaves the process group of one rank that a forked process inherits where ``compile()`` was called before.

    Its threads are not inherited, so it must not be destroyed: whoever calls keeps what is returned.
    """
    if not dist.is_initialized():
        return []
    inherited = [dist.group.WORLD]
    dist.destroy_process_group()
    return inherited
