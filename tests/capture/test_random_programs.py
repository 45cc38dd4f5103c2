"""The trace is the model, for programs that nobody has thought of: what a forward does with gradient modes, views,
changes in place and detached tensors, drawn at random, against eager.

Three steps agree to 1e-9, or the program is refused with what to change; what eager itself cannot run does not count.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from tests.capture.programs.inplace import TwoAndAMean
from tests.capture.runner import Program, rows, verdict
from tests.distributed import run_distributed

NEW = (
    "self.a({u})", "{u} * {w}", "{u} + {w}", "{u}.sin()", "{u}.exp().clamp(max=3)", "{u} + self.mean",
    "torch.where({u} > 0, {u}, {w})", "torch.cat([{u}[:, :4], {w}[:, 4:]], 1)", "{u}.flip(0)", "{u}.softmax(-1)",
    "torch.zeros(x.shape[0], 8)", "torch.zeros_like({u})", "self.mean.expand(x.shape[0], 8).clone()",
    "{u}.detach()", "{u}.detach()", "{u}.data", "{u}.clone()", "{u}.detach().clone()",
    "{u}.view(-1, 2, 4).view(-1, 8)", "{u}[:, :]", "{u}.t().t()", "{u}.unsqueeze(0).squeeze(0)",
    "{u}.contiguous()", "{u}.to(x.dtype)", "{u}.type_as(x)", "F.dropout({u}, 0.5, False)", "{u}.float().to(x.dtype)",
)  # fmt: skip
CHANGES = (
    "{u} += {w}", "{u} *= {w}", "{u}.mul_(0.5)", "{u}.copy_({w})", "{u}.zero_()", "{u}.clamp_(-1, 1)", "{u}.neg_()",
    "{u}[:, {i}] = {w}[:, {i}]", "{u}[:, :2] += {w}[:, :2]", "{u}.t().add_({w}.t())", "{u}[{w} > 0] = 0.5",
    "{u}.masked_fill_({w} > 0, 0.0)", "{u}.data.mul_(0.9)", "{u}.view(-1, 2, 4)[:, 1] = {w}[:, :4]",
    "self.mean.add_({u}.mean(0))", "self.mean.copy_({u}.detach().mean(0))", "self.mean.data.add_({u}.mean(0))",
)  # fmt: skip
AROUND = ("with torch.no_grad():", "with torch.enable_grad():", "if {u}.sum() > 0:")

Statement = tuple[str, int, int, int]
"""A template, the tensors that it reads, by their numbers, and a column."""

NUMBERS = [st.integers(0, 11), st.integers(0, 11), st.integers(0, 7)]
STATEMENTS = st.tuples(st.one_of(st.sampled_from(NEW), st.sampled_from(CHANGES)), *NUMBERS)
BLOCKS = st.tuples(st.tuples(st.sampled_from(AROUND), *NUMBERS), st.lists(STATEMENTS, min_size=1, max_size=3))
FORWARDS = st.lists(st.one_of(STATEMENTS, STATEMENTS, BLOCKS), min_size=3, max_size=9)


class _Source:
    """A forward that is being written."""

    def __init__(self) -> None:
        self.lines = ["def forward(self, x):", "    x0 = self.a(x)", "    x1 = self.b(x).tanh()", "    x2 = x * 0.5"]
        self.names = ["x0", "x1", "x2"]

    def add(self, statement: Statement, indent: str) -> None:
        template, u, w, i = statement
        text = template.format(u=self.names[u % len(self.names)], w=self.names[w % len(self.names)], i=i)
        if template in NEW:
            self.names.append(f"x{len(self.names)}")
            text = f"{self.names[-1]} = {text}"
        self.lines.append(indent + text)


def write(forward: Sequence[Statement | tuple[Statement, list[Statement]]]) -> str:
    """A forward that returns the sum of the last tensors that there are on every way."""
    source = _Source()
    for part in forward:
        if isinstance(part[0], str):
            source.add(part, "    ")  # type: ignore[arg-type]
            continue
        head, inner = part
        source.add(head, "    ")  # type: ignore[arg-type]
        before = list(source.names)
        for statement in inner:  # type: ignore[union-attr]
            source.add(statement, "        ")
        if head[0].startswith("if"):  # type: ignore[index]
            source.names = before
    return "\n".join([*source.lines, f"    return x0 + {' + '.join(source.names[-3:])}\n"])


def verdict_of(source: str) -> str:
    """How a forward compares with eager (see ``runner``)."""
    file = "<a random program>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(source, file, "exec"), names)
    kind = type("Random", (TwoAndAMean,), {"forward": names["forward"]})
    return verdict(Program("random", "random", kind, rows, line=False, options={"plan": "data_parallel"}))


def _check(forward: Any) -> None:
    source = write(forward)
    (words,) = run_distributed(verdict_of, source, world_size=1)
    if words.startswith("the plain run raised"):
        reject()
    assert words in ("equal", "refused"), f"{words}\n{source}"


SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.filter_too_much, HealthCheck.too_slow],
}


@settings(max_examples=3, **SETTINGS)
@given(FORWARDS)
def test_a_forward_is_eagers_or_refused(forward: Any) -> None:
    _check(forward)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=12, **SETTINGS)
@given(FORWARDS)
def test_many_forwards_are_eagers_or_refused(forward: Any) -> None:
    _check(forward)
