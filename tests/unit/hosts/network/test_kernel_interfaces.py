"""What the kernel's messages about interfaces mean, and that this machine's kernel sends such."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from penstock.hosts.network.kernel_interfaces import (
    Interface,
    InterfaceAddress,
    interfaces_of,
    messages_of,
    read_interfaces,
)

NOWHERE = Path("/nonexistent")
UP, LOOPBACK, LOWER_UP = 0x1, 0x8, 0x10000
TENTATIVE, DEPRECATED, PERMANENT = 0x40, 0x20, 0x80


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def link(index: int, name: str, *attributes: bytes, flags: int = UP | LOWER_UP) -> bytes:
    return (
        struct.pack("=BxHiII", 0, 1, index, flags, 0)
        + attribute(3, name.encode() + b"\0")
        + b"".join(attributes)
    )


def address(index: int, prefix: int, *attributes: bytes, flags: int = PERMANENT) -> bytes:
    return struct.pack("=BBBBI", 0, prefix, flags, 0, index) + b"".join(attributes)


def packed(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)


def test_an_interface_is_read_with_its_addresses() -> None:
    links = [
        link(2, "eth0", attribute(4, struct.pack("=I", 9000)), attribute(10, struct.pack("=I", 5))),
        link(5, "br0", attribute(18 | 0x8000, attribute(1, b"bridge\0"))),
    ]
    addresses = [
        address(5, 24, attribute(1, packed("10.0.0.2")), attribute(2, packed("10.0.0.2"))),
        address(5, 64, attribute(1, packed("fd00::2"))),
    ]
    assert interfaces_of(links, addresses, NOWHERE) == [
        Interface(name="eth0", index=2, mtu=9000, master=5),
        Interface(
            name="br0",
            index=5,
            kind="bridge",
            mtu=0,
            addresses=(InterfaceAddress("10.0.0.2", 24), InterfaceAddress("fd00::2", 64)),
        ),
    ]


def test_the_address_of_a_tunnel_is_its_own_and_not_that_of_the_other_end() -> None:
    found = interfaces_of(
        [link(7, "tun0")],
        [address(7, 32, attribute(1, packed("10.9.0.1")), attribute(2, packed("10.9.0.2")))],
        NOWHERE,
    )
    assert found[0].addresses == (InterfaceAddress("10.9.0.2", 32),)


def test_an_address_that_cannot_be_used_yet_or_any_more_is_left_out() -> None:
    addresses = [
        address(2, 64, attribute(1, packed("fd00::1")), attribute(8, struct.pack("=I", flags)))
        for flags in (TENTATIVE, DEPRECATED)
    ]
    assert interfaces_of([link(2, "eth0")], addresses, NOWHERE)[0].addresses == ()


def test_an_interface_without_a_carrier_is_not_up() -> None:
    links = [
        link(2, "a", flags=UP),
        link(3, "b", flags=LOWER_UP),
        link(4, "lo", flags=UP | LOWER_UP | LOOPBACK),
    ]
    assert [one.is_up for one in interfaces_of(links, [], NOWHERE)] == [False, False, True]
    assert [one.is_loopback for one in interfaces_of(links, [], NOWHERE)] == [False, False, True]


def test_wireless_is_what_has_a_radio_in_this_very_namespace(tmp_path: Path) -> None:
    for name, index in (("wlan0", 2), ("wlan1", 9)):
        (tmp_path / name / "phy80211").mkdir(parents=True)
        (tmp_path / name / "ifindex").write_text(f"{index}\n", encoding="ascii")
    found = interfaces_of([link(2, "wlan0"), link(3, "wlan1"), link(4, "eth0")], [], tmp_path)
    assert [one.is_wireless for one in found] == [True, False, False]


def test_messages_end_where_one_is_cut_short() -> None:
    whole = struct.pack("=IHHII", 19, 16, 0, 0, 0) + b"abc" + b"\0"
    assert list(messages_of(whole + whole[:18])) == [(16, b"abc")]
    assert list(messages_of(whole + struct.pack("=IHHII", 3, 16, 0, 0, 0))) == [(16, b"abc")]
    assert list(messages_of(b"")) == []


def test_this_kernel_answers() -> None:
    (loopback,) = [one for one in read_interfaces() if one.is_loopback]
    assert loopback.index == socket.if_nametoindex(loopback.name)
    assert {one.name for one in read_interfaces()} == {name for _, name in socket.if_nameindex()}
