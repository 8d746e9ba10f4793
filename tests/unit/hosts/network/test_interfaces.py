"""Which addresses of a host count, and which of two hosts are tried, in which order."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec
import pytest

from penstock.errors import UsageError
from penstock.hosts.network.interfaces import (
    HostAddress,
    Medium,
    address_named,
    addresses_beside,
    own_address,
    pair_addresses,
    path_mtu,
    plain_address,
    unmapped,
    usable_addresses,
    wires_of,
    without_detours,
)
from penstock.hosts.network.kernel_interfaces import Interface, InterfaceAddress

LOOPBACK = Interface(
    name="lo",
    index=1,
    is_loopback=True,
    addresses=(InterfaceAddress("127.0.0.1", 8), InterfaceAddress("::1", 128)),
)


def interface(name: str, *addresses: str, index: int = 2, **fields: object) -> Interface:
    pairs = [text.split("/") for text in addresses]
    own = tuple(InterfaceAddress(text, int(prefix)) for text, prefix in pairs)
    return Interface(name=name, index=index, addresses=own, **fields)


def reader(*interfaces: Interface) -> Callable[[], list[Interface]]:
    return lambda: [LOOPBACK, *interfaces]


def names(*interfaces: Interface) -> list[tuple[str, Medium]]:
    return [(one.address, one.medium) for one in usable_addresses(reader(*interfaces))]


def host(*words: str) -> list[HostAddress]:
    """Read "eth0 10.0.0.1/24", one for each address; names begin as Linux begins them."""
    kinds = {"docker": {"kind": "bridge"}, "wlan": {"is_wireless": True}, "tun": {"kind": "tun"}}
    made = []
    for number, word in enumerate(words):
        name, address = word.split()
        kind = next((fields for start, fields in kinds.items() if name.startswith(start)), {})
        made.append(interface(name, address, index=number + 2, **kind))
    return usable_addresses(reader(*made))


def tried(own: list[HostAddress], other: list[HostAddress]) -> list[tuple[str, str]]:
    return [(pair.bind_address, pair.dial_address) for pair in pair_addresses(own, other)]


def test_cables_come_before_wireless_tunnels_and_bridges() -> None:
    assert names(
        interface("docker0", "172.17.0.1/16", index=6, kind="bridge"),
        interface("tun0", "10.8.0.2/24", index=5, kind="tun"),
        interface("wlan0", "192.168.1.5/24", index=4, is_wireless=True),
        interface("eth0", "192.168.1.4/24", index=3),
        interface("eth1", "10.0.0.9/8", index=7, kind="veth"),
    ) == [
        ("192.168.1.4", Medium.WIRED),
        ("10.0.0.9", Medium.WIRED),
        ("192.168.1.5", Medium.WIRELESS),
        ("10.8.0.2", Medium.TUNNEL),
        ("172.17.0.1", Medium.INTERNAL),
    ]


def test_a_bridge_with_a_port_of_hardware_leads_where_that_does() -> None:
    bridge = interface("br0", "10.0.0.1/24", index=2, kind="bridge")
    container = Interface(name="veth1", index=4, kind="veth", master=2)
    assert names(bridge, container) == [("10.0.0.1", Medium.INTERNAL)]
    assert names(bridge, container, Interface(name="eth0", index=3, master=2)) == [("10.0.0.1", Medium.WIRED)]


def test_what_is_down_and_loopback_are_left_out() -> None:
    assert names(interface("eth0", "10.0.0.1/24", is_up=False)) == []
    assert names() == []


def test_pairs_are_of_one_version_and_the_direct_way_comes_first() -> None:
    own = host("eth0 10.0.0.1/24", "eth1 10.1.0.1/24", "eth2 fd00::1/64")
    assert tried(own, host("eth0 10.1.0.2/24", "eth1 fd00::2/64")) == [
        ("10.1.0.1", "10.1.0.2"),
        ("fd00::1", "fd00::2"),
        ("10.0.0.1", "10.1.0.2"),
    ]


def test_a_pair_is_as_promising_as_its_worse_end() -> None:
    own = host("eth0 10.0.0.1/24", "wlan0 10.0.0.11/24", "docker0 172.17.0.1/16")
    assert tried(own, host("eth0 10.0.0.2/24", "wlan0 10.0.0.12/24"))[:4] == [
        ("10.0.0.1", "10.0.0.2"),
        ("10.0.0.1", "10.0.0.12"),
        ("10.0.0.11", "10.0.0.2"),
        ("10.0.0.11", "10.0.0.12"),
    ]


def test_an_address_that_both_have_is_not_tried() -> None:
    own = host("eth0 10.0.0.1/24", "docker0 172.17.0.1/16")
    assert tried(own, host("eth0 10.0.0.2/24", "docker0 172.17.0.1/16")) == [("10.0.0.1", "10.0.0.2")]


def test_hosts_on_one_machine_may_share_a_loopback_address() -> None:
    loopback = [address_named(address, reader()) for address in ("127.0.0.1", "::1")]
    assert tried(loopback, loopback) == [("127.0.0.1", "127.0.0.1"), ("::1", "::1")]
    assert tried(loopback, host("eth0 10.0.0.1/24")) == []


def test_an_address_of_one_link_is_dialled_through_our_interface() -> None:
    own = host("eth0 fe80::1/64", "eth1 169.254.3.1/16", "eth2 10.0.0.1/24")
    other = host("enp3 fe80::2/64", "enp4 169.254.3.2/16", "enp5 10.0.0.2/24")
    assert tried(own, other) == [
        ("10.0.0.1", "10.0.0.2"),
        ("169.254.3.1", "169.254.3.2"),
        ("fe80::1%eth0", "fe80::2%eth0"),
    ]


def test_pairs_are_grouped_by_the_wire_between_them() -> None:
    own = host("eth0 10.0.0.1/24", "eth0 fd00::1/64", "wlan0 10.0.0.11/24")
    other = host("eth0 10.0.0.2/24", "eth0 fd00::2/64")
    groups = [[pair.dial_address for pair in group] for group in wires_of(pair_addresses(own, other))]
    assert groups == [["10.0.0.2", "fd00::2"], ["10.0.0.2"]]


def test_a_pair_that_no_packet_takes_is_left_out() -> None:
    """From eth0 a packet to the network of eth1 leaves by eth1."""
    own = host("eth0 10.0.0.1/24", "eth1 10.1.0.1/24")
    other = host("eth0 10.0.0.2/24", "eth1 10.1.0.2/24")
    pairs = without_detours(pair_addresses(own, other))
    assert [(pair.own.interface, pair.other.interface) for pair in pairs] == [
        ("eth0", "eth0"),
        ("eth1", "eth1"),
    ]


def test_addresses_of_one_link_are_for_interfaces_that_have_no_others() -> None:
    own = host("eth0 10.0.0.1/24", "eth0 fe80::1/64", "eth1 fe80::2/64")
    other = host("eth0 10.0.0.2/24", "eth0 fe80::3/64", "eth1 fe80::4/64")
    pairs = without_detours(pair_addresses(own, other))
    assert [(pair.bind_address, pair.dial_address) for pair in pairs] == [
        ("10.0.0.1", "10.0.0.2"),
        ("fe80::2%eth1", "fe80::4%eth1"),
    ]


def test_a_way_over_a_router_is_no_detour() -> None:
    own, other = host("eth0 10.0.0.1/24", "wlan0 10.2.0.1/24"), host("eth0 10.1.0.2/24")
    pairs = without_detours(pair_addresses(own, other))
    assert [pair.own.interface for pair in pairs] == ["eth0", "wlan0"]


def test_a_host_that_is_known_by_loopback_is_used_over_loopback_alone() -> None:
    read = reader(interface("eth0", "10.0.0.1/24"), interface("eth1", "fd00::1/64", index=3))
    assert [one.address for one in addresses_beside("127.0.0.3", read)] == ["127.0.0.3"]
    for known in ("10.0.0.1", "::ffff:10.0.0.1", "fd00::1"):
        assert [one.address for one in addresses_beside(known, read)] == ["10.0.0.1", "fd00::1"]


def test_addresses_of_sockets_are_told_as_what_they_stand_for() -> None:
    assert [unmapped(text) for text in ("::ffff:10.0.0.1", "fe80::1%eth0", "10.0.0.1")] == [
        "10.0.0.1",
        "fe80::1%eth0",
        "10.0.0.1",
    ]
    assert plain_address("fe80::1%eth0") == "fe80::1"


def test_a_user_may_name_this_host_instead_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    read = reader(interface("eth0", "10.0.0.1/24"))
    found = [(socket.AF_INET, 0, 0, "", (one, 0)) for one in ("192.0.2.1", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **options: found)
    assert own_address("tower", read) == "10.0.0.1"
    with pytest.raises(UsageError, match=r"has the address 192\.0\.2\.1"):
        own_address("tower", reader())

    def fail(*given: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(UsageError, match="has the address attic"):
        own_address("attic", read)


def test_an_address_that_the_user_names_is_looked_up() -> None:
    read = reader(interface("eth0", "10.0.0.1/24", mtu=9000))
    assert address_named("10.0.0.1", read).mtu == 9000
    assert address_named("127.0.0.3", read).medium == Medium.LOOPBACK
    with pytest.raises(UsageError, match=r"no interface .* 10\.0\.0\.2\. It has 10\.0\.0\.1\.$"):
        address_named("10.0.0.2", read)
    with pytest.raises(UsageError, match="It has only loopback addresses"):
        address_named("here", reader())


@pytest.mark.parametrize(
    "fields",
    [
        {"address": "fe80::1%eth0"},
        {"address": "example.org"},
        {"prefix": 33},
        {"mtu": -1},
        {"interface": "eth0\x1b[2J"},
        {"interface": "a" * 16},
        {"medium": 9},
    ],
)
def test_an_address_that_another_host_sends_is_checked(fields: dict[str, object]) -> None:
    good = {"address": "10.0.0.1", "prefix": 24, "interface": "eth0", "medium": 0, "mtu": 1500}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=HostAddress).medium == Medium.WIRED
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(good | fields), type=HostAddress)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_path_mtu_of_a_connection_is_that_of_its_way(family: int, address: str) -> None:
    listener = socket.create_server((address, 0), family=family)
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        assert path_mtu(client) >= 16_000  # of the loopback interface
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert path_mtu(ours) == 0
