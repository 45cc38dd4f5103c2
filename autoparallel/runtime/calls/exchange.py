"""What the ranks show each other before every call of a model and before every backward through one.

[Note: what ranks show] Which of the models compiled for these ranks it is, how many calls, backwards and steps of
optimizers this rank has made of it, by which settings, whether a backward adds to gradients, and what kind of call
comes next: so a rank that has left one out, steps by another learning rate, or makes a call of another model, is seen
at the next exchange.  A rank that skips a batch altogether has made as many calls as the others, of other batches; only
values show that, and a sample of them is shown, too (see ``check_inputs`` of ``compile``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from autoparallel import _torch
from autoparallel.comm.waiting import RankMismatchError
from autoparallel.graph.calls import Call
from autoparallel.runtime.gradients.store import GradientStore
from autoparallel.runtime.ranks.agreement import ROW, Agreement, digest, is_same, tensor_digest
from autoparallel.runtime.ranks.randomness import STREAM, Place, pack, unpack
from autoparallel.runtime.ranks.replicas import SIZE, Replicas

CHECKED_CALLS = 3
"""On so many first calls all values of plain inputs are compared between the ranks."""

SAMPLE = 512
"""So many elements of a plain input are compared later."""

SELDOM = 100
"""The number of calls from one comparison to the next where each waits for an accelerator."""

_AT_ONCE = (ROW - 32) // 8
"""So many numbers are shown beside a digest."""

AS_DTENSOR = ", or give each rank its own rows: model(*model.local_rows((x, y))), with those that model.sampler() names"


class Exchange:
    """What the ranks show each other about one model.

    Args:
        agreement: the ranks.
        store: the model's gradients, which count its backwards and steps.
        name: the model's class.
        device: the kind of device it is on.
        check_inputs: at every so many calls a sample of plain inputs is compared; 0 for never, None as is cheap.
        takes_rows: whether a rank may be given its rows of the batch, as a ``DTensor``.
        replicas: what compares replicas, if anything does.
    """

    def __init__(
        self,
        agreement: Agreement,
        store: GradientStore,
        name: str,
        device: str,
        check_inputs: int | None,
        takes_rows: bool = True,
        replicas: Replicas | None = None,
    ) -> None:
        self.agreement, self.store, self.takes_rows, self.replicas = agreement, store, takes_rows, replicas
        self.name = f"model {agreement.next_model()} ({name})"
        self.calls = 0
        self.place: Place = (0, 0)  # of the random numbers of the call that is agreed upon: the first rank's
        self.check_inputs = (1 if device == "cpu" else SELDOM) if check_inputs is None else check_inputs
        self._base, self._mismatches = (0, 0, 0), agreement.mismatches
        self._samples: dict[tuple[int, torch.device], torch.Tensor] = {}

    # -- before a call ----------------------------------------------------------------------------------------------

    def of_call(
        self, call: Call, kind: object, problem: str | None, whole: bool, describe: Callable[[], str]
    ) -> Callable[[], None]:
        """Shows the other ranks which call comes; what is returned raises where theirs differ.

        Args:
            kind: what tells kinds of calls apart.
            problem: why this rank cannot make the call, if it cannot.
            whole: whether all values of plain inputs are compared.
            describe: the call in words.
        """
        agreement = self.agreement
        problem = problem or agreement.broken
        self.calls += 1
        modes = torch.is_grad_enabled(), self.store.synchronise
        structure = digest("call", self.name, self._counts(), kind, call.shapes, problem, modes)
        check, place = self._values(call, whole), f"call {self.calls} of {self.name}"
        stale = self.store.has_stale()
        replicas = self.replicas
        if replicas is not None and (agreement.alone or not replicas.is_due(self.calls)):
            replicas = None
        shown = b"" if replicas is None else replicas.digests()
        table_of_all = agreement.ask(structure + check + bytes([stale]) + pack(STREAM.place()) + shown, place)

        def require_same() -> None:
            table = table_of_all()
            self.place = unpack(table[0, 65:81])
            self._require_same_call(table, lambda: problem or f"{describe()}; {self._so_far()}")
            if problem:
                raise ValueError(problem)
            if not is_same(table[:, 32:64]):
                agreement.mismatches += 1
                raise RankMismatchError(
                    "the ranks pass different values as plain inputs. A plain tensor is the global batch, the same on "
                    "every rank (unlike DistributedDataParallel, which takes each rank's own rows). Pass the same "
                    f"batch everywhere{AS_DTENSOR * self.takes_rows}. Where the values were the same before, a rank "
                    f"has left out a batch: this is {self._so_far()}"
                )
            if replicas is not None:
                replicas.require_same(table[:, 81 : 81 + SIZE], agreement, self.calls)
            if bool(table[:, 64].any()):
                self.store.copies.clear()  # on all ranks, or on none

        return agreement.later(require_same)

    def of_error(self, error: Exception) -> NoReturn:
        """Shows the other ranks that a call of this rank cannot be made; raises ``error`` where theirs cannot, too."""
        self.calls += 1
        text = f"{type(error).__name__}: {error}"
        row = digest("call", self.name, self._counts(), text)
        with _torch.transforms.outside_of_traces():  # it may be torch.export that calls, or torch.jit
            self._require_same_call(self.agreement.ask(row, f"call {self.calls} of {self.name}")(), lambda: text)
        raise error

    def of_other(self, what: str, *numbers: float) -> list[list[float]]:
        """Shows the other ranks that something comes which all ranks do together; raises where theirs do not.

        Returns:
            For each of ``numbers``, what the ranks have brought, in the order of the mesh.
        """
        row = digest(what, self.name, self._counts()) + struct.pack(f"{len(numbers)}d", *numbers)
        table = self.agreement.ask(row, f"{what} of {self.name}")()
        self.agreement.require_same(
            table[:, :32], "the ranks use the model differently:", lambda: f"{what}; {self._so_far()}"
        )
        return table[:, 32 : 32 + 8 * len(numbers)].contiguous().view(torch.float64).T.tolist()

    def of_first(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """The first rank's numbers, of some that all ranks bring to a call."""
        if self.agreement.alone or self.agreement.broken:
            return tuple(numbers)
        firsts: list[float] = []
        for start in range(0, len(numbers), _AT_ONCE):
            shown = self.of_other("a call that draws numbers", *numbers[start : start + _AT_ONCE])
            firsts += [first for first, *_ in shown]
        return tuple(firsts)

    def of_backward(self) -> Callable[[], None]:
        """Shows the other ranks that a backward comes; what is returned raises where none of this model does."""
        place = f"backward {self.store.backwards} of {self.name}"
        adds = self.store.everyone is None and bool(self.store.grads.all())  # else a rank may hold nothing
        row = digest("backward", self.name, self._counts(), self.store.synchronise, adds)
        table_of_all = self.agreement.ask(row, place)

        mode = ("" if self.store.synchronise else " in no_sync") + ", added to gradients that are there" * adds
        return self.agreement.later(
            lambda: self._require_same_call(table_of_all(), lambda: f"{place}{mode}; {self._so_far()}")
        )

    def _require_same_call(self, table: torch.Tensor, describe: Callable[[], str]) -> None:
        self.agreement.require_same(table[:, :32], "the ranks call the model differently:", describe)

    def _counts(self) -> tuple[object, ...]:
        """What this rank has made of the model, since the ranks have last found that it was not the same."""
        in_step = self.store.everyone is None  # else a rank steps what lies on it, which may be nothing
        counts = self.calls, self.store.backwards, self.store.steps * in_step
        if self._mismatches != self.agreement.mismatches:
            self._mismatches, self._base, self.store.all_steps = self.agreement.mismatches, counts, b""
        return (*(now - before for now, before in zip(counts, self._base, strict=True)), self.store.all_steps)

    def _so_far(self) -> str:
        return (
            f"call {self.calls} of {self.name}, after {self.store.backwards} backwards and {self.store.steps} steps of "
            f"optimizers{f', the last of {self.store.last_step}' * bool(self.store.last_step)}"
        )

    # -- values -----------------------------------------------------------------------------------------------------

    def _values(self, call: Call, whole: bool) -> bytes:
        """A digest of the values of plain inputs: all of them, a sample, or nothing."""
        if self.agreement.alone or not whole and not (self.check_inputs and self.calls % self.check_inputs == 0):
            return bytes(32)
        plain = [
            leaf
            for leaf, layout in zip(call.leaves[: len(call.leaves) - call.attributes], call.layouts, strict=False)
            if layout is None and isinstance(leaf, torch.Tensor)
        ]
        return digest(*[tensor_digest(x if whole else self._sample(x)) for x in plain])

    def _sample(self, x: torch.Tensor) -> torch.Tensor:
        """Some elements of a tensor, evenly spread."""
        x = x.detach()
        if x.numel() <= SAMPLE:
            return x
        key = x.numel(), x.device
        if key not in self._samples:
            self._samples[key] = torch.linspace(0, x.numel() - 1, SAMPLE, dtype=torch.float64).long().to(x.device)
        return x.take(self._samples[key])
