"""Ways between two hosts are found and measured as they are: interfaces of namespaces, and set rates.

A busy machine only makes a way slower, so speeds are asserted from above; compared ways differ by far.
"""

from __future__ import annotations

import socket
import sys
import threading
from typing import Any

import msgspec
import pytest

from network import CableLink, Host, cable_network, shaped_network
from penstock.errors import PeerError, WaitTimeoutError
from penstock.hosts.network.interfaces import AddressPair, HostAddress, pair_addresses, path_mtu, wires_of
from penstock.hosts.network.link_choice import MeasuredPair, best_pair, idle_warning
from penstock.hosts.network.link_measuring import answer_measuring, measure_stream

pytestmark = pytest.mark.doors

HANG_S = 60.0
LISTING = """
import sys
import msgspec
from penstock.hosts.network.interfaces import usable_addresses
print(msgspec.json.encode(usable_addresses()).decode())
"""


def addresses_of(host: Host[Any]) -> list[HostAddress]:
    """Have a program on the host list its addresses."""
    return msgspec.json.decode(host.run(sys.executable, "-c", LISTING), type=list[HostAddress])


def measured(one: Host[Any], other: Host[Any], pair: AddressPair) -> MeasuredPair:
    """Measure a pair over a connection without TLS."""
    errors: list[PeerError] = []

    def answer() -> None:
        stream, _ = listener.accept()
        with stream:
            try:
                answer_measuring(stream)
            except PeerError as error:  # the measuring host has given up
                errors.append(error)

    with other.socket() as listener, one.socket() as client:
        for end in (listener, client):  # what is accepted has it, too
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.settimeout(HANG_S)
        listener.bind((pair.dial_address, 0))
        listener.listen()
        client.bind((pair.bind_address, 0))
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            client.connect(listener.getsockname())
            speed, mtu = measure_stream(client), path_mtu(client)
        finally:
            client.close()
            thread.join()
    assert errors == []
    return MeasuredPair(pair=pair, speed=speed, mtu=mtu)


def test_a_host_lists_its_own_interfaces_and_none_that_is_unplugged() -> None:
    with cable_network(num_links=2, mtu=1400) as network:
        host = network.hosts[1]
        assert [(one.address, one.interface, one.mtu) for one in addresses_of(host)] == [
            ("10.77.0.2", "eth0", 1400),
            ("fd00:77::2", "eth0", 1400),
            ("10.77.1.2", "eth1", 1400),
            ("fd00:77:1::2", "eth1", 1400),
        ]
        host.links[0].pull()
        assert {one.interface for one in addresses_of(host)} == {"eth1"}


def set_rates(host: Host[CableLink], *rates: int) -> None:
    for link, rate in zip(host.links, rates, strict=True):
        link.set_rate(rate)


def test_the_faster_of_two_networks_is_chosen_and_is_not_left_idle_in_silence() -> None:
    with cable_network(num_links=2) as network:
        one, other = network.hosts
        set_rates(one, 5_000_000, 100_000_000)
        pairs = [group[0] for group in wires_of(pair_addresses(addresses_of(one), addresses_of(other)))]
        direct = [pair for pair in pairs if pair.own.interface == pair.other.interface]
        assert [pair.own.interface for pair in direct] == ["eth0", "eth1"]
        slow, fast = (measured(one, other, pair) for pair in direct)
    assert slow.speed.bytes_per_s * 8 < 6_500_000
    assert fast.speed.bytes_per_s * 8 < 130_000_000
    assert best_pair([slow, fast]) == fast
    assert "is idle: eth1 (10.77.1.1) to eth1 (10.77.1.2)" in idle_warning(slow, [slow, fast])
    assert (slow.mtu, fast.mtu) == (1500, 1500)


def test_a_delay_is_in_the_round_trip() -> None:
    with shaped_network() as network:
        one, other = network.hosts
        other.link.set_delay(0.02)
        (pair, *_) = pair_addresses(addresses_of(one), addresses_of(other))
        assert measured(one, other, pair).speed.round_trip_s >= 0.04


def test_a_way_that_carries_next_to_nothing_is_given_up() -> None:
    with shaped_network() as network:
        one, other = network.hosts
        (pair, *_) = pair_addresses(addresses_of(one), addresses_of(other))
        other.link.set_delay(0.8)
        with pytest.raises(WaitTimeoutError):
            measured(one, other, pair)
