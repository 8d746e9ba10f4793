"""Profiles the stages, one profile at a time; an administrator begins and ends it, and then it is written.

The core keeps the reports of its stages for ten seconds; the profiler fetches them more often. A profile ends
by itself after its longest time, when it has its largest size, or when a core is lost, since a new core would
count steps from the beginning. It is written at once, and the next request to stop a profile returns it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from penstock.config.limits import Limits
from penstock.errors import InvalidRequestError, PenstockError, WaitTimeoutError
from penstock.operations import OperationDone, StartProfile, StopProfile
from penstock.server.engine_port import EngineLike
from penstock.server.http.keep_alive import Clock
from penstock.server.routes.profile_folder import ProfileFolder
from penstock.trace.chrome import bubbles_of
from penstock.trace.profile import Profile, encoded_trace

POLL_S = 2.0
SETTLE_S = 5.0  # for the last reports to come
SETTLE_POLL_S = 0.02
END_TIMEOUT_S = 60.0  # for the operation that ends a profile which ends by itself
EVENT_BYTES = 200  # about the bytes of a span in a trace

EndedBy = Literal["stop", "time", "size", "core_lost"]


class ProfileStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A profile that was begun. It ends by itself after `max_seconds`."""

    max_seconds: float
    replicas: list[OperationDone]


class ProfileStopped(msgspec.Struct, frozen=True, kw_only=True):
    """A profile that was written.

    In each replica it begins with the `accepted_step` of `started`, and ends before that of `stopped`.

    Attributes:
        file: name of its file in the directory of profiles.
        ended_by: why it ended.
        complete: every stage has reported all of it.
        stopped: null if the operation that ends a profile could not be carried out.
    """

    file: str
    bytes: int
    seconds: float
    ended_by: EndedBy
    complete: bool
    bubbles: list[str]
    started: list[OperationDone]
    stopped: list[OperationDone] | None


class _Running:
    """A running profile.

    Attributes:
        cores: how often the core of each replica had been started again when the profile began.
        epochs: the epoch of each replica, which must last to the end for the profile to be complete.
        following: the task that collects reports.
    """

    def __init__(
        self, started: list[OperationDone], began_at: float, cores: list[int | None], epochs: list[int | None]
    ) -> None:
        self.started = started
        self.began_at = began_at
        self.cores = cores
        self.epochs = epochs
        self.profile = Profile(_steps_of(started))
        self.following: asyncio.Task[None] | None = None


