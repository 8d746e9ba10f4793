"""The median of ratios that were measured pair by pair, and how sure it is."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

RESAMPLES = 4000


def bootstrap(ratios: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the interval of 95 % of their median."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]
