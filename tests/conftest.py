"""The tiers of the tests: marks that stand at the tests, some of them for a part of a test's parameters.

`@pytest.mark.wide` and `@pytest.mark.slow` leave a test out of the default run; `@pytest.mark.wide_where(condition)`
and `@pytest.mark.slow_where(condition)` do so where the condition holds, a function of some of the test's parameters.
"""

from __future__ import annotations

import inspect

import pytest

TIERS = ("wide", "slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for tier in TIERS:
            for mark in item.iter_markers(f"{tier}_where"):
                (condition,) = mark.args
                if condition(**{name: item.callspec.params[name] for name in inspect.signature(condition).parameters}):
                    item.add_marker(tier)
