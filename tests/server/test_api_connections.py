"""Bounds of connections: sizes, times and numbers, with real sockets."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from fake_engine import FakeEngine
from live_server import LiveServer, post_bytes
from penstock.config.limits import ConnectionLimits
from penstock.server.api_process import allow_connections

TEXT = "/v1/completions"


def _exchange(live: LiveServer, data: bytes) -> bytes:
    """Send and read until the server closes."""
    with live.connect() as connection:
        connection.sendall(data)
        return _read_to_end(connection)


def _read_to_end(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET /" + b"a" * 100_000, 414),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 17_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000, 431),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 65 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    ],
)
def test_oversized_and_malformed_heads_are_refused(live: LiveServer, data: bytes, status: int) -> None:
    answer = _exchange(live, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_heads_just_within_the_bounds_are_served(live: LiveServer) -> None:
    for head in (
        b"GET /health?" + b"a" * 8100 + b" HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 16_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 62,
    ):
        assert _exchange(live, head + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.fixture
def hasty() -> Iterator[LiveServer]:
    """A server whose patience is a fraction of a second."""
    limits = ConnectionLimits(header_timeout_s=0.15, body_timeout_s=0.15, write_timeout_s=0.15)
    with LiveServer(connections=limits) as server:
        yield server


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /health HTT",
        b"GET /health HTTP/1.1\r\nHost: loc",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    ],
)
def test_slow_senders_are_closed(hasty: LiveServer, start: bytes) -> None:
    assert _exchange(hasty, start) == b""
    hasty.wait_for(lambda: not hasty.server.server_state.connections)
    assert hasty.engine.added == []


def test_headers_that_drip_get_no_more_time(hasty: LiveServer) -> None:
    """Every byte of a slow-loris head would restart an idle timer; the head's own time runs on."""
    with hasty.connect() as connection:
        stop = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /health HTTP/1.1\r\n")
                while not stop.wait(0.02):
                    connection.sendall(b"X")

        thread = threading.Thread(target=drip)
        thread.start()
        assert _read_to_end(connection) == b""
        stop.set()
        thread.join()


def test_reader_that_takes_nothing_is_closed_and_its_sequence_cancelled() -> None:
    limits = ConnectionLimits(write_timeout_s=0.2)
    engine = FakeEngine(max_model_len=2_000_000)
    with LiveServer(engine, connections=limits) as live:
        live.call(lambda: setattr(engine, "max_model_len", 2_000_000))
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.connect(("127.0.0.1", live.port))
            body = {"prompt": "abc", "stream": True, "max_tokens": 4000, "ignore_eos": True, "logprobs": 20}
            stuck.sendall(post_bytes(TEXT, body) * 3)
            live.wait_for(lambda: len(engine.cancelled) == 1)
            live.wait_for(lambda: not engine.alive)
        assert live.post(TEXT, {"prompt": "fine"})[1]["choices"][0]["text"] == "fine"


def test_body_after_a_refusal_is_thrown_away_and_the_connection_lives_on(live: LiveServer) -> None:
    with live.connect() as connection:
        big = b"x" * 3_000_000
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (
            TEXT.encode(),
            len(big),
        )
        connection.sendall(head + big)
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 200" in _read_to_end(connection)


def test_pipelined_requests_are_answered_in_order(live: LiveServer) -> None:
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = _exchange(
        live, post_bytes(TEXT, {"prompt": "one"}) + post_bytes(TEXT, {"prompt": "two"}) + last
    )
    assert answers.count(b"HTTP/1.1 200") == 3
    assert answers.index(b'"one"') < answers.index(b'"two"') < answers.index(b'"version"')


def test_connections_beyond_the_limit_get_503_and_running_ones_go_on() -> None:
    engine = FakeEngine(hold_after=1)
    with LiveServer(engine, connections=ConnectionLimits(max_connections=3)) as live:
        with live.connect() as running, live.connect() as second, live.connect() as third:
            running.sendall(post_bytes(TEXT, {"prompt": "abc", "stream": True}))
            live.wait_for(lambda: len(live.server.server_state.connections) == 3)
            answer = _exchange(live, b"")
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in answer
            assert b"too_many_connections" in answer
            live.call(engine.released.set)
            seen = b""
            while b"[DONE]" not in seen:
                seen += running.recv(65536)
            assert [second.fileno() > 0, third.fileno() > 0] == [True, True]
        live.wait_for(lambda: not live.server.server_state.connections)
        assert live.post(TEXT, {"prompt": "again"})[0] == 200


def test_ten_thousand_connections_change_no_other_answer() -> None:
    """4,096 are held, the rest are told 503 at once; a stream that was there before gets all its tokens."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted, limit = (10_000, 4096) if hard == resource.RLIM_INFINITY or hard > 15_000 else (1_000, 400)
    allow_connections(wanted + limit)  # client sockets and server sockets are in this one process
    engine = FakeEngine(hold_after=1)
    crowd: list[socket.socket] = []
    with LiveServer(engine, connections=ConnectionLimits(max_connections=limit, header_timeout_s=60)) as live:
        try:
            running = live.connect()
            running.sendall(post_bytes(TEXT, {"prompt": "steady", "stream": True}))
            live.wait_for(lambda: len(engine.alive) == 1)
            crowd += [live.connect() for _ in range(wanted)]
            live.wait_for(lambda: len(live.server.server_state.connections) == limit)
            refused = sum(connection.recv(12) == b"HTTP/1.1 503" for connection in crowd[limit:])
            assert refused == wanted - limit
            live.call(engine.released.set)
            seen = b""
            while b"[DONE]" not in seen:
                seen += running.recv(65536)
            texts = [part.split(b'"')[0] for part in seen.split(b'"text":"')[1:]]
            assert b"".join(texts) == b"steady"
        finally:
            for connection in (running, *crowd):
                connection.close()
        live.wait_for(lambda: not live.server.server_state.connections)
        assert live.post(TEXT, {"prompt": "after"})[1]["choices"][0]["text"] == "after"
