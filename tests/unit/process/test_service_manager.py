"""What a service manager is told: datagrams to the socket that it names, and never a wait for it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.process.service_manager import (
    MAX_STATUS,
    VARIABLE,
    NoNotifier,
    SocketNotifier,
    service_notifier,
)


@pytest.fixture(params=["path", "abstract"])
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """As a manager gives it."""
    return f"@penstock-{secrets.token_hex(8)}" if request.param == "abstract" else str(tmp_path / "notify")


@pytest.fixture
def manager(name: str) -> Iterator[socket.socket]:
    """The end of the manager."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as receiver:
        receiver.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        receiver.settimeout(5.0)
        yield receiver


def test_a_manager_hears_the_three_states(name: str, manager: socket.socket) -> None:
    service = service_notifier({VARIABLE: name})
    service.ready()
    service.status("desk has joined\nand so on")
    service.stopping()
    assert [manager.recv(4096) for _ in range(3)] == [b"READY=1", b"STATUS=desk has joined", b"STOPPING=1"]


def test_a_status_has_a_bound_and_any_text(name: str, manager: socket.socket) -> None:
    service_notifier({VARIABLE: name}).status("x" * 10_000)
    assert len(manager.recv(4096)) == len("STATUS=") + MAX_STATUS
    service_notifier({VARIABLE: name}).status("\udc80")  # as file names come that are no UTF-8
    assert manager.recv(4096) == b"STATUS=?"


def test_a_manager_that_reads_nothing_holds_nobody_up(name: str, manager: socket.socket) -> None:
    service = service_notifier({VARIABLE: name})
    for _ in range(5_000):  # far more than its socket takes
        service.status("x")
    assert manager.recv(4096) == b"STATUS=x"


def test_a_manager_that_is_gone_ends_nobody(tmp_path: Path) -> None:
    SocketNotifier(str(tmp_path / "none")).ready()
    SocketNotifier("/" + "x" * 200).ready()  # longer than an address may be


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}, {VARIABLE: "vsock:2:1234"}])
def test_without_a_socket_that_is_known_nothing_is_sent(environment: dict[str, str]) -> None:
    service = service_notifier(environment)
    assert isinstance(service, NoNotifier)
    service.ready()
    service.status("nobody reads it")
    service.stopping()
