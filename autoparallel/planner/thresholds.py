"""The numbers that bound the planner's work, or say when one plan is worth another look."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Where the planner stops to look.

    Attributes:
        nearly_equal: Plans whose prices add up to at most so many times that of another are compared by predicting
            both, on hardware where nothing hides behind anything.
        rooms: How often a search within a limit is told to leave more room, or less.
        spare: The part of a limit that may stay unused without another search.
        sparing: Seconds that a byte is worth where as little memory as possible is asked for.
        bubble: The part of a schedule in which ranks wait from which on more microbatches are tried, beyond the usual.
        far: How many times a known step's work the ranks of a pipeline may have, in the largest number of
            microbatches, for a preset's layouts to be cut into stages.
        hopeless: How many times the limit a search without one may add up, for its layouts to be cut where a pipeline
            is known.
        too_much: How many times a limit the search may add up, for what takes least to be predicted.
        steep: How many times the average the last bytes that are saved within a limit may cost.
        loss_chunks: Into how many chunks of rows a loss is cut where memory is short.
        linear_chunks: Into how many chunks of rows linear layers are cut, where that is faster.
        cut_places: Places for a cut between stages that are looked at; of longer models, those where least crosses.
        slopes: At how many prices of a byte it is looked at how long stages take within their memory.
        two_axes, three_axes, pipelines: How many meshes of two and of three axes, and how many pipelines, are searched
            at most where the mesh is open.
    """

    nearly_equal: float = 1.25
    rooms: int = 7
    spare: float = 0.02
    sparing: float = 1e-6
    bubble: float = 0.1
    far: float = 1.25
    hopeless: float = 2.0
    too_much: float = 1.5
    steep: float = 4.0
    loss_chunks: int = 8
    linear_chunks: tuple[int, ...] = (2, 4)
    cut_places: int = 400
    slopes: int = 6
    two_axes: int = 6
    three_axes: int = 2
    pipelines: int = 8


THRESHOLDS = Thresholds()
