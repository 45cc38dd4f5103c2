"""What would go wrong on GPUs alone, through stand-ins for what only they have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoparallel._torch.export import computing_on, make_fake_mode
from autoparallel.comm.groups import bind, communicator_of
from autoparallel.comm.world import elsewhere, from_host
from autoparallel.runtime.parameters.state import require_on_device
from benchmarks import gpu_parity
from tests.distributed import run_distributed
from tests.parity.harness import Recipe

ROOT = Path(__file__).parents[1]


class _OnDevice(Tensor):
    """A tensor that says it is on a device, and gives its values to the host only when it is asked to."""

    is_cpu = False  # type: ignore[assignment]
    device = torch.device("cuda", 1)  # type: ignore[assignment]

    def cpu(self, memory_format: Any = torch.preserve_format) -> Tensor:
        return self.as_subclass(Tensor).clone()


class _Mesh:
    device_type = "cuda"


def _messages() -> tuple[list[float], bool]:
    """What arrives of a message between devices over gloo, and whether gloo was given host memory alone."""
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), dist.get_rank()
    communicator, axis = communicator_of(f"{bind(mesh)}/pp")
    given: list[Tensor] = []

    def noted(start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(x: Tensor, *arguments: Any) -> Any:
            given.append(x)
            return start(x, *arguments)

        return begin

    send, receive = dist.isend, dist.irecv
    dist.isend, dist.irecv = noted(send), noted(receive)
    try:
        mine = torch.full((3,), rank + 1.0).as_subclass(_OnDevice)
        out = torch.zeros(3).as_subclass(_OnDevice)
        waits = [communicator.send(mine, axis, 1 - rank), communicator.receive(out, axis, 1 - rank)]
        for wait in waits:
            wait()
    finally:
        dist.isend, dist.irecv = send, receive
    return out.as_subclass(Tensor).tolist(), not any(x is mine or x is out for x in given)


def test_gloo_is_given_host_memory_between_stages() -> None:
    for rank, (arrived, on_host) in enumerate(run_distributed(_messages, world_size=2)):
        assert arrived == [2.0 - rank] * 3 and on_host


def test_what_is_on_another_device_of_the_kind_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    mesh: Any = _Mesh()
    x = torch.zeros(3).as_subclass(_OnDevice)
    assert "is on cuda:1, this process computes on cuda:0: call torch.cuda.set_device(1)" in str(elsewhere(x, mesh))
    model = nn.Module()
    model.register_buffer("table", x)
    with pytest.raises(ValueError, match="table is on cuda:1, this process computes on cuda:0"):
        require_on_device(model, mesh)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert elsewhere(x, mesh) is None


def test_inputs_are_moved_from_the_host_to_the_device() -> None:
    mesh: Any = type("OnMeta", (), {"device_type": "meta"})
    x = torch.zeros(3, requires_grad=True)
    moved = from_host(x, mesh)
    assert moved.is_meta and moved.requires_grad and from_host(moved, mesh) is moved
    mesh.device_type = "cpu"
    assert from_host(x, mesh) is x


def test_what_is_traced_on_a_device_may_meet_what_is_made_on_the_cpu() -> None:
    with make_fake_mode(), torch.no_grad():
        on_device, made = torch.empty(2, 3, device="cuda"), torch.ones(2, 3)
        with pytest.raises(RuntimeError, match=r"same device|found at least two devices|two different devices"):
            on_device + made
        with computing_on("cuda"):
            assert (made + on_device).device.type == (on_device * made).device.type == "cuda"


@pytest.mark.wide
def test_processes_that_are_forked_after_an_import_may_use_cuda() -> None:
    code = (
        "import torch\n"
        "torch.backends.cuda.is_built = lambda: True\n"
        "def poisons(): raise AssertionError('no forked process can use CUDA any more')\n"
        "torch.cuda.is_available = poisons\n"
        "import autoparallel\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.wide
def test_without_a_gpu_the_benchmark_says_so(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "benchmarks/gpu.sh", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, env=environment)
    assert ran.returncode == 1 and "sees no GPU here" in ran.stderr and "--device cpu" in ran.stderr


def test_parity_on_a_gpu_tries_every_recipe_and_fails_where_one_does(monkeypatch: Any, capsys: Any) -> None:
    tried: list[Recipe] = []

    def check(recipe: Recipe) -> None:
        tried.append(recipe)
        assert recipe.mesh != (2,), "off by 1"

    monkeypatch.setattr(gpu_parity, "check", check)
    assert gpu_parity.count_failures(gpu_parity.RECIPES[:3]) == 2
    assert tried == [*gpu_parity.RECIPES[:3]] and capsys.readouterr().out.count("AssertionError: off by 1") == 2
    assert gpu_parity.count_failures(gpu_parity.RECIPES[:1]) == 0
