"""What searches have found, kept in a folder from run to run under a digest of all that they depend on.

A file begins with a digest of what follows, so that one that is damaged counts for none.  A plan that is found there is
compared with the graph like one that a user loads, and any plan computes the same numbers: a file that somebody else
has written costs a search or some speed, never a wrong result.

A trace is not kept, because only tracing shows that it is the model: it depends on every line of Python that a call
runs, in libraries, too, and holds objects that no file can (hooks, functions, what is compared by identity).
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured, InputSpec
from autoparallel.graph.layers import is_checkpointed
from autoparallel.planner.request.pins import Pins
from autoparallel.planner.request.request import Request, Settled
from autoparallel.rules.registry import USER_RULES
from autoparallel.text import LOGGER

T = TypeVar("T")

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SEEN = ("key", "module", "layer", "differentiable", "backward", "interleaved")
"""What is seen of a node, beside its value and its batch."""


class PlanCache:
    """A folder of texts, which several processes may use at once; without one, nothing is kept."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()

    def key(self, request: Request, captured: Captured, call: Call, settled: Settled, *others: object) -> str | None:
        """A digest of what a search depends on; None where some of it is known by its address in memory alone, or where
        nothing is kept."""
        if self.folder is None or request.pins.plan is not None:  # the search says what of it is not possible any more
            return None
        sets = (captured.rebound, captured.lengths, captured.left_out, captured.attributes, captured.actual.items())
        return digest_of(
            others, replace(request, plan=request.origin, pins=Pins(), loss_fn=None),
            request.pins.text(), sorted(map(repr, USER_RULES.items())),
            settled.at_rest is None, sorted((settled.at_rest or {}).items()), settled.pipeline, settled.recompute,
            settled.offload_optimizer,
            call.layouts, call.batch, call.with_target, call.training, call.trainable, call.gradients,
            [spec for spec in call.specs if isinstance(spec, InputSpec)],
            captured.parameters, captured.buffers, {name: _show(x) for name, x in captured.constants.items()},
            captured.inputs, captured.mutated, captured.loss, captured.flowing, captured.detached,
            captured.weight, captured.rest_dtypes, captured.draws, captured.numbers, sorted(captured.written.items()),
            *(sorted(map(repr, each)) for each in sets), *_lines(captured.module),
        )  # fmt: skip

    def get(self, key: str | None, read: Callable[[str], T]) -> T | None:
        """What a text that is kept says; None where there is none, or none that can be read.

        Args:
            read: makes it of the text; raises ValueError for what does not fit.
        """
        if key is None or self.folder is None:
            return None
        with suppress(OSError, ValueError):
            digest, _, text = _file(self.folder, key).read_text().partition("\n")
            return read(text) if digest == _digest(text) else None
        return None

    def put(self, key: str | None, text: str) -> None:
        """Keeps a text; a folder that is full or cannot be written to keeps nothing, and a warning says so."""
        if key is None or self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(f"{_digest(text)}\n{text}")
                os.replace(name, _file(self.folder, key))  # whole or not at all, whoever else writes
            except BaseException:  # a full disk, an interrupted run
                os.unlink(name)
                raise
        except OSError as error:
            LOGGER.warning("the cache keeps nothing: %s", error)


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key}.txt"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(*parts: object) -> str | None:
    """A digest of parts by their ``repr``, of this package's code and of torch's version; None where a part is known by
    its address in memory alone."""
    text = "\n".join(map(repr, (_sources(), torch.__version__, *parts)))
    return None if _ADDRESS.search(text) else _digest(text)


def _lines(module: fx.GraphModule) -> Iterator[str]:
    """What planning sees of a graph, and of those that it calls."""
    texts: dict[int, str] = {}  # of values, which copied layers share
    for each in module.modules():
        for node in each.graph.nodes if isinstance(each, fx.GraphModule) else ():
            value = node.meta.get("val")
            if id(value) not in texts:
                texts[id(value)] = str(pytree.tree_map(_show, value))
            target = getattr(node.target, "__qualname__", "") and f"{node.target.__module__}.{node.target.__qualname__}"
            marked = is_checkpointed(node)
            facts = [node.meta.get(name) for name in _SEEN], sorted(map(repr, node.meta.get("batch_factors") or ()))
            yield f"{node} {target or node.target} {node.args} {node.kwargs} {texts[id(value)]} {facts} {marked}"


def _show(value: Any) -> object:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else str(value)


@cache
def _sources() -> str:
    """A digest of this package's own code."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted({*root.rglob("*.py"), *(root / "passes").rglob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()
