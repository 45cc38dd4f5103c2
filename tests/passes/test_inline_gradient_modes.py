"""Gradient modes in a graph, before and after."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import export

from autoparallel.passes.inline_gradient_modes import inline_gradient_modes


class _Follows(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        h = x * w
        with torch.no_grad():
            a = h + h.exp()
        return h * a


def test_a_region_reads_one_detached_tensor() -> None:
    program = export(_Follows(), (torch.ones(2), torch.ones(2)), strict=False)
    assert "wrap_with_set_grad_enabled" in program.graph_module.code
    inline_gradient_modes(program.graph_module, {"w"})
    program.graph_module.recompile()
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    mul, detach, exp, add, out = calls
    assert [str(n.target) for n in calls] == [f"aten.{x}" for x in (
        "mul.Tensor", "detach.default", "exp.default", "add.Tensor", "mul.Tensor"
    )]  # fmt: skip
    assert [n.all_input_nodes for n in calls[1:]] == [[mul], [detach], [detach, exp], [mul, add]]
    assert out.users


class _WritesThroughDetach(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        between = x.detach()
        between.add_(w)
        return between * x


def test_what_is_detached_carries_the_gradient_that_is_written_to_it() -> None:
    program = export(_WritesThroughDetach(), (torch.ones(2), torch.ones(2)), strict=False)
    inline_gradient_modes(program.graph_module, {"w"})
    between, add, seen, out = [n for n in program.graph.nodes if n.op == "call_function"]
    assert [str(n.target) for n in (between, add, seen, out)] == [
        "aten.alias.default", "aten.add_.Tensor", "aten.detach.default", "aten.mul.Tensor"
    ]  # fmt: skip
    assert out.all_input_nodes == [add, seen] and seen.args == between.args


class _DetachesInPlace(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        h = x * w
        before = h + w
        h.detach_().add_(1)
        return before * h


def test_what_is_detached_in_place_becomes_a_tensor_of_its_own() -> None:
    program = export(_DetachesInPlace(), (torch.ones(2), torch.ones(2)), strict=False)
    inline_gradient_modes(program.graph_module, {"w"})
    program.graph.lint()
    mul, before, detach, clone, add, out = [n for n in program.graph.nodes if n.op == "call_function"]
    assert [str(n.target) for n in (mul, before, detach, clone, add, out)] == [
        "aten.mul.Tensor", "aten.add.Tensor", "aten.detach.default", "aten.clone.default", "aten.add_.Tensor",
        "aten.mul.Tensor",
    ]  # fmt: skip
    assert [n.args[0] for n in (before, detach, clone, add)] == [mul, mul, detach, clone]
    assert out.args == (before, add)


class _ChangesItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.mul_(0.5)
        return x * self.w


def test_a_changed_parameter_has_another_value_and_the_same_gradient() -> None:
    program = export(_ChangesItsParameter(), (torch.ones(2),), strict=False)
    (w,) = program.graph_signature.inputs_to_parameters
    inline_gradient_modes(program.graph_module, {w}, parameters={w})
    before, detach, write, now, value, out = [n for n in program.graph.nodes if n.op == "call_function"]
    assert [str(n.target) for n in (before, detach, write, now, value, out)] == [
        "aten.clone.default", "aten.detach.default", "aten.mul_.Tensor", "aten.detach.default",
        "autoparallel.with_value.default", "aten.mul.Tensor",
    ]  # fmt: skip
    assert {str(n.args[0]) for n in (before, detach, now)} == {w}
    assert value.args == (before, now) and out.args[1] is value
