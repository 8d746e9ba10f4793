"""HTTPS: the same answers, and the same bounds for clients that are slow, many or silent."""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from certificates import Certificate
from fake_engine import FakeEngine
from live_server import LiveServer, events, post_bytes
from penstock.config.limits import ConnectionLimits
from penstock.config.server import ServerConfig
from penstock.server.http import tls_ending
from penstock.server.http.tls_ending import num_queued
from slow_clients import (
    SIX_MB,
    noted_at_shutdown,
    slow_client,
    stop_and_let_drain,
    take_all,
    wait_until_written,
)

NEVER_S = 3600.0
PROMPT = {"prompt": "abcdef", "max_tokens": 4}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("certificate"))


def https(certificate: Certificate, engine: FakeEngine | None = None, **limits: Any) -> LiveServer:
    config = ServerConfig(drain_s=5.0, ssl_certfile=certificate.certfile, ssl_keyfile=certificate.keyfile)
    return LiveServer(
        engine, config=config, connections=ConnectionLimits(**limits), trusted=certificate.trusting()
    )


@pytest.fixture(scope="module")
def live(certificate: Certificate) -> Iterator[LiveServer]:
    with https(certificate) as server:
        yield server


def connections(server: LiveServer) -> int:
    """How many there are, those in their handshake among them."""
    (listener,) = server.server._tls_listeners
    return listener.num_handshakes + len(server.server.server_state.connections)


def secured(server: LiveServer, certificate: Certificate) -> ssl.SSLSocket:
    return certificate.trusting().wrap_socket(server.connect(), server_hostname="127.0.0.1")


def ended(connection: socket.socket) -> bool:
    """Wait for the end; whether it came without a byte of plain text."""
    try:
        while received := connection.recv(65536):
            assert b"HTTP" not in received
    except (ConnectionError, ssl.SSLError):
        return True
    return True


def test_answers_are_those_of_plain_http(live: LiveServer) -> None:
    assert live.url.startswith("https://")
    with LiveServer() as plain:
        for path, body in (("/v1/completions", PROMPT), ("/v1/completions", {"prompt": 5}), ("/nowhere", {})):
            status, answer = live.post(path, body)
            of_plain, plain_answer = plain.post(path, body)
            assert (status, answer.get("error"), answer.get("usage")) == (
                of_plain,
                plain_answer.get("error"),
                plain_answer.get("usage"),
            )


def test_a_stream_and_a_large_body_pass(live: LiveServer) -> None:
    response, raw = live.request("POST", "/v1/completions", PROMPT | {"stream": True})
    assert response.status == 200
    assert "".join(e["choices"][0]["text"] for e in events(raw)[:-1]) == "abcd"
    response, raw = live.request("POST", "/tokenize", {"prompt": "x" * 60_000})
    assert response.status == 200
    assert json.loads(raw)["count"] == 60_001


def test_one_connection_serves_several_requests(live: LiveServer, certificate: Certificate) -> None:
    connection = HTTPSConnection("127.0.0.1", live.port, timeout=20, context=certificate.trusting())
    connection.connect()
    first = connection.sock
    for _ in range(3):
        connection.request("POST", "/v1/completions", json.dumps(PROMPT))
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["choices"][0]["text"]) == (200, "abcd")
        assert connection.sock is first
    assert isinstance(first, ssl.SSLSocket)
    assert first.version() in ("TLSv1.2", "TLSv1.3")
    connection.close()


def test_tokens_are_sent_without_waiting_for_more(live: LiveServer, certificate: Certificate) -> None:
    """TCP_NODELAY, as the event loop sets it for plain connections."""
    with secured(live, certificate):
        live.wait_for(lambda: bool(live.server.server_state.connections))
        (protocol,) = live.server.server_state.connections
        accepted = protocol.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    live: LiveServer, certificate: Certificate
) -> None:
    """In one segment: the handshake is over, and nobody has taken over yet."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = certificate.trusting().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with live.connect() as connection:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        client.write(post_bytes("/v1/completions", PROMPT))
        connection.sendall(outgoing.read())
        while True:
            incoming.write(connection.recv(65536))
            try:
                assert client.read(65536).startswith(b"HTTP/1.1 200 OK\r\n")
                break
            except ssl.SSLWantReadError:
                pass


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_a_handshake_that_is_never_finished_ends(certificate: Certificate, sent: bytes) -> None:
    with https(certificate, header_timeout_s=0.2) as server, server.connect() as connection:
        connection.sendall(sent)
        assert ended(connection)
        server.wait_for(lambda: connections(server) == 0)
        assert "bug" not in server.log.getvalue()


@pytest.mark.parametrize(
    ("sent", "hint"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", True),
        (post_bytes("/v1/completions", PROMPT), True),
        (b"\x00" * 64, False),
    ],
)
def test_what_is_not_tls_ends_without_an_answer(certificate: Certificate, sent: bytes, hint: bool) -> None:
    """Of plain HTTP, a URL that begins with http:// by mistake, the log says so in one line."""
    with https(certificate, header_timeout_s=NEVER_S) as server, server.connect() as connection:
        connection.sendall(sent)
        assert ended(connection)
        server.wait_for(lambda: connections(server) == 0)
        lines = server.log.getvalue().splitlines()
        assert len(lines) == hint
        assert all("WARNING api a client spoke plain HTTP to this HTTPS server" in line for line in lines)
        assert all("https:// client=127.0.0.1" in line for line in lines)


