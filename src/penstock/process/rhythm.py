"""Puts the work that a host's processes do each second at the same moment, so that an idle host rarely wakes.

The monotonic clock is the same for all processes of a host. Work that is done each second is done at its
whole seconds, and not a second after it was done last: heartbeats, looks and ticks of all threads and
processes then fall into the same moment. Their listener wakes once a second instead of once for each, and
finds its memory in the caches. It is what the kernel's `round_jiffies` does to its own timers.
"""

from __future__ import annotations

import math


def next_beat(after: float, period_s: float = 1.0) -> float:
    """Return the first multiple of the period that is later than this instant, of the same clock.

    For what was never done (`after` is infinitely long ago) that is as long ago: it is due at once.
    """
    if math.isinf(after):
        return after
    return (math.floor(after / period_s) + 1) * period_s
