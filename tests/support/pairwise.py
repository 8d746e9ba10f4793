"""Pairwise test selection: few cases, yet every pair of values of every two axes occurs together."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = tuple[Any, ...]
Pair = tuple[int, Any, int, Any]  # two axes, each with its value


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Greedy all-pairs selection, deterministic: the case that covers most open pairs comes next."""
    every_case = list(product(*axes.values()))
    bits: dict[Pair, int] = {}  # a set of pairs is a number that has the bit of each
    sets_of_pairs = [_set_of_pairs(case, bits) for case in every_case]
    open_pairs = (1 << len(bits)) - 1
    chosen = []
    while open_pairs:
        best = max(range(len(every_case)), key=lambda at: (open_pairs & sets_of_pairs[at]).bit_count())
        open_pairs &= ~sets_of_pairs[best]
        chosen.append(every_case[best])
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


def _set_of_pairs(case: Case, bits: dict[Pair, int]) -> int:
    total = 0
    for i, j in combinations(range(len(case)), 2):
        total |= bits.setdefault((i, case[i], j, case[j]), 1 << len(bits))
    return total
