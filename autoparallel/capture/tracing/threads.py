"""Threads that a model starts: what another thread does, no trace sees, and it would do so once."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from autoparallel.capture.tracing.trace import listening
from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import is_users_file


def _start(self: threading.Thread) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("concurrent."):  # by a pool
        frame = frame.f_back
    if listening() is None or frame is None or not is_users_file(frame.f_code.co_filename):
        return _START(self)  # those of packages, as of a progress bar, serve themselves
    raise refusal(
        "the model starts a thread, of which no trace sees what it does,",
        line_of_frame(frame),
        "call what it is to run as a function, or start it outside of the model",
    )


_START = threading.Thread.start
NAMES: tuple[tuple[Any, str, Any], ...] = ((threading.Thread, "start", _start),)
"""The names that are replaced while a model is traced."""
