"""Hardware profiles: links by how an axis lies over nodes, and files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from autoparallel import hardware
from autoparallel.hardware import CPU, H100, PROFILES, Link, Profile, profile_for, profile_of_device
from autoparallel.placements import sent_bytes
from autoparallel.tools.calibration import calibrate
from tests.distributed import run_distributed


@pytest.mark.parametrize(
    ("sizes", "axes", "nodes"),
    [
        ((8,), (0,), 1),
        ((64,), (0,), 8),
        ((8, 8), (1,), 1),  # the last axis lies inside a node
        ((8, 8), (0,), 8),
        ((4, 4), (1,), 1),
        ((4, 4), (0,), 2),  # two rows of four in each node
        ((2, 8, 8), (0, 1), 16),
        ((2, 4, 8), (0, 2), 2),
        ((16, 4), (0, 1), 8),
        ((3, 3), (0, 1), 2),
    ],
)
def test_ranks_fill_the_nodes_in_order(sizes: tuple[int, ...], axes: tuple[int, ...], nodes: int) -> None:
    assert H100.nodes_of(sizes, axes) == nodes
    assert CPU.nodes_of(sizes, axes) == 1, "a machine that is one node"


def test_links_inside_and_across() -> None:
    def bandwidth(sizes: tuple[int, ...], kind: str, axes: tuple[int, ...]) -> float:
        size = 1 << 34
        seconds = H100.step_seconds(sizes, kind, axes, size) - H100.step_seconds(sizes, kind, axes, 0)
        return sent_bytes(kind, size, int(torch.Size(sizes[a] for a in axes).numel())) / seconds

    assert bandwidth((8, 8), "all_gather", (1,)) == pytest.approx(H100.bandwidth)
    # One rank in each node has its own adapter; eight share theirs, up to what the links inside let through.
    assert bandwidth((8, 8), "all_gather", (0,)) == pytest.approx(H100.network_bandwidth)
    assert bandwidth((64,), "all_gather", (0,)) == pytest.approx(min(H100.bandwidth, 8 * H100.network_bandwidth))
    assert bandwidth((64,), "all_to_all", (0,)) == pytest.approx(H100.network_bandwidth * 8 / 7)
    latency = [H100.step_seconds((n,), "all_gather", (0,), 0) for n in (8, 64, 512)]
    trees = [H100.step_seconds((n,), "all_reduce", (0,), 0) for n in (8, 64, 512)]
    assert latency[0] < latency[1] < latency[2] and trees[2] < latency[2] / 3, "trees are shallow"


def test_what_was_measured_is_used() -> None:
    links = (Link("all_reduce", 2, 1, 1e-3, 1e9), Link("all_reduce", 8, 1, 2e-3, 5e8), Link("all_reduce", 16, 2, 1, 1))
    measured = dataclasses.replace(CPU, links=links, node=8)
    assert measured.step_seconds((2,), "all_reduce", (0,), 0) == 1e-3
    assert measured.step_seconds((8,), "all_reduce", (0,), 0) == 2e-3
    assert measured.step_seconds((6,), "all_reduce", (0,), 0) == 2e-3, "the nearest size"
    assert measured.step_seconds((64,), "all_reduce", (0,), 0) == 1, "across nodes"
    assert measured.step_seconds((2,), "all_gather", (0,), 0) == CPU.latency, "of a kind that was not measured"


def test_no_gather_is_dearer_than_reducing_a_whole_in_its_place() -> None:
    noisy = dataclasses.replace(CPU, links=(Link("all_reduce", 4, 1, 1e-3, 1e9), Link("all_gather", 4, 1, 2e-3, 1e8)))
    gather, reduce = (noisy.step_seconds((4,), kind, (0,), 1 << 20) for kind in ("all_gather", "all_reduce"))
    assert gather == pytest.approx(reduce + 1e-3), "its bytes are; its latency is its own"


def test_files(tmp_path: Path) -> None:
    for profile in PROFILES.values():
        profile.save(tmp_path / "p.json")
        assert Profile.load(tmp_path / "p.json") == profile == profile_for("cpu", tmp_path / "p.json")
    assert profile_for("cpu") is CPU and profile_for("cpu", "h100") is H100
    with pytest.raises(ValueError, match="unknown hardware 'abacus': expected one of a100"):
        profile_for("cpu", "abacus")
    good = json.loads(CPU.to_json())
    for change in ({"format": 9}, {"flops": {"float99": 1}}, {"bandwidth": 0}, {"wheels": 4}, {"links": [3]}):
        with pytest.raises(ValueError, match="not a hardware profile"):
            Profile.from_json(json.dumps({**good, **change}))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GH200 480GB", "h100, assumed for NVIDIA GH200 480GB"),
        ("", "h100, assumed for xpu"),
    ],
)
def test_a_device_is_planned_for_by_its_name(device: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    hardware._assume_h100.cache_clear()
    with caplog.at_level("WARNING", logger="autoparallel"):
        profiles = [profile_of_device("xpu", device) for _ in range(2)]
    assert [p.name for p in profiles] == [name, name]
    assert dataclasses.replace(profiles[0], name="h100") == H100 or name in PROFILES
    assert [r.levelname for r in caplog.records] == ["WARNING"] * (name not in PROFILES), "said once"


def _measure() -> str:
    from torch.distributed.device_mesh import init_device_mesh

    return calibrate(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), "here").to_json()


@pytest.mark.wide
def test_calibration_measures_every_kind_and_all_ranks_agree() -> None:
    texts = run_distributed(_measure, world_size=2)
    assert texts[0] == texts[1]
    profile = Profile.from_json(texts[0])
    assert {link.kind for link in profile.links} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert all(link.ranks == 2 and link.latency > 0 for link in profile.links)
    assert {torch.float32, torch.float64, torch.bfloat16} <= set(profile.flops)
    assert 0 < profile.launch < 1 and 0 <= profile.overlap <= 1 and profile.attention > 0
