"""The report in a browser, where there is one: a script that the test adds clicks, types, and writes what it saw."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autoparallel.report.html import Bars, Curve, page
from autoparallel.text import Points, Span, Table, Timeline, duration, units

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
SEEN = """
<script>
const view = (i) => document.getElementById(`view${i}`).click();
const type = (text) => { words.value = text; words.dispatchEvent(new Event("input")); };
const cells = () => [...document.querySelectorAll("td:first-child")].filter((cell) => cell.offsetParent);
const rows = () => cells().map((cell) => cell.textContent);
const seen = { fits: [], rows: [], errors: [] };
window.addEventListener("error", (e) => seen.errors.push(e.message));
const look = (text) => { type(text); seen.rows.push([text, rows(), found.textContent]); };
for (const i of [1, 0]) {
  view(i);
  seen.fits.push(document.documentElement.scrollWidth <= document.documentElement.clientWidth);
  look(""); look("ATTN"); look("nothing such");
}
view(1);
seen.rows.push(["after a switch", rows(), found.textContent]);
type("");
const drawn = [...document.querySelectorAll("#body1 svg.chart")].map((chart) => {
  const box = chart.getBBox(), frame = chart.viewBox.baseVal;
  return box.x >= 0 && box.y >= 0 && box.x + box.width <= frame.width && box.y + box.height <= frame.height;
});
const pre = Object.assign(document.createElement("pre"), { textContent: JSON.stringify({ ...seen, drawn }) });
document.body.replaceChildren(pre);
</script>
"""


def _shown(text: str, width: int, path: Path) -> dict[str, Any]:
    """What the added script has seen in a window of ``width`` pixels."""
    file = path / "report.html"
    file.write_text(text.replace("</body>", SEEN + "</body>"))
    assert BROWSER is not None
    made = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path}/profile",
         f"--window-size={width},900", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    shown = re.search(r"<pre>(.*)</pre>", made.stdout)
    assert shown is not None, made.stdout[-2000:] + made.stderr[-2000:]
    seen: dict[str, Any] = json.loads(shown[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    return seen


@pytest.mark.skipif(BROWSER is None, reason="no browser")
@pytest.mark.parametrize("width", [1400, 600])
def test_views_and_search_work_and_nothing_is_cut_off(width: int, tmp_path: Path) -> None:
    names = Table(("module", "operators"), [["attn.q", "linear"], ["mlp <b>", "linear\ngelu"], ["norm", "attn"]])
    bars = Bars({"auto": {"forward": 1.0, "a rather long name of a part": 1e-4, "update": 0.3}, "fsdp": {}}, duration)
    boxes = {f"rank {i}": [Span(0.1 * i, 1.0, "forward", "forward", label="0")] for i in range(3)}
    points = [("*", "auto", 1.0, 2e9), ("a", "fsdp", 1.2, 1e9)]
    charts = [Curve([(0.0, 1e9), (0.5, 2e9), (1.0, 5e8)], 80e9), Curve([(0.0, 1e9), (1.0, 2e9)], 3e9),
              Timeline(boxes, ""), Points(points, 72e9), Points(points[:1])]  # fmt: skip
    first = {"Names": [names], "Sizes": [Bars({"dp": {"all_reduce": 5.0}}, units)]}
    seen = _shown(page("<b>Net</b>", {"one": first, "two": {"All": [bars, *charts, names]}}), width, tmp_path)
    assert not seen["errors"] and seen["fits"] == [True, True]
    assert seen["drawn"] == [True] * 6
    names_of = ["attn.q", "mlp <b>", "norm"]
    assert seen["rows"] == [
        ["", ["forward", "a rather long name of a part", "update", *names_of], ""],
        ["ATTN", ["attn.q", "norm"], "2 rows"],
        ["nothing such", [], "0 rows"],
        ["", [*names_of, "all_reduce"], ""],
        ["ATTN", ["attn.q", "norm"], "2 rows"],
        ["nothing such", [], "0 rows"],
        ["after a switch", [], "0 rows"],
    ]
