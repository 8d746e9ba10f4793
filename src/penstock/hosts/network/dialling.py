"""Dials many addresses at once, each from an address of this host, without waiting for one after another.

Used where network paths between hosts are tried (`scout`), and where ports are (`port_check`).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

CONNECT_S = 0.5  # longer than any round trip that is of use to a pipeline
GRACE_S = 0.1  # least time for the other addresses once one is connected


class Dial(NamedTuple):
    """An address to dial.

    Attributes:
        host: a numeric address.
        own: address of this host to dial from; empty: any.
    """

    host: str
    port: int
    own: str = ""


def dial_all(
    dials: Sequence[Dial], timeout_s: float = CONNECT_S, clock: Callable[[], float] = time.monotonic
) -> list[socket.socket | OSError]:
    """Dial all addresses at once; return for each the connected socket, which does not block, or the error.

    Args:
        timeout_s: seconds for all of them together. Once one is connected, the others have ten times as long
            as that has taken, and at least `GRACE_S`: an address that never answers does not cost all of it.
            What has been answered by then counts, also where this host is too busy to look in time.
    """
    began = clock()
    ends = [_begin(dial) for dial in dials]
    waiting = {end.fileno(): place for place, end in enumerate(ends) if isinstance(end, socket.socket)}
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLOUT)
    until = began + timeout_s
    while waiting and (ready := poll.poll(max(0.0, until - clock()) * 1e3)):
        for descriptor, _ in ready:
            poll.unregister(descriptor)
            place = waiting.pop(descriptor)
            ends[place] = _finished(ends[place])
            if isinstance(ends[place], socket.socket):
                now = clock()
                until = min(until, now + max(GRACE_S, 10 * (now - began)))
    for place in waiting.values():
        ends[place] = _closed(ends[place], TimeoutError(errno.ETIMEDOUT, "no answer"))
    return ends


def close_all(ends: Sequence[socket.socket | OSError]) -> None:
    """Close the sockets among the results of `dial_all`."""
    for end in ends:
        if isinstance(end, socket.socket):
            end.close()


def reason(error: OSError) -> str:
    """Return in words why a dial has failed, for a message."""
    return (error.strerror or str(error)).lower()


def _begin(dial: Dial) -> socket.socket | OSError:
    try:
        family, address = _resolved(dial.host, dial.port)
        end = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        return error
    try:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if dial.own:
            end.bind(_resolved(dial.own, 0)[1])
        begun = end.connect_ex(address)
    except OSError as error:
        return _closed(end, error)
    if begun not in (0, errno.EINPROGRESS):
        return _closed(end, OSError(begun, os.strerror(begun)))
    return end


def _finished(end: socket.socket | OSError) -> socket.socket | OSError:
    assert isinstance(end, socket.socket)
    failure = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return _closed(end, OSError(failure, os.strerror(failure))) if failure else end


def _closed(end: socket.socket | OSError, error: OSError) -> OSError:
    assert isinstance(end, socket.socket)
    end.close()
    return error


def _resolved(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    """Return family and address; a scope such as `%eth0` becomes a number."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, _, _, _, address = found[0]
    return family, address
