"""How deep a test goes: a sample in `./run test`, everything in `./run soak`.

A test with more to try than a developer waits for is marked `deep` and asks `depth` how much it shall try;
`./run soak` runs it again, at full depth. Of parameters, `sampled` keeps some for `./run test` and marks the
others `soak`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

VARIABLE = "PENSTOCK_TEST_DEPTH"


def is_full() -> bool:
    return os.environ.get(VARIABLE) == "full"


def depth(fast: int, full: int) -> int:
    """Return how many examples a test marked `deep` tries: `fast`, or in the soak `full`."""
    return full if is_full() else fast


def soaked(*values: Any) -> list[Any]:
    """Return parameters that only the soak has."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


def sampled(values: Iterable[Any], fast: int) -> list[Any]:
    """Return parameters of which `fast`, spread evenly, run in `./run test`, and the rest in the soak."""
    every = list(values)
    kept = {number * len(every) // fast for number in range(min(fast, len(every)))}
    return [value if index in kept else soaked(value)[0] for index, value in enumerate(every)]
