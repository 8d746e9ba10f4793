"""Tracks which generating requests run and whether new ones are accepted, and ends the server.

The server has one `Lifecycle`. A generating route calls `refuse_new` (in `generation.require_ready`) and
enters the request at once. `health` reads the state. `api_process` calls `drain` on the first signal and
`end_all` on the second one. `Interruptible` lets others end a coroutine with a reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from penstock.errors import PenstockError, UnavailableError

T = TypeVar("T")


class InterruptibleWork(Protocol):
    def interrupt(self, reason: PenstockError) -> None: ...


class Interruptible:
    """Runs one coroutine in the current task; `interrupt` makes it raise a reason there."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._reason: PenstockError | None = None

    def interrupt(self, reason: PenstockError) -> None:
        """End the coroutine with `reason`, or keep it from starting.

        This has no effect if the coroutine has ended or was interrupted before.
        """
        if self._reason is None:
            self._reason = reason
            if self._task is not None:
                self._task.cancel()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._reason is not None:
            work.close()
            raise self._reason
        self._task = asyncio.current_task()
        assert self._task is not None
        try:
            return await work
        except asyncio.CancelledError:
            if self._reason is None:
                raise
            self._task.uncancel()
            raise self._reason from None
        finally:
            self._task = None


class Lifecycle:
    """The running generating requests, and whether new ones are accepted.

    Attributes:
        draining_since: Unix time from which on new requests are refused; None: they are accepted.
    """

    def __init__(self) -> None:
        self._running: set[InterruptibleWork] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining_since: float | None = None

    @property
    def running(self) -> frozenset[InterruptibleWork]:
        return frozenset(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_draining(self) -> bool:
        return self.draining_since is not None

    def enter(self, work: InterruptibleWork) -> None:
        self._running.add(work)
        self._idle.clear()

    def leave(self, work: InterruptibleWork) -> None:
        self._running.discard(work)
        if not self._running:
            self._idle.set()

    def begin_drain(self) -> None:
        """Refuse new work from now on; `health` answers that the server is not ready."""
        if self.draining_since is None:
            self.draining_since = time.time()

    def refuse_new(self) -> None:
        """Raise `UnavailableError` while draining."""
        if self.is_draining:
            raise UnavailableError(
                "This server is shutting down and accepts no new requests.",
                remedy="Send the request again later or to another instance.",
                code="draining",
            )

    async def drain(self, timeout_s: float) -> int:
        """Refuse new work, wait for running work, and end with an error what runs after `timeout_s`.

        Returns how many requests were ended.
        """
        self.begin_drain()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return self.end_all()
        return 0

    def end_all(self) -> int:
        """End all running work with an error at once, and return how many requests were ended."""
        reason = UnavailableError(
            "This server was shut down before the answer was complete.", code="shutting_down"
        )
        victims = list(self._running)
        for work in victims:
            work.interrupt(reason)
        return len(victims)
