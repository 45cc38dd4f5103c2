"""Running a program's calls through ``torch.compile``, region by region (see [Note: regions] in ``regions``).

[Note: one rank compiles] Ranks compile the same regions, and those of one machine share the folder in which Inductor
keeps what it made. So the first that comes to a region compiles it, forward and backward; the others wait at a lock
beside it and load it. The lock stands around Inductor only, in which ranks never talk to each other, and is the
region's own: ranks whose regions differ never wait, nor those on devices of other numbers, which cannot load each
other's. It is gone when its holder dies; who waits in vain compiles, too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import fx, nn

from autoparallel import _torch, operators
from autoparallel.comm import ranges
from autoparallel.comm.groups import axis_size
from autoparallel.graph.captured import copy_graph
from autoparallel.graph.layers import draw_of, layer_of, with_draw
from autoparallel.passes.recompute_layers import outline
from autoparallel.program.program import LocalProgram
from autoparallel.rules.calls import arguments, is_tensor
from autoparallel.runtime.programs.regions import find_regions, worth_compiling

Body = Callable[..., Any]

_PATIENCE = 600.0
"""Seconds for which a rank waits for another to compile a region: as long as Inductor's own locks."""


def plain_body(program: LocalProgram) -> Body:
    """The body in plain autograd."""
    return program.body


def make_body_of(backend: str) -> Callable[[LocalProgram], Body]:
    """What runs the bodies of programs: plain autograd for "eager", else a backend of ``torch.compile``."""
    return plain_body if backend == "eager" else RegionCompiler(backend)


def require_backend(backend: object) -> None:
    """Raises ValueError where ``make_body_of`` knows no such backend."""
    if backend == "eager":
        return
    names = {name for name in torch.compiler.list_backends(exclude_tags=()) if name != "autoparallel"}
    if backend not in names:
        raise ValueError(f"unknown backend {backend!r}: expected one of {', '.join(sorted({'eager', *names}))}")


class RegionCompiler:
    """Compiles the bodies of programs; keeps what regions were compiled to for others that are alike.

    Args:
        backend: of ``torch.compile``, by name.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._compiled: dict[Hashable, Body] = {}

    def __call__(self, program: LocalProgram) -> Body:
        """The body; each distinct region is compiled when it is first called, once for all sizes that are open."""
        for region in program.regions.values():
            region.function = self.rewritten(region.program).forward
        body = self.rewritten(program.body)
        opened = open_dims(program.body.graph)

        def run(*arguments: Any) -> Any:
            # Regions mark what they are given: views, not the caller's tensors.
            return body(*[x.view_as(x) if dims else x for x, dims in zip(arguments, opened, strict=True)])

        return run

    def rewritten(self, module: fx.GraphModule) -> fx.GraphModule:
        """A copy that calls compiled regions."""
        graph = copy_graph(module.graph)
        copy = fx.GraphModule(module, graph)
        for number, nodes in enumerate(worth_compiling(find_regions(graph))):
            layers = list(dict.fromkeys(filter(None, map(layer_of, nodes)))) or ["body"]
            first = _count_draws_from_zero(nodes)
            name = f"compiled_{number}"
            program = outline(copy, nodes, name)
            key = _signature(program.graph)
            if key not in self._compiled:
                self._compiled[key] = self._compile(program)
            copy.add_submodule(name, CompiledRegion(self._compiled[key], first, ", ".join(layers)))
        graph.lint()
        copy.recompile()
        return copy

    def _compile(self, program: fx.GraphModule) -> Body:
        """Sizes that the trace left open stay open and all others are fixed: were parameters' sizes open, too, Dynamo
        would take those that happen to be equal for the same size, and compile again when one of them changes."""
        sizes = _sizes_of_groups(program.graph)

        def inductor(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            with one_at_a_time(hashlib.sha256(f"{program.code}{sizes}{forms_of(inputs)}".encode()).hexdigest()):
                return _torch.dynamo.compile_by_inductor(graph, inputs, sizes)

        backend = inductor if self.backend == "inductor" else self.backend
        plain = _torch.export.forward_of(program)
        compiled = torch.compile(plain, fullgraph=True, dynamic=False, backend=backend)
        opened = [(i, dims) for i, dims in enumerate(open_dims(program.graph)) if dims]

        def run(*arguments: Any) -> Any:
            if _torch.dynamo.leaves_frames():  # as torch.compile itself does
                return plain(*arguments)
            for i, dims in opened:
                _torch.dynamo.leave_open(arguments[i], dims)
            return compiled(*arguments)

        return run


def forms_of(inputs: Sequence[Any]) -> list[object]:
    """What Inductor finds a graph by beside its text; ranks on devices of other numbers compile apart."""
    return [(tuple(map(str, x.shape)), x.dtype, x.device) if isinstance(x, torch.Tensor) else str(x) for x in inputs]


def _sizes_of_groups(graph: fx.Graph) -> str:
    """How many ranks the groups have over which a graph's calls communicate: the shapes of what they make follow from
    it, and neither the text of the graph nor the shapes of what it reads say so."""
    ours = [n for n in graph.nodes if n.op == "call_function" and "autoparallel" in getattr(n.target, "__module__", "")]
    groups = sorted({arguments(node)["group"] for node in ours if "group" in arguments(node)})
    return ", ".join(f"{group}: {axis_size(group)}" for group in groups)


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Lets the first process of this machine in, and all others together once it has left; see [Note: one rank
    compiles]."""
    folder = os.path.join(_torch.dynamo.inductor_folder(), "autoparallel")
    os.makedirs(folder, exist_ok=True)
    lock = FileLock(os.path.join(folder, name))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        with suppress(Timeout):
            lock.acquire(timeout=_PATIENCE)
        lock.release()
    try:
        yield
    finally:
        lock.release()


class CompiledRegion(nn.Module):
    """One call of a compiled region.

    Args:
        function: what it was compiled to.
        first: the number of its first draw of random numbers among those of a call; the region counts them from 0.
        name: of its layers, in a profile.
    """

    def __init__(self, function: Body, first: int, name: str) -> None:
        super().__init__()
        self.function, self.first, self.name = function, first, name

    def forward(self, *arguments: Any) -> Any:
        with ranges.named(lambda: self.name), operators.draw_from(replace(operators.random_state(), first=self.first)):
            return self.function(*arguments)


def open_dims(graph: fx.Graph) -> list[list[int]]:
    """For each placeholder the dims whose sizes the trace left open."""
    return [
        [dim for dim, size in enumerate(node.meta["val"].shape) if not isinstance(size, int)]
        if is_tensor(node) and "placements" in node.meta
        else []
        for node in graph.nodes
        if node.op == "placeholder"
    ]


def _count_draws_from_zero(nodes: Sequence[fx.Node]) -> int:
    """Numbers a region's draws of random numbers from 0; the number that the first of them had."""
    numbers = {node: number for node in nodes if (number := draw_of(node)) is not None}
    first = min(numbers.values(), default=0)
    for node, number in numbers.items():
        node.args = with_draw(node, number - first)
    return first


def _signature(graph: fx.Graph) -> Hashable:
    """What is the same for regions that are alike: their calls, and the forms of what they read."""
    names = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    rows: list[Hashable] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value, layout = node.meta.get("val"), node.meta.get("placements")
            form = (tuple(map(str, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else type(value)
            rows.append((form, str(layout), node.meta.get("differentiable")))
        else:
            rows.append((node.target, repr(fx.map_arg((node.args, node.kwargs), names.__getitem__))))
    return tuple(rows)
