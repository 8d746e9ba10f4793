"""The log of a worker: what it and its processes print, shown there and sent to the head within bounds.

Used by `hosts.worker`, which makes one for each time that it serves a head, and by `hosts.agent`, which sends
what it takes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.hosts.agent_messages import LogLines
from penstock.hosts.logs.child_outputs import PipedOutputs
from penstock.hosts.logs.line_ration import LineRation
from penstock.process.readiness import Waitable
from penstock.told_text import shown_line


class AgentLog(Protocol):
    """The interface of a log from which an agent takes the lines that it sends to the head."""

    @property
    def sources(self) -> Sequence[Waitable]:
        """The objects to poll, readable when there may be lines."""
        ...

    def take(self) -> list[LogLines]:
        """Return the messages with log lines that are to be sent to the head now."""
        ...


class NoLog:
    """The log of an agent that sends no lines to the head. Implements `AgentLog`."""

    sources: Sequence[Waitable] = ()

    def take(self) -> list[LogLines]:
        return []


class WorkerLog:
    """The log of one worker: its own lines, and those of its processes. Implements `AgentLog`.

    Args:
        show: prints a line on the worker's host.
        outputs: outputs of the worker's processes; the log closes them.
        clock: monotonic seconds.
    """

    def __init__(
        self, show: Callable[[str], None], outputs: PipedOutputs, clock: Callable[[], float]
    ) -> None:
        self._show = show
        self._outputs = outputs
        self._ration = LineRation(clock)
        self._own: list[tuple[str, str]] = []  # lines of the worker that have been shown

    @property
    def sources(self) -> Sequence[Waitable]:
        return [self._outputs]

    def say(self, line: str) -> None:
        """Show a line of the worker itself, on its host; the next `take` returns it for the head."""
        self._show(line)
        self._own.append(("", line))

    def take(self) -> list[LogLines]:
        """Show what processes have printed since the last call; return it and the own lines for the head.

        Of lines beyond the bounds of `LineRation` the head gets only the number.
        """
        printed = self._outputs.take()
        for name, line in printed:
            self._show(f"{name}: {line}")
        lines = [*self._own, *printed]
        self._own.clear()
        sent = [(name, shown_line(line)) for name, line in lines if self._ration.admit()]
        num_dropped = self._ration.take_dropped()
        return [LogLines(lines=sent, num_dropped=num_dropped)] if sent or num_dropped else []

    def close(self) -> None:
        """Show what is left, and stop reading. The processes must have ended before."""
        self.take()
        self._outputs.close()
