"""The passes of a capture in their order, with what each requires and provides (see ``passes.runner``).

Between a trace and a captured graph there are three modules: the trace as ``torch.export`` leaves it, the same once it
is decomposed, and the graph that is described; layers that were left out of the trace are filled up in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from autoparallel.capture.functional.layers import Stack, fill_up
from autoparallel.capture.functional.outputs import Objective
from autoparallel.graph.captured import Captured
from autoparallel.graph.hooks import HookTemplate
from autoparallel.operators.opaque import CALL, HOOK, OpaqueCall
from autoparallel.passes.adapt_captured import MARK_BACKWARD
from autoparallel.passes.canonicalize_operators import canonicalize_operators
from autoparallel.passes.expand_row_losses import expand_row_losses
from autoparallel.passes.inline_gradient_modes import inline_gradient_modes
from autoparallel.passes.interleave_projections import interleave_projections
from autoparallel.passes.mark_gradients import detach_outputs, mark_differentiable
from autoparallel.passes.mark_layers import mark_layers
from autoparallel.passes.name_nodes import name_nodes
from autoparallel.passes.raise_row_views import raise_row_views
from autoparallel.passes.replace_random_operators import replace_random_operators
from autoparallel.passes.resolve_control_flow import resolve_control_flow
from autoparallel.passes.resolve_opaque_calls import resolve_opaque_calls
from autoparallel.passes.runner import CAPTURED, Fact, Pass, PassList, on_graph
from autoparallel.passes.unflatten_products import unflatten_products


def tracing_passes(graph: fx.Graph, calls: Mapping[str, OpaqueCall], parameters: Collection[str]) -> PassList:
    """What decomposing would lose is written into the trace: where numbers are drawn, and gradient modes.

    Args:
        parameters: the placeholders that are parameters.
    """
    differentiable = {
        n.name for n in graph.nodes if n.op == "placeholder" and getattr(n.meta.get("val"), "requires_grad", False)
    }
    return PassList([
        # Draws are numbered in the order of the plain model's calls, so nothing may be rewritten before.
        Pass(replace_random_operators, provides={Fact.REPRODUCIBLE}),
        Pass(expand_row_losses, requires={Fact.REPRODUCIBLE}),
        Pass(
            partial(
                inline_gradient_modes,
                differentiable=differentiable,
                parameters=parameters,
                enabled=torch.is_grad_enabled(),
                transparent=lambda node: node.target is HOOK,
                aliases=lambda node: node.target is CALL and calls[node.args[2]].aliases,  # type: ignore[index]
            ),
            requires={Fact.REPRODUCIBLE},
            provides={Fact.FLAT},
        ),
    ])  # fmt: skip


def resolving_passes(calls: Mapping[str, OpaqueCall], hooks: Mapping[str, HookTemplate]) -> PassList:
    """The user's own Python takes the place of what stood for it in the trace, and plain Python that of loops."""
    resolve = Pass(partial(resolve_opaque_calls, calls=calls, hooks=hooks), requires={Fact.FLAT})
    control = Pass(resolve_control_flow, requires={Fact.FLAT})
    return PassList([resolve, control], premises={Fact.FLAT})


def describing_passes(
    *,
    parameters: Collection[str],
    differentiable: set[str],
    ranks: int,
    buffers: int,
    objective: Callable[[fx.GraphModule], Objective],
) -> PassList:
    """A decomposed graph becomes a captured one.

    Args:
        parameters: the placeholders that are parameters.
        differentiable: the placeholders that carry a gradient.
        ranks: of the mesh.
        buffers: the number of outputs that are new values of buffers: the first ones.
        objective: finds which output is the loss, and makes what it weighs an output.
    """
    return PassList(
        [
            Pass(canonicalize_operators, requires={Fact.FLAT}, provides={Fact.CANONICAL}),
            Pass(unflatten_products, requires={Fact.CANONICAL}),
            Pass(raise_row_views, requires={Fact.CANONICAL}),
            Pass(
                partial(interleave_projections, parameters=parameters, ranks=ranks),
                requires={Fact.CANONICAL},
                provides={Fact.INTERLEAVED},
            ),
            Pass(
                partial(on_graph(mark_differentiable), placeholders=differentiable),
                requires={Fact.CANONICAL, Fact.INTERLEAVED},
                provides={Fact.DIFFERENTIABLE},
            ),
            Pass(objective, requires={Fact.CANONICAL, Fact.DIFFERENTIABLE}, provides={Fact.OBJECTIVE}),
            # Keys count the operators of a module, so all of these must be there.
            Pass(
                on_graph(name_nodes), requires={Fact.CANONICAL, Fact.INTERLEAVED, Fact.OBJECTIVE}, provides={Fact.NAMED}
            ),
            Pass(
                partial(on_graph(detach_outputs), first=buffers),
                requires={Fact.NAMED, Fact.DIFFERENTIABLE, Fact.OBJECTIVE},
                provides={Fact.DETACHED},
                reads=lambda findings: {"loss": findings[Objective].alone},
            ),
            MARK_BACKWARD,
        ],
        premises={Fact.FLAT, Fact.GLOBAL},
        promised=CAPTURED,
    )


def filling_passes(stacks: Sequence[Stack], captured: Captured, kinds: Mapping[str, type]) -> PassList:
    """The layers that were not traced take their places; ``captured`` learns their parameters, buffers and draws.  Then
    all layers are noted.

    Args:
        kinds: the classes of the model's modules, by path.
    """
    inner = [replace(stack, path=stack.path.removeprefix("model.")) for stack in stacks]
    passes = [Pass(partial(on_graph(fill_up), stack=stack, captured=captured), requires=CAPTURED) for stack in inner]
    passes.append(Pass(partial(on_graph(mark_layers), kinds=kinds), requires=CAPTURED))
    return PassList(passes, premises=CAPTURED, promised=CAPTURED)
