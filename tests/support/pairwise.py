"""Pairwise test selection: few cases, yet every pair of values of every two axes occurs together."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = tuple[Any, ...]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Greedy all-pairs selection, deterministic: the case that covers most open pairs comes next."""
    every_case = list(product(*axes.values()))
    open_pairs = {pair for case in every_case for pair in _pairs(case)}
    chosen = []
    while open_pairs:
        best = max(every_case, key=lambda case: len(open_pairs & _pairs(case)))
        open_pairs -= _pairs(best)
        chosen.append(best)
    return chosen


def drawn(axes: Mapping[str, Sequence[Any]], least: int, seed: int = 0) -> list[Case]:
    """Return the cases of `pairwise`, and seeded random ones until each value of each axis is in `least`."""
    cases = pairwise(axes)
    counts = Counter((axis, value) for case in cases for axis, value in enumerate(case))
    draw = random.Random(seed)
    for axis, values in enumerate(axes.values()):
        for value in values:
            while counts[axis, value] < least:
                case = tuple(draw.choice(options) for options in axes.values())
                case = (*case[:axis], value, *case[axis + 1 :])
                if case not in cases:
                    cases.append(case)
                    counts.update(enumerate(case))
    return cases


def _pairs(case: Case) -> set[tuple[int, Any, int, Any]]:
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}
