"""Takes an administrator's operations between two plans, and says when all ranks have them behind them.

    accept ──▶ in force at once ──▶ quiet: nobody runs who must not, ──▶ a plan made from then on ──▶ done
                                    no copy is under way that was        has crossed all stages
                                    when the cache was flushed

When no plan is in flight, one without rows is sent for the sake of it. A stage that is lost in between delays
the end: the first plan of the next epoch serves as well. Belongs to `engine.core.core`; knows no clock.
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

Ticket = tuple[bytes, int]  # of a client, and its number for the operation


@dataclass(slots=True, eq=False)
class _Open:
    ticket: Ticket
    operation: Operation
    accepted_step: int
    flush: CacheFlush | None = None
    aborted: list[str] | UnsetType = UNSET
    proving_step: int | None = None  # the first that was planned when all was quiet


class OperationsInForce:
    """Args:
    scheduler: obeys.
    pace: of the plans.
    """

    def __init__(self, scheduler: Scheduler, pace: Pace) -> None:
        self._scheduler = scheduler
        self.pace = pace
        self._next_step = 0  # as told last: the next one, when no plan is in flight
        # A core that takes another's place is asked for as many sessions at once as there may be: nothing
        # here looks at all operations for each of them.
        self._open: dict[_Open, None] = {}  # oldest first
        self._unquiet: dict[_Open, None] = {}  # of these, those without a proving step
        self._done: list[tuple[Ticket, OperationDone]] = []

    def accept(self, ticket: Ticket, operation: Operation, next_step: int) -> list[RequestUpdate]:
        """Put an operation into force.

        Args:
            ticket: to know it by when it is done.
            next_step: the plan of this step is the first one under it.

        Returns:
            The last update of each request that it ends.
        """
        updates: list[RequestUpdate] = []
        refusal: ErrorInfo | None = None
        found = _Open(ticket, operation, next_step)
        if isinstance(operation, FlushCache):
            found.flush = self._scheduler.prefixes.flush(with_store=operation.store)
        elif isinstance(operation, Pause):
            self._give_up_pauses(_OVERTAKEN, but=operation.mode)
            self._scheduler.paused = "wait" if operation.mode == "wait" else "keep"
            if operation.mode == "abort":
                updates = self._scheduler.fail_all(_PAUSED)
        elif isinstance(operation, Abort):
            updates = self._scheduler.fail_all(_ABORTED, operation.concerns)
            found.aborted = [update.request_id for update in updates]
        elif isinstance(operation, SlowDown):
            self.pace.interval_ms = operation.interval_ms
        elif isinstance(operation, Resume):
            self._scheduler.paused = None
            self._give_up_pauses(_RESUMED)
        elif isinstance(operation, OpenSession | CloseSession):
            refusal = self._apply_to_sessions(operation)
        self._open[found] = self._unquiet[found] = None
        if refusal is not None:
            self._finish(found, error=refusal)
        self._next_step = next_step
        self._note_quiet()
        return updates

    @property
    def sessions(self) -> Sessions:
        """Those that are open."""
        return self._scheduler.prefixes.sessions

    @property
    def num_open(self) -> int:
        """How many are in force and not complete."""
        return len(self._open)

    @property
    def wants_plan(self) -> bool:
        """Whether a plan should go out, though without rows, when none is in flight."""
        self._note_quiet()
        return len(self._open) > len(self._unquiet)

    @property
    def wants_times(self) -> bool:
        """Whether ranks should report where their time goes after the next plan: a profile begins or ends."""
        return any(isinstance(found.operation, StartProfile | StopProfile) for found in self._open)

    def settled(self, step_id: int, next_step: int) -> None:
        """The plan of this step has crossed all stages, and what it brought is known."""
        for found in [*self._open]:
            if found.proving_step is not None and found.proving_step <= step_id:
                self._finish(
                    found, completed_step=step_id, error=None if found.flush is None else found.flush.error
                )
        self._next_step = next_step
        self._note_quiet()

    def take_done(self) -> list[tuple[Ticket, OperationDone]]:
        """What has come to its end since the last call, with its tickets."""
        done, self._done = self._done, []
        return done

    def _apply_to_sessions(self, operation: OpenSession | CloseSession) -> ErrorInfo | None:
        """Why it comes to nothing, if it does."""
        try:
            self.sessions.apply(operation)
        except PenstockError as error:
            return error.info()
        return None

    def _note_quiet(self) -> None:
        for found in [found for found in self._unquiet if self._is_quiet(found)]:
            found.proving_step = self._next_step
            del self._unquiet[found]

    def _is_quiet(self, found: _Open) -> bool:
        if isinstance(found.operation, Pause):
            return self._scheduler.is_quiet
        return found.flush is None or found.flush.is_done()

    def _give_up_pauses(self, error: ErrorInfo, but: PauseMode | None = None) -> None:
        """Those that are not complete, except of one mode."""
        pauses = [(found, found.operation) for found in self._open if isinstance(found.operation, Pause)]
        for found, pause in pauses:
            if pause.mode != but:
                self._finish(found, error=error)

    def _finish(
        self, found: _Open, *, completed_step: int | None = None, error: ErrorInfo | None = None
    ) -> None:
        del self._open[found]
        self._unquiet.pop(found, None)
        done = OperationDone(
            accepted_step=found.accepted_step,
            completed_step=completed_step,
            error=error,
            aborted=found.aborted,
        )
        self._done.append((found.ticket, done))


_ABORTED = AbortedError(
    "an administrator has ended this request.",
    remedy="Do not send it again.",
    code="aborted_by_administrator",
).info()
_PAUSED = UnavailableError(
    "the engine was paused, and what it had begun was given up.", remedy="Try again later.", code="paused"
).info()
_OVERTAKEN = AbortedError("another pause took the place of this one before it was complete.").info()
_RESUMED = AbortedError("the engine was resumed before the pause was complete.").info()
