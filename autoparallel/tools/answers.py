"""What ``plan --cache`` keeps of a whole command: what it printed and wrote, under a digest of all that it read.

Only commands about a ``config.json`` that says everything itself are kept. A factory is Python that may do anything,
and a configuration may name other files, repositories or code; those models are made in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from autoparallel.data import from_json, to_json
from autoparallel.planner.plan_cache import digest_of
from autoparallel.rules.registry import USER_RULES
from autoparallel.tools.sources import config_file

FORMAT = 1
FILES = ("out", "trace", "report")
"""The options that name files to write."""

_SESSION = {"_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM", "TERM_SESSION_ID", "WINDOWID",
            "TORCHINDUCTOR_CACHE_DIR"}  # fmt: skip
"""Environment variables that a shell, a terminal or torch's import of Dynamo sets, and that decide nothing. All others
are part of the key."""


@dataclass(frozen=True)
class File:
    """A file that the command writes: its text, and what is said when it is written."""

    text: str
    said: str


@dataclass(frozen=True)
class Answer:
    """What a command prints and writes.

    Attributes:
        text: what it prints.
        files: what it writes, by the option that names the file (``FILES``).
    """

    text: str
    files: Mapping[str, File] = field(default_factory=dict)

    def to_json(self) -> str:
        """The answer as JSON text."""
        return to_json(self, FORMAT)

    @staticmethod
    def from_json(text: str) -> Answer:
        """Reads an answer; raises ValueError for what is none."""
        answer: Answer = from_json(Answer, text, FORMAT)
        return answer


def answer_key(options: argparse.Namespace) -> str | None:
    """A digest of all that an answer depends on: the options, the bytes of the files that they name, the packages, this
    machine and its environment; None where the answer may depend on something else."""
    config = config_file(options.model)
    # Pins that are kept from a plan warn about those that are not possible any more.
    if config is None or options.pins or not all(map(_is_as_released, ("torch", "transformers"))):
        return None
    try:
        files = [Path(path) for path in (config, options.plan, options.hardware)]
        contents = [path.read_bytes() if path.is_file() else b"" for path in files]
        if not _says_everything(json.loads(contents[0])):
            return None
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads it says what is wrong
    return digest_of(
        "answer", FORMAT, contents,
        sorted((name, value) for name, value in vars(options).items() if name not in ("cache", "run")),
        sys.version, platform.node(), torch.cuda.is_available(), sys.path, sorted(_packages()),
        sorted(USER_RULES.items()),
        sorted((name, value) for name, value in os.environ.items() if name not in _SESSION),
    )  # fmt: skip


def _says_everything(value: Any, key: str = "") -> bool:
    """Whether a part of a configuration names no file, repository, backbone or code that its model is made of, too."""
    if key in ("auto_map", "configuration_files") or "backbone" in key:
        return not value
    if isinstance(value, dict):
        return all(_says_everything(each, name) for name, each in value.items())
    if isinstance(value, list):
        return all(_says_everything(each, key) for each in value)
    if isinstance(value, str) and key != "_name_or_path":  # that says where the configuration is from
        return not value.startswith("timm") and not {"/", "\\", ":"} & {*value}
    return True


def _is_as_released(package: str) -> bool:
    """Whether a package's version tells its code: it lies where its distribution was installed."""
    try:
        spec, installed = util.find_spec(package), metadata.distribution(package).locate_file(package)
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).parent == Path(str(installed))


def _packages() -> Iterator[str]:
    """The distributions that can be imported, with their versions, as the names of their folders."""
    for folder in sys.path:
        if os.path.isdir(folder or "."):
            yield from (
                name for name in os.listdir(folder or ".") if name.endswith((".dist-info", ".egg-info", ".pth"))
            )