def test_connections_in_their_handshake_count(certificate: Certificate) -> None:
    with https(certificate, header_timeout_s=NEVER_S, max_connections=2) as server:
        with server.connect(), server.connect():
            server.wait_for(lambda: connections(server) == 2)
            with server.connect() as third:
                assert ended(third)
            assert connections(server) == 2
        server.wait_for(lambda: connections(server) == 0)
        assert server.post("/v1/completions", PROMPT)[0] == 200


def test_clients_that_reset_their_handshake_leave_nothing(certificate: Certificate) -> None:
    with https(certificate, header_timeout_s=NEVER_S) as server:
        for _ in range(5):
            with server.connect() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(b"\x16\x03")
        server.wait_for(lambda: connections(server) == 0)
        assert server.post("/v1/completions", PROMPT)[0] == 200


def test_a_head_that_never_ends_ends_the_connection(certificate: Certificate) -> None:
    with https(certificate, header_timeout_s=0.3) as server, secured(server, certificate) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
        connection.close()
        server.wait_for(lambda: connections(server) == 0)


def test_an_idle_connection_ends(certificate: Certificate) -> None:
    with https(certificate, keep_alive_timeout_s=0.2) as server, secured(server, certificate) as connection:
        connection.sendall(post_bytes("/v1/completions", PROMPT))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert ended_after_answer(connection)
        server.wait_for(lambda: connections(server) == 0)


def ended_after_answer(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except (ConnectionError, ssl.SSLError):
        return True
    return True


def test_too_long_a_header_is_refused_with_an_answer(live: LiveServer, certificate: Certificate) -> None:
    with secured(live, certificate) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * 20_000 + b"\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")


def test_a_client_that_takes_nothing_is_given_up(certificate: Certificate) -> None:
    """Its stream is cancelled in the engine."""
    limits = {"write_timeout_s": 0.3}
    with https(certificate, FakeEngine(max_model_len=4096), **limits) as server:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(20)
        raw.connect(("127.0.0.1", server.port))
        with certificate.trusting().wrap_socket(raw, server_hostname="127.0.0.1") as connection:
            body = {"prompt": ["a" * 100] * 64, "max_tokens": 3000, "ignore_eos": True, "stream": True}
            connection.sendall(post_bytes("/v1/completions", body))
            server.wait_for(lambda: bool(server.engine.added))
            server.wait_for(lambda: not server.engine.alive)
            server.wait_for(lambda: connections(server) == 0)
        assert server.engine.cancelled


def test_a_slow_client_gets_all_of_the_answer_that_ends_its_connection(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had two seconds to take it, and to confirm that the connection ends."""
    monkeypatch.setattr(tls_ending, "GOODBYE_S", 0.1)
    with (
        https(certificate) as server,
        slow_client(server) as raw,
        certificate.trusting().wrap_socket(raw, server_hostname="127.0.0.1") as slow,
    ):
        slow.sendall(post_bytes("/v1/completions", SIX_MB, "Connection: close\r\n"))
        wait_until_written(server)
        long_after = server.loop.time() + 0.5
        server.wait_for(lambda: server.loop.time() > long_after)
        assert connections(server) == 1
        assert len(json.loads(take_all(slow))["choices"]) == 256
        server.wait_for(lambda: connections(server) == 0)  # though the client never confirms it


def test_r11_drain_lets_a_slow_client_take_the_rest_of_its_answer(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is written and encrypted, and the request has ended, when the server is told to."""
    queued = noted_at_shutdown(monkeypatch, num_queued)
    with https(certificate) as server, slow_client(server) as raw:
        with certificate.trusting().wrap_socket(raw, server_hostname="127.0.0.1") as slow:
            slow.sendall(post_bytes("/v1/completions", SIX_MB))
            wait_until_written(server)
            stop_and_let_drain(server)
            body = take_all(slow)
        server.join()
    assert len(json.loads(body)["choices"]) == 256
    assert queued == [[0]]


def test_the_server_ends_though_a_handshake_hangs(certificate: Certificate) -> None:
    with https(certificate, header_timeout_s=NEVER_S) as server, server.connect() as connection:
        server.wait_for(lambda: connections(server) == 1)
        server.stop()
        server.join()
        assert ended(connection)


def test_a_restart_reads_the_files_anew(certificate: Certificate, tmp_path: Path) -> None:
    other = Certificate(tmp_path)
    with https(other) as server, pytest.raises(ssl.SSLCertVerificationError):
        secured(server, certificate)
