"""Reads the network interfaces of this machine, with their addresses, from the kernel (rtnetlink).

Python's standard library does not offer all of it: addresses of IPv4 and IPv6, their state, and the kind of
an interface. Only `read_interfaces` asks the kernel; pure functions read the answers. The numbers are those
of <linux/rtnetlink.h>, <linux/if_link.h> and <linux/if_addr.h>; man 7 rtnetlink describes the messages.
`interfaces` decides which of the addresses are of use.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, type of hardware, index, flags, changed flags
_ADDRESS = struct.Struct("=BBBBI")  # family, length of the prefix, flags, scope, index
_ATTRIBUTE = struct.Struct("=HH")  # length, type

_DONE, _ERROR = 3, 2
_NEW_LINK, _GET_LINK, _NEW_ADDRESS, _GET_ADDRESS = 16, 18, 20, 22
_REQUEST_DUMP = 0x001 | 0x300
_IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 4, 10, 18, 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_IFF_UP, _IFF_LOOPBACK, _IFF_LOWER_UP = 0x1, 0x8, 0x10000
_UNUSABLE = 0x08 | 0x20 | 0x40  # an address that is a duplicate, deprecated or not checked yet
_NESTED = 0x3FFF  # mask that removes the flags of an attribute's type
_TIMEOUT_S = 5.0

Attributes = dict[int, bytes]


class InterfaceAddress(msgspec.Struct, frozen=True):
    """An address of an interface; `prefix` is the length of its network's prefix."""

    address: str
    prefix: int


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface of this machine.

    Attributes:
        index: the kernel's number for the interface.
        kind: the kernel's name for its kind, such as "bridge", "veth" or "tun"; empty for hardware.
        mtu: largest packet, in bytes.
        is_up: it is switched on and has a carrier (signal).
        master: number of the bridge or bond that it is a part of; 0: it is not a part of one.
        addresses: its addresses that can be used, in the kernel's order.
    """

    name: str
    index: int
    kind: str = ""
    mtu: int = 1500
    is_up: bool = True
    is_loopback: bool = False
    is_wireless: bool = False
    master: int = 0
    addresses: tuple[InterfaceAddress, ...] = ()


def read_interfaces() -> list[Interface]:
    """Return all network interfaces of this machine, or of the network namespace that this process is in.

    Raises:
        OSError: the kernel does not answer.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        links = list(_dump(kernel, _GET_LINK))
        addresses = list(_dump(kernel, _GET_ADDRESS))
    return interfaces_of(links, addresses, Path("/sys/class/net"))


def interfaces_of(links: list[bytes], addresses: list[bytes], devices: Path) -> list[Interface]:
    """Return the interfaces that the kernel's answers describe.

    Args:
        links: bodies of the messages about interfaces.
        addresses: bodies of the messages about addresses.
        devices: the folder where the kernel shows interfaces; it knows which are wireless.
    """
    of_index: defaultdict[int, list[InterfaceAddress]] = defaultdict(list)
    for body in addresses:
        _, prefix, flags, _, index = _ADDRESS.unpack_from(body)
        attributes = _attributes(body[_ADDRESS.size :])
        packed = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS, b""))
        if _IFA_FLAGS in attributes:
            flags = int.from_bytes(attributes[_IFA_FLAGS], _byte_order())
        if text := _text(packed) if not flags & _UNUSABLE else "":
            of_index[index].append(InterfaceAddress(text, prefix))
    return [_interface(body, of_index, devices) for body in links]


def _interface(body: bytes, addresses: dict[int, list[InterfaceAddress]], devices: Path) -> Interface:
    _, _, index, flags, _ = _LINK.unpack_from(body)
    attributes = _attributes(body[_LINK.size :])
    name = attributes[_IFLA_IFNAME].rstrip(b"\0").decode()
    kind = _attributes(attributes.get(_IFLA_LINKINFO, b"")).get(_IFLA_INFO_KIND, b"")
    return Interface(
        name=name,
        index=index,
        kind=kind.rstrip(b"\0").decode(),
        mtu=int.from_bytes(attributes.get(_IFLA_MTU, b""), _byte_order()),
        is_up=bool(flags & _IFF_UP) and bool(flags & _IFF_LOWER_UP),
        is_loopback=bool(flags & _IFF_LOOPBACK),
        is_wireless=_is_wireless(devices / name, index),
        master=int.from_bytes(attributes.get(_IFLA_MASTER, b""), _byte_order()),
        addresses=tuple(addresses.get(index, ())),
    )


def _is_wireless(device: Path, index: int) -> bool:
    """Return whether the kernel's folder of an interface has a radio.

    The folder may show another network namespace, in which the name may belong to another interface.
    Therefore the number is compared too.
    """
    try:
        is_same = int((device / "ifindex").read_text(encoding="ascii")) == index
    except (OSError, ValueError):
        return False
    return is_same and ((device / "phy80211").exists() or (device / "wireless").exists())


def _dump(kernel: socket.socket, request: int) -> Iterator[bytes]:
    """Ask for all links or addresses, and yield the body of each message."""
    body = bytes(_LINK.size)
    kernel.send(_HEADER.pack(_HEADER.size + len(body), request, _REQUEST_DUMP, 0, 0) + body)
    while True:
        for kind, message in messages_of(kernel.recv(1 << 18)):
            if kind == _DONE:
                return
            if kind == _ERROR:
                raise OSError(
                    -int.from_bytes(message[:4], _byte_order(), signed=True), "no answer from rtnetlink"
                )
            if kind in (_NEW_LINK, _NEW_ADDRESS):
                yield message


def messages_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and body of each rtnetlink message of a datagram, up to one that is cut short."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, offset)
        if not _HEADER.size <= length <= len(data) - offset:
            return
        yield kind, data[offset + _HEADER.size : offset + length]
        offset += _padded(length)


def _attributes(data: bytes) -> Attributes:
    """Return the values of a list of attributes, by type."""
    attributes, offset = {}, 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind & _NESTED] = data[offset + _ATTRIBUTE.size : offset + length]
        offset += _padded(length)
    return attributes


def _text(packed: bytes) -> str:
    """Return an address as text; empty for what is not an IP address."""
    families = {4: socket.AF_INET, 16: socket.AF_INET6}
    return socket.inet_ntop(families[len(packed)], packed) if len(packed) in families else ""


def _padded(length: int) -> int:
    return (length + 3) & ~3


def _byte_order() -> Literal["little", "big"]:
    return sys.byteorder
