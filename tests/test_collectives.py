"""Redistributions on simulated meshes: values, gradients, and second derivatives, for every pair of layouts."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoparallel.comm.collectives import pack, redistribute, start_transfers
from autoparallel.comm.groups import group_name
from autoparallel.comm.simulate import simulate
from autoparallel.placements import (
    Invariant,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    action,
    dual,
    dual_layout,
    format_layout,
    parse_layout,
    sent_bytes,
    shards_of,
)
from autoparallel.placements.redistribution import Redistributor, Step, steps_by_axis
from tests.rules.proof import combine, cut, divides

NAMES = ("dp", "tp")
PLACEMENTS = [Invariant, Replicate, Partial, Shard(0), Shard(1)]


def _along(x: Tensor, steps: Sequence[Step], names: Sequence[str]) -> Tensor:
    for step in steps:
        x = redistribute(x, str(step.src), str(step.dst), group_name("mesh0", names, step.axes))
    return x


def _check(src: Layout, dst: Layout, steps: Sequence[Step], mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Forward, backward and the backward of the backward of a chain of redistributions are what layouts say."""
    generator = torch.Generator().manual_seed(11)
    names = NAMES[-len(mesh) :]
    value, cotangent, second = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    values = cut(value, src, mesh, generator)
    cotangents = cut(cotangent, dual_layout(dst), mesh, generator)
    # What the gradient of a gradient flows back through has the layout that is dual to the gradient's, the value's.
    seconds = cut(second, src, mesh, generator)

    def rank(index: int) -> tuple[Tensor, Tensor, Tensor]:
        x = values[index].requires_grad_()
        g = cotangents[index].requires_grad_()
        y = _along(x, steps, names)
        (grad,) = torch.autograd.grad(y, x, g, create_graph=True)
        (again,) = torch.autograd.grad(grad, g, seconds[index])
        return y.detach(), grad.detach(), again

    ranks = simulate(rank, mesh, names)
    what = f"{format_layout(src)} -> {format_layout(dst)}"
    for k, (layout, expected) in enumerate(((dst, value), (dual_layout(src), cotangent), (dst, second))):
        found = combine([r[k] for r in ranks], layout, mesh, f"{what}, {('value', 'gradient', 'second')[k]}")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda m, k=k: f"{what} [{k}]: {m}")


_PAIRS = [(a, b) for a, b in itertools.product(PLACEMENTS, repeat=2)]


@pytest.mark.parametrize(("src", "dst"), _PAIRS, ids=[f"{a}-{b}" for a, b in _PAIRS])
def test_every_pair_of_placements_on_one_axis(src: Placement, dst: Placement) -> None:
    if src == dst:
        assert action(src, dst) == "nothing"
        return
    if (src, dst) == (Replicate, Partial) or (src, dst) == (Invariant, Partial):
        assert action(src, dst) == "keep_on_one"
    _check((src,), (dst,), [Step((0,), src, dst)], (3,), (3, 6))


def test_the_table_closes_under_transposition() -> None:
    for src, dst in _PAIRS:
        if src != dst:
            assert action(dual(dst), dual(src)), f"{src} -> {dst}"
        step = Step((0,), src, dst)
        assert step.transposed().transposed() == step


def _layouts(mesh: tuple[int, ...], shape: tuple[int, ...]) -> list[Layout]:
    return [x for x in itertools.product(PLACEMENTS, repeat=len(mesh)) if divides(shape, x, mesh)]


@pytest.mark.wide_where(lambda first: first not in [format_layout(x) for x in _layouts((2, 3), (6, 6))][::4])
@pytest.mark.parametrize("first", [format_layout(x) for x in _layouts((2, 3), (6, 6))])
def test_every_pair_of_layouts_on_two_axes(first: str) -> None:
    mesh, shape = (2, 3), (6, 6)
    redistributor = Redistributor(mesh, _seconds)
    src = parse_layout(first)
    for dst in _layouts(mesh, shape):
        steps = redistributor.path(src, dst, shape, 8, True, True)
        assert (len(steps) == 0) == (src == dst)
        here = src
        for step in steps:
            assert all(here[axis] == step.src for axis in step.axes)
            here = step.apply(here)
        assert here == dst
        _check(src, dst, steps, mesh, shape)


def _seconds(kind: str, axes: tuple[int, ...], size: int) -> float:
    return 1e-6 + 1e-9 * sent_bytes(kind, size, 2 if axes == (0,) else 3)


@settings(max_examples=25, deadline=None)
@given(
    st.permutations([0, 1, 2]),
    st.lists(st.sampled_from([*PLACEMENTS, Shard(2)]), min_size=2, max_size=2),
    st.lists(st.sampled_from([*PLACEMENTS, Shard(2)]), min_size=2, max_size=2),
    st.floats(0.1, 10.0),
)
def test_paths_do_not_depend_on_prices(
    order: list[int], src: list[Placement], dst: list[Placement], ratio: float
) -> None:
    shape = tuple((6, 6, 12)[i] for i in order)
    redistributor = Redistributor((2, 3), lambda kind, axes, size: 1e-6 * (ratio if 1 in axes else 1.0) + 1e-9 * size)
    steps = redistributor.path(tuple(src), tuple(dst), shape, 8, True, True)
    _check(tuple(src), tuple(dst), steps, (2, 3), shape)


