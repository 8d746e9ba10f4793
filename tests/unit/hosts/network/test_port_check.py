"""Whether link ports are reached: those that are free listen, and nobody is let in."""

from __future__ import annotations

import socket

import pytest

from penstock.hosts.network.port_check import (
    MOST_PORTS,
    CheckedPorts,
    OpenPorts,
    port_list,
    unreached_ports,
)
from penstock.process.link_ports import PortRange
from real_servers import free_ports


def test_free_ports_are_reached_and_taken_ones_are_not_tried() -> None:
    first = free_ports(1)[0]
    with socket.create_server(("127.0.0.1", first)):
        opened = OpenPorts("127.0.0.1", PortRange(first, first + 2))
    checked = opened.checked
    assert (checked.address, checked.link_ports) == ("127.0.0.1", f"{first}-{first + 2}")
    assert first not in checked.ports
    assert checked.ports
    assert unreached_ports(checked, "127.0.0.1") == {}
    opened.close()
    assert set(unreached_ports(checked, "").values()) == {"connection refused"}


@pytest.mark.parametrize(("size", "count"), [(1, 1), (4, 2), (32, MOST_PORTS), (300, MOST_PORTS)])
def test_some_ports_at_both_ends_of_a_range_are_checked(size: int, count: int) -> None:
    first = free_ports(1)[0]
    opened = OpenPorts("127.0.0.1", PortRange(first, first + size - 1))
    ports = opened.checked.ports
    opened.close()
    assert len(ports) == count
    assert sum(port - first < size / 2 for port in ports) == (count + 1) // 2


def test_of_no_ports_none_are_missed() -> None:
    assert unreached_ports(CheckedPorts(address="127.0.0.1", ports=[], link_ports="7701"), "") == {}


def test_ports_are_written_as_people_do() -> None:
    assert port_list([7703, 7701, 7702, 7709]) == "7701-7703, 7709"
    assert port_list([]) == ""
