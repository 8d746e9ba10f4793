"""Finds pairs of addresses by which two hosts may reach each other, the most promising first.

Each host lists its own addresses with `usable_addresses`. `pair_addresses` pairs the addresses of two hosts.
`wires_of` groups the pairs by the two interfaces: each group is a network path, or *way*, between the hosts.
Each way is measured once (`link_measuring`), and the best is chosen by that (`link_choice`). The order here
only says which addresses are tried first.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import product
from typing import Annotated

import msgspec

from penstock.bounds import Small, Word
from penstock.errors import UsageError
from penstock.hosts.network.kernel_interfaces import Interface, read_interfaces

_TUNNELS = frozenset(
    {"tun", "wireguard", "ppp", "ipip", "sit", "gre", "ip6tnl", "ip6gre", "vxlan", "geneve", "xfrm"}
)
_MAX_NAME = 15  # characters of an interface's name: IFNAMSIZ of <linux/if.h>
_IPV6_MTU = 24  # of <linux/in6.h>; `socket` has neither of the two
_IP_MTU = 14  # of <linux/in.h>


class Medium(IntEnum):
    """The kinds of media that an interface may lead over, the most promising first."""

    WIRED = 0
    WIRELESS = 1
    TUNNEL = 2
    INTERNAL = 3  # such as a bridge of containers: it reaches only programs of this machine
    LOOPBACK = 4


class HostAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address of a host's interface that others may reach.

    Other hosts send such values; one that is not an address of an interface is refused when it is decoded.

    Attributes:
        address: an address of IPv4 or IPv6, without a scope.
        prefix: length of the prefix of its network.
        interface: name of the interface.
        medium: what the interface leads over.
        mtu: largest packet of the interface, in bytes.
    """

    address: Word
    prefix: Small
    interface: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_NAME)]
    medium: Medium
    mtu: Small

    def __post_init__(self) -> None:
        if "%" in self.address or not self.interface.isprintable():
            raise ValueError(f"{self.address!r} of {self.interface!r} is not an address of an interface")
        ipaddress.ip_interface((self.address, self.prefix))

    @property
    def is_link_local(self) -> bool:
        """Whether the address is valid on one network link alone, which no router leaves."""
        return ipaddress.ip_address(self.address).is_link_local

    @property
    def bind_address(self) -> str:
        """The address in the form in which a socket of its host is bound to it, with any scope it needs."""
        return self.scoped(self.address)

    def scoped(self, address: str) -> str:
        """Return `address`, with the name of this address's interface behind it if it needs such a scope.

        It needs a scope if it is an address of IPv6 and this address is link-local.
        """
        return f"{address}%{self.interface}" if ":" in address and self.is_link_local else address


class AddressPair(msgspec.Struct, frozen=True, kw_only=True):
    """An address of this host and one of another, between which a connection may be made."""

    own: HostAddress
    other: HostAddress

    @property
    def bind_address(self) -> str:
        """The address of this host, as a socket is bound to it."""
        return self.own.bind_address

    @property
    def flipped(self) -> AddressPair:
        """The pair as the other host sees it."""
        return AddressPair(own=self.other, other=self.own)

    @property
    def dial_address(self) -> str:
        """The address of the other host, as this one dials it.

        A link-local address of IPv6 is valid on one network link only, so this host's interface is named too.
        """
        return self.own.scoped(self.other.address)

    def __str__(self) -> str:
        return f"{self.own.interface} ({self.own.address}) to {self.other.interface} ({self.other.address})"


def usable_addresses(read: Callable[[], Sequence[Interface]] = read_interfaces) -> list[HostAddress]:
    """Return the addresses of this host that others may reach, the most promising first.

    They are those of interfaces that are switched on and have a carrier. The order is: by medium; link-local
    addresses after the others; then as the kernel lists them.
    """
    addresses = [one for one in _addresses(read()) if one.medium != Medium.LOOPBACK]
    return sorted(addresses, key=lambda one: (one.medium, one.is_link_local))


def address_named(address: str, read: Callable[[], Sequence[Interface]] = read_interfaces) -> HostAddress:
    """Return the address of this host that its user has typed, with its interface.

    Any address of the loopback network counts as one of this host.

    Raises:
        UsageError: no interface of this host has the address.
    """
    known = _addresses(read())
    for one in known:
        if one.address == address or (one.medium == Medium.LOOPBACK and _is_in_network(address, one)):
            return msgspec.structs.replace(one, address=address)
    has = (
        ", ".join(one.address for one in known if one.medium != Medium.LOOPBACK) or "only loopback addresses"
    )
    raise UsageError(f"no interface of this host has the address {address}.", remedy=f"It has {has}.")


def addresses_beside(
    address: str, read: Callable[[], Sequence[Interface]] = read_interfaces
) -> list[HostAddress]:
    """Return the addresses of this host that other hosts may use, given one under which they know it.

    For a loopback address it is only that one: the other hosts then are on the same machine, and no other
    address needs to be opened for them.

    Args:
        address: address of a socket of this host; a scope is removed, and an IPv4 address in the form of IPv6
            becomes a plain one.

    Raises:
        UsageError: no interface has it.
    """
    known = address_named(plain_address(address), read)
    return [known] if known.medium == Medium.LOOPBACK else usable_addresses(read)


