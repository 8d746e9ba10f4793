"""The HTTP socket: refused where it must be, with who is in the way."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from penstock.config.server import ServerConfig
from penstock.errors import PortInUseError, UsageError
from penstock.process import listening
from penstock.process.listening import listen, url


def test_a_free_port_is_bound_and_accepts() -> None:
    with listen(ServerConfig(port=0)) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        assert url(listener) == f"http://127.0.0.1:{port}"
        with socket.create_connection((host, port)) as client, listener.accept()[0] as server:
            client.sendall(b"x")
            assert server.recv(1) == b"x"


def test_a_busy_port_names_the_process_that_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError) as raised:
            listen(ServerConfig(port=port))
    name = Path("/proc/self/comm").read_text().strip()
    assert str(raised.value) == f"port {port} is used by pid {os.getpid()} ({name}). Use --port or stop it."
    assert raised.value.exit_code == 5


def test_a_port_whose_owner_is_not_visible_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_owner", lambda port: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} is used by another process"):
            listen(ServerConfig(port=port))


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_an_open_address_needs_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="no API key is set") as raised:
        listen(ServerConfig(host=host, port=0))
    assert raised.value.exit_code == 2
    assert "--insecure" in raised.value.remedy


@pytest.mark.parametrize("more", [{"api_keys": ["k"]}, {"insecure": True}])
def test_an_open_address_with_a_key_or_on_demand(more: dict[str, object]) -> None:
    with listen(ServerConfig(host="0.0.0.0", port=0, **more)) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_blank_key_is_no_key(host: str) -> None:
    with pytest.raises(UsageError, match=r"api_keys\[1\] is empty") as raised:
        listen(ServerConfig(host=host, port=0, api_keys=["k", ""]))
    assert raised.value.param == "api_keys"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2"])
def test_loopback_needs_no_key(host: str) -> None:
    listen(ServerConfig(host=host, port=0)).close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 300])
def test_an_address_that_is_not_ours_is_a_usage_error(host: str) -> None:
    with pytest.raises(UsageError) as raised:
        listen(ServerConfig(host=host, port=0, insecure=True))
    assert raised.value.param == "host"


def test_a_link_local_address_keeps_its_interface() -> None:
    """Without the interface the kernel answers "Invalid argument", whoever has the address."""
    with pytest.raises(UsageError, match="fe80::1%lo port 0: Cannot assign requested address"):
        listen(ServerConfig(host="fe80::1%lo", port=0, insecure=True))


def test_the_url_of_a_link_local_address_names_its_interface() -> None:
    class Listener:
        def getsockname(self) -> tuple[str, int, int, int]:
            return "fe80::1", 8000, 0, socket.if_nametoindex("lo")

    assert url(Listener()) == "http://[fe80::1%lo]:8000"


def test_no_socket_is_left_open_by_a_refusal() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(PortInUseError):
        listen(ServerConfig(port=other.getsockname()[1]))
    assert len(os.listdir("/proc/self/fd")) == before


def test_r12_the_second_server_on_a_port_gets_all_new_connections() -> None:
    first = listening.listen(ServerConfig(port=0, reuse_port=True))
    first.listen()
    port = first.getsockname()[1]
    second = listening.listen(ServerConfig(port=port, reuse_port=True))
    with first, second:
        assert count_accepted(first, port) == 20, "it does not listen before it is ready"
        second.listen()
        listening.take_over(second)
        assert count_accepted(second, port) == 20
        first.close()
        assert count_accepted(second, port) == 20, "alone, it gets them as well"
        third = listening.listen(ServerConfig(port=port, reuse_port=True))
        with third:
            third.listen()
            listening.take_over(third)
            assert count_accepted(third, port) == 20


def count_accepted(listener: socket.socket, port: int) -> int:
    """Of twenty new connections."""
    listener.setblocking(False)
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    accepted = []
    with contextlib.suppress(BlockingIOError):
        while True:
            accepted.append(listener.accept()[0])
    for connection in (*clients, *accepted):
        connection.close()
    return len(accepted)


def test_a_port_that_is_shared_must_be_so_on_both_sides() -> None:
    with listening.listen(ServerConfig(port=0)) as first, pytest.raises(PortInUseError):
        listening.listen(ServerConfig(port=first.getsockname()[1], reuse_port=True))
