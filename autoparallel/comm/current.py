"""What is in force on a thread; ranks may be threads of one process (see ``simulate``)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Current(threading.local, Generic[T]):
    """A value of each thread's own.

    Attributes:
        value: what is in force; on a new thread, what this was made with.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    @contextmanager
    def using(self, value: T) -> Iterator[T]:
        """Inside, on this thread, another value is in force."""
        before, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = before
