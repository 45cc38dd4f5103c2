"""Which layouts at rest the planner offers: uneven ones where no even one is over the same axes, the smallest only."""

from __future__ import annotations

import pytest

from autoparallel.placements import divides, format_layout, largest_piece, parse_layout
from autoparallel.planner.request.presets import constraints_for
from autoparallel.planner.space.at_rest import every_layout, permitted, without_needless_padding

NAMES = ("dp", "tp", "ep")


def _offered(shape: tuple[int, ...], mesh: tuple[int, ...], preset: str = "auto") -> list[str]:
    constraints = constraints_for(preset, NAMES[: len(mesh)])
    worthwhile = without_needless_padding(shape, every_layout(shape, mesh), mesh, constraints.tensor)
    return [format_layout(x) for x in permitted(worthwhile, constraints)]


@pytest.mark.parametrize(
    ("shape", "mesh", "offered"),
    [
        ((8,), (4,), ["I", "S0"]),
        ((5,), (4,), ["I", "S0"]),  # 2, 2, 1 and nothing
        ((3,), (4,), ["I"]),  # fewer rows than ranks stay whole
        ((5, 8), (4,), ["I", "S1"]),  # an even dim is there: no padding
        ((50257, 768), (8,), ["I", "S1"]),
        ((50257, 7), (8,), ["I", "S0"]),
        ((5, 7), (4,), ["I", "S1"]),  # 5 x 2 instead of 2 x 7
        ((3, 5), (4,), ["I", "S1"]),
        ((1, 1), (4,), ["I"]),
        ((2, 5), (2, 2), ["I,I", "I,S0", "S0,I", "S0,S1"]),  # 3 of 10, as much as two axes on the columns
    ],
    ids=str,
)
def test_uneven_layouts_are_offered_where_no_even_one_is(
    shape: tuple[int, ...], mesh: tuple[int, ...], offered: list[str]
) -> None:
    assert _offered(shape, mesh) == offered


def test_fully_sharded_takes_uneven_shards_over_all_axes() -> None:
    assert _offered((5,), (2, 2), "fsdp") == ["S0,S0"]
    assert _offered((3,), (2, 2), "fsdp") == ["I,S0", "S0,I"], "two axes have four ranks, a row for three"
    assert _offered((8,), (2, 2), "fsdp") == ["S0,S0"]
    assert _offered((5,), (2, 2), "data_parallel") == ["I,I"]


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 3), (4, 2), (2, 2, 2)], ids=str)
def test_an_uneven_layout_is_the_smallest_over_its_axes(mesh: tuple[int, ...]) -> None:
    for shape in [(7,), (5, 9), (9, 5), (7, 11, 3), (6, 5), (12, 10)]:
        offered = _offered(shape, mesh)
        assert len(offered) == len(set(offered)) and offered[0] == ",".join("I" * len(mesh))
        uneven = [x for x in offered if not divides(shape, parse_layout(x), mesh)]
        axes = [tuple(part == "I" for part in x.split(",")) for x in uneven]
        assert len(set(axes)) == len(axes), "one for each set of axes"
        for text in uneven:
            over = tuple(part == "I" for part in text.split(","))
            same = [x for x in offered if tuple(part == "I" for part in x.split(",")) == over]
            assert same == [text], "no even one beside it"
            assert all(n > 0 for n in largest_piece(shape, parse_layout(text), mesh))


@pytest.mark.parametrize("shape", [(7, 6), (11, 6), (15, 10)], ids=str)
def test_an_axis_of_tensor_parallelism_cuts_evenly_where_as_much_is_kept_so(shape: tuple[int, ...]) -> None:
    assert "S0,S0" in _offered(shape, (2, 2))
    assert "S0,S1" in _offered(shape, (2, 2), "fsdp_tensor_parallel")
