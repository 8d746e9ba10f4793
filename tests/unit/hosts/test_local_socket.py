"""Sockets without a name: nothing is left in the file system, and both ends still meet."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.hosts.local_socket import LocalSocket


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSocket]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = LocalSocket()
    yield made
    made.close()


def connect(address: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(address.removeprefix("ipc://"))
    return client


def test_r7_no_name_is_left_in_the_file_system(endpoint: LocalSocket, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []


def test_a_long_temporary_directory_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 150)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    made = LocalSocket()
    connect(made.connect_address).close()
    made.close()
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize("outside", [False, True])
def test_a_client_connects_through_the_handle(endpoint: LocalSocket, outside: bool) -> None:
    address = endpoint.connect_address_from_outside() if outside else endpoint.connect_address
    listener = socket.socket(fileno=os.dup(endpoint.listen_fd))
    with listener, connect(address) as client:
        server, _ = listener.accept()
        with server:
            client.sendall(b"x")
            assert server.recv(1) == b"x"


def test_without_a_listener_connecting_is_refused_and_does_not_hang(endpoint: LocalSocket) -> None:
    endpoint.close_listener()
    client = socket.socket(socket.AF_UNIX)
    with client, pytest.raises(ConnectionRefusedError):
        client.connect(endpoint.connect_address.removeprefix("ipc://"))


def test_closing_twice_is_harmless_and_frees_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = LocalSocket()
    made.close()
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before
