"""Checks whether the link ports of a host (those at which it accepts links) can be reached by another one.

The checked host listens at some free ports at both ends of its range and accepts nothing: the kernel
completes connections, and no byte of them is read. The other host dials each port and closes the connection.
Most ports stay free, since links may be opened meanwhile.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Annotated

import msgspec

from penstock.bounds import Port, Word
from penstock.errors import PenstockError
from penstock.hosts.network.dialling import CONNECT_S, Dial, close_all, dial_all, reason
from penstock.process.link_ports import PortRange, listen_in_range

MOST_PORTS = 8  # so many ports of a range are checked at most, and at most half of them
_MOST_LOOKS = 64  # so many ports are tried at each end of the range, since some may be in use


class CheckedPorts(msgspec.Struct, frozen=True, kw_only=True):
    """The ports at which a host listens for a check of its link ports by another host.

    Attributes:
        address: address at which the other host reaches the checked host.
        ports: ports at which it listens, at most `MOST_PORTS`; empty if all that were tried are in use.
        link_ports: the whole range, as people write it.
    """

    address: Word
    ports: Annotated[list[Port], msgspec.Meta(max_length=MOST_PORTS)]
    link_ports: Word


class OpenPorts:
    """A check's listeners at free link ports of this host, the first and the last ones of the range.

    Args:
        address: address of this host at which to listen.
        link_ports: range of the link ports.

    Attributes:
        checked: the ports as they are sent to the other host, which dials them.
    """

    def __init__(self, address: str, link_ports: PortRange) -> None:
        every = range(link_ports.first, link_ports.last + 1)
        count = max(1, min(MOST_PORTS, len(every) // 2))
        self._listeners: list[socket.socket] = []
        self._open(address, every, (count + 1) // 2)
        self._open(address, reversed(every), count // 2)
        ports = sorted(int(listener.getsockname()[1]) for listener in self._listeners)
        self.checked = CheckedPorts(address=address, ports=ports, link_ports=str(link_ports))

    def close(self) -> None:
        while self._listeners:
            self._listeners.pop().close()

    def _open(self, address: str, ports: Iterable[int], count: int) -> None:
        """Listen at `count` of these ports that are free."""
        wanted = len(self._listeners) + count
        for port in islice(ports, _MOST_LOOKS):
            if len(self._listeners) == wanted:
                return
            with suppress(PenstockError):  # the port is in use
                self._listeners.append(listen_in_range(address, PortRange(port, port)))


def unreached_ports(checked: CheckedPorts, own_address: str, timeout_s: float = CONNECT_S) -> dict[int, str]:
    """Dial another host's ports of a check; return those that cannot be reached from here, with the reason.

    Args:
        checked: the ports of the other host.
        own_address: address of this host from which they are dialled.
    """
    ends = dial_all([Dial(checked.address, port, own_address) for port in checked.ports], timeout_s)
    close_all(ends)
    return {
        port: reason(end) for port, end in zip(checked.ports, ends, strict=True) if isinstance(end, OSError)
    }


def port_list(ports: Sequence[int]) -> str:
    """Return ports as people write them: `7701-7705, 7709`."""
    runs: list[list[int]] = []
    for port in sorted(ports):
        if runs and runs[-1][-1] == port - 1:
            runs[-1].append(port)
        else:
            runs.append([port])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
