"""The means that save memory, or hide what ranks exchange, for a whole step.  Which layers run again is no such number:
it is decided layer by layer (``Decisions.recompute``)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from autoparallel.decisions.pipeline import require_counts


@dataclass(frozen=True, kw_only=True)
class Means:
    """What was decided; a base of what has these numbers among its own.

    Attributes:
        loss_chunks: into how many chunks of rows a cross-entropy and the product that makes its logits are cut, so that
            the logits never exist whole; 1 computes them at once.
        linear_chunks: into how many chunks of rows linear layers are cut that read what is redistributed, or make it,
            so that what one chunk exchanges runs while the others are computed; 1 leaves them whole.
        microbatches: into how many parts a training call cuts its batch, one after another, where there is no pipeline.
        offload_optimizer: whether the optimizer's states lie in host memory between steps.
    """

    loss_chunks: int = 1
    linear_chunks: int = 1
    microbatches: int = 1
    offload_optimizer: bool = False

    @property
    def means(self) -> Means:
        """These numbers alone."""
        return Means(**{field.name: getattr(self, field.name) for field in fields(Means)})

    def require_valid(self) -> None:
        """Raises ValueError for what cannot be carried out."""
        for name in ("loss_chunks", "linear_chunks", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class OpenMeans:
    """What to fix of the :class:`Means`; the search decides what is None.  A base of what has these among its own.

    Raises:
        TypeError, ValueError: for what is no number of parts, and no decision.
    """

    loss_chunks: int | None = None
    linear_chunks: int | None = None
    microbatches: int | None = None
    offload_optimizer: bool | None = None

    def __post_init__(self) -> None:
        counts = {"loss_chunks": self.loss_chunks, "linear_chunks": self.linear_chunks}
        require_counts(**counts, microbatches=self.microbatches)
        choice = self.offload_optimizer
        if choice is not None and not isinstance(choice, bool):
            raise TypeError(f"offload_optimizer must be True, False or None, not a {type(choice).__name__}")

    @property
    def open_means(self) -> OpenMeans:
        """These numbers alone."""
        return OpenMeans(**{field.name: getattr(self, field.name) for field in fields(OpenMeans)})
