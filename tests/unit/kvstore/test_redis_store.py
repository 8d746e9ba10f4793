"""How long the Redis store waits for a server that is late, on real connections."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock.errors import StoreError
from penstock.kvstore.store import open_store
from store_contract import every_call

redis_store = pytest.importorskip("penstock.kvstore.redis_store", exc_type=ImportError)

NUM_PIECES = 1000
WAIT_S = 30.0  # a bound for hangs, never waited for


class LateServer:
    """Accepts connections, and sends a line without an end, piece by piece.

    Attributes:
        piece: what it sends every 20 ms, and ends the connection after a thousand of them.
    """

    def __init__(self, piece: bytes) -> None:
        self.piece = piece
        self._num_connections = 0
        self._peers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def count_connections(self) -> int:
        """Return how many were made so far, those that were not accepted yet among them."""
        with socket.create_connection(self._listener.getsockname()) as last:
            while self._peers.get(timeout=WAIT_S) != last.getsockname():
                self._num_connections += 1
        return self._num_connections

    def close(self) -> None:
        self._is_closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, peer = self._listener.accept()
                self._peers.put(peer)
                self._threads.append(threading.Thread(target=self._answer, args=(connection,)))
                self._threads[-1].start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            for _ in range(NUM_PIECES):
                if self._is_closed.wait(0.02):
                    return
                connection.sendall(self.piece)


@pytest.fixture(params=[b"", b"+"], ids=["silent", "dripping"])
def server(request: pytest.FixtureRequest) -> Iterator[LateServer]:
    server = LateServer(request.param)
    yield server
    server.close()


def test_r9_a_late_answer_ends_each_call_once_its_time_is_over(
    server: LateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_SECONDS", 0.2)
    store = open_store(server.url)
    for number, call in enumerate(every_call(store), start=1):
        with pytest.raises(StoreError, match="TimeoutError"):
            call()
        assert server.count_connections() == number, "a server that is late is not asked twice"
    store.close()
