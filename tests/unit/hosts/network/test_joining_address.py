"""Workers join at addresses and names, of both versions of IP, and are told what to type."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from penstock.errors import PortInUseError
from penstock.hosts.network.interfaces import HostAddress, Medium
from penstock.hosts.network.joining_address import (
    join_address,
    listen_for_workers,
    loopback_warning,
)
from real_servers import free_ports


def address(text: str) -> HostAddress:
    prefix = 64 if ":" in text else 24
    return HostAddress(address=text, prefix=prefix, interface="eth0", medium=Medium.WIRED, mtu=1500)


@pytest.mark.parametrize(
    ("host", "dialled"),
    [
        ("127.0.0.2", "127.0.0.2"),
        ("::1", "::1"),
        ("localhost", "localhost"),
        ("0.0.0.0", "127.0.0.3"),
        ("::", "127.0.0.3"),
        ("::", "::1"),
    ],
)
def test_g1_workers_reach_the_head_at_what_it_was_given(host: str, dialled: str) -> None:
    (port,) = free_ports(1)
    with listen_for_workers(host, port), socket.create_connection((dialled, port), timeout=30):
        pass


def test_g1_a_name_is_taken_where_other_hosts_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, 0, 0, "", (one, 7700)) for one in ("127.0.1.1", "10.0.0.1", "10.0.0.2")]
    tried: list[str] = []

    def create_server(place: Any, **options: Any) -> None:
        tried.append(place[0])
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **options: found)
    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(PortInUseError, match=r"at tower:7700: cannot assign requested address\.") as caught:
        listen_for_workers("tower", 7700)
    assert tried == ["10.0.0.1", "10.0.0.2", "127.0.1.1"]
    assert "--listen-workers" in caught.value.remedy


def test_g1_a_name_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **options: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(PortInUseError, match="at attic:7700: name or service not known"):
        listen_for_workers("attic", 7700)


@pytest.mark.parametrize("host", ["a..b", 64 * "a"])
def test_g1_a_name_that_dns_cannot_have_is_refused(host: str) -> None:
    with pytest.raises(PortInUseError, match=f"at {host}:7700: .*(idna|label)") as caught:
        listen_for_workers(host, 7700)
    assert "--listen-workers" in caught.value.remedy


def test_g1_a_name_of_this_host_that_others_do_not_reach_is_warned_of() -> None:
    assert "localhost is " in loopback_warning("localhost", 7700)
    assert loopback_warning("127.0.0.1", 7700) == ""


@pytest.mark.parametrize(
    ("host", "own", "shown"),
    [
        ("10.0.0.1", [], "10.0.0.1:7700"),
        ("fd00::1", [], "[fd00::1]:7700"),
        ("tower.example", [], "tower.example:7700"),
        ("0.0.0.0", ["fe80::1", "10.0.0.5"], "10.0.0.5:7700"),
        ("::", ["fd00::5"], "[fd00::5]:7700"),
        ("::", [], "[::]:7700"),
    ],
)
def test_g1_what_workers_are_to_type(host: str, own: list[str], shown: str) -> None:
    assert join_address(host, 7700, lambda: [address(one) for one in own]) == shown
