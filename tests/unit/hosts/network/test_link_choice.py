"""The way between two hosts is chosen by what was measured, and a worse one is spoken of."""

from __future__ import annotations

import pytest

from penstock.hosts.network.interfaces import AddressPair, HostAddress, Medium
from penstock.hosts.network.link_choice import (
    MeasuredPair,
    best_pair,
    degraded_warning,
    fallback_warning,
    idle_warning,
    speed_text,
)
from penstock.hosts.network.link_measuring import StreamSpeed

MBIT = 1e6 / 8


def measured(
    name: str, mbit: float, ms: float = 0.2, medium: Medium = Medium.WIRED, back: float = 1e6
) -> MeasuredPair:
    own = HostAddress(address="10.0.0.1", prefix=24, interface=name, medium=medium, mtu=1500)
    other = HostAddress(address="10.0.0.2", prefix=24, interface="eth9", medium=Medium.WIRED, mtu=1500)
    speed = StreamSpeed(round_trip_s=ms / 1e3, bytes_per_s_out=mbit * MBIT, bytes_per_s_in=back * MBIT)
    return MeasuredPair(pair=AddressPair(own=own, other=other), speed=speed, mtu=1500, measured_at=1.7e9)


def wireless(mbit: float, ms: float = 2.0) -> MeasuredPair:
    return measured("wlan0", mbit, ms, Medium.WIRELESS)


def best_name(*pairs: MeasuredPair) -> str:
    forwards, backwards = best_pair(pairs), best_pair(pairs[::-1])
    assert forwards == backwards
    return forwards.pair.own.interface


def test_the_faster_pair_is_chosen_though_its_round_trip_is_longer() -> None:
    assert best_name(measured("eth0", 1000, ms=0.5), measured("eth1", 100, ms=0.1)) == "eth0"


def test_the_slower_direction_counts() -> None:
    assert best_name(measured("eth0", 1000, back=10), measured("eth1", 100)) == "eth1"


def test_the_round_trip_decides_between_pairs_that_are_equally_fast() -> None:
    assert best_name(measured("eth0", 1000, ms=0.5), measured("eth1", 950, ms=0.1)) == "eth1"


@pytest.mark.parametrize(("mbit", "chosen"), [(100, "eth0"), (1000, "eth0"), (1090, "eth0"), (1200, "wlan0")])
def test_wireless_is_chosen_beside_a_cable_only_if_it_is_faster(mbit: float, chosen: str) -> None:
    assert best_name(measured("eth0", 1000, ms=3.0), wireless(mbit, ms=0.1)) == chosen


def test_a_faster_pair_that_stands_idle_is_named() -> None:
    used, cable = wireless(87), measured("eth0", 940)
    assert idle_warning(used, [used, cable]) == (
        "A faster path to the other host is idle: eth0 (10.0.0.1) to eth9 (10.0.0.2), 940 Mbit/s. "
        "In use: wlan0 (10.0.0.1) to eth9 (10.0.0.2), 87 Mbit/s. "
        "To use the faster path, leave --address out, or give one of its addresses."
    )
    assert idle_warning(cable, [used, cable]) == ""
    assert idle_warning(cable, [measured("eth1", 1100)]) == ""


def test_a_way_that_fell_back_is_named_with_the_reason() -> None:
    said = fallback_warning(measured("eth0", 940), wireless(87), "connection refused.")
    assert "(connection refused): eth0" in said
    assert "In use: wlan0" in said


def test_a_way_that_has_become_slow_is_named() -> None:
    pair = measured("eth0", 940)
    assert degraded_warning(pair, 470 * MBIT) == ""
    assert "carries 94 Mbit/s instead of the measured 940 Mbit/s" in degraded_warning(pair, 94 * MBIT)


def test_speeds_are_told_as_networks_are_sold() -> None:
    assert [speed_text(mbit * MBIT) for mbit in (0.5, 100, 2500)] == [
        "0.5 Mbit/s",
        "100 Mbit/s",
        "2.5 Gbit/s",
    ]
