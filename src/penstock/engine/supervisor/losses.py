"""Tracks the current epoch, which processes have left it or are lost, and when the next one begins.

Members are the processes of core and ranks; an epoch is the time in which the same members are connected. The
supervisor and its `PipelineProcesses` report what they see, in member indices and seconds, and act on the
answers. This module knows no process and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from typing import Generic, TypeVar

from penstock.errors import ErrorInfo

CORE = -1  # member index of the core; the member index of a rank is its number
MAX_LOSSES = 3  # after more, without a step through all stages, pauses grow and running requests end
MAX_RETRY_S = 60.0
_JUST_AFTER_S = 0.001  # added to a wait: after it a silence is longer than its limit, and not just as long
LONG_LOOK_S = 2.0  # if two calls of `silent` are further apart, the supervisor itself did not run
LOADING_LIMIT_S = 60.0  # least limit for a process that loads: an import may stop all of its threads
ELSEWHERE_LIMIT_S = 5.0  # least limit on another host: a lost connection to the host is known by then

Key = TypeVar("Key")


class BackOff:
    """Decides when to try again what has failed: at once at first, and later after pauses that double."""

    def __init__(self) -> None:
        self._num = 0  # losses since the last success
        self._first_at = 0.0  # time of the first of these losses
        self._retry_at = math.inf

    @property
    def is_repeated(self) -> bool:
        """Whether there were so many losses without a success that no request should be kept waiting."""
        return self._num > MAX_LOSSES

    @property
    def is_pending(self) -> bool:
        """Whether there was a loss, and no success since."""
        return self._num > 0

    def lose(self, now: float) -> float:
        """Record a loss, and return the seconds until the next try."""
        self._first_at = self._first_at if self._num else now
        self._num += 1
        pause_s = min(2.0 ** (self._num - MAX_LOSSES), MAX_RETRY_S) if self.is_repeated else 0.0
        self._retry_at = now + pause_s
        return pause_s

    def pause_s(self, now: float) -> float:
        """Return the seconds that are left until the next try."""
        return max(0.0, self._retry_at - now)

    def is_due(self, now: float) -> bool:
        """Return whether it is time to try again; from then on the answer is True until `begin` is called."""
        return now >= self._retry_at

    def begin(self) -> None:
        self._retry_at = math.inf

    def succeed(self, now: float) -> float:
        """Record a success, and return the seconds since the first of the losses."""
        self._num = 0
        return now - self._first_at


class Heartbeats(Generic[Key]):
    """Finds child processes that have been silent for too long; each reports every second that it is alive.

    Args:
        limit_s: seconds after which silence is too long. The limit may be longer for children that are still
            loading, and for children on other hosts.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._looked_at = math.inf
        self._heard_from = -math.inf  # silence before this time does not count
        self._away_at: dict[Key, float] = {}  # by child: when its host was last seen not connected
        self._due_at = math.inf  # when the next child is silent for too long, if it is not heard before

    def due_in(self, now: float) -> float:
        """Return in how many seconds the next child is silent for too long, if none is heard meanwhile."""
        return max(0.0, self._due_at - now) + _JUST_AFTER_S

    def silent(
        self,
        heard_at: Mapping[Key, float],
        now: float,
        loading: Collection[Key] = (),
        *,
        elsewhere: Collection[Key] = (),
        away: Collection[Key] = (),
    ) -> dict[Key, float]:
        """Return the children that have been silent for too long, with the seconds of their silence.

        If the last call is more than `LONG_LOOK_S` ago, the caller itself did not run. All silence until now
        is then forgotten.

        Args:
            heard_at: when each child was heard last, in monotonic seconds.
            now: monotonic seconds.
            loading: children that are not ready yet.
            elsewhere: children on other hosts.
            away: children whose host is not connected; their silence begins when the host is back.
        """
        if now - self._looked_at > LONG_LOOK_S:
            self._heard_from = now  # the children may have stood still too, and have had no time to report
        self._looked_at = now
        away_at = self._away_at | dict.fromkeys(away, now)
        self._away_at = {key: at for key, at in away_at.items() if key in heard_at}
        silence_s = {
            key: now - max(at, self._heard_from, self._away_at.get(key, -math.inf))
            for key, at in heard_at.items()
        }
        limits = dict.fromkeys(heard_at, self._limit_s)
        limits |= dict.fromkeys(elsewhere, max(self._limit_s, ELSEWHERE_LIMIT_S))
        limits |= dict.fromkeys(loading, max(self._limit_s, LOADING_LIMIT_S))
        left_s = {key: limits[key] - seconds for key, seconds in silence_s.items()}
        self._due_at = now + min((seconds for seconds in left_s.values() if seconds >= 0), default=math.inf)
        return {key: seconds for key, seconds in silence_s.items() if left_s[key] < 0}


