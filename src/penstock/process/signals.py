"""Turns the signals that end a process into a source that a loop can wait for."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SignalSource:
    """A source that is readable when one of the signals has come (`signals_of_the_end`)."""

    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader

    def fileno(self) -> int:
        return self._reader.fileno()

    def clear(self) -> None:
        """Take the signals that have come, so that the source is readable again only at the next one."""
        self._reader.recv(64)


@contextlib.contextmanager
def signals_of_the_end() -> Iterator[SignalSource]:
    """Let SIGTERM, SIGINT and SIGHUP do nothing but make a source readable, within the `with` block.

    Only the main thread may call it.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    former = {number: signal.signal(number, lambda *_: None) for number in ENDING}
    former_fd = signal.set_wakeup_fd(writer.fileno())
    try:
        yield SignalSource(reader)
    finally:
        signal.set_wakeup_fd(former_fd)
        for number, action in former.items():
            signal.signal(number, action)
        reader.close()
        writer.close()
