"""How tensors lie on a mesh: placements and layouts, how an operator runs on an axis, and what turns one layout into
another.  May import nothing of the package.

- ``placement``: the four placements, their duality, and the arithmetic of pieces.
- ``regions``: which block of a tensor a rank has.
- ``modes``: the ways in which an operator may run on one axis.
- ``redistribution``: the steps between layouts, and what they send.
"""

from autoparallel.placements.placement import (
    ACTIONS,
    COLLECTIVES,
    Invariant,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    action,
    chunk,
    count_pieces,
    cut_along,
    divides,
    dual,
    dual_layout,
    fills_up,
    format_layout,
    from_dtensor_placements,
    largest_piece,
    parse_layout,
    parse_placement,
    reaches_all,
    sent_bytes,
    shards_of,
    to_dtensor_placements,
)

__all__ = [
    "ACTIONS", "COLLECTIVES", "Invariant", "Layout", "Partial", "Placement", "Replicate", "Shard", "action", "chunk",
    "count_pieces", "cut_along", "divides", "dual", "dual_layout", "fills_up", "format_layout",
    "from_dtensor_placements", "largest_piece", "parse_layout", "parse_placement", "reaches_all", "sent_bytes",
    "shards_of", "to_dtensor_placements",
]  # fmt: skip
