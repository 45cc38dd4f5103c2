"""A report's blocks, as plain text and on a page: the same words, and nothing that looks like markup by chance."""

from __future__ import annotations

import json

from autoparallel.data import from_data, to_data
from autoparallel.decisions.frontier import Frontier, Tried, frontier_of
from autoparallel.report.frontier import frontier_blocks
from autoparallel.report.html import Bars, Curve, _marks, page
from autoparallel.text import Span, Table, Timeline, plain_text, units

TABLE = Table(("what", "bytes"), [("<a>", "1 B"), ("longer", "200 B")], right=["bytes"], chosen=1)
TIMELINE = Timeline(
    {"rank 0": [Span(0.0, 1.0, "forward", "<first>", "0", "0"), Span(3.0, 4.0, "backward", "last", "a", "0")]},
    "0 is a forward",
)


def test_plain_text() -> None:
    assert plain_text("words [b]as they are[/b]", TABLE).splitlines() == [
        "words [b]as they are[/b]",
        "",
        " what    bytes",
        " ─────────────",
        " <a>       1 B",
        " longer  200 B",
    ]  # fmt: skip
    row, key = plain_text(TIMELINE).splitlines()
    assert row == f"rank 0  {'0' * 18}{'.' * 34}{'a' * 18}"
    assert key == "0 is a forward, . waiting"


def test_what_is_too_wide_is_folded_not_cut() -> None:
    lines = plain_text(Table(("what", "where"), [("x" * 200, "here")])).splitlines()
    assert max(map(len, lines)) <= 80 and sum(line.count("x") for line in lines) == 200
    numbers = [f"n {i} n n" for i in range(9)]
    text = plain_text(Table(("what", *numbers), [("x" * 28, *["12.3 kB"] * 9)], right=numbers))
    assert max(map(len, text.splitlines())) <= 80 and (text.count("x"), text.count("n"), text.count("k")) == (28, 27, 9)


def test_what_was_compared_is_a_picture() -> None:
    compared = [
        Tried("auto", 2.0, 6e9, again=1),
        Tried("fsdp", 1.0, 9e9),
        Tried("hybrid", 3.0, 8e9),  # beaten, but the best of its preset
        Tried("fsdp", 3.5, 8e9, again=2),  # the best of its preset that fits
        Tried("fsdp", 4.0, 7e9, microbatches=4),
    ]
    frontier = frontier_of(compared, 8e9)
    assert frontier.tried == tuple(compared[i] for i in (0, 1, 2, 3))
    assert from_data(Frontier, json.loads(json.dumps(to_data(frontier), default=to_data))) == frontier
    blocks = frontier_blocks(frontier)
    lines = plain_text(*blocks).splitlines()
    picture = [line for line in lines if line.startswith("|")]
    assert picture[0] == "|a" and picture[3].startswith("|" + " " * 28 + "*")
    assert picture[1].endswith("c") and picture[1].count("-") == 68  # two points lie on the line of the limit
    assert any("auto" in line and "1 layer run again" in line for line in lines)
    assert any("fsdp" in line and "9.0 GB (too much)" in line for line in lines)
    text = page("<title>", {"": {"Seconds against memory": blocks}})
    assert text.count("<circle") == 4 and "<title>hybrid, 3.0 s, 8.0 GB</title>" in text
    assert frontier_blocks(frontier_of(compared[:1], None)) == frontier_blocks(None) == []


def test_a_page() -> None:
    bars = Bars({"auto": {"parameters": 3.0, "nothing": 0.0}, "fsdp": {"parameters": 1.0}}, units)
    curve = Curve([(0.0, 1.0), (2.0, 4.0)], 8.0)
    text = page("<title>", {"": {"First": ["a < b", TABLE], "Empty": [], "Charts": [TIMELINE, bars, curve]}})
    assert text.startswith("<!doctype html>") and "<h1>&lt;title&gt;</h1>" in text
    assert "<h2>First</h2>\n<p>a &lt; b</p>" in text and "Empty" not in text
    assert "<tr><td>&lt;a&gt;</td><td class=n>1 B</td></tr>" in text
    assert "<tr class=chosen><td>longer</td><td class=n>200 B</td></tr>" in text
    assert text.count('<svg class="chart"') == 3 and text.count("<svg") == text.count("</svg>")
    assert "<title>&lt;first&gt;</title>" in text and "<title>waiting</title>" in text
    assert "<title>parameters: 3 B</title>" in text and "nothing" not in text
    assert "polyline" in text and "what a device has" in text
    assert _marks(3.0) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0] and len(_marks(0.0999)) == 10
    assert "<tr><td>parameters</td><td class=n>3 B</td><td class=n>1 B</td></tr>" in text
