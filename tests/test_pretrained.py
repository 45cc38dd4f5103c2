"""Pretrained models: out to the files of ``transformers`` and in again, bit-equal, and nothing that is not whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel._torch.dtensor import local_of
from tests.models.pretrained import GPT2, build_gpt2, build_llama, build_mixtral
from tests.runtime.support import make, raised, run_on_ranks, weights
from tests.test_checkpoints import Tower, batch

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], str]] = {
    "fsdp": ((2,), ("dp",), "fsdp"),
    "tensor_parallel": ((1, 2), ("dp", "tp"), "tensor_parallel"),
    "pipeline": ((2, 1), ("pp", "dp"), "auto"),
    "hybrid": ((2, 2), ("dp", "tp"), "auto"),
}
MODELS = {"llama": build_llama, "gpt2": build_gpt2, "mixtral": build_mixtral}


def _model(name: str, mesh: str, seed: int) -> Any:
    """A compiled model, planned; the batch that it was planned for."""
    shape, axes, plan = MESHES[mesh]
    case = make(lambda: _Holder(MODELS[name](torch.float32)), torch.float32, seed).case
    args, kwargs = case.make_batch(0, 8)
    if mesh in ("pipeline", "hybrid"):
        kwargs.pop("output_router_logits", None)  # the balance of experts is no mean over microbatches
    options: Any = {"plan": plan}
    model = autoparallel.compile(case.model, init_device_mesh("cpu", shape, mesh_dim_names=axes), **options)
    model.prepare(*args, **kwargs)
    return model, (args, kwargs)


class _Holder(nn.Module):
    def __init__(self, case: Any) -> None:
        super().__init__()
        self.case = case


def _out_and_in(name: str, mesh: str, path: str, other: str) -> dict[str, Tensor]:
    """Trains, exports, loads what a plain process saved, and what was exported: the parameters each time."""
    model, (args, kwargs) = _model(name, mesh, seed=1)
    model(*args, **kwargs).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            local = local_of(parameter)
            if parameter.grad is not None and local.numel():
                local.sub_(local_of(parameter.grad), alpha=0.1)
    model.save_pretrained(path, max_shard_size="20KB")
    exported = weights(model)
    model.load_hf(other)
    loaded = weights(model)
    model.load_hf(path)
    assert all(torch.equal(x, exported[n]) for n, x in weights(model).items())
    return {**{f"out/{n}": x for n, x in exported.items()}, **{f"in/{n}": x for n, x in loaded.items()}}


@pytest.mark.wide
@pytest.mark.slow_where(lambda name, mesh: (name == "llama") == (mesh == "hybrid"))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_round_trips_with_a_plain_process(name: str, mesh: str, tmp_path: Path) -> None:
    plain: Any = make(lambda: _Holder(MODELS[name](torch.float32)), torch.float32, 2).case.model
    plain.save_pretrained(tmp_path / "plain", max_shard_size="30KB")
    size = torch.Size(MESHES[mesh][0]).numel()
    ranks = run_on_ranks(_out_and_in, name, mesh, str(tmp_path / "out"), str(tmp_path / "plain"), world_size=size)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert not list((tmp_path / "out").glob("*.part"))
    again = type(plain).from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert again.config.architectures == [type(plain).__name__]
    for kind, reference in (("out", again), ("in", plain)):
        expected = dict(reference.named_parameters())
        for result in ranks:
            own = {n.removeprefix(f"{kind}/"): x for n, x in result.items() if n.startswith(f"{kind}/")}
            assert own.keys() == expected.keys()
            assert not [n for n, x in own.items() if not torch.equal(x, expected[n])], kind
    different = dict(again.named_parameters())
    assert any(not torch.equal(x, different[n]) for n, x in plain.named_parameters())


def test_names_and_blocks_are_those_of_transformers(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for build in (build_gpt2, build_mixtral):
        plain: Any = make(lambda build=build: _Holder(build(torch.float32)), torch.float32, 3).case.model
        plain.save_pretrained(tmp_path / "theirs")
        expected = load_file(tmp_path / "theirs" / "model.safetensors")
        model = autoparallel.compile(plain)
        model.export_hf(tmp_path / "ours")
        actual = load_file(tmp_path / "ours" / "model.safetensors")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], x) for name, x in expected.items())
        theirs, ours = (json.loads((tmp_path / who / "config.json").read_text()) for who in ("theirs", "ours"))
        assert ours == theirs


# -------------------------------------------------------------------------------- any module, and what can go wrong


def _tower(seed: int, *shape: int) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    plan: Any = "fsdp" if len(shape) == 1 else "tensor_parallel"
    tower = make(lambda: Tower(False), torch.float64, seed)
    return autoparallel.compile(tower, mesh, plan=plan, loss_fn=F.cross_entropy, example_inputs=batch(0))


def _export_tower(path: str, *shape: int) -> dict[str, Tensor]:
    model = _tower(4, *shape)
    model.export_hf(path, max_shard_size=500)
    other = _tower(5, *shape)
    other.load_hf(path)
    assert torch.equal(other.norm.running_var, model.norm.running_var)
    assert all(torch.equal(x, y) for x, y in zip(weights(model).values(), weights(other).values(), strict=True))
    return weights(model)


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.wide)], ids=str)
def test_any_module(shape: tuple[int, ...], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ranks = run_on_ranks(_export_tower, str(tmp_path), *shape, world_size=torch.Size(shape).numel())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: load_file(tmp_path / file) for file in {*index.values()}}
    plain = make(lambda: Tower(False), torch.float64, 4)
    expected = plain.state_dict()
    assert index.keys() == expected.keys() - {"head.weight"}, "tied: once"
    assert all(torch.equal(files[file][name], expected[name]) for name, file in index.items())
    for result in ranks:
        assert all(torch.equal(x, expected[name]) for name, x in result.items())


def _messages(*paths: str) -> list[str]:
    model = _tower(6, 2)
    before = weights(model)
    messages = [raised(lambda path=path: model.load_hf(path)) for path in paths]
    assert all(torch.equal(x, before[name]) for name, x in weights(model).items())
    return messages


def _truncated(path: Path) -> None:
    file = path / "model-00002-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _missing(path: Path) -> None:
    (path / "model-00002-of-00004.safetensors").unlink()


def _swapped(path: Path) -> None:
    shutil.copy(path / "model-00003-of-00004.safetensors", path / "model-00002-of-00004.safetensors")


def _unknown(path: Path) -> None:
    from safetensors.torch import save_file

    file = path / "model-00002-of-00004.safetensors"
    save_file({"strange.weight": torch.zeros(2)}, file)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    weights = {n: f for n, f in index["weight_map"].items() if f != file.name}
    text = json.dumps({**index, "weight_map": {**weights, "strange.weight": file.name}})
    (path / "model.safetensors.index.json").write_text(text)


def _reshaped(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = path / "model-00002-of-00004.safetensors"
    save_file({name: torch.cat([x, x]) for name, x in load_file(file).items()}, file)


def _damaged_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("{")


def _without_index(path: Path) -> None:
    (path / "model.safetensors.index.json").unlink()


FAULTS: dict[Callable[[Path], None], str] = {
    _truncated: "model-00002-of-00004.safetensors is damaged",
    _missing: "model-00002-of-00004.safetensors is missing",
    _swapped: "model-00002-of-00004.safetensors holds no",
    _unknown: "model-00002-of-00004.safetensors holds strange.weight, which Tower has not",
    _reshaped: "model-00002-of-00004.safetensors: ",
    _damaged_index: "model.safetensors.index.json is damaged",
    _without_index: "holds no model: neither model.safetensors nor model.safetensors.index.json",
}


def test_what_is_not_whole_is_not_loaded(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    _model_files(tmp_path / "right")
    for fault in FAULTS:
        _model_files(tmp_path / fault.__name__)
        fault(tmp_path / fault.__name__)
    save_file({"table.weight": torch.zeros(13, 8)}, tmp_path / "model.safetensors")
    paths = [str(tmp_path / fault.__name__) for fault in FAULTS] + [str(tmp_path)]
    ranks = run_on_ranks(_messages, *paths, world_size=2)
    for messages in ranks:
        for message, expected in zip(messages, [*FAULTS.values(), "holds no "], strict=True):
            assert expected in message and message.split(":")[0] in ("CheckpointError", "RankMismatchError")
            assert str(tmp_path) in message


def _model_files(path: Path) -> None:
    model = autoparallel.compile(make(lambda: Tower(False), torch.float64, 4))
    model.export_hf(path, max_shard_size=200)
    assert len(list(path.glob("model-*-of-00004.safetensors"))) == 4


def test_an_export_takes_the_place_of_another(tmp_path: Path) -> None:
    _model_files(tmp_path)
    model = autoparallel.compile(make(lambda: Tower(False), torch.float64, 7))
    model.export_hf(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="nothing can be saved to"):
        model.export_hf(tmp_path / "file")


def test_files_of_the_base_alone_and_with_its_prefix(tmp_path: Path) -> None:
    """As those of gpt2, whose tensors have no "transformer." before them."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    torch.manual_seed(8)
    base = GPT2Model(GPT2Config(**GPT2))
    base.save_pretrained(tmp_path)
    model = autoparallel.compile(GPT2LMHeadModel(GPT2Config(**GPT2)))
    model.load_hf(tmp_path)
    expected = base.state_dict()
    own = {n.removeprefix("transformer."): x.full_tensor() for n, x in model.named_parameters()}  # type: ignore[attr-defined]
    assert own.keys() == expected.keys() and all(torch.equal(x, expected[n]) for n, x in own.items())