def test_a_way_by_axis_changes_innermost_shards_only() -> None:
    """Also from (S0, S0) to (P, S0), where the second axis has other rows than before though its placement is alike."""
    layouts = [*itertools.product([Invariant, Partial, Shard(0), Shard(1)], repeat=3)]
    for src, dst in itertools.product(layouts, repeat=2):
        here = src
        for step in steps_by_axis(src, dst):
            assert all(here[axis] == step.src for axis in step.axes)
            after = step.apply(here)
            for layout, placement in ((here, step.src), (after, step.dst)):
                assert placement.kind != "S" or step.axes == shards_of(layout, placement.dim)[-1:], (src, dst)
            here = after
        assert here == dst


def test_a_layout_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a tensor of shape \(4, 6\) cannot have the layout"):
        Redistributor((2, 3), _seconds).path((Invariant, Invariant), (Invariant, Shard(0)), (4, 6), 8, True, True)


def test_only_the_innermost_axis_of_a_dim_is_gathered_alone() -> None:
    """Gathering the outer axis of a dim first would put rows into the wrong order."""
    redistributor = Redistributor((2, 3), _seconds)
    src, dst = (Shard(0), Shard(0)), (Invariant, Shard(0))
    steps = redistributor.path(src, dst, (6, 6), 8, True, True)
    assert steps[0].axes == (1,)
    with pytest.raises(AssertionError):
        _check(src, dst, [Step((0,), Shard(0), Invariant)], (2, 3), (6, 6))


def test_a_wrong_transpose_would_be_seen() -> None:
    """The check can fail: Replicate has a gradient of summands, so it is not the same as Invariant."""
    with pytest.raises(AssertionError):
        _check((Invariant,), (Replicate,), [], (3,), (3, 6))


def test_differentiating_through_a_loss_of_several_ranks_counts_each_rank_once() -> None:
    """Data parallel by hand: an Invariant weight used on each rank's rows has the global gradient on every rank."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    w = torch.randn(4, generator=generator, dtype=torch.float64)
    plain = w.clone().requires_grad_()
    ((x @ plain) ** 3).sum().backward()

    def rank(index: int) -> tuple[Tensor, Tensor]:
        mine = w.clone().requires_grad_()
        used = redistribute(mine, "I", "R", "mesh0/tp")
        loss = redistribute(((x.chunk(3)[index] @ used) ** 3).sum(), "P", "I", "mesh0/tp")
        (first,) = torch.autograd.grad(loss, mine, create_graph=True)
        (hessian_row_sum,) = torch.autograd.grad(first.sum(), mine)
        return first.detach(), hessian_row_sum

    grad = plain.grad
    second = torch.autograd.functional.hessian(lambda v: ((x @ v) ** 3).sum(), w).sum(0)
    for first, row in simulate(rank, (3,), ("tp",)):
        torch.testing.assert_close(first, grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(row, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("src", "dst"), [(Partial, Invariant), (Partial, Shard(0)), (Shard(0), Replicate), (Shard(0), Shard(1))], ids=str
)
def test_tensors_that_are_sent_together_need_not_live_until_they_arrive(src: Placement, dst: Placement) -> None:
    """They are copied to lie one behind the other, so that a step holds one copy of its gradients and not two."""

    def rank(index: int) -> tuple[bool, list[Tensor]]:
        tensors = [torch.full((4, 4), float(index + k)) for k in range(2)]
        alive = [weakref.ref(x) for x in tensors]
        finish = start_transfers(tensors, [src] * 2, [dst] * 2, group_name("mesh0", ("dp",), (0,)))
        del tensors
        return any(x() is not None for x in alive), finish()

    for held, values in simulate(rank, (2,), ("dp",)):
        assert not held
        assert [sorted({*x.flatten().tolist()}) for x in values] == (
            [[1.0], [3.0]] if src == Partial else [[0.0, 1.0], [1.0, 2.0]]
        )


def test_tensors_without_elements_keep_their_shapes_in_one_collective() -> None:
    shapes = [(2, 3), (0, 5), (), (4, 0), (3,)]

    def rank(index: int) -> list[Tensor]:
        tensors = [torch.full(shape, index + 1.0) for shape in shapes]
        group = group_name("mesh0", ("dp",), (0,))
        return start_transfers(tensors, [Partial] * len(shapes), [Invariant] * len(shapes), group)()

    for values in simulate(rank, (2,), ("dp",)):
        assert [tuple(x.shape) for x in values] == shapes
        assert all(bool((x == 3).all()) for x in values)


@pytest.mark.parametrize("count", [1, 2])
def test_packed_tensors_are_copies(count: int) -> None:
    tensors = [torch.ones(2, 3) for _ in range(count)]
    for copy in pack(tensors):
        copy.zero_()
    assert all(bool((x == 1).all()) for x in tensors)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_of_an_activation_does_not_keep_all_of_it(dim: int) -> None:
    """Of a parameter, which is there in any case, it is a view."""

    def rank(index: int) -> tuple[int, int, int]:
        leaf = torch.randn(8, 8, requires_grad=True)
        parts = [redistribute(x, "I", f"S{dim}", "mesh0/tp") for x in (2 * leaf, leaf)]
        gathered: list[int] = []
        local = torch.randn(8, 8, requires_grad=True)
        whole = redistribute(1 * local, f"S{dim}", "I", "mesh0/tp")
        local.register_hook(lambda grad: gathered.append(grad.untyped_storage().nbytes()))
        whole.sum().backward()
        return *(part.untyped_storage().nbytes() // part.nbytes for part in parts), gathered[0] // local.nbytes

    assert simulate(rank, (2,), ("tp",)) == [(1, 2, 1)] * 2
