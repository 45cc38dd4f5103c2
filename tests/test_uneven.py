"""Shards of different sizes, as parameters at rest may have: every redistribution of them, its transpose, its bytes.

What a rank should hold is said by ``torch.chunk`` (``tests.rules.proof.cut``), not by the code under test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Shard as DTensorShard

from autoparallel.comm import simulate as simulation
from autoparallel.comm.collectives import extent_of, redistribute, start_transfers
from autoparallel.comm.groups import group_name
from autoparallel.comm.simulate import simulate
from autoparallel.placements import (
    COLLECTIVES,
    Invariant,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    action,
    chunk,
    divides,
    dual_layout,
    fills_up,
    format_layout,
    largest_piece,
    reaches_all,
    sent_bytes,
)
from autoparallel.placements.redistribution import Redistributor, Step, step_between, step_bytes
from autoparallel.runtime.norms.program import NormProgram
from tests.rules.proof import combine, coordinates, cut

NAMES = ("dp", "tp")
AXES = [group_name("mesh0", NAMES, (i,)) for i in range(2)]
SIZES = st.integers(1, 17)
RANKS = st.integers(1, 4)


def _seconds(kind: str, axes: tuple[int, ...], size: int) -> float:
    return 1e-6 + 1e-9 * sent_bytes(kind, size, 2 if axes == (0,) else 3)


def _walk(tensors: list[Tensor], paths: Sequence[Sequence[Step]], mesh: Sequence[int]) -> list[Tensor]:
    """One rank's values after the steps, all tensors in one collective for each step."""
    for steps in zip(*paths, strict=True):
        group = group_name("mesh0", NAMES, steps[0].axes)
        extents = [extent_of(s, AXES[: len(mesh)]) for s in steps]
        tensors = start_transfers(tensors, [s.src for s in steps], [s.dst for s in steps], group, extents)()
    return tensors


def _check(
    shapes: Sequence[tuple[int, ...]], src: Layout, dst: Layout, paths: Sequence[Sequence[Step]], mesh: tuple[int, ...]
) -> None:
    """The paths take values to where the layouts say, and the transposed paths the gradients back."""
    generator = torch.Generator().manual_seed(3)
    backward = [[step.transposed() for step in reversed(path)] for path in paths]
    for steps, here, there in ((paths, src, dst), (backward, dual_layout(dst), dual_layout(src))):
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        pieces = [cut(value, here, mesh, generator) for value in values]
        found = simulate(
            lambda rank, steps=steps, pieces=pieces: _walk([p[rank] for p in pieces], steps, mesh),
            mesh,
            NAMES[: len(mesh)],
        )
        for i, value in enumerate(values):
            what = f"{shapes[i]} on {mesh}, {format_layout(here)} -> {format_layout(there)}"
            parts = [f[i] for f in found]
            torch.testing.assert_close(combine(parts, there, mesh, what), value, rtol=1e-12, atol=1e-12, msg=what)
            wanted = [p.shape for p in cut(value, there, mesh, generator)]
            assert [p.shape for p in parts] == wanted, what
            last = steps[i][-1] if steps[i] else None
            if last is not None and last.before is not None and action(last.src, last.dst) not in ("slice", "nothing"):
                assert all(p.is_contiguous() for p in parts), what


# ----------------------------------------------------------------------------------------------------- the arithmetic


@given(SIZES, RANKS)
def test_a_piece_is_that_of_torch_chunk_and_of_dtensor(size: int, ranks: int) -> None:
    parts = torch.arange(size).chunk(ranks)
    for index in range(ranks):
        start, length = chunk(size, ranks, index)
        assert length == (len(parts[index]) if index < len(parts) else 0)
        assert length == 0 or start == parts[index][0]
        assert (length, start) == DTensorShard.local_shard_size_and_offset(size, ranks, index) or length == 0
    assert largest_piece((size,), (Shard(0),), (ranks,)) == (len(parts[0]),)
    assert divides((size,), (Shard(0),), (ranks,)) == (size % ranks == 0)
    assert reaches_all((size,), (Shard(0),), (ranks,)) == (size >= ranks or ranks == 1)


@given(SIZES, RANKS, RANKS)
def test_the_first_rank_has_the_largest_piece(size: int, outer: int, inner: int) -> None:
    mesh, layout = (outer, inner), (Shard(0), Shard(0))
    pieces = cut(torch.arange(size), layout, mesh, torch.Generator())
    assert sum(map(len, pieces)) == size
    assert largest_piece((size,), layout, mesh) == pieces[0].shape == (max(map(len, pieces)),)


# -------------------------------------------------------------------------------------------------- on simulated ranks

