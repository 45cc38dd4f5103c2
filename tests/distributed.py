"""A pool of gloo worker processes that tests share.

Starting a process and importing torch takes seconds, so a pool of each world size is forked from processes that are
started once per test session (`tests.templates`), and then runs one function after another::

    from tests.distributed import run_distributed

    def sum_of_ranks(offset):                      # module level: it is sent to the workers by name
        value = torch.tensor(float(dist.get_rank() + offset))
        dist.all_reduce(value)
        return value

    results = run_distributed(sum_of_ranks, 10, world_size=4)     # one result per rank

[Note: what a pool promises]
- The function runs on every rank at once, with the default process group initialised (gloo, this machine) and one
  thread per process. Its result must be picklable; tensors travel as copies, `DTensor`s do not travel at all.
- An exception on any rank is raised in the parent as `WorkerError`, with the traceback of every rank that has one.
  Its `errors` maps ranks to `RankError`s for tests that look closer.
- A call that outlives its time-out, or loses a worker, ends the pool with all its processes. The next call starts a
  fresh one. So does a call after one that raised, because collectives of the failed call may still be half done.
  A call whose function is *expected* to raise on every rank, in step, passes `keep_after_error=True`.
- Process groups that a call creates cannot be given back in full, so a pool is retired after `calls_per_pool` calls.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.templates import start_workers

DEFAULT_TIMEOUT = 120.0
START_TIMEOUT = 120.0
GRACE = 6.0  # for the other ranks, once one has failed
CALLS_PER_POOL = 60
GROUP_TIMEOUT = 100.0  # seconds; None for torch's own


@dataclass(frozen=True)
class RankError:
    """What went wrong on one rank."""

    type: str  # the exception's class name, or "Died" and "TimedOut" for a process that reported nothing
    message: str  # str(exception)
    traceback: str  # the whole formatted traceback of the worker


class WorkerError(RuntimeError):
    """At least one rank raised, died or ran out of time."""

    def __init__(self, function: str, world_size: int, errors: dict[int, RankError]) -> None:
        self.errors = errors
        heads = "\n".join(f"  rank {rank}: {e.type}: {e.message}" for rank, e in sorted(errors.items()))
        bodies = "\n".join(
            f"----- rank {rank} -----\n{e.traceback.rstrip()}" for rank, e in sorted(errors.items()) if e.traceback
        )
        super().__init__(f"{function} failed on {len(errors)} of {world_size} ranks\n{heads}\n{bodies}")


def run_distributed(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    timeout: float = DEFAULT_TIMEOUT,
    keep_after_error: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on all ranks of the shared pool of this size; return each rank's result."""
    pool = _pools.get(world_size)
    if pool is None or not pool.usable:
        if pool is not None:
            pool.close()
        # Idle processes of other sizes cost memory but no time; three sizes at most are in use.
        pool = _pools[world_size] = WorkerPool(world_size)
    return pool.run(function, *args, timeout=timeout, keep_after_error=keep_after_error, **kwargs)


def close_pools() -> None:
    """End all shared pools. Called at exit; calling it earlier is allowed."""
    while _pools:
        _, pool = _pools.popitem()
        pool.close()


_pools: dict[int, WorkerPool] = {}
atexit.register(close_pools)


