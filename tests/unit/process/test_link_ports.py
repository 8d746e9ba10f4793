"""The range of ports for links: what it may be, and which of it is free."""

from __future__ import annotations

import socket

import pytest

from penstock.errors import PortInUseError, UsageError
from penstock.process.link_ports import DEFAULT_LINK_PORTS, PortRange, listen_in_range


def test_g1_a_range_is_read_and_written() -> None:
    assert PortRange.parse("7701-7732") == DEFAULT_LINK_PORTS == PortRange(7701, 7732)
    assert PortRange.parse(" 9000 ") == PortRange(9000, 9000)
    assert [str(PortRange.parse(text)) for text in ("1-65535", "5-5")] == ["1-65535", "5"]


@pytest.mark.parametrize("text", ["", "x", "0", "0-5", "5-4", "1-65536", "-5", "1-2-3", "1,2", "999999"])
def test_g1_what_is_no_range_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="--link-ports") as caught:
        PortRange.parse(text)
    assert "7701-7732" in caught.value.remedy
    assert caught.value.param == "link_ports"


def free_ports(count: int) -> PortRange:
    """So many ports in a row that were free a moment ago."""
    for first in range(20_000, 30_000, count):
        listeners = []
        try:
            listeners.extend(
                socket.create_server(("127.0.0.1", port)) for port in range(first, first + count)
            )
        except OSError:
            continue
        finally:
            for listener in listeners:
                listener.close()
        return PortRange(first, first + count - 1)
    raise AssertionError("no free ports")


def test_g1_the_first_free_port_is_taken_until_none_is_left() -> None:
    ports = free_ports(2)
    listeners = [listen_in_range("127.0.0.1", ports) for _ in range(2)]
    assert [listener.getsockname()[1] for listener in listeners] == [ports.first, ports.last]
    with pytest.raises(PortInUseError, match=f"all ports {ports} at 127.0.0.1") as caught:
        listen_in_range("127.0.0.1", ports)
    assert "--link-ports" in caught.value.remedy
    listeners[0].close()
    with listen_in_range("127.0.0.1", ports) as again:
        assert again.getsockname()[1] == ports.first
    listeners[1].close()


def test_g1_an_address_of_another_machine_is_refused() -> None:
    for host in ("192.0.2.1", "no such name.invalid"):
        with pytest.raises(UsageError, match="cannot listen for links at") as caught:
            listen_in_range(host, PortRange(0, 0))
        assert "ip addr" in caught.value.remedy
