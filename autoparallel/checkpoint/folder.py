"""The folder of one save: a file of bytes and an index for every rank, and a marker that is written last.

[Note: what a folder promises] An index holds the digest of every block of its file, the marker that of every index, and
nothing else, so that no bit of it can change unseen.  A folder without a marker is not a checkpoint, whatever else is
in it: a save that was killed leaves the ones before as they are, because every save makes a folder of its own.  Whoever
reads compares every block with its digest before anything is loaded.  Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from autoparallel import _torch
from autoparallel.checkpoint.tree import merged
from autoparallel.placements.regions import Region

FORMAT = 2
MARKER = "checkpoint.json"
BLOCK = 16 << 20
"""Bytes of a block, about: the smallest part of a file that is read and checked alone."""
_FOLDER = re.compile(r"(\d{6,})-step-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, or is not what was saved."""


@dataclass(frozen=True)
class Block:
    """Some rows of a tensor in a file.

    Attributes:
        region: of the whole tensor.
        file: its path.
        offset: of its first byte.
        digest: of its bytes.
    """

    region: Region
    file: Path
    offset: int
    digest: str


@dataclass(frozen=True)
class Entry:
    """A tensor in a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    def read(self, region: Region) -> Tensor:
        """A part of the tensor.

        Raises:
            CheckpointError: when a block is not what was saved, or some of the part was not saved.
        """
        part = torch.empty(region.shape, dtype=self.dtype)
        left = region.numel
        for block in self.blocks:
            common = block.region.overlap(region)
            if common is not None:
                part[common.within(region)] = self._block(block)[common.within(block.region)]
                left -= common.numel
        if left:
            raise CheckpointError(f"{left} elements of {self.name} were not saved, or saved twice")
        return part

    def _block(self, block: Block) -> Tensor:
        content = torch.empty(block.region.shape, dtype=self.dtype)
        memory = bytes_of(content)
        with block.file.open("rb") as file:
            file.seek(block.offset)
            read = file.readinto(memory)
        if read != len(memory) or _digest(memory) != block.digest:
            raise CheckpointError(f"{block.file} is damaged: {self.name} is not what was saved")
        return content


@dataclass(frozen=True)
class Part:
    """What one rank writes of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    region: Region
    local: Tensor


# -------------------------------------------------------------------------------------------------------------- writing


