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
from live_server import LiveServer, events, post_bytes
from penstock.config.limits import ConnectionLimits
from penstock.config.server import ServerConfig
from penstock.errors import UnavailableError
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
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
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
def test_slow_senders_are_told_and_closed(hasty: LiveServer, start: bytes) -> None:
    """Issue 25, point 17. But for one that has sent nothing at all."""
    assert _exchange(hasty, start).partition(b"\r\n")[0] == (
        b"HTTP/1.1 408 Request Timeout" if start else b""
    )
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
        assert _read_to_end(connection).startswith(b"HTTP/1.1 408 ")
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


def _half_closed(live: LiveServer, data: bytes) -> bytes:
    """Send, close the sending side, and read until the server closes."""
    with live.connect() as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return _read_to_end(connection)


def _read_until(connection: socket.socket, expected: bytes) -> bytes:
    received = b""
    while expected not in received:
        chunk = connection.recv(65536)
        assert chunk, "the connection has ended"
        received += chunk
    return received


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_side_gets_its_answer(stream: bool) -> None:
    """Issue 25, point 17. It has said all it wants to say; the engine still works on the answer when its end
    comes."""
    engine = FakeEngine(hold_after=1)
    with LiveServer(engine) as live, live.connect() as connection:
        connection.sendall(post_bytes(TEXT, {"prompt": "abc", "stream": stream}))
        live.wait_for(lambda: len(engine.alive) == 1)
        seen = _read_until(connection, b'"text":"a"') if stream else b""
        connection.shutdown(socket.SHUT_WR)
        seen += _read_until(connection, b": ping" if stream else INTERIM)
        assert len(engine.alive) == 1
        live.call(engine.released.set)
        seen += _read_to_end(connection)
        assert seen.removeprefix(INTERIM).startswith(b"HTTP/1.1 200")
        assert (b"[DONE]" if stream else b'"text":"abc"') in seen
        assert engine.cancelled == []
        assert "status=200" in live.log.getvalue()
        assert "ERROR" not in live.log.getvalue()


def test_requests_that_come_with_the_end_of_the_sending_side_are_answered(live: LiveServer) -> None:
    """Issue 25, point 17."""
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for data, count in (
        (health, 1),
        (health * 3, 3),
        (health + b"GET /he", 1),
        (post_bytes("/tokenize", {"prompt": "x" * 60_000}) * 3, 3),
        (post_bytes(TEXT, {"prompt": "x" * 3000}), 1),
        (post_bytes("/tokenize", {"prompt": "x" * 60_000}), 1),
    ):
        assert _half_closed(live, data).count(b"HTTP/1.1 200") == count, data[:20]
    assert _half_closed(live, post_bytes(TEXT, {"prompt": "abc"})[:-1]) == b""
    assert "ERROR" not in live.log.getvalue()


