"""Takes the way from a parameter at rest to its uses out of the body.

Each parameter reaches its uses through a chain of redistributions.  Forward, the chain is a gather; its transpose is
the reduction of the parameter's gradient.  Out of the body, the same chain can be run once for many parameters, its
transpose can be deferred over several microbatches, and neither is differentiated by autograd.

Before (w is sharded at rest over "dp", used whole):
    w = placeholder                                                     S0
    redistribute = collectives.redistribute(w, 'S0', 'R', 'mesh0/dp')   R
    linear = aten.linear(x, redistribute)
After:
    w = placeholder                                                     R
    linear = aten.linear(x, w)
    and the chain  w: S0 -> R by (dp: S0->R), gradient P -> S0 by (dp: P->S0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autoparallel.collectives import redistribute
from autoparallel.passes.insert_collectives import Redistribution, Sizes
from autoparallel.placements import Layout, Partial, Placement, dual_layout, format_layout
from autoparallel.redistribution import Redistributor, Step


class GradientError(AssertionError):
    """A trainable parameter whose gradient would not be completed exactly once."""


@dataclass(frozen=True)
class ParameterChain:
    """The way of one parameter from rest to its uses, and of its gradient back.

    Attributes:
        name: the parameter's name in the model.
        shape, dtype: of the whole parameter.
        at_rest: its layout between steps.
        uses: the layouts it is used in, one or more; ``placeholders`` are the body's names for them.
        paths: the steps from rest to each use.
        accumulator: the layout in which gradients of several microbatches are summed before any communication.
        sync: the steps from there to the gradient at rest.
        trainable: whether a gradient comes back.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    at_rest: Layout
    uses: tuple[Layout, ...]
    placeholders: tuple[str, ...]
    paths: tuple[tuple[Step, ...], ...]
    accumulator: Layout
    sync: tuple[Step, ...]
    trainable: bool

    def __str__(self) -> str:
        uses = ", ".join(format_layout(u) for u in self.uses)
        return f"{self.name}: {format_layout(self.at_rest)} -> {uses}; gradient {format_layout(self.accumulator)}"


def hoist_parameter_chains(
    module: fx.GraphModule, parameters: Mapping[str, str], redistributor: Redistributor, sizes: Sizes
) -> list[ParameterChain]:
    """Rewrites ``module`` in place and returns the chains, in the order of the parameters' first uses.

    Args:
        parameters: placeholder name to parameter name.

    Raises:
        GradientError: when a trainable parameter's gradient would not be completed exactly once.
    """
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    chains: list[tuple[int, ParameterChain]] = []
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and node.name in parameters:
            chain, first = _hoist(module.graph, node, parameters[node.name], redistributor, sizes, order)
            if chain is not None:
                chains.append((first, chain))
    module.graph.lint()
    module.recompile()
    chains.sort(key=lambda pair: pair[0])
    return [chain for _, chain in chains]


def _hoist(
    graph: fx.Graph,
    node: fx.Node,
    name: str,
    redistributor: Redistributor,
    sizes: Sizes,
    order: Mapping[fx.Node, int],
) -> tuple[ParameterChain | None, int]:
    found: list[tuple[fx.Node, tuple[Step, ...]]] = []
    links: list[fx.Node] = []

    def follow(version: fx.Node, path: tuple[Step, ...]) -> None:
        links.append(version)
        if any(user.target is not redistribute for user in version.users):
            found.append((version, path))
        for user in version.users:
            if user.target is redistribute:
                done: Redistribution = user.meta["redistribution"]
                follow(user, (*path, done.step))

    follow(node, ())
    if not found:
        graph.erase_node(node)
        return None, 0
    at_rest: Layout = node.meta["placements"]
    first = min(order[u] for version, _ in found for u in version.users if u.target is not redistribute)
    placeholders, uses, paths = [], [], []
    consumers = [(v, [u for u in v.users if u.target is not redistribute], p) for v, p in found]
    for i, (version, users, path) in enumerate(consumers):
        with graph.inserting_after(node):
            use = graph.placeholder(node.name if i == 0 else f"{node.name}_{i}")
        use.meta = {k: v for k, v in version.meta.items() if k != "redistribution"}
        for user in users:
            user.replace_input_with(version, use)
        placeholders.append(use)
        uses.append(version.meta["placements"])
        paths.append(path)
    for link in reversed(links):
        if link.users:
            raise GradientError(f"{name} reaches a use on two ways")
        graph.erase_node(link)
    trainable = bool(node.meta["differentiable"])
    accumulator = _join([dual_layout(u) for u in uses])
    if len(uses) == 1:
        sync = tuple(step.transposed() for step in reversed(paths[0]))
    else:
        value = node.meta["val"]
        sync = tuple(
            redistributor.path(accumulator, at_rest, sizes.shape(node), value.element_size(), True, False)
        )
    chain = ParameterChain(
        name,
        sizes.shape(node),
        node.meta["val"].dtype,
        at_rest,
        tuple(uses),
        tuple(p.name for p in placeholders),
        tuple(paths),
        accumulator,
        sync,
        trainable,
    )
    if trainable:
        _require_complete(chain)
    return chain, first


def _join(layouts: list[Layout]) -> Layout:
    """The layout in which gradients of different uses can be added: theirs, or a summand where they differ."""

    def one(placements: set[Placement]) -> Placement:
        return placements.pop() if len(placements) == 1 else Partial

    return tuple(one({layout[i] for layout in layouts}) for i in range(len(layouts[0])))


def _require_complete(chain: ParameterChain) -> None:
    """Following the steps, a gradient must end as the parameter lies at rest: whole where that is Invariant."""
    layout = chain.accumulator
    for step in chain.sync:
        if any(layout[axis] != step.src for axis in step.axes):
            raise GradientError(f"the gradient of {chain.name} is {format_layout(layout)} before {step}")
        layout = step.apply(layout)
    if layout != chain.at_rest or any(p.kind not in ("I", "S") for p in chain.at_rest):
        raise GradientError(
            f"the gradient of {chain.name} ends as {format_layout(layout)}, the parameter lies as "
            f"{format_layout(chain.at_rest)}: it would not be completed exactly once"
        )


