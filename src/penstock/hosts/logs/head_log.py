"""Shows log lines of another host at the head: with the host's name, within bounds.

A worker keeps to tighter bounds, but the head does not rely on that. It also removes characters of a line
that could harm a terminal. `hosts.gathering` makes a `HeadLog` for each worker.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.hosts.agent_messages import LogLines
from penstock.hosts.logs.line_ration import LINES_AT_ONCE, LINES_PER_S, LineRation
from penstock.told_text import shown_line

ShowLine = Callable[[str, str, str], None]  # name of the host, of the process ("": the worker), and the line
_SHARE = 2.0  # the head's bounds are so many times a worker's: the network may have held up some lines


class HeadLog:
    """The log of one other host, shown line by line at the head, within bounds.

    Args:
        host: name of that host.
        show: shows a line.
        clock: monotonic seconds.
    """

    def __init__(self, host: str, show: ShowLine, clock: Callable[[], float]) -> None:
        self._host = host
        self._show = show
        self._ration = LineRation(clock, _SHARE * LINES_AT_ONCE, _SHARE * LINES_PER_S)

    def take(self, message: LogLines) -> None:
        """Show the lines of a message, as far as the bounds allow, and say how many were left out."""
        for name, line in message.lines:
            if self._ration.admit():
                self._show(self._host, shown_line(name), shown_line(line))
        self._ration.note_dropped(message.num_dropped)
        num_dropped = self._ration.take_dropped()
        if num_dropped:
            self._show(self._host, "", f"{num_dropped} more lines are only in the log of that host")