def own_address(text: str, read: Callable[[], Sequence[Interface]] = read_interfaces) -> str:
    """Return the address of this host that its user has typed, as an address or as a name of the host.

    Raises:
        UsageError: no interface has such an address.
    """
    try:
        found = socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return address_named(text, read).address
    addresses = [plain_address(str(address[0])) for *_, address in found]
    for address in addresses:
        with suppress(UsageError):
            return address_named(address, read).address
    return address_named(addresses[0], read).address


def plain_address(address: str) -> str:
    """Return a socket's address without its scope, and an IPv4 address in the form of IPv6 as a plain one."""
    return unmapped(address).partition("%")[0]


def unmapped(address: str) -> str:
    """Return a socket's address, and an IPv4 address in the form of IPv6 as a plain one."""
    mapped = ipaddress.IPv6Address(address).ipv4_mapped if ":" in address else None
    return address if mapped is None else str(mapped)


def pair_addresses(own: Sequence[HostAddress], other: Sequence[HostAddress]) -> list[AddressPair]:
    """Return the pairs of addresses between which a connection may be tried, the most promising first.

    Both addresses are of one version of IP, and both are link-local or neither is. An address that both hosts
    have belongs to a bridge within each host, such as those of container programs. It leads nowhere, and is
    left out.
    """
    common = {one.address for one in own} & {one.address for one in other}
    pairs = [
        AddressPair(own=here, other=there)
        for here, there in product(own, other)
        if _may_connect(here, there)
        and (here.medium == Medium.LOOPBACK or not {here.address, there.address} & common)
    ]
    return sorted(pairs, key=_promise)


def without_detours(pairs: Iterable[AddressPair]) -> list[AddressPair]:
    """Leave out pairs whose packets would take other interfaces than those of the pair.

    The kernel chooses the interface by the destination of a packet, whatever address the socket is bound to.
    A packet from an address of `eth0` to one in the network of `eth1` leaves by `eth1`, and the path would be
    measured under the wrong name.
    All link-local addresses look as if they were in one network. They count only for interfaces that have no
    other address in a network with the other host.
    """
    pairs = list(pairs)
    own, other = {pair.own for pair in pairs}, {pair.other for pair in pairs}
    near = [pair for pair in pairs if _is_in_network(pair.other.address, pair.own)]
    joined = [pair for pair in near if not pair.own.is_link_local]
    own_joined, other_joined = (
        {pair.own.interface for pair in joined},
        {pair.other.interface for pair in joined},
    )

    def is_detour(pair: AddressPair) -> bool:
        if pair.own.is_link_local:
            return pair.own.interface in own_joined or pair.other.interface in other_joined
        return pair not in near and (
            any(_is_in_network(pair.other.address, one) for one in own)
            or any(_is_in_network(pair.own.address, one) for one in other)
        )

    return [pair for pair in pairs if not is_detour(pair)]


def wires_of(pairs: Iterable[AddressPair]) -> list[list[AddressPair]]:
    """Group pairs by their two interfaces; of each group the first pair that connects is to be measured."""
    groups: dict[tuple[str, str], list[AddressPair]] = {}
    for pair in pairs:
        groups.setdefault((pair.own.interface, pair.other.interface), []).append(pair)
    return list(groups.values())


def path_mtu(connection: socket.socket) -> int:
    """Return the largest packet that the kernel sends on a connected socket; 0 if it is not known.

    It is the smaller of the interface's limit and what routers on the way have reported.
    """
    if sys.platform != "linux" or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    if connection.family == socket.AF_INET6:
        return connection.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
    return connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)


def _addresses(interfaces: Sequence[Interface]) -> list[HostAddress]:
    return [
        HostAddress(
            address=one.address,
            prefix=one.prefix,
            interface=interface.name,
            medium=_medium(interface, interfaces),
            mtu=interface.mtu,
        )
        for interface in interfaces
        if interface.is_up
        for one in interface.addresses
    ]


def _medium(interface: Interface, interfaces: Sequence[Interface]) -> Medium:
    """Return what an interface leads over; a bridge leads where its ports of hardware do."""
    if interface.is_loopback:
        return Medium.LOOPBACK
    if interface.kind == "bridge":
        ports = [port for port in interfaces if port.master == interface.index and not port.kind]
        return min((_medium(port, interfaces) for port in ports), default=Medium.INTERNAL)
    if interface.kind == "dummy":
        return Medium.INTERNAL
    if interface.kind in _TUNNELS:
        return Medium.TUNNEL
    return Medium.WIRELESS if interface.is_wireless else Medium.WIRED


def _is_in_network(address: str, one: HostAddress) -> bool:
    """Return whether an address is in the network of the address `one`."""
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_interface((one.address, one.prefix)).network
    except ValueError:  # it is not an address
        return False


def _may_connect(here: HostAddress, there: HostAddress) -> bool:
    return (
        (":" in here.address) == (":" in there.address)
        and here.is_link_local == there.is_link_local
        and (here.medium == Medium.LOOPBACK) == (there.medium == Medium.LOOPBACK)
    )


def _promise(pair: AddressPair) -> tuple[int, int, bool, bool, bool]:
    """Return the key by which pairs are sorted, the most promising first.

    The worse medium of the two ends counts first, then the better one, then how directly they are joined.
    """
    media = (pair.own.medium, pair.other.medium)
    is_far = not _is_in_network(pair.other.address, pair.own)
    return (max(media), min(media), pair.own.is_link_local, is_far, ":" in pair.own.address)
