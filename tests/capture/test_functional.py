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
        args = fx.map_arg((node.args, node.kwargs), lambda n: numbers[n])
        numbers[node] = f"%{len(lines)}"
        shape = (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else ()
        if "_assert" not in str(node.target):
            lines.append(f"{node.target if node.op == 'call_function' else node.op} {args} {shape}")
    return lines


def test_a_trace_that_writes_nowhere_becomes_what_torch_makes_of_it() -> None:
    program = _traced(Views())
    expected = program.run_decompositions(compositions(program.graph_module))
    with patch.object(ExportedProgram, "run_decompositions") as again:
        ours = make_functional(program)
    again.assert_not_called()
    assert _lines(ours.graph) == _lines(expected.graph)
    targets = [node.target for node in ours.graph.nodes]
    assert torch.ops.aten.view.default in targets and torch.ops.aten.reshape.default not in targets
    assert targets.count(torch.ops.aten.sym_size.int) == 1 and torch.ops.aten.sym_numel.default not in targets
    ours.graph.lint()


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


@pytest.mark.parametrize("kind", [Writes, Views])
def test_only_a_trace_that_writes_is_traced_again(kind: type[nn.Module]) -> None:
    program = _traced(kind())
    with patch.object(ExportedProgram, "run_decompositions", return_value=program) as again:
        make_functional(program)
    assert again.called == (kind is Writes)
