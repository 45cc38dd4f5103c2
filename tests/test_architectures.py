"""``benchmarks.models``: a sample of the architectures of docs/models.md, and that the page is of this list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.models import RIGHT, Row, examine, table
from benchmarks.zoo import ZOO

PAGE = Path(__file__).parent.parent / "docs" / "models.md"


@pytest.mark.wide
@pytest.mark.parametrize("name", ["BERT", "GRU", "PoolFormer"])
def test_a_sample_is_right_under_every_plan(name: str) -> None:
    row = examine(name)
    assert row.right, row
    assert row.sharded["tensor_parallel"] > 0.3


def test_the_page_shows_the_models_of_the_list() -> None:
    shown = re.findall(r"^\| (?!model |---)([^|]+) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert len(shown) >= 60 and set(shown) <= set(ZOO)


def test_a_failure_is_in_the_table_with_its_reason() -> None:
    verdicts = {"auto": RIGHT, "fsdp": "wrong: off", "tensor_parallel": RIGHT}
    half = Row(RIGHT, verdicts, {"auto": 0.5, "fsdp": 0.5, "tensor_parallel": 0.25})
    text = table({"GRU": half, "FNO": Row("CaptureError: no\nWhat to change: this.")})
    assert "| GRU | yes | 50% | wrong | 25% |" in text and "- **GRU**, fsdp: wrong: off" in text
    assert "| FNO | no | no | no | no |" in text
    assert "- **FNO**, capture: CaptureError: no What to change: this." in text
    assert "0 of them are right" in text
