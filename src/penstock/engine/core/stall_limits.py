"""Decides how long the stages may take for a plan until the pipe counts as lost.

Without `--step-timeout` the limit follows the time that earlier plans have taken:

- It is twenty times the slowest plan of about the same number of tokens, and at least five seconds.
- A plan larger than all before it is expected to take as long for each token as the largest of them.
- Until a plan with tokens has crossed, the limit is one that suits a slow machine.
- A plan that took too long once may take four times as long when it comes again.

Time in which the core itself stood still does not count: the machine may have been suspended, and the stages
with it. All numbers come from `engine.core.steps_in_flight`; no clock is read here.
"""

from __future__ import annotations

import math
from typing import Protocol

SLOWNESS = 20.0  # the limit is so many times the slowest plan of the same size
LEAST_S = 5.0
FADING = 0.98  # what is remembered as the slowest time of a size shrinks to this with each plan of the size
LOOK_S = 1.0  # the longest time between two looks of a core that nothing holds up
LONG_LOOK_S = 2.0  # if two looks are further apart, the core stood still between them
LEAVE_SHARE = 0.4  # the share of the limit that stages get to leave an epoch; they had the limit before
AFTER_LOSS = 4.0  # a plan that was too slow once may take so many times as long when it comes again


class StallLimit(Protocol):
    """The limit on how long a plan may take in the stages. Sizes are tokens, times are clock seconds."""

    def seconds(self, num_tokens: int) -> float:
        """Return how many seconds a plan of this size may take until the pipeline counts as lost."""

    def leave_s(self, num_tokens: int) -> float:
        """Return how many seconds stages may take to leave the epoch if a plan of this size is given up."""

    def look(self, now: float) -> float:
        """Record that the core is awake now, and return the time before which waiting does not count.

        It is the time of the first look after the core itself stood still last; minus infinity if it never
        did. Called whenever the core looks at its steps.
        """

    def next_look(self, now: float) -> float:
        """Return the time at which the core should look at its steps again, even if nothing happens."""

    def crossed(self, num_tokens: int, submitted_at: float, now: float) -> None:
        """Record that a plan of this size, submitted at that time, has crossed all stages now."""

    def exceeded(self, num_tokens: int) -> None:
        """Record that a plan of this size has taken too long; it may get more time when it comes again."""


class FixedLimit:
    """A limit that is the same for every plan, such as one that the user has set.

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
        self._slowest_s: dict[int, float] = {}  # by size: the number of bits of the number of tokens
        self._looked_at = math.inf
        self._awake_since = -math.inf
        self._patience = 1.0  # the factor by which the limit is raised after a plan was too slow
        self._too_slow = 0  # tokens of the largest such plan; one as large that crosses ends the patience

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
            return  # an empty plan shows nothing, nor does one that was in flight while the core stood still
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(now - submitted_at, FADING * self._slowest_s.get(size, 0.0))
        if num_tokens >= self._too_slow:
            self._patience, self._too_slow = 1.0, 0

    def exceeded(self, num_tokens: int) -> None:
        self._patience *= AFTER_LOSS
        self._too_slow = max(self._too_slow, num_tokens)

    def _limit_s(self, num_tokens: int) -> float:
        """Return the limit of a plan of this size, without the patience after a loss."""
        if num_tokens == 0:
            return LEAST_S
        expected_s = self._expected_s(num_tokens)
        return self._unmeasured_s if expected_s is None else max(LEAST_S, SLOWNESS * expected_s)

    def _expected_s(self, num_tokens: int) -> float | None:
        """Return the seconds that a plan of this size is expected to take at most; None if none has crossed.

        It is the slowest time of this size, or else of the next larger size that was seen. If all were
        smaller, the time of the largest size is scaled up by the number of tokens.
        """
        size = num_tokens.bit_length()
        larger = [seen for seen in self._slowest_s if seen >= size]
        if larger:
            return self._slowest_s[min(larger)]
        if not self._slowest_s:
            return None
        largest = max(self._slowest_s)
        return self._slowest_s[largest] * num_tokens / (1 << (largest - 1))
