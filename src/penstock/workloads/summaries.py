"""Percentiles of what was measured, for tables and result files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile with linear interpolation between neighbours; 0 without values.

    This is numpy's default rule.
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summary(values: Sequence[float], percents: Sequence[float] = (99,)) -> dict[str, float]:
    """Return mean, median, std and percentiles, in milliseconds, of values in seconds."""
    scaled = [value * 1000 for value in values]
    figures = {
        "mean": statistics.fmean(scaled) if scaled else 0.0,
        "median": percentile(scaled, 50),
        "std": statistics.pstdev(scaled) if scaled else 0.0,
    }
    return figures | {f"p{percent:g}": percentile(scaled, percent) for percent in percents}
