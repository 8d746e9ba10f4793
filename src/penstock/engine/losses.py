"""Which epoch it is, who has left it, who counts as lost, and when the next one begins.

The supervisor tells a `Losses` what it sees, in stages and seconds, and does what follows; no process and no
clock here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from penstock.errors import ErrorInfo

MAX_LOSSES = 3  # without a step between them; from then on with growing pauses, and running requests end
MAX_RETRY_S = 60.0
LONG_LOOK_S = 2.0  # between two looks: then it was the supervisor that had no time
LOADING_LIMIT_S = 60.0  # for a stage that loads: importing a library may hold everything up


class Losses:
    """Args:
    heartbeat_limit_s: a stage that has said nothing for this long is lost.
    leave_s: so is one that has not left an epoch which is over for this long.

    Attributes:
        epoch: the present one, or between two the one that is over.
        missing: stages to start again; None within an epoch.
        causes: why children have left the present epoch by themselves.
    """

    def __init__(self, *, heartbeat_limit_s: float, leave_s: float) -> None:
        self.epoch = 0
        self.missing: set[int] | None = None
        self.causes: list[ErrorInfo] = []
        self._heartbeat_limit_s = heartbeat_limit_s
        self._leave_s = leave_s
        self._left: dict[int, int] = {}  # the newest epoch that each stage has left
        self._leave_by = math.inf
        self._retry_at = 0.0
        self._looked_at = math.inf
        self._heard_from = -math.inf  # silence before it does not count
        self._num = 0  # since a step has crossed
        self._first_at = 0.0  # of those

    @property
    def is_repeated(self) -> bool:
        """Whether it has been tried so often that nobody should be kept waiting."""
        return self._num > MAX_LOSSES

    def leave(self, epoch: int, cause: ErrorInfo, stage: int | None) -> None:
        """A stage, or the core (None), has left an epoch by itself: the present one is then over for all."""
        if stage is not None:
            self._left[stage] = epoch
        if epoch == self.epoch and self.missing is None:
            self.causes.append(cause)

    def end(self, lost: set[int], now: float) -> float:
        """The epoch is over, these stages are gone. Returns the seconds until the next one should begin."""
        self._first_at = self._first_at if self._num else now
        self._num += 1
        self.causes.clear()
        self.missing = (self.missing or set()) | lost
        self._leave_by = now + self._leave_s
        pause_s = min(2.0 ** (self._num - MAX_LOSSES), MAX_RETRY_S) if self.is_repeated else 0.0
        self._retry_at = now + pause_s
        return pause_s

    def is_due(self, now: float) -> bool:
        """Whether the next epoch should begin."""
        return self.missing is not None and now >= self._retry_at

    def begin(self) -> list[int]:
        """The next epoch; the stages to start again for it."""
        started = sorted(self.missing or ())
        self._left |= dict.fromkeys(started, self.epoch)  # they were never there
        self.epoch, self.missing = self.epoch + 1, None
        return started

    def recovered(self, now: float) -> float:
        """A step has crossed the present epoch; seconds since the first loss before it."""
        self._num, self._leave_by = 0, math.inf
        return now - self._first_at

    def silent(
        self, heard_at: Mapping[int, float], now: float, loading: Set[int] = frozenset()
    ) -> dict[int, float]:
        """Seconds of silence of each stage that has been silent too long.

        Args:
            heard_at: when each stage was heard last.
            loading: those that are not ready yet.
        """
        if now - self._looked_at > LONG_LOOK_S:
            self._heard_from = now  # all may have stood still, and have had no time to speak since
        self._looked_at = now
        silence_s = {stage: now - max(at, self._heard_from) for stage, at in heard_at.items()}
        return {
            stage: seconds
            for stage, seconds in silence_s.items()
            if seconds > self._limit_s(stage in loading)
        }

    def _limit_s(self, is_loading: bool) -> float:
        return max(self._heartbeat_limit_s, LOADING_LIMIT_S) if is_loading else self._heartbeat_limit_s

    def hung(self, stages: set[int], now: float) -> set[int]:
        """Which of these have not left an epoch that is over for long; told once."""
        if now < self._leave_by:
            return set()
        self._leave_by = math.inf
        over = self.epoch if self.missing is not None else self.epoch - 1
        return {stage for stage in stages if self._left.get(stage, -1) < over}
