"""Moves a loss and the product that makes its logits into a call that goes through the rows in chunks.

The logits of a large vocabulary are the largest tensor of a step, several times over: as they are made, in float32,
as probabilities, and as their gradient.  A sum over rows needs those of some rows only at a time.  Its gradient is
proportional to that of the sum, so it is computed at once, chunk by chunk, and scaled in the backward: nothing is
computed twice, and no logits are kept (as in Hsu et al., "Liger Kernel", 2024).

Before (x is [6, 8], w [100, 8]):
    linear = aten.linear(x, w);  cross_entropy_sum = operators.cross_entropy_sum(linear, target)
After, with the two calls as the program of the submodule "chunked_loss_0":
    chunked_loss_0 = self.chunked_loss_0(x, w, target);  getitem = chunked_loss_0[0]

[Note: the same gradient] A collective in the gradient of the logits joins what ranks have computed for a gradient of
one, so it is right only where the gradient of the sum is the same on the ranks that it joins.  Of a sum that is
Replicate it is not: each rank has a summand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from autoparallel import _torch
from autoparallel.comm.collectives import redistribute
from autoparallel.graph.layers import layer_of
from autoparallel.passes.raise_row_views import find_heads
from autoparallel.passes.recompute_layers import Region, outline
from autoparallel.placements import Replicate
from autoparallel.rules.calls import arguments


class ChunkError(ValueError):
    """A loss that cannot be computed in chunks of rows."""


class ChunkedLoss(Region):
    """A loss that is summed over chunks of rows; what it saves for the backward are its gradients.

    Args:
        layer: the module path of the loss.
        program: makes the sum, as its one result, of rows and of what all rows share.
        rows: which of the program's arguments are rows: what the logits [..., C] are made of, and the targets.
        chunks: how many there are along a dim of rows; fewer where no dim is that long.
        ignored: the target of rows that have no gradient, whatever that of the sum is; None for no such rows.
    """

    def __init__(
        self, layer: str, program: fx.GraphModule, rows: Sequence[int], chunks: int, ignored: int | None
    ) -> None:
        super().__init__(layer, program)
        self.rows, self.chunks, self.ignored = tuple(rows), chunks, ignored

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls ``function`` for each chunk of the arguments, and adds up what it returns."""
        return (_Chunked.apply(self, function, *arguments),)


class _Chunked(torch.autograd.Function):
    """The sum forward, with its gradients; in the backward they are multiplied by that of the sum."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkedLoss, function: Callable[..., Any], *arguments: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        whole = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        grads = {i: _accumulator(whole[i], is_rows=i in loss.rows) for i in wanted}
        *lengths, _ = whole[loss.rows[0]].shape
        dim = next((d for d, n in enumerate(lengths) if n >= loss.chunks), lengths.index(max(lengths)))
        length = lengths[dim]
        size = max(1, -(-length // loss.chunks))
        sums: list[torch.Tensor] = []
        # What is saved for the gradients of a chunk is used at once: no hook of the program around it is asked.
        with _torch.autograd.saved_as_they_are():
            for begin in range(0, max(length, 1), size):
                count = min(size, length - begin)
                part = [x.narrow(dim, begin, count) if i in loss.rows else x for i, x in enumerate(whole)]
                for i in wanted:
                    part[i] = part[i].detach().requires_grad_()
                with torch.set_grad_enabled(bool(wanted)):
                    (total,) = function(*part)
                sums.append(total.detach())
                if not wanted:
                    continue
                chunk_grads = torch.autograd.grad(total, [part[i] for i in wanted], materialize_grads=True)
                for i, grad in zip(wanted, chunk_grads, strict=True):
                    if i in loss.rows:
                        grads[i].narrow(dim, begin, count).copy_(grad)
                    else:
                        grads[i].add_(grad)
        counted = torch.as_tensor(whole[loss.rows[1]] != loss.ignored).any()
        ctx.save_for_backward(counted, *grads.values())
        ctx.places, ctx.dtypes = wanted, [whole[i].dtype for i in wanted]
        return torch.stack(sums).sum() if len(sums) > 1 else sums[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        results: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grads[0] is not None:
            counted, *saved = ctx.saved_tensors
            factor = torch.where(counted, grads[0], 0)  # that of a mean over no target is infinite, or NaN
            for i, dtype, grad in zip(ctx.places, ctx.dtypes, saved, strict=True):
                results[i + 2] = (grad * factor).to(dtype)
        return tuple(results)


def _accumulator(x: torch.Tensor, *, is_rows: bool) -> torch.Tensor:
    """Where the gradients of chunks go: side by side, or added up, in float32 or wider."""
    if is_rows:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def chunkable(graph: fx.Graph) -> list[str]:
    """The keys of the losses of a captured graph that can be computed in chunks of rows."""
    return [head.loss.meta["key"] for head in find_heads(graph) if not head.views]


def chunk_loss(module: fx.GraphModule, losses: Collection[str], chunks: int) -> None:
    """Rewrites ``module`` in place.

    Args:
        losses: the keys of the losses to be chunked, all that :func:`chunkable` found in the global graph.
        chunks: of the rows of each.

    Raises:
        ChunkError: where the logits of a loss are redistributed along their rows, so that they must be there whole, or
            between a product and a loss that is Replicate (see [Note: the same gradient]).
    """
    heads = {head.loss.meta["key"]: head for head in find_heads(module.graph)}
    for number, key in enumerate(losses):
        if key not in heads:
            raise ChunkError(
                f"{key} cannot be computed in chunks of rows, because the plan redistributes the rows of its logits: "
                "pin the layout of what the product before it reads, or leave loss_chunks out"
            )
        head = heads[key]
        if Replicate in head.loss.meta.get("placements", ()) and any(n.target is redistribute for n in head.between):
            raise ChunkError(
                f"{key} cannot be computed in chunks of rows, because the plan redistributes its logits, and runs it "
                "as R: plan again, or leave loss_chunks out"
            )
        nodes = [head.product, *head.between, head.loss]
        name = f"chunked_loss_{number}"
        entering = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in nodes))
        rows = [entering.index(x) for x in (head.rows, arguments(head.loss)["target"])]
        ignored = arguments(head.loss).get("ignore_index")
        program = outline(module, nodes, name)
        module.add_submodule(name, ChunkedLoss(layer_of(head.loss) or "", program, rows, chunks, ignored))