_KINDS: list[Placement] = [Invariant, Replicate, Partial, Shard(0), Shard(1)]
_PAIRS = [(a, b) for a, b in itertools.permutations(_KINDS, 2)]


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, st.integers(2, 4), st.sampled_from([p for p in _PAIRS if p[0].kind == "S" or p[1].kind == "S"]))
def test_every_size_on_one_axis(rows: int, columns: int, ranks: int, pair: tuple[Placement, Placement]) -> None:
    """Also where there are fewer rows than ranks, and where several tensors of different sizes travel together."""
    (src, dst), mesh = pair, (ranks,)
    shapes = [(rows, columns), (columns, rows), (rows * ranks, columns * ranks), (rows, columns, 2)]
    paths = [[Step((0,), src, dst).on(shape, (src,), mesh)] for shape in shapes]
    assert paths[2][0].before is None and (paths[0][0].before is None) == (
        divides(shapes[0], (src,), mesh) and divides(shapes[0], (dst,), mesh)
    )
    _check(shapes[:1], (src,), (dst,), paths[:1], mesh)
    _check(shapes, (src,), (dst,), paths, mesh)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SIZES, min_size=1, max_size=3),
    st.sampled_from([(2, 2), (2, 3), (3, 2), (1, 4)]),
    st.data(),
)
def test_every_pair_of_layouts_on_two_axes(shape: list[int], mesh: tuple[int, int], data: st.DataObject) -> None:
    redistributor = Redistributor(mesh, _seconds)
    layouts = redistributor.table(shape, 8, True, True, uneven=True).layouts
    src, dst = data.draw(st.sampled_from(layouts)), data.draw(st.sampled_from(layouts))
    path = redistributor.path(src, dst, shape, 8, True, True, uneven=True)
    _check([tuple(shape)], src, dst, [path], mesh)


@pytest.mark.parametrize("layout", [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0))], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (9, 9), (7, 5, 3)], ids=str)
def test_parameters_at_rest_on_two_axes(shape: tuple[int, ...], layout: Layout) -> None:
    """The gather of a parameter and the reduction of its gradient, as FSDP over two axes does both."""
    for mesh in ((2, 2), (2, 3), (3, 2)):
        if reaches_all(shape, layout, mesh):
            assert not divides(shape, layout, mesh)
            redistributor = Redistributor(mesh, _seconds)
            path = redistributor.path(layout, (Replicate, Replicate), shape, 8, True, True, uneven=True)
            assert any(step.before is not None for step in path)
            _check([shape], layout, (Replicate, Replicate), [path], mesh)


def test_gaps_between_the_pieces_of_an_inner_axis() -> None:
    """9 rows over (2, 3): 5 and 4; then 2, 2, 1 and 2, 2, 0. All six ranks send 2 rows."""
    mesh, shape, layout = (2, 3), (9,), (Shard(0), Shard(0))
    assert [len(p) for p in cut(torch.arange(9), layout, mesh, torch.Generator())] == [2, 2, 1, 2, 2, 0]
    step = Step((1,), Shard(0), Replicate).on(shape, layout, mesh)
    found = simulate(lambda rank: extent_of(step, AXES), mesh, NAMES)
    assert {e.padded for e in found} == {(2,)} and [e.lengths for e in found] == [(2, 2, 1)] * 3 + [(2, 2, 0)] * 3
    # 7 over (2, 3): 4 and 3; then 2, 2, 0 and 1, 1, 1: the second group sends more than its largest piece
    step = Step((1,), Shard(0), Replicate).on((7,), layout, mesh)
    found = simulate(lambda rank: extent_of(step, AXES), mesh, NAMES)
    assert {e.padded for e in found} == {(2,)} and [e.lengths for e in found] == [(2, 2, 0)] * 3 + [(1, 1, 1)] * 3


def test_layouts_of_operators_stay_even() -> None:
    redistributor = Redistributor((2, 2), _seconds)
    layouts = redistributor.table((6, 5), 8, True, True).layouts
    assert (Shard(0), Invariant) in layouts and (Shard(1), Invariant) not in layouts
    assert (Shard(1), Invariant) in redistributor.table((6, 5), 8, True, True, uneven=True).layouts
    with pytest.raises(ValueError, match="cannot have the layout"):
        redistributor.path((Shard(1), Invariant), (Invariant, Invariant), (6, 5), 8, True, True)
    with pytest.raises(ValueError, match="cannot have the layout"):  # a rank would have nothing of three rows
        redistributor.path((Shard(0), Shard(0)), (Invariant, Invariant), (3,), 8, True, True, uneven=True)


def test_rows_of_a_padded_table_are_read_where_each_rank_has_one() -> None:
    cut = (Shard(0), Shard(0), Shard(0))
    assert fills_up((15,), (16,), cut, (2, 2, 2)) and not fills_up((9,), (16,), cut, (2, 2, 2))
    assert not fills_up((7,), (8,), cut, (2, 2, 2)), "no layout at rest gives 7 rows to 8 ranks"


