"""Limits how fast plans follow one another while an administrator has slowed the engine down [G4].

    plan n ──── interval ────▶ plan n+1 ──── interval ────▶ plan n+2        probes go in between as ever

The core asks before it makes a plan, and wakes when the next may be made: no thread sleeps, so that results,
probes, aborts and health are as prompt as ever. Owned by `engine.core.operations_in_force`; set between two
plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class Pace:
    """The least interval between two plans with work. Probes, which have none, are not held up.

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
        """Return the clock time at which the next plan may be made; infinite if it may be now."""
        return math.inf if self.allows_plan else self._due_at

    @property
    def _due_at(self) -> float:
        return self._planned_at + self.interval_ms / 1000