class Profiler:
    """Starts and ends profiles, one at a time, and writes them.

    Args:
        num_stages: number of stages of each replica.
        clock: monotonic seconds.
        sleep: as `asyncio.sleep`; tests give their own.
    """

    def __init__(
        self,
        engine: EngineLike,
        folder: ProfileFolder,
        limits: Limits,
        *,
        num_stages: int,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._limits = limits
        self._num_stages = num_stages
        self._clock = clock
        self._sleep = sleep
        self._turn = asyncio.Lock()
        self._running: _Running | None = None
        self._ended: ProfileStopped | PenstockError | None = None  # what ended by itself, until asked for

    async def start(self, timeout_s: float) -> ProfileStarted:
        """Begin a profile. Raises `PenstockError` if one runs already, or if there is no room to write it."""
        async with self._turn:
            if self._running is not None:
                raise InvalidRequestError(
                    "a profile is running.", remedy="Stop it first.", code="profile_running"
                )
            await asyncio.to_thread(self._folder.require_room)
            before = self._cores(), self._epochs()
            done = await self._engine.operate(StartProfile(), timeout_s)
            self._ended = None
            cores, epochs = self._cores(), self._epochs()
            # With the same core, the epoch before the operation counts: a stage that was lost since then has
            # lost its work from the first step on, and the profile must not pass for complete. With another
            # core, the first step is one of the new core, so its epoch counts.
            whole = [
                then if core == core_then else now
                for core_then, core, then, now in zip(before[0], cores, before[1], epochs, strict=True)
            ]
            self._running = running = _Running(done, self._clock(), cores, whole)
            running.following = asyncio.create_task(self._follow(running))
        return ProfileStarted(max_seconds=self._limits.max_profile_s, replicas=done)

    async def stop(self, timeout_s: float) -> ProfileStopped:
        """End the running profile and write it, or return the one that has ended by itself.

        Raises:
            PenstockError: there is no profile; or not all ranks have come to its end in time, and it
                continues; or it could not be written, and is lost.
        """
        async with self._turn:
            if self._running is not None:
                running, stopped = self._running, None
                if self._cores() == running.cores:
                    stopped = await self._engine.operate(StopProfile(), timeout_s)
                if running.following is not None:
                    running.following.cancel()
                return await self._finish(running, "stop", stopped)
            ended, self._ended = self._ended, None
        if isinstance(ended, PenstockError):
            raise ended
        if ended is None:
            raise InvalidRequestError("no profile is running.", remedy="Start one.", code="no_profile")
        return ended

    async def _follow(self, running: _Running) -> None:
        """Collect reports until the profile must end by itself, and end it then."""
        ended_by: EndedBy | None = None
        while ended_by is None:
            left_s = running.began_at + self._limits.max_profile_s - self._clock()
            if left_s <= 0:
                ended_by = "time"
            elif running.profile.num_spans * EVENT_BYTES > self._limits.max_profile_bytes:
                ended_by = "size"
            else:
                await self._sleep(min(POLL_S, left_s))
                if not await self._collect(running):
                    ended_by = "core_lost"
        async with self._turn:
            if self._running is running:
                self._ended = await self._end_by_itself(running, ended_by)

    async def _end_by_itself(self, running: _Running, ended_by: EndedBy) -> ProfileStopped | PenstockError:
        stopped = None
        if ended_by != "core_lost":
            with contextlib.suppress(PenstockError):  # the profile then ends with its last report
                stopped = await self._engine.operate(StopProfile(), END_TIMEOUT_S)
        try:
            return await self._finish(running, ended_by, stopped)
        except PenstockError as error:
            return error

    async def _finish(
        self, running: _Running, ended_by: EndedBy, stopped: list[OperationDone] | None
    ) -> ProfileStopped:
        """Wait for the last reports, and write the profile."""
        self._running = None
        if self._cores() != running.cores:  # the steps of another core do not belong to this profile
            ended_by, stopped = "core_lost", None
        profile, seconds = running.profile, self._clock() - running.began_at
        is_complete = stopped is not None and await self._is_settled(running, stopped)
        is_complete = is_complete and self._epochs() == running.epochs  # a lost stage's last work is missing
        bubbles = await asyncio.to_thread(bubbles_of, profile)
        about: dict[str, Any] = {"ended_by": ended_by, "complete": is_complete, "bubbles": bubbles}
        about |= {"started": running.started, "stopped": stopped}
        pieces = encoded_trace(profile, about, self._limits.max_profile_bytes)
        name, num_bytes = await asyncio.to_thread(self._folder.write, pieces)
        return ProfileStopped(
            file=name,
            bytes=num_bytes,
            seconds=seconds,
            ended_by=ended_by,
            complete=is_complete,
            bubbles=bubbles,
            started=running.started,
            stopped=stopped,
        )

    async def _is_settled(self, running: _Running, stopped: list[OperationDone]) -> bool:
        """Return whether all reports up to the end have come; wait for them at most `SETTLE_S`."""
        profile, deadline = running.profile, self._clock() + SETTLE_S
        profile.end(_steps_of(stopped))
        while await self._collect(running) and not profile.is_covered(self._num_stages):
            if self._clock() >= deadline:
                return False
            await self._sleep(SETTLE_POLL_S)
        return profile.is_covered(self._num_stages)

    async def _collect(self, running: _Running) -> bool:
        """Fetch the reports of the stages. Return False if a core is no longer the one of the beginning."""
        if self._cores() != running.cores:
            return False
        try:
            reports = await self._engine.trace()
        except WaitTimeoutError:
            return True  # the core is there, but late
        except PenstockError:
            return False
        if self._cores() != running.cores:
            return False
        running.profile.add(reports)
        return True

    def _cores(self) -> list[int | None]:
        """Return how often the core of each replica was started again; None while there is no core."""
        each = [status.stats for status in self._engine.statuses()]
        return [None if stats is None else stats.restarts.core for stats in each]

    def _epochs(self) -> list[int | None]:
        """Return the epoch of each replica; None while there is no core."""
        each = [status.stats for status in self._engine.statuses()]
        return [None if stats is None else stats.epoch for stats in each]


def _steps_of(done: list[OperationDone]) -> dict[int, int]:
    """Return the step of each replica from which on an operation is in force."""
    return {outcome.replica: outcome.accepted_step for outcome in done}
