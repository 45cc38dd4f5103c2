"""Where a trace writes nowhere, what torch would make of it is made without tracing it again."""

from __future__ import annotations

import operator
from unittest.mock import patch

import pytest
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export

from autoparallel.capture.functional.composites import compositions
from autoparallel.capture.functional.functional import make_functional


class Views(nn.Module):
    """Composites of views and copies, of which some give what they are given, and a size that is asked for twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.drop(self.up(x)).reshape(x.shape[0], -1, 4)
        left, right = h.transpose(1, 2).contiguous().chunk(2, dim=1)
        flat = (left * right.to(left.dtype)).flatten()
        weight = mask.to(x.dtype).expand_as(x).movedim(0, 1)
        heads = torch.repeat_interleave(h, 2, dim=1)
        loss = nn.functional.mse_loss(heads, heads.tanh())
        return flat.view(h.shape[0], -1).contiguous(), weight.narrow(0, 0, 3), h.float().reshape(-1), heads, loss


class Writes(nn.Module):
    """The same in place."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = x.reshape(-1, 2).clone()
        y[:, 0] = 0
        return y * mask.sum()


class Residuals(nn.Module):
    """Writes to what operators have made: whoever reads behind a write reads what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.up(x)
        before = h * 2
        h += x
        h = self.act(h)
        h.mul_(h).masked_fill_(mask == 0, -1.0)
        y = torch.tanh(h)
        y.add_(before, alpha=0.5).clamp_(min=-1.0)
        return h + 1, y, before


class Statistics(nn.Module):
    """Writes to buffers, those that batch norms write among them: a call leaves their last values behind."""

    def __init__(self) -> None:
        super().__init__()
        self.running = nn.BatchNorm1d(5)
        self.without, self.frozen = nn.BatchNorm1d(5, track_running_stats=False), nn.BatchNorm1d(5).eval()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.frozen(self.without(torch.relu_(self.running(x))))
        row = h.detach().mean((0, 1))
        self.count += 1
        self.average.mul_(0.9).add_(row, alpha=0.1)
        self.last.copy_(row)
        self.last.add_(self.count)
        return h * mask + self.average, row, self.last * 2


class ThroughViews(nn.Module):
    """Writes to what has a view, which sees it."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = x + 1
        row = y[0]
        y.mul_(2)
        return row * mask.sum()


class ThroughAnotherName(nn.Module):
    """The same, of a view that no schema speaks of."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = x + 1
        (row,) = torch.broadcast_tensors(y)
        y.mul_(2)
        return row * mask.sum()


class ThroughAViewOfABuffer(nn.Module):
    """The same, of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, 6))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        row = self.table[0]
        self.table.mul_(2)
        return x * row * mask.sum()


class ThroughAnotherBuffer(nn.Module):
    """The same, of one that stands under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(6))
        self.register_buffer("again", self.table)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.table.mul_(2)
        return x * self.again * mask.sum()


class OfAnInput(nn.Module):
    """Writes to what the caller has."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.detach().add_(1) * mask.sum()


class ToAnotherDtype(nn.Module):
    """Writes a comparison as numbers, which the operator without a write gives as truth values."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * 2).gt_(1.0) * mask.sum()


def _traced(model: nn.Module) -> ExportedProgram:
    inputs = torch.randn(4, 5, 6), torch.ones(4, 1, 1, dtype=torch.int64)
    return export(model, inputs, dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}), strict=False)


def _lines(graph: fx.Graph) -> list[str]:
    """The calls that make tensors, in numbers instead of names; sizes as they are."""
    numbers: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | int):
            numbers[node] = str(value)
            continue
        if node.target is torch.ops.aten.clone.default and not node.kwargs:  # of what dropout gives back
            numbers[node] = numbers[node.args[0]]
            continue
        if node.target is torch.ops.aten.copy.default:  # which is written as a clone, or not at all
            numbers[node] = numbers[node.args[1]]
            continue
        args = fx.map_arg((node.args, node.kwargs), lambda n: numbers[n])
        numbers[node] = f"%{len(lines)}"
        shape = (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else ()
        if "_assert" not in str(node.target):
            lines.append(f"{node.target if node.op == 'call_function' else node.op} {args} {shape}")
    return lines


@pytest.mark.parametrize("kind", [Views, Residuals, pytest.param(Statistics, marks=pytest.mark.wide)])
def test_a_trace_becomes_what_torch_makes_of_it(kind: type[nn.Module]) -> None:
    program = _traced(kind())
    expected = program.run_decompositions(compositions(program.graph_module))
    with patch.object(ExportedProgram, "run_decompositions") as again:
        ours = make_functional(program)
    again.assert_not_called()
    assert _lines(ours.graph) == _lines(expected.graph)
    kinds = [[(spec.kind, spec.target) for spec in p.graph_signature.output_specs] for p in (ours, expected)]
    assert kinds[0] == kinds[1]
    ours.graph.lint()


def test_views_are_taken_apart_and_sizes_made_once() -> None:
    ours = make_functional(_traced(Views()))
    targets = [node.target for node in ours.graph.nodes]
    assert torch.ops.aten.view.default in targets and torch.ops.aten.reshape.default not in targets
    assert targets.count(torch.ops.aten.sym_size.int) == 1 and torch.ops.aten.sym_numel.default not in targets


class Positions(nn.Module):
    """Asks for a size before anything else is computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1] * x.shape[0]).to(x.dtype)
        return x.transpose(0, 1).reshape(-1, 6) * positions[:, None]


def test_sizes_are_made_of_those_of_the_inputs_before_they_are_read() -> None:
    x = torch.randn(4, 5, 6)
    program = make_functional(export(Positions(), (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},), strict=False))
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.aten.sym_size.int) == 2 and targets.count(operator.mul) == 1
    assert torch.ops.aten.sym_numel.default not in targets
    for inputs in (x, torch.randn(3, 7, 6)):
        torch.testing.assert_close(fx.Interpreter(program.graph_module).run(inputs)[0], Positions()(inputs))


@pytest.mark.parametrize(
    "kind", [Writes, ThroughViews, ThroughAViewOfABuffer, ThroughAnotherName, OfAnInput, ToAnotherDtype]
)
def test_what_is_written_to_memory_that_others_see_is_traced_again(kind: type[nn.Module]) -> None:
    program = _traced(kind())
    expected = program.run_decompositions({})
    with patch.object(ExportedProgram, "run_decompositions", autospec=True, return_value=expected) as again:
        make_functional(program)
    assert again.called
