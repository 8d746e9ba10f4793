"""Limits how fast plans follow one another while an administrator has slowed the engine down [G4].

    plan n ──── interval ────▶ plan n+1 ──── interval ────▶ plan n+2        probes go in between as ever

`engine.core.plan_feed` asks whether a plan may be made, and the core wakes when the next one may be made. No
thread sleeps meanwhile, so that results, probes, aborts and health are as prompt as ever. Made by
`engine.core.core`; `engine.core.operations_in_force` sets the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class Pace:
    """The least interval between two plans with work; probes, which have no work, are not held up.

    Args:
        clock: monotonic seconds.

    Attributes:
        interval_ms: the interval; 0 sets no limit.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.interval_ms = 0  # between two plans with work at least
        self._planned_at = -math.inf

    @property
    def allows_plan(self) -> bool:
        return self._clock() >= self._due_at

    def planned(self) -> None:
        """Record that a plan with work was made now."""
        self._planned_at = self._clock()

    def next_wakeup(self) -> float:
        """Return the clock time at which the next plan may be made; infinite if it may be made now."""
        return math.inf if self.allows_plan else self._due_at

    @property
    def _due_at(self) -> float:
        return self._planned_at + self.interval_ms / 1000
