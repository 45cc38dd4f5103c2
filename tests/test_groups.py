"""Bound meshes, and process groups that are destroyed and made anew."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoparallel
from autoparallel import _torch
from autoparallel.comm.groups import axis_of_group, bind, communicator_of, inner_mesh, with_data_axis
from autoparallel.decisions.parameters import PlanError
from autoparallel.runtime.ranks.agreement import agreement_of
from tests.distributed import open_pool, run_distributed, run_in
from tests.runtime.support import SideBySide, batch, make


def _start() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def _restarted() -> dict[str, bool]:
    dist.destroy_process_group()
    _start()
    old = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    expanded = with_data_axis(old)
    prefix = bind(expanded)
    name = expanded.get_group(0).group_name
    found = {"named": axis_of_group(name) is not None}
    dist.destroy_process_group()
    found["forgotten"] = axis_of_group(name) is None
    _start()
    new = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    found["equal"] = new == old
    found["no stale name"] = axis_of_group(new.get_group(0).group_name) is None
    again = with_data_axis(new)
    found["open"] = all(map(_torch.distributed.is_open, again.get_all_groups()))
    communicator, axis = communicator_of(f"{bind(again)}/pp+dp")
    found["bound anew"] = communicator.is_open and prefix == bind(again)  # type: ignore[attr-defined]
    found["talks"] = communicator.size(axis) == 1
    return found


def test_a_new_start_does_not_meet_destroyed_groups() -> None:
    pool = open_pool(1)  # of its own, as it leaves its process group
    try:
        (found,) = run_in(pool, _restarted)
    finally:
        pool.close()
    assert all(found.values()), found


LAYOUT = [[0, 2], [1, 3]]


def _collectives_by_place() -> dict[str, object]:
    """What the group over both axes of a mesh does, whose ranks do not lie in their order."""
    mesh = DeviceMesh("cpu", torch.tensor(LAYOUT), mesh_dim_names=("dp", "tp"))
    communicator, axis = communicator_of(f"{bind(mesh)}/dp+tp")
    place = communicator.index(axis)
    rows = torch.arange(4).short() + 10 * place  # to place i goes row i; gloo has no numbers of this kind
    counts = [i + place + 1 for i in range(4)]
    sent = torch.cat([torch.full((n,), 10 * place + i) for i, n in enumerate(counts)])
    others = [f"rank {rank} said {word}" for rank, word in enumerate(_said(mesh))]
    return {
        "place": (communicator.ranks(axis).index(dist.get_rank()), place),
        "all_gather": communicator.all_gather(rows.new_tensor([place]), axis)().flatten().tolist(),
        "reduce_scatter": communicator.reduce_scatter(rows, axis)().item(),
        "all_to_all": communicator.all_to_all(rows, axis)().tolist(),
        "all_to_all_rows": communicator.all_to_all_rows(sent, counts, counts, axis).tolist(),
        "agreement": others,
    }


def _said(mesh: DeviceMesh) -> list[str]:
    """What each rank has said, in the order of the agreement's ranks."""
    agreement = agreement_of(mesh)
    said = dict(zip(agreement.ranks, agreement.gather(str(dist.get_rank())), strict=True))
    shared = agreement.share(lambda item: item * 10, [0, 1, 2, 3, 4, 5])
    assert shared == [0, 10, 20, 30, 40, 50]
    return [said[rank] for rank in range(4)]


def test_places_on_several_axes_are_those_of_the_mesh() -> None:
    for rank, found in enumerate(run_distributed(_collectives_by_place, world_size=4)):
        place = (LAYOUT[0] + LAYOUT[1]).index(rank)
        rows = [10 * other + place for other in range(4) for _ in range(place + other + 1)]
        assert found == {
            "place": (place, place),
            "all_gather": [0, 1, 2, 3],
            "reduce_scatter": 60 + 4 * place,
            "all_to_all": [10 * other + place for other in range(4)],
            "all_to_all_rows": rows,
            "agreement": [f"rank {one} said {one}" for one in range(4)],
        }


def _told(raised: dict[int, Exception]) -> str:
    """What a rank hears of what some ranks raise."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    agreement = agreement_of(mesh)
    assert agreement.of_first(f"rank {dist.get_rank()}") == "rank 0"
    try:
        with agreement.together():
            if dist.get_rank() in raised:
                raise raised[dist.get_rank()]
    except Exception as error:  # noqa: BLE001 - compared by the test
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_a_rank_raises_is_raised_on_all() -> None:
    for raised, told in (
        ({}, ["nothing", "nothing"]),
        ({0: ValueError("full")}, ["ValueError: full", "RankMismatchError: rank 0 failed: full"]),
        ({1: PlanError("no plan")}, ["PlanError: rank 1 failed: no plan", "PlanError: no plan"]),
        ({0: ValueError("full"), 1: TypeError("odd")}, ["ValueError: full", "TypeError: odd"]),
    ):
        assert run_distributed(_told, raised, world_size=2) == told


def _steps_on(layout: list[list[int]], plan: str) -> float | str:
    mesh = DeviceMesh("cpu", torch.tensor(layout), mesh_dim_names=("dp", "tp"))
    model = make()
    plain = copy.deepcopy(model)
    try:
        compiled = autoparallel.compile(model, mesh, plan=plan, loss_fn=F.mse_loss)
    except ValueError as error:
        return str(error)
    both = SideBySide(compiled, plain)
    for step in range(2):
        x, y = batch(step)
        both.backward(compiled(x, y), F.mse_loss(plain(x), y))
        both.step()
    return both.worst


def test_a_mesh_whose_axes_take_turns_is_right_and_one_that_runs_backwards_is_refused() -> None:
    for plan in ("fsdp", "tensor_parallel"):
        assert all(off < 1e-9 for off in run_distributed(_steps_on, LAYOUT, plan, world_size=4))
    refused = run_distributed(_steps_on, [[0, 1], [3, 2]], "fsdp", world_size=4)
    assert all("'tp' do not increase" in words and "What to change" in words for words in refused)


def _with_a_teacher_on_one_rank() -> float:
    alone = DeviceMesh("cpu", [0], mesh_dim_names=("dp",))  # made by all ranks
    if dist.get_rank() == 0:
        autoparallel.compile(make(seed=1), alone)(batch()[0])
    return _steps_on([[0, 1]], "fsdp")  # type: ignore[return-value]


def test_ranks_of_a_mesh_may_have_bound_different_meshes_before() -> None:
    assert all(off < 1e-9 for off in run_distributed(_with_a_teacher_on_one_rank, world_size=2))


def _name_of_a_stage() -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    return bind(inner_mesh(mesh, "pp"), mesh)


def test_the_meshes_of_stages_have_one_name() -> None:
    one, other = run_distributed(_name_of_a_stage, world_size=2)
    assert one == other
