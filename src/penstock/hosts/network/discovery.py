"""Finds the head of a cluster in the local network, by mDNS (RFC 6762, 6763).

    head      Announcement(...)  service `_penstock._tcp`, with the cluster's name, port and addresses
    worker    HeadSearch(...)    each head that is announced, for the cluster of its token if it has one

An announcement is a hint and proves nothing: the host at the announced address must have the key that the
join token pins, as at an address that a user has typed. This is the only module that imports zeroconf (extra
`discovery`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.hosts.bell import Bell
from penstock.hosts.network.interfaces import HostAddress, usable_addresses

if TYPE_CHECKING:
    from zeroconf import Zeroconf

SERVICE = "_penstock._tcp.local."
_ANSWER_MS = 3000  # how long a host has to tell the address of the service that it has announced
_MAX_NAME = 63  # bytes of a label of DNS

Address = tuple[str, int]


class Announcement:
    """An announcement of a head in the local network, which workers can find until `close`.

    Args:
        host: name of the head's host.
        cluster: name of the cluster (`trust.certificates.cluster_name`).
        port: port at which workers join.
        addresses: addresses of this host, the most promising first.

    Raises:
        UsageError: the library is missing, or this host has no network for it.
    """

    def __init__(self, host: str, cluster: str, port: int, addresses: Sequence[str]) -> None:
        zeroconf = _library()
        label = f"{host}-{cluster[:8]}".encode()[:_MAX_NAME].decode(errors="ignore")
        self._service = zeroconf.ServiceInfo(
            SERVICE,
            f"{label}.{SERVICE}",
            port=port,
            properties={"cluster": cluster, "host": host},
            parsed_addresses=list(addresses),
            server=f"{label}.local.",
        )
        self._zeroconf = _opened()
        try:
            self._zeroconf.register_service(self._service, allow_name_change=True)
        except BaseException:
            self._zeroconf.close()
            raise

    def close(self) -> None:
        """Withdraw the announcement."""
        self._zeroconf.unregister_service(self._service)
        self._zeroconf.close()


class HeadSearch:
    """A search for the head of a cluster in the local network. Its descriptor is readable when one is found.

    Args:
        cluster: name of the cluster; empty: any head will do.
        timeout_ms: milliseconds in which a host must answer where its announced head is.

    Raises:
        UsageError: as `Announcement`.
    """

    def __init__(self, cluster: str, timeout_ms: int = _ANSWER_MS) -> None:
        zeroconf = _library()
        self._cluster, self._timeout_ms = cluster, timeout_ms
        self._found: queue.SimpleQueue[Address] = queue.SimpleQueue()
        self._bell = Bell()
        self._zeroconf = _opened()
        try:
            self._browser = zeroconf.ServiceBrowser(self._zeroconf, SERVICE, handlers=[self._see])
        except BaseException:  # such as no thread: a worker that has lost its head searches again and again
            self._zeroconf.close()
            self._bell.close()
            raise

    def fileno(self) -> int:
        return self._bell.fileno()

    def take(self) -> Address | None:
        """Return address and port of the next head that was found, oldest first; None if there is none."""
        self._bell.hush()
        return None if self._found.empty() else self._found.get()

    def close(self) -> None:
        """End the search."""
        self._browser.cancel()
        self._zeroconf.close()
        self._bell.close()

    def _see(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        """Take an announcement; the library calls this in a thread of its own."""
        if state_change.name == "Removed":
            return
        service = zeroconf.get_service_info(service_type, name, timeout=self._timeout_ms)
        address = None if service is None else head_address(service, self._cluster, _own_addresses())
        if address is not None:
            self._found.put(address)
            self._bell.ring()


def head_address(service: Any, cluster: str, own: Sequence[HostAddress]) -> Address | None:
    """Return the address and port where workers join an announced head, or None.

    None stands for a head of another cluster, and for an announcement without a usable port or address.

    Args:
        service: a `zeroconf.ServiceInfo`, which anybody in the network may have written.
        cluster: name of the cluster whose head is looked for; empty: any cluster.
        own: addresses of this host, the most promising first; they decide among the addresses of the head,
            whose order the library does not keep.
    """
    properties = {key: value or b"" for key, value in service.properties.items()}
    if cluster and properties.get(b"cluster") != cluster.encode():
        return None
    if not service.port or not 0 < service.port <= 65535:
        return None
    announced = [ipaddress.ip_address(text) for text in service.parsed_addresses()]
    usable = [one for one in announced if not (one.is_unspecified or one.is_multicast or one.is_link_local)]
    if not usable:
        return None
    return str(min(usable, key=lambda address: _remoteness(address, own))), service.port


def _remoteness(address: ipaddress.IPv4Address | ipaddress.IPv6Address, own: Sequence[HostAddress]) -> int:
    """Return the place of an address in the order to try them: those in a network of this host come first.

    The last are addresses that this host has itself: they may belong to a bridge of containers, which has the
    same address on many hosts.
    """
    interfaces = [ipaddress.ip_interface((one.address, one.prefix)) for one in own]
    if any(address == one.ip for one in interfaces):
        return len(interfaces) + 1
    beside = (place for place, one in enumerate(interfaces) if address in one.network)
    return next(beside, len(interfaces))


def _own_addresses() -> Sequence[HostAddress]:
    """Return the addresses of this host; none if they cannot be read: those of a head have no order then."""
    with contextlib.suppress(OSError):
        return usable_addresses()
    return ()


def _library() -> Any:
    try:
        import zeroconf
    except ImportError as error:
        raise UsageError(
            "--discover needs the library zeroconf.",
            remedy="Run `pip install 'penstock[discovery]'`, or name the head with --join.",
            param="discover",
        ) from error
    return zeroconf


def _opened() -> Any:
    zeroconf = _library()
    try:
        return zeroconf.Zeroconf(ip_version=zeroconf.IPVersion.All if socket.has_ipv6 else None)
    except OSError as error:
        raise UsageError(
            f"--discover cannot use the network: {(error.strerror or str(error)).lower()}.",
            remedy="Name the head with --join ADDRESS:PORT.",
            param="discover",
        ) from error
