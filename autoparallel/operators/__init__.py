"""Operators of our own that appear in a program: what torch's operator computes, in a form that can be sharded.

What depends on a rank (its rows of a table, its positions in a dropout mask) is asked for by the name of the axis
when the operator runs, so that the program is the same text on every rank.  May import
``comm`` and ``_torch``.

- ``random``: numbers by global position, and the seed and call that they belong to.
- ``draws``: what is drawn with them: dropout, the usual distributions.
- ``torch_random``: torch's random operators in terms of these; ``composite_random`` those that are made of others.
- ``opaque``: what has a backward of its own: an ``autograd.Function``, a hook.
- ``derivatives``: gradients that a model takes, and what stands for operators that autograd differentiates once.
- ``selective_checkpoint``: calls whose results are kept where the layer around them runs again.
- ``control_flow``: conditions and loops on values, each with the graphs that it may run.
- ``flex``: attention whose scores functions of the model's change and mask.
- ``attention_kernels``: attention on some kernels only.
- ``plain_randomness``: the same numbers for a plain model in eager.
- ``tables``: sharded, padded and interleaved tables, and look-ups in them.
- ``losses``: cross-entropy as a sum and a weight, also of sharded classes.
- ``changed_parameters``: parameters that a call changes itself.
- ``ctc``: losses of sequences whose places in time nobody knows.
- ``spans``: what speech models mask at random.
- ``recurrent``: recurrent layers, whose results are one tensor.
- ``complexes``: complex numbers of pairs with any strides.
- ``experts``: linear layers of which every row picks its own.
- ``chunked``: linear layers in chunks of rows, of which what one exchanges runs while the others are computed.
"""

from autoparallel.operators.complexes import pairs_as_complex
from autoparallel.operators.draws import DRAWS, dropout
from autoparallel.operators.losses import (
    cross_entropy_sum,
    cross_entropy_sum_sharded,
    cross_entropy_weight,
    mean_or_sum,
    weighted_mean,
)
from autoparallel.operators.plain_randomness import UnsupportedRandomness, plain_randomness
from autoparallel.operators.random import MICROBATCH, RandomState, draw_from, random_state
from autoparallel.operators.tables import (
    embedding_sharded,
    indices_along,
    interleave,
    pad_rows,
    padded_embedding,
    piece,
    pool_indices,
    shard_index,
    topk_indices,
)

__all__ = [
    "DRAWS",
    "MICROBATCH",
    "RandomState",
    "UnsupportedRandomness",
    "cross_entropy_sum",
    "cross_entropy_sum_sharded",
    "cross_entropy_weight",
    "draw_from",
    "dropout",
    "embedding_sharded",
    "indices_along",
    "interleave",
    "mean_or_sum",
    "pad_rows",
    "padded_embedding",
    "pairs_as_complex",
    "piece",
    "plain_randomness",
    "pool_indices",
    "random_state",
    "shard_index",
    "topk_indices",
    "weighted_mean",
]  # fmt: skip
