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

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autoparallel.comm.collectives import redistribute
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.insert_collectives import Redistribution
from autoparallel.passes.specification import PlacementError
from autoparallel.placements import (
    ACTIONS,
    Layout,
    Partial,
    Placement,
    cut_along,
    dual_layout,
    format_layout,
    reaches_all,
    shards_of,
)
from autoparallel.placements.redistribution import Redistributor, Step


@dataclass(frozen=True)
class ParameterChain:
    """The way of one parameter from rest to its uses, and of its gradient back.

    Attributes:
        name: the parameter's name in the model.
        shape, dtype: of the whole parameter as it is used.
        rest_dtype: its dtype at rest; it is cast before it is gathered.
        reduce_dtype: the dtype in which its gradient travels.
        at_rest: its layout between steps.
        uses: the layouts it is used in, one or more; ``placeholders`` are the body's names for them.
        paths: the steps from rest to each use.
        gradient_layout: the layout in which the gradients of the uses are added up.
        ways: by when a gradient is reduced, the steps before and after microbatches are added up: ``"per_step"`` adds
            up full-size summands and reduces their sum, once; ``"per_microbatch"`` reduces every microbatch's gradient
            and adds up what lies at rest; ``"across_replicas_per_step"`` scatters every microbatch's gradient over the
            axes that shard the parameter at rest, and reduces the sum across the others, once (hybrid sharding; Zhao et
            al. 2023, PyTorch FSDP).
        trainable: whether a gradient comes back.
        when: the one of these ways that it takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rest_dtype: torch.dtype
    reduce_dtype: torch.dtype
    at_rest: Layout
    uses: tuple[Layout, ...]
    placeholders: tuple[str, ...]
    paths: tuple[tuple[Step, ...], ...]
    gradient_layout: Layout
    ways: Mapping[str, tuple[tuple[Step, ...], tuple[Step, ...]]]
    trainable: bool
    when: str = "per_step"

    @functools.cached_property
    def each(self) -> tuple[Step, ...]:
        """The steps that every microbatch's gradient takes from where it is made."""
        return self.ways[self.when][0]

    @functools.cached_property
    def sync(self) -> tuple[Step, ...]:
        """The steps from where microbatches are added up to the gradient at rest, once for all of them."""
        return self.ways[self.when][1]

    @functools.cached_property
    def way_back(self) -> tuple[Step, ...]:
        """All steps from where a gradient is made to where it is at rest."""
        return (*self.each, *self.sync)

    @functools.cached_property
    def accumulator(self) -> Layout:
        """The layout in which gradients of several microbatches are added up."""
        return functools.reduce(lambda layout, step: step.apply(layout), self.each, self.gradient_layout)

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """The dtype in which gradients of several microbatches are added up: the parameter's, float32 or wider."""
        return torch.float32 if self.rest_dtype.itemsize < 4 else self.rest_dtype

    @property
    def gathered(self) -> bool:
        """Whether some use reads memory of its own, not the parameter at rest or a view of it."""
        return self.dtype != self.rest_dtype or any(makes_tensor(path) for path in self.paths)

    @functools.cached_property
    def comes_back(self) -> tuple[Layout, ...]:
        """The layouts in which the gradients of its uses are made."""
        return tuple(map(dual_layout, self.uses))

    @functools.cached_property
    def ends_in_slice(self) -> bool:
        """Whether its reduced gradient is a slice of a whole one, which it would keep alive."""
        return any(step.action == "slice" for step in self.way_back[-1:])

    def with_gradient_layout(self, gradient_layout: Layout, redistributor: Redistributor) -> ParameterChain:
        """The same chain for gradients that are added up in another layout than its own uses make them in."""
        if gradient_layout == self.gradient_layout:
            return self
        ways = _ways(gradient_layout, None, self.at_rest, self.shape, self.dtype, self.reduce_dtype, redistributor)
        chain = replace(self, gradient_layout=gradient_layout, ways=ways, when="per_step")
        require_complete(chain)
        return chain

    def __str__(self) -> str:
        uses = ", ".join(format_layout(u) for u in self.uses)
        gradient = format_layout(self.gradient_layout)
        gradient += f" in {self.reduce_dtype}" if self.reduce_dtype != self.rest_dtype else ""
        gradient += (
            f", added up as {format_layout(self.accumulator)}" if self.gradient_layout != self.accumulator else ""
        )
        cast = f" as {self.dtype}" if self.dtype != self.rest_dtype else ""
        return f"{self.name}: {format_layout(self.at_rest)} -> {uses}{cast}; gradient {gradient}"


