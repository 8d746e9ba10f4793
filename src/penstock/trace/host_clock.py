"""The estimate of how the monotonic clock of another host differs from this host's, with its possible error.

    own host     asked_ns ───────────────────────────────── answered_ns
                          ╲                                ╱
    other host             heard_ns ────────── replied_ns

The round trip is the time that question and answer spend on the way; how it is divided between the two is
unknown. If each takes half of it, the middles of the two lines above are the same instant. However the round
trip is divided, this assumption is wrong by half the round trip at most. So the answer with the shortest
round trip tells most. But it grows old, since two clocks drift apart: after a while a newer answer with a
longer round trip is better.

`hosts.remote_host` asks about once a second, beside its heartbeats. This module reads no clock itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DRIFT = 1e-4  # seconds a second by which two clocks may drift apart: each is within 50 parts in a million


class ClockAnswer(NamedTuple):
    """The four instants of one question and its answer, in nanoseconds.

    This host's clock gives `asked_ns` and `answered_ns`, the other host's clock `heard_ns` and `replied_ns`.
    """

    asked_ns: int
    heard_ns: int
    replied_ns: int
    answered_ns: int

    @property
    def is_possible(self) -> bool:
        """Whether the other host held the question for 0 ns or more, and no longer than this host waited."""
        return 0 <= self.replied_ns - self.heard_ns <= self.answered_ns - self.asked_ns

    @property
    def offset_ns(self) -> int:
        """The nanoseconds to add to a time of the other host's clock for the time of this host's clock."""
        return (self.asked_ns + self.answered_ns - self.heard_ns - self.replied_ns) // 2

    @property
    def error_ns(self) -> int:
        """The largest error of `offset_ns` when the answer came: half the round trip, rounded up."""
        round_trip_ns = (self.answered_ns - self.asked_ns) - (self.replied_ns - self.heard_ns)
        return round_trip_ns // 2 + 1

    def error_at_ns(self, now_ns: int) -> int:
        """Return the largest error that `offset_ns` has at a later time of this host's clock."""
        return self.error_ns + math.ceil(DRIFT * max(0, now_ns - self.answered_ns))


class ClockEstimate:
    """The best estimate of the clock of one host.

    Drift makes the errors of all answers grow equally fast. An answer that is worse than a newer one
    therefore stays worse, and only the best answer is kept.
    """

    def __init__(self) -> None:
        self._best: ClockAnswer | None = None

    def add(self, answer: ClockAnswer) -> None:
        """Take the newest answer so far. An impossible answer is ignored."""
        if answer.is_possible and (self._best is None or self._is_better(answer, self._best)):
            self._best = answer

    def best(self) -> ClockAnswer | None:
        """Return the answer with the smallest error now; None before the first answer."""
        return self._best

    def _is_better(self, answer: ClockAnswer, best: ClockAnswer) -> bool:
        """Return whether to believe the newest answer rather than the best one so far.

        If the two exclude each other, the other host was restarted and its clock began again, or the host has
        slept and its clock stood still. Then the newest answer is right.
        """
        error_ns = best.error_at_ns(answer.answered_ns)
        are_compatible = abs(answer.offset_ns - best.offset_ns) <= answer.error_ns + error_ns
        return answer.error_ns <= error_ns or not are_compatible