@pytest.mark.parametrize("head", [b"", b"Connection: keep-alive\r\n", b"Host: localhost\r\n"])
def test_a_stream_for_a_client_of_http_1_0_has_no_chunks(live: LiveServer, head: bytes) -> None:
    """Issue 25, point 17. They came with HTTP/1.1: there the sizes of chunks would be read as text. The end
    of the connection is the end of the stream."""
    data = post_bytes(TEXT, {"prompt": "abc", "stream": True})
    data = data.replace(b" HTTP/1.1\r\nHost: localhost\r\n", b" HTTP/1.0\r\n" + head)
    answered, _, body = _exchange(live, data).partition(b"\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in answered
    assert b"content-length" not in answered
    assert b"connection: close" in answered
    got = events(body)
    assert "".join(chunk["choices"][0]["text"] for chunk in got[:-1]) == "abc"
    assert got[-1] == "[DONE]"


def test_a_client_of_http_1_0_gets_no_interim_answer(live: LiveServer) -> None:
    """RFC 9110, section 10.1.1. It would take it for the answer."""
    data = post_bytes(TEXT, {"prompt": "abc"}, "Expect: 100-continue\r\n")
    assert _exchange(live, data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")).startswith(INTERIM)
    assert _exchange(live, data.replace(b"HTTP/1.1", b"HTTP/1.0")).startswith(b"HTTP/1.1 200")


def test_a_whole_answer_for_a_client_of_http_1_0_has_its_length(live: LiveServer) -> None:
    """Issue 25, point 17."""
    data = post_bytes(TEXT, {"prompt": "abc"}).replace(b"HTTP/1.1", b"HTTP/1.0")
    answered, _, body = _exchange(live, data).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in answered
    assert json.loads(body)["choices"][0]["text"] == "abc"


def test_a_failure_in_a_stream_of_http_1_0_is_its_last_event() -> None:
    """Issue 25, point 17."""
    failure = UnavailableError("stage 1 is gone.", stage=1)
    with LiveServer(FakeEngine(fail_after=1, failure=failure)) as live:
        data = post_bytes(TEXT, {"prompt": "abc", "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
        got = events(_exchange(live, data).partition(b"\r\n\r\n")[2])
        assert got[-1]["error"]["code"] == "unavailable"
        assert "ERROR" not in live.log.getvalue()


def test_a_length_with_many_zeros_before_it_is_a_length() -> None:
    """RFC 9110, section 8.6: it has any number of digits. Python reads no number of more than 4,300."""
    config = ServerConfig(admin_keys=["admin"], drain_s=5.0)
    zeros = b"Content-Length: " + b"0" * 5000
    with LiveServer(config=config) as live:
        for data, status in (
            (post_bytes(TEXT, {"prompt": "a"}, "Connection: close\r\n"), b"200"),
            (post_bytes("/resume", "", "Connection: close\r\nAuthorization: Bearer admin\r\n"), b"200"),
        ):
            assert _exchange(live, data.replace(b"Content-Length: ", zeros))[9:12] == status
        assert "ERROR" not in live.log.getvalue()


OFFERS = (
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
    "Connection: Upgrade\r\nUpgrade: websocket\r\n",
)


def _chunked(path: str, body: object, extra: str) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n{extra}\r\n"
    pieces = b"".join(
        b"%x\r\n%b\r\n" % (len(raw[at : at + 9]), raw[at : at + 9]) for at in range(0, len(raw), 9)
    )
    return head.encode() + pieces + b"0\r\nX-Trailer: 1\r\n\r\n"


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("size", [1, 40, 10_000])
def test_a_request_that_offers_another_protocol_keeps_its_body(
    live: LiveServer, offer: str, size: int
) -> None:
    """Java's own client offers HTTP/2 so. However the bytes come, and whatever stands behind the body."""
    get = f"GET /version HTTP/1.1\r\nHost: localhost\r\n{offer}\r\n".encode()
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    data = (
        post_bytes(TEXT, {"prompt": "one"}, offer)
        + _chunked(TEXT, {"prompt": "two"}, offer)
        + get
        + post_bytes(TEXT, {"prompt": "three"}, offer)
        + post_bytes("/health", {}, offer).replace(b"Content-Length: 2", b"Content-Length: 0")[:-2]
        + last
    )
    with live.connect() as connection:
        for at in range(0, len(data), size):
            connection.sendall(data[at : at + size])
        answers = _read_to_end(connection)
    statuses = [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"200", b"200", b"405", b"200"]
    texts = [part.partition(b'"')[0] for part in answers.split(b'"text":"')[1:]]
    assert texts == [b"one", b"two", b"three"]


def test_what_stands_in_a_body_behind_an_offer_is_no_request(live: LiveServer) -> None:
    inner = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16\r\n\r\n"
        + b'{"prompt":"in"} '
    )
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\n{OFFERS[0]}Connection: close\r\n"
    before = len(live.engine.added)
    with live.connect() as connection:
        connection.sendall(f"{head}Content-Length: {len(inner)}\r\n\r\n".encode())
        live.wait_for(lambda: any(each.cycle is not None for each in live.server.server_state.connections))
        connection.sendall(inner)
        answer = _read_to_end(connection)
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 400 ") == 1
    assert len(live.engine.added) == before
