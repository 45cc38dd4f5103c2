"""Threads that a model starts: what another thread does, no trace sees, and it would do so once."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from autoparallel.capture.tracing.trace import listening
from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import is_installed, is_library


def _start(self: threading.Thread) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("concurrent."):  # by a pool
        frame = frame.f_back
    if listening() is None or frame is None or not _is_users(frame.f_code.co_filename):
        return _START(self)
    raise refusal(
        "the model starts a thread, of which no trace sees what it does,",
        line_of_frame(frame),
        "call what it is to run as a function, or start it outside of the model",
    )


def _is_users(filename: str) -> bool:
    """Whether a file is of the user's own code: threads of packages, as of a progress bar, serve themselves."""
    return not is_library(filename) and not is_installed(filename)


_START = threading.Thread.start
NAMES: tuple[tuple[Any, str, Any], ...] = ((threading.Thread, "start", _start),)
"""The names that are replaced while a model is traced."""
