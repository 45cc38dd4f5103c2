"""Pools of gloo processes that tests share.

Starting a process and importing torch takes seconds, so a pool of each world size is forked from processes that are
started once per test session (`tests.templates`), and then runs one function after another::

    from tests.distributed import run_distributed

    def sum_of_ranks(offset):                      # module level: it is sent to the processes by name
        value = torch.tensor(float(dist.get_rank() + offset))
        dist.all_reduce(value)
        return value

    results = run_distributed(sum_of_ranks, 10, world_size=4)     # one result per rank

[Note: what a shared pool promises]
- The function runs on every rank at once, with the default process group initialised (gloo, this machine) and one
  thread per process. Its result must be picklable; tensors travel as copies, `DTensor`s do not travel at all.
- An exception on any rank is raised in the parent as `ProcessError`, of which `failures_of` tells by rank.
- A call that outlives its time-out, loses a process or raises ends the pool with all its processes, because
  collectives may still be half done, and the next call starts a fresh one. A call whose function is *expected* to
  raise on every rank, in step, passes `keep_after_error=True`.
- Process groups that a call creates cannot be given back in full, so a pool is retired after `CALLS` calls.
- A call is made once more, with a warning that has the stack (`tests.templates`), where a worker died of a segmentation
  fault in no thread of Python's: now and then, in one of thousands of calls, a thread of C++ does so while Python waits
  for a collective of gloo's.
"""

from __future__ import annotations

import atexit
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from autoparallel.tools.processes import Failure, Place, Pool, Process, ProcessError
from tests.templates import start_from_template

TIMEOUT = 120.0
GROUP_TIMEOUT = 100.0
CALLS = 60


def run_distributed(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    timeout: float = TIMEOUT,
    keep_after_error: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on all ranks of the shared pool of this size; return each rank's result."""
    options: dict[str, Any] = {"timeout": timeout, "keep_after_error": keep_after_error, **kwargs}
    try:
        return run_in(_shared_pool(world_size), function, *args, **options)
    except ProcessError as error:
        if not any(map(_is_fault_beside_python, error.failures)):
            raise
    return run_in(_shared_pool(world_size), function, *args, **options)


def _shared_pool(world_size: int) -> Pool:
    pool = _pools.get(world_size)
    if pool is None or not pool.usable or _calls[world_size] == CALLS:
        if pool is not None:
            pool.close()
        # Idle processes of other sizes cost memory but no time; three sizes at most are in use.
        pool = _pools[world_size] = open_pool(world_size)
        _calls[world_size] = 0
    _calls[world_size] += 1
    return pool


def _is_fault_beside_python(failure: Failure) -> bool:
    """Whether a worker died in a thread of which faulthandler, which shows those of Python, knows nothing."""
    is_of_python = "Current thread" in failure.traceback or "Thread" not in failure.traceback
    return failure.type == "Died" and "SIGSEGV" in failure.message and not is_of_python


def open_pool(world_size: int, group_timeout: float | None = GROUP_TIMEOUT) -> Pool:
    """A pool of one's own, of as many ranks; most tests use `run_distributed`, which shares them."""
    places = [Place(f"rank {rank}", "tests", rank, world_size) for rank in range(world_size)]
    return Pool(places, None, start_from_template, TIMEOUT, group_timeout=group_timeout)


def run_in(
    pool: Pool,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    keep_after_error: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` on all ranks of a pool."""
    return pool.run(_call, (function, args, kwargs), timeout, keep_after_error=keep_after_error)


def failures_of(error: ProcessError) -> dict[int, Failure]:
    """What went wrong, by rank."""
    return {int(failure.label.removeprefix("rank ")): failure for failure in error.failures}


def close_pools() -> None:
    """End all shared pools. Called at exit; calling it earlier is allowed."""
    while _pools:
        _, pool = _pools.popitem()
        pool.close()


def _call(process: Process, task: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
    torch.manual_seed(0)
    function, args, kwargs = task
    return function(*args, **kwargs)


_pools: dict[int, Pool] = {}
_calls: Counter[int] = Counter()
atexit.register(close_pools)
