"""Shows events of the supervisor and of hosts as lines, while a command measures or waits for hosts."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.supervisor.reports import Caution, Event, Notice, event_line


class Speaker:
    """Shows events as they come.

    Args:
        show: prints a line.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def note(self, text: str) -> None:
        self.report(Notice(text=text))

    def caution(self, text: str) -> None:
        self.report(Caution(text=text))

    def report(self, event: Event) -> None:
        self._show(event_line(event))
