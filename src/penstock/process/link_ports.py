"""The range of ports at which a host accepts links from other hosts; makes a socket that listens there.

It owns `--link-ports` as a value. A host listens before it asks another one to dial. A dialler that is
refused therefore knows that nobody will accept its connection later. This module serves nothing itself.
"""

from __future__ import annotations

import errno
import os
import re
import socket

import msgspec

from penstock.errors import PortInUseError, UsageError

BACKLOG = 64  # the most connections that wait to be accepted; each costs one socket
_RANGE = re.compile(r"(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?")


class PortRange(msgspec.Struct, frozen=True):
    """The ports from `first` to `last`, both included. With (0, 0) the kernel chooses a free port."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Return the range that a text such as `7701-7732` or `7701` names; raises `UsageError`."""
        match = _RANGE.fullmatch(text.strip())
        first = int(match["first"]) if match else 0
        last = int(match["last"] or first) if match else 0
        if not 1 <= first <= last <= 65535:
            raise UsageError(
                f"--link-ports {text!r} is not a range of ports.",
                remedy="Write the first and the last port, such as 7701-7732.",
                param="link_ports",
            )
        return cls(first, last)

    def __str__(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


DEFAULT_LINK_PORTS = PortRange(7701, 7732)


def listen_in_range(host: str, ports: PortRange = DEFAULT_LINK_PORTS) -> socket.socket:
    """Return a socket that listens at the first free port of the range.

    Args:
        host: an address of this machine, or a name; of several addresses of a name, the first is used.

    Raises:
        UsageError: this machine does not have the address.
        PortInUseError: every port of the range is in use, or this process may not use it.
    """
    family, address = _resolve(host)
    for port in range(ports.first, ports.last + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port, *address[2:]))
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise _not_ours(host, os.strerror(error.errno or 0)) from error
    raise PortInUseError(
        f"all ports {ports} at {host} are in use; links need one.",
        remedy="Give another range with --link-ports: one port for each link into this host.",
        param="link_ports",
    )


def _resolve(host: str) -> tuple[int, tuple[str, int] | tuple[str, int, int, int]]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise _not_ours(host, str(error)) from error
    family, _, _, _, address = found[0]
    return family, address  # type: ignore[return-value]  # of families without addresses there is none


def _not_ours(host: str, why: str) -> UsageError:
    return UsageError(
        f"cannot listen for links at {host}: {why}.",
        remedy="Give an address of this machine, as `ip addr` shows them.",
        param="address",
    )
