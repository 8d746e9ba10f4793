"""Reports to the service manager that started this process, such as systemd, when it is ready.

The protocol is that of `sd_notify(3)`: a datagram of lines `NAME=value` to a Unix socket. The variable
`NOTIFY_SOCKET` has the path of the socket or, behind an `@`, its abstract name. Without the variable nothing
is sent. A datagram that the manager does not take is dropped: the service neither waits for the manager nor
ends because of it. Used by `penstock serve` (`engine.supervisor.service_reporter`) and `penstock worker`.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Protocol

VARIABLE = "NOTIFY_SOCKET"
MAX_STATUS = 500  # characters


class ServiceNotifier(Protocol):
    """The service manager that has started this process and waits for reports on its state."""

    def ready(self) -> None:
        """Report that this process has started and serves."""
        ...

    def stopping(self) -> None:
        """Report that this process has begun to stop."""
        ...

    def status(self, text: str) -> None:
        """Show a line of text about the state; of a text with several lines, show the first."""
        ...


class NoNotifier:
    """A notifier for a process that a user has started: it reports nothing. Implements `ServiceNotifier`."""

    def ready(self) -> None:
        """Do nothing: no service manager waits."""

    def stopping(self) -> None:
        """Do nothing: no service manager waits."""

    def status(self, text: str) -> None:
        """Do nothing: no service manager reads it."""


class SocketNotifier:
    """The socket of a service manager. Implements `ServiceNotifier`.

    Args:
        name: the name of the socket, as `NOTIFY_SOCKET` has it.
    """

    def __init__(self, name: str) -> None:
        self._address = f"\0{name[1:]}" if name.startswith("@") else name

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        self._send(f"STATUS={text.partition(chr(10))[0][:MAX_STATUS]}")

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(line.encode("utf-8", "replace"), self._address)


def service_notifier(environment: Mapping[str, str]) -> ServiceNotifier:
    """Return the service manager that the environment names, or a notifier that does nothing."""
    name = environment.get(VARIABLE, "")
    return SocketNotifier(name) if name[:1] in {"/", "@"} else NoNotifier()
