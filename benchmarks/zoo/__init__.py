"""Architectures that ``benchmarks.models`` tries: of transformers, from tiny configs, and in plain torch."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.zoo.hub import HUB
from benchmarks.zoo.hub_language import LANGUAGE
from benchmarks.zoo.hub_more import MORE
from benchmarks.zoo.hub_senses import SENSES
from benchmarks.zoo.inputs import Made
from benchmarks.zoo.plain import PLAIN

ZOO: dict[str, Callable[[], Made]] = {**HUB, **MORE, **LANGUAGE, **SENSES, **PLAIN}
"""All of them, by name."""
