"""Generators of random numbers that are Python's or numpy's: what they will draw next."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


def state_of(generator: Any) -> Any:
    """A copy of what decides what a generator draws."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return copy.deepcopy(generator.bit_generator.state)


def set_state(generator: Any, state: Any) -> None:
    """Has a generator draw what it drew after :func:`state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