def test_an_uneven_slice_is_never_made_by_accident() -> None:
    with pytest.raises(ValueError, match="5 rows cannot be cut into 2 equal pieces"):
        simulate(lambda rank: redistribute(torch.ones(5), "I", "S0", "mesh0/dp"), (2,), NAMES[:1])
    with pytest.raises(RuntimeError):
        simulate(lambda rank: redistribute(torch.ones(5), "P", "S0", "mesh0/dp"), (2,), NAMES[:1])


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)], ids=str)
def test_every_rank_sends_the_bytes_that_are_predicted(mesh: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    collect = simulation._ThreadCommunicator._collect

    def record(self: Any, x: Tensor, axis: str, kind: str) -> list[Tensor]:
        sent.append((kind.partition("(")[0], x.numel() * x.element_size()))
        return collect(self, x, axis, kind)

    monkeypatch.setattr(simulation._ThreadCommunicator, "_collect", record)
    shape = (7, 9)
    redistributor = Redistributor(mesh, _seconds)
    table = redistributor.table(shape, 8, True, True, uneven=True)
    seen = set()
    for here, layout in enumerate(table.layouts):
        for there in np.flatnonzero(np.isfinite(table.direct[here])):
            step = step_between(layout, table.layouts[there]).on(shape, layout, mesh)
            kind = action(step.src, step.dst)
            if kind not in COLLECTIVES:
                continue
            pieces = cut(torch.zeros(shape, dtype=torch.float64), layout, mesh, torch.Generator())
            sent.clear()
            simulate(lambda rank, step=step, pieces=pieces: _walk([pieces[rank]], [[step]], mesh), mesh, NAMES)
            ranks = math.prod(mesh[a] for a in step.axes)
            full = step_bytes(step, layout, shape, 8, mesh) // (ranks if step.src.kind == "S" else 1)
            assert sent == [(kind, full)] * math.prod(mesh), f"{format_layout(layout)}, {step}"
            seen.add((kind, step.before is None))
    assert {(kind, False) for kind in COLLECTIVES} <= seen


def _norm(grads: dict[str, Tensor], layouts: dict[str, Layout], p: float, mesh: tuple[int, int]) -> Tensor:
    program = NormProgram(layouts, p, NAMES, mesh, "mesh0", [set(layouts)])
    return program(*([grads[name] for name in names] for names in program.sets)).squeeze()


@settings(max_examples=25, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=3), st.sampled_from([(1, 4), (2, 2), (3, 2)]), st.data())
def test_padding_never_enters_a_norm(shape: list[int], mesh: tuple[int, int], data: st.DataObject) -> None:
    table = Redistributor(mesh, _seconds).table(shape, 8, True, True, uneven=True)
    layouts = [x for x in table.layouts if all(p.kind in "IS" for p in x)]
    layout = data.draw(st.sampled_from(layouts))
    p = data.draw(st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf]))
    generator = torch.Generator().manual_seed(1)
    grad, other = (torch.randn(s, generator=generator, dtype=torch.float64) for s in (shape, [5]))
    pieces = cut(grad, layout, mesh, generator)
    expected = torch.linalg.vector_norm(torch.cat([grad.reshape(-1), other]), p)
    layouts_of = {"w": layout, "b": (Invariant, Invariant)}
    for found in simulate(lambda rank: _norm({"w": pieces[rank], "b": other}, layouts_of, p, mesh), mesh, NAMES):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_nan_on_the_rank_with_the_shortest_shard_is_seen_by_all() -> None:
    mesh, layout = (4, 1), (Shard(0), Invariant)
    grad = torch.ones(7, dtype=torch.float64)
    grad[6] = math.nan
    pieces = cut(grad, layout, mesh, torch.Generator())
    assert [len(p) for p in pieces] == [2, 2, 2, 1]
    for p in (1.0, 2.0, math.inf):
        found = simulate(lambda rank, p=p: _norm({"w": pieces[rank]}, {"w": layout}, p, mesh), mesh, NAMES)
        assert all(norm.isnan() for norm in found)


def test_a_gathered_tensor_shares_no_memory_with_the_shard() -> None:
    def rank(index: int) -> bool:
        x = torch.ones(chunk(5, 2, index)[1])
        step = Step((0,), Shard(0), Invariant).on((5,), (Shard(0),), (2,))
        extents = [extent_of(step, ["mesh0/dp"])]
        (out,) = start_transfers([x], [step.src], [step.dst], "mesh0/dp", extents)()
        out += 1
        return bool((x == 1).all()) and coordinates((2,))[index] == (index,)

    assert all(simulate(rank, (2,), NAMES[:1]))
