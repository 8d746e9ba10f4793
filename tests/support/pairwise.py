"""Pairwise test selection: few cases, yet every pair of values of every two axes occurs together."""

from __future__ import annotations

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


def _pairs(case: Case) -> set[tuple[int, Any, int, Any]]:
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}
