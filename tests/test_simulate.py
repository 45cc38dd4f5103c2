"""Ranks as threads: they communicate as processes do, and faults are errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoparallel.comm.collectives import all_reduce
from autoparallel.comm.groups import axis_index, axis_size, communicator_of
from autoparallel.comm.simulate import simulate

MESH, NAMES = (2, 3), ("dp", "tp")


def test_coordinates_are_those_of_a_device_mesh() -> None:
    found = simulate(lambda rank: (axis_index("m/dp"), axis_index("m/tp"), axis_index("m/dp+tp")), MESH, NAMES)
    assert found == [(rank // 3, rank % 3, rank) for rank in range(6)]
    assert simulate(lambda rank: (axis_size("m/dp"), axis_size("m/dp+tp")), MESH, NAMES) == [(2, 6)] * 6


def test_collectives_stay_within_their_axis() -> None:
    def rank(index: int) -> tuple[list[float], list[float], float, list[float], list[float]]:
        communicator, axis = communicator_of("m/tp")
        x = torch.tensor([float(index)])
        rows = torch.arange(3.0) + 10 * index
        return (
            communicator.all_gather(x, axis)().flatten().tolist(),
            communicator_of("m/dp")[0].all_gather(x, "dp")().flatten().tolist(),
            float(communicator.reduce_scatter(rows.view(3, 1), axis)()),
            communicator.all_to_all(rows, axis)().tolist(),
            [float(all_reduce(x, "sum", "m/dp+tp")), float(all_reduce(x, "max", "m/dp"))],
        )

    found = simulate(rank, MESH, NAMES)
    assert found[4] == ([3.0, 4.0, 5.0], [1.0, 4.0], 30.0 + 40.0 + 50.0 + 3.0, [31.0, 41.0, 51.0], [15.0, 4.0])


def test_backward_runs_in_the_rank_that_calls_it() -> None:
    def rank(index: int) -> Tensor:
        x = torch.ones(2, requires_grad=True)
        (x * index).sum().backward()
        assert x.grad is not None
        return x.grad

    assert [g.tolist() for g in simulate(rank, (3,), ("tp",))] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


def test_the_first_error_of_a_rank_reaches_the_caller() -> None:
    def rank(index: int) -> Tensor:
        if index == 1:
            raise KeyError("rank one")
        return all_reduce(torch.ones(1), "sum", "m/tp")

    with pytest.raises(KeyError, match="rank one"):
        simulate(rank, (3,), ("tp",))


def test_a_rank_that_does_not_come_is_an_error() -> None:
    def rank(index: int) -> Tensor:
        return torch.ones(1) if index == 1 else all_reduce(torch.ones(1), "sum", "m/tp")

    with pytest.raises(RuntimeError, match="did not come"):
        simulate(rank, (3,), ("tp",))


@pytest.mark.parametrize("other", ["op", "shape", "axis", "dtype"])
def test_ranks_that_meet_in_different_collectives_are_an_error(other: str) -> None:
    def rank(index: int) -> Tensor:
        odd = index == 1
        x = torch.ones(2 if odd and other == "shape" else 1, dtype=torch.int64 if odd and other == "dtype" else None)
        group = "m/dp" if odd and other == "axis" else "m/tp"
        return all_reduce(x, "max" if odd and other == "op" else "sum", group)

    with pytest.raises(RuntimeError, match="different collectives"):
        simulate(rank, MESH, NAMES)
