"""Listens at the address where workers join a head, and finds the address that users type on other hosts.

`0.0.0.0` and `[::]` stand for all addresses of this host; `[::]` accepts IPv4 too.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import PortInUseError
from penstock.hosts.network.interfaces import HostAddress, usable_addresses

BACKLOG = 128
_ALL_OF_SIX = "::"


def listen_for_workers(host: str, port: int) -> socket.socket:
    """Return a socket that listens for workers that want to join.

    Args:
        host: an address or a name of this host. Of a name's addresses, those that other hosts reach are tried
            before loopback: on many systems the host's own name has a loopback address too.

    Raises:
        PortInUseError: nothing can listen there.
    """
    failure: OSError | None = None
    try:
        found = _resolved(host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of DNS has such a part
        raise _not_listening(host, port, error) from error
    for family, _, _, _, address in sorted(found, key=lambda one: _is_loopback(str(one[4][0]))):
        try:
            return _listener(family, address)
        except OSError as error:
            failure = failure or error
    assert failure is not None, "a name has at least one address"
    raise _not_listening(host, port, failure) from failure


def join_address(
    host: str, port: int, addresses: Callable[[], Sequence[HostAddress]] = usable_addresses
) -> str:
    """Return the address with port at which workers join, as users type it.

    If `host` stands for all addresses of this host, the most promising one is returned.
    """
    return shown(next(iter(join_hosts(host, addresses)), host), port)


def join_hosts(host: str, addresses: Callable[[], Sequence[HostAddress]] = usable_addresses) -> Sequence[str]:
    """Return the addresses at which workers may join a head that listens at `host`, the best ones first."""
    if not is_any_address(host):
        return [host]
    return [one.address for one in addresses() if not one.is_link_local]


def loopback_warning(host: str, port: int) -> str:
    """Return a warning if a name of this host leads only to loopback addresses; else an empty text."""
    addresses = [str(one[4][0]) for one in _resolved(host, port)]
    if _is_address(host) or not all(map(_is_loopback, addresses)):
        return ""
    return (
        f"{host} is {addresses[0]} on this host, which other hosts cannot reach. Give --listen-workers an "
        "address of this host."
    )


def shown(host: str, port: int) -> str:
    """Return host and port as people type them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolved(host: str, port: int) -> list[tuple[int, int, int, str, Any]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(found)


def _listener(family: int, address: Any) -> socket.socket:
    takes_both = address[0] == _ALL_OF_SIX and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=takes_both)


def _not_listening(host: str, port: int, error: OSError | UnicodeError) -> PortInUseError:
    why = getattr(error, "strerror", None) or str(error)
    return PortInUseError(
        f"cannot listen for workers at {shown(host, port)}: {why.lower()}.",
        remedy="Give another --listen-workers ADDRESS:PORT, with an address of this host.",
        param="listen_workers",
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback


def is_any_address(host: str) -> bool:
    """Return whether `host` is an address that stands for all addresses of a host, such as 0.0.0.0."""
    return _is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_unspecified
