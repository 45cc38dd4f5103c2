"""Models as ``transformers`` keeps them: safetensors files, an index, a config.

Every rank writes its part to its place in the files, and reads its part out of them: nothing is gathered or sent.
Files get their names when all of them are there, the index and the config last.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel import _torch
from autoparallel.checkpoint.conversion import Stored, stored_tensors
from autoparallel.checkpoint.folder import CheckpointError, bytes_of, require_room
from autoparallel.checkpoint.saving import World
from autoparallel.checkpoint.writers import is_writer, layout_of
from autoparallel.placements.regions import Region, own_region, whole_region

WEIGHTS, INDEX = "model{suffix}.safetensors", "model.safetensors.index.json"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
"""What safetensors calls dtypes."""


def tensors_of(plain: nn.Module) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """What a model's files keep: each tensor once, by the name that ``from_pretrained`` ties others to, and its names.

    Raises:
        CheckpointError: for a state that is no tensor, and for what keeps adapters beside a model.
    """
    if hasattr(plain, "peft_config"):
        raise CheckpointError(
            "adapters are kept without their model: use 'with model.whole() as plain: plain.save_pretrained(path)', "
            "and load them before compile()"
        )
    saved = plain.state_dict().keys() - {*(getattr(plain, "_keys_to_ignore_on_save", None) or ())}
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in _torch.tensors.named_tensors(plain):
        if name in saved:
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(name)
    odd = saved - {name for same in names.values() for name in same}
    if odd:
        raise CheckpointError(f"{min(odd)} is no tensor, and safetensors files hold nothing else")
    tied = getattr(plain, "all_tied_weights_keys", None) or {}
    return {min(same, key=lambda n: n in tied): (tensors[i], tuple(same)) for i, same in names.items()}


# ------------------------------------------------------------------------------------------------------------------ out


@dataclass(frozen=True)
class _File:
    """A safetensors file that is being written.

    Attributes:
        path: its name in the end.
        header: its first bytes.
        size: of all of it.
        offsets: of the first byte of each tensor.
    """

    path: Path
    header: bytes
    size: int
    offsets: Mapping[str, int]

    @property
    def part(self) -> Path:
        """Its name until all of it is written."""
        return self.path.with_name(self.path.name + ".part")


def export(world: World, plain: nn.Module, path: Path, max_shard_size: int | str) -> None:
    """See ``ParallelModule.export_hf``."""
    ranks = world.ranks
    with ranks.together():
        stored, files, index = _laid_out(plain, path, max_shard_size)
    try:
        with ranks.together():
            if ranks.is_first:
                _begin(path, files)
        with ranks.together():
            _write(world, {n: t for n, (t, _) in tensors_of(plain).items()}, stored, files)
        with ranks.together():
            if ranks.is_first:
                _finish(plain, path, files, index)
    except BaseException:
        if ranks.is_first:
            with contextlib.suppress(OSError):
                for file in files:
                    file.part.unlink(missing_ok=True)
        raise


def _laid_out(
    plain: nn.Module, path: Path, max_shard_size: int | str
) -> tuple[dict[str, Stored], list[_File], str | None]:
    """The tensors, the files that they go to, and the text of the index, where there are several."""
    split_shards = _hub().split_state_dict_into_shards_factory
    stored = stored_tensors(plain, {name: tensor for name, (tensor, _) in tensors_of(plain).items()})
    split = split_shards(
        stored, get_storage_size=operator.attrgetter("nbytes"), filename_pattern=WEIGHTS, max_shard_size=max_shard_size
    )
    files = []
    for name, members in split.filename_to_tensors.items():
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        odd = next((tensor for tensor in members if stored[tensor].dtype not in DTYPES), None)
        if odd is not None:
            raise CheckpointError(f"{odd} is {stored[odd].dtype}, which safetensors files do not hold")
        for tensor in sorted(
            members, key=lambda n: -stored[n].dtype.itemsize
        ):  # so that each begins at a multiple of it
            shape, dtype = stored[tensor].shape, DTYPES[stored[tensor].dtype]
            entries[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + stored[tensor].nbytes)}
            end += stored[tensor].nbytes
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        offsets = {tensor: len(header) + entries[tensor]["data_offsets"][0] for tensor in members}
        files.append(_File(path / name, header, len(header) + end, offsets))
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    return stored, files, json.dumps(index, indent=2, sort_keys=True) if split.is_sharded else None


def _hub() -> Any:
    try:
        import huggingface_hub
        import safetensors  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"{error.name} is not installed: pip install 'torch-autoparallel[transformers]'"
        ) from error
    return huggingface_hub


def _begin(path: Path, files: list[_File]) -> None:
    """Makes the files, without the tensors."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        require_room(path, sum(file.size for file in files), "the model")
        for file in files:
            with file.part.open("wb") as opened:
                opened.write(file.header)
                opened.truncate(file.size)
    except OSError as error:
        raise CheckpointError(f"nothing can be saved to {path}: {error}") from error


