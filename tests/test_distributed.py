"""The pool that other tests stand on: results, errors, deaths, time-outs, retirement."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import WorkerError, WorkerPool, run_distributed


def sum_of_ranks(offset: int, scale: int = 1) -> torch.Tensor:
    value = torch.tensor(float(dist.get_rank() + offset) * scale)
    dist.all_reduce(value)
    return value


def mesh_coordinate() -> tuple[int, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return tuple(coordinate)


def raise_on(rank: int | None) -> str:
    if rank is None or dist.get_rank() == rank:
        raise ValueError(f"wrong on {dist.get_rank()}")
    return "fine"


def wait_for_rank_zero() -> None:
    if dist.get_rank() == 0:
        raise ValueError("rank 0 never arrives")
    dist.barrier()


def abort_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def not_picklable() -> object:
    return lambda: None


def environment() -> tuple[int, int, str, int]:
    return os.getpid(), torch.get_num_threads(), os.environ["RANK"], torch.initial_seed()


def loaded_modules() -> set[str]:
    return {name for name in ("transformers", "sklearn", "matplotlib") if name in sys.modules}


class TestResults:
    def test_each_rank_returns_its_own(self) -> None:
        results = run_distributed(sum_of_ranks, 10, scale=2, world_size=2)
        assert [r.item() for r in results] == [42.0, 42.0]

    def test_four_ranks_make_a_mesh(self) -> None:
        assert run_distributed(mesh_coordinate, world_size=4) == [(0, 0), (0, 1), (1, 0), (1, 1)]

    def test_processes_are_reused_and_have_one_thread(self) -> None:
        first = run_distributed(environment, world_size=2)
        second = run_distributed(environment, world_size=2)
        assert first == second
        assert [threads for _, threads, _, _ in first] == [1, 1]
        assert [rank for _, _, rank, _ in first] == ["0", "1"]

    def test_heavy_modules_are_not_imported(self) -> None:
        pool = WorkerPool(1)
        assert pool.run(loaded_modules) == [set()]
        pool.close()


class TestErrors:
    def test_message_names_every_rank_that_raised(self) -> None:
        with pytest.raises(WorkerError) as caught:
            run_distributed(raise_on, None, world_size=2, keep_after_error=True)
        assert set(caught.value.errors) == {0, 1}
        text = str(caught.value)
        assert "rank 0: ValueError: wrong on 0" in text
        assert "rank 1: ValueError: wrong on 1" in text
        assert "in raise_on" in text

    def test_pool_survives_when_asked(self) -> None:
        before = run_distributed(environment, world_size=2)
        with pytest.raises(WorkerError):
            run_distributed(raise_on, None, world_size=2, keep_after_error=True)
        assert run_distributed(environment, world_size=2) == before

    def test_one_rank_raises_while_the_others_wait(self) -> None:
        start = time.monotonic()
        with pytest.raises(WorkerError, match="rank 0 never arrives"):
            run_distributed(wait_for_rank_zero, world_size=2)
        assert time.monotonic() - start < 40
        assert run_distributed(sum_of_ranks, 0, world_size=2)[0].item() == 1.0

    def test_abort_is_reported_and_the_next_call_works(self) -> None:
        with pytest.raises(WorkerError, match="SIGABRT"):
            run_distributed(abort_on, 1, world_size=2)
        assert run_distributed(sum_of_ranks, 0, world_size=2)[0].item() == 1.0

    def test_time_out_tells_where_it_hangs(self) -> None:
        with pytest.raises(WorkerError, match="no answer within 2 s") as caught:
            run_distributed(hang_on, 1, world_size=2, timeout=2)
        assert set(caught.value.errors) == {1}
        assert "hang_on" in caught.value.errors[1].traceback
        assert run_distributed(sum_of_ranks, 0, world_size=2)[0].item() == 1.0

    def test_a_result_that_cannot_travel_is_an_error(self) -> None:
        with pytest.raises(WorkerError, match="pickle"):
            run_distributed(not_picklable, world_size=2, keep_after_error=True)


class TestRetirement:
    def test_pool_ends_after_its_calls(self) -> None:
        pool = WorkerPool(1, calls_per_pool=2)
        pool.run(sum_of_ranks, 0)
        assert pool.usable
        pool.run(sum_of_ranks, 0)
        assert not pool.usable
        with pytest.raises(RuntimeError, match="has ended"):
            pool.run(sum_of_ranks, 0)
        pool.close()

    def test_close_leaves_no_process(self) -> None:
        pool = WorkerPool(2)
        pids = pool.pids
        pool.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
