"""`chunk_loss`: a loss goes through its rows in chunks, and saves its gradients instead of its logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.comm.collectives import redistribute
from autoparallel.passes.chunk_loss import ChunkError, chunk_loss, chunkable
from autoparallel.passes.recompute_layers import regions_of
from autoparallel.placements import Replicate
from tests.passes.support import captured, show

Loss = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A product of its input, and a loss of it."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.head = nn.Linear(8, 100)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(x), y)


LOSSES: dict[str, Loss] = {
    "mean": lambda x, y: F.cross_entropy(x, y, ignore_index=3),
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum", label_smoothing=0.1),
    "weighted": lambda x, y: F.cross_entropy(x, y, torch.linspace(0, 1, 100, dtype=x.dtype)),
    "nll": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y),
    "capped": lambda x, y: F.cross_entropy(5 * torch.tanh(x / 5), y),
    "dims of rows": lambda x, y: F.cross_entropy(x.reshape(-1, 100), y.reshape(-1), ignore_index=3),
    "classes in dim 1": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "probabilities": lambda x, y: F.cross_entropy(x, F.one_hot(y, 100).to(x.dtype), reduction="sum"),
}


SEQUENCES = ("dims of rows", "classes in dim 1")


def _inputs(*rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, 8, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 100, rows, generator=generator)


def test_before_and_after() -> None:
    module = captured(Head(LOSSES["sum"]).double(), *_inputs(23)).module
    chunk_loss(module, chunkable(module.graph), 4)
    regions = regions_of(module)
    assert show(module)[4:] == [
        "chunked_loss_0 = chunked_loss_0(args_0, p_model_head_weight, p_model_head_bias, args_1)",
        "getitem = _operator.getitem(chunked_loss_0, 0)",
        "return [getitem]",
    ]
    assert show(regions["chunked_loss_0"].program)[4:] == [
        "linear = aten.linear(args_0, p_model_head_weight, p_model_head_bias)",
        "cross_entropy_sum = losses.cross_entropy_sum(linear, args_1, None, -100, 0.1)",
        "return [cross_entropy_sum]",
    ]


@pytest.mark.wide_where(lambda rows: rows == 1)
@pytest.mark.parametrize("rows", [1, 23])
@pytest.mark.parametrize("loss", LOSSES)
def test_it_computes_the_same_and_holds_no_logits(loss: str, rows: int) -> None:
    torch.manual_seed(0)
    plain = Head(LOSSES[loss]).double()
    more = [5] if loss in SEQUENCES else []
    graph = captured(plain, *_inputs(24, *more))
    chunk_loss(graph.module, chunkable(graph.graph), 4)
    for region in regions_of(graph.module).values():
        region.program.recompile()
    graph.module.recompile()
    x, y = _inputs(rows, *more)
    x.requires_grad_()
    values = {node: plain.get_parameter(name) for node, name in graph.parameters.items()}
    values |= dict(graph.constants) | dict(zip(graph.inputs, (x, y), strict=True))
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    largest = 0

    def note(saved: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        ours, *_ = graph.module(*(values[name] for name in names))
    expected = plain(x, y)
    wanted = [x, *plain.parameters()]
    pairs = zip(
        (ours, *torch.autograd.grad(3 * ours, wanted)), (expected, *torch.autograd.grad(3 * expected, wanted)),
        strict=True,
    )  # fmt: skip
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert largest <= max(plain.head.weight.numel(), x.numel())


def test_logits_that_others_read_are_not_cut() -> None:
    both = captured(Head(lambda x, y: F.cross_entropy(x, y) + x.mean()).double(), *_inputs(23))
    assert not chunkable(both.graph)


def test_logits_that_are_redistributed_for_a_replicated_loss_are_refused() -> None:
    module = captured(Head(LOSSES["sum"]).double(), *_inputs(23)).module
    losses = chunkable(module.graph)
    (logits,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    (loss,) = logits.users
    with module.graph.inserting_before(loss):
        replicated = module.graph.call_function(redistribute, (logits, "I", "R", "mesh0/tp"))
    replicated.meta = dict(logits.meta)
    loss.replace_input_with(logits, replicated)
    loss.meta["placements"] = (Replicate,)
    with pytest.raises(ChunkError, match="redistributes its logits, and runs it as R"):
        chunk_loss(module, losses, 4)
