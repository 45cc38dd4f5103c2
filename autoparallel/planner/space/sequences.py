"""Which operators run over the sequence: what the preset ``context_parallel`` shards.

The sequence is dim 1 of the tokens, or of the other inputs where there are none, followed from factor to factor.  An
operator that needs all of it, as causal attention does, runs as the search likes best: over heads, or over rows of the
batch, between two all-to-alls; where there is little to do, whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.mark_batch import follow_dims
from autoparallel.planner.request.presets import Constraints


def sequence_factors(
    inputs: Sequence[fx.Node], constraints: Constraints, axis_sizes: Sequence[int], size: Sizes
) -> dict[fx.Node, tuple[str, ...]]:
    """The factors of each operator that run over the sequence; none for a preset that does not shard it.

    Args:
        inputs: the placeholders of a graph that are inputs.

    Raises:
        PlanError: where no input has a sequence, or it does not divide.
    """
    if not constraints.sequence:
        return {}
    tokens = [n for n in inputs if n.meta["val"].ndim == 2 and not n.meta["val"].is_floating_point()]
    rows = tokens or [n for n in inputs if n.meta["val"].ndim == 3]
    if not rows:
        raise PlanError(
            "plan='context_parallel' shards the sequence, which is dim 1 of tokens [batch, sequence] or of an input "
            "[batch, sequence, features], and no input is one: use another plan"
        )
    length, ranks = size.shape(rows[0])[1], math.prod(axis_sizes[axis] for axis in constraints.sequence)
    if length % ranks:
        raise PlanError(
            f"a sequence of {length} does not divide by the {ranks} ranks of the mesh axis that "
            "plan='context_parallel' shards it over: pad it, or use another plan"
        )
    return follow_dims(rows[0].graph, {n: {1} for n in inputs if size.shape(n)[1:2] == (length,)})