@dataclass(frozen=True)
class Chains:
    """The chains of all parameters, in the order of the parameters' first uses."""

    chains: tuple[ParameterChain, ...]


def makes_tensor(path: Sequence[Step]) -> bool:
    """Whether a parameter's way to a use ends in memory of its own, not in the parameter or a view of it."""
    return any(step.action not in ("nothing", "slice") for step in path)


def hoist_parameter_chains(
    module: fx.GraphModule,
    parameters: Mapping[str, str],
    redistributor: Redistributor,
    sizes: Sizes,
    rest_dtypes: Mapping[str, torch.dtype] | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce: Mapping[str, str] | None = None,
) -> Chains:
    """Rewrites ``module`` in place and returns the chains.

    Args:
        parameters: placeholder name to parameter name.
        rest_dtypes: parameter name to its dtype at rest, where that is not the placeholder's.
        reduce_dtype: the dtype in which gradients travel; None is that of their use.
        reduce: parameter name to when its gradient is reduced (see :class:`ParameterChain`).
    """
    chains: list[tuple[fx.Node, ParameterChain]] = []
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and node.name in parameters:
            name = parameters[node.name]
            rest_dtype = (rest_dtypes or {}).get(name, node.meta["val"].dtype)
            used = node.meta["val"].dtype
            # A complex gradient travels as it is: torch's policies name real dtypes only.
            dtypes = rest_dtype, (reduce_dtype if used.is_floating_point else None) or used
            pair = _hoist(module.graph, node, name, dtypes, redistributor, sizes)
            if pair is not None:
                chains.append(pair)
    chains.sort(key=lambda pair: pair[0])
    reduce = reduce or {}
    return Chains(tuple(replace(c, when=reduce.get(c.name, "per_step")) for _, c in chains))


def _hoist(
    graph: fx.Graph,
    node: fx.Node,
    name: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    redistributor: Redistributor,
    sizes: Sizes,
) -> tuple[fx.Node, ParameterChain] | None:
    """The first call that uses a parameter, and its chain; None where nothing does."""
    versions: list[tuple[fx.Node, tuple[Step, ...]]] = []
    links: list[fx.Node] = []

    def follow(version: fx.Node, path: tuple[Step, ...]) -> None:
        links.append(version)
        if any(user.target is not redistribute for user in version.users):
            versions.append((version, path))
        for user in version.users:
            if user.target is redistribute:
                redistribution: Redistribution = user.meta["redistribution"]
                follow(user, (*path, redistribution.step))

    follow(node, ())
    if not versions:
        graph.erase_node(node)
        return None
    at_rest: Layout = node.meta["placements"]
    first = min(u for version, _ in versions for u in version.users if u.target is not redistribute)
    placeholders, uses, paths = [], [], []
    for i, (version, path) in enumerate(versions):
        with graph.inserting_after(node):
            use = graph.placeholder(node.name if i == 0 else f"{node.name}_{i}")
        use.meta = {k: v for k, v in version.meta.items() if k != "redistribution"}
        for user in [u for u in version.users if u.target is not redistribute]:
            user.replace_input_with(version, use)
        placeholders.append(use)
        uses.append(version.meta["placements"])
        paths.append(path)
    for link in reversed(links):
        if link.users:
            raise PlacementError(f"{name} reaches a use on two ways")
        graph.erase_node(link)
    trainable = bool(node.meta["differentiable"])
    gradient_layout = join_layouts([dual_layout(u) for u in uses])
    back = tuple(step.transposed() for step in reversed(paths[0])) if len(uses) == 1 else None
    ways = _ways(gradient_layout, back, at_rest, sizes.shape(node), node.meta["val"].dtype, dtypes[1], redistributor)
    chain = ParameterChain(
        name,
        sizes.shape(node),
        node.meta["val"].dtype,
        *dtypes,
        at_rest,
        tuple(uses),
        tuple(p.name for p in placeholders),
        tuple(paths),
        gradient_layout,
        ways,
        trainable,
    )
    return first, chain


