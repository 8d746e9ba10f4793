"""A client that takes nothing of a large answer for a while, and what a server had left for it at its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from live_server import LiveServer
from penstock.server.api_process import HttpServer

SIX_MB: Mapping[str, Any] = {
    "prompt": ["\0" * 4000] * 2,
    "n": 128,
    "echo": True,
    "max_tokens": 0,
}  # asks for it


@contextmanager
def slow_client(live: LiveServer) -> Iterator[socket.socket]:
    """Yield a connection whose own buffer is small."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        slow.settimeout(20)
        slow.connect(("127.0.0.1", live.port))
        yield slow


def wait_until_written(live: LiveServer) -> None:
    """Return when the answer to the only request is complete."""
    live.wait_for(lambda: "status=200" in live.log.getvalue())


def stop_and_let_drain(live: LiveServer) -> None:
    """Tell the server to end, and return when no request runs and its loop has turned some times since."""
    live.stop()
    live.wait_for(lambda: "draining running=0" in live.log.getvalue())
    for _ in range(20):
        live.call(lambda: None)  # a turn of its loop


def take_all(slow: socket.socket) -> bytes:
    """Return the body of the answer, which the client takes quickly now."""
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    received = b"".join(iter(lambda: slow.recv(1 << 20), b""))
    return received.partition(b"\r\n\r\n")[2]


def noted_at_shutdown(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[[asyncio.Transport], int]
) -> list[list[int]]:
    """Return a list that gets, whenever a server closes its connections, what is measured of each of them."""
    noted: list[list[int]] = []
    shut_down = HttpServer.shutdown

    async def note_and_shut_down(server: HttpServer, sockets: list[socket.socket] | None = None) -> None:
        noted.append([measure(each.transport) for each in server.server_state.connections])
        await shut_down(server, sockets)

    monkeypatch.setattr(HttpServer, "shutdown", note_and_shut_down)
    return noted
