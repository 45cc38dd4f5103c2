"""The report as one HTML file: complete, offline, and nothing in it is markup that should be text."""

from __future__ import annotations

import dataclasses
import html
import re
from html.parser import HTMLParser

import torch
import torch.nn.functional as F
from torch import nn

from autoparallel.comm.traffic import Traffic
from autoparallel.decisions.pipeline import Border, PipelinePlan, PipelineTraffic, StageCost
from autoparallel.hardware import CPU, H100
from autoparallel.plan import Plan
from autoparallel.planner.draft import call_of, draft_captured
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from autoparallel.predict.cost import workload_of
from autoparallel.report.comparison import Comparison, report
from autoparallel.report.html import SEARCH
from autoparallel.text import units

VOID = ("meta", "rect", "line", "polyline", "input")


class Page(HTMLParser):
    """Tags, texts, and what is asked of the network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.asked: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag not in VOID:
            self.open.append(tag)
        self.asked += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href", "style") and v]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1].append(data)


def test_a_report_of_a_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    call = call_of((torch.randn(8, 16), torch.randint(0, 4, (8,))), with_target=True)
    request = Request(axes=(("dp", 2), ("tp", 2)), profile=CPU, plan="fsdp", loss_fn=F.cross_entropy)
    planner = Planner(model, request)
    captured = planner.capture(call)
    work = workload_of(captured, call, CPU)
    assert (work.count, work.unit) == (8, "rows")
    assert work.flops == 2 * 3 * 8 * (16 * 32 + 32 * 4), "twice the forward for the backward"
    made = draft_captured(planner, captured, call)
    plan = dataclasses.replace(made.plan, unruled={"evil::<script>alert(1)</script>": 2})
    plans, problems = {"fsdp": (plan, made.prediction)}, {"<b>other</b>": "does <i>not</i> fit"}
    text = report(Comparison("<script>Net</script> & co", work, H100, plans, problems))
    page = Page(text)
    assert not page.open and page.tags.count("html") == 1 and "svg" in page.tags and "polyline" in page.tags
    assert page.tags.count("script") == text.count("<script") == 1 and f"<script>{SEARCH}</script>" in text
    assert "b" not in page.tags and "i" not in page.tags
    assert not page.asked and "http" not in text
    for said in ("<script>Net</script> & co", "does <i>not</i> fit", "evil::<script>alert(1)</script>", "per use",
                 "all_reduce", "dim 0 over dp+tp", "optimizer states", "aten.linear: ",
                 f"{units(H100.memory or 0.0)}, what a device has, not to scale"):  # fmt: skip
        assert said in page.text, said

    frame = Page(shown := plan._repr_html_())
    assert frame.tags == ["iframe"] and not frame.text, "a notebook gets one element, with the page in an attribute"
    inner = Page(html.unescape(shown.partition('srcdoc="')[2].partition('" sandbox')[0]))
    assert not inner.open and "svg" in inner.tags and "allow-scripts" not in shown, "nothing runs in a notebook"
    assert "the preset 'fsdp', on the mesh (dp=2, tp=2)" in inner.text and "dim 0 over dp+tp" in inner.text
    alone = Plan.from_json(plan.to_json())._repr_html_()
    assert "dim 0 over dp+tp" in alone and "Where the time goes" not in alone, "of a file, decisions alone"


def test_other_meshes_are_views_of_one_page() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    call = call_of((torch.randn(8, 16), torch.randint(0, 4, (8,))), with_target=True)
    compared = []
    for axes in ((("dp", 4),), (("dp", 2), ("tp", 2))):
        planner = Planner(model, Request(axes=axes, profile=CPU, plan="data_parallel", loss_fn=F.cross_entropy))
        captured = planner.capture(call)
        made = draft_captured(planner, captured, call)
        work = workload_of(captured, call, CPU)
        compared.append(Comparison("Net", work, CPU, {"data_parallel": (made.plan, made.prediction)}, {}))
    text = report(*compared)
    page = Page(text)
    assert not page.open and page.tags.count("input") == 4  # a search, and a view of each mesh and of all
    assert re.findall(r"<label for=\"(view\d)\">([^<]*)", text) == [
        ("view0", "(dp=4)"), ("view1", "(dp=2, tp=2)"), ("view2", "all of them")
    ]  # fmt: skip
    assert all(f"#view{i}:checked ~ #body{i} {{ display: block; }}" in text for i in range(3))
    assert text.count(" checked>") == 1 and 'id="view0" checked>' in text
    both = Page(text.partition("id=body2")[2].partition("<table>")[2].partition("</table>")[0])
    assert [row[0] for row in both.rows[1:]] == ["(dp=4)", "(dp=2, tp=2)"]


def test_a_pipeline_is_shown_over_time_and_stage_by_stage() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    call = call_of((torch.randn(8, 16), torch.randint(0, 4, (8,))), with_target=True)
    request = Request(axes=(("dp", 2),), profile=CPU, plan="data_parallel", loss_fn=F.cross_entropy)
    planner = Planner(model, request)
    captured = planner.capture(call)
    work = workload_of(captured, call, CPU)
    made = draft_captured(planner, captured, call)
    stages = tuple(StageCost(f"<i>first</i>.{i}", f"last.{i}", 1e-3, 2e-3, 5e6, 2) for i in range(4))
    crossing = Border("0/aten.linear#0", 0, 1, 100, 50, True)
    stays = Border("1/aten.linear#0", 1, 2, 7, 7, False)
    traffic = PipelineTraffic((crossing, stays), (), (Traffic(),) * 2, (Traffic(),) * 2)
    pipeline = PipelinePlan("pp", 2, "zero_bubble_v", 4, ("a", "b", "c"), stages, 1.0, 0.25, traffic)
    plan = dataclasses.replace(made.plan, pipeline=pipeline)
    page = Page(report(Comparison("Net", work, CPU, {"auto": (plan, made.prediction)}, {})))
    assert not page.open and not page.asked and "i" not in page.tags
    assert "Pipeline over pp=2: zero_bubble_v, 4 microbatches, 2 stages per rank; predicted 1.0 s" in page.text
    assert "25% of it waiting" in page.text
    for stage in range(4):
        for microbatch in range(4):
            for kind in ("forward", "backward, gradients of inputs", "backward, gradients of parameters"):
                assert f"{kind} of microbatch {microbatch} in stage {stage}: " in page.text
    assert "<i>first</i>.3" in page.text and "last.0" in page.text
    assert ["0", "1", "0/aten.linear#0", "100 B", "50 B", "600 B"] in page.rows, "what crosses, 4 microbatches a step"
    assert ["1", "2", "1/aten.linear#0", "7 B", "7 B", "the same rank"] in page.rows
