"""FlexAttention: attention whose scores functions of the model's change and mask.

Such a function is told the row, the head and the positions of a score.  A rank that has some of the rows or heads tells
it where they stand in the whole, so that it answers as it does in one process.

On a CPU all scores are made, as torch does there, and differentiated by autograd, which torch does not do there; on
other devices torch's own kernels run, as ``torch.compile`` makes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import flex_attention as flex

from autoparallel.operators.random import MICROBATCH, coordinate

Body = Callable[..., Any]

RESULTS = ("output", "logsumexp", "largest score")
"""What torch's operator gives, the latter two divided by log(2)."""


def is_flex(target: Any) -> bool:
    """Whether an operator attends with functions of the model's."""
    return getattr(target, "family", None) is flex_operator


_OPERATORS: dict[tuple[str, str], Body] = {}


def flex_operator(score: fx.GraphModule, mask: fx.GraphModule) -> Body:
    """The operator that attends with some functions, as torch traces them; those that are alike share one."""

    def flex_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Sequence[Any],
        score_reads: Sequence[Any],
        mask_reads: Sequence[Any],
        scale: float,
        options: Mapping[str, Any],
        result: int = 0,
        density: float = 1.0,
        rows: str = "",
        heads: str = "",
        cut: Sequence[int] = (),
    ) -> Tensor:
        """One of the results of attention (see ``RESULTS``) on a rank's rows and heads.

        Args:
            q: ``[rows, heads, queries, width]``.
            k, v: ``[rows, heads, keys, width]``; the heads of q are a multiple of theirs.
            blocks: of a ``BlockMask`` all but its function, as torch lists it.
            score_reads, mask_reads: what the functions read beside the score and its place; whole.
            scale: of the scores.
            options: of torch's kernels.
            result: which of the results.
            density: the part of the scores that the blocks do not mask, for the cost model.
            rows, heads: the axes that shard them, outermost first and joined by commas.
            cut: which of what the functions read, counted through both, has the microbatch's rows only.
        """
        reads = [_in_the_batch(x) if i in cut else x for i, x in enumerate((*score_reads, *mask_reads))]
        score_reads, mask_reads = reads[: len(score_reads)], reads[len(score_reads) :]
        first = [torch.tensor(coordinate(axes)[0] * n, device=q.device) for axes, n in
                 zip((rows, heads), q.shape[:2], strict=True)]  # fmt: skip
        run = _dense if q.device.type in ("cpu", "meta") else _compile_kernel()
        out: Tensor = run(
            _from(score, first, 1, score_reads), _from(mask, first, 0, mask_reads), q, k, v, blocks, scale, options,
            result,
        )  # fmt: skip
        return out

    constants = any(node.op == "get_attr" for graph in (score, mask) for node in graph.graph.nodes)
    flex_attention.__qualname__ = "flex_attention"
    flex_attention.graphs = [score, mask]  # type: ignore[attr-defined]
    flex_attention.of_graphs = lambda graphs: flex_operator(*graphs)  # type: ignore[attr-defined]
    flex_attention.family = flex_operator  # type: ignore[attr-defined]
    return flex_attention if constants else _OPERATORS.setdefault((score.code, mask.code), flex_attention)


def _in_the_batch(x: Tensor) -> Tensor:
    """A microbatch's rows at their places in the batch, whose other rows nobody reads."""
    here, count = coordinate(MICROBATCH)
    return x.new_zeros(len(x) * count, *x.shape[1:]).slice_scatter(x, 0, here * len(x), (here + 1) * len(x))


def reads_of_rows(node: fx.Node) -> set[int]:
    """The numbers, counted through both functions of FlexAttention, of those tensors of which they read the score's row
    only."""
    call: Any = node
    numbers: set[int] = set()
    first = 0
    for graph, row, reads in zip(call.target.graphs, (1, 0), call.args[4:6], strict=True):
        places = [x for x in graph.graph.nodes if x.op == "placeholder"]
        for i, read in enumerate(places[row + 4 :]):
            if all(x.target is torch.ops.aten.index.Tensor and x.args[0] is read and x.args[1][0] is places[row]
                   and read not in x.args[1] for x in read.users):  # fmt: skip
                numbers.add(first + i)
        first += len(reads)
    return numbers


def _from(function: Body, first: Sequence[Tensor], scores: int, reads: Sequence[Any]) -> Body:
    """A function of places that counts rows and heads from those of the whole that come first here."""

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        return function(row + first[0], head + first[1], query, key, *reads)

    def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
        changed = function(score, row + first[0], head + first[1], query, key, *reads)
        return changed.to(score.dtype)  # which torch's kernels keep: numbers of Python may be of the default dtype

    return change if scores else mask  # torch counts their parameters


def _everywhere(function: Body, scores: int) -> Body:
    """A function of one place, of all: ``scores`` operands have a dim for each of rows, heads, queries and keys."""
    for dim in (3, 2, 1, 0):
        function = torch.vmap(function, (*[0] * scores, *(0 if dim == place else None for place in range(4))))
    return function


def _dense(
    score: Body, mask: Body, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Any], scale: float, options: Any,
    result: int,
) -> Tensor:  # fmt: skip
    """Attention by all scores, in the dtypes of torch's own."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q.to(dtype) @ k.to(dtype).transpose(-2, -1) * scale
    places = [torch.arange(n, device=q.device) for n in scores.shape]
    changed = _everywhere(score, 1)(scores, *places)
    scores = changed.to(dtype).masked_fill(~_everywhere(mask, 0)(*places), -math.inf)
    if result == 0:
        return torch.ops.aten._safe_softmax(scores, -1).to(q.dtype) @ v.to(q.dtype)
    return (scores.logsumexp(-1) if result == 1 else scores.detach().amax(-1)) / math.log(2)


def _kernel(
    score: Body, mask: Body, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Any], scale: float, options: Any,
    result: int,
) -> Tensor:  # fmt: skip
    """Attention by torch's own function."""
    *tensors, queries, keys = blocks[2:]
    block_mask: Any = flex.BlockMask(tuple(blocks[:2]), *tensors[:8], (queries, keys), mask)  # type: ignore[call-arg, arg-type]
    settings: Any = {name: x for name, x in options.items() if name in flex.FlexKernelOptions.__annotations__}
    results: Any = flex.flex_attention(
        q, k, v, score, block_mask, scale, q.shape[1] != k.shape[1], kernel_options=settings or None,
        return_aux=flex.AuxRequest(lse=result == 1, max_scores=result == 2),
    )  # fmt: skip
    out: Tensor = results[0] if result == 0 else results[1][result - 1] / math.log(2)
    return out


@functools.cache
def _compile_kernel() -> Body:
    return torch.compile(_kernel, dynamic=False)
