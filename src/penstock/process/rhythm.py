"""Lets all processes of a host do their once-a-second work at the same moment: an idle host rarely wakes.

All processes of a host have the same monotonic clock. Work of each second is done when that clock shows a
whole second, and not a second after it was done last. The heartbeats and checks of all threads and processes
then fall into the same moment. The supervisor, which listens to them, wakes once a second instead of once for
each, and finds its memory in the CPU's caches. The kernel's `round_jiffies` does the same to kernel timers.
"""

from __future__ import annotations

import math


def next_beat(after: float, period_s: float = 1.0) -> float:
    """Return the first multiple of the period that is later than the instant `after`, on the same clock.

    If `after` is minus infinity, because the work was never done, so is the result: the work is due at once.
    """
    if math.isinf(after):
        return after
    return (math.floor(after / period_s) + 1) * period_s