class WorkerPool:
    """`world_size` processes in one gloo group. Most tests use `run_distributed`, which shares pools."""

    def __init__(
        self, world_size: int, *, calls_per_pool: int = CALLS_PER_POOL, group_timeout: float | None = GROUP_TIMEOUT
    ) -> None:
        self.world_size = world_size
        self._calls_left = calls_per_pool
        self._broken = False
        self._directory = tempfile.mkdtemp(prefix="autoparallel-pool-")
        arguments = [(rank, world_size, self._directory, group_timeout) for rank in range(world_size)]
        listeners = [multiprocessing.connection.Listener(_address(self._directory, rank)) for rank in range(world_size)]
        self._processes = start_workers(_serve, arguments)
        self._connections = [listener.accept() for listener in listeners]
        for listener in listeners:
            listener.close()
        self._collect("starting the pool", START_TIMEOUT, keep_after_error=False)

    @property
    def usable(self) -> bool:
        return not self._broken and self._calls_left > 0 and all(p.is_alive() for p in self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT,
        keep_after_error: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        if not self.usable:
            raise RuntimeError("this pool has ended; make a new one, or use run_distributed")
        self._calls_left -= 1
        payload = pickle.dumps((function, args, kwargs))
        name = f"{function.__module__}.{function.__qualname__}"
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(payload)
            except (BrokenPipeError, ConnectionResetError):
                self._kill()
                raise WorkerError(name, self.world_size, {rank: self._death(rank)}) from None
        return self._collect(name, timeout, keep_after_error)

    def _collect(self, name: str, timeout: float, keep_after_error: bool) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        errors: dict[int, RankError] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        fatal = False
        while pending:
            remaining = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(pending), max(remaining, 0.0))
            if not ready:
                fatal = True
                for rank in pending.values():
                    errors[rank] = RankError("TimedOut", f"no answer within {timeout:g} s", self._stack_of(rank))
                break
            for connection in ready:
                assert isinstance(connection, multiprocessing.connection.Connection)
                rank = pending.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    fatal = True
                    errors[rank] = self._death(rank)
                    continue
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
            if errors and pending:
                # The others probably wait for the rank that failed: give them a moment to notice, not the whole time.
                deadline = min(deadline, time.monotonic() + GRACE)
        if errors:
            if fatal or not keep_after_error:
                self._kill()
            raise WorkerError(name, self.world_size, errors)
        return [results[rank] for rank in range(self.world_size)]

    def _stack_of(self, rank: int) -> str:
        """Where a silent worker is stuck, as faulthandler prints it."""
        path = os.path.join(self._directory, f"stack{rank}")
        try:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.2)
            with open(path) as file:
                return file.read()
        except OSError:
            return ""

    def _death(self, rank: int) -> RankError:
        process = self._processes[rank]
        process.join(5.0)
        code = process.exitcode
        cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return RankError("Died", f"the process ended ({cause})", "")

    def _kill(self) -> None:
        self._broken = True
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(5.0)
        self._clean()

    def close(self) -> None:
        """End the processes: politely, because the group should be destroyed, then for certain."""
        if not self._broken:
            self._broken = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.send_bytes(b"")
            deadline = time.monotonic() + 5.0
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _clean(self) -> None:
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _address(directory: str, rank: int) -> str:
    """Where a worker finds its pool."""
    return os.path.join(directory, f"parent{rank}")


def _serve(rank: int, world_size: int, directory: str, group_timeout: float | None) -> None:
    """A worker's life: join the group, run what arrives, answer, and leave the group."""
    connection = multiprocessing.connection.Client(_address(directory, rank))
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=_loopback(), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    import datetime
    import faulthandler

    stacks = open(os.path.join(directory, f"stack{rank}"), "w")  # noqa: SIM115 (open for life)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(directory, "store"), world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=None if group_timeout is None else datetime.timedelta(seconds=group_timeout),
        )
        answer: tuple[bool, Any] = (True, None)
    except BaseException as error:
        connection.send_bytes(pickle.dumps((False, _describe(error))))
        return
    while True:
        connection.send_bytes(_answer(answer))
        try:
            payload = connection.recv_bytes()
        except (EOFError, OSError):  # the parent is gone
            os._exit(0)
        if not payload:
            break
        try:
            torch.manual_seed(0)
            function, args, kwargs = pickle.loads(payload)
            answer = (True, function(*args, **kwargs))
        except BaseException as error:
            answer = (False, _describe(error))
    dist.destroy_process_group()
    os._exit(0)  # about one gloo process in 25 hangs in the interpreter's own exit


def _answer(answer: tuple[bool, Any]) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:
        return pickle.dumps((False, _describe(error)))


def _describe(error: BaseException) -> RankError:
    return RankError(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _loopback() -> str:
    """The loopback interface's name: 'lo' on Linux, 'lo0' on macOS."""
    return "lo0" if sys.platform == "darwin" else "lo"
