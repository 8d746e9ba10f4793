"""The operations of one client that have not ended: enough to request them of the next core.

A pause, a slower pace and open sessions outlive the core that was told of them: the next core begins with
them.
Kept by `engine.client.async_engine`, which keeps requests in `engine.client.live_requests`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.ipc import AddRequest, Operate, Operated, SessionsChanged
from penstock.engine.stats import CoreStats
from penstock.operations import CloseSession, OpenSession, Operation, OperationDone, Pause, Resume, SlowDown


@dataclass(frozen=True, slots=True)
class Asked:
    """An operation under way. Its caller may give the answer up.

    Attributes:
        num_requests: sequences that this client had sent before (`LiveRequests.num_asked`).
    """

    message: Operate
    answer: asyncio.Future[OperationDone]
    num_requests: int


class AskedOperations:
    """The operations under way, in the order of their requests, and the state that outlives a core.

    Attributes:
        sessions: by id, the sessions that are open as far as the core has said, also while it is away.
        knows_sessions: whether any core has said which sessions are open.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, Asked] = {}
        self._is_paused = False
        self._interval_ms = 0
        self._closing: dict[str, OpenSession] = {}  # that are closed, and whose end is not
        self.sessions: dict[str, OpenSession] = {}
        self.knows_sessions = False

    def ask(self, operation: Operation, num_requests: int) -> Asked:
        """Return an operation for the caller to send, if there is a core. `num_requests`: see `Asked`."""
        number = next(self._numbers)
        answer: asyncio.Future[OperationDone] = asyncio.get_running_loop().create_future()
        self._open[number] = asked = Asked(Operate(number, operation), answer, num_requests)
        return asked

    @property
    def sessions_asked(self) -> set[str]:
        """Ids of the sessions whose opening or closing has no answer yet."""
        return {
            asked.message.operation.session_id
            for asked in self._open.values()
            if isinstance(asked.message.operation, OpenSession | CloseSession)
        }

    def note(self, stats: CoreStats) -> None:
        """Note how the core is. A change that it has been asked for it may not know of yet.

        It says which sessions are open before its first numbers.
        """
        self.knows_sessions = True
        if not self._is_open(Pause, Resume):
            self._is_paused = stats.scheduler.paused
        if not self._is_open(SlowDown):
            self._interval_ms = stats.plan_interval_ms

    def note_sessions(self, changed: SessionsChanged) -> None:
        """Note which sessions the core has opened and closed."""
        asked_to_close = {
            asked.message.operation.session_id
            for asked in self._open.values()
            if isinstance(asked.message.operation, CloseSession)
        }
        for session_id in changed.closed:
            closed = self.sessions.pop(session_id, None)
            if closed is not None and session_id in asked_to_close:
                self._closing[session_id] = closed
        self.sessions |= {asked.session_id: asked for asked in changed.opened}

    def close(self, message: Operated) -> None:
        """Note that an operation is complete, and resolve its answer."""
        asked = self._open.pop(message.number, None)
        if asked is None:
            return
        operation = asked.message.operation
        if message.done.error is None and isinstance(operation, Pause | Resume):
            self._is_paused = isinstance(operation, Pause)
        if message.done.error is None and isinstance(operation, SlowDown):
            self._interval_ms = operation.interval_ms
        if isinstance(operation, CloseSession):
            self._closing.pop(operation.session_id, None)
        if not asked.answer.done():
            asked.answer.set_result(message.done)

    def first(self) -> list[Operate]:
        """Return what a new core is asked before any request is sent: to begin as the last core was.

        A session that it will be asked again to close is opened first.
        """
        wanted: list[Operation] = [Pause("keep")] if self._is_paused else []
        if self._interval_ms:
            wanted.append(SlowDown(self._interval_ms))
        wanted += (self._closing | self.sessions).values()
        return [Operate(next(self._numbers), operation) for operation in wanted]

    def again(self, requests: Iterable[tuple[int, AddRequest]]) -> list[Operate | AddRequest]:
        """Return what a new core is asked then: all that has not ended, in the order of the requests.

        So an operation finds the requests that preceded it, and ends none that came after.

        Args:
            requests: as `LiveRequests.again` gives them.
        """
        operations = deque(self._open.values())
        merged: list[Operate | AddRequest] = []
        for number, request in requests:
            while operations and operations[0].num_requests <= number:
                merged.append(operations.popleft().message)
            merged.append(request)
        return merged + [asked.message for asked in operations]

    def _is_open(self, *kinds: type[Operation]) -> bool:
        return any(isinstance(asked.message.operation, kinds) for asked in self._open.values())
