"""What can happen to a checkpoint, done to one of ours and to one of ``torch.distributed.checkpoint`` alone.

The table in ``docs/checkpoints.md`` is what these tests find.  A fault is survived where what is loaded afterwards is
whole and was saved, or where loading, or saving, says that it cannot.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import autoparallel
from autoparallel._torch.dtensor import local_of
from autoparallel.checkpoint.folder import CheckpointError
from tests.test_checkpoints import Run

pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")]


class Ours:
    """A model, its optimizer and a number, all of whose values are the step that is saved."""

    def __init__(self) -> None:
        self.run = Run()
        self.run.train(0, 1)

    def tensors(self) -> Iterator[Tensor]:
        yield from map(local_of, self.run.model.parameters())
        yield from (local_of(t) for state in self.run.optimizer.state.values() for t in state.values())

    def fill(self, step: int) -> None:
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(step)

    def save(self, path: Path, step: int, keep: int | None = None) -> Path:
        self.fill(step)
        return self.run.model.save(path, step=step, keep=keep, number=step, optimizer=self.run.optimizer).path

    def load(self, path: Path) -> int | None:
        """The step, or None where it is not the values'."""
        loaded = self.run.model.load(path, optimizer=self.run.optimizer)
        known = {loaded.step, loaded.values["number"], *(x for t in self.tensors() for x in t.unique().tolist())}
        return loaded.step if len(known) == 1 else None


class Torchs:
    """As many values in two tensors and a number; ``path`` is the checkpoint itself."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"model": torch.zeros(3000), "moments": torch.zeros(3000), "step": 0}

    def save(self, path: Path, step: int, keep: int | None = None) -> Path:
        for name in ("model", "moments"):
            self.state[name].fill_(step)
        dcp.save({**self.state, "step": step}, checkpoint_id=path, no_dist=True)
        return path

    def load(self, path: Path) -> int | None:
        dcp.load(self.state, checkpoint_id=path, no_dist=True)
        known = {self.state["step"], *self.state["model"].tolist(), *self.state["moments"].tolist()}
        return int(self.state["step"]) if len(known) == 1 else None


@pytest.fixture(scope="module")
def savers() -> dict[str, Any]:
    return {"ours": Ours(), "torch's": Torchs()}


def outcome(saver: Any, path: Path, steps: set[int]) -> str:
    """What loading does: "refused", "whole" or "other values" than any that were saved together."""
    try:
        return "whole" if saver.load(path) in steps else "other values"
    except BaseException as error:  # torch's CheckpointException is no Exception
        assert isinstance(saver, Torchs) or isinstance(error, CheckpointError), error
        return "refused"


# ------------------------------------------------------------------------------------------------- files that change


def _flip(file: Path, other: Path, chance: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def _truncate(file: Path, other: Path, chance: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: chance.randrange(file.stat().st_size)])


def _remove(file: Path, other: Path, chance: random.Random) -> None:
    file.unlink()


def _swap(file: Path, other: Path, chance: random.Random) -> None:
    file.write_bytes(other.read_bytes())


CHANGES: dict[str, Callable[[Path, Path, random.Random], None]] = {
    "a bit flipped": _flip, "cut short": _truncate, "missing": _remove, "swapped": _swap,
}  # fmt: skip
UNSEEN = {("a bit flipped", ".distcp"), ("swapped", ".distcp")}
"""What ``torch.distributed.checkpoint`` has loaded as if nothing was the matter."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_no_file_changes_unseen(whose: str, change: str, savers: Any, tmp_path: Path) -> None:
    saver, chance = savers[whose], random.Random(7)
    first, second = (saver.save(tmp_path / f"{i}", step=11 + i) for i in (1, 2))
    pristine, seen = shutil.copytree(second, tmp_path / "pristine"), {}
    for name in sorted(file.name for file in second.iterdir()):
        found: Counter[str] = Counter()
        for _ in range(40 if change == "a bit flipped" else 5):
            CHANGES[change](second / name, first / name, chance)
            found[outcome(saver, second, {13})] += 1
            shutil.copytree(pristine, second, dirs_exist_ok=True)
        seen[name] = found
    print(whose, change, seen)
    if whose == "ours":
        assert len(seen) == 3 and all(set(found) == {"refused"} for found in seen.values()), seen
    else:
        unseen = {(change, Path(name).suffix or name) for name, found in seen.items() if found["other values"]}
        assert unseen == {what for what in UNSEEN if what[0] == change}, seen


