"""The streaming HTTP client: framing at every split of the bytes, and every way an answer can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from penstock.cli.bench.http_stream import EventParser, ResponseParser, Target, post_stream
from penstock.errors import LinkClosedError, ProtocolError, UsageError, WaitTimeoutError

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7;name=x\r\n, world\r\n0\r\n\r\n"
)
PLAIN = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunked_body_is_whole_at_every_split(size: int) -> None:
    parser = ResponseParser()
    body = b"".join(parser.feed(CHUNKED[at : at + size]) for at in range(0, len(CHUNKED), size))
    assert (parser.status, body, parser.finished) == (200, b"hello, world", True)
    assert parser.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_plain_body_ends_by_its_length(size: int) -> None:
    parser = ResponseParser()
    body = b"".join(parser.feed(PLAIN[at : at + size]) for at in range(0, len(PLAIN), size))
    assert (parser.status, body, parser.finished) == (429, b"full", True)


def test_a_body_without_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 200 OK\r\n\r\nabc") == b"abc"
    assert not parser.finished
    assert parser.end_of_input()


def test_a_cut_answer_is_not_whole() -> None:
    for cut in (b"", b"HTTP/1.1 200", CHUNKED[:-6], PLAIN[:-1]):
        parser = ResponseParser()
        parser.feed(cut)
        assert not parser.end_of_input()


def test_what_is_no_http_is_refused() -> None:
    with pytest.raises(ProtocolError, match="does not speak HTTP"):
        ResponseParser().feed(b"SSH-2.0-OpenSSH\r\n\r\n")
    with pytest.raises(ProtocolError, match="bad chunk size"):
        ResponseParser().feed(CHUNKED.replace(b"5\r\nhello", b"zz\r\nhello"))
    with pytest.raises(ProtocolError, match="header is longer"):
        ResponseParser().feed(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_are_whole_at_every_split(size: int) -> None:
    stream = b': keep-alive\n\ndata: {"a":1}\n\ndata: two\ndata: lines\r\n\r\n'
    stream += b"event: x\n\ndata:[DONE]\n\ndata: half"
    parser = EventParser()
    found = [event for at in range(0, len(stream), size) for event in parser.feed(stream[at : at + size])]
    assert found == [b'{"a":1}', b"two\nlines", b"[DONE]"]


def test_target_is_read_from_a_url() -> None:
    target = Target.parse("http://localhost:8001/v1/", "secret")
    assert (target.host, target.port, target.prefix) == ("localhost", 8001, "")
    assert target.headers["Authorization"] == "Bearer secret"
    assert "secret" not in target.url
    assert Target.parse("127.0.0.1:9").port == 9
    assert Target.parse("http://h/proxy/v1").prefix == "/proxy"
    assert Target.parse("http://[::1]:80").authority == "[::1]:80"
    assert "Authorization" not in Target.parse("http://h").headers
    for bad in ("https://", "http://", "http://h:99999", "ftp://h"):
        with pytest.raises(UsageError):
            Target.parse(bad)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def exchange(answer: Answer, stall_s: float = 30.0) -> tuple[int, bytes]:
    """Post to a server that answers so; (status, body)."""

    async def run() -> tuple[int, bytes]:
        pieces: list[bytes] = []
        ended = asyncio.Event()

        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await answer(reader, writer)
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            ended.set()

        server = await asyncio.start_server(one, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        target = Target(host=host, port=port, prefix="")
        try:
            status = await post_stream(
                target, "/v1/x", b"{}", lambda _, piece: pieces.append(piece), stall_s=stall_s
            )
        finally:
            await ended.wait()
            server.close()
            await server.wait_closed()
        return status, b"".join(pieces)

    return asyncio.run(run())


async def read_request(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2)


def test_one_post_over_a_socket() -> None:
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        for at in range(0, len(CHUNKED), 10):
            writer.write(CHUNKED[at : at + 10])
            await writer.drain()
        writer.close()

    assert exchange(answer) == (200, b"hello, world")
    assert seen[0].startswith(b"POST /v1/x HTTP/1.1\r\n")
    assert seen[0].endswith(b"\r\n\r\n{}")
    assert b"Content-Length: 2\r\n" in seen[0]


def test_a_connection_that_closes_early_is_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED[:-6])
        writer.close()

    with pytest.raises(LinkClosedError, match="closed the connection early"):
        exchange(answer)


def test_a_silent_server_is_given_up() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client goes
        writer.close()

    with pytest.raises(WaitTimeoutError, match="sent nothing for"):
        exchange(answer, stall_s=0.05)


def test_no_server_is_named() -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        server.close()
        await server.wait_closed()
        target = Target(host=host, port=port, prefix="")
        await post_stream(target, "/", b"", lambda _status, _piece: None, stall_s=5)

    with pytest.raises(LinkClosedError, match="no connection to"):
        asyncio.run(run())
