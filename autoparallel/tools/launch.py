"""``launch()``: a function on several ranks of this machine, from a notebook or any plain Python process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

from autoparallel.tools.processes import Process, ranks_of_mesh, require_plain_process, run_processes


def launch(
    function: Callable[..., Any], /, *args: Any, ranks: int = 4, timeout: float = 3600.0, **kwargs: Any
) -> list[Any]:
    """Calls ``function(*args, **kwargs)`` on every rank at once, and returns what each of them returns.

    Each rank is a fresh process of this machine with one thread; all of them have joined a gloo process group, so that
    ``init_device_mesh("cpu", ...)`` and ``compile()`` work in the function as under ``torchrun``.  The processes are
    copies of this one where the platform can fork: function and arguments may be lambdas, or live in a notebook, and
    what the function changes outside of itself is lost.  Elsewhere both must be picklable.

    Args:
        ranks: how many processes.
        timeout: seconds for all of it; then the processes are stopped.

    Returns:
        A result for each rank, in their order.  Results travel by pickle; tensors arrive as copies.

    Raises:
        RuntimeError: when called from one of several ranks.
        ValueError: for no ranks, or no time.
        ProcessError: when the function raises on any rank, a result cannot be pickled, a process dies, or the time is
            over; with the traceback.  No process is left.
    """
    require_plain_process("launch()")
    if ranks < 1 or not timeout > 0:
        raise ValueError(f"launch() needs at least one rank and some time, got ranks={ranks}, timeout={timeout}")
    return run_processes(ranks_of_mesh(ranks), _call, (function, args, kwargs), timeout)


def _call(process: Process, task: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
    function, args, kwargs = task
    result = function(*args, **kwargs)
    for path, leaf in tree_flatten_with_path(result)[0]:
        if isinstance(leaf, DTensor):
            place = "".join(map(str, path))
            raise TypeError(
                f"the function returns a DTensor{f' at {place}' if place else ''}, which is one rank's part and means "
                "nothing outside of the ranks: return its .full_tensor()"
            )
    return result
