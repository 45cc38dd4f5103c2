"""What cannot be captured, and how that is said."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.comm.current import Current

RAISED: Current[list[Exception] | None] = Current(None)
"""The errors that a model's run has met and the plain model would not; None where it is not looked at."""


def note_raised(error: Exception) -> None:
    """Notes an error that only a trace meets: a model that catches it goes a way of its own from there."""
    if RAISED.value is not None:
        RAISED.value.append(error)


class CaptureError(RuntimeError):
    """The model cannot be captured as one graph; the message names the line and says what to change."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        note_raised(self)


class ReadAgainError(CaptureError):
    """A call depends on more than it is given: it is read again with that, and captured again."""

    def __init__(self, text: str) -> None:
        RuntimeError.__init__(self, text)  # the call goes on: it has met no error


class NeedsGradientError(ReadAgainError):
    """A call has an input require a gradient (``x.requires_grad_()`` in forward), which does not yet.

    Attributes:
        place: of the input.
    """

    def __init__(self, text: str, place: int) -> None:
        super().__init__(text)
        self.place = place


class FailsUntraced(CaptureError):
    """The model fails in the same line without a trace, where no size is open.

    Attributes:
        raised_by_model: what the model itself raises (``raise ValueError(...)``), as the plain one does for the same
            call; None where that is not known.
    """

    def __init__(self, text: str, raised_by_model: Exception | None) -> None:
        super().__init__(text)
        self.raised_by_model = raised_by_model


def refusal(what: str, line: str, cure: str, kind: type[CaptureError] = CaptureError) -> CaptureError:
    """What a model does that no program can have.

    Args:
        what: the model does.
        line: at which it does that.
        cure: what to change in the model.
        kind: the class of the error.
    """
    return kind(f"{what} at {line}\nWhat to change: {cure}.")


def refused_draw(generators: str, line: str, threads: Sequence[str] = ()) -> CaptureError:
    """Why a draw cannot be traced, and what to change.

    Args:
        threads: the names of others that may have drawn.
    """
    other = f" Where it is {' or '.join(threads)}, another thread, that draws: start it after the first call."
    return CaptureError(
        f"the model draws from {generators} at {line}: a trace would hold one draw for ever\n"
        "What to change: draw single numbers with random.random(), random.choice(), random.randint() or "
        "np.random.uniform(), by which a model may decide, and others with torch (torch.rand, torch.bernoulli, "
        "torch.randint, and torch.where); or draw outside of the model and pass the numbers in as a tensor."
        f"{other * bool(threads)}"
    )
