"""Applies each admin operation between two plans, and reports when all ranks have come past this point.

    accept ──▶ in force at once ──▶ quiet ──▶ a plan made from then on has crossed all stages ──▶ done

An operation is quiet when nothing is left of the state before it. A pause is quiet when no request runs that
must not run. A flush of the cache is quiet when no copy of a block is under way that had begun before it.
Other operations are quiet at once. If no plan is in flight then, an empty one is sent to prove the rest. If a
stage is lost meanwhile, the first plan of the next epoch serves as well. Owned by `engine.core.core`; knows
no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from penstock.engine.core.pace import Pace
from penstock.errors import AbortedError, ErrorInfo, PenstockError, UnavailableError
from penstock.kvcache.cache_flush import CacheFlush
from penstock.kvcache.sessions import Sessions
from penstock.operations import (
    Abort,
    CloseSession,
    FlushCache,
    OpenSession,
    Operation,
    OperationDone,
    Pause,
    PauseMode,
    Resume,
    SlowDown,
    StartProfile,
    StopProfile,
)
from penstock.request import RequestUpdate
from penstock.scheduler.scheduler import Scheduler

Ticket = tuple[bytes, int]  # the id of a client, and the client's number for the operation


@dataclass(slots=True, eq=False)
class _Open:
    ticket: Ticket
    operation: Operation
    accepted_step: int
    flush: CacheFlush | None = None
    aborted: list[str] | UnsetType = UNSET
    proving_step: int | None = None  # the first step that was planned after the operation was quiet


class OperationsInForce:
    """The administrator's operations that a core has accepted, until their results are taken.

    Args:
        scheduler: carries them out.
        pace: limits how fast plans follow one another; `SlowDown` sets it.
    """

    def __init__(self, scheduler: Scheduler, pace: Pace) -> None:
        self._scheduler = scheduler
        self.pace = pace
        self._next_step = 0  # the next step to be planned, as the caller has said last
        # Sets that keep their order. A core that replaces another one is asked to open all sessions at once,
        # so nothing here may go through all operations for each of them.
        self._open: dict[_Open, None] = {}  # operations in force and not complete, the oldest first
        self._unquiet: dict[_Open, None] = {}  # of these, the ones without a proving step
        self._done: list[tuple[Ticket, OperationDone]] = []

    def accept(self, ticket: Ticket, operation: Operation, next_step: int) -> list[RequestUpdate]:
        """Put an operation into force at once.

        Args:
            ticket: identifies the operation when it is done.
            next_step: id of the first step that is planned under the operation.

        Returns:
            The last update of each request that the operation ends.
        """
        updates: list[RequestUpdate] = []
        refusal: ErrorInfo | None = None
        entry = _Open(ticket, operation, next_step)
        if isinstance(operation, FlushCache):
            entry.flush = self._scheduler.prefixes.flush(with_store=operation.store)
        elif isinstance(operation, Pause):
            self._give_up_pauses(_OVERTAKEN, but=operation.mode)
            self._scheduler.paused = "wait" if operation.mode == "wait" else "keep"
            if operation.mode == "abort":
                updates = self._scheduler.fail_all(_PAUSED)
        elif isinstance(operation, Abort):
            updates = self._scheduler.fail_all(_ABORTED, operation.concerns)
            entry.aborted = [update.request_id for update in updates]
        elif isinstance(operation, SlowDown):
            self.pace.interval_ms = operation.interval_ms
        elif isinstance(operation, Resume):
            self._scheduler.paused = None
            self._give_up_pauses(_RESUMED)
        elif isinstance(operation, OpenSession | CloseSession):
            refusal = self._apply_to_sessions(operation)
        self._open[entry] = self._unquiet[entry] = None
        if refusal is not None:
            self._finish(entry, error=refusal)
        self._next_step = next_step
        self._note_quiet()
        return updates

    @property
    def sessions(self) -> Sessions:
        """The open cache sessions, each of which keeps the KV blocks of its requests."""
        return self._scheduler.prefixes.sessions

    @property
    def num_open(self) -> int:
        """The number of operations that are in force and not complete."""
        return len(self._open)

    @property
    def wants_plan(self) -> bool:
        """Whether an operation waits only for a plan to cross all stages; an empty plan will do."""
        self._note_quiet()
        return len(self._open) > len(self._unquiet)

    @property
    def wants_times(self) -> bool:
        """Whether ranks should report their times after the next plan: a profile begins or ends."""
        return any(isinstance(entry.operation, StartProfile | StopProfile) for entry in self._open)

    def settled(self, step_id: int, next_step: int) -> None:
        """Record that the plan of this step has crossed all stages.

        Operations that waited for that plan are now complete.

        Args:
            next_step: id of the next step to be planned.
        """
        for entry in [*self._open]:
            if entry.proving_step is not None and entry.proving_step <= step_id:
                self._finish(
                    entry, completed_step=step_id, error=None if entry.flush is None else entry.flush.error
                )
        self._next_step = next_step
        self._note_quiet()

    def take_done(self) -> list[tuple[Ticket, OperationDone]]:
        """Return the results of the operations that have ended since the last call, each with its ticket."""
        done, self._done = self._done, []
        return done

    def _apply_to_sessions(self, operation: OpenSession | CloseSession) -> ErrorInfo | None:
        """Open or close a session; return the error, if any."""
        try:
            self.sessions.apply(operation)
        except PenstockError as error:
            return error.info()
        return None

    def _note_quiet(self) -> None:
        for entry in [entry for entry in self._unquiet if self._is_quiet(entry)]:
            entry.proving_step = self._next_step
            del self._unquiet[entry]

    def _is_quiet(self, entry: _Open) -> bool:
        if isinstance(entry.operation, Pause):
            return self._scheduler.is_quiet
        return entry.flush is None or entry.flush.is_done()

    def _give_up_pauses(self, error: ErrorInfo, but: PauseMode | None = None) -> None:
        """Finish with an error the pauses that are not complete, except those of mode `but`."""
        pauses = [(entry, entry.operation) for entry in self._open if isinstance(entry.operation, Pause)]
        for entry, pause in pauses:
            if pause.mode != but:
                self._finish(entry, error=error)

    def _finish(
        self, entry: _Open, *, completed_step: int | None = None, error: ErrorInfo | None = None
    ) -> None:
        del self._open[entry]
        self._unquiet.pop(entry, None)
        done = OperationDone(
            accepted_step=entry.accepted_step,
            completed_step=completed_step,
            error=error,
            aborted=entry.aborted,
        )
        self._done.append((entry.ticket, done))


_ABORTED = AbortedError(
    "an administrator aborted this request.",
    remedy="Do not send the request again.",
    code="aborted_by_administrator",
).info()
_PAUSED = UnavailableError(
    "the engine was paused, and its running requests were aborted.", remedy="Try again later.", code="paused"
).info()
_OVERTAKEN = AbortedError("another pause replaced this one before it was complete.").info()
_RESUMED = AbortedError("the engine was resumed before the pause was complete.").info()
