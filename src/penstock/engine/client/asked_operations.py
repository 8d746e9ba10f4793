"""Keeps the unfinished admin operations of one client, so that it can send them to a new core.

An operation is what an administrator asks of a running engine. A pause, a slower pace and open sessions
outlive the core that was asked for them: the next core begins with them. `engine.client.async_engine` owns
one `AskedOperations`; it keeps its requests in `engine.client.live_requests`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.engine.ipc import AddRequest, Operate, Operated, SessionsChanged
from penstock.engine.stats import CoreStats
from penstock.errors import ErrorInfo, error_from_info
from penstock.operations import CloseSession, OpenSession, Operation, OperationDone, Pause, Resume, SlowDown


@dataclass(frozen=True, slots=True)
class Asked:
    """An operation that the core has been asked for, or will be asked for, and has not answered.

    Attributes:
        message: the message that asks the core for the operation.
        answer: a future that gets the result; the caller may cancel it.
        num_requests: sequences that this client had asked for before the operation
            (`LiveRequests.num_asked`).
    """

    message: Operate
    answer: asyncio.Future[OperationDone]
    num_requests: int


class AskedOperations:
    """The operations without an answer, in the order of asking, and the state that outlives a core.

    Attributes:
        sessions: the open sessions by id, as a core has reported them; kept while there is no core.
        knows_sessions: whether any core has reported which sessions are open.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: dict[int, Asked] = {}
        self._first: dict[int, Operation] = {}  # those of `first` that this core has not completed yet
        self._is_paused = False
        self._interval_ms = 0
        self._closing: dict[str, OpenSession] = {}  # closed sessions whose `CloseSession` is unanswered
        self.sessions: dict[str, OpenSession] = {}
        self.knows_sessions = False

    def ask(self, operation: Operation, num_requests: int) -> Asked:
        """Record a new operation and return it.

        If there is a core, the caller sends it the operation's `message`.

        Args:
            num_requests: as in `Asked`.
        """
        number = next(self._numbers)
        answer: asyncio.Future[OperationDone] = asyncio.get_running_loop().create_future()
        self._open[number] = pending = Asked(Operate(number, operation), answer, num_requests)
        return pending

    @property
    def sessions_asked(self) -> set[str]:
        """The ids of the sessions whose opening or closing has no answer yet."""
        return {
            pending.message.operation.session_id
            for pending in self._open.values()
            if isinstance(pending.message.operation, OpenSession | CloseSession)
        }

    def note(self, stats: CoreStats) -> None:
        """Take from the core's statistics whether the core is paused, and its pace.

        Neither is taken while an operation that changes it is not answered: the statistics may be older than
        the operation. From the first statistics on, the core's sessions count as known.
        """
        self.knows_sessions = True
        if not self._is_open(Pause, Resume):
            self._is_paused = stats.scheduler.paused
        if not self._is_open(SlowDown):
            self._interval_ms = stats.plan_interval_ms

    def note_sessions(self, changed: SessionsChanged) -> None:
        """Bring `sessions` up to date by a core's report of sessions that were opened, changed or closed."""
        asked_to_close = {
            asked.message.operation.session_id
            for asked in self._open.values()
            if isinstance(asked.message.operation, CloseSession)
        }
        for session_id in changed.closed:
            closed = self.sessions.pop(session_id, None)
            if closed is not None and session_id in asked_to_close:
                self._closing[session_id] = closed
        self.sessions |= {session.session_id: session for session in changed.opened}

    def close(self, message: Operated) -> None:
        """Give an operation the core's result, and remember the state of the core that it has changed.

        The result of an operation that nobody waits for is ignored.
        """
        self._first.pop(message.number, None)
        pending = self._open.pop(message.number, None)
        if pending is None:
            return
        operation = pending.message.operation
        if message.done.error is None and isinstance(operation, Pause | Resume):
            self._is_paused = isinstance(operation, Pause)
        if message.done.error is None and isinstance(operation, SlowDown):
            self._interval_ms = operation.interval_ms
        if isinstance(operation, CloseSession):
            self._closing.pop(operation.session_id, None)
        if not pending.answer.done():
            pending.answer.set_result(message.done)

    def fail_all(self, error: ErrorInfo) -> None:
        """Fail all operations without an answer, because no core will come any more."""
        failed, self._open = self._open, {}
        for pending in failed.values():
            if not pending.answer.done():
                pending.answer.set_exception(error_from_info(error))

    def first(self) -> list[Operate]:
        """Return the messages that bring a new core to the state of the last core, to be sent before others.

        They pause the new core, slow it down and open the sessions. A session that is being closed is opened
        too, since the new core will be asked again to close it.
        """
        wanted: list[Operation] = [Pause("keep")] if self._is_paused else []
        if self._interval_ms:
            wanted.append(SlowDown(self._interval_ms))
        wanted += (self._closing | self.sessions).values()
        self._first = {next(self._numbers): operation for operation in wanted}
        return [Operate(number, operation) for number, operation in self._first.items()]

    def again(self, requests: Iterable[tuple[int, AddRequest]]) -> list[Operate | AddRequest]:
        """Return the messages that ask a new core for all unfinished operations and requests.

        They are in the order in which the last core was asked. An operation thus applies to the requests that
        preceded it, and to no request that came after it.

        Args:
            requests: as `LiveRequests.again` returns them.
        """
        operations = deque(self._open.values())
        merged: list[Operate | AddRequest] = []
        for number, request in requests:
            while operations and operations[0].num_requests <= number:
                merged.append(operations.popleft().message)
            merged.append(request)
        return merged + [pending.message for pending in operations]

    def _is_open(self, *kinds: type[Operation]) -> bool:
        asked = (pending.message.operation for pending in self._open.values())
        return any(isinstance(operation, kinds) for operation in (*self._first.values(), *asked))
