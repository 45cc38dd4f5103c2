"""The pools that other tests stand on: results, errors, deaths, time-outs, retirement."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoparallel.tools.processes import ProcessError
from tests import distributed
from tests.distributed import failures_of, open_pool, run_distributed, run_in


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


def fault_in_a_thread(folder: str, times: int) -> str:
    """A thread that is none of Python's reads from address 0, as often."""
    call = len(os.listdir(folder))
    Path(folder, str(call)).touch()
    if call < times:
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, libc.strlen, None)
        time.sleep(60)
    return "made"


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def not_picklable() -> object:
    return lambda: None


def environment() -> tuple[int, int, int, int]:
    return os.getpid(), torch.get_num_threads(), dist.get_rank(), torch.initial_seed()


def loaded_modules() -> set[str]:
    return {name for name in ("transformers", "sklearn", "matplotlib") if name in sys.modules}


class TestResults:
    def test_each_rank_returns_its_own(self) -> None:
        results = run_distributed(sum_of_ranks, 10, scale=2, world_size=2)
        assert [r.item() for r in results] == [42.0, 42.0]

    def test_four_ranks_make_a_mesh(self) -> None:
        assert run_distributed(mesh_coordinate, world_size=4) == [(0, 0), (0, 1), (1, 0), (1, 1)]

    def test_processes_are_reused_and_have_one_thread(self) -> None:
        with open_pool(2) as pool:  # one of its own: the shared one may be due for its retirement between two calls
            first, second = run_in(pool, environment), run_in(pool, environment)
        assert first == second
        assert [threads for _, threads, _, _ in first] == [1, 1]
        assert [rank for _, _, rank, _ in first] == [0, 1]

    def test_heavy_modules_are_not_imported(self) -> None:
        with open_pool(1) as pool:
            assert run_in(pool, loaded_modules) == [set()]


class TestErrors:
    def test_every_rank_that_raised_is_named(self) -> None:
        with pytest.raises(ProcessError, match=r"rank 0 failed: ValueError: wrong on 0") as caught:
            run_distributed(raise_on, None, world_size=2, keep_after_error=True)
        assert {rank: failure.message for rank, failure in failures_of(caught.value).items()} == {
            0: "wrong on 0",
            1: "wrong on 1",
        }
        assert "(so did rank 1)" in str(caught.value) and "in raise_on" in str(caught.value)

    def test_pool_survives_when_asked(self) -> None:
        with open_pool(2) as pool:  # of its own: the shared one is made anew every so many calls
            before = run_in(pool, environment)
            with pytest.raises(ProcessError):
                run_in(pool, raise_on, None, keep_after_error=True)
            assert run_in(pool, environment) == before

    def test_one_rank_raises_while_the_others_wait(self) -> None:
        start = time.monotonic()
        with pytest.raises(ProcessError, match="rank 0 never arrives"):
            run_distributed(wait_for_rank_zero, world_size=2)
        assert time.monotonic() - start < 40
        assert run_distributed(sum_of_ranks, 0, world_size=2)[0].item() == 1.0

    @pytest.mark.filterwarnings("ignore:a worker died")
    def test_abort_is_reported_and_the_next_call_works(self) -> None:
        with pytest.raises(ProcessError, match="SIGABRT"):
            run_distributed(abort_on, 1, world_size=2)
        assert run_distributed(sum_of_ranks, 0, world_size=2)[0].item() == 1.0

    @pytest.mark.skipif(sys.platform != "linux", reason="torch prints C++ stacks there alone")
    @pytest.mark.parametrize("faults", [1, 2])
    def test_a_fault_beside_python_is_shown_and_the_call_made_again(self, faults: int, tmp_path: Path) -> None:
        ends = pytest.raises(ProcessError, match=r"Died: .*SIGSEGV") if faults == 2 else contextlib.nullcontext()
        with pytest.warns(UserWarning, match=r"a worker died \(exit code -11\)") as caught, ends:
            assert run_distributed(fault_in_a_thread, str(tmp_path), faults, world_size=1) == ["made"]
        assert [str(x.message).count("Thread ") for x in caught if "a worker" in str(x.message)] == [1] * faults

    def test_time_out_tells_where_it_hangs(self) -> None:
        with pytest.raises(ProcessError, match="no answer within 2 s") as caught:
            run_distributed(hang_on, 1, world_size=2, timeout=2)
        (failure,) = caught.value.failures
        assert failure.label == "rank 1" and "hang_on" in failure.traceback
        assert run_distributed(sum_of_ranks, 0, world_size=2)[0].item() == 1.0

    def test_a_result_that_cannot_travel_is_an_error(self) -> None:
        with pytest.raises(ProcessError, match="pickle"):
            run_distributed(not_picklable, world_size=2, keep_after_error=True)


class TestRetirement:
    def test_a_pool_is_replaced_after_its_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run_distributed(sum_of_ranks, 0, world_size=1)
        before = run_distributed(environment, world_size=1)
        monkeypatch.setattr(distributed, "CALLS", distributed._calls[1] + 1)
        assert run_distributed(environment, world_size=1) == before
        assert run_distributed(environment, world_size=1) != before

    def test_a_pool_that_has_ended_says_so(self) -> None:
        pool = open_pool(1)
        assert pool.usable
        pool.close()
        assert not pool.usable
        with pytest.raises(RuntimeError, match="has ended"):
            run_in(pool, sum_of_ranks, 0)

    def test_close_leaves_no_process(self) -> None:
        pool = open_pool(2)
        pids = [process.pid for process in pool._processes]
        pool.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
