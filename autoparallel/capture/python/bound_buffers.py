"""Buffers that a run of a copy binds to other tensors, or registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoparallel._torch.tensors import storage_mark
from autoparallel.capture.python.changes import (
    IN_THE_MODEL,
    Written,
    refused_buffer,
    refused_gradient,
    require_may_leave,
)
from autoparallel.capture.python.watched import Watched
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.plain_tensors import LOSS


class BoundBuffers:
    """What the runs of one copy have bound in the tables of its modules.

    Attributes:
        rebound: the buffers that they have bound to other tensors, by label.
        registered: the buffers that were not there before, by label, and whether they belong to the state dict.
    """

    def __init__(self) -> None:
        self.rebound: set[str] = set()
        self.registered: dict[str, bool] = {}
        self._rebinds: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self) -> None:
        """A run begins."""
        self._rebinds.clear()

    def take(self, watched: Watched, kind: str, name: str, line: str) -> Written | CaptureError | None:
        """What becomes of a place in a table of a module; what stood there is put back, unless it is refused.

        A buffer that is bound to a new tensor becomes one that is changed in place. One that was empty, or not there,
        leaves the program; so does what nobody has read, and is an attribute of the user's or gets a gradient.

        Returns:
            What leaves the program; or why it cannot be bound so, where it could be given to a call instead.

        Raises:
            CaptureError: for all else.
        """
        label, before = watched.label(name), watched.tables[kind].get(name)
        table = vars(watched.copy)[kind]
        now = table.get(name)
        if now is before:
            return None
        if watched.path.partition(".")[0] == LOSS:
            raise refusal(f"a call replaces the buffer {label}", line, IN_THE_MODEL)
        if kind != "_buffers":
            what = "parameter" if kind == "_parameters" else "module"
            instead = f", or give it new values (self.{name}.data = value)" if kind == "_parameters" else ""
            raise refusal(f"a call replaces the {what} {label}", line, f"do so outside of forward{instead}")
        if isinstance(now, torch.Tensor) and not now.requires_grad and before is None:
            fleeting = vars(watched.copy)["_non_persistent_buffers_set"]
            if name in watched.tables[kind]:
                table[name] = None
            else:
                self.registered[label] = name not in fleeting
                del table[name]
                fleeting.discard(name)
            return Written(vars(watched.original), name, now, fills=True, line=line)
        is_attribute = name in vars(watched.original)
        has_gradient = isinstance(now, torch.Tensor) and now.requires_grad
        if name not in watched.reads and (now is None or is_attribute or has_gradient):
            table[name] = before
            require_may_leave(now, label, line)
            return Written(vars(watched.original), name, now, fills=False, line=line)
        if has_gradient:
            table[name] = before
            return refused_gradient(label, line)
        refused = refused_buffer(label, before, now, line)
        table[name] = before
        if refused:
            return refused
        self.rebound.add(label)
        assert isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor)
        self._rebinds[label] = before, now
        return None

    def bound_anew(self) -> dict[str, torch.Tensor]:
        """What the run has bound to buffers in the place of these, by their names."""
        return {name: now for name, (_, now) in self._rebinds.items()}

    def rebind(self, leaves: Sequence[Any]) -> list[Any]:
        """Gives the buffers that the run has bound to other tensors the values of those. Leaves of what it makes that
        lie in one of these buffers are what that was (``old, self.p = self.p, new``), and get memory of their own."""
        rebinds = [*self._rebinds.values()]
        if not rebinds:  # a trace shows that gradients are switched off
            return list(leaves)
        changed = {storage_mark(before) for before, _ in rebinds}

        def kept(value: Any) -> Any:
            return value.clone() if isinstance(value, torch.Tensor) and storage_mark(value) in changed else value

        leaves = [kept(leaf) for leaf in leaves]
        values = [(before, kept(now)) for before, now in rebinds]
        with torch.no_grad():
            for before, value in values:
                before.copy_(value)
        return leaves