def require_room(path: Path, needed: int, what: str) -> None:
    """Raises CheckpointError where the disk of a folder has not the bytes that ``what`` needs."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise CheckpointError(f"{path} has {free:,} bytes left, and {what} needs {needed:,}")


def new_folder(path: Path, step: int) -> Path:
    """Makes the folder of the next save."""
    path.mkdir(parents=True, exist_ok=True)
    number = max((int(match[1]) for match in map(_FOLDER.fullmatch, os.listdir(path)) if match), default=0)
    while True:
        number += 1
        folder = path / f"{number:06}-step-{step}"
        try:
            folder.mkdir()
        except FileExistsError:  # somebody else's save, just now
            continue
        return folder


def write_rank(folder: Path, rank: int, step: int, parts: Mapping[str, Part], tree: Any) -> None:
    """Writes a rank's file, and then its index."""
    data, index = _files(folder, rank)
    entries: dict[str, Any] = {}
    with data.open("xb") as file:
        for name, part in parts.items():
            width = max(part.local.nbytes // max(part.local.shape[0], 1), 1) if part.local.dim() else 1
            blocks: list[Any] = []
            for region in part.region.blocks(max(BLOCK // width, 1)):
                memory = bytes_of(part.local[region.within(part.region)].contiguous())
                blocks.append([file.tell(), region.start, region.shape, _digest(memory)])
                file.write(memory)
            entries[name] = {"dtype": str(part.dtype).removeprefix("torch."), "shape": part.shape, "blocks": blocks}
        _flush(file)
    _write_text(index, json.dumps({"format": FORMAT, "step": step, "tensors": entries, "tree": tree}))


def is_written(folder: Path, rank: int) -> bool:
    return _files(folder, rank)[1].exists()


def write_marker(folder: Path, ranks: int) -> None:
    """Says that a folder is complete; all ranks have written their parts."""
    digests = [_digest(_files(folder, rank)[1].read_bytes()) for rank in range(ranks)]
    _write_text(folder / MARKER, json.dumps({"format": FORMAT, "indices": digests}, indent=1))
    _flush_folder(folder.parent)


def remove_older(path: Path, keep: int) -> None:
    """Removes all but the last ``keep`` complete checkpoints; a folder that is not complete is left alone."""
    for folder in complete_folders(path)[:-keep]:
        with suppress(FileNotFoundError):  # somebody else, who saves to the same path, removes it, too
            (folder / MARKER).unlink()  # a removal that is killed leaves no half of a checkpoint
            shutil.rmtree(folder)


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank-{rank:05}.bin", folder / f"rank-{rank:05}.json"


def _write_text(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all."""
    other = path.with_suffix(".part")
    with other.open("xb") as file:
        file.write(text.encode())
        _flush(file)
    os.replace(other, path)
    _flush_folder(path.parent)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    memory: memoryview = _torch.tensors.as_bytes(tensor).numpy().data
    return memory


# -------------------------------------------------------------------------------------------------------------- reading


def complete_folders(path: Path) -> list[Path]:
    """The checkpoints in a folder, the newest last."""
    matches = [m for m in map(_FOLDER.fullmatch, os.listdir(path) if path.is_dir() else ()) if m]
    numbered = sorted((int(match[1]), path / match[0]) for match in matches)
    return [folder for _, folder in numbered if (folder / MARKER).is_file()]


def find(path: Path) -> Path:
    """The checkpoint that a path is, or the newest of those in it.

    Raises:
        CheckpointError: where there is none.
    """
    if (path / MARKER).is_file():
        return path
    folders = complete_folders(path)
    if not folders:
        what = "is not complete" if _FOLDER.fullmatch(path.name) and path.is_dir() else "holds no complete checkpoint"
        raise CheckpointError(f"{path} {what}: a save ends with the file {MARKER}, which is not there")
    return folders[-1]


def read_folder(folder: Path) -> tuple[dict[str, Entry], Any, int]:
    """The tensors of a checkpoint, none of them read yet, its tree, and its step.

    Raises:
        CheckpointError: naming the file that is missing or is not what was saved.
    """
    marker = _parse(folder / MARKER, (folder / MARKER).read_bytes())
    entries: dict[str, Entry] = {}
    trees: list[Any] = []
    step = 0
    for rank, digest in enumerate(marker["indices"]):
        data, index = _files(folder, rank)
        for file in (data, index):
            if not file.is_file():
                raise CheckpointError(f"{file} is missing")
        content = index.read_bytes()
        if _digest(content) != digest:
            raise CheckpointError(f"{index} is damaged, or of another checkpoint")
        part = _parse(index, content)
        step = part["step"]
        trees.append(part["tree"])
        for name, saved in part["tensors"].items():
            entry = _entry(name, data, saved)
            others = entries[name].blocks if name in entries else ()
            entries[name] = replace(entry, blocks=(*others, *entry.blocks))
    return entries, merged(trees), step


def _entry(name: str, data: Path, saved: Mapping[str, Any]) -> Entry:
    blocks = tuple(
        Block(Region(tuple(start), tuple(shape)), data, offset, digest)
        for offset, start, shape, digest in saved["blocks"]
    )
    return Entry(name, getattr(torch, saved["dtype"]), tuple(saved["shape"]), blocks)


def _parse(path: Path, content: bytes) -> Any:
    try:
        data = json.loads(content)
        version = data["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: it is not what a save writes ({error})") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version}, this version reads {FORMAT}")
    return data


def _digest(content: bytes | memoryview) -> str:
    """XXH3 of 128 bits: against accidents, as none is kept secret from whoever can write the files; above 10 GB/s."""
    return xxhash.xxh3_128_hexdigest(content)


def size_of(parts: Iterable[Part]) -> int:
    """The bytes that a rank writes, its index aside."""
    return sum(part.local.nbytes for part in parts)