def _write(world: World, tensors: Mapping[str, Tensor], stored: Mapping[str, Stored], files: list[_File]) -> None:
    """Writes this rank's part of every tensor, where it is the one of those with the same part to write it."""
    regions: dict[str, Region] = {}
    for name, tensor in tensors.items():
        layout, mesh = layout_of(tensor, world.mesh)
        region = own_region(tensor.shape, layout, mesh)
        if region is not None and is_writer(name, layout, mesh):
            regions[name] = region
    for file in files:
        if not file.part.is_file():
            raise CheckpointError(f"{file.part} is not seen by every rank: export to a folder that all of them share")
        try:
            with file.part.open("r+b", buffering=0) as opened:
                for name, offset in file.offsets.items():
                    for piece in stored[name].pieces:
                        blocks = piece.within(regions[piece.name]) if piece.name in regions else None
                        if blocks is not None:
                            local = _torch.dtensor.local_of(tensors[piece.name]).detach()
                            block = piece.as_stored(local[blocks[0].within(regions[piece.name])])
                            _write_block(opened.fileno(), offset, stored[name], blocks[1], block)
                os.fsync(opened.fileno())
        except OSError as error:
            raise CheckpointError(f"{file.part} could not be written: {error}") from error


def _write_block(descriptor: int, offset: int, stored: Stored, place: Region, block: Tensor) -> None:
    """Writes a block of a tensor: as many runs of bytes as it has in the file."""
    memory = bytes_of(block.to("cpu").contiguous())
    dims = len(stored.shape)
    while dims and place.shape[dims - 1] == stored.shape[dims - 1]:
        dims -= 1
    outer = max(dims - 1, 0)  # a run is a range of this dim, and all of those after it
    strides = [math.prod(stored.shape[dim + 1 :]) * stored.dtype.itemsize for dim in range(len(stored.shape))]
    run = math.prod(place.shape[outer:]) * stored.dtype.itemsize
    ranges = [range(first, first + size) for first, size in zip(place.start[:outer], place.shape[:outer], strict=True)]
    inside = place.start[outer] * strides[outer] if dims else 0
    for number, at in enumerate(itertools.product(*ranges)):
        begin = offset + inside + sum(i * stride for i, stride in zip(at, strides, strict=False))
        left = memory[number * run : (number + 1) * run]
        while left:
            written = os.pwrite(descriptor, left, begin)
            begin, left = begin + written, left[written:]