class Losses:
    """The epochs of one pipeline, and which of its members (core and ranks, known by index) are lost.

    Args:
        leave_s: seconds that members have to leave an epoch that is over; after that they count as hung.

    Attributes:
        epoch: number of the present epoch; between two epochs, number of the last one.
        missing: indices of members to start again; None within an epoch.
        causes: the errors of members that have left the present epoch before it was ended.
    """

    def __init__(self, *, leave_s: float) -> None:
        self.epoch = 0
        self.missing: set[int] | None = None
        self.causes: list[ErrorInfo] = []
        self._leave_s = leave_s
        self._patience_s = leave_s  # the time that members will have to leave the present epoch
        self._left: dict[int, int] = {}  # the newest epoch that each member has left
        self._leave_by = math.inf
        self._leaving_s = leave_s  # the time that they have to leave the epoch that ended last
        self._away_at: dict[int, float] = {}  # by member: when its host was last seen not connected
        self._back_off = BackOff()

    @property
    def is_repeated(self) -> bool:
        """Whether the pipe was lost so often without a success that no request should be kept waiting."""
        return self._back_off.is_repeated

    @property
    def is_whole(self) -> bool:
        """Whether no member is lost, and a step has crossed all stages since the last loss."""
        return self.missing is None and not self._back_off.is_pending

    def leave(self, epoch: int, cause: ErrorInfo, member: int, *, leave_s: float | None = None) -> None:
        """Record that a member has left an epoch, before or after the supervisor has ended it.

        If it is the present epoch, the cause is kept, and the caller then ends it for all members (`end`).

        Args:
            epoch: number of the epoch.
            cause: why the member has left the epoch.
            leave_s: seconds that other members may take to leave, as the member reports it. It counts only
                if it is shorter than the `leave_s` of this object.
        """
        self._left[member] = epoch
        if epoch == self.epoch and self.missing is None:
            self.causes.append(cause)
            if leave_s is not None:
                self._patience_s = min(leave_s, self._patience_s)

    def end(self, lost: Set[int], now: float) -> float:
        """End the epoch with these members lost; return the seconds until the next epoch should begin.

        Members that are lost before the next epoch has begun belong to the same loss. If a host is gone, for
        example, links break at once, but its members count as lost only when it has not come back in time.
        """
        self.causes.clear()
        is_further = self.missing is not None
        self.missing = (self.missing or set()) | lost
        if is_further:
            return self._back_off.pause_s(now)
        self._leave_by, self._leaving_s = now + self._patience_s, self._patience_s
        self._away_at.clear()
        return self._back_off.lose(now)

    def give_up(self, members: Set[int]) -> None:
        """Record that the caller has ended these members between two epochs; they are started again."""
        assert self.missing is not None, "the epoch has not ended"
        self.missing |= members

    def is_due(self, now: float) -> bool:
        """Return whether the next epoch should begin now."""
        return self.missing is not None and self._back_off.is_due(now)

    def begin(self) -> list[int]:
        """Begin the next epoch, and return the indices of the members to start for it."""
        started = sorted(self.missing or ())
        self._left |= dict.fromkeys(started, self.epoch)  # new processes, which were never in that epoch
        self.epoch, self.missing = self.epoch + 1, None
        self._patience_s = self._leave_s
        self._back_off.begin()
        return started

    def recovered(self, now: float) -> float:
        """Record that a step has crossed all stages in this epoch.

        Returns how many seconds ago the pipe was lost: the first time, if it was lost several times.
        """
        self._leave_by = math.inf
        return self._back_off.succeed(now)

    def hung(self, members: set[int], now: float, away: Collection[int] = ()) -> set[int]:
        """Return which of these members have not left the epoch that is over, though their time is up.

        Each member is returned at most once for each epoch.

        Args:
            members: indices of members that are ready.
            now: monotonic seconds.
            away: members whose host is not connected, so that they can report nothing. Once the host is back
                they have the whole time again.
        """
        self._away_at |= dict.fromkeys(away, now)
        over = self.epoch if self.missing is not None else self.epoch - 1
        staying = {member for member in members.difference(away) if self._left.get(member, -1) < over}
        late = {member for member in staying if self._is_late(member, now)}
        self._left |= dict.fromkeys(late, over)
        return late

    def _is_late(self, member: int, now: float) -> bool:
        away_at = self._away_at.get(member, -math.inf)
        return now >= max(self._leave_by, away_at + self._leaving_s)
