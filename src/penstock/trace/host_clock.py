"""The estimate of how the monotonic clock of another host differs from the own one, and how sure that is.

    own host     asked_ns ───────────────────────────────── answered_ns
                          ╲                                ╱
    other host             heard_ns ────────── replied_ns

Both directions together take the round trip, and it is unknown how it is divided. With halves the middles of
both lines are the same instant; however it is divided, that is wrong by half the round trip at most. So of
all answers the one with the shortest round trip tells most. It grows old: two clocks drift apart, and a newer
answer with a longer round trip becomes the better one.

`hosts.remote_host` asks about once a second, beside its heartbeats. Pure: no clock is read here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DRIFT = 1e-4  # by which two clocks may drift apart: each crystal is within 50 parts in a million


class ClockAnswer(NamedTuple):
    """The four instants of one question and its answer, in nanoseconds of two clocks (see the module)."""

    asked_ns: int
    heard_ns: int
    replied_ns: int
    answered_ns: int

    @property
    def is_possible(self) -> bool:
        """Whether both clocks go forward, and the question was not held for longer than everything took."""
        return 0 <= self.replied_ns - self.heard_ns <= self.answered_ns - self.asked_ns

    @property
    def offset_ns(self) -> int:
        """The nanoseconds to add to an instant of the other clock to have it in the own one's time."""
        return (self.asked_ns + self.answered_ns - self.heard_ns - self.replied_ns) // 2

    @property
    def error_ns(self) -> int:
        """The error that `offset_ns` may have: half the round trip, rounded up."""
        round_trip_ns = (self.answered_ns - self.asked_ns) - (self.replied_ns - self.heard_ns)
        return round_trip_ns // 2 + 1

    def error_at_ns(self, now_ns: int) -> int:
        """Return the error that it may have at a later instant of the own clock."""
        return self.error_ns + math.ceil(DRIFT * max(0, now_ns - self.answered_ns))


class ClockEstimate:
    """The best estimate of the clock of one host.

    Drift makes all errors grow alike, so that an answer which is worse than a newer one stays worse: only the
    best one is kept.
    """

    def __init__(self) -> None:
        self._best: ClockAnswer | None = None

    def add(self, answer: ClockAnswer) -> None:
        """Take an answer, the newest so far. One that is impossible is left out."""
        if answer.is_possible and (self._best is None or self._is_better(answer, self._best)):
            self._best = answer

    def best(self) -> ClockAnswer | None:
        """Return the answer that tells most; None before the first."""
        return self._best

    def _is_better(self, answer: ClockAnswer, best: ClockAnswer) -> bool:
        """Return whether to believe an answer rather than the best one so far.

        Two that exclude each other mean that the other clock began anew with its host, or stood still while
        that slept: the newer one is right.
        """
        error_ns = best.error_at_ns(answer.answered_ns)
        are_compatible = abs(answer.offset_ns - best.offset_ns) <= answer.error_ns + error_ns
        return answer.error_ns <= error_ns or not are_compatible
