"""A process that a host has started, as the supervisor sees it: what it has reported, and how to end it.

`Member` keeps what status events have reported; this part is the same for every kind of host. Subclasses know
how events come from a host, how the end of a process is noticed, and how it is ended (`hosts.local_process`
for this machine).
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from penstock.errors import ErrorInfo, StageLostError
from penstock.executor.base import first_cause
from penstock.process.child import ChildFailed, DrafterLoaded, Ready, StatusEvent, WeightsLoaded
from penstock.process.control import ControlMessage
from penstock.process.readiness import Waitable


class Member(ABC):
    """A process of the engine, such as a rank or the core, on one of the engine's hosts.

    Args:
        name: name in texts for users, such as "stage 1".
        stage: number of its pipeline stage; None: it has none.
        member_index: number under which the supervisor keeps the process among the members of a pipeline.

    Attributes:
        failure: the error that the process has reported, or the reason why it was killed or given up as lost;
            None: none yet.
        trace: end of the stack trace of a reported error.
        has_spoken: the process has reported something, and so has set up its signals.
        has_loaded: a rank has loaded its weights; a core's drafting process has loaded the draft model.
        is_ready: it has reported that it serves.
        started_at, heard_at: monotonic seconds of the start and of the last report.
    """

    def __init__(self, name: str, stage: int | None, member_index: int) -> None:
        self.name = name
        self.stage = stage
        self.member_index = member_index
        self.failure: ErrorInfo | None = None
        self.trace = ""
        self.has_spoken = False
        self.has_loaded = False
        self.is_ready = False
        self.started_at = self.heard_at = time.monotonic()

    def begin_as(self, name: str, stage: int | None, member_index: int) -> None:
        """Give the process the name, stage and index of the rank that it becomes; its times count from now.

        It has waited until now (a spare or a standby). What it has reported stays.
        """
        self.name, self.stage, self.member_index = name, stage, member_index
        self.started_at = self.heard_at = time.monotonic()

    is_elsewhere: ClassVar[bool] = False  # on another host than the supervisor

    @property
    def is_away(self) -> bool:
        """Whether its host cannot be reached now, so that the process cannot be heard but may be well."""
        return False

    @property
    @abstractmethod
    def identity(self) -> str:
        """The words by which people find the process, such as "pid 4711"."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """The exit code as `subprocess` gives it (negative: a signal); None while it runs."""

    @property
    @abstractmethod
    def sources(self) -> Collection[Waitable]:
        """The objects to poll: one is readable when the process has reported something or has ended.

        Processes of one host may share sources. `read_status` may leave fewer sources.
        """

    @abstractmethod
    def hand(self, message: ControlMessage) -> None:
        """Send the process an order and the endpoints that belong to it. Never fails, even if it is lost."""

    @abstractmethod
    def show_threads(self) -> None:
        """Make the process print the stacks of all its threads; does not wait for that."""

    @abstractmethod
    def ask_to_leave(self) -> None:
        """Ask the process to end by itself, in its own time; does not wait for its end."""

    @abstractmethod
    def kill_now(self) -> None:
        """Kill the process at once, if it still runs; does not wait for its end."""

    @abstractmethod
    def await_end(self) -> int:
        """Wait until the process has ended, and return its exit code."""

    @abstractmethod
    def close(self) -> None:
        """Reap the process and release all that belongs to it; it must have ended."""

    def disown(self, error: Exception) -> None:
        """Raise an error that arose here, in the supervisor, while it handled a report of the process.

        For a process of this host such an error is a bug. Subclasses for other hosts override this method:
        they give up the host as lost.
        """
        raise error

    @abstractmethod
    def _receive(self) -> list[StatusEvent]:
        """Return the events that have come since the last call, without waiting."""

    def read_status(self) -> list[StatusEvent]:
        """Return the events that the process has reported since the last call, without waiting.

        Updates the attributes of this object by them.
        """
        events = self._receive()
        self.heard_at = time.monotonic() if events else self.heard_at
        for event in events:
            if isinstance(event, ChildFailed) and self.failure is None:
                self.failure, self.trace = event.error, event.trace
            self.has_loaded |= isinstance(event, WeightsLoaded | DrafterLoaded)
            self.is_ready |= isinstance(event, Ready)
        self.has_spoken |= bool(events)
        return events

    def kill(self, reason: str) -> None:
        """Kill the process at once, and note the reason as its failure if it has none yet.

        Does not wait for its end.

        Args:
            reason: what the process did or did not do, in words that continue a sentence which begins
                with its name, such as "has given no sign of life for 3.0 s".
        """
        if self.failure is None:
            self.failure = self._lost(f"{reason}, and was killed")
        self.kill_now()

    def end(self) -> ErrorInfo:
        """Return the error that explains the end of the process: its failure, or else its code or signal.

        Without a failure, this waits for the end.
        """
        if self.failure is not None:
            return self.failure
        code = self.await_end()
        if code >= 0:
            return self._lost(f"ended with code {code}")
        return self._lost(f"was killed by {_signal_named(-code)}")

    @property
    def has_failed(self) -> bool:
        """Whether the process has a failure, or has ended by a signal or with an exit code other than 0."""
        return self.failure is not None or bool(self.exit_code)

    @property
    def is_cause(self) -> bool:
        """Whether the process has failed by itself, and not only because another one has.

        Its failure shows that; if it has none, only an end by a signal counts.
        """
        if self.failure is not None:
            # `first_cause` prefers any other error to a consequence: what it takes is a cause.
            some_failure = ErrorInfo(kind="PenstockError", message="")
            return first_cause([self.failure, some_failure]) is self.failure
        return (self.exit_code or 0) < 0

    def _lost(self, how: str) -> ErrorInfo:
        return StageLostError(f"{self.name} ({self.identity}) {how}.", stage=self.stage).info()


def _signal_named(number: int) -> str:
    """Return number and name of a signal; real-time signals between the first and the last have no name."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
