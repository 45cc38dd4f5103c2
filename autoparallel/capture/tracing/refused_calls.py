"""Functions that a model may not call while it is traced, as no program does what they do."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from autoparallel.capture.refusals.data_access import KERNEL_CURE
from autoparallel.capture.tracing.stand_ins import replacement
from autoparallel.capture.tracing.trace import CURRENT, Trace, listening, refuse
from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import is_users_file


def _refused_function(original: Callable[..., Any], what: str, cure: str) -> Callable[..., Any]:
    """What stands for a function of torch while models are traced: it raises ``CaptureError`` where one calls it, also
    in what leaves no trace, where it is given tensors that have no memory."""

    def function(*args: Any, **options: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        follows = listening() is not None and not caller.startswith("torch._dynamo")  # which puts back what it moves
        if follows or CURRENT.value is not None and any(hasattr(x, "fake_mode") for x in args):
            raise refuse(what, cure)
        return original(*args, **options)

    return function


# Numbers that are to be the same in every call, or in two places, would be others each time: a trace shows what is
# drawn, and not that the generator was put back or seeded before, also by torch.random.fork_rng.
_SEEDING_CURE = (
    "draw numbers that are to stay the same once, outside of forward, and keep them in a buffer; seed before the model "
    "is called"
)
_SEEDING = ("manual_seed", "seed", "set_rng_state")

# A compiled model is given the global batch, and its program sends what that takes. What was written for DDP, such as a
# contrastive loss that gathers every rank's features, has them all already.
COLLECTIVES_CURE = (
    "leave it out: the model is given the rows of all ranks, as on one device, so that its means and its features are "
    "those of the whole batch"
)
_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


def _start(_: Trace, start: Callable[..., None], self: threading.Thread) -> None:
    """What another thread does, no trace sees, and it would do so once."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("concurrent."):  # by a pool
        frame = frame.f_back
    if frame is None or not is_users_file(frame.f_code.co_filename):
        return start(self)  # those of packages, as of a progress bar, serve themselves
    raise refusal(
        "the model starts a thread, of which no trace sees what it does,",
        line_of_frame(frame),
        "call what it is to run as a function, or start it outside of the model",
    )


_REFUSED: tuple[tuple[Any, tuple[str, ...], str, str], ...] = (
    (torch, _SEEDING, "the model sets torch's generator (torch.{})", _SEEDING_CURE),
    (torch.random, _SEEDING, "the model sets torch's generator (torch.{})", _SEEDING_CURE),
    (dist, _COLLECTIVES if dist.is_available() else (), "the model calls torch.distributed.{}", COLLECTIVES_CURE),
)
"""What has functions, their names, what the model does that calls one, and the cure."""

NAMES: tuple[tuple[Any, str, Any], ...] = (
    *(
        (owner, name, _refused_function(getattr(owner, name), what.format(name), cure))
        for owner, names, what, cure in _REFUSED
        for name in names
    ),
    replacement(threading.Thread, "start", _start),
)
"""The names that are replaced while a model is traced."""


def names_of_triton() -> Iterator[tuple[Any, str, Any]]:
    """What launches a kernel, which would write to where the tensors of a trace have no memory."""
    jit = sys.modules.get("triton.runtime.jit")
    if jit is not None:
        launch = _refused_function(jit.JITFunction.run, "the model launches a Triton kernel", KERNEL_CURE)
        yield jit.JITFunction, "run", launch