def _finish(plain: nn.Module, path: Path, files: list[_File], index: str | None) -> None:
    """Gives the files their names, in place of those of a save before, and says what they are of."""
    try:
        (path / INDEX).unlink(missing_ok=True)
        for old in path.glob("model*.safetensors"):
            if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name):
                old.unlink()
        for file in files:
            os.replace(file.part, file.path)
        if index is not None:
            (path / INDEX).write_text(index + "\n")
        _write_config(plain, path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be completed: {error}") from error


def _write_config(plain: Any, path: Path) -> None:
    """What ``from_pretrained`` needs beside the tensors; a module that is not of transformers has nothing of it."""
    if not hasattr(getattr(plain, "config", None), "save_pretrained"):
        return
    config = copy.deepcopy(plain.config)  # the model's own may be read by its forward
    config.architectures = [type(plain).__name__]
    config.dtype = str(plain.dtype).removeprefix("torch.")
    config.save_pretrained(path)
    if getattr(plain, "generation_config", None) is not None and plain.can_generate():
        plain.generation_config.save_pretrained(path)


# ------------------------------------------------------------------------------------------------------------------- in


def read(world: World, plain: nn.Module, path: Path) -> None:
    """See ``ParallelModule.load_hf``."""
    with contextlib.ExitStack() as opened:
        with world.ranks.together():
            reads = _reads(world, plain, path, opened)
        with world.ranks.together(), torch.no_grad():
            for take in reads:
                take()


def _reads(world: World, plain: nn.Module, path: Path, opened: contextlib.ExitStack) -> list[Callable[[], object]]:
    """What this rank has to read, after everything but the values has been compared."""
    stored_at = _open_folder(path, opened)
    tensors = {name: (tensor, names[0]) for tensor, names in tensors_of(plain).values() for name in names}
    stored = stored_tensors(plain, {name: tensor for name, (tensor, _) in tensors.items()})
    prefix = getattr(plain, "base_model_prefix", "")
    by_name = {_base_name(name, prefix, stored): (name, *where) for name, where in stored_at.items()}
    ignored = getattr(plain, "_keys_to_ignore_on_load_unexpected", None) or ()
    odd = sorted(n for n in by_name.keys() - stored.keys() if not any(re.search(pattern, n) for pattern in ignored))
    if odd:
        raise CheckpointError(f"{by_name[odd[0]][1]} holds {odd[0]}, which {type(plain).__name__} has not")
    reads: list[Callable[[], object]] = []
    blocks = {name: {(tensors[p.name][1], p.region) for p in entry.pieces} for name, entry in stored.items()}
    blocks_read: set[tuple[str, Region]] = set()  # a tied weight may be there under any of its names, or all
    for name, entry in stored.items():
        if name in by_name and blocks[name] - blocks_read:
            as_found, file, handle = by_name[name]
            shape = tuple(handle.get_slice(as_found).get_shape())
            if shape != entry.shape:
                raise CheckpointError(f"{file}: {as_found} is {list(shape)}, and the model's is {list(entry.shape)}")
            reads += _reads_of(world, entry, as_found, file, handle, tensors)
            blocks_read |= blocks[name]
    missing = [name for name in stored if blocks[name] - blocks_read]
    if missing:
        raise CheckpointError(f"{path} holds no {missing[0]}, which {type(plain).__name__} has")
    return reads


def _base_name(name: str, prefix: str, stored: Mapping[str, Stored]) -> str:
    """A name with, or without, the prefix of a model's base, where only the one or the other has a head."""
    others = (f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    return next((n for n in (name, *others) if n in stored), name)


def _open_folder(path: Path, opened: contextlib.ExitStack) -> dict[str, tuple[Path, Any]]:
    """The tensors in a folder: the file of each, and what reads it.

    Raises:
        CheckpointError: naming the file that is missing, or is not what an index or its own header says.
    """
    _hub()
    from safetensors import SafetensorError, safe_open

    index, alone = path / INDEX, path / WEIGHTS.format(suffix="")
    where: dict[str, str] | None = None
    if not alone.is_file() and index.is_file():  # in the order of from_pretrained
        try:
            where = dict(json.loads(index.read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} is damaged: {error}") from error
    elif not alone.is_file():
        raise CheckpointError(f"{path} holds no model: neither {alone.name} nor {index.name}")
    tensors: dict[str, tuple[Path, Any]] = {}
    for file in [alone] if where is None else sorted({path / name for name in where.values()}):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        try:
            handle = opened.enter_context(safe_open(file, "pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error
        tensors.update({name: (file, handle) for name in handle.keys()})  # noqa: SIM118 - it is no mapping
    if where is not None:
        for name, file_name in where.items():
            if name not in tensors or tensors[name][0].name != file_name:
                raise CheckpointError(f"{path / file_name} holds no {name}, which {index.name} says")
    return tensors


def _reads_of(
    world: World, entry: Stored, name: str, file: Path, handle: Any, tensors: Mapping[str, tuple[Tensor, str]]
) -> Iterator[Callable[[], object]]:
    """Reads this rank's part of a tensor of the files."""
    for piece in entry.pieces:
        tensor = tensors[piece.name][0]
        region = own_region(tensor.shape, *layout_of(tensor, world.mesh))
        blocks = piece.within(region) if region is not None else None
        if region is None or blocks is None:
            continue

        def take(piece: Any = piece, tensor: Tensor = tensor, region: Region = region, blocks: Any = blocks) -> None:
            part = blocks[1].within(whole_region(entry.shape))
            try:
                value = handle.get_slice(name)[part] if part else handle.get_tensor(name)
            except Exception as error:
                raise CheckpointError(f"{file} is damaged: {name}: {error}; the model is loaded in part") from error
            local = _torch.dtensor.local_of(tensor).detach()
            local[blocks[0].within(region)] = piece.as_own(value, blocks[0].shape).to(local.device, local.dtype)

        yield take
