"""Limits what a host prints at the head: some lines at once, then a few a second, none too long.

A worker does not send more, and the head does not show more (`worker_log`, `head_log`). `hosts.worker_gate`
uses it to limit reports about peers that were refused.
"""

from __future__ import annotations

from collections.abc import Callable

LINES_AT_ONCE = 200  # enough for a process to print where its threads are
LINES_PER_S = 20.0
SAY_DROPPED_EVERY_S = 1.0


class LineRation:
    """A bound on the lines that may be shown or sent; it counts those that are left out.

    Args:
        clock: monotonic seconds.
        at_once: most lines at once, after a pause.
        per_s: lines a second in the long run.
    """

    def __init__(
        self, clock: Callable[[], float], at_once: float = LINES_AT_ONCE, per_s: float = LINES_PER_S
    ) -> None:
        self._clock = clock
        self._most, self._per_s = at_once, per_s
        self._left = self._most
        self._looked_at = self._said_at = clock()
        self._num_dropped = 0

    def admit(self) -> bool:
        """Return whether one more line may pass; one that may not is counted."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._looked_at) * self._per_s)
        self._looked_at = now
        if self._left < 1.0:
            self._num_dropped += 1
            return False
        self._left -= 1.0
        return True

    def note_dropped(self, count: int) -> None:
        """Count `count` lines that another party has left out."""
        self._num_dropped += count

    def take_dropped(self) -> int:
        """Return how many lines were left out since the last number was returned, for a note to the reader.

        The result is 0 if a number was returned less than `SAY_DROPPED_EVERY_S` ago.
        """
        now = self._clock()
        if not self._num_dropped or now - self._said_at < SAY_DROPPED_EVERY_S:
            return 0
        self._said_at = now
        count, self._num_dropped = self._num_dropped, 0
        return count