# ---------------------------------------------------------------------------------------------- saves that are cut off


def _save_on(saver: Any, path: Path, first: int, pipe: Any, same: bool) -> None:
    for step in range(first, first + 10_000):
        if isinstance(saver, Ours):
            saver.save(path, step, keep=3)
        else:
            saver.save(path if same else path / f"{step:06}", step)
        pipe.send(step)


def _kill_20_times(saver: Any, path: Path, same: bool = False) -> Counter[str]:
    """What is loaded after each of twenty kills; it may be no older than the last save that was said to be done."""
    found: Counter[str] = Counter()
    chance, told, fork = random.Random(5), 0, multiprocessing.get_context("fork")
    for _ in range(20):
        mine, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_save_on, args=(saver, path, told + 2, theirs, same), daemon=True)
        process.start()
        told = mine.recv()
        time.sleep(chance.random() * 0.05)
        process.kill()
        process.join()
        while mine.poll():
            told = mine.recv()
        newest: Path | None = path
        if isinstance(saver, Ours):
            newest = autoparallel.latest(path)
        elif not same:
            newest = max(folder for folder in path.iterdir() if (folder / ".metadata").exists())
        assert newest is not None
        found[outcome(saver, newest, {told, told + 1})] += 1
    return found


def test_a_save_killed_at_random_moments_loses_nothing(savers: Any, tmp_path: Path) -> None:
    assert _kill_20_times(savers["ours"], tmp_path / "ours") == {"whole": 20}
    assert _kill_20_times(savers["torch's"], tmp_path / "own") == {"whole": 20}
    same = _kill_20_times(savers["torch's"], tmp_path / "same", same=True)
    print("torch's, into one folder:", same)


@contextmanager
def _no_file_above(size: int) -> Iterator[None]:
    """A disk that takes so many bytes of a file and no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_and_leaves_the_ones_before(savers: Any, tmp_path: Path) -> None:
    for whose, saver in savers.items():
        path = tmp_path / whose
        before = saver.save(path / "1", 1)
        for size in (0, 100, 1000, 2000, 4000):
            with pytest.raises(BaseException) as caught, _no_file_above(size):
                saver.save(path / "1" if whose == "ours" else path / f"{size}", 2)
            if whose == "ours":
                assert isinstance(caught.value, CheckpointError) and "could not be saved" in str(caught.value)
                assert autoparallel.latest(path / "1") == before and len([*(path / "1").iterdir()]) == 1
        assert outcome(saver, before, {1}) == "whole"


def _save_twenty(saver: Any, path: Path, first: int, failed: Any) -> None:
    try:
        for step in range(first, first + 20):
            saver.save(path, step, keep=3)
    except BaseException as error:  # torch's CheckpointException is no Exception
        failed.put(repr(error))


def test_two_savers_at_once(savers: Any, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    for whose, saver in savers.items():
        failed, path = fork.Queue(), tmp_path / whose
        both = [fork.Process(target=_save_twenty, args=(saver, path, first, failed)) for first in (100, 200)]
        for process in both:
            process.start()
        for process in both:
            process.join()
        if whose == "ours":
            assert failed.empty(), failed.get()
            folders = autoparallel.checkpoint.folder.complete_folders(path)
            assert len(folders) == 3 and {outcome(saver, folder, {*range(300)}) for folder in folders} == {"whole"}
        else:
            print(whose, "two at once:", failed.empty() or failed.get(), outcome(saver, path, {119, 219}))
