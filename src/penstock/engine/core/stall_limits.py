"""Decides how long the stages may take for a plan until the pipe counts as lost.

Without `--step-timeout` the limit follows what plans have taken: twenty times the slowest of its size, at
least five seconds. A plan larger than all that were seen is taken to cost as much a token as the largest of
them; until one with tokens has crossed, the limit is that of a slow machine. Time in which the core itself
stood still does not count: the machine may have been suspended, and the stages with it. Decides by numbers
that `engine.core.steps_in_flight` passes in; no clock here.
"""

from __future__ import annotations

import math
from typing import Protocol

SLOWNESS = 20.0  # times what plans of the same size have taken
LEAST_S = 5.0
FADING = 0.98  # of the slowest plan of a size with each one that follows
LOOK_S = 1.0  # the longest time between two looks of a core that nothing holds up
LONG_LOOK_S = 2.0  # the core stood still
LEAVE_SHARE = 0.4  # of the limit, for stages to leave an epoch that a plan has ended: they have had all of it
AFTER_LOSS = 4.0  # a plan that was too slow once may take so many times as long when it comes again


class StallLimit(Protocol):
    """The limit on how long a plan may take in the stages. Sizes are tokens, times are clock seconds."""

    def seconds(self, num_tokens: int) -> float:
        """Return how many seconds a plan of this size may take until the pipeline counts as lost."""

    def leave_s(self, num_tokens: int) -> float:
        """Return how many seconds stages may take to stop after a plan of this size was given up."""

    def look(self, now: float) -> float:
        """Record that the core is awake now, and return the time before which waiting does not count.

        That time is later than usual if the core itself has stood still. Called whenever the core looks at
        its steps.
        """

    def next_look(self, now: float) -> float:
        """Return the time at which the core should look at its steps again, even if nothing happens."""

    def crossed(self, num_tokens: int, submitted_at: float, now: float) -> None:
        """Record that a plan of this size, submitted at that time, has crossed all stages now."""

    def exceeded(self, num_tokens: int) -> None:
        """Record that a plan of this size has taken too long; it may get more time when it comes again."""


class FixedLimit:
    """A limit that is the same for every plan, as where the user has set one.

    Args:
        limit_s: seconds without a result while plans are in flight.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def seconds(self, num_tokens: int) -> float:
        return self._limit_s

    def leave_s(self, num_tokens: int) -> float:
        return self._limit_s

    def look(self, now: float) -> float:
        return -math.inf

    def next_look(self, now: float) -> float:
        return math.inf

    def crossed(self, num_tokens: int, submitted_at: float, now: float) -> None:
        """Do nothing, since the limit never changes."""

    def exceeded(self, num_tokens: int) -> None:
        """Do nothing, since the limit never changes."""


NO_LIMIT = FixedLimit(math.inf)


class MeasuredLimit:
    """A limit that follows what earlier plans of the same size have taken: `SLOWNESS` times the slowest.

    Args:
        unmeasured_s: the limit in seconds while no plan with tokens has crossed.
    """

    def __init__(self, unmeasured_s: float) -> None:
        self._unmeasured_s = unmeasured_s
        self._slowest_s: dict[int, float] = {}  # by the bits of the number of tokens
        self._looked_at = math.inf
        self._awake_since = -math.inf
        self._patience = 1.0
        self._too_slow = 0  # tokens of the plan for which there is more patience

    def seconds(self, num_tokens: int) -> float:
        return self._limit_s(num_tokens) * self._patience

    def leave_s(self, num_tokens: int) -> float:
        return self._limit_s(num_tokens) * LEAVE_SHARE

    def look(self, now: float) -> float:
        if now - self._looked_at > LONG_LOOK_S:
            self._awake_since = now
        self._looked_at = now
        return self._awake_since

    def next_look(self, now: float) -> float:
        return now + LOOK_S

    def crossed(self, num_tokens: int, submitted_at: float, now: float) -> None:
        if num_tokens == 0 or submitted_at < self._awake_since:
            return  # an empty plan tells nothing, nor one that was there while the core stood still
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(now - submitted_at, FADING * self._slowest_s.get(size, 0.0))
        if num_tokens >= self._too_slow:
            self._patience, self._too_slow = 1.0, 0

    def exceeded(self, num_tokens: int) -> None:
        self._patience *= AFTER_LOSS
        self._too_slow = max(self._too_slow, num_tokens)

    def _limit_s(self, num_tokens: int) -> float:
        """Return the limit of a plan that comes for the first time."""
        if num_tokens == 0:
            return LEAST_S
        expected_s = self._expected_s(num_tokens)
        return self._unmeasured_s if expected_s is None else max(LEAST_S, SLOWNESS * expected_s)

    def _expected_s(self, num_tokens: int) -> float | None:
        """Return what the slowest plan of this size took, or of the next size that was seen."""
        size = num_tokens.bit_length()
        larger = [seen for seen in self._slowest_s if seen >= size]
        if larger:
            return self._slowest_s[min(larger)]
        if not self._slowest_s:
            return None
        largest = max(self._slowest_s)
        return self._slowest_s[largest] * num_tokens / (1 << (largest - 1))
