"""A process that a host has started, as the supervisor sees it: what it has said, and how it can be ended.

`Member` keeps what status events tell, the same on every host. How the events come, how the end is seen and
how it is brought about is the business of the host (`hosts.local_process` for the supervisor's own).
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar, Protocol

from penstock.errors import ErrorInfo, StageLostError
from penstock.executor.base import first_cause
from penstock.process.child import ChildFailed, DrafterLoaded, Ready, StatusEvent, WeightsLoaded
from penstock.process.control import ControlMessage


class Waitable(Protocol):
    """A source to wait for: readable when something has happened."""

    def fileno(self) -> int: ...


class Member(ABC):
    """A process of the engine on one of its hosts.

    Args:
        name: for messages, such as "stage 1".
        stage: its stage, or None.
        member_index: place at which its parent finds it among the members of an epoch; the parent chooses it.

    Attributes:
        failure: the error that it reported before its end, if it did; `trace` is the end of its stack trace.
        has_spoken: it has set itself up.
        has_loaded: a stage, its weights; a core, the model that drafts.
        is_ready: it has served.
        started_at, heard_at: monotonic seconds of its start and of its last word.
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
        """Begin anew as this member, as if the process had been started now."""
        self.name, self.stage, self.member_index = name, stage, member_index
        self.started_at = self.heard_at = time.monotonic()

    is_elsewhere: ClassVar[bool] = False  # on another host than the supervisor

    @property
    def is_away(self) -> bool:
        """Whether its host is not there: the process may be well, and cannot be heard."""
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
        """The sources that become readable when there is news of the process.

        They may be shared with others of its host, and may be fewer after `read_status`.
        """

    @abstractmethod
    def hand(self, message: ControlMessage) -> None:
        """Send the process a message, with its endpoints. Never fails: a lost process is seen elsewhere."""

    @abstractmethod
    def show_threads(self) -> None:
        """Make the process print where its threads are."""

    @abstractmethod
    def ask_to_leave(self) -> None:
        """Let the process end in its own time."""

    @abstractmethod
    def kill_now(self) -> None:
        """End the process at once, if it is still there."""

    @abstractmethod
    def await_end(self) -> int:
        """Wait until the process has ended, and return its exit code."""

    @abstractmethod
    def close(self) -> None:
        """Reap the process and release all that belongs to it; it must have ended."""

    def disown(self, error: Exception) -> None:
        """Raise the error that something which the process has said led to here.

        For a process of this host that is a bug; on another host the host is lost.
        """
        raise error

    @abstractmethod
    def _receive(self) -> list[StatusEvent]:
        """Return what has come since the last call, without waiting."""

    def read_status(self) -> list[StatusEvent]:
        """Return what the process has said since the last call."""
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
        """End the process for this reason, as it cannot be asked to."""
        if self.failure is None:
            self.failure = self._lost(f"{reason}, and was killed")
        self.kill_now()

    def end(self) -> ErrorInfo:
        """Return why the process has ended: its own words, or how."""
        if self.failure is not None:
            return self.failure
        code = self.await_end()
        if code >= 0:
            return self._lost(f"ended with code {code}")
        return self._lost(f"was killed by {_signal_named(-code)}")

    @property
    def has_failed(self) -> bool:
        """Whether the process has failed, and not merely left."""
        return self.failure is not None or bool(self.exit_code)

    @property
    def is_cause(self) -> bool:
        """Whether the process has failed by itself, and not because another one has."""
        if self.failure is not None:
            some_failure = ErrorInfo(kind="PenstockError", message="")  # goes before what is a consequence
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