def _ways(
    gradient_layout: Layout,
    back: tuple[Step, ...] | None,
    at_rest: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    redistributor: Redistributor,
) -> dict[str, tuple[tuple[Step, ...], tuple[Step, ...]]]:
    """For each time of reducing, a gradient's steps before and after microbatches are added up.

    Args:
        gradient_layout: the layout in which the gradient is made.
        back: the steps from there to rest; None finds them.
    """

    def path(src: Layout, dst: Layout, itemsize: int) -> tuple[Step, ...]:
        return tuple(redistributor.path(src, dst, shape, itemsize, True, False, uneven=True))

    sync = path(gradient_layout, at_rest, dtype.itemsize) if back is None else back
    scattered = tuple(rest if rest.kind == "S" else p for p, rest in zip(gradient_layout, at_rest, strict=True))
    if not reaches_all(shape, scattered, redistributor.axis_sizes):
        scattered = at_rest
    hybrid = path(gradient_layout, scattered, reduce_dtype.itemsize), path(scattered, at_rest, reduce_dtype.itemsize)
    return {"per_step": ((), sync), "per_microbatch": (sync, ()), "across_replicas_per_step": hybrid}


def join_layouts(layouts: list[Layout]) -> Layout:
    """The layout in which gradients of different uses can be added: theirs, or a summand where they differ."""

    def one(axis: int) -> Placement:
        return layouts[0][axis] if len({cut_along(layout, axis) for layout in layouts}) == 1 else Partial

    return tuple(one(axis) for axis in range(len(layouts[0])))


def require_complete(chain: ParameterChain) -> None:
    """Following the steps, a parameter must reach each use as it is used there, and its gradient, made as the uses make
    it, must end as the parameter lies at rest, whole where that is Invariant, whenever it is reduced.  One that is not
    trained has none.

    Raises:
        PlacementError: where one does not.
    """
    for use, path in zip(chain.uses, chain.paths, strict=True):
        require_way(chain.name, chain.at_rest, path, use)
    ways = {(*each, *sync) for each, sync in chain.ways.values()} if chain.trainable else ()
    for way in ways:
        require_way(f"the gradient of {chain.name}", chain.gradient_layout, way, chain.at_rest)
    if ways and any(p.kind not in ("I", "S") for p in chain.at_rest):
        raise PlacementError(
            f"{chain.name} lies as {format_layout(chain.at_rest)}: its gradient would not be completed exactly once"
        )


def require_way(name: str, layout: Layout, steps: Sequence[Step], end: Layout) -> None:
    """Raises ``PlacementError`` where steps do not lead what a name says from one layout to another."""
    begin = layout
    for step in steps:
        layout = after_step(name, layout, step)
    if layout != end:
        raise PlacementError(
            f"{name}: the way from {format_layout(begin)} ends as {format_layout(layout)}, not as {format_layout(end)}"
        )


def after_step(name: str, before: Layout, step: Step) -> Layout:
    """The layout after a step; raises ``PlacementError`` where there is no such step."""
    after = step.apply(before)
    ends = [(before, step.src), (after, step.dst)]
    if (
        (step.src.kind, step.dst.kind) not in ACTIONS
        or any(before[axis] != step.src for axis in step.axes)
        or any(p.kind == "S" and step.axes != shards_of(layout, p.dim)[-1:] for layout, p in ends)
    ):
        raise PlacementError(f"{name}: no step leads from {format_layout(before)} to {format_layout(after)}")
    return after
